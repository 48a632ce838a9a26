"""`ports.WindowStore` on Redis or Valkey: a stream of chunks for each deployment and phase."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from evenkeel_moe.adapters.redis.client import Client, Timed
from evenkeel_moe.adapters.redis.encoding import (
    UnreadableRecord,
    ignore_unreadable,
    pack_source,
    pack_window,
    unpack_source,
    unpack_window,
)
from evenkeel_moe.adapters.redis.records import RedisRecords, milliseconds
from evenkeel_moe.model.ids import DeploymentId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.telemetry.windows import in_chunks, join_windows, newest_parts

_CHUNK_STEPS = 64
_CHUNKS_AT_ONCE = 16
"""Chunks read at a time."""

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


class RedisWindowStore(RedisRecords):
    """Windows, bounded by count and time to live.

    Args:
        client, prefix, unreadable, timed: as in `RedisRecords`.
        capacity: steps kept of each window; the store holds up to one chunk more.
        ttl_s: a window without new steps for this long is dropped.
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
        super().__init__(client, prefix, unreadable, timed)
        self._capacity = capacity
        self._ttl_ms = milliseconds(ttl_s)

    def _keys(self, deployment: DeploymentId, phase: Phase) -> _Keys:
        names = ("window", "window_total", "window_chunks", "window_source")
        return _Keys(*(self._key(deployment, f"{name}:{phase}") for name in names))

    async def append(self, deployment: DeploymentId, phase: Phase, *parts: LoadWindow) -> None:
        """Add complete steps in consecutive parts, newest last.

        The last part's source-side sums, if it has any, replace those stored.
        """
        keys = self._keys(deployment, phase)
        with self._call("write", "appending to a window"):
            for chunk in in_chunks(newest_parts(parts, most=self._capacity), _CHUNK_STEPS):
                await self._add(keys, chunk)
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

    async def fetch(
        self, deployment: DeploymentId, phase: Phase, shape: ModelShape, most: int
    ) -> LoadWindow | None:
        """Return the newest steps of a shape, at most `most`, oldest first; None without a step."""
        keys, most = self._keys(deployment, phase), min(most, self._capacity)
        parts = await self._newest(keys.stream, shape, most)
        if not parts:
            return None
        # In a thread, because it copies all steps.
        window = (await asyncio.to_thread(join_windows, parts[::-1])).last(most)
        sizes = shape.num_ranks, shape.num_layers, shape.num_logical_experts
        with self._call("read", "reading a window"):
            sums = await self._client.get(keys.source)
        rows = [] if sums is None else [(keys.source, sums)]
        found = await self._readable("window", rows, partial(unpack_source, sizes=sizes))
        return replace(window, source=found[0]) if found else window

    async def _newest(self, stream: str, shape: ModelShape, most: int) -> list[LoadWindow]:
        """Return parts that have at least `most` steps, if so many are stored, newest part first.

        Two writers may have overlapped: steps that are not older than those of a newer chunk are
        left out.
        """
        sizes = shape.num_layers, shape.num_logical_experts, shape.num_ranks
        unpack = partial(unpack_window, sizes=sizes, most_steps=_CHUNK_STEPS)
        parts: list[LoadWindow] = []
        start, held = b"+", 0
        steps_left = 2 * most + _CHUNK_STEPS  # So many to look at, also if all of them overlap.
        while held < most and steps_left > 0:
            at_once = min(steps_left, _CHUNKS_AT_ONCE)
            with self._call("read", "reading a window"):
                rows = await self._client.xrevrange(stream, start, "-", at_once)
            if not rows:
                break
            start = b"(" + rows[-1][0]
            for number, fields in rows:
                row = (f"{stream} {number.decode(errors='replace')}", fields.get(b"d", b""))
                chunk = next(iter(await self._readable("window", [row], unpack)), None)
                steps_left -= 1 if chunk is None else len(chunk)
                if chunk is not None and parts:
                    older = int(chunk.steps.searchsorted(parts[-1].steps[0]))
                    chunk = chunk.slice(slice(0, older))
                if chunk is not None and len(chunk):
                    parts.append(chunk)
                    held += len(chunk)
                if held >= most or steps_left <= 0:
                    break
        return parts

    async def forget(self, deployment: DeploymentId) -> None:
        """Drop every window of a deployment."""
        with self._call("write", "dropping windows"):
            for phase in Phase:
                await self._client.delete(*self._keys(deployment, phase))
