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
from evenkeel_moe.formats.rank_totals import TOTALS
from evenkeel_moe.formats.reading import (
    MAX_CELLS,
    as_int,
    as_list,
    check_size,
    naming,
    token_counts,
)
from evenkeel_moe.formats.torch_files import as_array
from evenkeel_moe.formats.trace import Trace, drop_idle_steps, moe_rows, ranks_read, whole_steps
from evenkeel_moe.model.finding import Finding, FindingCode, Severity


def read_stat(path: Path, content: dict[Any, Any], first_moe_layer: int | None) -> Trace:
    """Read the content of a dump of mode stat or stat_approx.

    Its `logical_count` is (steps, hidden layers, E), summed over ranks.

    Raises:
        InvalidInput, ShapeMismatch: the dump is malformed, or torch is not installed.
    """
    if "logical_count" not in content:
        known = ", ".join(sorted(map(str, content)))
        hint = "; to read per-pass dumps, give their folder" if "records" in content else ""
        raise InvalidInput(f"has no logical_count, only: {known:.200}{hint}")
    counts = token_counts(as_array(content["logical_count"], "logical_count"), "logical_count")
    if counts.ndim == 2:
        return _trace(
            _checked(counts[None], "logical_count"), first_moe_layer, path.stem, (TOTALS,)
        )
    counts, notes = _in_order(_checked(counts, "logical_count"))
    return _trace(counts, first_moe_layer, path.stem, notes)


def read_passes(
    name: str, dumps: Iterable[tuple[Path, dict[Any, Any]]], first_moe_layer: int | None
) -> Trace:
    """Read dumps of mode per_pass or per_token, one file per rank, and sum each pass over ranks.

    Physical counts are converted to logical ones with the map in the files, which is the newest.
    Passes recorded under an older map would be misread, so record without rebalancing.

    Args:
        name: of the trace.
        dumps: path and content of each file.
        first_moe_layer: number of hidden layers before the first MoE layer; None takes every layer
            that ever routed a token.

    Raises:
        InvalidInput, ShapeMismatch: a dump is malformed, or ranks disagree.
    """
    passes: dict[int, dict[int, NDArray[np.int64]]] = {}
    placed: NDArray[np.int64] | None = None
    for path, content in dumps:
        with naming(path.name):
            for key in ("records", "last_physical_to_logical_map"):
                if key not in content:
                    raise InvalidInput(f"has no {key}, so it is not a per-pass dump")
            held = token_counts(as_array(content["last_physical_to_logical_map"], "map"), "map")
            if held.ndim != 2 or 0 in held.shape:
                raise ShapeMismatch(
                    f"its map must be (layers, slots), none of them 0, got {held.shape}"
                )
            check_size(held.shape, MAX_CELLS, "its map of layers x slots")
            if placed is not None and not np.array_equal(placed, held):
                raise ShapeMismatch(f"its map {held.shape} is not the map of the other files")
            if held.max() >= held.shape[1]:
                raise InvalidInput(
                    f"its map has expert {held.max()}, {held.shape[1]} slots cannot hold so many"
                )
            placed = held
            for record in as_list(content["records"], "records"):
                _add_record(passes, record, held.shape)
    if placed is None or not passes:
        raise InvalidInput("its *.pt files hold no records")
    by_rank = {
        rank: [key for key, records in passes.items() if rank in records]
        for rank in sorted(set().union(*passes.values()))
    }
    whole, findings = whole_steps(by_rank, "pass")
    physical = np.stack(
        [sum(passes[key].values(), np.zeros(placed.shape, np.int64)) for key in whole]
    )
    counts = np.zeros((*physical.shape[:2], int(placed.max()) + 1), np.int64)
    for layer, row in enumerate(placed):
        for slot, expert in enumerate(row):
            counts[:, layer, expert] += physical[:, layer, slot]
    counts, idle = drop_idle_steps(counts)
    findings += (*idle, *ranks_read(by_rank))
    trace = _trace(counts, first_moe_layer, name, findings)
    return replace(trace, rank_files=len(by_rank))


def _add_record(
    passes: dict[int, dict[int, NDArray[np.int64]]], record: object, shape: tuple[int, ...]
) -> None:
    if not isinstance(record, dict) or not {
        "forward_pass_id",
        "rank",
        "global_physical_count",
    } <= set(record):
        raise InvalidInput(
            f"record {len(passes)} lacks forward_pass_id, rank or global_physical_count"
        )
    key = as_int(record["forward_pass_id"], "forward_pass_id", most=2**62)
    rank = as_int(record["rank"], "rank")
    counts = token_counts(
        as_array(record["global_physical_count"], "count"), f"pass {key} rank {rank}"
    )
    if counts.shape != shape:
        raise ShapeMismatch(f"pass {key} rank {rank} counts {counts.shape}, the map is {shape}")
    by_rank = passes.setdefault(key, {})
    if rank in by_rank:
        raise InvalidInput(f"pass {key} has two records of rank {rank}")
    by_rank[rank] = counts


def _checked(counts: NDArray[np.int64], what: str) -> NDArray[np.int64]:
    if counts.ndim != 3 or 0 in counts.shape:
        raise ShapeMismatch(
            f"{what} must be (steps, hidden layers, experts), none of them 0, got {counts.shape}"
        )
    return counts


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
    counts: NDArray[np.int64],
    first_moe_layer: int | None,
    name: str,
    findings: tuple[Finding, ...],
) -> Trace:
    rows, layer_ids, shown = moe_rows(counts, first_moe_layer)
    hidden = counts.shape[1]
    return Trace(rows, layer_ids, name, findings=findings + shown, num_hidden_layers=hidden)
