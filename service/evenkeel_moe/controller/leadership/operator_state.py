"""Restores the operator's settings when a replica begins to lead.

They also survive a store that lost its data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from evenkeel_moe.controller.policy_document import change_policy, policy_document
from evenkeel_moe.errors import EvenkeelError, InvalidInput, Reason
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.policy import DeploymentPolicy


@dataclass(frozen=True, slots=True)
class OperatorState:
    """The settings of an operator; in force until an operator changes them."""

    policy: DeploymentPolicy
    hold: Hold = Hold()
    """The hold on automatic plans."""
    frozen_until: float = 0.0
    """Unix seconds; 0 when not frozen."""


@dataclass(frozen=True, slots=True)
class RestoredState:
    """The operator's settings that a new leader applies."""

    state: OperatorState
    unstored: Mapping[str, Mapping[str, Any]]
    """Documents that the store lacks, by name."""
    loss: str = ""
    """The loss of the store and its consequence; empty if no loss is known."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with documents that cannot be used, by name."""

    def row(self, unix: float) -> dict[str, Any]:
        """Return the loss as a row of the decision log."""
        reason = self.state.hold.because or Reason.RECOVERED
        return {
            "at": unix,
            "reason": reason.value,
            "plan_id": None,
            "numbers": {},
            "detail": self.loss,
        }


class OperatorStateRecovery:
    """Decides which of one deployment's settings apply: the stored ones, or those in memory.

    Every leader stores the document `leader`. If it is missing, the store never knew the
    deployment, or it lost all of its data.
    """

    def __init__(self, replica_id: str, default: DeploymentPolicy) -> None:
        self._replica_id = replica_id
        self._default = default
        self._remembered: OperatorState | None = None
        self._term = 0
        """The last term this replica led under; `_remembered` is of that term."""
        self._ranks_term = 0
        """The highest term that a rank named."""
        self._was_blank = False
        """True if the store knew nothing when this replica began to lead, and no other replica has
        led since."""

    def remember(self, term: int, state: OperatorState) -> None:
        """Note the settings while this replica leads."""
        self._term, self._remembered = term, state

    def ranks_know(self, term: int) -> None:
        """Note a term that a rank was led under: the deployment is not new, whatever is stored."""
        self._ranks_term = max(self._ranks_term, term)

    def restore(self, stored: Mapping[str, Mapping[str, Any] | None]) -> RestoredState:
        """Return the settings to apply now that this replica leads again.

        Args:
            stored: the documents `leader`, `policy` and `control`; None for a missing one.
        """
        leader, policy, control = stored["leader"], stored["policy"], stored["control"]
        if leader is None:
            self._was_blank = True
        elif leader.get("replica_id") != self._replica_id:
            self._was_blank = False
        known = (self._remembered if self._was_blank else None) or OperatorState(self._default)
        unreadable: dict[str, str] = {}
        loss = ""
        if policy is not None:
            try:
                known = replace(known, policy=change_policy(self._default, policy))
            except EvenkeelError as error:
                known = replace(known, policy=self._default)
                unreadable["policy"] = str(error)
        if control is not None:
            try:
                frozen_until = _finite(control.get("frozen_until", 0.0))
                known = OperatorState(known.policy, Hold.of_document(control), frozen_until)
            except InvalidInput as error:
                # An operator may have frozen the deployment: unknown is not "not frozen".
                known = OperatorState(known.policy, Hold(Reason.HELD_AFTER_DATA_LOSS))
                unreadable["control"] = str(error)
                loss = f"the stored freeze: {error}; automatic plans are held until resume"
        state = known
        if self._was_blank and self._ranks_term > self._term:
            # Another replica led since, or this process never did: its settings are not known.
            hold = Hold(Reason.HELD_AFTER_DATA_LOSS)
            state = OperatorState(state.policy, hold, state.frozen_until)
            loss = (
                f"the store came back empty, and ranks were led under term {self._ranks_term}: the"
                " operators' settings are lost; automatic plans are held until resume"
            )
        elif leader is None and self._remembered is not None:
            loss = "the store came back empty: mode, freeze and hold stay as they were"
        unstored: dict[str, Mapping[str, Any]] = {}
        if policy is None and state.policy != self._default:
            unstored["policy"] = policy_document(state.policy)
        body = {**state.hold.document(), "frozen_until": state.frozen_until}
        if body != (control or {"held": False, "frozen_until": 0.0}):
            unstored["control"] = body
        return RestoredState(state, unstored, loss, unreadable)


def _finite(value: Any) -> float:
    # An integer may be larger than any float.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63:
        return float(value)
    raise InvalidInput(f"frozen_until is {value!r:.40}, must be a finite number")
