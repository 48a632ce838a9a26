"""Writes docs/machines.md from the tables: `python -m evenkeel_moe.protocol.diagram`."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from evenkeel_moe.protocol.transitions import (
    CONTROL,
    CONTROL_MOVES,
    COORDINATOR,
    COORDINATOR_MOVES,
    PARTICIPANT,
    PARTICIPANT_MOVES,
)

_MACHINES: tuple[
    tuple[str, str, Mapping[tuple[Any, type], str], Mapping[Any, Mapping[type, Any]]], ...
] = (
    ("Participant", "one deployment on one rank", PARTICIPANT, PARTICIPANT_MOVES),
    ("Coordinator", "one wave, on the leader", COORDINATOR, COORDINATOR_MOVES),
    ("Control", "one deployment on one controller replica", CONTROL, CONTROL_MOVES),
)


def page() -> str:
    """Return the Markdown page: for each machine a diagram of its moves and its whole table."""
    parts = [
        "# The state machines",
        "",
        "Written from `service/evenkeel_moe/protocol/transitions.py` by",
        "`python -m evenkeel_moe.protocol.diagram`; a test checks that both agree. An arrow shows",
        "which events may lead from one state to another. A cell of a table names the method that",
        "handles the event. *ignored*: the event can occur and changes nothing. *illegal*: only a",
        "bug of ours can cause the event, and it raises an error. *violation*: no correct peer",
        "sends it, and it raises an alert.",
    ]
    for name, subject, table, moves in _MACHINES:
        parts += ["", f"## {name}: {subject}", "", *_diagram(moves), "", *_table(table)]
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


def _table(table: Mapping[tuple[StrEnum, type], str]) -> list[str]:
    states = list(dict.fromkeys(state for state, _ in table))
    events = list(dict.fromkeys(event for _, event in table))
    lines = ["| event | " + " | ".join(states) + " |", "|---" * (len(states) + 1) + "|"]
    for event in events:
        cells = [table[state, event].lstrip("_") for state in states]
        lines.append(f"| {event.__name__} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    sys.stdout.write(page())
