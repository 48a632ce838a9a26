"""Writes and reads the folder in which ranks record their loads without a controller.

Each rank writes files of its own, `GENERATION-rank3-000000001024.npz`, named by their first step. A
generation is one start of the group. Ranks number steps alike, so the loads of a step add up. Each
file says when its start began: the times of files change when a folder is copied.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.array_files import load_npz, one_number, smallest, write_npz
from evenkeel_moe.formats.rank_files import RankFiles, RankSums
from evenkeel_moe.formats.reading import naming, token_counts
from evenkeel_moe.formats.trace import Trace, layers_from, left_out

_NAME = re.compile(r"([0-9a-f]{8})-rank(\d+)-(\d{12})\.npz")
_ARRAYS = ("steps", "counts", "ranks", "topk")
_BEGAN = "began_unix"


@dataclass(frozen=True, eq=False, slots=True)
class RecordedLoad:
    """The loads of some steps of one rank."""

    rank: int
    num_ranks: int
    top_k: int
    steps: NDArray[np.int64]
    """(n,) step numbers, rising."""
    counts: NDArray[np.int64]
    """(n, L, E) [tokens] that this rank routed."""
    began_unix: float = math.nan
    """Unix time at which this start began, by the clock of this rank; NaN if unknown."""


def is_recording(folder: Path) -> bool:
    """Return True if a folder holds files that ranks recorded."""
    return any(_NAME.fullmatch(path.name) for path in folder.glob("*.npz"))


def write_recorded(folder: Path, generation: str, load: RecordedLoad) -> Path:
    """Write the loads of some steps to a file of their own; a reader never sees half of it.

    Args:
        folder: of the recording; it must exist.
        generation: one start of the group, the same on all ranks.
        load: the steps, at least one.

    Raises:
        InvalidInput: the file cannot be written.
    """
    start = re.sub("[^0-9a-f]", "", generation.lower())[:8].ljust(8, "0")
    path = folder / f"{start}-rank{load.rank}-{int(load.steps[0]):012d}.npz"
    draft = path.with_suffix(".tmp")
    arrays = {
        "steps": load.steps,
        "counts": smallest(load.counts),
        "ranks": np.array(load.num_ranks, np.int32),
        "topk": np.array(load.top_k, np.int32),
        _BEGAN: np.array(load.began_unix),
    }
    write_npz(draft, arrays)
    draft.replace(path)
    return path


def read_recording(
    folder: Path, first_moe_layer: int | None, *, from_step: int = 0, start: str | None = None
) -> Trace:
    """Read one start of the group in a folder: the steps that every rank has.

    Args:
        folder: of the recording.
        first_moe_layer: number of hidden layers before the first MoE layer; None: 0.
        from_step: first step to read.
        start: the first 8 digits of its generation; None takes the newest.

    Raises:
        InvalidInput, ShapeMismatch: a file is malformed, a rank is missing, no step is complete, or
            the files do not say which start is the newest.
    """
    paths, others = _files_of(folder, start)
    files, sums = RankFiles(paths, _read_file), RankSums("step")
    first: RecordedLoad | None = None
    for path, load in files:
        with naming(path.name):
            first = first or load
            sizes, wanted = (
                f"{one.counts.shape[1:]} layers and experts of {one.num_ranks} ranks, top-k"
                f" {one.top_k}"
                for one in (load, first)
            )
            if sizes != wanted:
                raise ShapeMismatch(f"is for {sizes}, others for {wanted}")
            for step, counts in zip(load.steps.tolist(), load.counts, strict=True):
                if step >= from_step and not sums.add(load.rank, step, counts):
                    raise InvalidInput(f"step {step} of rank {load.rank} is in two files")
    notes = files.damaged()
    if first is None or not sums.by_rank:
        raise InvalidInput(f"no step is complete: there is none from step {from_step} on")
    counts, missing = sums.total(first.num_ranks)
    notes += missing
    if others:
        notes += (left_out(f"the folder has files of {others} other starts, which are not read"),)
    layer_ids, guessed = layers_from(first_moe_layer, counts.shape[1])
    return Trace(counts, layer_ids, folder.name, first.top_k, findings=notes + guessed)


def newest_step(folder: Path, start: str | None = None) -> tuple[str, int]:
    """Return a start and the newest step that a rank has written in it; -1 without files.

    Args:
        folder: of the recording.
        start: the first 8 digits of its generation; None takes the newest.

    Raises:
        InvalidInput, ShapeMismatch: a file is malformed, or the files do not say which start is the
            newest.
    """
    if not is_recording(folder):
        return "", -1
    paths, _ = _files_of(folder, start)
    with naming(paths[-1].name):
        return paths[-1].name[:8], int(_read_file(paths[-1]).steps.max(initial=-1))


def _files_of(folder: Path, start: str | None) -> tuple[list[Path], int]:
    """Return the files of a start by step, None for the newest, and the number of other starts."""
    by_start: dict[str, list[Path]] = defaultdict(list)
    for path in folder.glob("*.npz"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            by_start[match[1]].append(path)
    if not by_start:
        raise InvalidInput("holds no file of a recording")
    if start is None:
        start = next(iter(by_start)) if len(by_start) == 1 else _newest(by_start)
    if start not in by_start:
        raise InvalidInput(f"there is no start {start:.40}; starts: {', '.join(sorted(by_start))}")
    # The name ends with the first step, of as many digits in all files.
    return sorted(by_start[start], key=lambda path: path.name[-16:]), len(by_start) - 1


def _newest(by_start: Mapping[str, Sequence[Path]]) -> str:
    """Return the start that began last, by what the files say; their own times are not trusted.

    Raises:
        InvalidInput: the files of a start do not say when it began, or two began together.
    """
    began: dict[str, float] = {}
    steps: dict[str, set[int]] = {start: set() for start in by_start}
    for start, paths in by_start.items():
        # A file that is cut says nothing; the others of its start do.
        for path, arrays in RankFiles(paths, lambda path: load_npz(path, ("steps", _BEGAN))):
            told = arrays.get(_BEGAN, np.array(math.nan))
            if told.dtype.kind == "f" and told.size == 1 and np.isfinite(told):
                began[start] = min(began.get(start, math.inf), float(told.reshape(-1)[0]))
            with naming(path.name):
                numbers = token_counts(arrays.get("steps", np.zeros(0)), "steps")
            steps[start].update(numbers.reshape(-1).tolist())
    last = [start for start, at in began.items() if at == max(began.values())]
    if len(began) == len(by_start) and len(last) == 1:
        return last[0]
    named = ", ".join(f"{start} ({len(steps[start])} steps)" for start in sorted(steps))
    raise InvalidInput(
        f"holds {len(by_start)} starts, and the files do not say which began last: {named:.400}."
        " Name one as start"
    )


def _read_file(path: Path) -> RecordedLoad:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    arrays = load_npz(path, _ARRAYS)
    missing = [name for name in _ARRAYS if name not in arrays]
    if missing:
        raise InvalidInput(f"has no array {', '.join(missing)}")
    steps, counts = token_counts(arrays["steps"], "steps"), token_counts(arrays["counts"], "counts")
    if counts.ndim != 3 or 0 in counts.shape or steps.shape != counts.shape[:1]:
        raise ShapeMismatch(f"has {steps.shape} steps and {counts.shape} counts")
    ranks, top_k = one_number(arrays, "ranks"), one_number(arrays, "topk")
    assert ranks is not None and top_k is not None
    if (rank := int(match[2])) >= ranks:
        raise InvalidInput(f"is of rank {rank}, the group has {ranks} ranks")
    return RecordedLoad(rank, ranks, top_k, steps, counts)
