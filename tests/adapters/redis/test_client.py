"""Connections to a store: URLs, credentials for Sentinels, outages and cancellations."""

import asyncio
import contextlib
import os
import signal
from typing import Any

import pytest
from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import ConnectionError

from evenkeel_moe.adapters.redis.client import SentinelLogin, connect, disconnect, store_errors
from evenkeel_moe.adapters.redis.embedded_valkey import EmbeddedValkey
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.errors import InvalidInput, Reason, Unavailable
from evenkeel_moe.model.ids import DeploymentId, Epoch, PlanId
from evenkeel_moe.model.load import Phase
from tests.contracts.conftest import connected
from tests.contracts.test_stores import BASE, DEMO, every_plan, fetch, make_record, make_window

# --- URL forms ---------------------------------------------------------------------------------
from tests.waiting import deadline, until


async def test_url_forms_are_distinguished():
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
    assert [store.connection_kwargs[f"ssl_{name}"] for name in ("ca_certs", "certfile")] == [
        "/ca",
        "/cert",
    ]
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


@pytest.mark.fault(
    "an operator with a misspelt option in the URL of the store",
    "the controller ended with an ExceptionGroup after it had said that it was ready",
)
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://me:secret@h:1?bogus=1", "unknown options bogus; known are db"),
        ("rediss://h:1?ssl_ca_cert=/ca", "unknown options ssl_ca_cert"),
        ("unix:///run/valkey.sock?retry=5", "unknown options retry"),
        ("redis+cluster://:secret@h:1?bogus=1", "unknown options bogus"),
        ("redis://h:1?ssl_ca_certs=/ca", "ssl_... without TLS: it needs rediss$"),
        ("redis+cluster://h:1?ssl_ca_certs=/ca", "it needs rediss\\+cluster$"),
        ("rediss://h:1?ssl_cert_reqs=perhaps", "perhaps"),
        ("redis://h:1?socket_timeout=soon", "socket_timeout"),
        ("redis://h:1/main", "database 'main' is no number"),
        ("redis+cluster://h:1/main", "database 'main' is no number"),
        ("redis+cluster://h:1/3", "'db' must be 0"),
        ("rediss+cluster://h:1?ssl_ca_path=/ca", "ssl_ca_path"),
    ],
)
def test_options_that_redis_would_refuse_later_stop_the_start(url, words):
    with pytest.raises(InvalidInput, match=words) as caught:
        connect(url, timeout_s=1)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:1/3?client_name=a&health_check_interval=5",
        "rediss://h:1?ssl_ca_certs=/ca&ssl_cert_reqs=none&ssl_check_hostname=false",
        "unix:///run/valkey.sock?db=2",
        "rediss+cluster://h:1?ssl_ca_certs=/ca",
    ],
)
def test_options_that_redis_takes_are_taken(url):
    assert connect(url, timeout_s=1) is not None


@pytest.mark.fault(
    "a controller whose cluster is out of reach",
    "the client's error was no store error: the task that asked ended, and the controller with it",
)
async def test_a_cluster_out_of_reach_is_unavailable(unused_tcp_port):
    async with connected(f"redis+cluster://127.0.0.1:{unused_tcp_port}", timeout_s=1) as client:
        with pytest.raises(Unavailable, match="RedisClusterException"):
            await RedisDeploymentStore(client).ping()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_a_separate_password_overrides_the_one_in_the_url(scheme):
    client: Any = connect(f"{scheme}://me:old@127.0.0.1:7001/3", timeout_s=1, password="new")
    options = client.connection_pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("me", "new", 3)
    sentinel: Any = connect("redis+sentinel://me:old@h1:1/main", timeout_s=1, password="new")
    options = sentinel.connection_pool.connection_kwargs
    assert (options["username"], options["password"]) == ("me", "new")
    cluster: Any = connect(f"{scheme}+cluster://me:old@h1:1", timeout_s=1, password="new")
    (node,) = cluster.nodes_manager.startup_nodes.values()
    for options in (cluster.connection_kwargs, node.connection_kwargs):
        assert (options["username"], options["password"]) == ("me", "new")
    assert node.connection_class is (SSLConnection if scheme == "rediss" else Connection)
    for rest in (":old@127.0.0.1:7001", "127.0.0.1:7001?password=old&db=3"):
        alone: Any = connect(f"{scheme}://{rest}", timeout_s=1, password="new")
        assert alone.connection_pool.connection_kwargs["password"] == "new"


@pytest.mark.parametrize("url", ["{}", "{}?password=old&db=0", "{}?db=0&password=old"])
async def test_a_separate_password_opens_a_server_behind_a_unix_socket(valkey, url):
    admin: Any = connect(valkey.url, timeout_s=2)
    await admin.config_set("requirepass", "new")
    named: Any = connect(valkey.url.replace("://", "://default@"), timeout_s=2, password="new")
    client: Any = connect(url.format(valkey.url), timeout_s=2, password="new")
    try:
        assert await client.ping() and await named.ping()
        with pytest.raises(ConnectionError, match="invalid username-password"):
            await connect(valkey.url, timeout_s=2, password="old").ping()
    finally:
        await admin.config_set("requirepass", "")
        for one in (admin, named, client):
            await disconnect(one)


@pytest.mark.parametrize(
    "url",
    [
        "http://:secret@127.0.0.1",
        "127.0.0.1:6379",
        "redis+sentinel://h1:26379",
        "redis+sentinel://h1/main",
        "redis+sentinel://:secret@h1:x/main",
        "redis:me:secret@h1",
        "redis://:secret@[::1",
        "",
    ],
)
@pytest.mark.parametrize("password", [None, "new"])
def test_urls_of_another_form_are_refused_without_their_password(url, password):
    with pytest.raises(InvalidInput) as caught:
        connect(url, timeout_s=1, password=password)
    assert "secret" not in str(caught.value)


async def answers(store):
    """Return True if the store answers."""
    try:
        await store.ping()
    except Unavailable:
        return False
    return True


async def test_a_sentinel_leads_to_the_master(unused_tcp_port_factory, tmp_path):
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
    url = f"redis+sentinel://127.0.0.1:{sentinel_port}/main"
    client = connect(url, timeout_s=2, connections=150)
    store = RedisDeploymentStore(client)
    try:
        await until(lambda: answers(store))
        # More than there may be connections: those that open ask the Sentinel at the same time.
        await asyncio.gather(*(store.has_records(DEMO) for _ in range(400)))
        await store.store_document(DEMO, "policy", {"mode": "auto"}, 1)
        direct = RedisDeploymentStore(admin)
        assert await direct.fetch_document(DEMO, "policy") == {"mode": "auto"}
    finally:
        process.terminate()
        await process.wait()
        await disconnect(client)
        await disconnect(admin)
        await master.stop()


# --- connections -------------------------------------------------------------------------------

full = pytest.mark.fault(
    "a fleet beside a stranger", "220 groups of one rank took its lease: the store's pool was full"
)


@full
async def test_calls_wait_for_one_of_the_connections_there_may_be(valkey, client):
    names = [DeploymentId(f"d-{number}") for number in range(300)]
    async with connected(valkey.url, connections=4) as few:
        store = RedisDeploymentStore(few)
        won = await asyncio.gather(*(store.acquire_lease(name, "a", 60, 0) for name in names))
        assert [lease.holder for lease in won] == ["a"] * 300
        assert len(await client.client_list()) == 4 + 1


@full
async def test_leases_are_renewed_while_all_connections_of_other_calls_are_in_use(valkey):
    client, leases = (connect(valkey.url, timeout_s=60, connections=2) for _ in range(2))
    store = RedisDeploymentStore(client, leases=leases)
    calls = [asyncio.ensure_future(client.blpop("never", 60)) for _ in range(5)]
    try:
        async with asyncio.timeout(deadline(10)):
            lease = await store.acquire_lease(DEMO, "a", 60, 0)
            assert await store.renew_lease(DEMO, lease, 60)
            await store.release_lease(DEMO, lease)
        assert not any(call.done() for call in calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await disconnect(client)
        await disconnect(leases)


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
            store.open_plans(DEMO),
            store.fetch_plans(DEMO, [PlanId("p")]),
            store.deployments(),
            windows.append(DEMO, Phase.DECODE, make_window(range(3))),
            fetch(windows),
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
    """redis-py sends with `asyncio.wait_for`, which loses it before Python 3.12."""
    sent = asyncio.get_running_loop().create_future()

    async def forever():
        while True:
            with contextlib.suppress(Unavailable), store_errors("ping"):
                await asyncio.wait_for(sent, 60)
            await asyncio.sleep(0)

    task = asyncio.create_task(forever())
    await asyncio.sleep(0)
    if isinstance(answer, Exception):
        sent.set_exception(answer)
    else:
        sent.set_result(answer)
    task.cancel()
    await asyncio.wait([task], timeout=deadline(5))
    assert task.cancelled()


async def test_a_cancelled_task_may_still_write_what_it_leaves_behind(store):
    async def leave():
        try:
            await asyncio.Event().wait()
        finally:
            await store.store_plan(make_record(), 1)

    task = asyncio.create_task(leave())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=deadline(5))
    assert task.cancelled()
    assert len(await every_plan(store)) == 1
