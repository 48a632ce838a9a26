"""Runs Libra's two stages with and without overlap on Gloo: python -m bench.libra [--picture].

Two ranks of the reference engine, in processes of their own, serve the same text with the same
fetched experts. With overlap the tokens of own experts are computed while the counts of all ranks
travel and the rest is sharded, and the experts of the next layer are fetched while this one
computes. Without it each stage ends before the next one begins. Runs of both forms alternate.
`--picture` draws a step of each, and needs the extra `plots`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import Row, write_report
from evenkeel_moe.engines.reference.config import DispatchRule, RankConfig
from evenkeel_moe.engines.reference.fleet import run_fleet
from evenkeel_moe.engines.reference.lines import read_lines
from evenkeel_moe.engines.reference.parts import Span

RANKS, STEPS, WARM_UP, RUNS = 2, 60, 10, 3
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "libra-timeline.svg"
THREADS = {
    "computes": ("local", "remote", "combine"),
    "decides and fetches": ("demand", "shard", "plan", "fetch"),
}
"""The stages of each thread of a rank."""
_COLOURS = {
    "local": "#0063b2",
    "remote": "#14568f",
    "combine": "#7b858f",
    "demand": "#9b2f6a",
    "shard": "#b85c00",
    "plan": "#6b5d00",
    "fetch": "#00785a",
}


def serve(overlap: bool) -> list[dict[str, Any]]:
    """Return the lines of rank 0, one for each step after the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        config = RankConfig(
            run_folder=folder,
            num_ranks=RANKS,
            steps=STEPS,
            agent=False,
            dispatch=DispatchRule.LIBRA,
            overlap=overlap,
            timeline=True,
            experts=16,
            layers=4,
            d_model=256,
            d_ffn=512,
            tokens_per_step=256,
            verify_every=0,
        )
        report = run_fleet(config)
        if not report.ok:
            raise SystemExit(report.words)
        rows = [row for row in read_lines(Path(folder) / "rank-0.jsonl") if row["kind"] == "step"]
    return rows[WARM_UP:]


def spans_of(row: dict[str, Any]) -> list[Span]:
    """Return the stages of a step, with times in ms from its first one."""
    found = [Span(*span) for span in row["spans"]]
    zero = min(span.began for span in found)
    return [
        span._replace(began=1e3 * (span.began - zero), ended=1e3 * (span.ended - zero))
        for span in found
    ]


def median_step(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the step of median seconds."""
    return sorted(rows, key=lambda row: float(row["seconds"]))[len(rows) // 2]


def draw(steps: dict[str, dict[str, Any]], file: Path = PICTURE) -> None:
    """Write the timelines of one step of each form as SVG, on one scale."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
    axes = figure.subplots(len(steps), 1, sharex=True)
    for one, (name, row) in zip(axes, steps.items(), strict=True):
        for span in spans_of(row):
            place = [span.stage in stages for stages in THREADS.values()].index(True)
            one.barh(
                place,
                span.ended - span.began,
                left=span.began,
                height=0.7,
                color=_COLOURS[span.stage],
                alpha=1.0 if span.layer % 2 == 0 else 0.55,
                edgecolor="white",
                linewidth=0.5,
            )
        one.set_yticks(range(len(THREADS)), list(THREADS))
        one.invert_yaxis()
        one.set_title(f"{name}: {1e3 * row['seconds']:.1f} ms a step", fontsize=11, loc="left")
        one.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms; layers 1 and 3 are paler, plan and fetch are of the next layer")
    figure.legend(
        handles=[Patch(color=colour, label=stage) for stage, colour in _COLOURS.items()],
        loc="outside right center",
        frameon=False,
    )
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "evenkeel"}):
        figure.savefig(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))


def main() -> None:
    """Run both forms in turn, print the figures and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", action="store_true", help="draw docs/images")
    given = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {"with overlap": [], "without overlap": []}
    for _ in range(RUNS):
        for name, found in rows.items():
            found += serve(name == "with overlap")
    steps = {name: median_step(found) for name, found in rows.items()}
    report = []
    for name, found in rows.items():
        spans = [span for row in found for span in spans_of(row)]
        parts = {
            stage: sum(span.ended - span.began for span in spans if span.stage == stage)
            / len(found)
            for stage in _COLOURS
        }
        seconds = float(np.median([row["seconds"] for row in found]))
        print(f"{name:16} step {1e3 * seconds:6.2f} ms;", end=" ")
        print(", ".join(f"{stage} {ms:.2f}" for stage, ms in parts.items()))
        report.append(Row(f"libra_{name.replace(' ', '_')}_step", 1e3 * seconds, "ms"))
    ratio = report[0].value / report[1].value
    print(f"with overlap / without: {ratio:.3f}")
    write_report("libra", [*report, Row("libra_overlap_over_blocking", ratio, "1")])
    if given.picture:
        draw(steps)


if __name__ == "__main__":
    main()
