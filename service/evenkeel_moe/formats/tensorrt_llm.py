"""Reads the expert statistics that TensorRT-LLM records.

A folder holds `meta_info.json` and one safetensors file per rank, `rank{r}.safetensors`. Its
tensors are named `{iteration}_{layer}`, with hidden layers counted from the first, and hold (E,)
counts.

Source: NVIDIA/TensorRT-LLM, report_load_statistics.py.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.rank_files import RankFiles, in_every_part, ranks_read
from evenkeel_moe.formats.reading import (
    MAX_EXPERTS,
    as_int,
    as_mapping,
    naming,
    parse_json,
    read_text,
    token_counts,
)
from evenkeel_moe.formats.trace import Trace, without_idle_steps
from evenkeel_moe.model.finding import Finding

_RANK_FILE = re.compile(r"rank(\d+)\.safetensors")
_KEY = re.compile("(0|[1-9][0-9]{0,17})_(0|[1-9][0-9]{0,8})")


def read_statistics(folder: Path, first_moe_layer: int | None) -> Trace:
    """Read a statistics folder and sum it over its ranks.

    Raises:
        InvalidInput, ShapeMismatch: the files are malformed, or `first_moe_layer` is given.
    """
    if first_moe_layer is not None:
        raise InvalidInput("the folder names its layers by absolute id: leave first_moe_layer out")
    with naming("meta_info.json"):
        text = read_text(folder / "meta_info.json")
        keys = ("num_experts", "num_experts_per_token")
        meta = as_mapping(parse_json(text), "the file", keys, optional=None)
        experts = as_int(meta["num_experts"], "num_experts", 1, MAX_EXPERTS)
        top_k = as_int(meta["num_experts_per_token"], "num_experts_per_token", 1)
    ranks = _rank_files(folder)
    files = RankFiles(list(ranks), _read_tensors)
    counted: dict[int, dict[int, NDArray[np.int64]]] = {}
    layers_of: dict[int, list[int]] = {}
    findings: tuple[Finding, ...] = ()
    for file, tensors in files:
        rank = ranks[file]
        with naming(file.name):
            layers_of[rank], counted[rank], cut = _by_iteration(tensors, experts)
            findings += cut
    layers, lacking = in_every_part(layers_of, "rank", "layer", needed=True)
    for rank, by_step in counted.items():
        rows = np.flatnonzero(np.isin(layers_of[rank], layers))
        counted[rank] = {step: counts[rows] for step, counts in by_step.items()}
    findings += (*files.damaged(), *lacking)
    whole, uneven = in_every_part(counted, "rank", "iteration")
    source = np.array([[counted[rank][step] for rank in counted] for step in whole], np.int64)
    findings += (*uneven, *ranks_read(counted))
    complete = max(counted) + 1 == len(counted)
    trace = Trace(
        source.sum(axis=1),
        tuple(layers),
        folder.name,
        top_k,
        source=source if complete else None,
        findings=findings,
        rank_files=len(counted),
    )
    return without_idle_steps(trace)


def _rank_files(folder: Path) -> dict[Path, int]:
    """Return the rank of each file, in the order of the ranks."""
    named = ((_RANK_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    ranks = {int(match[1]): file for match, file in named if match}
    if not ranks:
        raise InvalidInput("has no file rank0.safetensors, rank1.safetensors, ...")
    return {file: rank for rank, file in sorted(ranks.items())}


def _read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Return every tensor of a safetensors file by name."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise InvalidInput(f"not a readable safetensors file: {error}") from error
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror or error}") from error
    # The library has no errors of its own for types and shapes that numpy does not have.
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInput(f"holds a tensor that numpy cannot hold: {error!s:.200}") from error


def _by_iteration(
    tensors: Mapping[str, NDArray[Any]], experts: int
) -> tuple[list[int], dict[int, NDArray[np.int64]], tuple[Finding, ...]]:
    """Return the layers, the (L, E) counts of each iteration that has all of them, and a note.

    Raises:
        InvalidInput, ShapeMismatch: a tensor is malformed, or most iterations lack layers.
    """
    by_layer: dict[int, dict[int, NDArray[np.int64]]] = defaultdict(dict)
    for name, values in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise InvalidInput(f"tensor {name!r:.60} is not named iteration_layer")
        if values.shape != (experts,):
            raise ShapeMismatch(f"tensor {name!r} must be ({experts},), got {values.shape}")
        by_layer[int(match[2])][int(match[1])] = token_counts(values, f"tensor {name!r}")
    if not by_layer:
        raise InvalidInput("holds no tensor")
    layers = sorted(by_layer)
    whole, cut = in_every_part(by_layer, "layer", "iteration")
    stacked = {step: np.stack([by_layer[layer][step] for layer in layers]) for step in whole}
    return layers, stacked, cut
