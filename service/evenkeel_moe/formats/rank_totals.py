"""Reads the totals that each rank of an engine writes to a file of its own.

Such a *.pt file holds `ep_rank`, `ep_size` and `logical_count`, the (hidden layers, E) choices of
the rank's own tokens. The load of the model is the sum over the files of all ranks.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import as_int, naming, token_counts
from evenkeel_moe.formats.torch_files import as_array
from evenkeel_moe.formats.trace import Trace, assumed, drop_idle_steps, missing_ranks, moe_rows
from evenkeel_moe.model.finding import Finding, FindingCode, Severity, spans

TOTALS = assumed("totals of all steps are read as one step, so no verdict is possible")
"""The note about a file without steps."""
_KEYS = ("ep_rank", "ep_size", "logical_count")


def is_of_a_rank(content: dict[Any, Any]) -> bool:
    """Return True if a *.pt file says of which rank it is."""
    return "ep_rank" in content


def add_totals(
    name: str, files: Iterable[tuple[Path, dict[Any, Any]]], first_moe_layer: int | None
) -> Trace:
    """Add up the totals of ranks. A missing rank is refused: nothing else makes up for it.

    Args:
        name: of the trace.
        files: path and content of each file, at least one.
        first_moe_layer: number of hidden layers before the first MoE layer; None takes every layer
            that ever routed a token.

    Raises:
        InvalidInput, ShapeMismatch: a file is malformed, or files do not fit each other.
    """
    found: dict[int, tuple[Path, NDArray[np.int64]]] = {}
    size = 0
    for path, content in files:
        with naming(path.name):
            rank, ranks, counts = _read(content)
            size = size or ranks
            if ranks != size:
                raise ShapeMismatch(f"is of {ranks} ranks, other files are of {size}")
            if rank in found:
                raise InvalidInput(
                    f"is of rank {rank} as {found[rank][0].name} is: leave one of them out"
                )
            if found and (other := next(iter(found.values()))[1].shape) != counts.shape:
                raise ShapeMismatch(f"counts {counts.shape} layers and experts, others {other}")
            found[rank] = (path, counts)
    total = np.sum([counts for _, counts in found.values()], axis=0)
    counts, _ = drop_idle_steps(total[None])
    rows, layer_ids, shown = moe_rows(counts, first_moe_layer)
    findings = (*_missing(found, size), *shown, TOTALS)
    hidden = counts.shape[1]
    return Trace(rows, layer_ids, name, findings=findings, num_hidden_layers=hidden)


def _missing(found: Collection[int], size: int) -> tuple[Finding, ...]:
    if len(found) == size:
        return ()
    missing = missing_ranks(found, size)
    return (
        Finding(
            FindingCode.PARTS_MISSING,
            Severity.REFUSAL,
            "the totals of some ranks are missing",
            spans("rank", missing),
            f"{len(missing)} of {size} ranks; read: {spans('rank', found)}",
            "Give the folder with the files of all ranks",
        ),
    )


def _read(content: dict[Any, Any]) -> tuple[int, int, NDArray[np.int64]]:
    """Return (rank, ranks of the group, (H, E) tokens) of a file."""
    lacks = [key for key in _KEYS if key not in content]
    if lacks:
        raise InvalidInput(f"has no {', '.join(lacks)}, so it does not hold the totals of a rank")
    ranks = as_int(content["ep_size"], "ep_size", 1)
    rank = as_int(content["ep_rank"], "ep_rank", most=ranks - 1)
    counts = token_counts(as_array(content["logical_count"], "logical_count"), "logical_count")
    if counts.ndim != 2 or 0 in counts.shape:
        raise ShapeMismatch(
            f"logical_count must be (hidden layers, experts), none of them 0, got {counts.shape}"
        )
    return rank, ranks, counts
