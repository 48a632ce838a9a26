"""`evenkeel replay` refuses wrong options, traces and output paths with typed errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evenkeel_moe.cli.replay import app
from evenkeel_moe.errors import EvenkeelError, InvalidInput, ShapeMismatch
from tests.cli.conftest import FLEET, SMALL, run_replay


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (
            ("compare", "--ranks", 2, "--window", 20),
            InvalidInput,
            r"\(40 - window 20\) // horizon 50 = 0, at least 4",
        ),
        (
            ("compare", *SMALL, "-p", "eplb,nobody"),
            InvalidInput,
            "unknown policies nobody; known: initial",
        ),
        (
            ("compare", *SMALL, "--dispatch", "waterfill"),
            InvalidInput,
            "--dispatch waterfill needs --shared-experts: it places their work",
        ),
        (
            ("compare", *SMALL, "--html", "/tmp"),
            InvalidInput,
            "/tmp is a folder: name a file in it",
        ),
        (("compare", *SMALL, "--save-plans", "/tmp"), InvalidInput, "/tmp is a folder"),
        (("compare", *SMALL, "--rank-speeds", "1e-320,1"), ShapeMismatch, "2 positive rank speeds"),
        (
            ("compare", *SMALL, "--rank-speeds", "1,x"),
            InvalidInput,
            "could not convert string to float",
        ),
        (
            ("compare", *SMALL, "--rank-speeds", "1"),
            ShapeMismatch,
            "2 positive rank speeds are needed, got 1",
        ),
        (("compare", *SMALL, "--nodes", 3), ShapeMismatch, "2 ranks do not divide over 3 nodes"),
        (
            ("compare", "--ranks", 3, "--slots", 10),
            ShapeMismatch,
            "10 slots do not divide over 3 ranks",
        ),
        (("compare", "--ranks", 2, "--slots", 6), ShapeMismatch, "cannot hold 8 experts"),
        (
            ("compare", "--ranks", 2, "--slots", 18),
            ShapeMismatch,
            "9 per rank, the model has 8 experts; at most 16",
        ),
        (
            ("compare", *SMALL, "--html", "/nowhere/at/all.html"),
            InvalidInput,
            "there is no folder /nowhere/at",
        ),
        (
            ("compare", *SMALL, "-p", "eplb", "--free-bytes", 5),
            InvalidInput,
            "are for craft, which is not among the policies",
        ),
        (
            ("plan", "-o", "x", *FLEET, "-p", "craft", "--craft-replicas", "most"),
            InvalidInput,
            "--craft-replicas most is neither memory, knee, per_replica_gain nor a number",
        ),
        (
            ("plan", "-o", "x", *FLEET, "-p", "keel+verdict"),
            InvalidInput,
            r"keel\+verdict compares its plan with the current placement: give it with --current",
        ),
        (
            ("plan", "-o", "x", "-f", "lists"),
            InvalidInput,
            "unknown placement format 'lists'; known: neutral",
        ),
        (
            ("plan", "-o", "x", *FLEET, "-p", "eplb", "--first-moe-layer", 2**31 - 2),
            InvalidInput,
            r"layer ids must rise within 0..2147483647, got 2147483646, 2147483647, 2147483648",
        ),
        (
            ("plan", "-o", "x", "--ranks", 2, "--window", 99),
            InvalidInput,
            "--window 99: the trace has 40 steps",
        ),
    ],
)
def test_wrong_options_are_refused_with_the_numbers(small, args, error, message):
    with pytest.raises(error, match=message):
        run_replay(args[0], "-t", small, *args[1:])


def test_results_are_printed_even_if_the_disk_is_full(small, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    page = str(tmp_path / "page.html")
    for option in ("--html", "--save-plans"):
        args = ["compare", "-t", str(small), *map(str, SMALL), "-p", "eplb", "--json", option, page]
        result = CliRunner().invoke(app, args)
        assert json.loads(result.stdout)["replans"] == 4
        assert isinstance(result.exception, InvalidInput)
        assert str(result.exception) == f"{page}: cannot be written: No space left on device"
    with pytest.raises(InvalidInput, match="b: cannot be written: No space left"):
        run_replay("plan", "-t", small, *FLEET, "-p", "eplb", "-o", tmp_path / "b")


def test_output_paths_are_checked_before_the_trace_is_read(tmp_path):
    one, same = tmp_path / "one", tmp_path / "." / ".." / tmp_path.name / "one"
    with pytest.raises(InvalidInput, match="one is named for two files"):
        run_replay("compare", "-t", tmp_path / "absent.npz", "--html", one, "--save-plans", same)
    for name, message in (
        ("no/where", "there is no folder"),
        ("a" * 300, "cannot be written: File name too long"),
    ):
        with pytest.raises(InvalidInput, match=message):
            run_replay("plan", "-t", tmp_path / "absent.npz", "-o", tmp_path / name)


def test_a_missing_trace_is_a_typed_error(tmp_path):
    with pytest.raises(EvenkeelError, match="no such file"):
        run_replay("inspect", "-t", tmp_path / "absent.npz")
