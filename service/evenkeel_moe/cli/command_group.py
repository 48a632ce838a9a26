"""Makes commands of functions: their docstrings explain their options, which may be in groups.

An argument of such a function is an option of the command. `typer.Argument` or `typer.Option` in
its annotation says more, such as a short name or bounds. A dataclass stands for several options,
one for each of its fields.

The section `Args` of the docstring of the function or the dataclass has the text of each option. A
last sentence `Default: ...` says what holds without it, if the help cannot show the value.
"""

import inspect
import re
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

_Command = TypeVar("_Command", bound=Callable[..., Any])
_EXPLAINED = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


class CommandGroup(typer.Typer):
    """A group of commands that are made of functions by `with_options`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"no_args_is_help": True, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Command], _Command]:
        """Return a decorator that adds a function as a command, and returns it unchanged."""

        def add(function: _Command) -> _Command:
            super(CommandGroup, self).command(name, **settings)(with_options(function))
            return function

        return add


def with_options(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a function as Typer takes it: one argument for each option, which has its text."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    words, texts = _explained(function.__doc__)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _of_group(groups[name])
        else:
            annotation = _annotation(name, hints[name], texts)
            parameters.append(_keyword(name, annotation, parameter.default))

    @wraps(function)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    call.__doc__ = words
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


@cache
def _of_group(group: Any) -> list[inspect.Parameter]:
    """Return a parameter for each field of a dataclass."""
    hints = get_type_hints(group, include_extras=True)
    texts = {
        name: text for one in group.__mro__ for name, text in _explained(one.__doc__)[1].items()
    }
    return [
        _keyword(
            field.name,
            _annotation(field.name, hints[field.name], texts),
            inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(group)
    ]


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _explained(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Return a docstring without its section of arguments, and the text of each argument."""
    words, _, listed = inspect.cleandoc(docstring or "").partition("\n\nArgs:\n")
    return words, {name: " ".join(text.split()) for name, text in _EXPLAINED.findall(listed)}


def _annotation(name: str, hint: Any, texts: dict[str, str]) -> Any:
    """Return the annotation of an option, with its text; a flag has no form with `--no-`."""
    if name not in texts:
        return hint  # It has its own text, or is no option.
    kind, *given = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    flag = (f"--{name.replace('_', '-')}",) if kind is bool else ()
    info = copy(given[0]) if given else typer.Option(*flag)
    info.help, _, default = texts[name].partition(" Default: ")
    info.show_default = default.removesuffix(".") or info.show_default
    return Annotated[kind, info]
