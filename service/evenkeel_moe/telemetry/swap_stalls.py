"""The stall that a plan's swaps are expected to cause, by the swaps that were measured."""

from collections import Counter
from collections.abc import Sequence

from evenkeel_moe.model.plan import Wave, WaveKey

_KEPT_WAVES = 32


class SwapStalls:
    """The measured swaps of one deployment's newest waves."""

    def __init__(self) -> None:
        self._bytes: dict[WaveKey, int] = {}
        """Bytes into the fullest rank of a wave, oldest first."""
        self._seconds: dict[WaveKey, float] = {}
        """The longest time for which a wave's swap delayed the step of a rank."""

    def begins(self, key: WaveKey, wave: Wave, slots_per_rank: int) -> None:
        """Note a wave that is sent out."""
        self._bytes.pop(key, None)
        self._bytes[key] = most_bytes(wave, slots_per_rank)
        while len(self._bytes) > _KEPT_WAVES:
            oldest = next(iter(self._bytes))
            self._seconds.pop(oldest, None)
            del self._bytes[oldest]

    def measured(self, key: WaveKey, seconds: float) -> None:
        """Note the swap of one rank; 0 is a repeated acknowledgement, which measures nothing."""
        if key in self._bytes and seconds > 0.0:
            self._seconds[key] = max(seconds, self._seconds.get(key, 0.0))

    def expected_s(self, waves: Sequence[Wave], slots_per_rank: int) -> float | None:
        """Return the longest stall of one step [s] that these waves are expected to cause.

        It is the longest of the measured swaps. If a wave writes more bytes into a rank than any
        measured one, it is longer in proportion.

        Returns:
            None if no swap was measured yet.
        """
        if not self._seconds:
            return None
        known = max(self._bytes[key] for key in self._seconds)
        most = max((most_bytes(wave, slots_per_rank) for wave in waves), default=0)
        return max(self._seconds.values()) * max(1.0, most / known if known else 1.0)

    def forget(self) -> None:
        """Start again, for another generation of the group."""
        self._bytes.clear()
        self._seconds.clear()


def most_bytes(wave: Wave, slots_per_rank: int) -> int:
    """Return the bytes that the wave writes into the slots of the rank that gets most."""
    received: Counter[int] = Counter()
    for transfer in wave.transfers:
        received[transfer.dst_slot // slots_per_rank] += transfer.nbytes
    return max(received.values(), default=0)
