"""Reads recordings of which each rank of a group wrote files of its own.

A step counts if every rank has it. Files that cannot be read, ranks without files and steps that
only some ranks have are left out and named, as long as most of the recording remains.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import naming
from evenkeel_moe.formats.trace import assumed, drop_idle_steps, left_out, missing_parts
from evenkeel_moe.model.finding import Finding, Severity, plural, spans

_Content = TypeVar("_Content")
MOST_RANKS = 1 << 16
"""Ranks of a recording, beyond which a number of ranks is damaged."""


class RankFiles(Generic[_Content]):
    """The files of a recording, read one at a time: all at once may not fit in memory."""

    def __init__(self, paths: Sequence[Path], read: Callable[[Path], _Content]) -> None:
        self._paths = list(paths)
        self._read = read
        self._broken: dict[str, str] = {}
        """The error of each file that is damaged, by its name."""

    def __iter__(self) -> Iterator[tuple[Path, _Content]]:
        """Yield the content of each file that can be read."""
        for path in list(self._paths):
            try:
                with naming(path.name):
                    held = self._read(path)
            except InvalidInput as error:
                if path.exists():
                    self._broken[path.name] = str(error)
                else:  # An engine that still records deletes its oldest file.
                    self._paths.remove(path)
            else:
                yield path, held

    def damaged(self) -> tuple[Finding, ...]:
        """Return a doubt that names the damaged files among those read.

        Raises:
            InvalidInput: half of the files or more are damaged.
        """
        if not self._broken:
            return ()
        first = next(iter(self._broken.values()))
        few = f"{len(self._broken)} of {len(self._paths)} files"
        if 2 * len(self._broken) >= len(self._paths):
            raise InvalidInput(f"{few} are damaged; {first}")
        names = ", ".join(list(self._broken)[:4])
        what, advice = "files that cannot be read are left out", "Copy them again"
        return (missing_parts(Severity.DOUBT, what, names, f"{few}; {first:.300}", advice),)


class RankSums:
    """The counts of each step, added up over the ranks as their files are read.

    Args:
        noun: what the recording calls a step.
    """

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self.by_rank: dict[int, set[int]] = defaultdict(set)
        """The steps of each rank."""
        self.sums: dict[int, NDArray[np.int64]] = {}
        """The counts of each step over all ranks."""

    def add(self, rank: int, step: int, counts: NDArray[np.int64]) -> bool:
        """Add the counts of a step of a rank; return False if they were added before."""
        if step in self.by_rank[rank]:
            return False
        self.by_rank[rank].add(step)
        self.sums[step] = self.sums[step] + counts if step in self.sums else counts
        return True

    def total(self, num_ranks: int | None = None) -> tuple[NDArray[np.int64], tuple[Finding, ...]]:
        """Return (T, ...) counts of the steps that every rank has, in order, and what is missing.

        Args:
            num_ranks: ranks of the group; None if no file says it.

        Raises:
            InvalidInput: less than half of the steps are whole, or none routed a token.
        """
        whole, uneven = in_every_part(dict(sorted(self.by_rank.items())), "rank", self.noun)
        counts, idle = drop_idle_steps(np.stack([self.sums[step] for step in whole]))
        return counts, (*uneven, *idle, *ranks_read(self.by_rank, num_ranks))


def in_every_part(
    by_part: Mapping[int, Collection[int]], part: str, noun: str, *, needed: bool = False
) -> tuple[list[int], tuple[Finding, ...]]:
    """Return what every part of a recording has, and a finding that names what some parts lack.

    Args:
        by_part: what each part has, such as the steps of each rank.
        part: what the recording calls a part.
        noun: what it calls one of the things that parts have.
        needed: True if a part without some of them puts the recording in doubt.

    Returns:
        what all parts have in rising order, findings.

    Raises:
        ShapeMismatch: less than half is in every part, or half if all is needed.
    """
    every = set().union(*by_part.values())
    whole = every.intersection(*by_part.values())
    if whole == every:
        return sorted(whole), ()
    lacking, nouns = spans(noun, every - whole), plural(noun)
    fewest = min(by_part, key=lambda each: len(by_part[each]))
    most = max(by_part, key=lambda each: len(by_part[each]))
    amount = (
        f"{len(every - whole)} of {len(every)} {nouns}; {part} {fewest} has"
        f" {len(by_part[fewest])}, {part} {most} {len(by_part[most])}"
    )
    if 2 * len(whole) < len(every) + needed or not whole:
        raise ShapeMismatch(
            f"most {nouns} are not on all {len(by_part)} {plural(part)}: {lacking}, {amount}. Take"
            " the files of one recording of all ranks, and of one pipeline stage"
        )
    what = f"{nouns} that some {plural(part)} lack are left out"
    if needed:
        advice = f"Record again if all {plural(part)} have these {nouns}"
        return sorted(whole), (missing_parts(Severity.DOUBT, what, lacking, amount, advice),)
    return sorted(whole), (left_out(what, lacking, amount),)


def missing_ranks(found: Collection[int], size: int) -> list[int]:
    """Return the ranks of a group of which nothing was found.

    Raises:
        InvalidInput: the group is larger than any. Files name ranks, and are not trusted.
    """
    if size > MOST_RANKS:
        raise InvalidInput(f"is of {size} ranks, at most {MOST_RANKS} are read")
    return sorted(set(range(size)).difference(found))


def ranks_read(ranks: Collection[int], size: int | None = None) -> tuple[Finding, ...]:
    """Say which ranks' files were read; a recording of files by rank may lack some.

    `size` is the number of ranks of the group; None if no file says it.
    """
    known = max(ranks) + 1 if size is None else size
    missing = missing_ranks(ranks, known)
    if missing:
        half = size is not None and 2 * len(missing) >= size
        grade = Severity.REFUSAL if half else Severity.DOUBT
        what = "some ranks have no file that can be read, so their tokens are missing"
        amount = f"{len(missing)} of {known} ranks"
        advice = "Copy the files of all machines into the folder"
        return (missing_parts(grade, what, spans("rank", missing), amount, advice),)
    if size is not None:
        return ()
    what = "these are taken to be all ranks, because no file says how many there were"
    return (assumed(what, spans("rank", ranks)),)
