"""Scores shadow policies: what policies on trial would have done in each cycle."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from evenkeel_moe.adapters.processes.planner_pool import PlannerPool
from evenkeel_moe.controller.cycles.cycle_inputs import finite
from evenkeel_moe.controller.tasks import Spawn
from evenkeel_moe.errors import EvenkeelError, Reason
from evenkeel_moe.planning.decision.cycle import CycleInputs, WindowSplit
from evenkeel_moe.planning.decision.recommendation import (
    PolicyScore,
    ShadowRequest,
    score_shadows,
)
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class ShadowPolicies:
    """The newest scores of one deployment's shadow policies.

    The policies run in a process of their own, so that a slow or broken one cannot stop a cycle.
    """

    control: DeploymentState
    pool: PlannerPool
    spawn: Spawn
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    _scoring: bool = field(default=False, init=False)

    def forget(self) -> None:
        """Drop the scores: the windows begin again for another generation."""
        self._rows.clear()

    def rows(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the newest row of each shadow policy that is set now and was scored, by name."""
        names = self.control.policy.shadow_policies
        return {name: self._rows[name] for name in names if name in self._rows}

    def score(self, inputs: CycleInputs, split: WindowSplit, epoch: int) -> None:
        """Score the shadow policies in the background on the data a cycle planned on.

        Skipped while the scoring of an earlier cycle still runs.
        """
        names = self.control.policy.shadow_policies
        if not names or self._scoring:
            return
        self._scoring = True
        request = ShadowRequest(inputs, split, names)
        self.spawn(self._score(request, epoch), f"shadows-{self.control.deployment}")

    async def _score(self, request: ShadowRequest, epoch: int) -> None:
        deployment, generation = self.control.deployment, self.control.generation
        facts = {"at": request.inputs.now_unix, "epoch": epoch}
        try:
            scores = await self.pool.background.run(score_shadows, request)
        except Exception as error:  # A policy that breaks its process must not end the controller.
            _log.warning("shadows_failed", deployment=deployment, error=str(error))
            reason = error.reason if isinstance(error, EvenkeelError) else Reason.PLANNER_FAILED
            scores = tuple(
                PolicyScore(name, reason, detail=str(error)) for name in request.policies
            )
        finally:
            self._scoring = False
        if generation == self.control.generation:
            self._rows |= {score.policy: facts | _row(score) for score in scores}


def _row(score: PolicyScore) -> dict[str, Any]:
    """Return the known values of a score, as they are kept with decisions."""
    known: dict[str, Any] = {"reason": score.reason.value}
    for name in ("copies", "nbytes", "balancedness_expected"):
        if getattr(score, name) is not None:
            known[name] = getattr(score, name)
    if score.verdict is not None:
        basis = score.verdict.cost_model
        known |= {"call": score.verdict.call.value, "cost_model": basis.words}
        known |= finite(score.verdict.numbers())
    return known | ({"detail": score.detail} if score.detail else {})
