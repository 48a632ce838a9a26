"""Checks the newest steps of a deployment against themselves, as a recording is checked.

Of a live window it is known which experts live on which rank, so a rank whose counts are lost is
named. A finding closes the gates of planning, so it needs more evidence than one of a recording:
traffic of one kind really leaves some experts of a layer idle, and a layer may have a group of
them. In other layers those are other experts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.finding import Finding, FindingCode, spans
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.signals.load_findings import (
    ENOUGH_CHOICES,
    MOST_DEVIATION,
    check_window,
    grave,
)

ENOUGH_CASES = 4
"""Layers from which it is no chance that an expert is idle in all of them; and experts, over all
layers, that live on one rank alone, from which it is no chance that all of them are idle."""


class StepSums(NamedTuple):
    """The sums of some steps."""

    choices: NDArray[np.int64]
    """(T, L) [tokens] sum over the experts of each step and layer."""
    counted: NDArray[np.bool_]
    """(L, E) True for experts that counted a token in any of the steps."""


def check_live(
    window: StepSums,
    present: StepSums,
    placement: Placement,
    *,
    most_deviation: float = MOST_DEVIATION,
    most_idle: float = 0,
) -> tuple[Finding, ...]:
    """Return what the newest steps show.

    Args:
        window: all of them.
        present: those that ran under the present placement.
        placement: the present one.
        most_deviation: share of its choices by which a layer may differ from the others.
        most_idle: share of the experts that may be idle in every layer.
    """
    layers = range(placement.num_layers)
    found = check_window(*window, layers, most_deviation=most_deviation, most_idle=most_idle)
    ranks = _idle_ranks(present, placement)
    enough = len(_busy(window)) >= ENOUGH_CASES
    experts_alone = enough and not _live_on(ranks, window, placement)
    return tuple(
        each for each in found if each.code is not FindingCode.IDLE_EXPERTS or experts_alone
    ) + _rank_findings(ranks, present, placement, most_idle)


def _busy(sums: StepSums) -> NDArray[np.intp]:
    """Return the layers that counted a token; an idle layer tells nothing about its experts."""
    return np.flatnonzero(sums.counted.any(axis=1))


def _live_on(ranks: list[int], window: StepSums, placement: Placement) -> bool:
    """Return True if the experts that are idle in every layer are those of the idle ranks."""
    idle = ~window.counted.any(axis=0)
    return bool(np.isin(placement.only_rank[:, idle], ranks).all()) and bool(ranks)


def _idle_ranks(present: StepSums, placement: Placement) -> list[int]:
    """Return the ranks of which no expert counts, among many choices of others.

    Experts that other ranks hold too tell nothing about a rank.
    """
    busy, num_ranks = _busy(present), placement.num_ranks
    alone, counted = placement.only_rank[busy], present.counted[busy]
    experts, idle = _by_rank(alone, num_ranks), _by_rank(alone[~counted], num_ranks)
    expected = experts * (present.choices.sum() / max(counted.size, 1))
    found = (idle == experts) & (experts >= ENOUGH_CASES) & (expected >= ENOUGH_CHOICES)
    return [int(rank) for rank in np.flatnonzero(found)]


def _by_rank(ranks: NDArray[np.int32], num_ranks: int) -> NDArray[np.int64]:
    """Count how often each rank occurs; -1 is none. Returns (R,)."""
    return np.bincount(ranks[ranks >= 0], minlength=num_ranks)


def _rank_findings(
    ranks: list[int], present: StepSums, placement: Placement, most_idle: float
) -> tuple[Finding, ...]:
    if not ranks:
        return ()
    busy, experts = _busy(present), placement.num_logical_experts
    layers, here = len(busy), int(np.isin(placement.only_rank[busy], ranks).sum())
    each, share = present.choices.sum() / (layers * experts), here / (layers * experts)
    return (
        Finding(
            FindingCode.IDLE_EXPERTS,
            grave(share, most_idle),
            "no expert that lives on one rank alone counts there",
            spans("rank", ranks),
            f"all {here} such experts of {layers} layers are idle, while an expert of a layer has"
            f" {each:.0f} choices on average",
            "The counts of the rank are lost, or tokens do not reach it",
            share=share,
        ),
    )
