"""The worlds that are searched: the small ones of `make test`, and one for each mutant."""

from tests.explore.invariants import UNEXPECTED
from tests.explore.search import Search
from tests.explore.world import Size, World
from tests.sim.kit import Kit


def search(kit: Kit, size: Size, *, mutant: bool = False, **limits) -> Search:
    """Return the search of a world; of a mutant it ends at the first broken invariant.

    An error that a mutant raises ends a way and does not count: no invariant caught it.
    """
    if mutant:
        limits |= {"stop_at_first": True, "skipped": frozenset({UNEXPECTED})}
    return Search(World(kit, size), **limits)


_LIGHT = frozenset({"lose", "duplicate", "write", "move", "checksum", "transfer", "silence"})
SMALL_WORLDS = (
    Size(2, 2, 0),
    Size(3, 2, 0),
    Size(2, 1, 1, _LIGHT),
    Size(2, 1, 1, frozenset({"resize"})),
)


def _small(*kinds: str, waves: int = 1, faults: int = 1) -> Size:
    return Size(2, waves, faults, frozenset(kinds))


MUTANT_WORLDS = {
    "R1": _small("move", "crash rank", waves=0, faults=2),
    "R3": _small("move"),
    "R3b": _small("move"),
    "R3c": _small(faults=0),
    "R4": _small("reload"),
    "R5": _small(faults=0),
    "R6": _small("silence"),
    "R7": _small("deadline"),
    "R7b": _small("checksum", waves=2),
    "R8": _small("gate"),
    "R9": _small("silence"),
    "R10": _small("transfer"),
    "R12": _small("crash leader"),
    "R14": _small("deadline"),
    "R15": _small("move"),
}
"""The smallest world in which each mutant is caught."""

NOT_APPLICABLE = {
    "R2": "the store never loses its term",
    "R2b": "it takes a leader that stops between a write and its messages",
    "R9b": "all ranks have the same K",
    "R5b": "no leader sends ranks different Prepares of one wave",
    "R9c": "no agent fails",
    "R11": "no slots are pooled",
    "R12b": "no record is wrong for it here: the simulation compares each Commit with the store",
    "R13": "it takes three leaders around a wave, in a world too large to be exhausted",
    "R16": "no plan waits for an approval while the epoch moves",
    "R17": "every plan is sound",
    "R17b": "every plan is sound",
    "R17c": "no leader sends a Prepare that is wrong in itself",
}
"""The mutants that cannot occur in these worlds, and why."""
