"""A key of another Redis type than ours is set aside, and the deployment is led all the same."""

import pytest

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from evenkeel_moe.adapters.redis.wrong_types import ASIDE, type_of
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.load import Phase
from evenkeel_moe.ports.stores import Lease
from tests.contracts.conftest import valkey
from tests.contracts.test_stores import make_window
from tests.controller.leadership.test_bad_records import PREFIX, fill, lead_and_look
from tests.controller.replicas import DEMO

__all__ = ["valkey"]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
KEYS = [
    "evenkeel:seen",
    *(
        PREFIX + name
        for name in (
            "lease",
            "term",
            "written",
            "plans",
            "plan_maps",
            "plan_story",
            "plan_order",
            "plans_open",
            "epochs",
            "replaced_epochs",
            "documents",
            "decisions",
            "window:decode",
            "window_total:decode",
            "window_chunks:decode",
            "window_source:decode",
        )
    ),
]


@pytest.fixture
async def client(valkey):
    client = connect(valkey.url, timeout_s=10.0)
    await client.flushall()
    yield client
    await disconnect(client)


async def put_wrong_type(client, key: str) -> None:
    await client.delete(key)
    if type_of(key) == b"string":
        await client.rpush(key, "wrong")
    else:
        await client.set(key, "wrong")


async def test_every_key_of_a_deployment_has_a_known_type(client):
    await fill(client, RedisDeploymentStore(client), RedisWindowStore(client))
    for key in await client.keys("*"):
        assert await client.type(key) == type_of(key.decode()), key


@pytest.mark.parametrize("key", KEYS)
async def test_a_key_of_a_wrong_type_costs_only_what_it_held(client, key):
    await fill(client, RedisDeploymentStore(client), RedisWindowStore(client))
    await put_wrong_type(client, key)
    noted = set((await lead_and_look(client)).noted)
    windows = RedisWindowStore(client, unreadable=lambda _kind, where, _why: noted.add(where))
    await windows.append(DEMO, Phase.DECODE, make_window(range(3)))
    parts = (PREFIX + "plan_maps", PREFIX + "plan_story")
    assert noted == {key} | ({PREFIX + "plans p"} if key in parts else set())
    assert await client.type(key + ASIDE) != b"none", "nothing is thrown away"


async def test_writes_that_wait_for_replicas_meet_wrong_types_too(client):
    noted: list[str] = []
    store = RedisDeploymentStore(
        client,
        wait_replicas=1,
        wait_s=0.01,
        unreadable=lambda _kind, where, _why: noted.append(where),
    )
    lease: Lease = await store.acquire_lease(DEMO, "a", 60.0, 4)
    await put_wrong_type(client, PREFIX + "documents")
    with pytest.raises(Exception, match="0 of 1 replicas") as failed:
        await store.store_document(DEMO, "policy", {}, lease.term)
    assert getattr(failed.value, "reason", None) is Reason.STORE_UNAVAILABLE
    assert noted == [PREFIX + "documents"]
    assert await store.fetch_document(DEMO, "policy") == {}
