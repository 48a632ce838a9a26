"""The seconds that each rank took for a wave. Only for display: no decision depends on them."""

from collections.abc import Iterable
from typing import Any

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol.control_messages import FromRank
from evenkeel_moe.protocol.messages import Ack, Vote

MOST_RANKS = 32
"""Ranks that the story of a plan keeps for each wave: the slowest."""


class WaveDurations:
    """Measures how long the ranks of one wave take, as their leader sees it.

    Args:
        ranks: all ranks of the wave.
        began: monotonic seconds at which the wave was sent out.
    """

    def __init__(self, ranks: Iterable[EpRank], began: float) -> None:
        self._began = began
        self._ranks = tuple(ranks)
        self._voted: dict[EpRank, float] = {}
        self._swapped: dict[EpRank, float] = {}
        self._stalled: dict[EpRank, float] = {}

    def note(self, event: FromRank, now: float) -> None:
        """Take a message that counts for the wave; the first of a kind is the measured one."""
        rank, message, passed = event.rank, event.message, now - self._began
        if isinstance(message, Vote) and rank not in self._voted:
            self._voted[rank] = passed
        elif isinstance(message, Ack) and rank not in self._swapped:
            self._swapped[rank] = passed
            # A repeated acknowledgement has 0, which measures nothing.
            if message.swap_s > 0:
                self._stalled[rank] = message.swap_s

    def row(self) -> dict[str, Any]:
        """Return the fields of a story's row: the slowest ranks in their order; None is unknown.

        `voted_s` and `swapped_s` count from the start of the wave: until all was staged and
        verified, and until the rank was at the new epoch. `stall_s` is the delay of its step.
        """
        never = float("inf")
        slowest = sorted(
            self._ranks,
            key=lambda rank: (self._voted.get(rank, never), self._swapped.get(rank, never)),
            reverse=True,
        )[:MOST_RANKS]
        rows = [
            {
                "rank": int(rank),
                "voted_s": _rounded(self._voted.get(rank)),
                "swapped_s": _rounded(self._swapped.get(rank)),
                "stall_s": _rounded(self._stalled.get(rank)),
            }
            for rank in sorted(slowest)
        ]
        return {"num_ranks": len(self._ranks), "ranks": rows}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
