"""The command line before servers that are no controller, and controllers that do not lead."""

import http.server
import json
import threading
from contextlib import contextmanager

import pytest

from evenkeel_moe.cli import client
from evenkeel_moe.cli.client import Exit
from tests.cli.test_commands import command, operations, run, url

__all__ = ["command", "operations", "run", "url"]  # fixtures


@contextmanager
def server_of(answer):
    """The address of a server; answer: told a caller's address, the (status, body) it gets."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            status, body = answer(self.client_address)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (501, b"<p>no</p>"),
        (404, b"\xff"),
        (200, b"# HELP x\nx 1\n"),
        (200, b""),
        (200, b"\xff\xfe"),
        (200, b"[]"),
        (200, b'{"status": "ok"}'),
        (200, b'{"items": null, "next_page_token": null}'),
    ],
)
def test_a_server_that_is_no_controller(run, status, body):
    """The metrics port, for one."""

    with server_of(lambda _: (status, body)) as address:
        code, out, err = run("status", "--url", address)
    assert (code, out) == (Exit.REFUSED, "")
    assert "is it an Evenkeel controller?" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("elsewhere", [3, 10**9])
def test_an_address_of_several_replicas_is_asked_until_the_leader_answers(
    run, monkeypatch, elsewhere
):
    monkeypatch.setattr(client, "_RETRY_PAUSE_S", 0.05)
    monkeypatch.setattr(client, "_RETRY_FOR_S", 1.0)
    led = {
        "title": "Out of reach",
        "detail": "demo is led by b at b:1",
        "reason": "not_leader",
        "leader": "b",
    }
    callers = []

    def answer(caller):
        callers.append(caller)
        leads = len(callers) > elsewhere
        return (200 if leads else 503), json.dumps({"mode": "auto"} if leads else led).encode()

    with server_of(answer) as address:
        code, out, err = run("policy", "-d", "demo", "--url", address)
    assert len(set(callers)) == len(callers), "the same connection leads to the same replica"
    if elsewhere == 3:
        assert (code, len(callers)) == (Exit.DONE, 4)
        assert "auto" in out
    else:
        assert code == Exit.UNAVAILABLE and 3 < len(callers) < 100
        assert "led by b at b:1 (not_leader)" in err
