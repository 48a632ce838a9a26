"""Reads the dumps of SGLang's expert distribution recorder.

Rows are hidden layers, including dense ones, which never count a token. In the modes stat and
stat_approx the steps are a ring buffer whose write position is not in the file. A dump empties the
buffer and keeps the position. So unless the buffer is full, its unwritten part may lie anywhere;
the oldest step follows it. Steps that routed nothing look like the unwritten part.

Source: sgl-project/sglang 0.5.23, python/sglang/srt/eplb/expert_distribution.py and
eplb_simulator/reader.py.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.array_files import as_array, tensor_counts
from evenkeel_moe.formats.rank_files import RankSums, missing_ranks
from evenkeel_moe.formats.reading import (
    MAX_CELLS,
    as_int,
    as_list,
    check_dimensions,
    check_size,
    naming,
    token_counts,
)
from evenkeel_moe.formats.trace import Trace, assumed, drop_idle_steps, missing_parts, moe_rows
from evenkeel_moe.model.finding import Finding, FindingCode, Severity, spans

Dump = dict[Any, Any]
"""The content of a *.pt file."""
Dumps = Iterable[tuple[Path, Dump]]
"""Path and content of the files of all ranks."""
TOTALS = assumed("totals of all steps are read as one step, so no verdict is possible")
"""The note about a file without steps."""


def read_stat(name: str, content: Dump, first_moe_layer: int | None) -> Trace:
    """Read the content of a dump of mode stat or stat_approx.

    Its `logical_count` is (steps, hidden layers, E), summed over ranks.

    Raises:
        InvalidInput, ShapeMismatch: the dump is malformed.
    """
    if "logical_count" not in content:
        known = ", ".join(sorted(map(str, content)))
        hint = "; to read per-pass dumps, give their folder" if "records" in content else ""
        raise InvalidInput(f"has no logical_count, only: {known:.200}{hint}")
    counts = tensor_counts(content["logical_count"], "logical_count")
    totals = counts.ndim == 2
    counts = counts[None] if totals else counts
    check_dimensions(counts, "logical_count", "steps, hidden layers, experts")
    counts, notes = (counts, (TOTALS,)) if totals else _in_order(counts)
    return _trace(counts, first_moe_layer, name, notes)


def read_passes(name: str, dumps: Dumps, first_moe_layer: int | None) -> Trace:
    """Read dumps of mode per_pass or per_token, one file per rank, and sum each pass over ranks.

    Physical counts are converted to logical ones with the map in the files, which is the newest.
    Passes recorded under an older map would be misread, so record without rebalancing.

    Args:
        name: of the trace.
        dumps: at least one.
        first_moe_layer: number of hidden layers before the first MoE layer; None takes every layer
            that ever routed a token.

    Raises:
        InvalidInput, ShapeMismatch: a dump is malformed, or ranks disagree.
    """
    passes = RankSums("pass")
    placed: NDArray[np.int64] | None = None
    for path, content in dumps:
        with naming(path.name):
            held = _read_map(content)
            if placed is not None and not np.array_equal(placed, held):
                raise ShapeMismatch(f"its map {held.shape} is not the map of the other files")
            placed = held
            for record in as_list(content["records"], "records"):
                _add_record(passes, record, held.shape)
    if placed is None or not passes.by_rank:
        raise InvalidInput("its *.pt files hold no records")
    physical, findings = passes.total()
    counts = np.zeros((*physical.shape[:2], int(placed.max()) + 1), np.int64)
    for layer, row in enumerate(placed):
        for slot, expert in enumerate(row):
            counts[:, layer, expert] += physical[:, layer, slot]
    trace = _trace(counts, first_moe_layer, name, findings)
    return replace(trace, rank_files=len(passes.by_rank))


def _read_map(content: Dump) -> NDArray[np.int64]:
    """Return the (H, S) experts of all slots in a per-pass dump."""
    for key in ("records", "last_physical_to_logical_map"):
        if key not in content:
            raise InvalidInput(f"has no {key}, so it is not a per-pass dump")
    held = tensor_counts(content["last_physical_to_logical_map"], "map")
    check_dimensions(held, "its map", "layers, slots")
    check_size(held.shape, MAX_CELLS, "its map of layers x slots")
    if held.max() >= held.shape[1]:
        raise InvalidInput(
            f"its map has expert {held.max()}, {held.shape[1]} slots cannot hold so many"
        )
    return held


def _add_record(passes: RankSums, record: object, shape: tuple[int, ...]) -> None:
    keys = {"forward_pass_id", "rank", "global_physical_count"}
    if not isinstance(record, dict) or not keys <= set(record):
        raise InvalidInput(
            f"record {len(passes.sums)} lacks forward_pass_id, rank or global_physical_count"
        )
    key = as_int(record["forward_pass_id"], "forward_pass_id", most=2**62)
    rank = as_int(record["rank"], "rank")
    counts = token_counts(
        as_array(record["global_physical_count"], "count"), f"pass {key} rank {rank}"
    )
    if counts.shape != shape:
        raise ShapeMismatch(f"pass {key} rank {rank} counts {counts.shape}, the map is {shape}")
    if not passes.add(rank, key, counts):
        raise InvalidInput(f"pass {key} has two records of rank {rank}")


def is_of_a_rank(content: Dump) -> bool:
    """Return True if a *.pt file holds the totals of one rank, and says of which."""
    return "ep_rank" in content


def add_totals(name: str, files: Dumps, first_moe_layer: int | None) -> Trace:
    """Add up the totals that each rank wrote to a *.pt file of its own.

    Such a file holds `ep_rank`, `ep_size` and `logical_count`, the (hidden layers, E) choices of
    the rank's own tokens. A missing rank is refused: nothing else makes up for it.

    Args:
        name: of the trace.
        files: at least one.
        first_moe_layer: as in `read_passes`.

    Raises:
        InvalidInput, ShapeMismatch: a file is malformed, or files do not fit each other.
    """
    found: dict[int, Path] = {}
    total: NDArray[np.int64] | None = None
    size = 0
    for path, content in files:
        with naming(path.name):
            rank, ranks, counts = _read_totals(content)
            size = size or ranks
            if ranks != size:
                raise ShapeMismatch(f"is of {ranks} ranks, other files are of {size}")
            if rank in found:
                raise InvalidInput(
                    f"is of rank {rank} as {found[rank].name} is: leave one of them out"
                )
            if total is not None and total.shape != counts.shape:
                raise ShapeMismatch(
                    f"counts {counts.shape} layers and experts, others {total.shape}"
                )
            found[rank] = path
            total = counts if total is None else total + counts
    assert total is not None
    counts, _ = drop_idle_steps(total[None])
    missing: tuple[Finding, ...] = ()
    if lacking := missing_ranks(found, size):
        what, amount = "the totals of some ranks are missing", f"{len(lacking)} of {size} ranks"
        amount = f"{amount}; read: {spans('rank', found)}"
        advice = "Give the folder with the files of all ranks"
        where = spans("rank", lacking)
        missing = (missing_parts(Severity.REFUSAL, what, where, amount, advice),)
    trace = _trace(counts, first_moe_layer, name, missing)
    return replace(trace, findings=(*trace.findings, TOTALS))


def _read_totals(content: Dump) -> tuple[int, int, NDArray[np.int64]]:
    """Return (rank, ranks of the group, (H, E) tokens) of a file."""
    lacks = [key for key in ("ep_rank", "ep_size", "logical_count") if key not in content]
    if lacks:
        raise InvalidInput(f"has no {', '.join(lacks)}, so it does not hold the totals of a rank")
    ranks = as_int(content["ep_size"], "ep_size", 1)
    rank = as_int(content["ep_rank"], "ep_rank", most=ranks - 1)
    counts = tensor_counts(content["logical_count"], "logical_count")
    check_dimensions(counts, "logical_count", "hidden layers, experts")
    return rank, ranks, counts


def _in_order(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], tuple[Finding, ...]]:
    """Return the steps of the ring buffer from the oldest on, without the unwritten ones."""
    busy = np.asarray(counts.any(axis=(1, 2)), np.bool_)
    if busy.all():
        full = "the buffer is full and does not say which step is the oldest: taken as stored"
        return counts, (_order(full, f"{len(counts)} steps"),)
    if not busy.any():
        return drop_idle_steps(counts)
    # The runs of empty slots around the ring: the first slot of each, and the busy slot after it.
    first = np.flatnonzero(~busy & np.roll(busy, 1))
    after = np.flatnonzero(busy & ~np.roll(busy, 1))
    if after[0] < first[0]:
        after = np.roll(after, -1)
    lengths = (after - first) % len(busy)
    # If the longest run touches an end of the buffer, the steps are stored in order.
    at_end = (first == 0) | (first + lengths >= len(busy))
    if lengths[at_end].max(initial=0) > lengths[~at_end].max(initial=0):
        return drop_idle_steps(counts)
    if len(lengths) > 1:
        rows, notes = drop_idle_steps(counts)
        ambiguous = (
            "the unwritten part of the buffer cannot be told from steps that routed nothing, so"
            " the order is ambiguous: taken as stored"
        )
        return rows, (*notes, _order(ambiguous, f"empty in {len(lengths)} places"))
    rows, notes = drop_idle_steps(np.roll(counts, -int(after[0]), axis=0))
    unrolled = (
        f"the only empty slots are assumed to be the unwritten part of the buffer, so its oldest"
        f" step is in slot {after[0]}"
    )
    return rows, (*notes, _order(unrolled, f"slots {first[0]}..{after[0] - 1}"))


def _order(what: str, amount: str) -> Finding:
    return Finding(FindingCode.STEP_ORDER, Severity.NOTE, what, amount=amount)


def _trace(
    counts: NDArray[np.int64], first_moe_layer: int | None, name: str, findings: tuple[Finding, ...]
) -> Trace:
    rows, layer_ids, shown = moe_rows(counts, first_moe_layer)
    hidden = counts.shape[1]
    return Trace(rows, layer_ids, name, findings=findings + shown, num_hidden_layers=hidden)
