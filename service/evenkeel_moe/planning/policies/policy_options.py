"""Reads the options of a policy from plain values, as operators give them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Generic, Protocol, TypeVar, get_args, get_type_hints

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.policy import OptionValue
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Policy, Proposal

_MOST = 2**31
"""Bound on whole numbers, far above any that makes sense."""
OptionsT = TypeVar("OptionsT")
OptionsIn = TypeVar("OptionsIn", contravariant=True)


class _Plan(Protocol[OptionsIn]):
    """The signature of a policy that takes options."""

    def __call__(self, problem: PlacementProblem, options: OptionsIn) -> Proposal: ...


@dataclass(frozen=True, slots=True)
class ConfigurablePolicy(Generic[OptionsT]):
    """A policy and those of its options that operators may set."""

    plan: _Plan[OptionsT]
    options: Callable[..., OptionsT]
    """The class of its options; it checks their ranges."""
    names: tuple[str, ...]
    """Fields of that class that operators may set."""

    def check_names(self, policy: str, names: Iterable[str]) -> None:
        """Check that operators may set the options of these names.

        Raises:
            InvalidInput: some are unknown; the message lists those that are known.
        """
        unknown = sorted(set(names) - set(self.names))
        if unknown:
            raise InvalidInput(
                f"unknown options of {policy}: {', '.join(unknown):.80}; known:"
                f" {', '.join(sorted(self.names))}"
            )

    def with_options(self, policy: str, given: Mapping[str, OptionValue]) -> Policy:
        """Return the policy with options.

        Args:
            policy: its name, for messages.
            given: values by name; the others keep their defaults.

        Raises:
            InvalidInput: an unknown option, or a value of a wrong type or out of range.
        """
        self.check_names(policy, given)
        types = get_type_hints(self.options)
        values = {
            name: _read(f"{policy}.{name}", value, types[name]) for name, value in given.items()
        }
        try:
            options = self.options(**values)
        except InvalidInput as error:
            raise InvalidInput(f"options of {policy}: {error}") from error
        return lambda problem: self.plan(problem, options)


def _read(what: str, value: Any, kind: Any) -> Any:
    """Return a value in the type of its field.

    Raises:
        InvalidInput: it is none of that type.
    """
    if isinstance(kind, UnionType):  # A null is not a value: it means that the option is not set.
        kind = next(one for one in get_args(kind) if one is not type(None))
    if issubclass(kind, StrEnum):
        return _choice(what, value, kind)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        if is_number and isinstance(value, int) and abs(value) <= _MOST:
            return value
        raise InvalidInput(f"{what} is {value!r:.40}, must be a whole number, at most 2^31")
    assert kind is float, kind
    if is_number and abs(value) < _MOST and math.isfinite(value):
        return float(value)
    raise InvalidInput(f"{what} is {value!r:.40}, must be a finite number below 2^31")


def _choice(what: str, value: Any, kind: type[StrEnum]) -> StrEnum:
    choices: Sequence[str] = [one.value for one in kind]
    if isinstance(value, str) and value in choices:
        return kind(value)
    raise InvalidInput(f"{what} is {value!r:.40}, must be one of {', '.join(choices)}")
