"""The README's picture and first command: the pages show the figures of today's planner."""

import re
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from deploy.readme_picture import draw, rank_tokens
from evenkeel_moe.cli import app


def test_the_plan_lowers_the_fullest_rank_of_the_shipped_trace(tmp_path):
    _, (before, after) = rank_tokens()
    assert np.isclose(before.sum(), after.sum())
    assert after.max() / after.mean() < 1.15 < before.max() / before.mean()
    draw(tmp_path / "ranks.svg")
    assert (tmp_path / "ranks.svg").read_text().startswith("<?xml")


def test_the_pages_show_what_the_first_command_prints(tmp_path):
    readme, page = (Path(name).read_text() for name in ("README.md", "docs/offline.md"))
    command = (
        "offline examples/traces/decode_abrupt.npz --ranks 8 --slots 72 -f sglang --out map.json"
    )
    assert f"evenkeel {command}" in readme and f"$ evenkeel {command}" in page
    words = [str(tmp_path / word) if word == "map.json" else word for word in command.split()]
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, words)
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split()).replace(f"{tmp_path}/", "")
    assert shown in " ".join(page.split())
    (saved,) = re.findall(r"the plan saves [0-9.]+% of MoE time \(by tokens\)", readme)
    assert saved in shown
    _, (before, after) = rank_tokens()
    tall = f"{before.max() / before.mean():.2f} times the mean, with the plan"
    assert f"{tall} {after.max() / after.mean():.2f} times" in readme
