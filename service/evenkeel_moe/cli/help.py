"""Help texts that any terminal can wrap, and that name no type of an option without a value."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Helpful:
    """Holds what commands and groups of commands share."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments, with the help option."""
        return _without_types(super().get_params(ctx))  # type: ignore[misc]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, with the metavar of each argument as it is.

        A metavar says itself what may be left out, and may name several arguments.
        """
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        arguments = [one for one in self.get_params(ctx) if isinstance(one, TyperArgument)]
        named = {one.get_usage_pieces(ctx)[0]: one.metavar for one in arguments}
        return [named.get(piece) or piece for piece in pieces]

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence for the list of commands, whole also beyond the limit."""
        del limit
        return (self.help or "").split("\n\n")[0]  # type: ignore[attr-defined,no-any-return]


class HelpfulCommand(_Helpful, TyperCommand):
    """A command whose flags have no type in its help."""


class HelpfulGroup(_Helpful, TyperGroup):
    """The same for a command that has commands of its own."""


class CommandApp(typer.Typer):
    """A Typer application that is made of such commands.

    Its help is plain text: Rich's table cuts the names of long options in 80 columns.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=HelpfulGroup, rich_markup_mode=None, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        """Register a command, as `typer.Typer.command` does; its docstring is its help."""
        register = super().command

        def decorate(function: _Function) -> _Function:
            text = paragraphs(inspect.getdoc(function) or "")
            return register(name, cls=HelpfulCommand, help=text, **options)(function)

        return decorate


def paragraphs(text: str) -> str:
    """Return a docstring with one line for each paragraph, so that any terminal can wrap it."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
