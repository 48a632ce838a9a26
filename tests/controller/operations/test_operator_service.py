"""Answers to operators from memory and from the store."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.api.convert import deployment_out
from evenkeel_moe.controller.cycles.manual_plans import request_digest
from evenkeel_moe.controller.operations.status import LiveView
from evenkeel_moe.errors import Conflict, InfeasiblePlan, InvalidInput, Reason, Unavailable
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.ports.operations import PlanRequest
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.wire.link import Heartbeat
from tests.contracts.memory_store import SilentStore
from tests.contracts.test_stores import make_record
from tests.controller.cycles.manual_rig import Rig
from tests.controller.replicas import DEMO, ONE, answer, attach_ranks, replicas
from tests.planning.signals.test_live_findings import LOST
from tests.planning.signals.test_load_findings import routed
from tests.protocol.machines import DEPLOYMENT, hello_of
from tests.telemetry.test_load_check import HALVED
from tests.waiting import until


async def test_an_id_is_taken_also_by_a_plan_that_is_only_in_the_store(leading_two):
    registry, operations, _ = leading_two
    member = registry.deployments[ONE]
    request = PlanRequest(plan_id=PlanId("old"), requested_by="eve")
    record = make_record("old", request_digest=request_digest(request))
    record = replace(record, plan=replace(record.plan, deployment=ONE))
    await registry.shared.store.store_plan(record, member.leadership.term)
    assert member.control.records.by_id == {}
    assert await operations.create_plan(ONE, request) == record
    with pytest.raises(Conflict, match="plan old was created by another request") as caught:
        await operations.create_plan(ONE, replace(request, policy="eplb"))
    assert caught.value.reason is Reason.ID_REUSED
    with pytest.raises(Unavailable):  # The id is new, so a plan is tried; there are no ranks.
        await operations.create_plan(ONE, replace(request, plan_id=PlanId("new")))


@pytest.mark.parametrize("silent", ["fetch_plans", "plan_order"])
async def test_a_page_of_plans_has_no_holes_while_the_store_is_out_of_reach(leading_two, silent):
    registry, operations, clock = leading_two
    member, store = registry.deployments[ONE], SilentStore(clock)
    for number in range(6):
        record = make_record(f"p{number}", 100.0 + number)
        record = replace(record, plan=replace(record.plan, deployment=ONE))
        await store.store_plan(record, 1)
        if number > 3:
            member.control.records.by_id[record.plan.plan_id] = record
    operations._store = store

    async def page(after=None):
        records, more = await operations.plans(ONE, 3, after)
        return [record.plan.plan_id for record in records], more

    assert await page() == (["p5", "p4", "p3"], True)
    assert await page("p3") == (["p2", "p1", "p0"], False)
    store.silent.add(silent)
    assert await page() == (["p5", "p4"], False)
    with pytest.raises(Unavailable):
        await page("p3")


async def test_a_plan_that_only_the_store_has_is_not_denied_while_that_is_out_of_reach(leading_two):
    registry, operations, clock = leading_two
    operations._store = SilentStore(clock, "fetch_plans")
    with pytest.raises(Unavailable):
        await operations.plan(ONE, PlanId("old"))


@pytest.fixture
async def replica():
    """A replica that leads DEMO."""
    async with replicas("a") as (one, _):
        deployment = one.registry.add(DEMO)
        await deployment.keeper.decided(10)
        await until(lambda: deployment.control.leader is not None)
        yield one


@pytest.fixture
def operations(replica):
    return replica.operations


async def test_of_changes_based_on_one_document_the_first_is_taken_and_logged(operations):
    base = await operations.policy(DEMO)
    with capture_logs() as log:
        answers = await asyncio.gather(
            *(operations.set_policy(DEMO, {"cycle_s": 10.0 + n}, "me", base) for n in range(6)),
            return_exceptions=True,
        )
    first = answers[0]
    assert not isinstance(first, BaseException)
    assert first["cycle_s"] == (await operations.policy(DEMO))["cycle_s"] == 10.0
    assert all(
        isinstance(late, Conflict) and late.reason is Reason.STALE_BASE for late in answers[1:]
    )
    assert [row["changes"] for row in log if row["event"] == "policy_changed"] == [
        {"cycle_s": 10.0}
    ]
    # The next change may name the answered document as its base, or no base at all.
    assert (await operations.set_policy(DEMO, {"cycle_s": 3.0}, "me", answers[0]))["cycle_s"] == 3.0
    assert (await operations.set_policy(DEMO, {"cycle_s": 4.0}, "me"))["cycle_s"] == 4.0


async def test_a_refused_change_is_not_logged_as_one(operations):
    with capture_logs() as log, pytest.raises(InvalidInput, match="^cycles: "):
        await operations.set_policy(DEMO, {"cycles": 1}, "me")
    assert not [row for row in log if row["event"] == "policy_changed"]


@pytest.mark.parametrize(
    ("thresholds", "words"),
    [
        (
            {"min_window_steps": 300},
            "^thresholds.min_window_steps 300 exceeds window.plan_steps 256: no cycle",
        ),
        (
            {"min_held_out_steps": 1000},
            "^thresholds.min_held_out_steps 1000 must be a whole number of at most 128, half",
        ),
        (
            {"min_window_steps": 300, "min_held_out_steps": 129},
            "300 exceeds .*; thresholds.min_held_out_steps 129",
        ),
    ],
)
async def test_a_gate_that_no_window_can_pass_is_refused(operations, thresholds, words):
    before = await operations.policy(DEMO)
    with pytest.raises(InvalidInput, match=words):
        await operations.set_policy(DEMO, {"thresholds": thresholds}, "me")
    assert await operations.policy(DEMO) == before
    wanted = {"min_window_steps": 256, "min_held_out_steps": 128}
    changed = await operations.set_policy(DEMO, {"thresholds": wanted}, "me")
    assert changed["thresholds"] | wanted == changed["thresholds"]


async def test_a_replica_budget_that_the_slots_cannot_hold_is_refused(replica, operations):
    await replica.lead()
    before = await operations.policy(DEMO)
    with pytest.raises(InfeasiblePlan, match=r"4 experts \+ 1000 redundant = 1004 copies a layer"):
        await operations.set_policy(DEMO, {"replica_budget": 1000}, "me")
    assert await operations.policy(DEMO) == before
    changed = await operations.set_policy(DEMO, {"replica_budget": 2}, "me")
    assert changed["replica_budget"] == 2


async def test_a_stored_gate_that_no_window_can_pass_stops_no_other_change(replica, operations):
    """A replica with longer windows stored it."""
    policy = DeploymentPolicy(mode=Mode.AUTO, thresholds={"min_held_out_steps": 200})
    replica.member.control.handle(ctl.PolicySet(policy, {}), 0.0)
    assert (await operations.set_policy(DEMO, {"mode": "observe"}, "me"))["mode"] == "observe"


SHAPE = ModelShape(6, 16, 2, 10, 2, 10)
BASE = Placement.initial(SHAPE)


class CountingRig(Rig):
    """Two ranks of a model of 6 layers x 16 experts, whose counts the test chooses."""

    async def lead(self, first_stream=1):
        hellos = [hello_of(rank, shape=SHAPE, placement_digest=BASE.digest) for rank in range(2)]
        self.sessions = await attach_ranks(
            self.registry, hellos, first_stream, self.serving.spawn, answer
        )
        await self.at_rest()

    def report(self, received, tokens, first=0):
        """Report steps from both ranks; received: (n, L, S), tokens: (n, R)."""
        for rank, session in enumerate(self.sessions):
            identity = session.hello.identity
            steps = step_table(
                StepMeta(first + index, 0, Phase.DECODE, int(each))
                for index, each in enumerate(tokens[:, rank])
            )
            counts = received.reshape(len(received), 6, 2, 10)[:, :, rank]
            session.received(
                LoadReport(
                    identity.deployment,
                    identity.generation,
                    identity.rank,
                    identity.incarnation,
                    CountingSide.DESTINATION,
                    steps,
                    counts.astype(np.int32),
                )
            )

    async def feed(self, load, first=0, tokens=None):
        """Report (T, L, E) counts, each expert's by the first of its slots."""
        received = np.zeros((len(load), 6, SHAPE.num_slots), np.int64)
        for layer, expert in np.ndindex(6, 16):
            slot = int(np.flatnonzero(BASE.phy2log[layer] == expert)[0])
            received[:, layer, slot] = load[:, layer, expert]
        if tokens is None:
            tokens = load[:, 0].sum(axis=1) // 2
        self.report(received, np.stack([tokens // 2, tokens - tokens // 2], axis=1), first)
        ingest = self.member.loads.ingest
        await until(lambda: ingest.highest_step(0, ingest.generation) == first + len(load) - 1)

    @property
    def view(self):
        return LiveView(self.member)

    def metrics(self):
        registry = CollectorRegistry()
        ControllerMetrics(registry).refresh(self.view.status())
        families = text_string_to_metric_families(generate_latest(registry).decode())
        (family,) = [each for each in families if each.name == "evenkeel_load_finding"]
        return {sample.labels["code"]: sample.value for sample in family.samples}

    async def decided(self):
        """Return the decision of a cycle that begins from now on."""
        before = len(self.member.decisions)
        await until(lambda: len(self.member.decisions) > before + 1, within_s=10)
        return self.member.decisions[-1]


@pytest.fixture
async def rig():
    rig = CountingRig()
    await rig.lead()
    await rig.operations.set_policy(DEPLOYMENT, {"mode": "auto", "cycle_s": 0.1}, "me")
    yield rig
    await rig.tasks.end()
    await rig.serving.end()


def even(steps, seed=0):
    """Return routed counts, an even number in each layer and step."""
    return 2 * routed(seed, steps=steps)


def codes(rig):
    findings = rig.view.status().findings
    return None if findings is None else [str(each.code) for each in findings]


async def test_what_cannot_be_checked_is_unknown(rig):
    assert rig.view.status().findings is None
    assert deployment_out(rig.view.status()).findings is None
    assert rig.metrics() == {}
    await rig.feed(even(70))
    assert rig.view.status().findings == ()
    assert rig.metrics() == {"uneven_layers": 0, "idle_layers": 0, "idle_experts": 0}
    for session in rig.sessions:
        session.received(Heartbeat(5, 1, 1, stopping=True))
        session.lost()
    assert rig.view.status().findings is None, "the windows tell of the past"
    assert rig.metrics() == {}


@HALVED
async def test_layers_that_disagree_are_told_although_no_step_adds_up(rig):
    load = even(70)
    load[:, 3] //= 2
    await rig.feed(load)
    status = rig.view.status()
    assert status.window_steps == 0
    told: Any = deployment_out(status)
    (shown,) = told.findings
    assert (shown.code, shown.severity) == ("uneven_layers", "doubt")
    assert shown.where == "layer 3 in 70 of 70 steps" and shown.share == pytest.approx(
        0.5, abs=0.01
    )
    assert "most in layer 3: 50" in shown.words
    assert rig.metrics() == {"uneven_layers": 1, "idle_layers": 0, "idle_experts": 0}
    decision = await rig.decided()
    assert decision["reason"] == Reason.IMPLAUSIBLE_COUNTS
    assert decision["numbers"]["uneven_layers"] == shown.share
    assert decision["numbers"]["max_layer_deviation"] == 0.005


@HALVED
async def test_a_layer_that_never_counts_is_told(rig):
    load = even(70)
    load[:, [1, 2]] = 0
    await rig.feed(load)
    assert codes(rig) == ["idle_layers"]
    assert rig.view.status().findings[0].where == "layers 1..2"
    assert (await rig.decided())["reason"] == Reason.IMPLAUSIBLE_COUNTS


@LOST
async def test_a_rank_whose_experts_never_count_is_told_and_nothing_is_planned(rig):
    """The counts add up: this engine works its tokens out of them."""
    load = even(70)
    whole = load.sum(axis=2)
    load[:, BASE.only_rank == 1] = 0
    load[:, :, 5] += whole - load.sum(axis=2)
    await rig.feed(load)
    status = rig.view.status()
    assert status.window_steps == 70
    assert [(str(each.code), each.where) for each in status.findings] == [
        ("idle_experts", "rank 1")
    ]
    assert rig.metrics()["idle_experts"] == 1
    decision = await rig.decided()
    assert decision["reason"] == Reason.IMPLAUSIBLE_COUNTS
    assert decision["numbers"]["idle_experts"] == status.findings[0].share
    for request in (PlanRequest(), PlanRequest(dry_run=True)):
        with pytest.raises(Conflict) as caught:
            await rig.operations.create_plan(DEPLOYMENT, request)
        assert caught.value.reason is Reason.IMPLAUSIBLE_COUNTS
        assert str(caught.value) == (
            "The counts of layers or experts contradict each other; the deployment's findings say"
            f" where: idle experts 37.5% (`evenkeel status {DEPLOYMENT}`)"
        )


@LOST
async def test_thresholds_of_the_policy_let_an_operator_allow_a_finding(rig):
    load = even(70)
    broken = load[:4].copy()
    broken[:, 3] //= 2
    await rig.feed(broken)
    await rig.feed(load[4:], first=4)
    assert [str(each.severity) for each in rig.view.status().findings] == ["doubt"]
    assert (await rig.decided())["reason"] == Reason.IMPLAUSIBLE_COUNTS
    allowed = {"thresholds": {"max_layer_deviation": 0.1}}
    await rig.operations.set_policy(DEPLOYMENT, allowed, "me")
    assert [str(each.severity) for each in rig.view.status().findings] == ["note"]
    assert rig.metrics()["uneven_layers"] == 0
    assert (await rig.decided())["reason"] != Reason.IMPLAUSIBLE_COUNTS


@LOST
async def test_a_recommendation_says_what_is_wrong_with_the_counts(rig):
    load = even(70)
    load[:, 3] //= 2
    await rig.feed(load)
    advice = (await rig.operations.recommendation(DEPLOYMENT, 0)).recommendation
    assert (advice.call, advice.reason) == ("insufficient_evidence", Reason.IMPLAUSIBLE_COUNTS)
    assert advice.words[0].startswith("layers of one step routed different numbers of choices")
    assert advice.words[-1] == "Nothing was planned."


async def test_right_counts_with_cold_experts_do_not_close_the_gate(rig):
    load = even(70)
    for layer in range(6):
        load[:, layer, layer] += load[:, layer, 15 - layer]
        load[:, layer, 15 - layer] = 0
    await rig.feed(load)
    assert rig.view.status().findings == ()
    assert (await rig.decided())["reason"] != Reason.IMPLAUSIBLE_COUNTS
