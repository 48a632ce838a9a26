"""Foci: seeds in which a few rare (state, event) pairs occur often.

By chance alone some pairs pass only a few times in ten million events. A seed with a focus runs one
plan after another with few faults besides the causes of its pairs, so that machines often enter the
states of those pairs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Focus:
    """A set of rare pairs, and what makes them frequent."""

    pairs: str
    """`machine state event[, event]`, several separated by `; `."""
    share: int
    """The seeds of a thousand with this focus; enough for its pairs to pass often."""
    causes: tuple

    @property
    def aims(self) -> list[tuple[str, str, str]]:
        """The pairs as (machine, state, event)."""
        found = []
        for part in self.pairs.split("; "):
            machine, state, events = part.split(" ", 2)
            found += [(machine, state, event) for event in events.split(", ")]
        return found

    def arrange(self, world) -> None:
        """Prepare a new world for this focus."""
        world.note(f"focus: {self.pairs}")
        world.hurry()
        world.flaws = 0.0
        world.fleet.misconfigured = False
        for cause in self.causes:
            cause(world)


def focus(pairs: str, share: int, *causes) -> Focus:
    """Return a focus of these pairs, share and causes."""
    return Focus(pairs, share, causes)
