"""The window store on a real server: chunks, their bound, lost answers, and two writers."""

from typing import Any

import pytest
from redis.asyncio.client import Pipeline
from redis.exceptions import TimeoutError

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.encoding import (
    pack_window,
)
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.load import Phase
from tests.contracts.test_stores import (
    DEMO,
    assert_same,
    fetch,
    make_window,
)


async def test_parts_given_together_share_chunks(valkey):
    client = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client, capacity=512), make_window(range(200))
    await windows.append(
        DEMO, Phase.DECODE, *(window.slice(slice(i, i + 5)) for i in range(0, 200, 5))
    )
    assert await client.xlen("evenkeel:{demo}:window:decode") == 4
    assert_same(await fetch(windows), window)
    await disconnect(client)


@pytest.mark.parametrize("lost", ["window_total", "window_chunks"])
async def test_a_window_stays_bounded_when_its_count_is_lost(valkey, lost):
    client: Any = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client, capacity=20), make_window(range(200))
    for first in range(0, 40, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
    await client.delete(f"evenkeel:{{demo}}:{lost}:decode")
    for first in range(40, 200, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
        found = await fetch(windows)
        assert found is not None
        assert_same(found, window.slice(slice(0, first + 8)).last(20))
        assert await client.xlen("evenkeel:{demo}:window:decode") <= (3 if first >= 64 else 6)
    await disconnect(client)


async def test_chunks_whose_answers_are_lost_are_still_counted(valkey, monkeypatch):
    """The store has the steps, but the controller got no answer and appends them again."""
    client: Any = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client, capacity=20), make_window(range(400))
    execute = Pipeline.execute

    async def lost(self, raise_on_error=True):
        await execute(self, raise_on_error)
        raise TimeoutError("no answer")

    await windows.append(DEMO, Phase.DECODE, window.slice(slice(0, 8)))
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "execute", lost)
        for first in range(8, 392, 4):
            with pytest.raises(Unavailable):
                await windows.append(DEMO, Phase.DECODE, window.slice(slice(8, first + 8)))
            assert await client.xlen("evenkeel:{demo}:window:decode") <= 4
    assert 0 < await client.pttl("evenkeel:{demo}:window:decode")
    await windows.append(DEMO, Phase.DECODE, window.slice(slice(8, 400)))
    found = await fetch(windows)
    assert found is not None
    assert_same(found, window.last(20))
    await disconnect(client)


async def test_a_chunk_whose_count_was_lost_on_the_way_does_not_stay(valkey):
    client: Any = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client, capacity=20), make_window(range(64))
    chunk = {"n": 8, "d": pack_window(window.slice(slice(0, 8)))}
    await client.xadd("evenkeel:{demo}:window:decode", chunk)
    for first in range(0, 64, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
        found = await fetch(windows)
        assert found is not None
        assert_same(found, window.slice(slice(0, first + 8)).last(20))
    assert await client.xlen("evenkeel:{demo}:window:decode") == 3
    await disconnect(client)


async def test_steps_two_writers_stored_twice_are_read_once(valkey):
    client = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client), make_window(range(20))
    for cut in (slice(0, 8), slice(4, 12), slice(8, 14), slice(14, 20)):
        await windows.append(DEMO, Phase.DECODE, window.slice(cut))
    found = await fetch(windows)
    assert found is not None
    assert_same(found, window)
    await disconnect(client)
