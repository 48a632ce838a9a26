"""Defines a trace: the recorded loads of one deployment, independent of the recording tool."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import check_dimensions, check_layer_ids
from evenkeel_moe.model.finding import Finding, FindingCode, Severity, spans
from evenkeel_moe.planning.signals.load_findings import check_hidden_layers


@dataclass(frozen=True, eq=False)
class Trace:
    """The routed tokens per step, MoE layer and logical expert, with facts about the recording."""

    counts: NDArray[np.int64]
    """(T, L, E) [tokens], steps in order."""
    layer_ids: tuple[int, ...]
    """(L,) index of each row among the model's hidden layers, dense layers included; rising."""
    name: str = "trace"
    top_k: int | None = None
    """Experts per token; None if the recording does not have it."""
    tokens: NDArray[np.int64] | None = None
    """(T,) tokens of each step."""
    source: NDArray[np.int64] | None = None
    """(T, R', L, E) [tokens] - the same counts by source rank."""
    findings: tuple[Finding, ...] = ()
    """What the reader assumed, left out or found to be missing, and what the counts show."""
    num_hidden_layers: int | None = None
    """Rows of the model, dense layers included; None if the recording does not have it."""
    rank_files: int | None = None
    """Ranks whose files were added up, where no file says how many there were; else None."""

    def __post_init__(self) -> None:
        counts = self.counts
        check_dimensions(counts, "counts", "steps, layers, experts")
        if counts.min() < 0:
            step, layer, expert = np.argwhere(counts < 0)[0]
            raise InvalidInput(
                f"{int((counts < 0).sum())} negative counts, first: {counts[step, layer, expert]}"
                f" in step {step} layer {layer} expert {expert}"
            )
        # The float64 of plans holds whole numbers up to this one, and sums in int64 would wrap.
        if (total := counts.sum(dtype=np.float64)) > 2**53:
            raise InvalidInput(f"{total:g} tokens in all, at most 2^53 are read")
        check_layer_ids(self.layer_ids, self.num_layers)
        hidden = self.num_hidden_layers
        if hidden is not None and hidden <= self.layer_ids[-1]:
            raise InvalidInput(f"{hidden} hidden layers, but counts of layer {self.layer_ids[-1]}")
        if self.top_k is not None and not 1 <= self.top_k <= self.num_experts:
            raise InvalidInput(
                f"top-k is {self.top_k}, must be 1..{self.num_experts}, the experts of a layer"
            )
        self._check_tokens()
        self._check_source()

    def _check_tokens(self) -> None:
        if self.tokens is None:
            return
        if self.tokens.shape != (self.num_steps,):
            raise ShapeMismatch(f"tokens must be ({self.num_steps},), got {self.tokens.shape}")
        most = self.counts.max(axis=(1, 2), initial=0)
        if (above := np.flatnonzero(most > self.tokens)).size:
            step = above[0]
            raise InvalidInput(
                f"{len(above)} steps have an expert with more counts than tokens, though a token"
                f" chooses an expert once; first: step {step} has {self.tokens[step]} tokens and"
                f" {most[step]} counts of an expert"
            )
        if self.top_k is None:
            return
        sums = self.counts.sum(axis=2)
        wrong = np.argwhere(sums != self.tokens[:, None] * self.top_k)
        if len(wrong):
            step, layer = wrong[0]
            raise InvalidInput(
                f"{len(wrong)} (step, layer) sums are not tokens x top-k, first: step {step}"
                f" layer {layer} counts {sums[step, layer]}, {self.tokens[step]} tokens x"
                f" {self.top_k} = {self.tokens[step] * self.top_k}"
            )

    def _check_source(self) -> None:
        if self.source is None:
            return
        want = (self.num_steps, self.num_layers, self.num_experts)
        have = self.source.shape
        if self.source.ndim != 4 or (have[0], *have[2:]) != want or have[1] < 1:
            raise ShapeMismatch(
                f"source counts must be ({want[0]}, ranks, {want[1]}, {want[2]}), got {have}"
            )
        if self.source.min() < 0:
            raise InvalidInput(f"{int((self.source < 0).sum())} negative source counts")
        wrong = np.argwhere(self.source.sum(axis=1) != self.counts)
        if len(wrong):
            step, layer, expert = wrong[0]
            raise InvalidInput(
                f"{len(wrong)} source counts do not sum to the counts, first: step {step}"
                f" layer {layer} expert {expert}: {self.source[step, :, layer, expert].sum()}"
                f" against {self.counts[step, layer, expert]}"
            )

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return int(self.counts.shape[0])

    @property
    def num_layers(self) -> int:
        """L, the number of MoE layers."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """E, the number of logical experts."""
        return int(self.counts.shape[2])


left_out = partial(Finding, FindingCode.LEFT_OUT, Severity.NOTE)
"""The note of a reader that left something out: `what`, `where`, `amount`, `advice`."""
assumed = partial(Finding, FindingCode.ASSUMED, Severity.NOTE)
"""The note of a reader that had to assume something."""
missing_parts = partial(Finding, FindingCode.PARTS_MISSING)
"""A finding, of a severity, that a part of a recording is not there."""


def layers_from(
    first_moe_layer: int | None, layers: int
) -> tuple[tuple[int, ...], tuple[Finding, ...]]:
    """Return the ids of layers that follow each other; from 0 on, with a note, if none is known."""
    if first_moe_layer is not None:
        return tuple(range(first_moe_layer, first_moe_layer + layers)), ()
    what = "the MoE layers are taken for the first hidden layers, because nothing names them"
    advice = "If dense layers come before them, give first_moe_layer"
    return tuple(range(layers)), (assumed(what, spans("layer", range(layers)), "", advice),)


def drop_idle_steps(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], tuple[Finding, ...]]:
    """Return (T, L, E) counts without steps that routed nothing, and a note if there were any.

    Raises:
        InvalidInput: no step routed anything.
    """
    busy = counts.any(axis=(1, 2))
    if not busy.any():
        raise InvalidInput(f"none of the {len(counts)} steps routed a token")
    if busy.all():
        return counts, ()
    amount = f"{int((~busy).sum())} of {len(counts)} steps"
    return counts[busy], (left_out("steps that routed nothing are left out", amount=amount),)


def without_idle_steps(trace: Trace) -> Trace:
    """Return a trace without steps that routed nothing; notes and errors as `drop_idle_steps`."""
    counts, idle = drop_idle_steps(trace.counts)
    if not idle:
        return trace
    busy, tokens, source = trace.counts.any(axis=(1, 2)), trace.tokens, trace.source
    return replace(
        trace,
        counts=counts,
        tokens=None if tokens is None else tokens[busy],
        source=None if source is None else source[busy],
        findings=(*trace.findings, *idle),
    )


def moe_rows(
    counts: NDArray[np.int64], first_moe_layer: int | None
) -> tuple[NDArray[np.int64], tuple[int, ...], tuple[Finding, ...]]:
    """Return the rows of MoE layers of a recording that has a row for each hidden layer.

    Args:
        counts: (T, H, E) [tokens]; at least one row must have routed a token.
        first_moe_layer: number of hidden layers before the first MoE layer; None takes every row
            that ever routed a token, because dense layers have rows that never count.

    Returns:
        The rows, their hidden layers, and what the other rows show.

    Raises:
        InvalidInput: there is no such layer.
    """
    hidden = counts.shape[1]
    if first_moe_layer is None:
        busy = np.asarray(counts.any(axis=(0, 2)), np.bool_)
        rows = np.flatnonzero(busy)
        return counts[:, rows], tuple(rows.tolist()), check_hidden_layers(busy)
    if not 0 <= first_moe_layer < hidden:
        raise InvalidInput(
            f"first MoE layer {first_moe_layer} is outside the {hidden} hidden layers"
        )
    found: tuple[Finding, ...] = ()
    if cut := np.flatnonzero(counts[:, :first_moe_layer].any(axis=(0, 2))).tolist():
        what, where = "layers before first_moe_layer counted, and are left out", spans("layer", cut)
        found = (Finding(FindingCode.LEFT_OUT, Severity.DOUBT, what, where),)
    return counts[:, first_moe_layer:], tuple(range(first_moe_layer, hidden)), found
