"""The clocks of this machine."""

import time

__all__ = ["SystemClock"]


class SystemClock:
    """`ports.Clock` on the operating system's clocks."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never falls."""
        return time.monotonic()

    def unix(self) -> float:
        """Unix seconds."""
        return time.time()
