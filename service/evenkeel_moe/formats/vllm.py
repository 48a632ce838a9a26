"""Reads the load statistics that pull request 41141 of vLLM writes.

Each line of the file is a JSON object. A line whose `record_type` is `eplb_load_stats` holds the
`step`, the tokens `expert_load` (layers, slots) of all ranks, and the map `p2l_map` (layers, slots)
of that step. Lines of other types are skipped.

Source: vllm-project/vllm, pull request 41141, tools/eplb/generate_static_mapping.py.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import (
    as_int,
    as_mapping,
    expert_rows,
    parse_json,
    read_text,
    token_rows,
)
from evenkeel_moe.formats.trace import Trace, assumed, drop_idle_steps, layers_from, left_out
from evenkeel_moe.model.finding import Finding, FindingCode, Severity, spans
from evenkeel_moe.model.placement import EMPTY
from evenkeel_moe.planning.signals.load_findings import MOST_DEVIATION

_MAX_STEP = 2**62
MOST_STARTS = 8
"""Starts of a server in one file up to which nothing else is suspected."""
MOST_GAP = 10
"""Times the usual distance of two steps, beyond which they belong to two starts."""


class _Record(NamedTuple):
    """One line of a file."""

    step: int
    load: NDArray[np.int64]
    """(L, S) [tokens]."""
    held: NDArray[np.int32]
    """(L, S) map, with -1 for empty slots."""


def read_load_statistics(path: Path, first_moe_layer: int | None) -> Trace:
    """Read a file of load statistics.

    A line that cannot be read is left out. Where step numbers begin again, the server was started
    again: all steps are then read in the order of the lines.

    Raises:
        InvalidInput, ShapeMismatch: half of the lines cannot be read, lines differ in their sizes,
            or several servers wrote the file at the same time.
    """
    steps: list[_Record] = []
    broken: dict[int, str] = {}
    lines = 0
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        lines += 1
        try:
            record = as_mapping(parse_json(line), "the line", ("record_type",), optional=None)
            if record["record_type"] != "eplb_load_stats":
                continue
            read = _read_record(record)
        except InvalidInput as error:
            broken[number] = str(error)
            continue
        if steps and (shape := steps[0].held.shape) != read.held.shape:
            raise ShapeMismatch(
                f"line {number} has {read.held.shape} layers and slots, the first step {shape}"
            )
        steps.append(read)
    if 2 * len(broken) >= max(lines, 1):
        number, error_text = next(iter(broken.items()))
        raise InvalidInput(
            f"{len(broken)} of {lines} lines cannot be read; line {number}: {error_text}"
        )
    if not steps:
        raise InvalidInput("has no line of the type eplb_load_stats")
    starts = _starts([record.step for record in steps])
    if not starts:
        steps.sort(key=lambda record: record.step)  # one start, whose lines may be out of order
    experts = max(int(record.held.max()) for record in steps) + 1
    rows = [_sum_by_expert(record, experts) for record in steps]
    counts, idle = drop_idle_steps(np.stack(rows))
    layer_ids, guessed = layers_from(first_moe_layer, counts.shape[1])
    findings = (*_broken_lines(broken, lines), *starts, *idle, *guessed)
    findings += _load_of_empty_slots(steps)
    return Trace(counts, layer_ids, path.stem, findings=findings)


def _broken_lines(broken: dict[int, str], lines: int) -> tuple[Finding, ...]:
    if not broken:
        return ()
    number, error = next(iter(broken.items()))
    what = "lines that cannot be read are left out"
    amount = f"{len(broken)} of {lines} lines; line {number}: {error:.200}"
    return (left_out(what, spans("line", broken), amount),)


def _starts(steps: list[int]) -> tuple[Finding, ...]:
    """Say where step numbers begin again, and not only lines are out of order.

    Raises:
        InvalidInput: they do so too often for restarts of one server.
    """
    again = [at for at, step in enumerate(steps) if at and step <= steps[at - 1]]
    if not again or (len(set(steps)) == len(steps) and _without_gap(steps)):
        return ()
    if len(again) > MOST_STARTS and 10 * len(again) > len(steps):
        raise InvalidInput(
            f"step numbers fall {len(again)} times in {len(steps)} lines, first from"
            f" {steps[again[0] - 1]} to {steps[again[0]]}: is the file of several servers?"
        )
    what = "step numbers begin again, so the server was started again; all steps are read"
    return (assumed(what, f"after {again[0]} steps", f"{len(again)} times"),)


def _without_gap(steps: list[int]) -> bool:
    """Return True if different steps are near each other, as those of one start are."""
    gaps = np.diff(np.sort(np.array(steps)))
    return bool(gaps.max() <= MOST_GAP * np.median(gaps))


def _load_of_empty_slots(steps: list[_Record]) -> tuple[Finding, ...]:
    lost = sum(int(record.load[record.held < 0].sum()) for record in steps)
    if not lost:
        return ()
    total = sum(int(record.load.sum()) for record in steps)
    severity = Severity.DOUBT if lost > MOST_DEVIATION * total else Severity.NOTE
    what = "tokens of slots that the map calls empty are left out"
    amount = f"{lost} of {total} tokens"
    advice = "The map may be older than the counts. Record again"
    return (Finding(FindingCode.ROUTES_MISSING, severity, what, "", amount, advice),)


def _read_record(record: dict[str, object]) -> _Record:
    keys = ("version", "step", "expert_load", "p2l_map")
    as_mapping(record, "the line", ("record_type", *keys), optional=None)
    version = as_int(record["version"], "version")
    if version != 1:
        raise InvalidInput(f"version is {version}, only 1 can be read")
    step = as_int(record["step"], "step", most=_MAX_STEP)
    held = expert_rows(record["p2l_map"], "p2l_map", EMPTY)
    load = token_rows(record["expert_load"], "expert_load")
    if load.shape != held.shape:
        raise ShapeMismatch(f"expert_load is {load.shape}, p2l_map {held.shape}")
    if held.max() >= held.shape[1]:
        raise InvalidInput(
            f"p2l_map has expert {held.max()}, {held.shape[1]} slots cannot hold so many"
        )
    return _Record(step, load, held)


def _sum_by_expert(record: _Record, experts: int) -> NDArray[np.int64]:
    """Return the (L, E) tokens of each expert."""
    sums = np.zeros((len(record.load), experts), np.int64)
    layer, slot = np.nonzero(record.held >= 0)
    np.add.at(sums, (layer, record.held[layer, slot]), record.load[layer, slot])
    return sums
