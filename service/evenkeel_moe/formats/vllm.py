"""Reads the load statistics that pull request 41141 of vLLM writes.

Each line of the file is a JSON object. A line whose `record_type` is `eplb_load_stats` holds the
`step`, the tokens `expert_load` (layers, slots) of all ranks, and the map `p2l_map` (layers, slots)
of that step. Lines of other types are skipped.

Source: vllm-project/vllm, pull request 41141, tools/eplb/generate_static_mapping.py.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import (
    as_int,
    as_mapping,
    expert_rows,
    naming,
    parse_json,
    read_text,
)
from evenkeel_moe.formats.trace import Trace, drop_idle_steps

_MAX_STEP = 2**62


def read_load_statistics(path: Path, first_moe_layer: int | None) -> Trace:
    """Read a file of load statistics; steps in rising order.

    Raises:
        InvalidInput, ShapeMismatch: a line is malformed, or lines differ in their sizes.
    """
    steps: dict[int, tuple[NDArray[np.int64], NDArray[np.int32]]] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        with naming(f"line {number}"):
            record = as_mapping(parse_json(line), "the line", ("record_type",), optional=None)
            if record["record_type"] != "eplb_load_stats":
                continue
            step, load, held = _read_record(record)
            if steps and held.shape != next(iter(steps.values()))[1].shape:
                first = next(iter(steps.values()))[1].shape
                raise ShapeMismatch(f"has {held.shape} layers and slots, the first step {first}")
            if step in steps:
                raise InvalidInput(f"step {step} occurs twice: is the file of several servers?")
            steps[step] = (load, held)
    if not steps:
        raise InvalidInput("has no line of the type eplb_load_stats")
    experts = max(int(held.max()) for _, held in steps.values()) + 1
    rows = [_sum_by_expert(*steps[step], experts) for step in sorted(steps)]
    counts, notes = drop_idle_steps(np.stack(rows))
    first_layer = first_moe_layer or 0
    layer_ids = tuple(range(first_layer, first_layer + counts.shape[1]))
    return Trace(counts, layer_ids, path.stem, findings=notes)


def _read_record(record: dict[str, object]) -> tuple[int, NDArray[np.int64], NDArray[np.int32]]:
    """Return (step, (L, S) int64 tokens, (L, S) map) of a line."""
    keys = ("version", "step", "expert_load", "p2l_map")
    as_mapping(record, "the line", ("record_type", *keys), optional=None)
    version = as_int(record["version"], "version")
    if version != 1:
        raise InvalidInput(f"version is {version}, only 1 can be read")
    step = as_int(record["step"], "step", most=_MAX_STEP)
    held = expert_rows(record["p2l_map"], "p2l_map", 0)
    load = expert_rows(record["expert_load"], "expert_load", 0).astype(np.int64)
    if load.shape != held.shape:
        raise ShapeMismatch(f"expert_load is {load.shape}, p2l_map {held.shape}")
    if held.max() >= held.shape[1]:
        raise InvalidInput(
            f"p2l_map has expert {held.max()}, {held.shape[1]} slots cannot hold so many"
        )
    return step, load, held


def _sum_by_expert(
    load: NDArray[np.int64], held: NDArray[np.int32], experts: int
) -> NDArray[np.int64]:
    """Return the (L, E) tokens of each expert."""
    sums = np.zeros((len(load), experts), np.int64)
    for layer, row in enumerate(load):
        np.add.at(sums[layer], held[layer], row)
    return sums
