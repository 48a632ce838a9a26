"""Recorded loads from four sources: our npz, SGLang's recorder, TensorRT-LLM's statistics folders."""

import io
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats import sglang
from evenkeel_moe.formats.reading import (
    as_int,
    as_mapping,
    naming,
    parse_json,
    read_text,
    token_counts,
)
from evenkeel_moe.formats.safetensors import read_tensors
from evenkeel_moe.formats.trace import Trace, drop_idle_steps
from evenkeel_moe.formats.writing import write_file

__all__ = ["read_trace", "write_trace"]

MAX_ARRAY_BYTES = 16 << 30
"""Unpacked size from which an npz member is taken for a decompression bomb."""


def read_trace(path: Path | str, *, first_moe_layer: int | None = None) -> Trace:
    """Read a trace, told apart by what the path is.

    `*.npz` is our own; `*.pt` is an SGLang recorder dump (modes stat and stat_approx); a folder with `*.pt`
    files holds SGLang's per-pass dumps, one per rank; a folder with `meta_info.json` is a TensorRT-LLM
    statistics folder.

    Args:
        path: file or folder.
        first_moe_layer: hidden layers before the first MoE layer. None takes what the file says: our npz its
            `layer_ids` (0.. without), SGLang every row that ever counted a token, TensorRT-LLM its keys.

    Raises:
        InvalidInput, ShapeMismatch: malformed, with the numbers and the file's name.
    """
    path = Path(path)
    with naming(path):
        if path.is_dir():
            if (path / "meta_info.json").exists():
                return _read_tensorrt_llm(path, first_moe_layer)
            if any(path.glob("*.pt")):
                return sglang.read_passes(path, first_moe_layer)
            raise InvalidInput("a folder with neither meta_info.json nor *.pt files")
        if not path.exists():
            raise InvalidInput("no such file or folder")
        if path.suffix == ".npz":
            return _read_npz(path, first_moe_layer)
        if path.suffix == ".pt":
            return sglang.read_stat(path, first_moe_layer)
        raise InvalidInput(
            f"a trace is *.npz, *.pt or a folder, not *{path.suffix or ' without a suffix'}"
        )


def _read_npz(path: Path, first_moe_layer: int | None) -> Trace:
    arrays = _load_npz(path, ("T", "layer_ids", "topk", "tokens", "S", "mix", "domains"))
    if "T" not in arrays:
        raise InvalidInput("has no array T (steps, layers, experts)")
    counts = token_counts(arrays["T"], "T")
    if counts.ndim != 3 or 0 in counts.shape:
        raise ShapeMismatch(
            f"T must be (steps, layers, experts), none of them 0, got {counts.shape}"
        )
    if first_moe_layer is not None:
        layer_ids = tuple(range(first_moe_layer, first_moe_layer + counts.shape[1]))
    elif "layer_ids" in arrays:
        layer_ids = tuple(
            int(i) for i in token_counts(arrays["layer_ids"], "layer_ids").reshape(-1)
        )
    else:
        layer_ids = tuple(range(counts.shape[1]))
    mix, domains = arrays.get("mix"), arrays.get("domains")
    if mix is None or domains is None or mix.dtype.kind != "f" or domains.dtype.kind != "U":
        mix, domains = None, np.array([], "U1")
    top_k = arrays.get("topk")
    if top_k is not None and top_k.size != 1:
        raise ShapeMismatch(f"topk must be one number, got shape {top_k.shape}")
    return Trace(
        counts,
        layer_ids,
        path.stem,
        None if top_k is None else int(token_counts(top_k, "topk").reshape(-1)[0]),
        token_counts(arrays["tokens"], "tokens") if "tokens" in arrays else None,
        token_counts(arrays["S"], "S") if "S" in arrays else None,
        None if mix is None else mix.astype(np.float64),
        tuple(str(name) for name in domains.reshape(-1)),
    )


def _load_npz(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The named arrays a file has; pickles are never opened."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.filename.removesuffix(".npy") in names and info.file_size > MAX_ARRAY_BYTES:
                    raise InvalidInput(
                        f"{info.filename} unpacks to {info.file_size} bytes, at most {MAX_ARRAY_BYTES} are read"
                    )
        with np.load(path, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name]) for name in names if name in archive.files}
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise InvalidInput(f"not a readable npz file: {error}") from error
    # numpy reports a broken header by any of these, with the offending text in the message.
    except (ValueError, KeyError, TypeError, SyntaxError, OverflowError, MemoryError) as error:
        raise InvalidInput(
            f"holds an array that cannot be read: {str(error).splitlines()[0]:.200}"
        ) from error


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write our own npz; `read_trace` gives the same trace back.

    Counts are stored in the smallest type that holds them. Equal traces give equal bytes.
    """
    arrays: dict[str, NDArray[Any]] = {
        "T": _smallest(trace.counts),
        "layer_ids": np.array(trace.layer_ids, np.int32),
    }
    if trace.top_k is not None:
        arrays["topk"] = np.array(trace.top_k, np.int32)
    if trace.tokens is not None:
        arrays["tokens"] = trace.tokens.astype(np.int64)
    if trace.source is not None:
        arrays["S"] = _smallest(trace.source)
    if trace.mix is not None:
        arrays["mix"] = trace.mix.astype(np.float32)
        arrays["domains"] = np.array(trace.domains)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **_any(arrays))
    write_file(path, buffer.getvalue())


def _any(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """savez_compressed declares a flag among its keywords; arrays by name do not type-check against it."""
    return dict(arrays)


def _smallest(counts: NDArray[np.int64]) -> NDArray[Any]:
    most = int(counts.max())
    dtype = np.uint16 if most < 2**16 else np.uint32 if most < 2**32 else np.int64
    return np.asarray(counts.astype(dtype))


_RANK_FILE = re.compile(r"rank(\d+)\.safetensors")
_KEY = re.compile(r"(\d+)_(\d+)")


def _read_tensorrt_llm(folder: Path, first_moe_layer: int | None) -> Trace:
    """Sum a statistics folder over its ranks; keys are `{iteration}_{layer}`, layers counted from the first."""
    if first_moe_layer is not None:
        raise InvalidInput("the folder names its layers by absolute id: leave first_moe_layer out")
    with naming("meta_info.json"):
        text = read_text(folder / "meta_info.json")
        keys = ("num_experts", "num_experts_per_token")
        meta = as_mapping(parse_json(text), "the file", keys, optional=None)
        experts = as_int(meta["num_experts"], "num_experts", 1)
        top_k = as_int(meta["num_experts_per_token"], "num_experts_per_token", 1)
    ranks = sorted(
        (int(match[1]), file)
        for file in folder.iterdir()
        if (match := _RANK_FILE.fullmatch(file.name))
    )
    if [rank for rank, _ in ranks] != list(range(len(ranks))) or not ranks:
        raise InvalidInput(
            f"rank files must be rank0..rank{{R-1}}, found {[rank for rank, _ in ranks]}"
        )
    per_rank: list[NDArray[np.int64]] = []
    axes: tuple[list[int], list[int]] = ([], [])
    for rank, file in ranks:
        with naming(file.name):
            found, counts = _stacked(read_tensors(file), experts)
            if rank == 0:
                axes = found
            # A rank may have ended before it wrote the last iterations; nothing else may differ.
            shared = min(len(found[0]), len(axes[0]))
            if found[1] != axes[1] or found[0][:shared] != axes[0][:shared]:
                raise ShapeMismatch(
                    f"has {len(found[0])} iterations x {len(found[1])} layers"
                    f" ({found[0][0]}..{found[0][-1]}), rank 0 has {len(axes[0])} x {len(axes[1])}"
                    f" ({axes[0][0]}..{axes[0][-1]})"
                )
            per_rank.append(counts)
    least, most = min(map(len, per_rank)), max(map(len, per_rank))
    source = np.stack([counts[:least] for counts in per_rank], axis=1)
    counts, notes = drop_idle_steps(source.sum(axis=1))
    if least < most:
        notes += (
            f"ranks recorded {least} to {most} iterations: cut to the first {least}, which all of them have",
        )
    return Trace(
        counts,
        tuple(axes[1]),
        folder.name,
        top_k,
        source=source[source.any(axis=(1, 2, 3))],
        notes=notes,
    )


def _stacked(
    tensors: Mapping[str, NDArray[np.generic]], experts: int
) -> tuple[tuple[list[int], list[int]], NDArray[np.int64]]:
    """((iterations, layers), (T, L, E)) of one rank's tensors; every pair must be there."""
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
    return (steps, layers), stacked
