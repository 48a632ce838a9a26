"""`evenkeel replay` refuses wrong options, traces and output paths with typed errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from evenkeel_moe.cli import app as whole
from evenkeel_moe.cli.replay import app
from evenkeel_moe.errors import EvenkeelError, InvalidInput, ShapeMismatch
from evenkeel_moe.formats import Trace, write_trace
from tests.cli.conftest import FLEET, SMALL, run_replay


@pytest.mark.parametrize(
    ("command", "options", "error", "words"),
    [
        (
            *("compare SMALL", {"dispatch": "waterfill"}, InvalidInput),
            "dispatch: waterfill needs shared_experts: it places their work",
        ),
        (
            *("compare SMALL --out /tmp", {}, InvalidInput),
            r"--out /tmp: a comparison is written as \*.html or \*.npz",
        ),
        ("plan FLEET --out /tmp", {}, InvalidInput, "/tmp is a folder: name a file in it"),
        ("compare SMALL --out /a.npz --out /b.npz", {}, InvalidInput, "there is another .npz"),
        ("compare SMALL", {"rank_speeds": [1e-320, 1]}, ShapeMismatch, "s: 2 positive ones"),
        ("compare SMALL", {"rank_speeds": [1]}, ShapeMismatch, "2 positive ones are needed, got 1"),
        ("compare SMALL", {"nodes": 3}, ShapeMismatch, "2 ranks do not divide over 3 nodes"),
        ("compare --ranks 3 --slots 10", {}, ShapeMismatch, "10 slots do not divide over 3 ranks"),
        ("compare --ranks 2 --slots 6", {}, ShapeMismatch, "cannot hold 8 experts"),
        (
            *("compare --ranks 2 --slots 18", {}, ShapeMismatch),
            "9 per rank, the model has 8 experts; at most 16",
        ),
        ("compare SMALL --out /nowhere/at/a.html", {}, InvalidInput, "is no folder /nowhere/at"),
        (
            *("plan --out x FLEET -p craft", {"craft_replicas": "most"}, InvalidInput),
            "craft_replicas most is neither memory, knee, per_replica_gain nor a number",
        ),
        (
            *("plan --out x FLEET -p keel+verdict", {}, InvalidInput),
            r"keel\+verdict compares its plan with the current placement: give it with --current",
        ),
        (
            *("plan --out x FLEET -p eplb", {"first_moe_layer": 2**31 - 2}, InvalidInput),
            r"layer ids must rise within 0..2147483647, got 2147483646, 2147483647, 2147483648",
        ),
        (
            *("plan --out x --ranks 2", {"window": 99}, InvalidInput),
            "window 99: the trace has 40 steps",
        ),
    ],
)
def test_wrong_options_are_refused_with_the_numbers(small, command, options, error, words):
    for name, arguments in (("SMALL", SMALL), ("FLEET", FLEET)):
        command = command.replace(name, " ".join(map(str, arguments)))
    action, *more = command.split()
    with pytest.raises(error, match=words):
        run_replay(action, small, *more, **options)


def test_results_are_printed_even_if_the_disk_is_full(small, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for page in (str(tmp_path / "page.html"), str(tmp_path / "plans.npz")):
        args = ["compare", str(small), *map(str, SMALL), "-p", "eplb", "-o", "json", "--out", page]
        result = CliRunner().invoke(app, args)
        assert json.loads(result.stdout)["replans"] == 4
        assert isinstance(result.exception, InvalidInput)
        assert str(result.exception) == f"{page}: cannot be written: No space left on device"
    with pytest.raises(InvalidInput, match="b: cannot be written: No space left"):
        run_replay("plan", small, *FLEET, "-p", "eplb", "--out", tmp_path / "b")


def test_output_paths_are_checked_before_the_trace_is_read(tmp_path):
    for name, message in (
        ("no/where", "there is no folder"),
        ("a" * 300, "cannot be written: File name too long"),
    ):
        with pytest.raises(InvalidInput, match=message):
            run_replay("plan", tmp_path / "absent.npz", "--out", tmp_path / name)


@pytest.mark.fault("a user of evenkeel replay", "the answer was written over the recording")
@pytest.mark.parametrize("words", ["offline", "replay plan", "replay compare --window 8"])
def test_a_recording_is_never_written_over(small, tmp_path, words):
    before = small.read_bytes()
    (tmp_path / "link.npz").symlink_to(small)
    for out in (small, tmp_path / "link.npz"):
        args = [*words.split(), str(small), *map(str, FLEET), "--out", str(out)]
        error = CliRunner().invoke(whole, args).exception
        assert isinstance(error, InvalidInput)
        assert str(error) == f"{out} is named for two files: one would replace the other"
    assert small.read_bytes() == before


def test_a_trace_without_load_is_refused(tmp_path):
    write_trace(tmp_path / "idle.npz", Trace(np.zeros((40, 2, 8), np.int64), (0, 1)))
    for command in ("plan", "compare"):
        with pytest.raises(InvalidInput, match="none of the 40 steps routed a token"):
            run_replay(command, tmp_path / "idle.npz", *FLEET, "--out", tmp_path / "o.npz")


def test_a_missing_trace_is_a_typed_error(tmp_path):
    with pytest.raises(EvenkeelError, match="no such file"):
        run_replay("inspect", tmp_path / "absent.npz")
