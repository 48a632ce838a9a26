"""Reads the expert statistics that TensorRT-LLM records.

A folder holds `meta_info.json` and one safetensors file per rank, `rank{r}.safetensors`. Its
tensors are named `{iteration}_{layer}`, with hidden layers counted from the first, and hold (E,)
counts.

Source: NVIDIA/TensorRT-LLM, report_load_statistics.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import (
    as_int,
    as_mapping,
    naming,
    parse_json,
    read_text,
    token_counts,
)
from evenkeel_moe.formats.trace import Trace, drop_idle_steps, left_out

_RANK_FILE = re.compile(r"rank(\d+)\.safetensors")
_KEY = re.compile(r"(\d+)_(\d+)")


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
        experts = as_int(meta["num_experts"], "num_experts", 1)
        top_k = as_int(meta["num_experts_per_token"], "num_experts_per_token", 1)
    per_rank: list[NDArray[np.int64]] = []
    steps: list[int] = []
    layers: list[int] = []
    for rank, file in enumerate(_rank_files(folder)):
        with naming(file.name):
            found_steps, found_layers, counts = _stacked(_read_tensors(file), experts)
            if rank == 0:
                steps, layers = found_steps, found_layers
            # A rank may have stopped before it wrote the last iterations; nothing else may differ.
            shared = min(len(found_steps), len(steps))
            if found_layers != layers or found_steps[:shared] != steps[:shared]:
                raise ShapeMismatch(
                    f"has {len(found_steps)} iterations x {len(found_layers)} layers"
                    f" ({found_steps[0]}..{found_steps[-1]}), rank 0 has {len(steps)} x"
                    f" {len(layers)} ({steps[0]}..{steps[-1]})"
                )
            per_rank.append(counts)
    least, most = min(map(len, per_rank)), max(map(len, per_rank))
    source = np.stack([counts[:least] for counts in per_rank], axis=1)
    counts, notes = drop_idle_steps(source.sum(axis=1))
    if least < most:
        amount = f"of {least} to {most} iterations the first {least} are read"
        notes += (left_out("ranks recorded different numbers of iterations", amount=amount),)
    busy = source[source.any(axis=(1, 2, 3))]
    return Trace(counts, tuple(layers), folder.name, top_k, source=busy, findings=notes)


def _rank_files(folder: Path) -> list[Path]:
    """Return the files of the ranks 0..R-1, in order."""
    files = {
        int(match[1]): file
        for file in folder.iterdir()
        if (match := _RANK_FILE.fullmatch(file.name))
    }
    if not files or sorted(files) != list(range(len(files))):
        raise InvalidInput(f"rank files must be rank0..rank{{R-1}}, found {sorted(files)}")
    return [files[rank] for rank in range(len(files))]


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


def _stacked(
    tensors: Mapping[str, NDArray[Any]], experts: int
) -> tuple[list[int], list[int], NDArray[np.int64]]:
    """Return the iterations, the layers and the (T, L, E) counts of one rank.

    Raises:
        InvalidInput, ShapeMismatch: a tensor is malformed, or a tensor is missing.
    """
    by_key: dict[tuple[int, int], NDArray[np.int64]] = {}
    for name, values in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise InvalidInput(f"tensor {name!r:.60} is not named iteration_layer")
        if values.shape != (experts,):
            raise ShapeMismatch(f"tensor {name!r} must be ({experts},), got {values.shape}")
        by_key[int(match[1]), int(match[2])] = token_counts(values, f"tensor {name!r}")
    steps = sorted({step for step, _ in by_key})
    layers = sorted({layer for _, layer in by_key})
    if not by_key or len(by_key) != len(steps) * len(layers):
        raise ShapeMismatch(
            f"{len(by_key)} tensors for {len(steps)} iterations x {len(layers)} layers"
            f" = {len(steps) * len(layers)}"
        )
    stacked = np.array([[by_key[step, layer] for layer in layers] for step in steps], np.int64)
    return steps, layers, stacked
