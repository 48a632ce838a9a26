"""A client of a real server, both stores on it, and what they cannot read."""

from typing import NamedTuple

import pytest

from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.adapters.redis.windows import RedisWindowStore
from tests.contracts.conftest import connected


class Noted(NamedTuple):
    kind: str
    where: str
    why: str


@pytest.fixture
async def client(valkey):
    async with connected(valkey.url) as client:
        yield client


@pytest.fixture
def noted():
    return []


@pytest.fixture
def unreadable(noted):
    return lambda *record: noted.append(Noted(*record))


@pytest.fixture
def store(client, unreadable):
    return RedisDeploymentStore(client, unreadable=unreadable)


@pytest.fixture
def windows(client, unreadable):
    return RedisWindowStore(client, unreadable=unreadable)
