"""The live view of the demo: pure functions from a snapshot to text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evenkeel_moe.model.quantities import bytes_text, counted

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS = 6
_WIDE = 96
"""Minimum columns for bars and chart side by side."""
_SHOWN_EVENTS = 6
_SHOWN_LAYERS = 8
_SHOWN_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the run at one moment."""

    elapsed_s: float
    step: int | None
    """Newest step that all ranks have done."""
    steps: int
    """Steps of the whole run."""
    domain: str
    shares: Sequence[Sequence[float]] | None
    """(R, L) share of a layer's recent tokens on each rank; NaN for a layer without tokens."""
    balancedness: float | None
    """Balancedness of the recent steps, as the ranks measured it."""
    history: Sequence[float]
    """Balancedness of every step so far."""
    marks: Mapping[int, str]
    """Index into history -> one character: a swap or the shift."""
    status: Mapping[str, Any] | None
    """The deployment as REST returns it; None while the controller does not know it."""
    events: Sequence[str]
    """Events so far, oldest first."""
    step_s: float | None = None
    """Median of the slowest rank's recent step times, without pacing."""
    mismatches: int = 0


def ratio(value: float | None, unknown: str = "unknown") -> str:
    """Return a ratio with three decimals."""
    return unknown if value is None else f"{value:.3f}"


def share_color(share: float, ranks: int) -> str:
    """Return green for a share near the even one, red for one far above it."""
    excess = share * ranks - 1
    return "green" if excess < 0.1 else "yellow" if excess < 0.3 else "red"


def chart(
    history: Sequence[float], marks: Mapping[int, str], columns: int = 72, rows: int = _CHART_ROWS
) -> list[str]:
    """Draw a column chart of balancedness over all steps, with a line of marks under it.

    Args:
        history: one value per step, oldest first; NaN for a step without load.
        marks: index into history -> the character under its column.
        columns: maximum width; if there are more steps, a column shows the mean of several.
        rows: lines of the chart.

    Returns:
        rows + 1 lines; the first and the last line of the chart show the ends of the scale.
    """
    width = min(columns, len(history))
    gathered: list[list[float]] = [[] for _ in range(width)]
    for index, value in enumerate(history):
        if not math.isnan(value):
            gathered[index * width // len(history)].append(value)
    buckets = [sum(values) / len(values) if values else math.nan for values in gathered]
    known = [value for value in buckets if not math.isnan(value)]
    low = max(0.0, min(0.9, math.floor(min(known) * 20 - 1) / 20)) if known else 0.5
    lines = []
    for row in reversed(range(rows)):
        cells = ""
        for value in buckets:
            filled = 0.0 if math.isnan(value) else (value - low) / (1.0 - low) * rows - row
            cells += _EIGHTHS[max(0, min(8, round(filled * 8)))]
        label = "1.00" if row == rows - 1 else f"{low:.2f}" if row == 0 else "    "
        lines.append(f"{label} {cells}")
    under = [" "] * width
    for index, mark in sorted(marks.items()):
        if index < len(history):
            under[index * width // len(history)] = mark
    return [*lines, "     " + "".join(under)]


def mean_share(layers: Sequence[float]) -> float:
    """Return the mean over the layers with load; 0 if there are none."""
    known = [share for share in layers if not math.isnan(share)]
    return sum(known) / len(known) if known else 0.0


def _ranks_table(snapshot: Snapshot, cells: int) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    if snapshot.shares is None:
        table.add_row(Text("the ranks are starting", style="dim"))
        return table
    ranks = len(snapshot.shares)
    shown = min(_SHOWN_LAYERS, len(snapshot.shares[0]))
    cells = max(4, cells - shown - 1)
    means = [mean_share(layers) for layers in snapshot.shares]
    scale = max(2.0 / ranks, *means)
    even = round(cells / ranks / scale)
    for rank, (share, layers) in enumerate(zip(means, snapshot.shares, strict=True)):
        filled = round(cells * share / scale)
        color = share_color(share, ranks)
        bar = Text("█" * filled, style=color) + Text("·" * (cells - filled), style="bright_black")
        # A tick marks the even share.
        bar.stylize(f"{color} on white" if filled >= even else "white", even - 1, even)
        by_layer = Text.assemble(*(_layer_cell(one, ranks) for one in layers[:shown]))
        table.add_row(f"rank {rank}", bar, Text(f"{share:5.1%}", style=color), by_layer)
    return table


def _layer_cell(share: float, ranks: int) -> tuple[str, str]:
    """Return a bar for a layer of a rank: half high for the even share, full for twice it."""
    if math.isnan(share):
        return " ", ""
    return _EIGHTHS[max(1, min(8, round(share * ranks * 4)))], share_color(share, ranks)


def _figures(snapshot: Snapshot) -> RenderableType:
    pace = "-" if snapshot.step_s is None else f"{snapshot.step_s * 1e3:.0f} ms"
    balance = Text(ratio(snapshot.balancedness, "-"), style="bold cyan")
    table = Table.grid(padding=(0, 1))
    table.add_row("balancedness", balance, Text("1 is even", "dim"))
    table.add_row("step", Text(pace), Text("slowest rank", "dim"))
    return table


def _plan_block(status: Mapping[str, Any] | None, cells: int) -> RenderableType:
    status = status or {}
    plan = status.get("active_plan")
    rows = Table.grid(padding=(0, 1))
    if plan is None:
        idle = "none active" if status else "the controller waits for the ranks"
        rows.add_row("plan", Text(idle, "dim"))
        rows.add_row("copied", Text("-", "dim"))
    else:
        detail = (
            f"  wave {plan['waves_committed']}/{plan['waves']}"
            f"  {counted(plan['moves'], 'copy', 'copies')}, {bytes_text(plan['nbytes'])}"
            f"  because {plan['planned_because']}"
        )
        name = Text(f"{plan['plan_id']} {plan['phase']}", "bold cyan")
        rows.add_row("plan", name + Text(detail, "default"))
        total, done = status["staging_bytes_total"], status["staging_bytes_done"]
        bar = Table.grid(padding=(0, 1))
        progress = ProgressBar(total=max(total, 1), completed=done, width=cells)
        bar.add_row(progress, Text(f"{bytes_text(done)} of {bytes_text(total)}", "dim"))
        rows.add_row("copied", bar)
    decision = status.get("last_decision") or {"reason": "-"}
    numbers = [
        f"{name} {float(value):.4g}"
        for name, value in (decision.get("numbers") or {}).items()
        if isinstance(value, int | float)
    ]
    detail = "  ".join(numbers[:_SHOWN_NUMBERS])
    rows.add_row("decision", Text(str(decision["reason"]), "bold") + Text(f"  {detail}", "dim"))
    return rows


def _headline(snapshot: Snapshot) -> Text:
    status = snapshot.status
    done = 0 if snapshot.step is None else snapshot.step
    text = Text("Evenkeel ", style="bold blue")
    text.append(f" step {done}/{snapshot.steps}  serving {snapshot.domain or '-'}", style="bold")
    if status is not None:
        facts = f"  epoch {status['epoch']}  {status['mode']}/{status['policy']}  {status['state']}"
        text.append(facts, style="default")
    text.append(f"  {snapshot.elapsed_s:.0f} s", style="dim")
    return text


def _correctness(snapshot: Snapshot) -> Text:
    model = "the never-migrated model's"
    if snapshot.mismatches:
        return Text(f"{snapshot.mismatches} outputs differ from {model}", style="bold red")
    if snapshot.step is None:
        return Text(f"every output will be compared with {model}", style="dim")
    return Text(f"every output so far equals {model}", style="green")


def render(snapshot: Snapshot, width: int = 100) -> RenderableType:
    """Return the live view; with four ranks and a wide terminal it has 24 lines."""
    wide = width >= _WIDE
    left = max(44, width * 2 // 5) if wide else width
    chart_columns = max(20, (width - left if wide else width) - 10)
    lines = chart(snapshot.history, snapshot.marks, chart_columns)
    height = max(len(snapshot.shares or ()) + 5, len(lines) + 2) if wide else None
    ranks = Panel(
        Group(_ranks_table(snapshot, left - 22), Text(), _figures(snapshot)),
        title="tokens per rank, and by layer",
        title_align="left",
        width=left,
        height=height,
    )
    history = Panel(
        Text("\n".join(lines[:-1]), "cyan") + Text(f"\n{lines[-1]}", "bold yellow"),
        title="balancedness",
        subtitle="▲ swap  ◆ domain shift",
        title_align="left",
        height=height,
    )
    middle: RenderableType = Group(ranks, history)
    if wide:
        middle = grid = Table.grid(expand=True)
        grid.add_column(width=left)
        grid.add_column(ratio=1)
        grid.add_row(ranks, history)
    plan = _plan_block(snapshot.status, max(10, width - 50))
    return Group(
        _headline(snapshot),
        _correctness(snapshot),
        middle,
        Panel(plan, title="controller", title_align="left"),
        Text("\n".join(snapshot.events[-_SHOWN_EVENTS:]), overflow="ellipsis", no_wrap=True),
    )


def plain_line(snapshot: Snapshot) -> str:
    """Return one line for a log, without colours or cursor movement."""
    parts = [f"{snapshot.elapsed_s:6.1f} s"]
    parts.append("step -" if snapshot.step is None else f"step {snapshot.step}/{snapshot.steps}")
    if snapshot.domain:
        parts.append(snapshot.domain)
    parts.append(f"balancedness {ratio(snapshot.balancedness, '-')}")
    if snapshot.shares is not None:
        parts.append("ranks " + " ".join(f"{mean_share(layers):.0%}" for layers in snapshot.shares))
    status = snapshot.status
    if status is not None:
        parts.append(f"epoch {status['epoch']} {status['state']}")
        plan = status.get("active_plan")
        if plan:
            done, total = status["staging_bytes_done"], status["staging_bytes_total"]
            parts.append(
                f"plan {plan['plan_id']} {plan['phase']} {plan['waves_committed']}/{plan['waves']}"
                f" copied {bytes_text(done)}/{bytes_text(total)}"
            )
        if status.get("last_decision"):
            parts.append(f"last decision {status['last_decision']['reason']}")
    if snapshot.mismatches:
        parts.append(f"WRONG OUTPUTS {snapshot.mismatches}")
    return " | ".join(parts)
