"""`ports.WindowStore` on Redis or Valkey: a stream of chunks for each deployment and phase."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from evenkeel_moe.adapters.redis.client import Client, Timed, deployment_key, timed_call
from evenkeel_moe.adapters.redis.encoding import (
    Unreadable,
    UnreadableRecord,
    ignore_unreadable,
    pack_source,
    pack_window,
    unpack_source,
    unpack_window,
)
from evenkeel_moe.adapters.redis.wrong_types import WrongTypes
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.telemetry.windows import in_chunks, join_windows, newest_parts

_CHUNK_STEPS = 64

# Counts the steps of a chunk that was just added, and drops chunks that are no longer needed.
# Chunks have any length. The chunk itself is no argument: Lua would copy and hash it.
# KEYS: stream, steps ever added, for each chunk the steps before it. ARGV: steps of the new chunk,
# steps to keep, ttl in ms.
# Only counted chunks are kept once they fill a window. Until then nothing is dropped, so that older
# chunks survive when a count was lost.
_COUNT = """
local total = redis.call('INCRBY', KEYS[2], ARGV[1])
local before = total - ARGV[1]
if before == 0 then redis.call('DEL', KEYS[3]) end
redis.call('ZADD', KEYS[3], before, before)
local oldest = redis.call('ZRANGE', KEYS[3], 0, 1, 'WITHSCORES')
local dropped = false
while oldest[4] and total - oldest[4] >= tonumber(ARGV[2]) do
  redis.call('ZREM', KEYS[3], oldest[1])
  oldest = redis.call('ZRANGE', KEYS[3], 0, 1, 'WITHSCORES')
  dropped = true
end
if dropped then redis.call('XTRIM', KEYS[1], 'MAXLEN', redis.call('ZCARD', KEYS[3])) end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[3]) end
return total
"""


class _Keys(NamedTuple):
    """Keys of one window."""

    stream: str
    total: str
    """Number of steps ever added."""
    chunks: str
    """The number of steps before each chunk."""
    source: str
    """Source-side sums."""


class RedisWindowStore:
    """Windows, bounded by count and time to live.

    Args:
        client: returned by `adapters.redis.client.connect`.
        prefix: first part of every key.
        capacity: steps kept of each window; the store holds up to one chunk more.
        ttl_s: a window without new steps for this long is dropped.
        unreadable: told of each chunk that is skipped because it cannot be read.
        timed: told how long each call took.
    """

    def __init__(
        self,
        client: Client,
        *,
        prefix: str = "evenkeel",
        capacity: int = 512,
        ttl_s: float = 86_400.0,
        unreadable: UnreadableRecord = ignore_unreadable,
        timed: Timed | None = None,
    ) -> None:
        if capacity < 1:
            raise InvalidInput(f"window capacity is {capacity}, must be at least 1")
        self._client: Any = client  # The clients share their commands but no typed base.
        self._unreadable = unreadable
        self._call = partial(timed_call, timed)
        self._types = WrongTypes(client, unreadable)
        self._prefix = prefix
        self._capacity = capacity
        self._ttl_ms = max(1, round(ttl_s * 1000))

    def _keys(self, deployment: DeploymentId, phase: Phase) -> _Keys:
        names = ("window", "window_total", "window_chunks", "window_source")
        return _Keys(
            *(deployment_key(self._prefix, deployment, f"{name}:{phase}") for name in names)
        )

    async def append(self, deployment: DeploymentId, phase: Phase, *parts: LoadWindow) -> None:
        """Add complete steps in consecutive parts, newest last.

        The last part's source-side sums, if it has any, replace those stored.
        """
        keys = self._keys(deployment, phase)
        with self._call("write", "appending to a window"):
            for chunk in in_chunks(newest_parts(parts, most=self._capacity), _CHUNK_STEPS):
                await self._types.run(keys, partial(self._add, keys, chunk))
            source = parts[-1].source if parts else None
            if source is not None:
                await self._client.set(keys.source, pack_source(source), px=self._ttl_ms)

    async def _add(self, keys: _Keys, chunk: Sequence[LoadWindow]) -> None:
        """Add one chunk, which has at least one step.

        In one pipeline, so that a chunk is hardly ever left uncounted.
        """
        both = self._client.pipeline(transaction=False)
        length = sum(map(len, chunk))
        fields = {"n": length, "d": pack_window(*chunk)}
        both.xadd(keys.stream, fields, maxlen=self._capacity + 1, approximate=False)
        counted = (length, self._capacity, self._ttl_ms)
        both.eval(_COUNT, 3, keys.stream, keys.total, keys.chunks, *counted)
        await both.execute()

    async def fetch(self, deployment: DeploymentId, phase: Phase) -> LoadWindow | None:
        """Return the stored window, oldest step first; None when there is none."""
        keys = self._keys(deployment, phase)
        with self._call("read", "reading a window"):
            rows = await self._types.run(keys, lambda: self._client.xrange(keys.stream))
            sums = await self._types.run(keys, lambda: self._client.get(keys.source))
        chunks = [self._chunk(keys.stream, number, fields) for number, fields in rows]
        window = _join([chunk for chunk in chunks if chunk is not None])
        if window is None:
            return None
        window = window.last(self._capacity)
        if sums is not None:
            try:
                source = unpack_source(sums)
            except Unreadable as error:
                self._unreadable("window", keys.source, str(error))
                return window
            if source.shape[1:] == window.counts.shape[1:]:
                return replace(window, source=source)
        return window

    def _chunk(
        self, stream: str, number: bytes, fields: Mapping[bytes, bytes]
    ) -> LoadWindow | None:
        try:
            return unpack_window(fields.get(b"d", b""))
        except Unreadable as error:
            self._unreadable("window", f"{stream} {number.decode(errors='replace')}", str(error))
            return None

    async def forget(self, deployment: DeploymentId) -> None:
        """Drop every window of a deployment."""
        with self._call("write", "dropping windows"):
            for phase in Phase:
                await self._client.delete(*self._keys(deployment, phase))


def _join(chunks: Sequence[LoadWindow]) -> LoadWindow | None:
    """Join chunks in stored order, as long as they have the newest shape and rising steps.

    Two writers may have overlapped.
    """
    parts: list[LoadWindow] = []
    for part in reversed(chunks):
        if parts:
            later = parts[-1]
            shapes = part.counts.shape[1:], part.tokens.shape[1:]
            if shapes != (later.counts.shape[1:], later.tokens.shape[1:]):
                break
            part = part.slice(slice(0, int(part.steps.searchsorted(later.steps[0]))))
        if len(part):
            parts.append(part)
    return join_windows(parts[::-1]) if parts else None
