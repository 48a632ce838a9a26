"""Asks before a command moves weights or removes something."""

import sys

import typer
from rich.console import RenderableType

from evenkeel_moe.cli.client import CliError, Exit
from evenkeel_moe.cli.console import say, stderr_console


def confirm(question: str, yes: bool, shown: RenderableType | None = None) -> None:
    """Return if the operator agrees; `yes` agrees without a question.

    Args:
        question: what will happen, as a statement.
        yes: True with --yes.
        shown: what the operator should see first.

    Raises:
        CliError: nobody can be asked, because standard input is no terminal.
        typer.Abort: the operator did not agree.
    """
    if yes:
        return
    require_terminal(question)
    if shown is not None:
        # On stderr, so that standard output holds only the answer.
        stderr_console().print(shown)
    say(f"{question} Go on? [y/N]: ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort


def require_terminal(question: str) -> None:
    """Return if somebody can be asked.

    Raises:
        CliError: standard input is no terminal. It names what would have been asked, and --yes.
    """
    if not sys.stdin.isatty():
        raise CliError(f"{question} Repeat the command with --yes to do it.", Exit.USAGE)
