"""The clocks of the operating system."""

import time


class SystemClock:
    """Implements `ports.Clock`."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""
        return time.monotonic()

    def unix(self) -> float:
        """Return Unix seconds."""
        return time.time()
