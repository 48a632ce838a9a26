"""Prints the results of commands: tables and JSON on stdout, progress bars on stderr."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from evenkeel_moe.model.texts import printable_lines


class _SafeConsole(Console):
    """A console that prints no control character of a text, only those of its own styles.

    Names and error texts come from ranks, from the store and from files.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield what is printed of a text or a table."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable_lines(segment.text))


def plain_console(*, width: int | None = None, force_terminal: bool | None = None) -> Console:
    """Return a console that prints text as it is, without control characters.

    An error text of a rank, such as `[/lib/pair.cc:553]`, may look like markup.
    """
    return _SafeConsole(width=width, force_terminal=force_terminal, markup=False, emoji=False)


def stdout_console() -> Console:
    """Return the console of stdout; in a pipe or a file, tables may be wider than a terminal.

    `COLUMNS` sets the width everywhere.
    """
    console = plain_console()
    if console.is_terminal:
        return console
    return plain_console(width=shutil.get_terminal_size((200, 50)).columns)


def stderr_console() -> Console:
    """Return the console of stderr, for what is not the answer of a command."""
    return _SafeConsole(stderr=True, markup=False, emoji=False)


def say(words: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text without its control characters; `err` prints on stderr, `nl` ends the line."""
    typer.echo(printable_lines(words), err=err, nl=nl)


def print_json(answer: Any) -> None:
    """Print a value as JSON; NaN and infinity, which JSON does not have, become null."""
    say(json.dumps(_finite(answer), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def print_parts(*parts: RenderableType) -> None:
    """Print texts and tables."""
    console = stdout_console()
    for part in parts:
        print_part(console, part)


def print_part(console: Console, part: RenderableType) -> None:
    """Print a text or a table; in a pipe or a file without the blanks at the ends of lines."""
    if console.is_terminal:
        console.print(part)
        return
    with console.capture() as captured:
        console.print(part)
    lines = captured.get().splitlines()
    say("\n".join(line.rstrip() for line in lines))


def show(answer: Any, as_json: bool, render: Callable[[], RenderableType]) -> None:
    """Print an answer of the controller, either unchanged as JSON or as `render` draws it."""
    if as_json:
        say(json.dumps(answer, indent=2))
    else:
        print_parts(render())


def tell(answer: Any, as_json: bool, words: str) -> None:
    """Print an answer of the controller, either unchanged as JSON or in a sentence.

    The sentence is not broken into lines, so that a command in it can be copied.
    """
    say(json.dumps(answer, indent=2) if as_json else words)


@contextmanager
def status_line() -> Iterator[Callable[[str], None] | None]:
    """Yield a function that shows a text in one line on stderr; None if it is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    # Imported here because other commands should not wait for it.
    from rich.status import Status
    from rich.text import Text

    with Status("", console=stderr_console()) as status:
        yield lambda words: status.update(Text(words))


@contextmanager
def work_bars() -> Iterator[tuple[Any, Any]]:
    """Draw progress bars on stderr if it is a terminal; yield (on_work, on_replan) to update them.

    Compiled code turns Ctrl-C into a SystemError whose cause is the KeyboardInterrupt; here the
    KeyboardInterrupt is raised again.
    """
    # Imported here because other commands should not wait for it.
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr_console(),
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
