"""Records the steps of the plugins; ranks that got the same batch count its tokens once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.engines.guest.expert_times import Seconds, unknown
from evenkeel_moe.model.load import Phase


@dataclass(frozen=True, slots=True)
class StepNote:
    """The facts about a step that the host knows when the step ends."""

    step: int
    epoch: int
    dummy: bool
    prepared_tokens: int | None
    """Real tokens that the engine prepared; None if the engine does not report them."""
    seconds: Seconds = unknown
    """Returns the seconds of this rank's routed experts, which compute tokens of others in a dummy
    step."""


def count_once(
    counts: NDArray[np.int64], counted: int, batch: int, place: int, filler: int | None = None
) -> tuple[NDArray[np.int64], int]:
    """Return this rank's part of a batch that several ranks got, such as a tensor-parallel group.

    Either every rank routes the whole batch, or each routes one of equal parts, in the order of the
    ranks; the rows that pad the last parts are then counted too. In both cases this rank's part
    begins at `place * counted`, so the parts of all ranks add up to the batch.

    Args:
        counts: (L, E) int64 of this rank.
        counted: tokens that this rank counted.
        batch: real tokens of the batch.
        place: position of this rank among the ranks that got the batch.
        filler: the expert to which the engine routes the rows that pad a batch; None if they go
            wherever the router sends them.

    Returns:
        (L, E) int64 counts without the rows of the filler, or scaled to the part, and its tokens.
        Each layer's counts sum to tokens x top_k if they did before.
    """
    part = min(max(batch - place * counted, 0), counted)
    if part == counted:
        return counts, counted
    if filler is not None:
        own = counts.copy()
        own[:, filler] -= (counted - part) * (int(counts[0].sum()) // counted)
        if (own[:, filler] >= 0).all():
            return own, part
    return np.diff(counts.cumsum(axis=1) * part // counted, axis=1, prepend=0), part


def record_step(
    agent: Agent, note: StepNote, counts: NDArray[np.int64], tokens: int, phase: Phase
) -> None:
    """Pass one step to the agent's recorder; a dummy step counts no tokens.

    Args:
        agent: the rank's agent.
        note: the facts about the step.
        counts: (L, E) or (L, slots_per_rank) int64, depending on the counting side.
        tokens: real tokens this rank routed.
        phase: the phase the engine serves.
    """
    if note.dummy:
        counts, tokens = np.zeros_like(counts), 0
    agent.record(
        note.step,
        counts,
        epoch=note.epoch,
        tokens=tokens,
        phase=phase,
        dummy=note.dummy,
        compute_s=note.seconds(),
    )
