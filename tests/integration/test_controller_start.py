"""A controller that cannot start: one line that says why, and exit code 2."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from evenkeel_moe.controller.process.options import advertised_address
from evenkeel_moe.settings_sources import load_settings
from tests.waiting import deadline

AS_GRPC_LOADS = """
import os, sys

class Witness:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ["GRPC_EXPERIMENTS"])

sys.meta_path.insert(0, Witness())
import evenkeel_moe.cli, evenkeel_moe.controller
import asyncio, grpc
from tests.waiting import deadline

async def listen():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(0)

asyncio.run(listen())
"""


@pytest.mark.parametrize("own", [None, "-tcp_rcv_lowat"])
def test_grpc_gets_its_setting_before_it_is_loaded_unless_an_operator_set_it(own):
    """gRPC reads this once. If it is set later, a message costs twice as much without any error."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    if own is not None:
        environment["GRPC_EXPERIMENTS"] = own
    done = subprocess.run(
        [sys.executable, "-c", AS_GRPC_LOADS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline(60),
    )
    assert done.stdout.split() == [own or "-event_engine_listener"], done.stderr
    assert "Unknown experiment" not in done.stderr


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("GRPC", "cannot listen for ranks on 127.0.0.1:"),
        ("DATA_DIR", "cannot use the data folder"),
        ("VALKEY", "cannot use the data folder"),
    ],
)
def test_what_is_in_the_way_of_a_start_is_one_line(tmp_path, what, words):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")
    }
    environment |= {f"EVENKEEL_{server}__PORT": "0" for server in ("GRPC", "REST", "METRICS")}
    environment |= {
        "EVENKEEL_DATA_DIR": str(tmp_path / "data"),
        "EVENKEEL_REDIS__URL": "redis://127.0.0.1:9",
    }
    with ExitStack() as stack:
        if what == "DATA_DIR":
            (tmp_path / "data").write_text("a file")
        elif what == "VALKEY":
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "valkey").write_text("a file")
            del environment["EVENKEEL_REDIS__URL"]
        else:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            environment[f"EVENKEEL_{what}__PORT"] = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "evenkeel_moe", "serve"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=deadline(60),
        )
    assert done.stderr.startswith("starting a controller: gRPC on 127.0.0.1:")
    assert f"data in {tmp_path / 'data'}" in done.stderr.splitlines()[0]
    # gRPC's own C library writes lines of its own.
    told = [line for line in done.stderr.splitlines() if line.startswith("evenkeel: ")]
    assert len(told) == 1, done.stderr
    assert words in told[0] and "GRPC_VERBOSITY" not in told[0]
    if "listen" in words:
        assert f"{what.lower()}.port choose another address" in told[0]
        assert f"EVENKEEL_{what}__PORT" in told[0]
    else:
        assert "choose another address" not in told[0]
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert not (tmp_path / "data" / "tokens").exists(), "a script would take it for a start"


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("::1", "", "[::1]:50051"),
        ("[::1]", "", "[::1]:50051"),
        ("::", "", f"{socket.gethostname()}:50051"),
        ("10.0.0.7", "", "10.0.0.7:50051"),
        ("::", "[2001:db8::7]:443", "[2001:db8::7]:443"),
    ],
)
def test_ranks_are_sent_to_an_address_they_can_call(monkeypatch, host, advertise, told):
    monkeypatch.setenv("EVENKEEL_GRPC__HOST", host)
    monkeypatch.setenv("EVENKEEL_GRPC__ADVERTISE", advertise)
    assert advertised_address(load_settings().grpc, 50051) == told
