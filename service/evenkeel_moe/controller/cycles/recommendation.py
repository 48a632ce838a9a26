"""Works out the advice that an operator asks for, and what policies on trial would have done.

Nothing is moved.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from evenkeel_moe.controller.cycles.cycle_inputs import PlanBase, finite
from evenkeel_moe.controller.cycles.input_builder import InputBuilder
from evenkeel_moe.controller.ranks.kv_caches import KvCaches
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.errors import Conflict, EvenkeelError, Reason, Unavailable
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.planning.decision.capacity import (
    CapacityRequest,
    capacity_of,
    prepare_capacity,
    weigh_width,
)
from evenkeel_moe.planning.decision.cycle import CycleInputs, WindowSplit
from evenkeel_moe.planning.decision.recommendation import (
    PolicyScore,
    recommend,
    score_shadows,
)
from evenkeel_moe.ports.operations import Advice, CapacityAdvice
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState

_log = structlog.get_logger(__name__)
_REFERENCE = "eplb"
"""The policy that every engine ships: others are compared with it."""


@dataclass(eq=False, repr=False)
class ShadowPolicies:
    """The newest scores of one deployment's shadow policies.

    The policies run in a process of their own, so that a slow or broken one cannot stop a cycle.
    """

    control: DeploymentState
    shared: SharedServices
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
        scoring = self._score(inputs, split, names, epoch)
        self.shared.spawn(scoring, f"shadows-{self.control.deployment}")

    async def _score(
        self, inputs: CycleInputs, split: WindowSplit, names: tuple[str, ...], epoch: int
    ) -> None:
        deployment, generation = self.control.deployment, self.control.generation
        facts = {"at": inputs.now_unix, "epoch": epoch}
        try:
            scores = await self.shared.planner.background.run(score_shadows, inputs, split, names)
        except Exception as error:  # A policy that breaks its process must not end the controller.
            _log.warning("shadows_failed", deployment=deployment, error=str(error))
            reason = error.reason if isinstance(error, EvenkeelError) else Reason.PLANNER_FAILED
            scores = tuple(PolicyScore(name, reason, detail=str(error)) for name in names)
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


@dataclass(eq=False, repr=False)
class Recommender:
    """The recommendation of one deployment; the newest answer is kept.

    It runs in the process of the shadow policies, so that it cannot delay a cycle.
    """

    control: DeploymentState
    builder: InputBuilder
    kv: KvCaches
    shadows: ShadowPolicies
    shared: SharedServices
    _kept: tuple[DeploymentPolicy, float, Advice] | None = field(default=None, init=False)
    """The newest advice, the policy it was made for, and when, on the monotonic clock."""
    _advising: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _weighing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def forget(self) -> None:
        """Drop the kept advice: the windows begin again for another generation."""
        self._kept = None

    async def recommendation(self, max_age_s: float | None) -> Advice:
        """Return the kept advice if it is young enough and its placement and policy still hold.

        Otherwise work out a new one.

        Args:
            max_age_s: None for the length of a cycle.

        Raises:
            Unavailable: this replica does not lead, ranks are missing, or the planner starts or
                failed.
            Conflict: PLAN_IN_PROGRESS while weights move, if there is no advice yet.
        """
        if (kept := self._kept_advice(max_age_s)) is not None:
            return kept
        await self.shared.planner.background.wait_until_warm()
        async with self._advising:
            if (kept := self._kept_advice(max_age_s)) is not None:  # Worked out meanwhile.
                return kept
            base, policy, now = self._base()
            self._refuse_while_moving()
            began = self.shared.clock.monotonic()
            advice = await self._work_out(base, policy, now)
            self._kept = policy, began, advice
            return advice

    def _kept_advice(self, max_age_s: float | None) -> Advice | None:
        """Return the kept advice if it still holds; None if a new one has to be worked out."""
        base, policy, _ = self._base()
        if self._kept is None or self._kept[0] != policy:
            return None
        _, began, advice = self._kept
        fits = (advice.generation, advice.epoch) == (base.generation, base.epoch)
        most = policy.cycle_s if max_age_s is None else max_age_s
        # The time of day may be set back.
        young = self.shared.clock.monotonic() - began <= most
        if not fits or not (young or self.control.records.active is not None):
            return None
        return replace(advice, kv_promise=self.kv.promise())

    async def capacity(self, request: CapacityRequest) -> CapacityAdvice:
        """Compare numbers of ranks for the present placement, policy and window.

        Raises:
            InvalidInput, ShapeMismatch: the request names widths or ranks that cannot be.
            InfeasiblePlan: the policy cannot plan at a width.
            Unavailable, Conflict: as `recommendation`.
        """
        await self.shared.planner.background.wait_until_warm()
        async with self._weighing:
            base, policy, now = self._base()
            self._refuse_while_moving()
            cycle = self.builder.build(base, policy.policy, policy.limits)
            run, kv, free_bytes = (
                self.shared.planner.background.run,
                self.kv.smallest(),
                self._free_bytes(),
            )
            inputs, widths = await run(prepare_capacity, cycle, request, kv, free_bytes)
            # Each width has the planner's deadline to itself.
            rows = [await run(weigh_width, inputs, one) for one in (None, *widths)]
            return CapacityAdvice(
                deployment=base.deployment,
                at_unix=now,
                generation=base.generation,
                epoch=base.epoch,
                policy=policy.policy,
                free_bytes=inputs.free_bytes,
                kv=inputs.kv,
                capacity=capacity_of(inputs, rows),
            )

    def _base(self) -> tuple[PlanBase, DeploymentPolicy, float]:
        """Return the present state, policy and time; Unavailable if ranks are missing."""
        base = PlanBase.current(self.control)
        quorum = self.control.membership.quorum(self.shared.clock.monotonic())
        if quorum.missing:
            raise Unavailable(quorum.detail, quorum.reason)
        return base, self.control.policy, self.shared.clock.unix()

    def _refuse_while_moving(self) -> None:
        active = self.control.records.active
        if active is not None:
            raise Conflict(
                f"plan {active.plan.plan_id} is moving weights: ask again when it has ended",
                Reason.PLAN_IN_PROGRESS,
            )

    async def _work_out(self, base: PlanBase, policy: DeploymentPolicy, now: float) -> Advice:
        inputs = self.builder.build(base, policy.policy, policy.limits)
        newest = [ring.newest_step for ring in self.builder.loads.ingest.rings.values()]
        free_bytes = self._free_bytes()
        compare = (_REFERENCE, *policy.shadow_policies)
        found = await self.shared.planner.background.run(recommend, inputs, compare, free_bytes)
        return Advice(
            deployment=base.deployment,
            at_unix=now,
            generation=base.generation,
            epoch=base.epoch,
            policy=policy.policy,
            newest_step=max((step for step in newest if step is not None), default=None),
            free_bytes=free_bytes,
            kv=self.kv.smallest(),
            kv_promise=self.kv.promise(),
            recommendation=found,
            shadow=self.shadows.rows(),
        )

    def _free_bytes(self) -> int | None:
        """Return the free bytes of the rank with the least; None unless every rank is connected."""
        shape, told = self.control.membership.shape, {}
        for member in self.control.membership.members.values():
            session = self.builder.ranks.by_stream.get(member.stream)
            if session is not None:
                told[session.rank] = session.free_bytes
        return min(told.values()) if shape is not None and len(told) == shape.num_ranks else None
