"""Checks the loads of a model against themselves: what no router can have routed is a finding.

Every MoE layer of a step routes the same tokens to the same number of experts. So the choices of
all layers agree in every step, no layer is idle while others are busy, and over many tokens no
expert is idle in all layers. A recorder that counts into the wrong row, a stage or a rank whose
counts are lost, and counters that are never reset break one of these rules.

The same rules hold for a recording and for a live window. Those of hidden layers, of equal layers
and of steps are for recordings: a live window has neither dense layers nor a file around it.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.finding import Finding, FindingCode, Severity, spans

MOST_DEVIATION = 0.005
"""Share of a layer's choices by which it may differ from the others before a verdict is in doubt.
A router never differs; a recorder that samples, or a capacity that drops tokens, does a little."""
ENOUGH_CHOICES = 100
"""Choices for each expert, on average over all layers and steps, from which one that is idle in
every layer is no chance."""
MOST_LEADING = 1 / 3
"""Share of the hidden layers that may be idle before the first MoE layer. Models have up to four
dense layers there; the last of two pipeline stages lacks about half of the layers."""
FEWEST_STEPS = 8
"""Steps below which totals that only rise, or steps that repeat, may be chance."""


def check_recording(
    counts: NDArray[np.int64], layer_ids: Sequence[int], top_k: int | None = None
) -> tuple[Finding, ...]:
    """Return what the counts of a recording show; the rows are MoE layers.

    Args:
        counts: (T, L, E) [tokens] each step.
        layer_ids: (L,) the names of the layers in the findings.
        top_k: experts that a token chooses; None if it is not known.
    """
    return (
        *check_window(counts.sum(axis=2), counts.max(axis=0, initial=0) > 0, layer_ids),
        *_equal_layers(counts, layer_ids),
        *_rising_totals(counts),
        *_repeated_steps(counts),
        *(() if top_k is None else _impossible_choices(counts, layer_ids, top_k)),
    )


def check_window(
    choices: NDArray[np.integer],
    counted: NDArray[np.bool_],
    layer_ids: Sequence[int],
    *,
    most_deviation: float = MOST_DEVIATION,
    most_idle: float = 0,
) -> tuple[Finding, ...]:
    """Return what the sums of some steps show.

    Args:
        choices: (T, L) [tokens] sum over the experts of each step and layer.
        counted: (L, E) True for experts that counted a token in any of the steps.
        layer_ids: (L,) the names of the layers in the findings.
        most_deviation: share of its choices by which a layer may differ from the others; above it
            a verdict is in doubt. An idle layer differs by 1.
        most_idle: share of the experts that may be idle in every layer.
    """
    return (
        *_idle_layers(choices, layer_ids, most_deviation),
        *_uneven_layers(choices, layer_ids, most_deviation),
        *_idle_experts(int(choices.sum()), counted, most_idle),
    )


def grave(share: float, most: float) -> Severity:
    """Return the severity of a finding: a doubt if its share is above what may be, else a note."""
    return Severity.DOUBT if share > most else Severity.NOTE


def check_hidden_layers(busy: NDArray[np.bool_]) -> tuple[Finding, ...]:
    """Return what the pattern of busy layers shows, where dense layers have rows that never count.

    Dense layers stand at the start, or between MoE layers at a fixed distance.

    Args:
        busy: (H,) True for hidden layers that ever counted a token; at least one is True.
    """
    hidden, rows = len(busy), np.flatnonzero(busy)
    first, idle = int(rows[0]), np.flatnonzero(~busy)
    regular = _regular(rows, hidden)
    if 2 * len(rows) < hidden and not regular:
        return (
            Finding(
                FindingCode.MOSTLY_IDLE_LAYERS,
                Severity.REFUSAL,
                "most hidden layers never counted a token",
                spans("layer", idle.tolist()),
                f"{len(idle)} of {hidden}; only {spans('layer', rows.tolist())} did",
                "The recorder may have counted all layers into one row, or seen one part of the"
                " model. Record again",
            ),
        )
    findings = []
    lacks = "A pipeline stage or some layers may be missing. Add what is missing, or record again"
    if first:
        severity = grave(first / hidden, MOST_LEADING)
        dense = "If they are MoE layers, as those routed by a table, give first_moe_layer 0"
        findings.append(
            Finding(
                FindingCode.LEADING_IDLE_LAYERS,
                severity,
                "the first hidden layers never counted a token and are assumed to be dense",
                f"{spans('layer', range(first))} of {hidden}",
                advice=lacks if severity is Severity.DOUBT else dense,
            )
        )
    gaps = [int(layer) for layer in idle if layer > first]
    if gaps and regular:
        findings.append(
            Finding(
                FindingCode.IDLE_LAYERS,
                Severity.NOTE,
                f"one of {int(rows[1] - rows[0])} hidden layers counted tokens, the others are"
                " assumed to be dense",
                spans("layer", gaps),
            )
        )
    elif gaps:
        findings.append(
            Finding(
                FindingCode.IDLE_LAYERS,
                Severity.DOUBT,
                "hidden layers after the first MoE layer never counted a token",
                f"{spans('layer', gaps)} of {hidden}",
                f"{len(gaps)} layers are not planned",
                lacks,
            )
        )
    return tuple(findings)


def _regular(rows: NDArray[np.intp], hidden: int) -> bool:
    """Return True if at least three busy rows stand at one distance up to the end."""
    if len(rows) < 3:
        return False
    distance = int(rows[1] - rows[0])
    return bool((np.diff(rows) == distance).all()) and int(rows[-1]) + distance >= hidden


def _idle_layers(
    choices: NDArray[np.integer], layer_ids: Sequence[int], most_deviation: float
) -> tuple[Finding, ...]:
    busy = choices.any(axis=0)
    if busy.all() or not busy.any():
        return ()
    idle = [layer_ids[row] for row in np.flatnonzero(~busy).tolist()]
    return (
        Finding(
            FindingCode.IDLE_LAYERS,
            grave(1.0, most_deviation),
            "MoE layers never counted a token while others did",
            spans("layer", idle),
            f"{len(idle)} of {len(layer_ids)} layers",
            "Their counter does not run, or their counts are lost; what is planned for them is a"
            " guess",
            share=len(idle) / len(layer_ids),
        ),
    )


def _uneven_layers(
    choices: NDArray[np.integer], layer_ids: Sequence[int], most_deviation: float
) -> tuple[Finding, ...]:
    """Compare the choices of each layer and step with those of most layers in that step."""
    rows = np.flatnonzero(choices.any(axis=0))
    if len(rows) < 2:
        return ()
    names = [layer_ids[row] for row in rows.tolist()]
    sums = choices[:, rows].astype(np.float64)
    # The upper median: of two layers the one that counts less is taken for the broken one.
    usual = np.sort(sums, axis=1)[:, len(rows) // 2]
    deviation = np.abs(sums - usual[:, None]).sum(axis=0) / max(usual.sum(), 1.0)
    apart = np.flatnonzero(deviation > 0)
    if not len(apart):
        return ()
    worst = int(deviation.argmax())
    steps = int((sums != usual[:, None]).any(axis=1).sum())
    ratio = sums[:, worst].sum() / max(usual.sum(), 1.0)
    severity = grave(deviation[worst], most_deviation)
    return (
        Finding(
            FindingCode.UNEVEN_LAYERS,
            severity,
            "layers of one step routed different numbers of choices",
            f"{spans('layer', [names[row] for row in apart])} in {steps} of {len(sums)} steps",
            f"most in layer {names[worst]}: {deviation[worst]:.1%} apart, {ratio:.1%} of"
            " what most layers count",
            "All MoE layers of a step route the same tokens, so counts are missing or doubled"
            if severity is Severity.DOUBT
            else "",
            share=float(deviation[worst]),
        ),
    )


def _idle_experts(
    choices: int, counted: NDArray[np.bool_], most_idle: float
) -> tuple[Finding, ...]:
    """Find experts that are idle in every layer, among many choices."""
    layers, experts = int(counted.any(axis=1).sum()), counted.shape[1]
    idle = np.flatnonzero(~counted.any(axis=0))
    if not layers or not len(idle) or choices < ENOUGH_CHOICES * experts:
        return ()
    # In a single layer one expert may really be dead; a run of neighbours is a rank or a padding.
    if layers == 1 and not (np.diff(idle) == 1).any():
        return ()
    return (
        Finding(
            FindingCode.IDLE_EXPERTS,
            grave(len(idle) / experts, most_idle),
            "experts are idle in every layer",
            spans("expert", idle.tolist()),
            f"{len(idle)} of {experts}, while an expert has {choices / experts:.0f} choices on"
            " average",
            "The counts of a rank may be lost, or the number of experts is too high",
            share=len(idle) / experts,
        ),
    )


def _equal_layers(counts: NDArray[np.int64], layer_ids: Sequence[int]) -> tuple[Finding, ...]:
    """Find layers with the same counts in every step, among counts that vary."""
    first: dict[bytes, int] = {}
    copies: list[int] = []
    for row in range(counts.shape[1]):
        layer = np.ascontiguousarray(counts[:, row])
        if len(np.unique(layer)) < FEWEST_STEPS:
            continue
        if first.setdefault(layer.tobytes(), row) != row:
            copies.append(layer_ids[row])
    if not copies:
        return ()
    return (
        Finding(
            FindingCode.EQUAL_LAYERS,
            Severity.DOUBT,
            "layers have the same counts as another layer, expert by expert and step by step",
            spans("layer", copies),
            f"{len(copies)} of {counts.shape[1]} layers",
            "The recorder may have counted one layer for several. Record again",
        ),
    )


def _rising_totals(counts: NDArray[np.int64]) -> tuple[Finding, ...]:
    """Find counters that are reset at a start only: each rises from step to step between starts."""
    sums = counts.sum(axis=(1, 2))
    falls = (np.diff(counts, axis=0) < 0).any(axis=(1, 2))
    edges = [0, *(np.flatnonzero(falls) + 1).tolist(), len(counts)]
    # Over idle steps totals rest, but most steps of a run rise; idle steps alone are no totals.
    runs = [
        (first, last)
        for first, last in pairwise(edges)
        if max(FEWEST_STEPS, (last - first) / 2) <= 1 + (np.diff(sums[first:last]) > 0).sum()
    ]
    # Totals that were mostly counted before the recording do not double in it: those are in doubt.
    doubled = [run for run in runs if sums[run[1] - 1] >= 2 * sums[run[0]]]
    for severity, among in ((Severity.REFUSAL, doubled), (Severity.DOUBT, runs)):
        rising = sum(last - first for first, last in among)
        if 2 * rising < len(counts) or not among:
            continue
        first, last = max(among, key=lambda run: run[1] - run[0])
        return (
            Finding(
                FindingCode.RISING_TOTALS,
                severity,
                "every count only rises, as totals since a start do and the loads of steps do not",
                f"all {rising} steps"
                if rising == len(counts)
                else f"{rising} of {len(counts)} steps",
                f"{sums[first]} choices in step {first}, {sums[last - 1]} in step {last - 1}",
                "Subtract each step from the next one",
            ),
        )
    return ()


def _repeated_steps(counts: NDArray[np.int64]) -> tuple[Finding, ...]:
    """Find steps that occur again with every count, among counts that vary."""
    first: dict[bytes, int] = {}
    again = [
        step
        for step, rows in enumerate(counts)
        if len(np.unique(rows)) >= FEWEST_STEPS and first.setdefault(rows.tobytes(), step) != step
    ]
    if not again:
        return ()
    return (
        Finding(
            FindingCode.REPEATED_STEPS,
            Severity.DOUBT,
            "steps occur again with the same count of every layer and expert",
            spans("step", again),
            f"{len(again)} of {len(counts)} steps",
            "A part of the recording may be in it twice. Leave it out, or record again",
        ),
    )


def _impossible_choices(
    counts: NDArray[np.int64], layer_ids: Sequence[int], top_k: int
) -> tuple[Finding, ...]:
    """Find layers in which tokens cannot have chosen `top_k` experts each, all of them once."""
    sums = counts.sum(axis=2)
    broken = (sums % top_k != 0) | (counts.max(axis=2, initial=0) * top_k > sums)
    if not broken.any():
        return ()
    step, row = np.argwhere(broken)[0]
    return (
        Finding(
            FindingCode.IMPOSSIBLE_CHOICES,
            grave(float(broken.mean()), MOST_DEVIATION),
            f"layers have counts that tokens with {top_k} different experts each cannot give",
            amount=f"{int(broken.sum())} of {broken.size} sums of a layer and step; first: step"
            f" {step}, layer {layer_ids[row]} has {sums[step, row]} choices,"
            f" {counts[step, row].max()} of one expert",
            advice="Choices may be missing, or top-k is another number. Record again",
            share=float(broken.mean()),
        ),
    )
