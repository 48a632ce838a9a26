"""The window store on a real server: chunks, their bound, lost answers, and two writers."""

import struct

import numpy as np
import pytest
from redis.asyncio.client import Pipeline
from redis.exceptions import TimeoutError

from evenkeel_moe.adapters.redis.encoding import pack_source, pack_window
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.load import Phase
from tests.contracts.test_stores import (
    DEMO,
    assert_same,
    fetch,
    make_window,
)

PREFIX = f"evenkeel:{{{DEMO}}}:"
STREAM, SUMS = PREFIX + "window:decode", PREFIX + "window_source:decode"


async def test_parts_given_together_share_chunks(client):
    windows, window = RedisWindowStore(client, capacity=512), make_window(range(200))
    await windows.append(
        DEMO, Phase.DECODE, *(window.slice(slice(i, i + 5)) for i in range(0, 200, 5))
    )
    assert await client.xlen("evenkeel:{demo}:window:decode") == 4
    assert_same(await fetch(windows), window)


@pytest.mark.parametrize("lost", ["window_total", "window_chunks"])
async def test_a_window_stays_bounded_when_its_count_is_lost(client, lost):
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


async def test_chunks_whose_answers_are_lost_are_still_counted(client, monkeypatch):
    """The store has the steps, but the controller got no answer and appends them again."""
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


async def test_a_chunk_whose_count_was_lost_on_the_way_does_not_stay(client):
    windows, window = RedisWindowStore(client, capacity=20), make_window(range(64))
    chunk = {"n": 8, "d": pack_window(window.slice(slice(0, 8)))}
    await client.xadd("evenkeel:{demo}:window:decode", chunk)
    for first in range(0, 64, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
        found = await fetch(windows)
        assert found is not None
        assert_same(found, window.slice(slice(0, first + 8)).last(20))
    assert await client.xlen("evenkeel:{demo}:window:decode") == 3


async def test_steps_two_writers_stored_twice_are_read_once(windows):
    window = make_window(range(20))
    for cut in (slice(0, 8), slice(4, 12), slice(8, 14), slice(14, 20)):
        await windows.append(DEMO, Phase.DECODE, window.slice(cut))
    found = await fetch(windows)
    assert found is not None
    assert_same(found, window)


def chunk_head(steps: int, layers: int = 2, experts: int = 3, ranks: int = 2) -> bytes:
    return struct.pack("<BBIIII", 2, 4, steps, layers, experts, ranks)


async def test_chunks_of_another_shape_are_not_unpacked_and_the_others_are_read(
    client, windows, noted
):
    await windows.append(DEMO, Phase.DECODE, make_window(range(3)))
    heads = [
        chunk_head(64, layers=1024, experts=256),
        chunk_head(3, layers=1),
        chunk_head(3, experts=4),
        chunk_head(3, ranks=1),
        chunk_head(65),
    ]
    for number, head in enumerate(heads, 1):
        await client.xadd(STREAM, {"d": head + b"no frame"}, id=f"9999999999999-{number}")
    found = await fetch(windows)
    assert found is not None and found.steps.tolist() == [0, 1, 2]
    assert len(noted) == len(heads) and all("expected at most 64" in one.why for one in noted)


async def test_only_as_many_chunks_are_read_as_the_window_needs(client, windows, noted):
    await client.xadd(STREAM, {"d": b"oldest"}, id="1-1")
    window = make_window(range(100))
    await windows.append(DEMO, Phase.DECODE, window)
    assert_same(await fetch(windows, most=20), window.last(20))
    assert not noted
    assert_same(await fetch(windows), window)
    assert [one.where for one in noted] == [f"{STREAM} 1-1"]


async def test_a_stream_of_chunks_that_all_overlap_is_read_to_a_limit(client):
    windows = RedisWindowStore(client, capacity=64)
    window = make_window(range(64))
    data = pack_window(window.slice(slice(0, 8)))
    await client.xadd(STREAM, {"d": pack_window(window.slice(slice(8, 16)))}, id="1-1")
    for number in range(2, 40):
        await client.xadd(STREAM, {"d": data}, id=f"1-{number}")
    found = await fetch(windows)
    assert found is not None and found.steps.tolist() == list(range(8)), "1-1 is too far back"


@pytest.mark.parametrize("sizes", [(1, 2, 3), (4, 2, 3), (2, 1, 3), (2, 2, 4)])
async def test_sums_of_another_shape_are_set_aside(client, windows, noted, sizes):
    await windows.append(DEMO, Phase.DECODE, make_window(range(3), source=True))
    await client.set(SUMS, pack_source(np.ones(sizes, np.uint32)))
    found = await fetch(windows)
    assert found is not None and found.source is None
    assert [one.where for one in noted] == [SUMS]
