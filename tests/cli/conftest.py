import socket
import sys
import threading

import pytest
import uvicorn

from evenkeel_moe.api import TokenSet, create_app
from evenkeel_moe.cli import main
from tests.api.fakes import make_operations

OPERATE = "operate-token-0123456789"
READ = "read-token-0123456789"


@pytest.fixture
def operations():
    return make_operations()


@pytest.fixture
def url(operations):
    """Run a real server over the fake operations, and return its URL."""
    tokens = TokenSet.parse(f"alice operate {OPERATE}\nbob read {READ}\n")
    config = uvicorn.Config(
        create_app(operations, tokens), log_level="error", lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # So that connections wait until the server's thread is ready.
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()
    listener.close()


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that runs a command and returns (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["evenkeel", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return ended.value.code, out.out, out.err

    return call


@pytest.fixture
def run(url, command, monkeypatch):
    """The same, with the URL and a token of the server."""

    def call(*arguments, token=OPERATE):
        monkeypatch.setenv("EVENKEEL_URL", url)
        monkeypatch.setenv("EVENKEEL_TOKEN", token)
        return command(*arguments)

    return call
