"""The record of one swap."""

from dataclasses import dataclass

from evenkeel_moe.model.plan import WaveKey


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """One swap, as measured on this rank."""

    wave: WaveKey
    epoch: int
    """The new epoch."""
    step: int
    """The last step recorded before the swap; -1 before the first."""
    layers: tuple[int, ...]
    seconds: float
    """Time for which the swap delayed the step."""
    received_bytes: int
