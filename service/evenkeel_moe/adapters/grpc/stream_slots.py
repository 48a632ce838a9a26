"""Decides which streams may stay open: those that wait for a Hello, and those of ranks."""

from collections import Counter
from collections.abc import Callable

_MOST_WAITING = 512
"""Streams without a Hello; a rank says hello as soon as its stream is open."""


def host_of(peer: str) -> str:
    """Return gRPC's name of a peer without its port."""
    return peer.rpartition(":")[0]


class StreamSlots:
    """The open streams of one server.

    A stream without a Hello takes no place of a rank. If too many wait, the oldest one of the
    address with the most of them is ended, so that silent streams keep no rank out.

    Args:
        most: streams of ranks.
        most_per_host: streams of ranks from one address.
        most_waiting: streams whose Hello has not arrived or is not checked yet.
    """

    def __init__(self, most: int, most_per_host: int, most_waiting: int | None = None) -> None:
        self._most = most
        self._most_per_host = most_per_host
        self._most_waiting = _MOST_WAITING if most_waiting is None else most_waiting
        self._waiting: dict[int, tuple[str, Callable[[], None]]] = {}
        """Stream number -> host, and the call that ends the stream; oldest first."""
        self._taken: dict[int, str] = {}
        """Stream number -> host."""
        self._by_host: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._taken)

    def wait(self, stream: int, peer: str, end: Callable[[], None]) -> int | None:
        """Note a new stream; return the number of the stream that gave way to it, if any."""
        self._waiting[stream] = (host_of(peer), end)
        if len(self._waiting) <= self._most_waiting:
            return None
        busiest, _ = Counter(host for host, _ in self._waiting.values()).most_common(1)[0]
        oldest = next(one for one, (host, _) in self._waiting.items() if host == busiest)
        self._waiting.pop(oldest)[1]()
        return oldest

    def take(self, stream: int, peer: str) -> str:
        """Give a rank whose Hello is checked its place; return why not, or an empty text."""
        host = host_of(peer)
        self._waiting.pop(stream, None)
        if len(self._taken) >= self._most:
            return f"{len(self._taken)} streams are open, no more are taken"
        if self._by_host[host] >= self._most_per_host:
            return f"{self._by_host[host]} streams of {host} are open, no more are taken"
        self._taken[stream] = host
        self._by_host[host] += 1
        return ""

    def free(self, stream: int) -> None:
        """Forget a stream that ended."""
        self._waiting.pop(stream, None)
        host = self._taken.pop(stream, None)
        if host is not None:
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]
