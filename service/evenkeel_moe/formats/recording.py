"""Writes and reads the folder in which ranks record their loads without a controller.

Each rank writes files of its own, `GENERATION-rank3-000000001024.npz`, named by their first step. A
generation is one start of the group. Ranks number steps alike, so the loads of a step add up.
"""

import io
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import load_npz, naming, token_counts
from evenkeel_moe.formats.trace import Trace, drop_idle_steps, left_out
from evenkeel_moe.formats.writing import smallest, write_file

_NAME = re.compile(r"([0-9a-f]{8})-rank(\d+)-(\d{12})\.npz")
_ARRAYS = ("steps", "counts", "ranks", "topk")


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
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        steps=load.steps,
        counts=smallest(load.counts),
        ranks=np.array(load.num_ranks, np.int32),
        topk=np.array(load.top_k, np.int32),
    )
    draft = path.with_suffix(".tmp")
    write_file(draft, buffer.getvalue())
    draft.replace(path)
    return path


def read_recording(folder: Path, first_moe_layer: int | None, *, from_step: int = 0) -> Trace:
    """Read the newest start of the group in a folder: the steps that every rank has.

    Args:
        folder: of the recording.
        first_moe_layer: number of hidden layers before the first MoE layer; None: 0.
        from_step: first step to read.

    Raises:
        InvalidInput, ShapeMismatch: a file is malformed, a rank is missing, or no step is complete.
    """
    generation, paths, others = _newest(folder)
    sums: dict[int, NDArray[np.int64]] = {}
    seen: dict[int, set[int]] = defaultdict(set)
    shape: tuple[int, ...] | None = None
    ranks = top_k = 0
    for path in paths:
        with naming(path.name):
            load = _read_file(path)
            if shape is None:
                shape, ranks, top_k = load.counts.shape[1:], load.num_ranks, load.top_k
            if load.counts.shape[1:] != shape or load.num_ranks != ranks:
                raise ShapeMismatch(
                    f"is for {load.counts.shape[1:]} layers and experts of {load.num_ranks} ranks,"
                    f" others for {shape} of {ranks}"
                )
            for step, counts in zip(load.steps.tolist(), load.counts, strict=True):
                if step < from_step:
                    continue
                if load.rank in seen[step]:
                    raise InvalidInput(f"step {step} of rank {load.rank} is in two files")
                seen[step].add(load.rank)
                sums[step] = sums[step] + counts if step in sums else counts
    whole = sorted(step for step, by in seen.items() if len(by) == ranks)
    if not whole:
        have = sorted({rank for by in seen.values() for rank in by})
        raise InvalidInput(f"no step is complete: it has steps of ranks {have[:8]} of {ranks}")
    counts, notes = drop_idle_steps(np.stack([sums[step] for step in whole]))
    if len(whole) < len(seen):
        amount = f"{len(seen) - len(whole)} of {len(seen)} steps"
        notes += (left_out("steps that some ranks did not record are left out", amount=amount),)
    if others:
        notes += (left_out(f"the folder has {others} earlier starts, only the newest is read"),)
    first = first_moe_layer or 0
    layer_ids = tuple(range(first, first + counts.shape[1]))
    return Trace(counts, layer_ids, folder.name, top_k, findings=notes)


def newest_step(folder: Path) -> int:
    """Return the newest step that a rank has written in the newest start; -1 without files.

    Raises:
        InvalidInput, ShapeMismatch: the newest file is malformed.
    """
    if not is_recording(folder):
        return -1
    _, paths, _ = _newest(folder)
    with naming(paths[-1].name):
        return int(_read_file(paths[-1]).steps.max(initial=-1))


def _newest(folder: Path) -> tuple[str, list[Path], int]:
    """Return (generation, its files by step, number of other generations) of the newest start."""
    by_start: dict[str, list[Path]] = defaultdict(list)
    for path in folder.glob("*.npz"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            by_start[match[1]].append(path)
    if not by_start:
        raise InvalidInput("holds no file of a recording")

    def written(start: str) -> float:
        return max(path.stat().st_mtime for path in by_start[start])

    newest = max(sorted(by_start), key=written)
    return newest, sorted(by_start[newest], key=_first_step), len(by_start) - 1


def _first_step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[3])


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
    for name in ("ranks", "topk"):
        if arrays[name].size != 1:
            raise ShapeMismatch(f"{name} must be one number, got shape {arrays[name].shape}")
    ranks, rank = int(token_counts(arrays["ranks"], "ranks").reshape(-1)[0]), int(match[2])
    if rank >= ranks:
        raise InvalidInput(f"is of rank {rank}, the group has {ranks} ranks")
    top_k = int(token_counts(arrays["topk"], "topk").reshape(-1)[0])
    return RecordedLoad(rank, ranks, top_k, steps, counts)
