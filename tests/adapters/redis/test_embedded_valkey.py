"""The embedded store: it restarts when it dies, keeps its data, and serves one controller."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.errors import InvalidInput, Unavailable
from evenkeel_moe.model.load import Phase
from tests.contracts.test_stores import (
    DEMO,
    assert_same,
    every_plan,
    fetch,
    make_record,
    make_window,
)
from tests.waiting import deadline, until


async def test_the_server_is_started_again_when_it_dies_and_nothing_is_lost(valkey):
    client = connect(valkey.url, timeout_s=2)
    store = RedisDeploymentStore(client)
    watch = asyncio.create_task(valkey.watch())
    await store.store_plan(make_record(), 1)
    os.kill(valkey.pid, signal.SIGKILL)

    async def plans():
        with contextlib.suppress(Unavailable):
            return await every_plan(store)

    assert len(await until(plans)) == 1
    assert valkey.starts == 2
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await disconnect(client)


async def test_the_data_outlives_the_server(tmp_path):
    for round_ in range(2):
        server = EmbeddedValkey(tmp_path / "data")
        await server.start()
        client = connect(server.url, timeout_s=2)
        if round_ == 0:
            await RedisWindowStore(client).append(DEMO, Phase.DECODE, make_window(range(5)))
            await RedisDeploymentStore(client).store_plan(make_record(), 4)
        else:
            found = await fetch(RedisWindowStore(client))
            assert found is not None
            assert_same(found, make_window(range(5)))
            assert (await RedisDeploymentStore(client).acquire_lease(DEMO, "a", 1, 0)).term == 5
        await disconnect(client)
        await server.stop()
        await server.stop()


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
async def main():
    server = EmbeddedValkey(Path(sys.argv[1]))
    await server.start()
    print(server.url, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_a_killed_controllers_socket_folder_is_cleared_away(tmp_path):
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _KILLED, str(tmp_path / "data"), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(killed.communicate(), deadline(60))
    left = Path(out.decode().strip().removeprefix("unix://")).parent
    assert killed.returncode == -signal.SIGKILL and left.is_dir()
    server = EmbeddedValkey(tmp_path / "data")
    await server.start()
    try:
        assert not left.exists() and str(left) not in server.url
    finally:
        await server.stop()


async def test_a_folder_serves_one_controller_at_a_time(valkey):
    second = EmbeddedValkey(valkey.data_dir, start_timeout_s=0.2)
    with pytest.raises(InvalidInput, match="in use by another controller"):
        await second.start()
    with pytest.raises(Unavailable, match="not started"):
        assert second.url
    await second.stop()
