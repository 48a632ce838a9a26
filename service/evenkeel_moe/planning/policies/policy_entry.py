"""A policy with all that the other parts know of it, and its options from plain values."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_type_hints

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.policy import OptionValue
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem, Policy, Proposal

PLAN_STEPS = "plan_steps"
"""The option of every policy: the newest steps of the window that it plans on."""
_MOST = 2**31
"""Bound on whole numbers, far above any that makes sense."""


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What a policy plans on in a cycle."""

    plan_steps: int | None = None
    """The newest steps of the window; None for all of them."""
    moves_old_steps: bool = False
    """True if steps before a change of traffic are moved to the loads after it. The published
    policies plan on the steps as they were."""
    curves: bool = False
    """True if ranks are compared by their measured curves, wherever all of them told one."""
    source_ranks: bool = False
    """True if the ranks where tokens start decide the plan."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a policy that has none of its own."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy, its name, and all that the other parts know of it. Every one has `plan_steps`."""

    name: str
    summary: str
    """What it does, in half a sentence for people."""
    plan: Callable[..., Proposal]
    """`plan(problem)`, and `plan(problem, options)` if it has options. Pure and deterministic."""
    options: type[Any] = NoOptions
    """The class of its options; it checks their ranges."""
    option_names: tuple[str, ...] = ()
    """Fields of that class that operators may set."""
    inputs: PolicyInputs = PolicyInputs()

    def __call__(self, problem: PlacementProblem) -> Proposal:
        """Plan with the default options."""
        return self.plan(problem)

    def check_options(self, names: Iterable[str]) -> None:
        """Check that operators may set the options of these names.

        Raises:
            InvalidInput: some are unknown; the message lists those that are known.
        """
        known = {*self.option_names, PLAN_STEPS}
        unknown = sorted(set(names) - known)
        if unknown:
            raise InvalidInput(
                f"unknown options of {self.name}: {', '.join(unknown):.80}; known:"
                f" {', '.join(sorted(known))}"
            )

    def with_options(self, given: Mapping[str, OptionValue]) -> Policy:
        """Return the policy with options.

        Args:
            given: values by name; the others keep their defaults.

        Raises:
            InvalidInput: an unknown option, or a value of a wrong type or out of range.
        """
        options = self.read(given)
        return (lambda problem: self.plan(problem, options)) if self.option_names else self

    def read(self, given: Mapping[str, OptionValue]) -> Any:
        """Return the policy's own options; arguments and errors are those of `with_options`."""
        self.check_options(given)
        self.inputs_with(given)
        types = get_type_hints(self.options)
        values = {
            name: _read(f"{self.name}.{name}", value, types[name])
            for name, value in given.items()
            if name != PLAN_STEPS
        }
        try:
            return self.options(**values)
        except InvalidInput as error:
            raise InvalidInput(f"options of {self.name}: {error}") from error

    def inputs_with(self, given: Mapping[str, OptionValue]) -> PolicyInputs:
        """Return what the policy plans on, with options that an operator has set.

        Raises:
            InvalidInput: `plan_steps` is not a whole number of at least 1.
        """
        if PLAN_STEPS not in given:
            return self.inputs
        steps: int = _read(f"{self.name}.{PLAN_STEPS}", given[PLAN_STEPS], int)
        if steps < 1:
            raise InvalidInput(
                f"options of {self.name}: {PLAN_STEPS} is {steps}, must be at least 1"
            )
        return replace(self.inputs, plan_steps=steps)


def _read(what: str, value: Any, kind: Any) -> Any:
    """Return a value in the type of its field.

    Raises:
        InvalidInput: it is none of that type.
    """
    if isinstance(kind, UnionType):  # A null is not a value: it means that the option is not set.
        kind = next(part for part in get_args(kind) if part is not type(None))
    if issubclass(kind, StrEnum):
        choices: Sequence[str] = [choice.value for choice in kind]
        if isinstance(value, str) and value in choices:
            return kind(value)
        raise InvalidInput(f"{what} is {value!r:.40}, must be one of {', '.join(choices)}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        if is_number and isinstance(value, int) and abs(value) <= _MOST:
            return value
        raise InvalidInput(f"{what} is {value!r:.40}, must be a whole number, at most 2^31")
    assert kind is float, kind
    if is_number and abs(value) < _MOST and math.isfinite(value):
        return float(value)
    raise InvalidInput(f"{what} is {value!r:.40}, must be a finite number below 2^31")
