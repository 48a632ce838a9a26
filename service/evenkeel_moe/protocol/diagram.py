"""Writes docs/machines.md from the tables: `python -m evenkeel_moe.protocol.diagram`."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from evenkeel_moe.protocol.transitions import CONTROL_MOVES, COORDINATOR_MOVES, PARTICIPANT_MOVES

_MACHINES: tuple[tuple[str, str, Mapping[Any, Mapping[type, Any]]], ...] = (
    ("Participant", "one deployment on one rank", PARTICIPANT_MOVES),
    ("Coordinator", "one wave, on the leader", COORDINATOR_MOVES),
    ("Control", "one deployment on one controller replica", CONTROL_MOVES),
)


def page() -> str:
    """Return the Markdown page: for each machine a diagram of its moves."""
    parts = [
        "# The state machines",
        "",
        "Written by `python -m evenkeel_moe.protocol.diagram`; a test checks that it agrees with",
        "the code. An arrow shows which events may lead from one state to another. The tables in",
        "`service/evenkeel_moe/protocol/transitions.py` name the method for every state and event.",
        "*ignored*: the event can occur and changes nothing. *illegal*: only a bug of ours can",
        "cause it, and it raises an error. *violation*: no correct peer sends it, and it raises an",
        "alert.",
    ]
    for name, subject, moves in _MACHINES:
        parts += ["", f"## {name}: {subject}", "", *_diagram(moves)]
    return "\n".join(parts) + "\n"


def _diagram(moves: Mapping[StrEnum, Mapping[type, tuple[StrEnum, ...]]]) -> list[str]:
    labels: dict[tuple[str, str], list[str]] = {}
    for state, events in moves.items():
        for event, targets in events.items():
            for target in targets:
                labels.setdefault((state, target), []).append(event.__name__)
    arrows = [
        f"    {start} --> {end}: {', '.join(events)}" for (start, end), events in labels.items()
    ]
    return ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(moves))}", *arrows, "```"]


if __name__ == "__main__":
    sys.stdout.write(page())
