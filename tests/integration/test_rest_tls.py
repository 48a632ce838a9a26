"""The operators' API over TLS: who is answered, certificates that change, and the command line."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import sys

import httpx
import pytest
import structlog

from evenkeel_moe.adapters.http_servers import RestServer
from evenkeel_moe.errors import InvalidInput
from tests.adapters.serving import Authority
from tests.integration.controller_rig import Controller
from tests.waiting import deadline

pytestmark = pytest.mark.integration


@pytest.fixture
def authority(tmp_path):
    made = Authority(tmp_path / "ca")
    made.issue("leaf")
    return made


def pair(authority, name="leaf"):
    return authority.folder / f"{name}.pem", authority.folder / f"{name}.key"


async def hello(scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@contextlib.asynccontextmanager
async def serving(files):
    server = RestServer("127.0.0.1", 0, tls=files)
    running = asyncio.create_task(server.run(hello))
    try:
        yield server
    finally:
        server.stop()
        await running
        server.close()


def client(authority, scheme, server):
    trusted = ssl.create_default_context(cafile=authority.folder / "ca.pem")
    return httpx.AsyncClient(
        base_url=f"{scheme}://127.0.0.1:{server.port}",
        verify=trusted,
        trust_env=False,
        timeout=deadline(10),
    )


async def certificate(authority, server) -> str:
    """Return the name in the certificate of a new connection."""
    trusted = ssl.create_default_context(cafile=authority.folder / "ca.pem")
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusted)
    subject = dict(part[0] for part in writer.get_extra_info("peercert")["subject"])
    writer.close()
    await writer.wait_closed()
    return subject["commonName"]


async def test_a_client_that_trusts_the_ca_is_answered_and_clear_text_is_not(authority):
    async with serving(pair(authority)) as server:
        async with client(authority, "https", server) as one:
            assert (await one.get("/")).text == "https"
        async with client(authority, "http", server) as one:
            with pytest.raises(httpx.TransportError):
                await one.get("/")
        async with httpx.AsyncClient(trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"https://127.0.0.1:{server.port}/")


async def test_new_connections_get_a_replaced_certificate(authority, tmp_path):
    used = tmp_path / "tls.crt", tmp_path / "tls.key"

    def install(name):
        for source, target in zip(pair(authority, name), used, strict=True):
            shutil.copy(source, target)

    install("leaf")
    authority.issue("renewed")
    async with serving(used) as server, client(authority, "https", server) as one:
        assert await certificate(authority, server) == "leaf"
        assert (await one.get("/")).status_code == 200
        install("renewed")
        assert await certificate(authority, server) == "renewed"
        assert (await one.get("/")).status_code == 200, "an open connection goes on"
        with structlog.testing.capture_logs() as logged:
            used[1].write_text("not a key")
            for _ in range(2):
                assert await certificate(authority, server) == "renewed"
        assert [row["event"] for row in logged].count("certificate_not_taken") == 1
        install("leaf")
        assert await certificate(authority, server) == "leaf"


def test_files_that_cannot_be_used_are_named(authority):
    authority.issue("other")
    cert, key = pair(authority)[0], pair(authority, "other")[1]
    with pytest.raises(InvalidInput, match=r"leaf\.pem with the key .*other\.key"):
        RestServer("127.0.0.1", 0, tls=(cert, key))
    with pytest.raises(InvalidInput, match="No such file"):
        RestServer("127.0.0.1", 0, tls=(cert, authority.folder / "none"))
    subprocess.run(
        ["openssl", "ec", "-in", key, "-out", authority.folder / "locked", "-aes256"]
        + ["-passout", "pass:secret"],
        check=True,
        capture_output=True,
    )
    with pytest.raises(InvalidInput, match="has a passphrase"):
        RestServer("127.0.0.1", 0, tls=(cert, authority.folder / "locked"))


async def evenkeel(*words) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "evenkeel_moe", *map(str, words)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), deadline(60))
    return await process.wait(), out.decode()


async def test_the_command_line_reaches_a_controller_over_tls(authority, tmp_path):
    cert, key = pair(authority)
    data = tmp_path / "data"
    files = {"REST__TLS_CERT_FILE": str(cert), "REST__TLS_KEY_FILE": str(key)}
    async with Controller(data, **files) as controller:
        (row,) = controller.events("serving")
        assert row["console"].startswith("https://")
        url = row["console"].rstrip("/")
        words = ("status", "--address", url, "--data-dir", data)
        code, out = await evenkeel(*words, "--ca-file", authority.folder / "ca.pem")
        assert code == 0, out
        code, out = await evenkeel(*words)
        assert code == 2
        assert "is not trusted" in out and "--ca-file" in out
        code, out = await evenkeel(*words, "--ca-file", authority.folder / "none")
        assert code == 2
        assert "cannot use the CA file" in out
