"""A command that fails ends with one line for the operator, and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class Exit(IntEnum):
    """The exit code of a command; Ctrl-C gives 130."""

    DONE = 0
    REFUSED = 1
    """The controller refused, or a check failed; the reason is printed."""
    USAGE = 2
    """Wrong options or settings."""
    UNAVAILABLE = 3
    """There is no controller at that address, or it is temporarily unavailable: try again."""
    UNAUTHORIZED = 4
    """The token is missing, wrong, or allows only reading."""


class CliError(Exception):
    """A failed command: one line for the operator, and the exit code, usually of wrong usage."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


class NotSent(CliError):
    """A command whose last request could not be sent: no controller took the connection."""


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Tell which extra of the package `what` needs, if a module that is imported is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        install = f"`pip install 'evenkeel-moe[{extra}]'`"
        raise CliError(f"{what} needs {install}: {error}") from error
