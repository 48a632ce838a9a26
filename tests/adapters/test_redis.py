"""What only the real store has: URL forms, outages, damage, persistence, bounds in the server."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError

from evenkeel.adapters.embedded_valkey import EmbeddedValkey
from evenkeel.adapters.redis_client import SentinelLogin, connect, disconnect, eviction_policies, store_errors
from evenkeel.adapters.redis_store import RedisDeploymentStore
from evenkeel.adapters.redis_windows import RedisWindowStore
from evenkeel.adapters.stored_forms import (
    Unreadable,
    pack_placement,
    pack_plan,
    pack_source,
    pack_window,
    unpack_placement,
    unpack_plan,
    unpack_source,
    unpack_window,
)
from evenkeel.errors import InvalidInput, Reason, Unavailable
from evenkeel.model.ids import Epoch, PlanId
from evenkeel.model.load import Phase
from tests.contracts.conftest import valkey
from tests.contracts.test_stores import BASE, DEMO, assert_same, every_plan, make_record, make_window

__all__ = ["valkey"]


# --- URL forms ---------------------------------------------------------------------------------


async def test_url_forms_are_told_apart():
    plain: Any = connect("redis://:secret@127.0.0.1:7001/3", timeout_s=1)
    assert plain.connection_pool.connection_kwargs["db"] == 3
    secure: Any = connect("rediss://127.0.0.1:7001", timeout_s=1)
    assert secure.connection_pool.connection_class.__name__ == "SSLConnection"
    cluster = connect("redis+cluster://127.0.0.1:7001", timeout_s=1)
    assert type(cluster).__name__ == "RedisCluster"
    sentinel: Any = connect("redis+sentinel://me:p%40ss@h1:26379,h2:26380/main/2", timeout_s=1)
    pool = sentinel.connection_pool
    assert pool.service_name == "main"
    assert pool.connection_kwargs["db"] == 2
    assert pool.connection_kwargs["password"] == "p@ss"
    nodes = [node.connection_pool.connection_kwargs for node in pool.sentinel_manager.sentinels]
    assert [(node["host"], node["port"]) for node in nodes] == [("h1", 26379), ("h2", 26380)]


def test_sentinels_have_credentials_and_files_of_their_own():
    def both(url: str, login: SentinelLogin | None = None) -> tuple[Any, Any]:
        client: Any = connect(url, timeout_s=1, sentinel=login)
        pool = client.connection_pool
        return pool, pool.sentinel_manager.sentinels[0].connection_pool

    store, theirs = both("redis+sentinel://me:pw@h1:1/main")
    assert store.connection_class.__name__ == "SentinelManagedConnection"
    assert theirs.connection_class.__name__ == "Connection"
    # The store's password is nothing to a Sentinel.
    assert theirs.connection_kwargs["password"] is None

    files = "ssl_ca_certs=/ca&ssl_certfile=/cert&ssl_keyfile=/key"
    store, theirs = both(
        f"rediss+sentinel://h1:1/main?{files}&sentinel_ssl_ca_certs=/other", SentinelLogin("u", "p")
    )
    assert store.connection_class.__name__ == "SentinelManagedSSLConnection"
    assert theirs.connection_class.__name__ == "SSLConnection"
    assert [store.connection_kwargs[f"ssl_{name}"] for name in ("ca_certs", "certfile")] == ["/ca", "/cert"]
    assert [theirs.connection_kwargs[f"ssl_{name}"] for name in ("ca_certs", "certfile")] == [
        "/other",
        "/cert",
    ]
    assert [theirs.connection_kwargs[name] for name in ("username", "password")] == ["u", "p"]

    store, theirs = both("rediss+sentinel://h1:1/main?sentinel_ssl=false&sentinel_password=p%26q")
    assert store.connection_class.__name__ == "SentinelManagedSSLConnection"
    assert theirs.connection_class.__name__ == "Connection"
    assert theirs.connection_kwargs["password"] == "p&q"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis+sentinel://h1:1/main?ssl_ca_certs=/ca", "it needs rediss\\+sentinel"),
        ("redis+sentinel://h1:1/main?sentinel_ssl_ca_certs=/ca", "it needs sentinel_ssl=true"),
        ("rediss+sentinel://h1:1/main?sentinel_ssl=yes", "neither true nor false"),
        ("rediss+sentinel://h1:1/main?sentinal_ssl=true", "unknown options sentinal_ssl"),
    ],
)
def test_options_that_would_be_ignored_are_refused(url, words):
    with pytest.raises(InvalidInput, match=words):
        connect(url, timeout_s=1)


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_a_password_given_apart_beats_the_one_in_the_url(scheme):
    client: Any = connect(f"{scheme}://me:old@127.0.0.1:7001/3", timeout_s=1, password="new")
    options = client.connection_pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("me", "new", 3)
    sentinel: Any = connect("redis+sentinel://me:old@h1:1/main", timeout_s=1, password="new")
    options = sentinel.connection_pool.connection_kwargs
    assert (options["username"], options["password"]) == ("me", "new")
    alone: Any = connect(f"{scheme}://:old@127.0.0.1:7001", timeout_s=1, password="new")
    assert alone.connection_pool.connection_kwargs["password"] == "new"


@pytest.mark.parametrize(
    "url",
    [
        "http://:secret@127.0.0.1",
        "127.0.0.1:6379",
        "redis+sentinel://h1:26379",
        "redis+sentinel://h1/main",
        "redis+sentinel://:secret@h1:x/main",
        "",
    ],
)
def test_urls_of_another_form_are_refused_without_their_password(url):
    with pytest.raises(InvalidInput) as caught:
        connect(url, timeout_s=1)
    assert "secret" not in str(caught.value)


async def test_a_sentinel_leads_to_the_master(valkey, unused_tcp_port_factory, tmp_path):
    """A real sentinel process watching a real server."""
    master = EmbeddedValkey(tmp_path / "master")
    await master.start()
    admin = connect(master.url, timeout_s=5)
    port, sentinel_port = unused_tcp_port_factory(), unused_tcp_port_factory()
    await admin.config_set("port", port)
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {sentinel_port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {port} 1\n"
        f"dir {tmp_path}\nlogfile {tmp_path}/sentinel.log\n"
    )
    process = await asyncio.create_subprocess_exec(master._command()[0], str(config), "--sentinel")
    client = connect(f"redis+sentinel://127.0.0.1:{sentinel_port}/main", timeout_s=2)
    store = RedisDeploymentStore(client)
    try:
        for _ in range(100):
            try:
                await store.ping()
                break
            except Unavailable:
                await asyncio.sleep(0.05)
        await store.store_document(DEMO, "policy", {"mode": "auto"}, 1)
        direct = RedisDeploymentStore(admin)
        assert await direct.fetch_document(DEMO, "policy") == {"mode": "auto"}
    finally:
        process.terminate()
        await process.wait()
        await disconnect(client)
        await disconnect(admin)
        await master.stop()


# --- outages -----------------------------------------------------------------------------------


async def test_an_unreachable_store_is_unavailable_and_comes_back(valkey):
    client = connect(valkey.url, timeout_s=0.3)
    store, windows = RedisDeploymentStore(client), RedisWindowStore(client)
    await store.store_plan(make_record(), 1)
    assert valkey.pid is not None
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        calls = (
            store.ping(),
            store.acquire_lease(DEMO, "a", 1, 0),
            store.store_epoch(DEMO, Epoch(1), BASE, 1),
            store.append_decision(DEMO, {}),
            store.plan_order(DEMO),
            store.fetch_plans(DEMO, [PlanId("p")]),
            store.deployments(),
            windows.append(DEMO, Phase.DECODE, make_window(range(3))),
            windows.fetch(DEMO, Phase.DECODE),
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
    for result in results:
        assert isinstance(result, Unavailable), result
        assert result.reason is Reason.STORE_UNAVAILABLE
    await store.ping()
    assert len(await every_plan(store)) == 1
    await disconnect(client)


@pytest.mark.parametrize("answer", [b"PONG", ConnectionError("gone")])
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(answer):
    """redis-py sends with `asyncio.wait_for`, which forgets it before Python 3.12."""
    sent = asyncio.get_running_loop().create_future()

    async def forever():
        while True:
            with contextlib.suppress(Unavailable), store_errors("ping"):
                await asyncio.wait_for(sent, 60)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(forever())
    await asyncio.sleep(0.01)
    if isinstance(answer, Exception):
        sent.set_exception(answer)
    else:
        sent.set_result(answer)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()


async def test_a_cancelled_task_may_still_write_what_it_leaves_behind(valkey):
    client = connect(valkey.url, timeout_s=2)
    store = RedisDeploymentStore(client)

    async def leave():
        try:
            await asyncio.sleep(60)
        finally:
            await store.store_plan(make_record(), 1)

    task = asyncio.create_task(leave())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert len(await every_plan(store)) == 1
    await disconnect(client)


async def test_the_server_is_started_again_when_it_dies_and_nothing_is_lost(valkey):
    client = connect(valkey.url, timeout_s=2)
    store = RedisDeploymentStore(client)
    watch = asyncio.create_task(valkey.watch())
    await store.store_plan(make_record(), 1)
    os.kill(valkey.pid, signal.SIGKILL)
    for _ in range(200):
        try:
            found = await every_plan(store)
            break
        except Unavailable:
            await asyncio.sleep(0.02)
    assert len(found) == 1
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
            found = await RedisWindowStore(client).fetch(DEMO, Phase.DECODE)
            assert found is not None
            assert_same(found, make_window(range(5)))
            assert (await RedisDeploymentStore(client).acquire_lease(DEMO, "a", 1, 0)).term == 5
        await disconnect(client)
        await server.stop()
        await server.stop()


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from evenkeel.adapters.embedded_valkey import EmbeddedValkey
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
    out, _ = await asyncio.wait_for(killed.communicate(), 60)
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


# --- damage ------------------------------------------------------------------------------------


FORMS = [
    (pack_window(make_window(range(3))), unpack_window),
    (pack_source(make_window(range(3), source=True).source), unpack_source),
    (pack_placement(BASE), unpack_placement),
    (pack_plan(make_record()), unpack_plan),
]


@given(st.sampled_from(FORMS), st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4))
def test_damaged_values_are_unreadable_and_nothing_worse(form, cuts):
    data, unpack = form
    damaged = bytearray(data)
    for position, value in cuts:
        damaged[position % len(damaged)] = value
    try:
        unpack(bytes(damaged))
    except Unreadable:
        pass


@given(st.sampled_from(FORMS), st.binary(max_size=60))
def test_foreign_values_are_unreadable_and_nothing_worse(form, data):
    for value in (data, form[0][: len(data)]):
        with pytest.raises(Unreadable):
            form[1](value)


async def test_what_cannot_be_read_is_left_out(valkey):
    client = connect(valkey.url, timeout_s=2)
    store, windows = RedisDeploymentStore(client), RedisWindowStore(client)
    await store.store_plan(make_record("good"), 1)
    await store.store_plan(make_record("bad"), 1)
    await store.store_epoch(DEMO, Epoch(1), BASE, 1)
    await client.hset("evenkeel:{demo}:plans", "bad", b"\0noise")
    await client.hset("evenkeel:{demo}:epochs", "2", b"noise")
    await client.hset("evenkeel:{demo}:documents", "policy", b"[1")
    await client.xadd("evenkeel:{demo}:decisions", {"d": b"noise"})
    await store.append_decision(DEMO, {"cycle": 1})
    await windows.append(DEMO, Phase.DECODE, make_window(range(3)))
    await client.xadd("evenkeel:{demo}:window:decode", {"n": 1, "d": b"noise"})
    await client.set("evenkeel:{demo}:window_source:decode", b"noise")
    assert [record.plan.plan_id for record in await every_plan(store)] == ["good"]
    assert list(await store.fetch_epochs(DEMO)) == [1]
    assert await store.fetch_document(DEMO, "policy") is None
    assert await store.fetch_decisions(DEMO, 10) == [{"cycle": 1}]
    found = await windows.fetch(DEMO, Phase.DECODE)
    assert found is not None
    assert_same(found, make_window(range(3)))
    await disconnect(client)


# --- bounds and overlaps -----------------------------------------------------------------------


async def test_everything_of_a_deployment_shares_a_hash_tag_and_windows_expire(valkey):
    client: Any = connect(valkey.url, timeout_s=2)
    store, windows = RedisDeploymentStore(client), RedisWindowStore(client, ttl_s=60)
    await store.acquire_lease(DEMO, "a", 60, 0)
    await store.store_plan(make_record(), 1)
    await store.append_decision(DEMO, {})
    await windows.append(DEMO, Phase.DECODE, make_window(range(3), source=True))
    keys = {key.decode() for key in await client.keys("*")}
    assert {key for key in keys if "{demo}" not in key} == {"evenkeel:seen"}
    expiring = [key for key in keys if "window" in key]
    assert len(expiring) == 3
    for key in expiring:
        assert 0 < await client.pttl(key) <= 60_000
    await disconnect(client)


async def test_plans_and_streams_are_bounded_in_the_server(valkey):
    client = connect(valkey.url, timeout_s=2)
    store = RedisDeploymentStore(client, plans_kept=3)
    for number in range(6):
        await store.store_plan(make_record(f"p{number}", 100.0 + number), 1)
    assert await client.hlen("evenkeel:{demo}:plans") == 3
    windows = RedisWindowStore(client, capacity=100)
    window = make_window(range(1000))
    for first in range(0, 1000, 8):
        await windows.append(DEMO, Phase.DECODE, window.slice(slice(first, first + 8)))
    assert await client.xlen("evenkeel:{demo}:window:decode") == 13
    await disconnect(client)


async def test_steps_two_writers_stored_twice_are_read_once(valkey):
    client = connect(valkey.url, timeout_s=2)
    windows, window = RedisWindowStore(client), make_window(range(20))
    for cut in (slice(0, 8), slice(4, 12), slice(8, 14), slice(14, 20)):
        await windows.append(DEMO, Phase.DECODE, window.slice(cut))
    found = await windows.fetch(DEMO, Phase.DECODE)
    assert found is not None
    assert_same(found, window)
    await disconnect(client)


async def test_a_cluster_takes_every_command(tmp_path, unused_tcp_port_factory):
    """One node of a real cluster that owns all slots."""
    port, bus_port = unused_tcp_port_factory(), unused_tcp_port_factory()
    server = EmbeddedValkey(tmp_path / "probe")
    await server.start()
    binary = server._command()[0]
    await server.stop()
    process = await asyncio.create_subprocess_exec(
        binary,
        *("--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes"),
        *("--cluster-port", str(bus_port)),
        *("--dir", str(tmp_path), "--save", "", "--logfile", str(tmp_path / "log")),
    )
    try:
        plain = connect(f"redis://127.0.0.1:{port}", timeout_s=2)
        for _ in range(100):
            try:
                await plain.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                break
            except ConnectionError:
                await asyncio.sleep(0.05)
        for _ in range(100):
            if b"cluster_state:ok" in bytes(await plain.execute_command("CLUSTER", "INFO")):
                break
            await asyncio.sleep(0.05)
        await disconnect(plain)
        client = connect(f"redis+cluster://127.0.0.1:{port}", timeout_s=2)
        store, windows = RedisDeploymentStore(client), RedisWindowStore(client)
        lease = await store.acquire_lease(DEMO, "a", 60, 0)
        assert await store.renew_lease(DEMO, lease, 60)
        assert await eviction_policies(client) == frozenset({"noeviction"})
        await store.store_plan(make_record(), lease.term)
        await store.store_epoch(DEMO, Epoch(1), BASE, lease.term)
        await store.append_decision(DEMO, {"cycle": 1})
        await windows.append(DEMO, Phase.DECODE, make_window(range(3), source=True))
        assert len(await every_plan(store)) == 1
        assert await store.deployments() == [DEMO]
        assert await windows.fetch(DEMO, Phase.DECODE) is not None
        await windows.forget(DEMO)
        await store.ping()
        await disconnect(client)
    finally:
        process.terminate()
        await process.wait()
