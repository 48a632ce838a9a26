"""Looking without touching: shadow policies after each cycle, and the recommendation an operator asks for."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import structlog

from evenkeel_moe.controller.cycles.cycle_inputs import finite
from evenkeel_moe.errors import Conflict, EvenkeelError, Reason
from evenkeel_moe.model.load import Phase
from evenkeel_moe.planning.decision.cycle import CycleInputs, WindowSplit
from evenkeel_moe.planning.decision.recommendation import (
    PolicyScore,
    RecommendationInputs,
    ShadowRequest,
    recommend,
    score_shadows,
)
from evenkeel_moe.ports import Advice

if TYPE_CHECKING:
    from evenkeel_moe.controller.deployment.deployment import Deployment
    from evenkeel_moe.model.policy import DeploymentPolicy

__all__ = ["WhatIf"]

_log = structlog.get_logger(__name__)
_REFERENCE = "eplb"
"""What every engine ships: the policy others are compared with."""


class WhatIf:
    """What one deployment would do, and what policies on trial would have done.

    Runs beside the planner, so that a policy that is slow or dies takes no cycle with it.
    """

    def __init__(self, deployment: "Deployment") -> None:
        self._deployment = deployment
        self._shadows: dict[str, dict[str, Any]] = {}
        self._scoring = False
        self._advice: tuple[DeploymentPolicy, Advice] | None = None
        self._asking = asyncio.Lock()

    def forget(self) -> None:
        """The windows begin anew."""
        self._shadows.clear()
        self._advice = None

    # --- shadow policies ----------------------------------------------------------------------------

    def shadows(self) -> Mapping[str, Mapping[str, Any]]:
        """The last row of every shadow policy that is named now and was scored, by name."""
        named = self._deployment.control.policy.shadow_policies
        return {name: self._shadows[name] for name in named if name in self._shadows}

    def score(self, inputs: CycleInputs, split: WindowSplit, epoch: int) -> None:
        """Score the shadow policies on what a cycle planned on, in the background; skipped while that still runs."""
        named = self._deployment.control.policy.shadow_policies
        if not named or self._scoring:
            return
        self._scoring = True
        request = ShadowRequest(inputs, split, named)
        self._deployment.outside.spawn(
            self._score(request, epoch), f"shadows-{self._deployment.deployment}"
        )

    async def _score(self, request: ShadowRequest, epoch: int) -> None:
        deployment = self._deployment
        generation = deployment.control.generation
        facts = {"at": request.inputs.now_unix, "epoch": epoch}
        try:
            scores = await deployment.outside.planner.background.run(score_shadows, request)
        except (
            Exception
        ) as error:  # a policy on trial that breaks its process must not end the controller
            _log.warning("shadows_failed", deployment=deployment.deployment, error=str(error))
            reason = error.reason if isinstance(error, EvenkeelError) else Reason.PLANNER_FAILED
            scores = tuple(
                PolicyScore(name, reason, detail=str(error)) for name in request.policies
            )
        finally:
            self._scoring = False
        if generation == deployment.control.generation:
            self._shadows |= {score.policy: facts | _row(score) for score in scores}

    # --- the recommendation -------------------------------------------------------------------------

    async def recommendation(self, max_age_s: float | None) -> Advice:
        """The newest advice if it is young enough and still of this placement and policy, else a new one.

        Raises:
            Unavailable: this replica does not lead, ranks are missing, or the planner failed.
            Conflict: PLAN_IN_PROGRESS while weights move, if there is no advice yet.
        """
        async with self._asking:
            return await self._recommendation(max_age_s)

    async def _recommendation(self, max_age_s: float | None) -> Advice:
        deployment, control = self._deployment, self._deployment.control
        base, policy = deployment.planning.base(), control.policy
        now = deployment.outside.clock.unix()
        if self._advice is not None and self._advice[0] == policy:
            advice = self._advice[1]
            fits = (advice.generation, advice.epoch) == (base.generation, base.epoch)
            young = now - advice.at_unix <= (policy.cycle_s if max_age_s is None else max_age_s)
            if fits and (young or control.active_plan is not None):
                return advice
        if control.active_plan is not None:
            raise Conflict(
                f"plan {control.active_plan.plan.plan_id} is moving weights: ask again when it has ended",
                Reason.PLAN_IN_PROGRESS,
            )
        inputs = deployment.planning.inputs(base, policy.policy, policy.limits, tuple(Phase))
        newest = [ring.newest_step for ring in deployment.ingest.rings.values()]
        request = RecommendationInputs(
            inputs, (_REFERENCE, *policy.shadow_policies), self._free_bytes()
        )
        found = await deployment.outside.planner.background.run(recommend, request)
        advice = Advice(
            deployment=deployment.deployment,
            at_unix=now,
            generation=base.generation,
            epoch=base.epoch,
            policy=policy.policy,
            newest_step=max((step for step in newest if step is not None), default=None),
            free_bytes=request.free_bytes,
            recommendation=found,
            shadow=self.shadows(),
        )
        self._advice = (policy, advice)
        return advice

    def _free_bytes(self) -> int | None:
        """Of the rank with the least; None unless every rank is here to tell."""
        deployment = self._deployment
        shape, told = deployment.control.membership.shape, {}
        for member in deployment.control.membership.members.values():
            session = deployment.sessions.get(member.stream)
            if session is not None:
                told[session.rank] = session.free_bytes
        return min(told.values()) if shape is not None and len(told) == shape.num_ranks else None


def _row(score: PolicyScore) -> dict[str, Any]:
    """A score as kept with decisions: only what is known."""
    known: dict[str, Any] = {"reason": score.reason.value}
    for name in ("copies", "nbytes", "balancedness_expected"):
        if getattr(score, name) is not None:
            known[name] = getattr(score, name)
    if score.verdict is not None:
        known |= {"call": score.verdict.call.value} | finite(score.verdict.numbers())
    return known | ({"detail": score.detail} if score.detail else {})
