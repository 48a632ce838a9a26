"""The policy of a deployment as a document, which is stored and which operators read and change."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

from evenkeel_moe.errors import EvenkeelError, InvalidInput
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.policy import CostChoice, DeploymentPolicy, Mode
from evenkeel_moe.model.schedule import Schedule
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.policies.registry import (
    FORMS,
    POLICIES,
    configurable_policy,
    resolve_policy,
)

_ChoiceT = TypeVar("_ChoiceT", bound=StrEnum)
_MAX_SHADOWS = 8
"""Every cycle plans once with each of them."""
_MOST_NAMES = 20
"""Unknown names in a message."""
_LONGEST_NAME = 40
"""Characters of an unknown name in a message."""
_MAX_LIMIT = 2**62
"""The same as in the request body of a manual plan."""


def policy_document(policy: DeploymentPolicy) -> dict[str, Any]:
    """Return the document of a policy, with the value of every threshold."""
    gates = GateSettings.from_thresholds(policy.thresholds)
    return {
        "mode": policy.mode.value,
        "policy": policy.policy,
        "shadow_policies": list(policy.shadow_policies),
        "limits": asdict(policy.limits),
        "cycle_s": policy.cycle_s,
        "proposal_ttl_s": policy.proposal_ttl_s,
        "schedule": {
            "windows": list(policy.schedule.windows),
            "blackouts": list(policy.schedule.blackouts),
        },
        "thresholds": {
            setting.name: float(getattr(gates, setting.name)) for setting in fields(gates)
        },
        "policy_options": {name: dict(given) for name, given in policy.policy_options.items()},
        "dispatch": None if policy.dispatch is None else policy.dispatch.value,
        "cost": policy.cost.value,
        "observe_lock": policy.observe_lock,
        "separate_approval": policy.separate_approval,
    }


def change_policy(policy: DeploymentPolicy, changes: Mapping[str, Any]) -> DeploymentPolicy:
    """Return the policy with some fields changed.

    In `limits`, `schedule` and `thresholds` only the fields that are named change. In
    `policy_options` only the options that are named change; null removes one option, or all of a
    policy.

    Raises:
        InvalidInput: a field is unknown, or a value is out of range.
    """
    document = policy_document(policy)
    unknown = sorted(set(changes) - set(document))
    if unknown:
        meant = _similar(unknown[0], document)
        raise InvalidInput(
            f"unknown policy fields {_some(unknown)}{meant}; known: {', '.join(document)}"
        )
    for name, value in changes.items():
        if name in ("limits", "schedule", "thresholds"):
            if not isinstance(value, Mapping):
                raise InvalidInput(f"{name} is {_shown(value)}, must be an object")
            strange = sorted(set(value) - set(document[name]))
            if strange:
                known = ", ".join(sorted(document[name]))
                meant = _similar(strange[0], document[name])
                raise InvalidInput(f"unknown {name} {_some(strange)}{meant}; known: {known}")
            document[name] |= value
        elif name == "policy_options":
            document[name] = _merged_options(document[name], value)
        else:
            document[name] = value
    return _policy_of(document)


def _some(names: Sequence[str]) -> str:
    """Return the first names, shortened: a caller may send megabytes of them."""
    shown = ", ".join(name[:_LONGEST_NAME] for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def _similar(name: str, document: Mapping[str, Any]) -> str:
    """Return a question for the known field that an unknown name resembles most, or nothing."""
    paths = {field: field for field in document}
    for section in ("limits", "schedule", "thresholds"):
        paths |= {field: f"{section}.{field}" for field in document.get(section, ())}
    similar = get_close_matches(name[:_LONGEST_NAME].lower(), paths, 1)
    return f": do you mean {paths[similar[0]]}?" if similar else ""


def _merged_options(present: Mapping[str, Mapping[str, Any]], changes: Any) -> dict[str, Any]:
    """Return the options with some changed; null removes an option, or all of a policy."""
    if not isinstance(changes, Mapping):
        raise InvalidInput(f"policy_options is {_shown(changes)}, must be an object")
    merged = dict(present)
    for policy, options in changes.items():
        if not isinstance(options, Mapping | None):
            raise InvalidInput(
                f"policy_options.{policy:.40} is {_shown(options)}, must be an object or null"
            )
        # Also where an option is removed: its name may be misspelt.
        with _named("policy_options"):
            configurable_policy(policy).check_names(policy, options or {})
        together = {} if options is None else {**merged.get(policy, {}), **options}
        merged[policy] = {name: value for name, value in together.items() if value is not None}
    return {policy: options for policy, options in merged.items() if options}


def _policy_of(document: Mapping[str, Any]) -> DeploymentPolicy:
    name, dispatch = document["policy"], document["dispatch"]
    mode = _choice("mode", document["mode"], Mode)
    if not isinstance(name, str):
        known = ", ".join(sorted(POLICIES | FORMS))
        raise InvalidInput(f"policy is {_shown(name)}, must be one of {known}")
    resolve_policy(name)
    shadows = _shadows(document["shadow_policies"])
    limits: dict[str, int | None] = {}
    for bound, value in document["limits"].items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and 0 <= value <= _MAX_LIMIT):
            raise InvalidInput(
                f"limits.{bound} is {_shown(value)}, must be null or an integer from 0 to 2^62"
            )
        limits[bound] = value
    thresholds = {
        key: finite_number(f"thresholds.{key}", value)
        for key, value in document["thresholds"].items()
    }
    GateSettings.from_thresholds(thresholds)
    for policy, options in document["policy_options"].items():
        with _named("policy_options"):
            resolve_policy(policy, options)
    for flag in ("observe_lock", "separate_approval"):
        if not isinstance(document[flag], bool):
            raise InvalidInput(f"{flag} is {_shown(document[flag])}, must be true or false")
    return DeploymentPolicy(
        mode=mode,
        policy=name,
        shadow_policies=shadows,
        limits=PlanLimits(**limits),
        cycle_s=finite_number("cycle_s", document["cycle_s"]),
        proposal_ttl_s=finite_number("proposal_ttl_s", document["proposal_ttl_s"]),
        schedule=Schedule(
            **{name: _spans(name, value) for name, value in document["schedule"].items()}
        ),
        thresholds=thresholds,
        policy_options=document["policy_options"],
        dispatch=None if dispatch is None else _choice("dispatch", dispatch, DispatchModel, "null"),
        cost=_choice("cost", document["cost"], CostChoice),
        observe_lock=document["observe_lock"],
        separate_approval=document["separate_approval"],
    )


def _choice(what: str, value: Any, kind: type[_ChoiceT], *others: str) -> _ChoiceT:
    """Return a value as a member of an enumeration; `others` are allowed, too."""
    if not isinstance(value, str) or value not in set(kind):
        known = ", ".join((*kind, *others))
        raise InvalidInput(f"{what} is {_shown(value)}, must be one of {known}")
    return kind(value)


def _shown(value: Any) -> str:
    """Return the beginning of a value as operators write it."""
    try:
        return f"{json.dumps(value, default=repr):.40}"
    except RecursionError:  # It was read with fewer calls on the stack.
        return "nested too deeply"


@contextlib.contextmanager
def _named(field: str) -> Iterator[None]:
    """Name a field of the policy in the error about one of its values."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{field}: {error}", error.reason) from error


def _shadows(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"shadow_policies is {_shown(names)}, must be a list of policy names")
    if len(names) > _MAX_SHADOWS or len(set(names)) < len(names):
        raise InvalidInput(
            f"shadow_policies is {_shown(names)}, must name at most {_MAX_SHADOWS} policies, each"
            " once"
        )
    for name in names:
        with _named("shadow_policies"):
            resolve_policy(name)
    return tuple(names)


def _spans(name: str, texts: Any) -> tuple[str, ...]:
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise InvalidInput(f"schedule.{name} is {_shown(texts)}, must be a list of weekly spans")
    return tuple(texts)


def finite_number(what: str, value: Any) -> float:
    """Return a finite number.

    Raises:
        InvalidInput: the value is none.
    """
    if not isinstance(value, bool) and isinstance(value, int | float):
        # An integer may be larger than any float.
        with contextlib.suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise InvalidInput(f"{what} is {_shown(value)}, must be a finite number")


def policy_from_document(
    body: Mapping[str, Any] | None,
    default: DeploymentPolicy,
    unusable: Callable[[str], None] | None = None,
) -> DeploymentPolicy:
    """Return the stored policy; the default if none is stored or it can no longer be used.

    Args:
        unusable: told why a stored policy cannot be used.
    """
    if body is None:
        return default
    try:
        return change_policy(default, body)
    except EvenkeelError as error:
        if unusable is not None:
            unusable(str(error))
        return default
