"""What the replay commands print: tables on stdout, progress on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["show", "stdout_console", "work_bars"]


def stdout_console() -> "Console":
    """The console of stdout."""
    from rich.console import Console

    console = Console()
    # In a pipe or a file a table is as wide as it needs to be.
    return console if console.is_terminal else Console(width=200)


def show(*parts: "RenderableType") -> None:
    """Print to stdout."""
    console = stdout_console()
    for part in parts:
        console.print(part)


@contextmanager
def work_bars() -> Iterator[tuple[Any, Any]]:
    """(on_work, on_replan) that draw bars on stderr when a person is watching it.

    Ctrl-C in the middle of compiled code comes out of it as the cause of SystemErrors; here it is Ctrl-C again.
    """
    from rich.console import Console
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
        console=Console(stderr=True),
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
