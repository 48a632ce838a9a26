"""Requests answered with 503: they are carried out once, also if they are repeated."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.controller.cycles.manual_plans import _refusal, request_digest
from evenkeel_moe.errors import (
    Conflict,
    InfeasiblePlan,
    InvalidInput,
    NotFound,
    Reason,
    ShapeMismatch,
    Unavailable,
)
from evenkeel_moe.model.cost import CostSource
from evenkeel_moe.model.ids import Epoch, PlanId
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits, PlanPhase
from evenkeel_moe.planning.decision.capacity import CapacityRequest, weigh_width
from evenkeel_moe.planning.decision.cycle import CycleResult
from evenkeel_moe.planning.decision.gates import GateMemory
from evenkeel_moe.planning.decision.recommendation import recommend
from evenkeel_moe.ports.operations import PlanRequest, RollbackRequest
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.transitions import ControlState
from evenkeel_moe.wire.link import ReplicaCost
from tests.controller.cycles.manual_rig import BACK, BAD, rollback
from tests.protocol.machines import AFTER_ONE, BASE, DEPLOYMENT, plan_of
from tests.waiting import deadline, until


@pytest.mark.parametrize(("to_epoch", "takes"), [(None, False), (Epoch(0), True)])
async def test_a_rollback_that_the_store_did_not_confirm_is_carried_out_once_and_found_by_its_id(
    rig, to_epoch, takes
):
    await rig.migrate()
    rig.store.failing, rig.store.takes = 1, takes
    with pytest.raises(
        Unavailable, match="plan back: the store did not take it; it is tried again"
    ):
        await rollback(rig, to_epoch)
    await until(lambda: rig.ranks.placement == BASE)
    await rig.at_rest()
    for _ in range(2):
        assert (await rollback(rig, to_epoch)).phase is PlanPhase.COMMITTED
    await rig.look_on()
    assert rig.ranks.maps == [BASE, AFTER_ONE, BASE]
    with pytest.raises(Conflict, match="plan back was created by another request") as caught:
        await rollback(rig, Epoch(1))
    assert caught.value.reason is Reason.ID_REUSED
    # Another id is another rollback: it leads to the epoch before the first one.
    await rollback(rig, plan_id=None)
    await until(lambda: rig.ranks.placement == AFTER_ONE)


async def test_a_rollback_is_found_by_its_id_also_by_a_restarted_controller(rig):
    await rig.migrate()
    await rollback(rig)  # The replica dies before it answers its client.
    await rig.restart()
    await until(lambda: rig.ranks.placement == BASE)
    await rig.at_rest()
    assert (await rollback(rig)).phase is PlanPhase.COMMITTED
    await rig.look_on()
    assert rig.ranks.maps == [BASE, AFTER_ONE, BASE]


async def test_a_rollback_that_was_not_stored_is_made_again_by_the_next_leader(rig):
    await rig.migrate()
    rig.store.failing = 100
    with pytest.raises(Unavailable):
        await rollback(rig)
    rig.store.failing = 0
    await rig.restart()  # Before it could try to store it again.
    assert rig.ranks.placement == AFTER_ONE
    await rollback(rig)
    await until(lambda: rig.ranks.placement == BASE)


async def test_a_plan_names_the_stall_that_its_swaps_are_expected_to_cause(rig):
    await rig.load()
    request = PlanRequest(dry_run=True, target=AFTER_ONE)
    unknown = await rig.operations.create_plan(DEPLOYMENT, request)
    assert "expected_stall_s" not in unknown.plan.numbers
    await rig.migrate()
    # The slower of the two ranks needed 20 ms for a wave of the same size.
    await until(lambda: rig.member.planner.stalls.expected_s((), 1) == 0.02)
    shown = (await rig.operations.rollback_plan(DEPLOYMENT, RollbackRequest())).numbers
    assert shown == {"to_epoch": 0, "expected_stall_s": 0.02} == (await rollback(rig)).plan.numbers


async def test_a_plan_keeps_the_source_of_the_cost_model_that_scored_it(rig):
    await rig.operations.set_policy(DEPLOYMENT, {"cost": "tokens"}, "me")
    await rig.load()
    await rig.operations.create_plan(DEPLOYMENT, PlanRequest(PlanId("mine"), target=AFTER_ONE))
    for session in rig.ranks.sessions:
        session.received(ReplicaCost(1e-5, 1e-7, 2e-6, 0.0, 0.01, 1.8e9))
    await rig.operations.set_policy(DEPLOYMENT, {"cost": "auto"}, "me")
    shown = PlanRequest(dry_run=True, target=AFTER_ONE)
    again = await rig.operations.create_plan(DEPLOYMENT, shown)
    assert again.plan.cost_source is CostSource.PROFILED
    await rig.operations.approve(DEPLOYMENT, PlanId("mine"), "me")
    await until(lambda: rig.ranks.placement == AFTER_ONE)
    await rig.at_rest()
    await rig.restart()
    records = rig.member.control.records
    assert records.get(PlanId("mine")).plan.cost_source is CostSource.TOKENS
    assert (await rollback(rig)).plan.cost_source is None, "nothing scored it"


async def test_a_dry_run_is_the_plan_that_would_be_made_and_nothing_is_kept(rig):
    await rig.load()
    request = PlanRequest(plan_id=PlanId("mine"), dry_run=True, target=AFTER_ONE)
    shown = await rig.operations.create_plan(DEPLOYMENT, request)
    assert (shown.phase, shown.plan.target) == (PlanPhase.PROPOSED, AFTER_ONE)
    assert (await rig.operations.plans(DEPLOYMENT, 10))[0] == []
    with pytest.raises(InvalidInput, match="not both"):
        await rig.operations.create_plan(DEPLOYMENT, replace(request, approve=True))
    kept = await rig.operations.create_plan(DEPLOYMENT, replace(request, dry_run=False))
    assert (kept.plan.target, kept.plan.moves) == (shown.plan.target, shown.plan.moves)
    assert [one.plan.plan_id for one in (await rig.operations.plans(DEPLOYMENT, 10))[0]] == ["mine"]


async def test_a_dry_run_is_refused_if_the_placement_changed_while_it_was_planned(rig, monkeypatch):
    await rig.load()
    budget = rig.member.planner.manual.builder.budget
    run = budget.run

    async def overtaken(pool, inputs):
        result = await run(pool, inputs)
        await rig.migrate()
        return result

    monkeypatch.setattr(budget, "run", overtaken)
    with pytest.raises(Conflict, match="planned on epoch 0") as caught:
        await rig.operations.create_plan(DEPLOYMENT, PlanRequest(dry_run=True, target=AFTER_ONE))
    assert caught.value.reason is Reason.STALE_BASE


async def test_a_plan_has_options_and_a_budget_of_its_own(rig):
    await rig.load()
    before = await rig.operations.policy(DEPLOYMENT)

    async def planned(**changes):
        request = PlanRequest(policy="craft", changes=changes, dry_run=True)
        return (await rig.operations.create_plan(DEPLOYMENT, request)).plan

    assert (await planned()).target.replicas_by_layer.sum() > 0
    none = await planned(policy_options={"craft": {"max_replicas_per_rank": 0}})
    assert (none.target.replicas_by_layer == 0).all()
    assert none.numbers["replication_factor"] == none.numbers["replicas"] == 0
    assert (await planned(replica_budget=0)).target == none.target
    assert await rig.operations.policy(DEPLOYMENT) == before
    for words, changes in (
        ("unknown options of craft: speed", {"policy_options": {"craft": {"speed": 1}}}),
        ("replica_budget: ", {"replica_budget": -1}),
    ):
        with pytest.raises(InvalidInput, match=words):
            await planned(**changes)
    with pytest.raises(InvalidInput, match="replica_budget tell how to plan, target is a plan"):
        request = PlanRequest(target=AFTER_ONE, changes={"replica_budget": 1})
        await rig.operations.create_plan(DEPLOYMENT, request)
    await rig.operations.set_policy(DEPLOYMENT, {"replica_budget": 0}, "me")
    assert (await planned()).target == none.target


async def test_in_mode_auto_a_plan_by_hand_waits_for_approval_too(rig):
    await rig.load()
    await rig.operations.set_policy(DEPLOYMENT, {"mode": "auto"}, "me")
    made = await rig.operations.create_plan(DEPLOYMENT, PlanRequest(target=AFTER_ONE))
    assert made.phase is PlanPhase.PROPOSED


async def test_a_refused_plan_says_why_in_words_with_units(rig):
    async def refused(words, reason, **request):
        with pytest.raises((Conflict, InfeasiblePlan)) as caught:
            await rig.operations.create_plan(DEPLOYMENT, PlanRequest(approve=True, **request))
        assert caught.value.reason is reason
        assert re.fullmatch(words, str(caught.value)), caught.value

    few = "There are too few complete steps .*: window steps 0, min window steps [0-9]+"
    await refused(few, Reason.INSUFFICIENT_DATA)
    await rig.load()
    same = r"The best placement found is the present one: balancedness mean 0\.\d{3}"
    await refused(same, Reason.NO_CHANGE, policy="keel", limits=PlanLimits(max_moves=0))
    await refused("the target is the present placement", Reason.NO_CHANGE, target=BASE)
    for limit, words in (
        ("moves", r"copies (\d+), max copies 0, bytes \S+ k?B, layers \d+"),
        ("bytes", r"copies \d+, bytes \S+ k?B, max bytes 0 B, layers \d+"),
        ("layers", r"copies \d+, bytes \S+ k?B, layers (\d+), max layers 0"),
    ):
        limits = PlanLimits(**{f"max_{limit}": 0})
        needs = f"The plan is larger than the policy's limits allow: {words}"
        await refused(needs, Reason.LIMIT_EXCEEDED, target=AFTER_ONE, limits=limits)
    thresholds = {"max_data_age_s": 0.001}
    await rig.operations.set_policy(DEPLOYMENT, {"thresholds": thresholds}, "me")
    old = r"The newest complete step is too old .*: newest step age \S+ m?s, max data age 1 ms"
    await refused(old, Reason.STALE_DATA)
    await rig.operations.freeze(DEPLOYMENT, 1800.0, "me")
    ends = f"paused for another 30 min; `evenkeel resume -d {DEPLOYMENT}` ends that"
    await refused(ends, Reason.FROZEN)


async def test_a_plan_beside_another_is_refused_with_advice(rig):
    await rig.load()
    rig.ranks.hung = True
    plan = plan_of(1, plan_id=BAD, created_at=rig.clock.unix())
    await rig.member.inbox.request_plan(ctl.PlanSubmitted(plan, approve=True))
    with pytest.raises(Conflict) as caught:
        await rig.operations.create_plan(DEPLOYMENT, PlanRequest(approve=True, target=AFTER_ONE))
    assert caught.value.reason is Reason.PLAN_IN_PROGRESS
    cancel = f"`evenkeel plan cancel {BAD} -d {DEPLOYMENT}`"
    assert str(caught.value) == f"plan {BAD} is migrating: wait for it, or {cancel}"


async def test_plans_rollbacks_and_advice_are_refused_while_the_planner_starts(rig):
    await rig.load()
    await rig.migrate()
    rig.member.planner.shared.planner.warm = False
    request = PlanRequest(plan_id=PlanId("mine"), target=BASE)
    for ask in (
        lambda: rig.operations.create_plan(DEPLOYMENT, request),
        lambda: rollback(rig),
        lambda: rig.operations.recommendation(DEPLOYMENT, 0),
        lambda: rig.operations.capacity(DEPLOYMENT, CapacityRequest()),
    ):
        with pytest.raises(Unavailable) as caught:
            await ask()
        assert caught.value.reason is Reason.PLANNER_STARTING
    assert list(rig.member.control.records.by_id) == [BAD]


async def test_advice_does_not_wait_for_a_comparison_of_widths_or_for_other_advice(
    rig, monkeypatch
):
    await rig.load()
    pool, go_on = rig.member.planner.shared.planner, asyncio.Event()
    run, slow = pool.run, list[object]([weigh_width])

    async def held(function, *arguments):
        if function in slow:
            await go_on.wait()
        return await run(function, *arguments)

    monkeypatch.setattr(pool, "run", held)
    widths = asyncio.create_task(rig.operations.capacity(DEPLOYMENT, CapacityRequest((2,))))
    async with asyncio.timeout(deadline(10)):
        first = await rig.operations.recommendation(DEPLOYMENT, 0)
        slow.append(recommend)
        newer = asyncio.create_task(rig.operations.recommendation(DEPLOYMENT, 0))
        await asyncio.sleep(0)
        assert await rig.operations.recommendation(DEPLOYMENT, 3600) == first
    go_on.set()
    assert [row.ranks for row in (await widths).capacity.rows] == [2, 2]
    assert (await newer).at_unix > first.at_unix


async def test_advice_has_its_age_also_if_the_clock_was_set_back(rig, monkeypatch):
    await rig.load()
    first = await rig.operations.recommendation(DEPLOYMENT, 0)
    monkeypatch.setattr(rig.clock, "unix", lambda: first.at_unix - 3600)
    assert (await rig.operations.recommendation(DEPLOYMENT, 0)).at_unix == first.at_unix - 3600


async def test_an_id_taken_by_a_plan_is_no_rollbacks(rig):
    await rig.migrate()
    for to_epoch in (None, Epoch(0)):
        with pytest.raises(Conflict) as caught:
            await rollback(rig, to_epoch, plan_id=BAD)
        assert caught.value.reason is Reason.ID_REUSED


async def test_a_repetition_is_not_accepted_before_the_store_has_what_was_asked_for(rig):
    await rig.migrate()
    rig.store.failing = 10_000
    with pytest.raises(Unavailable):
        await rollback(rig)
    assert BACK in rig.member.control.records.by_id
    with pytest.raises(Unavailable):
        await rig.once_the_store_is_asked_again(lambda: rollback(rig))
    rig.store.failing = 0
    record = await rig.once_the_store_is_asked_again(lambda: rollback(rig))
    assert record.plan.plan_id in rig.store._plans[DEPLOYMENT]


async def test_a_plan_by_hand_that_the_store_did_not_confirm_is_one_plan(rig):
    await rig.load()
    rig.store.failing = 1
    request = PlanRequest(plan_id=PlanId("mine"), requested_by="me", approve=True, target=AFTER_ONE)
    with pytest.raises(Unavailable, match="plan mine: "):
        await rig.operations.create_plan(DEPLOYMENT, request)
    await until(lambda: rig.ranks.placement == AFTER_ONE)
    await rig.at_rest()
    assert (await rig.operations.create_plan(DEPLOYMENT, request)).phase is PlanPhase.COMMITTED
    await rig.look_on()
    assert rig.ranks.maps == [BASE, AFTER_ONE]


async def test_approve_and_cancel_repeated_after_a_failure_do_nothing_twice(rig):
    await rig.load()
    request = PlanRequest(plan_id=PlanId("mine"), requested_by="me", target=AFTER_ONE)
    await rig.operations.create_plan(DEPLOYMENT, request)
    rig.store.failing = 1
    with pytest.raises(Unavailable, match="tried again"):
        await rig.operations.approve(DEPLOYMENT, request.plan_id, "me")
    await until(lambda: rig.ranks.placement == AFTER_ONE)
    await rig.at_rest()
    for change in (rig.operations.approve, rig.operations.cancel):
        with pytest.raises(Conflict, match="plan mine is committed"):
            await change(DEPLOYMENT, request.plan_id, "me")
    other = replace(request, plan_id=PlanId("other"), target=BASE)
    await rig.operations.create_plan(DEPLOYMENT, other)
    rig.store.failing = 1
    with pytest.raises(Unavailable, match="tried again"):
        await rig.operations.cancel(DEPLOYMENT, other.plan_id, "me")
    await rig.at_rest()
    with pytest.raises(Conflict, match="plan other is cancelled"):
        await rig.operations.cancel(DEPLOYMENT, other.plan_id, "me")
    assert rig.store._plans[DEPLOYMENT][other.plan_id].phase is PlanPhase.CANCELLED
    assert rig.ranks.maps == [BASE, AFTER_ONE]


async def test_freeze_resume_and_policy_hold_at_once_and_are_stored_when_the_store_is_back(
    rig,
):
    operations, control, store = rig.operations, rig.member.control, rig.store
    await rig.migrate()
    await rollback(rig)
    await until(lambda: rig.ranks.placement == BASE)
    await rig.at_rest()
    changes = {
        "held": lambda: operations.resume(DEPLOYMENT, "me"),
        "frozen_until": lambda: operations.freeze(DEPLOYMENT, 600, "me"),
        "cycle_s": lambda: operations.set_policy(DEPLOYMENT, {"cycle_s": 7.0}, "me"),
    }
    for change in changes.values():
        store.failing = 1
        with pytest.raises(Unavailable, match="tried again"):
            await change()
        await rig.at_rest()
    stored = await store.fetch_document(DEPLOYMENT, "control")
    assert stored == {"held": False, "frozen_until": control.frozen_until}
    assert control.frozen_until > rig.clock.unix()
    assert (
        (await store.fetch_document(DEPLOYMENT, "policy"))["cycle_s"]
        == control.policy.cycle_s
        == 7.0
    )
    for change in changes.values():
        await change()
    assert (control.held, control.policy.cycle_s) == (False, 7.0)


async def test_who_lost_the_lease_promises_nothing(rig):
    member, store = rig.member, rig.store
    store._terms[DEPLOYMENT] += 5
    with pytest.raises(Unavailable, match="the lease was lost; .* are not tried again") as caught:
        await rig.operations.freeze(DEPLOYMENT, 600, "me")
    assert caught.value.reason is Reason.LEASE_LOST
    assert (member.control.frozen_until, await store.fetch_document(DEPLOYMENT, "control")) == (
        0.0,
        None,
    )


def test_requests_of_different_callers_are_the_same():
    one = PlanRequest(
        PlanId("a"), "eplb", PlanLimits(3), (Phase.DECODE, Phase.PREFILL), requested_by="x"
    )
    other = PlanRequest(
        None, "eplb", PlanLimits(3), (Phase.PREFILL, Phase.DECODE), requested_by="y"
    )
    assert request_digest(one) == request_digest(other)
    assert request_digest(one) != request_digest(PlanRequest(None, "eplb", PlanLimits(4)))
    target = PlanRequest(target=BASE)
    assert request_digest(target) != request_digest(PlanRequest())
    assert request_digest(PlanRequest(changes={"replica_budget": 1})) != request_digest(
        PlanRequest()
    )


@pytest.mark.parametrize("limits", [{"max_moves": 0}, {"max_bytes": 0}, {"max_layers": 0}])
async def test_a_rollback_keeps_the_limits_of_the_policy_unless_an_admin_asks(rig, limits):
    await rig.migrate()
    await rig.operations.set_policy(DEPLOYMENT, {"limits": limits}, "me")
    with pytest.raises(Conflict, match=f"needs 1.*the limit {next(iter(limits))} is 0") as error:
        await rollback(rig)
    assert error.value.reason is Reason.LIMIT_EXCEEDED
    await rig.look_on()
    assert rig.ranks.maps == [BASE, AFTER_ONE]
    await rig.operations.rollback(DEPLOYMENT, RollbackRequest(BACK, bounded=False))
    await until(lambda: rig.ranks.placement == BASE)


async def test_an_approval_keeps_the_present_limits_unless_an_admin_asks(rig):
    """The limits were lowered after the plan was made."""
    await rig.load()
    request = PlanRequest(plan_id=PlanId("mine"), requested_by="me", target=AFTER_ONE)
    made = await rig.operations.create_plan(DEPLOYMENT, request)
    await rig.operations.set_policy(DEPLOYMENT, {"limits": {"max_moves": 0}}, "admin")
    words = "plan mine needs 1, the limit max_moves is 0; role admin may exceed it"
    with pytest.raises(Conflict, match=words) as error:
        await rig.operations.approve(DEPLOYMENT, request.plan_id, "me")
    assert error.value.reason is Reason.LIMIT_EXCEEDED
    await rig.look_on()
    assert rig.ranks.maps == [BASE]
    assert (await rig.operations.plan(DEPLOYMENT, request.plan_id)).phase is made.phase
    await rig.operations.approve(DEPLOYMENT, request.plan_id, "admin", bounded=False)
    await until(lambda: rig.ranks.placement == AFTER_ONE)


async def test_the_status_says_in_the_words_of_the_refusal_why_no_plan_may_start(rig):
    await rig.load()
    request = PlanRequest(plan_id=PlanId("mine"), requested_by="me", target=AFTER_ONE)
    await rig.operations.create_plan(DEPLOYMENT, request)

    async def told():
        return (await rig.operations.deployment(DEPLOYMENT)).status().start_refused_text

    assert await told() is None
    await rig.operations.set_policy(DEPLOYMENT, {"mode": "observe", "observe_lock": True}, "me")
    with pytest.raises(Conflict, match="observe_lock is set") as refusal:
        await rig.operations.approve(DEPLOYMENT, request.plan_id, "me")
    assert await told() == str(refusal.value)
    await rig.operations.set_policy(DEPLOYMENT, {"observe_lock": False}, "me")
    await rig.operations.freeze(DEPLOYMENT, 300.0, "me")
    assert "paused for another" in await told()
    await rig.operations.resume(DEPLOYMENT, "me")
    rig.ranks.hung = True
    await rig.operations.approve(DEPLOYMENT, request.plan_id, "me")
    assert "plan mine is" in await told()


async def test_before_the_ranks_have_answered_the_status_says_that_no_plan_may_start(rig):
    rig.ranks.hung = True
    await rig.tasks.end()
    rig.start()
    await rig.ranks.attach(rig.registry, first_stream=11)
    await until(lambda: rig.member.control.state is not ControlState.FOLLOWER)
    view = await rig.operations.deployment(DEPLOYMENT)
    assert view.status().start_refused_text == "the ranks are being asked where they stand"


async def test_a_group_that_began_again_returns_to_a_placement_of_its_former_history(rig):
    """The group starts cold, and the operator wants the placement that plans had led to."""
    await rig.migrate()
    rig.ranks.start_cold()
    await rig.restart()
    assert rig.ranks.placement == BASE
    rows = [
        (row.epoch, row.placement, row.replaced) for row in await rig.operations.epochs(DEPLOYMENT)
    ]
    assert rows == [(0, BASE, False), (1, AFTER_ONE, True)]
    with pytest.raises(NotFound, match="no placement of epoch 1 is recorded"):
        await rollback(rig, Epoch(1))
    back = RollbackRequest(BACK, to_placement=AFTER_ONE.digest)
    await rig.operations.rollback(DEPLOYMENT, back)
    await until(lambda: rig.ranks.placement == AFTER_ONE)
    await rig.at_rest()
    assert (await rig.operations.rollback(DEPLOYMENT, back)).phase is PlanPhase.COMMITTED
    with pytest.raises(Conflict) as caught:
        await rig.operations.rollback(DEPLOYMENT, replace(back, to_placement=BASE.digest))
    assert caught.value.reason is Reason.ID_REUSED


async def test_a_rollback_to_a_placement_that_does_not_fit_is_refused(rig):
    other = Placement(np.zeros((1, 2), np.int32), 2, 1)
    rig.store._replaced[DEPLOYMENT] = [(Epoch(4), other)]
    for asked, error, words in (
        (RollbackRequest(to_placement=other.digest), ShapeMismatch, "must be"),
        (RollbackRequest(to_placement="0" * 32), NotFound, "no placement 0000"),
        (RollbackRequest(to_epoch=Epoch(0), to_placement=BASE.digest), InvalidInput, "name one"),
        (RollbackRequest(to_placement=BASE.digest), Conflict, "the present one"),
    ):
        with pytest.raises(error, match=words):
            await rig.operations.rollback(DEPLOYMENT, asked)


@pytest.mark.parametrize(
    ("reason", "numbers", "words"),
    [
        (
            Reason.INSUFFICIENT_DATA,
            {"window_steps": 64.0, "min_window_steps": 8.0},
            "The steps of the window have no load: window steps 64, min window steps 8",
        ),
        (
            Reason.IMPLAUSIBLE_COUNTS,
            {"max_layer_deviation": 0.1, "max_idle_experts": 0.5, "uneven_layers": 0.31},
            r"[^:]*: uneven layers 31\.0% \(`evenkeel status demo`\)",
        ),
    ],
)
def test_a_refusal_names_the_figures_that_are_known_and_no_other_cause(reason, numbers, words):
    result = CycleResult(False, reason, GateMemory(), numbers)
    assert re.fullmatch(words, str(_refusal(result, "demo")))
