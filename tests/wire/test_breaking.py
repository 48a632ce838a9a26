"""The check against the released protocol finds changes that would break ranks of that version."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.buf
ROOT = Path(__file__).parents[2]
BUF = ROOT / ".cache" / "buf" / "node_modules" / ".bin" / "buf"


def check(proto: Path) -> tuple[int, str]:
    released = ROOT / "proto" / "evenkeel.v1.binpb"
    done = subprocess.run(
        [BUF, "breaking", proto, "--against", released],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=proto,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def changed(tmp_path):
    """changed(old, new) -> the protocol with one line of agent.proto replaced."""

    def change(old: str, new: str) -> Path:
        copy = tmp_path / "proto"
        shutil.copytree(ROOT / "proto", copy)
        file = copy / "evenkeel" / "v1" / "agent.proto"
        text = file.read_text()
        assert text.count(old) == 1, old
        file.write_text(text.replace(old, new))
        return copy

    return change


def test_the_present_protocol_breaks_nothing():
    assert check(ROOT / "proto") == (0, "")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  string gpu_uuid = 4;", "  uint64 gpu_uuid = 4;", "changed type from"),
        ("  string gpu_uuid = 4;", "", 'field "4" with name "gpu_uuid"'),
        ("  string gpu_uuid = 4;", "  string gpu_uuid = 99;", 'field "4" with name "gpu_uuid"'),
        # The number given to another field: old ranks would be misread.
        ("  string gpu_uuid = 4;", "  string rack = 4;", "changed name"),
        ("(stream RankMessage)", "(RankMessage)", "from client streaming to client unary"),
        ("    CostCurve cost_curve = 10;\n", "", 'field "10" with name "cost_curve"'),
        ("service RankLink {", "service RankStream {", 'service "RankLink" was deleted'),
    ],
)
def test_a_breaking_change_is_named(changed, old, new, words):
    code, said = check(changed(old, new))
    assert code == 100
    assert words in said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  string gpu_uuid = 4;", "  string gpu_uuid = 4;\n  string rack = 900;"),
        (
            "    CostCurve cost_curve = 10;\n",
            "    CostCurve cost_curve = 10;\n    Heartbeat other = 900;\n",
        ),
    ],
)
def test_additions_break_nothing(changed, old, new):
    assert check(changed(old, new)) == (0, "")
