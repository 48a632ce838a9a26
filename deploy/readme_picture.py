"""Draws the picture of the README from the shipped trace: `make readme-picture`.

It shows the tokens of each rank in the least balanced layer, on steps that the plan has not seen:
under the placement with which an engine starts, and under the plan.
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from deploy.chart_values import ROOT
from evenkeel_moe.formats import read_trace
from evenkeel_moe.formats.placements import PlacementFormat
from evenkeel_moe.planning.problem.metrics import rank_load
from evenkeel_moe.replay.from_options import replay_setup
from evenkeel_moe.replay.offline import engine_start, plan_offline
from evenkeel_moe.replay.options import ReplayOptions

__all__ = ["draw", "rank_tokens"]

TRACE = ROOT / "examples" / "traces" / "decode_abrupt.npz"
PICTURE = ROOT / "docs" / "images" / "ranks.svg"
_RANKS, _SLOTS = 8, 72
_FULLEST, _OTHERS, _MEAN = "#b85c00", "#8aa9c8", "#1c2126"


def rank_tokens() -> tuple[int, NDArray[np.float64]]:
    """Return the layer and its mean tokens a step: (2, R), before and after the plan."""
    trace = read_trace(TRACE)
    setup = replay_setup(
        trace,
        ReplayOptions(ranks=_RANKS, slots=_SLOTS, fill_slots=True),  # as for -f sglang
        window_steps=1,
        horizon_steps=1,
    )
    start = engine_start(PlacementFormat.SGLANG, setup.shape)
    plan = plan_offline("keel", setup, start)
    later = setup.load[plan.planned_on :]
    tokens = np.stack([rank_load(later, map_).mean(axis=0) for map_ in (start, plan.placement)])
    layer = int((tokens[0].max(axis=1) / tokens[0].mean(axis=1)).argmax())
    return layer, tokens[:, layer]


def draw(file: Path = PICTURE) -> None:
    """Write the picture as SVG."""
    layer, tokens = rank_tokens()
    figure = Figure(figsize=(9, 2.8), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2, sharey=True)
    for one, row, title in zip(
        axes, tokens, ("As the engine starts", "With the plan"), strict=True
    ):
        ranks = np.arange(len(row))
        one.bar(ranks, row, color=np.where(row == row.max(), _FULLEST, _OTHERS))
        one.axhline(row.mean(), color=_MEAN, linewidth=1, linestyle="--")
        one.set_title(f"{title}: fullest rank {row.max() / row.mean():.2f} x the mean", fontsize=11)
        one.set(xlabel="rank", xticks=ranks)
        one.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"tokens a step, layer {layer}")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "evenkeel"}):
        figure.savefig(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))


if __name__ == "__main__":
    draw()
