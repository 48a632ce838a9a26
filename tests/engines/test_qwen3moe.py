"""The Hugging Face example end to end: experts move, outputs stay equal."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import deadline

pytestmark = [pytest.mark.engines, pytest.mark.integration, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent.parent


def test_outputs_stay_equal_across_a_migration():
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "examples.qwen3moe"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=deadline(280), check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "moved" in ended.stdout
    assert ended.stdout.count("served {'requests': 48") == 2
    assert "equal, bit for bit" in ended.stdout
