"""What the demonstration shows while it runs: pure functions from a snapshot to text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = ["Snapshot", "chart", "plain_line", "render", "si_bytes"]

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS = 6
_WIDE = 96
"""Columns from which bars and chart fit side by side."""
_SHOWN_EVENTS = 6
_SHOWN_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of the run."""

    elapsed_s: float
    step: int | None
    """Newest step all ranks have done."""
    steps: int
    """Steps of the whole run."""
    domain: str
    shares: Sequence[Sequence[float]] | None
    """(R, L) share of each layer's recent tokens that each rank carried; NaN for a layer without."""
    balancedness: float | None
    """Of the recent steps, as the ranks measured it."""
    history: Sequence[float]
    """Balancedness of every step so far."""
    marks: Mapping[int, str]
    """Index into history -> one character: a swap or the shift."""
    status: Mapping[str, Any] | None
    """The deployment as REST has it; None while the controller does not know it."""
    events: Sequence[str]
    """What happened, oldest first."""
    step_s: float | None = None
    """Median of the slowest rank's recent steps, pacing excluded."""
    mismatches: int = 0


def si_bytes(count: float) -> str:
    """A number of bytes for people: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count(number: int, one: str, many: str = "") -> str:
    """`1 wave`, `2 waves`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def share_color(share: float, ranks: int) -> str:
    """Green near the even share, red far above it."""
    excess = share * ranks - 1
    return "green" if excess < 0.1 else "yellow" if excess < 0.3 else "red"


def chart(
    history: Sequence[float], marks: Mapping[int, str], columns: int = 72, rows: int = _CHART_ROWS
) -> list[str]:
    """A column chart of balancedness over all steps, and a line of marks under it.

    Args:
        history: one value per step, oldest first; NaN where a step had no load.
        marks: index into history -> the character to put under its column.
        columns: characters of the widest chart; more steps than that share columns, by their mean.
        rows: lines of the chart.

    Returns:
        rows + 1 lines: the scale's ends are on the first and the last line of the chart.
    """
    count = min(columns, len(history))
    gathered: list[list[float]] = [[] for _ in range(count)]
    for index, value in enumerate(history):
        if not math.isnan(value):
            gathered[index * count // len(history)].append(value)
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
    under = [" "] * len(buckets)
    for index, mark in sorted(marks.items()):
        if index < len(history):
            under[index * count // len(history)] = mark
    return [*lines, "     " + "".join(under)]


def mean_share(layers: Sequence[float]) -> float:
    """Mean over the layers that had load; 0 if none had."""
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
        # A tick at the even share shows at a glance who carries too much.
        bar.stylize(f"{color} on white" if filled >= even else "white", even - 1, even)
        by_layer = Text()
        for layer_share in layers[:shown]:
            by_layer.append(*_layer_cell(layer_share, ranks))
        table.add_row(f"rank {rank}", bar, Text(f"{share:5.1%}", style=color), by_layer)
    return table


def _layer_cell(share: float, ranks: int) -> tuple[str, str]:
    """One character for one layer of one rank: half high at the even share, full at twice as much."""
    if math.isnan(share):
        return " ", ""
    return _EIGHTHS[max(1, min(8, round(share * ranks * 4)))], share_color(share, ranks)


def _figures(snapshot: Snapshot) -> RenderableType:
    balance = "-" if snapshot.balancedness is None else f"{snapshot.balancedness:.3f}"
    pace = "-" if snapshot.step_s is None else f"{snapshot.step_s * 1e3:.0f} ms"
    table = Table.grid(padding=(0, 1))
    table.add_row("balancedness", Text(balance, style="bold cyan"), Text("1 is even", "dim"))
    table.add_row("step", Text(pace), Text("slowest rank", "dim"))
    return table


def _plan_block(status: Mapping[str, Any] | None, cells: int) -> RenderableType:
    plan = status.get("active_plan") if status else None
    rows = Table.grid(padding=(0, 1))
    if status is None or plan is None:
        rows.add_row(
            "plan", Text("none active" if status else "the controller waits for the ranks", "dim")
        )
        rows.add_row("copied", Text("-", "dim"))
    else:
        rows.add_row(
            "plan",
            Text(f"{plan['plan_id']} {plan['phase']}", "bold cyan")
            + Text(
                f"  wave {plan['waves_committed']}/{plan['waves']}  {count(plan['moves'], 'copy', 'copies')},"
                f" {si_bytes(plan['nbytes'])}  because {plan['planned_because']}",
                "default",
            ),
        )
        total, done = status["staging_bytes_total"], status["staging_bytes_done"]
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=max(total, 1), completed=done, width=cells),
            Text(f"{si_bytes(done)} of {si_bytes(total)}", "dim"),
        )
        rows.add_row("copied", bar)
    decision = (status.get("last_decision") if status else None) or {"reason": "-"}
    numbers = "  ".join(
        f"{name} {value:.4g}" for name, value in _shown(decision.get("numbers") or {})
    )
    rows.add_row("decision", Text(str(decision["reason"]), "bold") + Text(f"  {numbers}", "dim"))
    return rows


def _shown(numbers: Mapping[str, Any], most: int = 4) -> list[tuple[str, float]]:
    return [
        (name, float(value)) for name, value in numbers.items() if isinstance(value, int | float)
    ][:most]


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
    if snapshot.mismatches:
        return Text(
            f"{snapshot.mismatches} outputs differ from the never-migrated model's",
            style="bold red",
        )
    if snapshot.step is None:
        return Text("every output will be compared with the never-migrated model's", style="dim")
    return Text("every output so far equals the never-migrated model's", style="green")


def render(snapshot: Snapshot, width: int = 100) -> RenderableType:
    """The live view for a terminal of so many columns; 24 lines high with four ranks side by side."""
    wide = width >= _WIDE
    left = max(44, width * 2 // 5) if wide else width
    chart_columns = max(20, (width - left if wide else width) - 10)
    lines = chart(snapshot.history, snapshot.marks, chart_columns)
    balance = Text("\n".join(lines[:-1]), "cyan") + Text(f"\n{lines[-1]}", "bold yellow")
    ranks = Panel(
        Group(_ranks_table(snapshot, left - 22), Text(), _figures(snapshot)),
        title="tokens per rank, and by layer",
        title_align="left",
        width=left,
        height=max(len(snapshot.shares or ()) + 5, len(lines) + 2) if wide else None,
    )
    history = Panel(
        balance, title="balancedness", subtitle="▲ swap  ◆ domain shift", title_align="left",
        height=max(len(snapshot.shares or ()) + 5, len(lines) + 2) if wide else None,
    )  # fmt: skip
    middle: RenderableType = Group(ranks, history)
    if wide:
        grid = Table.grid(expand=True)
        grid.add_column(width=left)
        grid.add_column(ratio=1)
        grid.add_row(ranks, history)
        middle = grid
    return Group(
        _headline(snapshot),
        _correctness(snapshot),
        middle,
        Panel(
            _plan_block(snapshot.status, max(10, width - 50)),
            title="controller",
            title_align="left",
        ),
        Text("\n".join(snapshot.events[-_SHOWN_EVENTS:]), overflow="ellipsis", no_wrap=True),
    )


def plain_line(snapshot: Snapshot) -> str:
    """One line for a log: the same moment without colours or cursor movement."""
    parts = [f"{snapshot.elapsed_s:6.1f} s"]
    parts.append("step -" if snapshot.step is None else f"step {snapshot.step}/{snapshot.steps}")
    if snapshot.domain:
        parts.append(snapshot.domain)
    parts.append(
        "balancedness -"
        if snapshot.balancedness is None
        else f"balancedness {snapshot.balancedness:.3f}"
    )
    if snapshot.shares is not None:
        parts.append("ranks " + " ".join(f"{mean_share(layers):.0%}" for layers in snapshot.shares))
    status = snapshot.status
    if status is not None:
        parts.append(f"epoch {status['epoch']} {status['state']}")
        plan = status.get("active_plan")
        if plan:
            parts.append(
                f"plan {plan['plan_id']} {plan['phase']} {plan['waves_committed']}/{plan['waves']}"
                f" copied {si_bytes(status['staging_bytes_done'])}/{si_bytes(status['staging_bytes_total'])}"
            )
        if status.get("last_decision"):
            parts.append(f"last decision {status['last_decision']['reason']}")
    if snapshot.mismatches:
        parts.append(f"WRONG OUTPUTS {snapshot.mismatches}")
    return " | ".join(parts)
