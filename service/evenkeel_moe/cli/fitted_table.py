"""A table without borders that leaves out its least important columns on a narrow terminal."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

FittedCell = str | Text


@dataclass(frozen=True, slots=True)
class FittedColumn:
    """One column and its place among those that may be left out."""

    head: str
    right: bool = False
    """True for numbers, which are aligned to the right."""
    keep: int = 0
    """Columns with a higher number are left out first; 0 is always kept."""
    fold: bool = False
    """True for long text, which may take several lines; other cells stay in one line."""
    least: int = 16
    """Characters that a folded column needs, and that a line below another column may have."""
    under: str = ""
    """Head of the column under whose cells the values of this one are printed where it does not
    fit, instead of being left out. That column is always kept."""
    label: str = ""
    """Word before a value that is printed under another column."""


def with_values(
    columns: Sequence[FittedColumn], rows: Sequence[Sequence[FittedCell]]
) -> tuple[list[FittedColumn], list[list[FittedCell]]]:
    """Return columns and rows without the columns that may be left out and have no value."""
    kept = [
        index
        for index, column in enumerate(columns)
        if not column.keep or any(str(row[index]) not in ("", "-") for row in rows)
    ]
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in rows]


class FittedTable:
    """Rows of cells under columns, drawn with as many columns as fit.

    Args:
        columns: in order.
        rows: one cell for each column.
    """

    def __init__(
        self, columns: Sequence[FittedColumn], rows: Sequence[Sequence[FittedCell]]
    ) -> None:
        self._columns = columns
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the widest table that fits, and name the columns that do not fit.

        Without rows yield only the heads.
        """
        kept = list(range(len(self._columns)))
        while self._needs(kept) > options.max_width:
            droppable = [index for index in kept if self._columns[index].keep]
            if not droppable:
                break
            # The last of the least important ones.
            kept.remove(max(droppable, key=lambda index: (self._columns[index].keep, index)))
        yield self._table(kept)
        left_out = [
            one.head
            for index, one in enumerate(self._columns)
            if index not in kept and not one.under
        ]
        if left_out:
            yield Text(f"a wider terminal also shows {', '.join(left_out)}", style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the widths between which the table can be drawn."""
        return Measurement(1, options.max_width)

    def _needs(self, kept: Sequence[int]) -> int:
        total = 2 * (len(kept) - 1)
        for index in kept:
            column = self._columns[index]
            below = [line for row in self._rows for line in self._below(row, index, kept)]
            widest = max(self._widest(index), *map(len, below), 0)
            total += min(widest, column.least) if column.fold else widest
        return total

    def _widest(self, index: int) -> int:
        return max([len(self._columns[index].head), *(len(row[index]) for row in self._rows)])

    def _below(self, row: Sequence[FittedCell], index: int, kept: Sequence[int]) -> list[str]:
        """Return the lines below a cell: values of columns that do not fit."""
        lines: list[str] = []
        for other, column in enumerate(self._columns):
            if other in kept or column.under != self._columns[index].head:
                continue
            if (value := str(row[other])) not in ("", "-"):
                width = max(self._widest(index), column.least)
                lines += _wrapped(f"{column.label}{value}", width)
        return lines

    def _cell(self, row: Sequence[FittedCell], index: int, kept: Sequence[int]) -> FittedCell:
        below = self._below(row, index, kept)
        if not below:
            return row[index]
        return Text.assemble(row[index], "\n", ("\n".join(below), "dim"))

    def _table(self, kept: Sequence[int]) -> Table:
        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            header_style="bold",
            show_header=any(column.head for column in self._columns),
        )
        for index in kept:
            column = self._columns[index]
            table.add_column(
                column.head,
                justify="right" if column.right else "left",
                no_wrap=not column.fold,
                overflow="fold",
            )
        for row in self._rows:
            table.add_row(*(self._cell(row, index, kept) for index in kept))
        return table


def _wrapped(text: str, width: int) -> list[str]:
    """Return indented lines; a hyphen ends no line, because ids have hyphens."""
    return textwrap.wrap(
        text,
        width,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
