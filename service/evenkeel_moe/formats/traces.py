"""Reads recorded loads of every supported kind, and writes our own npz files."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats import recording, routed_experts, sglang, tensorrt_llm, vllm
from evenkeel_moe.formats.reading import load_npz, naming, token_counts
from evenkeel_moe.formats.trace import Trace
from evenkeel_moe.formats.writing import smallest, write_file


def read_trace(path: Path | str, *, first_moe_layer: int | None = None) -> Trace:
    """Read a trace; the path tells which kind it is.

    `*.npz` is our own format, or has an array `routed_experts` of tokens. `*.pt` is a dump of
    SGLang's recorder (modes stat and stat_approx), or has such a tensor. `*.jsonl` has vLLM's load
    statistics. A folder with `*.pt` files holds SGLang's per-pass dumps, one for each rank, one
    with `meta_info.json` TensorRT-LLM statistics, and one with `*-rank0-*.npz` what our plugins
    recorded.

    Args:
        path: file or folder.
        first_moe_layer: number of hidden layers before the first MoE layer. None takes it from the
            file: our npz has `layer_ids` (0.. if missing), SGLang has every row that ever counted a
            token, TensorRT-LLM has its keys.

    Raises:
        InvalidInput, ShapeMismatch: the trace is malformed; the message names the file.
    """
    path = Path(path)
    with naming(path):
        if path.is_dir():
            if (path / "meta_info.json").exists():
                return tensorrt_llm.read_statistics(path, first_moe_layer)
            if any(path.glob("*.pt")):
                return sglang.read_passes(path, first_moe_layer)
            if recording.is_recording(path):
                return recording.read_recording(path, first_moe_layer)
            raise InvalidInput(
                "a folder with neither meta_info.json nor *.pt files nor a recording of our plugins"
            )
        if not path.exists():
            raise InvalidInput("no such file or folder")
        if path.suffix == ".npz":
            return _read_npz(path, first_moe_layer)
        if path.suffix == ".pt":
            return _read_pt(path, first_moe_layer)
        if path.suffix == ".jsonl":
            return vllm.read_load_statistics(path, first_moe_layer)
        raise InvalidInput(
            "a trace is *.npz, *.pt, *.jsonl or a folder,"
            f" not *{path.suffix or ' without a suffix'}"
        )


def _read_pt(path: Path, first_moe_layer: int | None) -> Trace:
    content = sglang.load_dump(path)
    if routed_experts.KEY not in content:
        return sglang.read_stat(path, content, first_moe_layer)
    arrays = {
        name: sglang.as_array(content[name], name)
        for name in routed_experts.NAMES
        if name in content
    }
    return routed_experts.read_routed_experts(arrays, first_moe_layer, path.stem)


def _read_npz(path: Path, first_moe_layer: int | None) -> Trace:
    own = ("T", "layer_ids", "topk", "tokens", "S", "mix", "domains")
    arrays = load_npz(path, (*own, *routed_experts.NAMES))
    if routed_experts.KEY in arrays:
        return routed_experts.read_routed_experts(arrays, first_moe_layer, path.stem)
    if "T" not in arrays:
        raise InvalidInput("has no array T (steps, layers, experts)")
    counts = token_counts(arrays["T"], "T")
    if counts.ndim != 3 or 0 in counts.shape:
        raise ShapeMismatch(
            f"T must be (steps, layers, experts), none of them 0, got {counts.shape}"
        )
    first, layers = first_moe_layer or 0, counts.shape[1]
    layer_ids = tuple(range(first, first + layers))
    if first_moe_layer is None and "layer_ids" in arrays:
        layer_ids = tuple(token_counts(arrays["layer_ids"], "layer_ids").reshape(-1).tolist())
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


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write our own npz file, from which `read_trace` returns the same trace.

    Counts are stored in the smallest type that holds them. Equal traces give equal bytes.
    """
    # Any: savez_compressed declares a flag among its keywords, which arrays by name do not match.
    arrays: dict[str, Any] = {
        "T": smallest(trace.counts),
        "layer_ids": np.array(trace.layer_ids, np.int32),
    }
    if trace.top_k is not None:
        arrays["topk"] = np.array(trace.top_k, np.int32)
    if trace.tokens is not None:
        arrays["tokens"] = trace.tokens.astype(np.int64)
    if trace.source is not None:
        arrays["S"] = smallest(trace.source)
    if trace.mix is not None:
        arrays["mix"] = trace.mix.astype(np.float32)
        arrays["domains"] = np.array(trace.domains)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_file(path, buffer.getvalue())
