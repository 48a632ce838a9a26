"""The policy of a deployment as a document, which is stored and which operators read and change."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from evenkeel_moe.api.schemas import PolicyDocument
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.schedule import Schedule
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.policies.registry import find_policy

_MOST_WORDS = 200
"""Characters of what is said about a document."""


def policy_document(policy: DeploymentPolicy) -> dict[str, Any]:
    """Return the document of a policy, with the value of every threshold."""
    document = PolicyDocument.model_validate(policy, from_attributes=True).model_dump(mode="json")
    gates = asdict(GateSettings.from_thresholds(policy.thresholds))
    return document | {"thresholds": {name: float(value) for name, value in gates.items()}}


def change_policy(policy: DeploymentPolicy, changes: Mapping[str, Any]) -> DeploymentPolicy:
    """Return the policy with some fields changed, by the rules of a JSON merge patch (RFC 7396).

    In `limits`, `schedule` and `thresholds` only the fields that are named change. In
    `policy_options` only the options that are named change; null removes one option, or all of a
    policy.

    Raises:
        InvalidInput: a field is unknown, or a value is out of range.
    """
    try:
        wanted = PolicyDocument.model_validate(_merged(policy_document(policy), changes))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"{where}: {first['msg']}"[:_MOST_WORDS]) from None
    # Also of options that are removed: their names may be misspelt.
    for name, changed in (changes.get("policy_options") or {}).items():
        find_policy(name).check_options(changed or {})
    if len(set(wanted.shadow_policies)) < len(wanted.shadow_policies):
        raise InvalidInput("shadow_policies must name each policy once")
    options = {name: _without_none(given) for name, given in wanted.policy_options.items()}
    for name in (wanted.policy, *wanted.shadow_policies):
        find_policy(name)
    for name, given in options.items():
        find_policy(name).with_options(given)
    GateSettings.from_thresholds(wanted.thresholds)
    return DeploymentPolicy(
        **dict(wanted)
        | {
            "shadow_policies": tuple(wanted.shadow_policies),
            "limits": PlanLimits(**dict(wanted.limits)),
            "schedule": Schedule(tuple(wanted.schedule.windows), tuple(wanted.schedule.blackouts)),
            "policy_options": {name: given for name, given in options.items() if given},
        }
    )


def _merged(below: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged


def _without_none(options: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (options or {}).items() if value is not None}
