"""Prints an answer as a table, a sentence or JSON, once or again until Ctrl-C."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli.console import print_json, print_parts, say, stdout_console
from evenkeel_moe.cli.exits import CliError, Exit
from evenkeel_moe.cli.units import moment


class OutputForm(StrEnum):
    """The forms of an answer beside the usual one."""

    JSON = "json"
    WIDE = "wide"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """The option that says in which form an answer is printed.

    Args:
        output: json: every figure. wide: all columns. Default: a table.
    """

    output: Annotated[OutputForm | None, typer.Option("--output", "-o")] = None

    @property
    def as_json(self) -> bool:
        """True if the answer is printed as JSON."""
        return self.output is OutputForm.JSON

    def show(self, answer: Any, render: Callable[[], RenderableType]) -> None:
        """Print an answer, either unchanged as JSON or as `render` tells it.

        A sentence, which is a str, is not broken into lines, so that a command in it can be copied.
        """
        if self.as_json:
            print_json(answer)
            return
        told = render()
        if isinstance(told, str):
            say(told)
        else:
            print_parts(told, console=stdout_console(self.output is OutputForm.WIDE))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowOptions(OutputOptions):
    """The options that say how an answer is shown, and how often.

    Args:
        watch: Show the answer again until Ctrl-C.
        interval: Seconds between two answers, with --watch.
    """

    watch: Annotated[bool, typer.Option("--watch", "-w")] = False
    interval: Annotated[float, typer.Option(min=0.1, max=3600)] = 2.0

    def run(self, fetch: Callable[[], Any], render: Callable[[Any], RenderableType]) -> None:
        """Show what `fetch` returns, once or until Ctrl-C.

        While watching, a controller that is temporarily unavailable is waited for. JSON then has
        one answer a line.

        Raises:
            CliError: the controller refused; without --watch also that it is unavailable.
        """
        if not self.watch:
            answer = fetch()
            self.show(answer, lambda: render(answer))
        elif self.as_json:
            self._repeat(lambda: print_json(fetch(), None), _tell)
        else:
            self._follow(lambda: render(fetch()))

    def _follow(self, draw: Callable[[], RenderableType]) -> None:
        # Imported here because other commands should not wait for it.
        from rich.live import Live

        console = stdout_console(self.output is OutputForm.WIDE)
        if not console.is_terminal:
            self._repeat(lambda: print_parts(self._page(draw()), console=console), _tell)
            return
        with Live(console=console, auto_refresh=False, screen=True) as live:

            def refresh(part: RenderableType) -> None:
                live.update(_Screen(self._page(part)), refresh=True)

            self._repeat(
                lambda: refresh(draw()), lambda error: refresh(Text(str(error), style="red"))
            )

    def _page(self, part: RenderableType) -> RenderableType:
        head = f"{moment(SystemClock().unix())} UTC, every {self.interval:g} s, Ctrl-C ends"
        return Group(Text(head, style="dim"), Text(), part)

    def _repeat(self, once: Callable[[], None], unavailable: Callable[[CliError], None]) -> None:
        while True:
            try:
                once()
            except CliError as error:
                if error.code is not Exit.UNAVAILABLE:
                    raise
                unavailable(error)
            time.sleep(self.interval)


class _Screen:
    """A page that says how many of its lines do not fit the height of the terminal."""

    def __init__(self, page: RenderableType) -> None:
        self._page = page

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines that fit; the last one counts the others."""
        drawn = console.render_lines(self._page, options.update(height=None), pad=False)
        left_out = 0
        if len(drawn) > console.height:
            left_out = len(drawn) - console.height + 1
            drawn = drawn[: console.height - 1]
        for line in drawn:
            yield from line
            yield Segment.line()
        if left_out:
            yield Text(f"{left_out} more lines: make the terminal taller", style="yellow")


def _tell(error: CliError) -> None:
    say(f"evenkeel: {error}", err=True)
