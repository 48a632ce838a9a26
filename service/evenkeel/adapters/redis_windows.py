"""`ports.WindowStore` on Redis or Valkey: one stream of compressed chunks for each deployment and phase."""

from collections.abc import Sequence
from typing import Any

from evenkeel.adapters.redis_client import Client, deployment_key, store_errors
from evenkeel.adapters.stored_forms import (
    Unreadable,
    pack_source,
    pack_window,
    unpack_source,
    unpack_window,
)
from evenkeel.errors import InvalidInput
from evenkeel.model.ids import DeploymentId
from evenkeel.model.load import LoadWindow, Phase
from evenkeel.protocol.windows import join_windows

__all__ = ["RedisWindowStore"]

_CHUNK_STEPS = 64

# KEYS: stream, steps held. ARGV: chunk, its steps, most steps, ttl in ms. Chunks are of any length, so the
# steps are counted; every chunk has one at least, so that MAXLEN holds the stream should the count be lost.
_APPEND = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[2]) end
redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[3] + 1, '*', 'n', ARGV[2], 'd', ARGV[1])
local held = redis.call('INCRBY', KEYS[2], ARGV[2])
while held > tonumber(ARGV[3]) do
  local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  local steps = tonumber(first[2][2])
  if held - steps < tonumber(ARGV[3]) then break end
  redis.call('XDEL', KEYS[1], first[1])
  held = redis.call('DECRBY', KEYS[2], steps)
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return held
"""


class RedisWindowStore:
    """Windows, bounded by count and time to live.

    Args:
        client: connected by `redis_client.connect`.
        prefix: first part of every key.
        capacity: steps kept of each window; up to one chunk more is held.
        ttl_s: a window nothing was added to for this long is dropped.
    """

    def __init__(
        self, client: Client, *, prefix: str = "evenkeel", capacity: int = 512, ttl_s: float = 86_400.0
    ) -> None:
        if capacity < 1:
            raise InvalidInput(f"window capacity is {capacity}, must be at least 1")
        self._client: Any = client  # The clients share their commands but no typed base.
        self._prefix = prefix
        self._capacity = capacity
        self._ttl_ms = max(1, round(ttl_s * 1000))

    def _keys(self, deployment: DeploymentId, phase: Phase) -> tuple[str, str, str]:
        return (
            deployment_key(self._prefix, deployment, f"window:{phase}"),
            deployment_key(self._prefix, deployment, f"window_steps:{phase}"),
            deployment_key(self._prefix, deployment, f"window_source:{phase}"),
        )

    async def append(self, deployment: DeploymentId, phase: Phase, steps: LoadWindow) -> None:
        """Add complete steps, newest last; source-side sums, where given, replace those stored."""
        stream, held, source = self._keys(deployment, phase)
        steps = steps.last(self._capacity)
        with store_errors("appending to a window"):
            for first in range(0, len(steps), _CHUNK_STEPS):
                chunk = steps.slice(slice(first, first + _CHUNK_STEPS))
                await self._client.eval(
                    _APPEND,
                    2,
                    stream,
                    held,
                    pack_window(chunk),
                    len(chunk),
                    self._capacity,
                    self._ttl_ms,
                )
            if steps.source is not None:
                await self._client.set(source, pack_source(steps.source), px=self._ttl_ms)

    async def fetch(self, deployment: DeploymentId, phase: Phase) -> LoadWindow | None:
        """The stored window, oldest step first; None when there is none."""
        stream, _, source = self._keys(deployment, phase)
        with store_errors("reading a window"):
            rows = await self._client.xrange(stream)
            sums = await self._client.get(source)
        window = _join([fields.get(b"d", b"") for _, fields in rows])
        if window is None:
            return None
        window = window.last(self._capacity)
        if sums is None:
            return window
        try:
            kept = unpack_source(sums)
        except Unreadable:
            return window
        if kept.shape[1:] != window.counts.shape[1:]:
            return window
        return LoadWindow(window.counts, window.steps, window.epochs, window.tokens, window.compute_s, kept)

    async def forget(self, deployment: DeploymentId) -> None:
        """Drop every window of a deployment."""
        with store_errors("dropping windows"):
            for phase in Phase:
                await self._client.delete(*self._keys(deployment, phase))


def _join(chunks: Sequence[bytes]) -> LoadWindow | None:
    """Chunks in stored order, newest shape and rising steps only: two writers may have overlapped."""
    parts: list[LoadWindow] = []
    for data in reversed(chunks):
        try:
            part = unpack_window(data)
        except Unreadable:
            continue
        if parts:
            if (
                part.counts.shape[1:] != parts[-1].counts.shape[1:]
                or part.tokens.shape[1:] != (parts[-1].tokens.shape[1:])
            ):
                break
            part = part.slice(slice(0, int(part.steps.searchsorted(parts[-1].steps[0]))))
        if len(part):
            parts.append(part)
    return join_windows(parts[::-1]) if parts else None
