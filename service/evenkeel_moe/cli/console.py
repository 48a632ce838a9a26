"""Prints what commands found: tables, sentences and JSON on stdout, questions on stderr."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from evenkeel_moe.cli.exits import CliError
from evenkeel_moe.model.texts import printable_lines

Cell = str | Text
_LONGEST_WORD = 24
"""Characters of a word in folded text that is still kept in one piece."""
_PIPE = (200, 50)
"""Columns and lines where there is no terminal: tables may be wider there."""


class SafeConsole(Console):
    """A console that prints no control character of a text, only those of its own styles.

    Names and error texts come from ranks, from the store and from files. Text is printed as it is:
    an error of a rank, such as `[/lib/pair.cc:553]`, may look like markup.
    """

    def __init__(self, *, wide: bool = False, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)
        self.wide = wide
        """True for `-o wide`: listings show all their columns."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield what is printed of a text or a table."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable_lines(segment.text))


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a listing."""

    head: str
    cell: str | int | Callable[[Any], Any]
    """A key of each row, or what makes a value of a row; a value that is None is shown as `-`."""
    text: Callable[[Any], Cell] = str
    """Makes a text of a value that is not None."""
    right: bool = False
    """True for numbers, which are aligned to the right."""
    wide: bool = False
    """True for a column that only `-o wide` shows."""
    optional: bool = False
    """True for a column that is left out if no row has a value."""
    fold: bool = False
    """True for long text, which may take several lines; other cells stay in one line."""

    def of(self, row: Any) -> Cell:
        """Return the cell of a row."""
        value = self.cell(row) if callable(self.cell) else row[self.cell]
        return "-" if value is None else value if isinstance(value, Text) else self.text(value)


class Listing:
    """Rows of cells under columns, without borders.

    No cell is cut: where one line of each row does not fit the terminal, the terminal wraps it.

    Args:
        columns: in order.
        rows: what the columns make cells of.
        gap: blanks between columns.
    """

    def __init__(self, columns: Sequence[TableColumn], rows: Iterable[Any], gap: int = 2) -> None:
        self._columns, self._gap = columns, gap
        self._rows = [[column.of(row) for column in columns] for row in rows]

    def kept(self, wide: bool) -> list[int]:
        """Return the indices of the columns that are shown."""
        return [
            index
            for index, column in enumerate(self._columns)
            if (wide or not column.wide)
            and (
                not (column.optional or column.wide)
                or any(str(row[index]) not in ("", "-") for row in self._rows)
            )
        ]

    @staticmethod
    def _whole(text: str, fold: bool) -> list[str]:
        """Return the parts of a cell that stay in one line."""
        if not fold:
            return text.splitlines()
        return [word for word in text.split() if len(word) <= _LONGEST_WORD]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the table."""
        kept = self.kept(getattr(console, "wide", False))
        columns = [self._columns[index] for index in kept]
        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, self._gap, 0, 0),
            header_style="bold",
            show_header=any(column.head for column in columns),
        )
        for index, column in zip(kept, columns, strict=True):
            texts = [column.head, *(str(row[index]) for row in self._rows)]
            whole = [part for text in texts for part in self._whole(text, column.fold)]
            table.add_column(
                column.head,
                justify="right" if column.right else "left",
                no_wrap=not column.fold,
                overflow="fold",
                min_width=max(map(len, whole), default=0),
            )
        for row in self._rows:
            table.add_row(*(row[index] for index in kept))
        least = console.measure(table, options=options.update(max_width=10_000)).minimum
        yield from console.render(table, options.update(width=max(options.max_width, least)))


def facts(rows: Iterable[tuple[str, Any]]) -> Listing:
    """Return names and values, one pair in a line."""
    name = TableColumn("", lambda row: Text(row[0], style="dim"))
    return Listing((name, TableColumn("", 1, fold=True)), rows)


def legend(*lines: str) -> RenderableType:
    """Return lines that explain the words of the table above them."""
    return Text("\n".join(("", *lines)), style="dim") if lines else Group()


def explained(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line for each reason of some rows, in order and without repeats."""
    return list(dict.fromkeys(f"{row['reason']}: {row['reason_text']}" for row in rows))


def stdout_console(wide: bool = False) -> SafeConsole:
    """Return the console of stdout. `COLUMNS` sets its width everywhere."""
    console = SafeConsole(wide=wide)
    if console.is_terminal and not wide:
        return console
    width = shutil.get_terminal_size(_PIPE).columns
    return SafeConsole(wide=wide, width=max(width, _PIPE[0]) if wide else width)


def say(words: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text without its control characters; `err` prints on stderr, `nl` ends the line."""
    typer.echo(printable_lines(words), err=err, nl=nl)


def print_json(answer: Any, indent: int | None = 2) -> None:
    """Print a value as JSON; NaN and infinity, which JSON does not have, become null."""
    say(json.dumps(_finite(answer), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def print_parts(*parts: RenderableType, console: SafeConsole | None = None) -> None:
    """Print texts and tables; in a pipe or a file without the blanks at the ends of lines."""
    console = console or stdout_console()
    if console.is_terminal:
        console.print(*parts, sep="\n", crop=False)
        return
    with console.capture() as captured:
        console.print(*parts, sep="\n", crop=False)
    say("\n".join(line.rstrip() for line in captured.get().splitlines()))


def confirm(question: str, yes: bool, shown: RenderableType | None = None) -> None:
    """Return if the operator agrees; `yes` agrees without a question.

    Args:
        question: what will happen, as a statement.
        yes: True with --yes.
        shown: what the operator should see first.

    Raises:
        CliError: nobody can be asked, because standard input is no terminal. It names what would
            have been asked, and --yes.
        typer.Abort: the operator did not agree.
    """
    if yes:
        return
    require_terminal(question)
    if shown is not None:
        # On stderr, so that standard output holds only the answer.
        SafeConsole(stderr=True).print(shown)
    _discard_typed()
    say(f"{question} Go on? [y/N]: ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort


def _discard_typed() -> None:
    """Discard what was typed or pasted so far: it answers no question that comes only now."""
    with suppress(ImportError, OSError):  # Not on every system, and not if input is no terminal.
        import termios

        with suppress(termios.error):
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


def require_terminal(question: str) -> None:
    """Return if somebody can be asked.

    Raises:
        CliError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise CliError(f"{question} Repeat the command with --yes to do it.")


@contextmanager
def status_line() -> Iterator[Callable[[str], None] | None]:
    """Yield a function that shows a text in one line on stderr; None if it is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    # Imported here because other commands should not wait for it.
    from rich.status import Status

    with Status("", console=SafeConsole(stderr=True)) as status:
        yield lambda words: status.update(Text(words))


@contextmanager
def work_bars() -> Iterator[tuple[Any, Any]]:
    """Draw progress bars on stderr if it is a terminal; yield (on_work, on_replan) to update them.

    Compiled code turns Ctrl-C into a SystemError whose cause is the KeyboardInterrupt; here the
    KeyboardInterrupt is raised again.
    """
    # Imported here because other commands should not wait for it.
    from rich import progress

    bars = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=SafeConsole(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bars:
        task = bars.add_task("", total=None)

        def on_work(name: str, replans: int) -> None:
            bars.reset(task, description=name, total=replans or None)

        try:
            yield on_work, lambda: bars.advance(task)
        except SystemError as error:
            cause: BaseException | None = error
            while isinstance(cause, SystemError):
                cause = cause.__cause__
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            raise
