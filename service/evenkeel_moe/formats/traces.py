"""Reads recorded loads of every supported kind, and writes our own npz files."""

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import recording, routed_experts, sglang, tensorrt_llm, vllm
from evenkeel_moe.formats.array_files import (
    as_array,
    load_npz,
    load_torch,
    one_number,
    smallest,
    write_npz,
)
from evenkeel_moe.formats.rank_files import RankFiles
from evenkeel_moe.formats.reading import (
    as_mapping,
    check_dimensions,
    naming,
    parse_json,
    token_counts,
)
from evenkeel_moe.formats.trace import Trace, layers_from, without_idle_steps
from evenkeel_moe.model.finding import Finding, FindingCode, Severity, judge_findings
from evenkeel_moe.planning.signals.load_findings import check_recording

_MOST_FINDINGS = 1000
"""Findings that are read from one file."""


def read_trace(
    path: Path | str,
    *,
    first_moe_layer: int | None = None,
    accept: Collection[str] = (),
    start: str | None = None,
) -> Trace:
    """Read a trace and check it against itself; the path tells which kind it is.

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
        accept: codes of findings that a person has looked at; they become notes.
        start: of a recording of our plugins with several starts, the one to read; None: the newest.

    Raises:
        InvalidInput, ShapeMismatch: the trace is malformed, or a finding refuses it; the message
            names the file.
    """
    path = Path(path)
    with naming(path):
        return check_trace(_read(path, first_moe_layer, start), accept)


def check_trace(trace: Trace, accept: Collection[str] = ()) -> Trace:
    """Return a trace with what its counts show; every reader's trace passes through here.

    Args:
        trace: with the findings of its reader.
        accept: codes of findings that a person has looked at; they become notes.

    Raises:
        InvalidInput: a finding refuses the trace, or a code is unknown.
    """
    shown = check_recording(trace.counts, trace.layer_ids, trace.top_k)
    # A file of our own repeats what its counts showed when it was written.
    known = {(each.code, each.what, each.where): each for each in (*trace.findings, *shown)}
    return replace(trace, findings=judge_findings(known.values(), accept))


def _read(path: Path, first_moe_layer: int | None, start: str | None) -> Trace:
    if start is not None and not (path.is_dir() and recording.is_recording(path)):
        raise InvalidInput("only a folder that our plugins recorded has starts: leave start out")
    if path.is_dir():
        if (path / "meta_info.json").exists():
            return tensorrt_llm.read_statistics(path, first_moe_layer)
        if any(path.glob("*.pt")):
            return _read_dumps(path, first_moe_layer)
        if recording.is_recording(path):
            return recording.read_recording(path, first_moe_layer, start=start)
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
        f"a trace is *.npz, *.pt, *.jsonl or a folder, not *{path.suffix or ' without a suffix'}"
    )


def _read_dumps(folder: Path, first_moe_layer: int | None) -> Trace:
    files = RankFiles(sorted(folder.glob("*.pt")), load_torch)
    dumps = list(files)
    findings = files.damaged()
    totals = any(sglang.is_of_a_rank(content) for _, content in dumps)
    read = sglang.add_totals if totals else sglang.read_passes
    trace = read(folder.name, dumps, first_moe_layer)
    return replace(trace, findings=(*findings, *trace.findings))


def _read_pt(path: Path, first_moe_layer: int | None) -> Trace:
    content = load_torch(path)
    if sglang.is_of_a_rank(content):
        return sglang.add_totals(path.stem, [(path, content)], first_moe_layer)
    if routed_experts.KEY not in content:
        return sglang.read_stat(path.stem, content, first_moe_layer)
    arrays = {
        name: as_array(content[name], name) for name in routed_experts.NAMES if name in content
    }
    return routed_experts.read_routed_experts(arrays, first_moe_layer, path.stem)


def _read_npz(path: Path, first_moe_layer: int | None) -> Trace:
    own = ("T", "layer_ids", "topk", "tokens", "S", "hidden", "rank_files", "findings")
    small = ("layer_ids", "tokens", "findings")
    arrays = load_npz(path, (*own, *routed_experts.NAMES), small=small)
    if routed_experts.KEY in arrays:
        return routed_experts.read_routed_experts(arrays, first_moe_layer, path.stem)
    if "T" not in arrays:
        raise InvalidInput("has no array T (steps, layers, experts)")
    counts = token_counts(arrays["T"], "T")
    check_dimensions(counts, "T", "steps, layers, experts")
    layer_ids, guessed = layers_from(None, counts.shape[1])
    findings = _read_findings(arrays.get("findings"))
    if first_moe_layer is not None:
        layer_ids, _ = layers_from(first_moe_layer, counts.shape[1])
        findings = tuple(each for each in findings if each not in guessed)
    elif "layer_ids" in arrays:
        layer_ids = tuple(token_counts(arrays["layer_ids"], "layer_ids").reshape(-1).tolist())
    else:
        findings += guessed
    trace = Trace(
        counts,
        layer_ids,
        path.stem,
        one_number(arrays, "topk"),
        token_counts(arrays["tokens"], "tokens") if "tokens" in arrays else None,
        token_counts(arrays["S"], "S") if "S" in arrays else None,
        findings,
        one_number(arrays, "hidden"),
        one_number(arrays, "rank_files"),
    )
    return without_idle_steps(trace)


def _read_findings(lines: NDArray[Any] | None) -> tuple[Finding, ...]:
    """Return the findings with which a trace was written."""
    if lines is None:
        return ()
    if lines.dtype.kind != "U" or lines.size > _MOST_FINDINGS:
        raise InvalidInput(
            f"findings must be at most {_MOST_FINDINGS} texts, are {lines.size} of {lines.dtype}"
        )
    found = []
    keys = ("code", "severity", "what", "where", "amount", "advice")
    for line in lines.reshape(-1).tolist():
        row = as_mapping(parse_json(line), "a finding", keys, ("share",))
        share = row.get("share")
        try:
            texts = [str(row[key]) for key in keys[2:]]
            known = None if share is None else float(share)
            code, severity = FindingCode(row["code"]), Severity(row["severity"])
            found.append(Finding(code, severity, *texts, share=known))
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"a finding cannot be read: {error}") from error
    return tuple(found)


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write our own npz file, from which `read_trace` returns the same steps with load.

    Counts are stored in the smallest type that holds them. Equal traces give equal bytes.
    """
    told = [json.dumps(asdict(each)) for each in trace.findings]
    arrays: dict[str, tuple[Any, DTypeLike | None]] = {
        "T": (smallest(trace.counts), None),
        "layer_ids": (trace.layer_ids, np.int32),
        "topk": (trace.top_k, np.int32),
        "tokens": (trace.tokens, np.int64),
        "S": (None if trace.source is None else smallest(trace.source), None),
        "hidden": (trace.num_hidden_layers, np.int32),
        "rank_files": (trace.rank_files, np.int32),
        "findings": (told or None, None),
    }
    known = {name: (value, dtype) for name, (value, dtype) in arrays.items() if value is not None}
    write_npz(path, {name: np.array(value, dtype) for name, (value, dtype) in known.items()})
