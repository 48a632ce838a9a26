import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from typing import get_args

import pytest

from evenkeel_moe.cli.exits import Exit
from evenkeel_moe.cli.run import DispatchOption
from evenkeel_moe.engines.reference.config import DispatchRule, RankConfig
from evenkeel_moe.engines.reference.fleet_report import FleetReport
from tests.waiting import deadline


def write_config(tmp_path, **changes):
    path = tmp_path / "config.json"
    values = {
        "run_folder": str(tmp_path / "run"),
        "num_ranks": 1,
        "slots_per_rank": 16,
        "pool_slots_per_layer": 16,
        "layers": 2,
        "tokens_per_step": 32,
        "steps": 3,
        "rendezvous": f"file://{tmp_path}/rendezvous",
    }
    path.write_text(RankConfig(**{**values, **changes}).to_json())
    return str(path)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (None, (), "cannot read"),
        ("{", (), "is not JSON"),
        ('{"nonsense": 1}', (), "not a rank configuration"),
        ("", (), "--rank"),
        ("", ("--rank", "7"), "outside"),
    ],
)
def test_a_rank_that_cannot_start_reports_why(command, tmp_path, text, options, says):
    path = str(tmp_path / "missing") if text is None else write_config(tmp_path)
    if text:
        (tmp_path / "config.json").write_text(text)
    code, _, err = command("rank", path, *options)
    assert code == Exit.USAGE
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.integration
def test_a_single_rank_runs_to_its_final_check(tmp_path):
    command = [sys.executable, "-m", "evenkeel_moe", "rank", write_config(tmp_path), "--rank", "0"]
    done = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines()
    ]
    assert [line["ok"] for line in lines if line["kind"] == "check"] == [True]


@pytest.mark.integration
def test_a_fleet_says_what_it_starts_and_what_its_checks_found(tmp_path):
    options = ["--ranks", "2", "--steps", "3", "--step-s", "0", "--controller", "127.0.0.1:9"]
    options += ["--kv-free-bytes", "5000000", "--dispatch", "waterfill"]
    done = subprocess.run(
        [sys.executable, "-m", "evenkeel_moe", "fleet", *options, "--out", tmp_path],
        timeout=deadline(60),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        (
            "starting 2 ranks of reference for 3 steps; controller 127.0.0.1:9; logs are"
            f" {tmp_path}/rank-*.log"
        ),
        done.stderr.splitlines()[-1],
    ]
    ended = "the ranks ended after 3 steps and 0 restarts"
    alone = "they were never connected to a controller: "
    assert done.stderr.splitlines()[-1].startswith(
        f"{ended}: all 2 checks of weights and outputs passed; {alone}"
    )
    assert (tmp_path / "rank-1.log").exists()
    config = json.loads((tmp_path / "config.json").read_text())
    # Keys and values of 4 layers of 64 numbers, 4 bytes each.
    assert (config["kv_bytes_per_token"], config["kv_free_bytes"]) == (2048, 5_000_000)
    assert config["dispatch"] == "waterfill"


def test_every_rule_of_the_engine_can_be_chosen():
    (rules, _option) = get_args(DispatchOption)
    assert get_args(rules) == tuple(DispatchRule)


@pytest.mark.integration
def test_a_fleet_on_a_terminal_shows_the_step(tmp_path, monkeypatch):
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "evenkeel_moe", "fleet", "--ranks", "2", "--steps", "60"]
    options = ["--step-s", "0.05", "--controller", "127.0.0.1:9", "--out", tmp_path]
    monkeypatch.setenv("TERM", "xterm")
    with subprocess.Popen([*command, *options], stderr=terminal) as fleet:
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # Linux says EIO at the end.
            while part := os.read(main, 65536):
                shown += part
        assert fleet.wait(deadline(60)) == 0, shown
    os.close(main)
    found = re.findall(rb"step (\d+) of 60 served", shown)
    assert b"ranks are starting: they load torch and connect to each other" in shown
    assert found and all(int(step) < 60 for step in found)


@pytest.mark.parametrize("address", ["http://127.0.0.1:50071", "localhost", "[::1]", "a:b", ""])
def test_a_fleet_with_a_controller_that_is_no_host_and_port_is_refused(command, tmp_path, address):
    code, out, err = command("fleet", "--controller", address, "--out", str(tmp_path / "f"))
    assert (code, out) == (Exit.USAGE, "")
    assert err == (
        f"evenkeel: controller {address!r} is not host:port of its gRPC server, such as"
        " 127.0.0.1:50051\n"
    )
    assert not (tmp_path / "f").exists()


def test_a_resize_without_a_fleet_is_refused(command, tmp_path):
    code, out, err = command("fleet", "resize", "--ranks", "6", "--out", str(tmp_path))
    assert (code, out) == (Exit.USAGE, "")
    assert err == (
        f"evenkeel: no fleet runs in the folder {tmp_path}; --out names the folder of one\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_fleet_that_failed_says_how():
    alone = FleetReport(True, (0, 0), 0, 7, unconnected="in use").words
    assert alone.endswith("passed; they were never connected to a controller: in use")
    assert FleetReport(False, (0, -9), 3, 7).words == (
        "the ranks ended after 7 steps and 3 restarts, with exit codes 0, -9: not every check was"
        " made"
    )
    assert "after 7 steps and 1 restart, with" in FleetReport(False, (1, 0), 1, 7).words
    assert FleetReport(False, (1, 0), 0, 7, ("a", "b")).words.endswith("1, 0: 2 problems")


def test_an_option_before_the_command_is_not_ignored(run, tmp_path):
    code, _, err = run("fleet", "--out", str(tmp_path), "resize", "--ranks", "3")
    assert (code, err) == (2, "evenkeel: --out is given before resize, not after it\n")
    assert (
        "no fleet runs in the folder"
        in run("fleet", "resize", "--ranks", "3", "--out", str(tmp_path))[2]
    )
