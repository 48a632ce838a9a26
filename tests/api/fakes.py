"""A small `ports.Operations` in memory, for tests of the API and of the command line."""

import asyncio
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from evenkeel_moe.errors import Conflict, InvalidInput, NotFound, Reason
from evenkeel_moe.model.cost import CostBasis, CostSource
from evenkeel_moe.model.ids import DeploymentId, Epoch, Generation, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, PlanPhase, PlanRecord, Transfer, Wave
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.capacity import (
    CapacityInputs,
    CapacityRequest,
    weigh_capacity,
)
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory
from evenkeel_moe.planning.decision.recommendation import PolicyScore, Recommendation
from evenkeel_moe.planning.decision.replica_levels import (
    CraftAllocation,
    CraftFactors,
    CraftLevel,
    Redundancy,
    ReplicaLevel,
)
from evenkeel_moe.planning.decision.verdict import Call, Verdict
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem
from evenkeel_moe.planning.problem.survival import Coverage, Survive
from evenkeel_moe.ports.operations import (
    Advice,
    CapacityAdvice,
    LedElsewhere,
    QuarantineRow,
    QuarantineSample,
    RecordedEpoch,
)
from evenkeel_moe.ports.status import DeploymentStatus, RankStatus, ResizeStatus
from evenkeel_moe.replay.planners import cycle_inputs
from tests.telemetry.reports import load_window

SHAPE = ModelShape(
    num_layers=2,
    num_logical_experts=4,
    num_ranks=2,
    slots_per_rank=3,
    top_k=2,
    bytes_per_expert=1000,
)
NOW = 1_700_000_000.0


def make_rank(rank: int, **changes) -> RankStatus:
    values = {
        "rank": rank,
        "node": f"node-{rank // 8}",
        "gpu_uuid": f"GPU-{rank}",
        "fresh": True,
        "last_seen_unix": NOW,
        "epoch": 3,
        "state": "idle",
        "load_share": 0.5,
        "seconds_per_token": 1e-6,
        "free_bytes": 10_000,
        "staging_bytes": 4_000,
        "slowness": None,
        "trouble": "",
        "device": "",
        "weight_format": "",
        "stopped": False,
    }
    return RankStatus(**{**values, **changes})


def make_status(deployment: str = "demo", **changes) -> DeploymentStatus:
    values = {
        "deployment": deployment,
        "at_unix": NOW,
        "state": "ready",
        "reason": "balance_above_threshold",
        "mode": "auto",
        "policy": "eplb",
        "rules": DeploymentPolicy(Mode.AUTO, "eplb"),
        "leader": "controller-0",
        "leader_address": "controller-0:50051",
        "term": 2,
        "generation": "11111111-1111-1111-1111-111111111111",
        "epoch": 3,
        "rollback_epoch": 2,
        "shape": SHAPE,
        "ranks": (make_rank(0), make_rank(1)),
        "step": 120,
        "window_steps": 100,
        "balancedness_mean": 0.8,
        "balancedness_worst": 0.6,
        "time_balance": 0.7,
        "time_balance_worst": 0.5,
        "cost_model": CostBasis(CostSource.MEASURED, "1200 steps", "s", 0.034),
        "active_plan": None,
        "coverage": (Coverage(Survive.RANK, 2, 4, 8),),
        "last_decision": {"at": NOW, "reason": "no_change", "plan_id": None, "numbers": {}},
    }
    return DeploymentStatus(**{**values, **changes})


def make_plan(plan_id: str = "p-1", deployment: str = "demo", **changes) -> PlanRecord:
    base = Placement.initial(SHAPE)
    rows = base.phy2log[:1].copy()
    rows[0, 2], rows[0, 5] = rows[0, 5], rows[0, 2]
    wave = Wave(0, (0,), rows, ((Transfer(0, int(rows[0, 5]), 2, 5, 1000),),))
    plan = Plan(
        plan_id=PlanId(plan_id),
        deployment=DeploymentId(deployment),
        kind=PlanKind.MANUAL,
        policy="eplb",
        reason=Reason.MANUAL_REQUEST,
        generation=Generation("11111111-1111-1111-1111-111111111111"),
        weights_version=1,
        base_epoch=Epoch(3),
        base=base,
        target=base.with_rows((0,), rows),
        waves=(wave,),
        created_at=NOW,
        numbers={"balancedness_mean": 0.6, "balancedness_expected": 0.9},
    )
    values = {
        "plan": plan,
        "phase": PlanPhase.PROPOSED,
        "reason": Reason.PLAN_PROPOSED,
        "waves_committed": 0,
        "updated_at": NOW,
        "story": ({"at": NOW, "event": "created", "by": "test"},),
    }
    return PlanRecord(**{**values, **changes})


def make_window(steps: int = 5) -> LoadWindow:
    counts = np.tile([[8, 4, 2, 2], [4, 4, 4, 4]], (steps, 1, 1))
    return load_window(counts, range(steps), 2, epoch=3, tokens=np.full((steps, 2), 4))


VERDICT = Verdict(Call.RECOMMEND, 20, 0.2, 0.15, 0.25, 40.0, 400.0, 1000, 0.002, 10.0, None)


def make_advice(deployment: str = "demo", **changes) -> Advice:
    """Return a recommendation with unknown free memory and unknown duration of a step."""
    own = PolicyScore("eplb", Reason.PLAN_STARTED, 2, 2000, 0.97, VERDICT)
    broken = PolicyScore("gem", Reason.PLANNER_FAILED, detail="ZeroDivisionError: 1 / 0")
    levels = (
        ReplicaLevel(0, -0.1, -0.12, -0.08, None, -1000, True, None),
        ReplicaLevel(2, 0.0, 0.0, 0.0, 0.05, 0, True, None),
        ReplicaLevel(4, 0.01, -0.01, 0.03, 0.005, 2000, None, 0.9),
    )
    craft = (CraftLevel(1, 2, 1, 0.02, 0.01, 0.03, -1000, True, 0.95),)
    found = Recommendation(
        VERDICT.call,
        own.reason,
        ("eplb would make 2 copies.",),
        60,
        40,
        20,
        None,
        (own, broken),
        Redundancy(
            *(2, 2, levels, 2, craft, CraftFactors(1, 2, None)),
            CraftAllocation(1, (1, 2), (0.5, 0.9), ((0.2, 0.4), (-0.1, 0.05)), (2, 0)),
            None,
        ),
    )
    values = {
        "deployment": deployment,
        "at_unix": NOW,
        "generation": "11111111-1111-1111-1111-111111111111",
        "epoch": 3,
        "policy": "eplb",
        "newest_step": 119,
        "free_bytes": None,
        "kv": KvMemory(10, 50_000),
        "kv_promise": None,
        "recommendation": found,
        "shadow": {"keel": {"at": NOW, "gain": 0.1, "call": Call.RECOMMEND}},
    }
    return Advice(**{**values, **changes})


def make_capacity(request: CapacityRequest, **changes) -> CapacityAdvice:
    """Return the comparison of the widths of a request on the window of `make_window`."""
    counts = make_window().counts
    values: dict[str, Any] = {
        "group": cycle_inputs(
            PlacementProblem(counts.astype(np.float64), SHAPE, Topology.single_node(2)),
            Placement.initial(SHAPE),
            "eplb",
        ),
        "planned_on": counts[:3],
        "scored_on": counts[3:],
        "asked": request,
        "kv": KvMemory(10, 50_000),
    }
    inputs = CapacityInputs(**{**values, **changes})
    return CapacityAdvice(
        deployment=DeploymentId("demo"),
        at_unix=NOW,
        generation="11111111-1111-1111-1111-111111111111",
        epoch=3,
        policy="eplb",
        free_bytes=inputs.free_bytes,
        kv=inputs.kv,
        capacity=weigh_capacity(inputs),
    )


@dataclass
class FakeView:
    shown: DeploymentStatus | Exception
    windows: dict[Phase, LoadWindow] = field(default_factory=dict)
    placed: Placement | None = None

    def status(self):
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown

    def placement(self):
        return self.placed

    def window(self, phase):
        return self.windows.get(phase)


class FakeOperations:
    """Keeps plans and the policy document in memory, and records every call in `calls`."""

    def __init__(self, *views: FakeView):
        self.views = {view.status().deployment: view for view in views}
        self.records: dict[str, list[PlanRecord]] = {name: [] for name in self.views}
        self.document = {"mode": "auto", "policy": "eplb"}
        self.health = {"store": "ok"}
        self.advice = make_advice()
        self.capacity_inputs: dict[str, Any] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.elsewhere: list[LedElsewhere] = []
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        """Raised by changes of the policy."""
        self.rejected = [
            QuarantineRow(
                "sum_mismatch", 12, (QuarantineSample(1, "rank 1: 7 tokens, counts sum to 9"),)
            )
        ]
        self.rows: list[dict[str, Any]] = []
        self.decided: list[dict[str, Any]] = [
            {"at": NOW - n, "reason": "no_change", "plan_id": None, "numbers": {}}
            for n in range(30)
        ]
        self.level = "info"

    def show(self, deployment="demo", **changes):
        """Give a deployment the usual status with these changes."""
        status = make_status(deployment, **changes)
        self.views.setdefault(deployment, FakeView(status)).shown = status

    def _check(self, deployment):
        if self.error is not None:
            raise self.error
        if deployment not in self.views:
            raise NotFound(f"no deployment {deployment}")

    def _known(self, deployment, plan_id):
        found = (one for one in self.records[deployment] if one.plan.plan_id == plan_id)
        return next(found, None)

    async def deployments(self):
        return list(self.views.values())

    async def led_elsewhere(self):
        return self.elsewhere

    async def deployment(self, deployment):
        self._check(deployment)
        return self.views[deployment]

    async def create_plan(self, deployment, request):
        self._check(deployment)
        self.calls.append(("create_plan", deployment, request))
        plan_id = request.plan_id or f"p-{len(self.records[deployment]) + 1}"
        if (known := self._known(deployment, plan_id)) is not None:
            return known
        record = make_plan(plan_id, deployment)
        if request.dry_run:
            return record
        if request.approve:
            record = replace(record, phase=PlanPhase.APPROVED, reason=Reason.MANUAL_REQUEST)
        self.records[deployment].insert(0, record)
        return record

    async def plans(self, deployment, limit, after=None):
        self._check(deployment)
        records = self.records[deployment]
        names = [record.plan.plan_id for record in records]
        if after is not None and after not in names:
            raise InvalidInput(f"no plan {after}")
        start = 0 if after is None else names.index(after) + 1
        return records[start : start + limit], start + limit < len(records)

    async def plan(self, deployment, plan_id):
        self._check(deployment)
        if (record := self._known(deployment, plan_id)) is None:
            raise NotFound(f"no plan {plan_id}")
        return record

    async def _move(self, deployment, plan_id, phase, reason, by):
        record = await self.plan(deployment, plan_id)
        if record.phase.terminal:
            raise Conflict(f"plan {plan_id} is {record.phase}", Reason.WRONG_PHASE)
        moved = replace(record, phase=phase, reason=reason, approved_by=by)
        self.records[deployment] = [moved if r is record else r for r in self.records[deployment]]
        return moved

    async def approve(self, deployment, plan_id, by, bounded=True):
        self.bounded = bounded
        return await self._move(deployment, plan_id, PlanPhase.APPROVED, Reason.MANUAL_REQUEST, by)

    async def cancel(self, deployment, plan_id, by):
        return await self._move(deployment, plan_id, PlanPhase.CANCELLED, Reason.CANCELLED, by)

    async def epochs(self, deployment):
        self._check(deployment)
        base, target = make_plan().plan.base, make_plan().plan.target
        return [RecordedEpoch(Epoch(3), base, False), RecordedEpoch(Epoch(8), target, True)]

    async def rollback(self, deployment, request):
        self._check(deployment)
        self.bounded = request.bounded
        if (known := self._known(deployment, request.plan_id)) is not None:
            return known
        target = request.to_placement or request.to_epoch
        self.calls.append(("rollback", deployment, target, request.requested_by))
        record = make_plan(request.plan_id or "rollback-1", deployment, phase=PlanPhase.APPROVED)
        self.records[deployment].insert(0, record)
        return record

    async def rollback_plan(self, deployment, request):
        self._check(deployment)
        plan = make_plan("rollback-1", deployment).plan
        known = {one.placement.digest: one.epoch for one in await self.epochs(deployment)}
        epoch = known.get(request.to_placement, request.to_epoch)
        if (epoch, request.to_placement) == (None, None):
            epoch = self.views[deployment].status().rollback_epoch
        if epoch is None:
            raise NotFound(f"no placement {request.to_placement or ''} is recorded")
        return replace(plan, numbers={"to_epoch": float(epoch), "expected_stall_s": 0.004})

    async def resize(self, deployment, request):
        self._check(deployment)
        if (request.to_ranks is None) == (not request.retire):
            raise InvalidInput("name the number of ranks that stay, or the ranks that retire")
        self.calls.append(("resize", deployment, request))
        retire = request.retire or tuple(range(request.to_ranks, 2))
        resize = ResizeStatus(retire, 2, 2 - len(retire), 3, False, request.plan_id)
        view = self.views[deployment]
        view.shown = replace(view.status(), resize=resize)
        return resize

    async def resume(self, deployment, by):
        self._check(deployment)
        self.calls.append(("resume", deployment, by))

    async def set_policy(self, deployment, changes, by, base=None):
        self._check(deployment)
        await asyncio.sleep(0)  # Changes queue, as in the controller.
        if self.refusal is not None:
            raise self.refusal
        if base is not None and base != self.document:
            raise Conflict("the policy document has changed since it was read", Reason.STALE_BASE)
        if changes.get("mode") not in (None, "observe", "propose", "auto"):
            raise InvalidInput(f"mode {changes['mode']} is not observe, propose or auto")
        self.document = self.document | changes
        return self.document

    async def policy(self, deployment):
        self._check(deployment)
        return self.document

    async def freeze(self, deployment, seconds, by):
        self._check(deployment)
        self.calls.append(("freeze", deployment, seconds, by))

    async def decisions(self, deployment, limit):
        if deployment not in [led.deployment for led in self.elsewhere]:
            self._check(deployment)
        return self.decided[:limit]

    async def recommendation(self, deployment, max_age_s):
        self._check(deployment)
        self.calls.append(("recommendation", deployment, max_age_s))
        return self.advice

    async def capacity(self, deployment, request):
        self._check(deployment)
        self.calls.append(("capacity", deployment, request))
        return make_capacity(request, **self.capacity_inputs)

    async def quarantine(self, deployment):
        self._check(deployment)
        return self.rejected

    async def clear_quarantine(self, deployment, by):
        self._check(deployment)
        self.calls.append(("clear_quarantine", deployment, by))
        self.rejected = []

    async def forget(self, deployment, by):
        self._check(deployment)
        if any(rank.fresh for rank in self.views[deployment].status().ranks):
            raise Conflict("2 ranks are connected", Reason.BUSY)
        self.calls.append(("forget", deployment, by))
        del self.views[deployment]

    async def record(self, entry):
        self.rows.insert(
            0, {"at": NOW + len(self.rows), "id": f"{len(self.rows):04x}", **asdict(entry)}
        )

    async def audit(self, deployment, limit):
        if deployment is not None:
            self._check(deployment)
        return [row for row in self.rows if deployment in (None, row["deployment"])][:limit]

    def log_level(self):
        return self.level

    def set_log_level(self, level, by):
        self.calls.append(("set_log_level", level, by))
        self.level = level

    async def healthy(self):
        return self.health


def make_operations() -> FakeOperations:
    return FakeOperations(
        FakeView(make_status(), {Phase.DECODE: make_window()}, Placement.initial(SHAPE)),
        FakeView(make_status("fresh", balancedness_mean=None, step=None, window_steps=0)),
    )
