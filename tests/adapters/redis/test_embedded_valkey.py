"""The embedded store: it restarts when it dies, keeps its data, and serves one controller."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from evenkeel_moe.adapters.redis import embedded_valkey
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

shared = pytest.mark.fault(
    "the owner of a data folder that others can write",
    "store files were readable by all, and links in it led out of it",
)


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
from evenkeel_moe.adapters.redis import embedded_valkey
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
        # The server of the killed controller ended in order, with its writes on disk.
        assert "ready to exit" in (tmp_path / "data" / "valkey.log").read_text()
    finally:
        await server.stop()


async def test_a_folder_serves_one_controller_at_a_time(valkey, monkeypatch):
    monkeypatch.setattr(embedded_valkey, "_FREE_WITHIN_S", 0.2)
    second = EmbeddedValkey(valkey.data_dir)
    with pytest.raises(InvalidInput, match="in use by another controller"):
        await second.start()
    with pytest.raises(Unavailable, match="not started"):
        assert second.url
    await second.stop()


@shared
@pytest.mark.parametrize("before", ["no folder", "an open folder", "files of an earlier version"])
async def test_the_files_of_the_store_are_for_their_owner_alone(tmp_path, before):
    data = tmp_path / "data"
    umask = os.umask(0)
    try:
        if before != "no folder":
            data.mkdir(mode=0o777)
        if before == "files of an earlier version":
            (data / "valkey.log").touch(0o666)
            (data / "appendonlydir").mkdir(0o777)
        server = EmbeddedValkey(data)
        await server.start()
        await server.stop()
    finally:
        os.umask(umask)
    modes = {path: path.stat().st_mode & 0o777 for path in [data, *data.rglob("*")]}
    assert len(modes) > 4
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in modes}


@shared
@pytest.mark.parametrize("name", ["lock", "socket-folder", "valkey.log", "appendonlydir", "x/y"])
@pytest.mark.parametrize("target", ["a file", "a folder", "nothing"])
async def test_a_link_in_the_folder_is_refused_by_name(tmp_path, name, target):
    theirs, link = tmp_path / "theirs", tmp_path / "data" / name
    if target == "a file":
        theirs.write_text("theirs")
    elif target == "a folder":
        theirs.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(theirs)
    with pytest.raises(InvalidInput, match=rf"^{link} is a link"):
        await EmbeddedValkey(tmp_path / "data").start()
    assert theirs.exists() == (target != "nothing")
    assert target != "a file" or theirs.read_text() == "theirs"
    assert target != "a folder" or not [*theirs.iterdir()]


@shared
async def test_a_link_in_place_of_the_folder_is_refused_by_name(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "theirs")
    with pytest.raises(InvalidInput, match=rf"^{tmp_path / 'data'} is a link"):
        await EmbeddedValkey(tmp_path / "data").start()
    assert not [*(tmp_path / "theirs").iterdir()]


@shared
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", [".", "lock", "socket-folder", "appendonlydir"])
async def test_what_another_user_made_in_the_folder_is_refused_by_name(tmp_path, name):
    entry = tmp_path / "data" / name
    (tmp_path / "data").mkdir()
    if name != ".":
        entry.touch()
    os.chown(entry, 4242, -1)
    with pytest.raises(InvalidInput, match=rf"^{entry} belongs to user 4242"):
        await EmbeddedValkey(tmp_path / "data").start()


@shared
async def test_a_socket_of_another_is_left_alone(tmp_path):
    """The note of the last socket is in the folder, where another user may have written it."""
    theirs, data = tmp_path / "evenkeel-theirs", tmp_path / "data"
    theirs.mkdir()
    (theirs / "valkey.sock").touch()
    data.mkdir()
    (data / "socket-folder").write_text(str(theirs))
    server = EmbeddedValkey(data)
    await server.start()
    await server.stop()
    assert (theirs / "valkey.sock").exists()
