"""The page of the three machines, drawn from their tables: `python -m evenkeel_moe.protocol.diagram`."""

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

__all__ = ["page"]

_MACHINES: tuple[
    tuple[str, str, Mapping[tuple[Any, type], str], Mapping[Any, Mapping[type, Any]]], ...
] = (
    ("Participant", "one deployment on one rank", PARTICIPANT, PARTICIPANT_MOVES),
    ("Coordinator", "one wave, on the leader", COORDINATOR, COORDINATOR_MOVES),
    ("Control", "one deployment on one controller replica", CONTROL, CONTROL_MOVES),
)


def page() -> str:
    """Markdown: for each machine its moves as a diagram and its whole table."""
    parts = [
        "# The machines of the switch",
        "",
        "Drawn from `service/evenkeel_moe/protocol/transitions.py` by `python -m evenkeel_moe.protocol.diagram`; a test holds the two",
        "together. A cell names the method that takes the event; *ignored* may happen and changes nothing, *illegal* is a",
        "bug of ours and raises, *violation* is what no correct peer sends and alerts. Arrows are what may move a state.",
    ]
    for name, what, table, moves in _MACHINES:
        parts += ["", f"## {name}: {what}", "", *_diagram(moves), "", *_table(table)]
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
