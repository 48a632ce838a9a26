"""Help texts that any terminal can wrap, and that name no type of an option without a value."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

_Function = TypeVar("_Function", bound=Callable[..., Any])


class HelpfulCommand(TyperCommand):
    """A command whose flags have no type in its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments, with the help option."""
        return _without_types(super().get_params(ctx))


class HelpfulGroup(TyperGroup):
    """The same for a command that has commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments, with the help option."""
        return _without_types(super().get_params(ctx))


class CommandApp(typer.Typer):
    """A Typer application that is made of such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=HelpfulGroup, **options)

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
