import io
import json
import socket
import sys
import tempfile
import threading
from functools import cache, partial

import numpy as np
import pytest
import uvicorn
from typer.main import get_command
from typer.testing import CliRunner

from evenkeel_moe.api import create_app
from evenkeel_moe.cli import app, main
from evenkeel_moe.cli.console import SafeConsole
from evenkeel_moe.formats import Trace, write_trace
from tests.api.conftest import OPERATE, TOKENS
from tests.api.fakes import make_operations

FLEET = ("--ranks", 2, "--slots", 10)
SMALL = (*FLEET, "--window", 8, "--horizon", 8)
"""Options of `evenkeel replay` that fit the trace `small`."""


def all_commands(command=None, path=()):
    """Yield (words, command) of every command and every group of commands, the upper ones first."""
    command = command or get_command(app)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from all_commands(child, (*path, name))


ALL = dict(all_commands())
COMMANDS = {
    path: command
    for path, command in ALL.items()
    if not hasattr(command, "commands") or command.invoke_without_command
}
"""Every command that does something itself, by its words."""


@cache
def help_of(path, width):
    """Return the help of a command in a terminal of a width."""
    result = CliRunner().invoke(app, [*path, "--help"], terminal_width=width)
    assert result.exit_code == 0
    return result.output


def replay_words(*args, **config):
    """Return arguments as text, with those of a file of `--config` that holds the others."""
    words = [str(arg) for arg in args]
    if config:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
            json.dump(config, file, default=str)
        words += ["--config", file.name]
    return words


def run_command(*args, code=0, **config):
    """Run a command on a recording in this process, and return its stdout."""
    words = replay_words(*args, **config)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


run_replay = partial(run_command, "replay")


def replayed(*args, **config):
    """Run `evenkeel replay` in this process, and return its answer as JSON."""
    return json.loads(run_replay(*args, "-o", "json", **config))


def drawn(renderable, width=80, wide=False):
    """Return the lines of a table or a view in a terminal of a width."""
    console = SafeConsole(width=width, wide=wide)
    with console.capture() as captured:
        console.print(renderable, crop=False)
    return [line.rstrip() for line in captured.get().splitlines()]


class Terminal(io.StringIO):
    """Standard input or output that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _wide_pipe(monkeypatch, tmp_path):
    """Let tables be as wide as in a pipe, and no context of whoever runs the tests be read."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("EVENKEEL_CONTEXTS", str(tmp_path / "contexts.json"))


@pytest.fixture
def small(tmp_path):
    """Return a trace of 3 MoE layers after 2 dense ones, with source counts of 2 ranks."""
    source = np.random.default_rng(7).multinomial(160, [1 / 8] * 8, (40, 2, 3))
    source[:, :, :, 2] += 60
    source[20:, :, :, 6] += 90
    path = tmp_path / "small.npz"
    write_trace(path, Trace(source.sum(axis=1), (2, 3, 4), source=source))
    return path


@pytest.fixture
def operations():
    return make_operations()


@pytest.fixture
def url(operations):
    """Run a real server over the fake operations, and return its URL."""
    rest = create_app(operations, TOKENS)
    config = uvicorn.Config(rest, log_level="error", lifespan="off", ws="none")
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
        monkeypatch.setenv("EVENKEEL_ADDRESS", url)
        monkeypatch.setenv("EVENKEEL_TOKEN", token)
        return command(*arguments)

    return call
