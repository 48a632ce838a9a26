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
    """It may have several lines."""
    right: bool = False
    """True for numbers, which are aligned to the right."""
    keep: int = 0
    """Columns with a higher number are left out first; 0 is always kept."""
    fold: bool = False
    """True for long text, which may take several lines; other cells stay in one line."""
    least: int = 16
    """Characters that a folded column needs."""
    under: str = ""
    """Head of the column under whose cells the values of this one are printed where it does not
    fit, instead of being left out. That column is always kept. The lines below a row reach to the
    right edge of the terminal."""
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
        gap: blanks between columns.
    """

    def __init__(
        self,
        columns: Sequence[FittedColumn],
        rows: Sequence[Sequence[FittedCell]],
        gap: int = 2,
    ) -> None:
        self._columns = columns
        self._rows = rows
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the widest table that fits, and name the columns that do not fit.

        Without rows yield only the heads.
        """
        kept = self.kept(options.max_width)
        yield from self._drawn(kept, options.max_width)
        left_out = [
            one.head.replace("\n", " ")
            for index, one in enumerate(self._columns)
            if index not in kept and not one.under
        ]
        if left_out:
            yield Text(f"a wider terminal also shows {', '.join(left_out)}", style="dim")

    def kept(self, width: int) -> list[int]:
        """Return the indices of the columns that fit this many characters."""
        kept = list(range(len(self._columns)))
        while self._needs(kept) > width:
            droppable = [index for index in kept if self._columns[index].keep]
            if not droppable:
                break
            # The last of the least important ones.
            kept.remove(max(droppable, key=lambda index: (self._columns[index].keep, index)))
        return kept

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the widths between which the table can be drawn."""
        return Measurement(1, options.max_width)

    def _needs(self, kept: Sequence[int]) -> int:
        columns = self._columns
        return self._gap * (len(kept) - 1) + sum(
            min(self._widest(index), columns[index].least)
            if columns[index].fold
            else self._widest(index)
            for index in kept
        )

    def _widest(self, index: int) -> int:
        cells = [*self._columns[index].head.split("\n"), *(row[index] for row in self._rows)]
        return max(map(len, cells))

    def _drawn(self, kept: Sequence[int], width: int) -> RenderResult:
        """Yield one table, or one for each row if lines stand below some of them."""
        below = [self._below(row, kept, width) for row in self._rows]
        if not any(below):
            yield self._table(kept, self._rows)
            return
        free = max(width - self._needs(kept), 0)
        widths = [
            min(self._widest(index), self._columns[index].least + free)
            if self._columns[index].fold
            else self._widest(index)
            for index in kept
        ]
        yield self._table(kept, [], widths)
        for row, lines in zip(self._rows, below, strict=True):
            yield self._table(kept, [row], widths, heads=False)
            if lines:
                yield Text("\n".join(lines), style="dim")

    def _below(self, row: Sequence[FittedCell], kept: Sequence[int], width: int) -> list[str]:
        """Return the lines below a row: values of columns that do not fit."""
        lines: list[str] = []
        begin = 0
        for index in kept:
            values = [
                f"{column.label}{value}"
                for other, column in enumerate(self._columns)
                if other not in kept
                and column.under == self._columns[index].head
                and (value := str(row[other])) not in ("", "-")
            ]
            lines += _wrapped("; ".join(values), width, begin)
            begin += self._widest(index) + self._gap
        return lines

    def _table(
        self,
        kept: Sequence[int],
        rows: Sequence[Sequence[FittedCell]],
        widths: Sequence[int] | None = None,
        *,
        heads: bool = True,
    ) -> Table:
        """Return a table of some rows; `widths` of the kept columns let several tables be one."""
        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, self._gap, 0, 0),
            header_style="bold",
            show_header=heads and any(column.head for column in self._columns),
        )
        for place, index in enumerate(kept):
            column = self._columns[index]
            table.add_column(
                column.head,
                justify="right" if column.right else "left",
                no_wrap=not column.fold,
                overflow="fold",
                width=None if widths is None else widths[place],
            )
        for row in rows:
            table.add_row(*(row[index] for index in kept))
        return table


def _wrapped(text: str, width: int, begin: int) -> list[str]:
    """Return lines that begin at a column; a hyphen ends no line, because ids have hyphens."""
    indent = " " * (begin + 2)
    return textwrap.wrap(
        text,
        max(width, len(indent) + 16),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
