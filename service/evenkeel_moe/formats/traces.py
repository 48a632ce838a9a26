"""Reads recorded loads of every supported kind, and writes our own npz files."""

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats import sglang, tensorrt_llm
from evenkeel_moe.formats.reading import naming, token_counts
from evenkeel_moe.formats.trace import Trace
from evenkeel_moe.formats.writing import write_file

MAX_ARRAY_BYTES = 16 << 30
"""Unpacked size above which a member of an npz file is refused as a decompression bomb."""


def read_trace(path: Path | str, *, first_moe_layer: int | None = None) -> Trace:
    """Read a trace; the path tells which kind it is.

    `*.npz` is our own format. `*.pt` is a dump of SGLang's recorder (modes stat and stat_approx). A
    folder with `*.pt` files holds SGLang's per-pass dumps, one for each rank. A folder with
    `meta_info.json` holds TensorRT-LLM statistics.

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


def _load_npz(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Return those of the named arrays that a file has; pickles are never opened."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.filename.removesuffix(".npy") in names and info.file_size > MAX_ARRAY_BYTES:
                    raise InvalidInput(
                        f"{info.filename} unpacks to {info.file_size} bytes,"
                        f" at most {MAX_ARRAY_BYTES} are read"
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
    # numpy raises any of these for a broken header, with the wrong text in the message.
    except (ValueError, KeyError, TypeError, SyntaxError, OverflowError, MemoryError) as error:
        raise InvalidInput(
            f"holds an array that cannot be read: {str(error).splitlines()[0]:.200}"
        ) from error


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write our own npz file, from which `read_trace` returns the same trace.

    Counts are stored in the smallest type that holds them. Equal traces give equal bytes.
    """
    # Any: savez_compressed declares a flag among its keywords, which arrays by name do not match.
    arrays: dict[str, Any] = {
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
    np.savez_compressed(buffer, **arrays)
    write_file(path, buffer.getvalue())


def _smallest(counts: NDArray[np.int64]) -> NDArray[Any]:
    most = int(counts.max())
    dtype = np.uint16 if most < 2**16 else np.uint32 if most < 2**32 else np.int64
    return np.asarray(counts.astype(dtype))
