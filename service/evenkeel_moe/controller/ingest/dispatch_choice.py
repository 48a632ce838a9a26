"""Chooses the model of the dispatcher: what the operator set, else what the ranks told."""

from collections.abc import Iterable
from dataclasses import dataclass

from evenkeel_moe.model.dispatch_model import DispatchModel

_MOST_SHOWN = 3
_MODELS = {model.value: model for model in DispatchModel}


@dataclass(frozen=True, slots=True)
class DispatchChoice:
    """The dispatch model that plans and metrics use."""

    model: DispatchModel
    warning: str = ""
    """A sentence that names two dispatchers that disagree; empty if none do."""


def choose_dispatch(
    operator: DispatchModel | None, told: Iterable[str], setting: DispatchModel
) -> DispatchChoice:
    """Choose the model of a deployment's dispatcher.

    Args:
        operator: from the deployment's policy; None if none is set.
        told: what each rank told, empty for nothing. A name may be unknown here.
        setting: `planner.dispatch`, for ranks that tell none, several, or an unknown one.
    """
    names = sorted({name for name in told if name})
    shown = " and ".join(f"{name!r:.40}" for name in names[:_MOST_SHOWN])
    if operator is not None:
        if names in ([], [operator.value]):
            return DispatchChoice(operator)
        return DispatchChoice(
            operator, f"The policy sets dispatch '{operator}', the ranks report {shown}."
        )
    if not names:
        return DispatchChoice(setting)
    if len(names) > 1:
        return DispatchChoice(
            setting, f"The ranks report different dispatchers, {shown}; plans are for '{setting}'."
        )
    model = _MODELS.get(names[0])
    if model is None:
        return DispatchChoice(
            setting,
            f"The ranks report dispatcher {shown}, which has no model; plans are for '{setting}'.",
        )
    # The default of the setting says nothing about the engine.
    if setting not in (model, DispatchModel.EVEN):
        return DispatchChoice(
            model,
            f"The setting planner.dispatch is '{setting}', the ranks report {shown}; plans are"
            f" for {shown}.",
        )
    return DispatchChoice(model)
