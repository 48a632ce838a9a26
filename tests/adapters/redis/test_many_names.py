"""The store reads only a limited number of names from a list that has too many."""

from typing import Any

import pytest

from evenkeel_moe.adapters.redis.client import connect, disconnect
from evenkeel_moe.adapters.redis.encoding import pack_placement
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.unpacking import NAMES_BYTES, READ_NAMES
from evenkeel_moe.adapters.redis.wrong_types import ASIDE
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.ports.stores import Lease
from tests.contracts.test_stores import BASE, DEMO, make_record

PREFIX = f"evenkeel:{{{DEMO}}}:"
SEEN = "evenkeel:seen"
MANY = READ_NAMES + 7
FILL = """
for i = 1, ARGV[1] do
  local name = string.format(ARGV[3], i)
  if ARGV[2] == 'ZADD' then redis.call('ZADD', KEYS[1], i, name)
  elseif ARGV[2] == 'HSET' then redis.call('HSET', KEYS[1], name, 1)
  else redis.call('RPUSH', KEYS[1], name) end
end
"""
"""Enters names into a key. ARGV: their number, the command, their form."""


class Case:
    """A store and what it could not read."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.noted: dict[str, str] = {}
        self.store = RedisDeploymentStore(client, unreadable=self._note)

    def _note(self, _kind: str, where: str, why: str) -> None:
        self.noted[where] = why

    async def fill(self, command: str, key: str, form: str = "n%d") -> None:
        """Enter too many names into a key."""
        await self.client.eval(FILL, 1, key, MANY, command, form)


@pytest.fixture
async def case(valkey):
    client = connect(valkey.url, timeout_s=20.0)
    yield Case(client)
    await disconnect(client)


async def test_of_a_sorted_set_of_many_names_the_newest_are_read(case):
    for key in (SEEN, PREFIX + "plan_order"):
        await case.fill("ZADD", key)
    plans = await case.store.plan_order(DEMO)
    assert len(plans) == READ_NAMES
    assert (plans[0], plans[-1]) == ((f"n{MANY}", float(MANY)), ("n8", 8.0))
    assert set(await case.store.deployments()) == {name for name, _ in plans}
    why = f"has {MANY} names, only the newest {READ_NAMES} are read"
    assert case.noted == {PREFIX + "plan_order": why, SEEN: why}


async def test_plans_beyond_those_kept_are_dropped_a_thousand_at_a_time(case):
    await case.fill("ZADD", PREFIX + "plan_order")
    await case.store.store_plan(make_record("p1", created_at=1e9), 1)
    assert await case.client.zcard(PREFIX + "plan_order") == MANY + 1 - 1000
    assert (await case.store.plan_order(DEMO))[0] == ("p1", 1e9)


@pytest.mark.parametrize("name", ["plans_open", "epochs"])
async def test_a_hash_of_many_names_is_set_aside(case, name):
    key = PREFIX + name

    async def read() -> list:
        if name == "epochs":
            return list(await case.store.fetch_epochs(DEMO))
        return list(await case.store.open_plans(DEMO))

    await case.fill("HSET", key, "%d")
    assert await read() == []
    why = f"has {MANY} names, at most {READ_NAMES} are read; kept as {key}{ASIDE}"
    assert case.noted == {key: why}
    assert await case.client.hlen(key + ASIDE) == MANY
    assert await case.client.pttl(key + ASIDE) > 0
    await case.store.store_plan(make_record("p1"), 1)
    await case.store.store_epoch(DEMO, Epoch(7), BASE, 1)
    assert await read() == ([7] if name == "epochs" else ["p1"])


async def test_of_a_list_of_many_epochs_the_newest_are_read(case):
    key = PREFIX + "replaced_epochs"
    await case.client.rpush(key, b"5 " + pack_placement(BASE))
    await case.fill("RPUSH", key, "x")
    assert await case.store.fetch_replaced_epochs(DEMO) == [(5, BASE)]
    why = f"has more than {READ_NAMES} rows, only the newest {READ_NAMES} are read"
    assert case.noted.pop(key) == why
    assert set(case.noted) == {f"{key} b'x'"}


async def test_names_of_megabytes_are_left_out(case):
    long = "x" * (NAMES_BYTES // 2)
    await case.client.zadd(PREFIX + "plan_order", {long + "a": 3, long + "b": 2, "p": 1})
    await case.client.hset(PREFIX + "plans_open", mapping={long + "a": 1, long + "b": 1})
    await case.client.hset(PREFIX + "plans_open", "p", 1)
    assert [name for name, _ in await case.store.plan_order(DEMO)] == [long + "a", "p"]
    assert "p" in await case.store.open_plans(DEMO)
    assert all("more than are left" in why for why in case.noted.values())
    assert len(case.noted) == 2


async def test_a_lease_whose_holder_has_megabytes_is_not_read(case):
    key = PREFIX + "lease"
    await case.client.hset(key, mapping={"holder": "x" * (1 << 22), "term": 7})
    assert await case.store.fetch_lease(DEMO) is None
    assert list(case.noted) == [key]
    assert await case.store.acquire_lease(DEMO, "a", 60.0, 0) == Lease("a", 1)
    assert case.noted == {key: "it has term 7 and a holder of 4194304 bytes"}


@pytest.mark.parametrize(("names", "lasting"), [((), 0), (("leader",), 0), (("policy",), 1)])
async def test_a_deployment_with_a_document_beside_the_leader_is_lasting(case, names, lasting):
    for name in names:
        await case.client.hset(PREFIX + "documents", name, "{}")
    assert (await case.store.acquire_lease(DEMO, "a", 60.0, 0, lasting=False)).lasting == lasting
