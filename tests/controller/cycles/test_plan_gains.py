"""What a plan delivered: the steps that count, when it is told, and where it is kept."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from evenkeel_moe.adapters.prometheus.metrics import ControllerMetrics
from evenkeel_moe.controller.cycles.cycle_inputs import PlanBase
from evenkeel_moe.controller.cycles.plan_gains import (
    StepsAfter,
    calibration_of,
    measure_plan,
    steps_after,
    steps_before,
)
from evenkeel_moe.controller.operations.gauges import GaugeLimits, GaugeReader
from evenkeel_moe.controller.operations.status import LiveView
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.cost import TOKENS, CostCurves, CostModel, CostSource
from evenkeel_moe.model.delivered import DeliveredGain, GainPair
from evenkeel_moe.model.hold import Hold
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind, PlanLimits, PlanPhase
from evenkeel_moe.planning.decision.calibration import NOT_CALIBRATED, calibrate
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT
from evenkeel_moe.protocol import control_messages as ctl
from tests.api.fakes import make_plan
from tests.controller.cycles.manual_rig import BAD
from tests.protocol.machines import AFTER_ONE, BASE, DEPLOYMENT, SHAPE, plan_of
from tests.waiting import until

PLAN = make_plan(phase=PlanPhase.COMMITTED).plan
FINAL = PLAN.base_epoch + len(PLAN.waves)
WITHOUT = np.nan


def window(first, steps, epoch, placement=PLAN.base, *, factor=1.0, seed=0):
    """Return steps whose ranks take a microsecond a token, times a factor."""
    rng = np.random.default_rng(seed + first)
    loads = np.array([90.0, 40.0, 20.0, 10.0])[: placement.num_logical_experts]
    counts = rng.poisson(loads, (steps, 2, len(loads))).astype(np.uint32)
    work = moe_time.rank_work(counts, placement)
    return LoadWindow(
        counts,
        np.arange(first, first + steps),
        np.full(steps, epoch),
        np.ones((steps, 2), np.int64),
        factor * 1e-6 * work.sum(axis=1),
    )


def around(*parts, began=99, until=None) -> tuple[dict[Phase, LoadWindow], StepsAfter]:
    windows = {Phase.DECODE: list(parts)}
    return steps_before(windows, PLAN, began), steps_after(windows, PLAN, until)


def measure(*parts, began=99, cost=TOKENS):
    earlier, later = around(*parts, began=began)
    return measure_plan(earlier, later.timed, PLAN, cost, EVEN_SPLIT, 5.0)


def test_steps_while_weights_move_count_on_no_side():
    before = window(0, 120, PLAN.base_epoch)  # The copies begin after step 99.
    between, after = window(120, 10, PLAN.base_epoch + 9), window(130, 90, FINAL)
    earlier, later = around(before, between, after)
    assert earlier[Phase.DECODE].steps.tolist() == list(range(100))
    assert later.timed[Phase.DECODE].steps.tolist() == list(range(130, 220))
    _, cut = around(before, between, after, until=150)
    assert cut.timed[Phase.DECODE].steps.tolist() == list(range(130, 151))


def test_a_plan_without_steps_on_one_side_is_not_measured():
    before, after = window(0, 100, PLAN.base_epoch), window(130, 90, FINAL)
    assert around() == ({}, StepsAfter({}, 0))
    assert around(before)[1].passed == 0
    for parts, why in (((before,), "no step under the plan"), ((after,), "no step before")):
        found, enough = measure(*parts)
        assert (found.gain, enough) == (None, False)
        assert found.unknown_because.startswith(why)


def sampled(part: LoadWindow, every: int) -> LoadWindow:
    """Return steps of which one in so many was measured."""
    measured = part.steps % every == 0
    return replace(part, compute_s=np.where(measured[:, None], part.compute_s, np.nan))


def test_steps_that_were_not_measured_are_waited_for_but_never_compared():
    before = sampled(window(0, 256, PLAN.base_epoch), 8)
    after = sampled(window(256, 256, FINAL, PLAN.target), 8)
    _, later = around(before, after, began=255)
    assert (later.most_timed, later.passed) == (32, 256)
    found, _ = measure(before, after, began=255)
    assert found.gain == pytest.approx(found.modelled, abs=0.03)
    assert 16 <= found.steps <= 32


def test_a_plan_is_measured_by_the_seconds_of_its_own_steps():
    after = window(130, 90, FINAL, PLAN.target, factor=1.1)
    found, enough = measure(window(0, 100, PLAN.base_epoch), after)
    assert enough
    counts = after.counts
    old, new = (moe_time.predicted_time(counts, one) for one in (PLAN.base, PLAN.target))
    assert found.modelled == pytest.approx(1 - new / old, abs=0.02)
    assert found.gain == pytest.approx(1 - 1.1 * new / old, abs=0.02)
    assert found.steps >= 50
    assert found.at == 5.0


def test_without_seconds_or_with_foreign_curves_it_is_unknown():
    silent = window(130, 90, FINAL, PLAN.target, factor=WITHOUT)
    before = window(0, 100, PLAN.base_epoch)
    found, _ = measure(before, silent)
    assert found.gain is None
    assert found.unknown_because == "no step under the plan has seconds of every rank with work"
    foreign = CostModel(CostCurves.linear(np.ones(3)))
    found, _ = measure(before, window(130, 90, FINAL, PLAN.target), cost=foreign)
    assert "3 ranks" in found.unknown_because


def measured(at, gain, *, modelled=None, source=CostSource.TOKENS, promised=0.1):
    record = make_plan(f"p{at}", phase=PlanPhase.COMMITTED)
    plan = replace(record.plan, cost_source=source)
    plan.numbers.update(gain=promised)
    plan.numbers.update({} if modelled is None else {"gain_modelled": modelled})
    gained = DeliveredGain(at, gain, 0.001, gain - 0.01, gain + 0.01, None, 64)
    return replace(record, plan=plan, delivered=gained)


def test_a_verdict_is_calibrated_by_the_model_and_not_by_calibrated_promises():
    unmeasured = make_plan(phase=PlanPhase.COMMITTED)
    unknown = replace(unmeasured, delivered=DeliveredGain(3.0, unknown_because="why"))
    plans = [measured(2.0, 0.05, promised=0.05, modelled=0.1), unmeasured, unknown]
    assert calibration_of(plans, CostSource.TOKENS) == calibrate([GainPair(0.1, 0.05, 0.001)])
    assert calibration_of([measured(2.0, 0.05)], CostSource.TOKENS).factor < 1
    assert calibration_of(plans, CostSource.MEASURED) == NOT_CALIBRATED, "of another cost model"
    newest = [measured(float(at), 0.1) for at in range(20, 28)]
    odd = [measured(float(at), 0.01) for at in range(8)]
    assert calibration_of([*newest, *odd], CostSource.TOKENS).factor == pytest.approx(1.0)


# --- in a running controller ----------------------------------------------------------------------


def append(rig, part):
    ingest = rig.member.loads.ingest
    ingest.rings[Phase.DECODE].append(part)
    ingest.newest_step = int(part.steps[-1])


def full(rig):
    """Return the steps of a full window."""
    return max(ring.capacity for ring in rig.member.loads.ingest.rings.values())


def note_times(rig, first, last, step_s):
    """Let steps be complete at a pace, twice a second."""
    times = rig.member.loads.ingest.step_times
    began = times._moments[-1][0] if times._moments else 0.0
    for step in range(first, last + 1, round(0.5 / step_s)):
        times.note(began + 1.0 + (step - first) * step_s, step)


async def test_the_time_of_a_step_around_a_plan_is_told_also_without_seconds(rig):
    append(rig, window(0, 200, 0, BASE, factor=WITHOUT))
    note_times(rig, 0, 199, 0.02)
    await rig.migrate()
    append(rig, window(200, full(rig), 1, AFTER_ONE, factor=WITHOUT))
    note_times(rig, 200, 199 + full(rig), 0.01)
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    record = rig.member.control.records.get(BAD)
    found = record.delivered
    assert found.gain is None
    assert (found.before.step_s, found.after.step_s) == (pytest.approx(0.02), pytest.approx(0.01))
    assert found.before.tokens_per_s == pytest.approx(2 / 0.02), "one token a rank and step"
    assert record.story[-1]["step_s_after"] == found.after.step_s
    await rig.at_rest()
    await rig.restart()
    assert rig.member.control.records.get(BAD).delivered == found


async def test_a_measured_gain_is_stored_with_the_plan_and_outlives_a_restart(rig):
    append(rig, window(0, 100, 0, BASE))
    await rig.migrate()
    ended = rig.member.control.records.get(BAD).updated_at
    append(rig, window(100, 40, 1, AFTER_ONE, factor=2.0))
    await rig.member.measure_plans()
    assert rig.member.control.records.get(BAD).delivered is None, "too few steps"
    append(rig, window(140, 30, 1, AFTER_ONE, factor=2.0))
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    record = rig.member.control.records.get(BAD)
    assert record.delivered.gain < -0.5
    assert record.updated_at == ended, "cooldowns count from the end of a plan"
    assert (record.story[-1]["event"], record.phase) == ("measured", PlanPhase.COMMITTED)
    assert record.story[-1]["delivered_gain"] == record.delivered.gain
    await rig.at_rest()
    await rig.member.measure_plans()
    assert len(rig.member.control.records.get(BAD).story) == len(record.story), "once"
    await rig.restart()
    assert rig.member.control.records.get(BAD).delivered == record.delivered


async def test_a_result_that_the_machine_has_not_taken_yet_is_told_again_unchanged(rig):
    """While the store does not answer, events wait, and a plan is not measured anew."""
    append(rig, window(0, 100, 0, BASE))
    await rig.migrate()
    append(rig, window(100, full(rig), 1, AFTER_ONE))
    gains, waiting = rig.member.planner.gains, []
    inbox, gains.inbox = gains.inbox, SimpleNamespace(post=waiting.append)
    await rig.member.measure_plans()
    await rig.member.measure_plans()
    first, second = waiting
    assert first == second and first.delivered.gain is not None
    gains.inbox = inbox
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    assert rig.member.control.records.get(BAD).delivered == first.delivered


async def test_a_plan_with_one_measured_step_in_eight_is_measured_when_the_window_is_full(rig):
    """The steps before it have left the window by then."""
    steps = full(rig)
    append(rig, sampled(window(0, steps, 0, BASE), 8))
    await rig.migrate()
    append(rig, sampled(window(steps, steps - 8, 1, AFTER_ONE), 8))
    await rig.member.measure_plans()
    assert rig.member.control.records.get(BAD).delivered is None, "too few steps"
    append(rig, sampled(window(2 * steps - 8, 8, 1, AFTER_ONE), 8))
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    delivered = rig.member.control.records.get(BAD).delivered
    assert delivered.gain == pytest.approx(delivered.modelled, abs=0.05)
    assert delivered.steps >= min(64, steps // 8) - 8


async def test_traffic_of_other_sizes_is_waited_for_and_then_unknown(rig):
    append(rig, window(0, 100, 0, BASE))
    await rig.migrate()
    part = window(100, full(rig) - 80, 1, AFTER_ONE)
    append(rig, replace(part, counts=part.counts * 3))
    await rig.member.measure_plans()
    assert rig.member.control.records.get(BAD).delivered is None
    part = window(20 + full(rig), 80, 1, AFTER_ONE)
    append(rig, replace(part, counts=part.counts * 3))
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    delivered = rig.member.control.records.get(BAD).delivered
    assert delivered.gain is None
    assert "alike in tokens" in delivered.unknown_because


async def test_a_plan_before_which_no_step_was_complete_is_unknown_for_that(rig):
    assert rig.member.loads.ingest.newest_step is None
    await rig.migrate()
    append(rig, window(100, full(rig), 1, AFTER_ONE))
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    delivered = rig.member.control.records.get(BAD).delivered
    assert delivered.unknown_because == "no step before the plan has seconds"


async def test_steps_of_another_number_of_experts_count_for_no_plan(rig):
    three = Placement.initial(replace(SHAPE, num_logical_experts=3))
    ingest = rig.member.loads.ingest
    append(rig, window(0, 100, 0, three))
    await rig.migrate()
    record = rig.member.control.records.get(BAD)
    record.plan.numbers["gain"] = 0.3
    append(rig, window(100, full(rig), 1, three))
    gauges = GaugeReader(rig.member.planner, GaugeLimits(8, 8))
    gains = [one[1:] for one in gauges.read() if one[0] == "evenkeel_last_plan_gain_ratio"]
    assert gains == [(("predicted",), 0.3), (("realised",), None)]
    assert gauges._layer_loads(AFTER_ONE) is None
    await rig.member.measure_plans()
    await rig.look_on()
    assert rig.member.control.records.get(BAD).delivered is None
    ingest.rings[Phase.DECODE] = ingest._make_ring(SHAPE)
    append(rig, window(100 + full(rig), full(rig), 1, AFTER_ONE))
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    delivered = rig.member.control.records.get(BAD).delivered
    assert delivered.unknown_because == "no step before the plan has seconds"


async def test_each_gauge_that_the_status_does_not_hold_is_exported(rig):
    append(rig, window(0, 100, 0, BASE))
    await rig.migrate()
    append(rig, window(100, full(rig), 1, AFTER_ONE))
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    control, loads = rig.member.control, rig.member.loads
    record = control.records.get(BAD)
    record.plan.numbers.update({"gain": 0.3, "balancedness_expected": 0.9})
    for name, phase in (("waits", PlanPhase.PROPOSED), ("failed", PlanPhase.ABORTED)):
        other = make_plan(name, phase=phase)
        control.records.by_id[other.plan.plan_id] = other
    loads.update_balance()
    read = [*GaugeReader(rig.member.planner, GaugeLimits(8, 8)).read()]
    registry = CollectorRegistry()
    ControllerMetrics(registry).refresh(LiveView(rig.member).status(), read)
    exported = {
        (sample.name, *(v for k, v in sample.labels.items() if k != "deployment")): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    for name, labels, value in read:
        assert exported.get((name, *map(str, labels))) == value, (name, labels)
    gain, balancedness = "evenkeel_last_plan_gain_ratio", "evenkeel_last_plan_balancedness_ratio"
    by_layer = loads.balance.by_layer()
    realised = exported[gain, "realised"], exported[balancedness, "realised"]
    assert 0 < realised[0] < realised[1] < 1
    assert (
        exported.items()
        >= {
            ("evenkeel_experts", "one"): 4,
            ("evenkeel_experts_down_to_one_replica",): 0,
            ("evenkeel_layer_balancedness_ratio", "0"): by_layer[0],
            ("evenkeel_layer_redundant_replicas", "0"): 2,
            ("evenkeel_redundant_replicas_per_layer", "max"): 2,
            ("evenkeel_last_plan_committed_timestamp_seconds",): record.updated_at,
            (gain, "predicted"): 0.3,
            (balancedness, "predicted"): 0.9,
            ("evenkeel_plan_promised_gain_ratio",): 0.3,
            ("evenkeel_plan_delivered_gain_ratio", "estimate"): record.delivered.gain,
            ("evenkeel_last_plan_failed_timestamp_seconds", other.reason): other.updated_at,
            ("evenkeel_proposal_created_timestamp_seconds",): other.plan.created_at,
        }.items()
    )
    ratios = [exported["evenkeel_layer_rank_load_ratio", "1", str(rank)] for rank in range(2)]
    assert sum(ratios) == pytest.approx(2.0) and ratios[0] > 1.1


@pytest.mark.parametrize("restarted", ["controller", "ranks"])
async def test_a_plan_whose_earlier_steps_a_restart_lost_is_unknown(rig, restarted):
    append(rig, window(0, 100, 0, BASE))
    await rig.migrate()
    if restarted == "controller":
        await rig.at_rest()
        await rig.restart()
    else:
        rig.member.planner.forget()
    append(rig, window(100, 80, 1, AFTER_ONE))
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    delivered = rig.member.control.records.get(BAD).delivered
    assert delivered.gain is None
    lost = "a restart or a change of leader has lost the steps before it"
    assert delivered.unknown_because == lost


async def test_the_next_cycle_is_calibrated_by_the_stored_plans_also_after_a_restart(rig):
    await rig.operations.set_policy(DEPLOYMENT, {"cost": "tokens"}, "me")
    append(rig, window(0, 100, 0, BASE))
    await rig.migrate()
    rig.member.control.records.get(BAD).plan.numbers["gain"] = 0.3
    append(rig, window(100, 80, 1, AFTER_ONE, factor=2.0))
    await rig.member.measure_plans()
    await until(lambda: rig.member.control.records.get(BAD).delivered)
    await rig.at_rest()
    for _ in range(2):
        base = PlanBase.current(rig.member.control)
        builder = rig.member.planner.builder
        inputs = builder.build(base, "eplb", PlanLimits())
        assert inputs.calibration.plans == 1
        assert 0.25 <= inputs.calibration.factor < 1
        assert rig.member.planner.builder.calibration == inputs.calibration
        await rig.restart()


async def test_auto_stopped_by_undelivered_gains_stays_stopped_after_a_restart(rig):
    control = rig.member.control
    await rig.operations.set_policy(DEPLOYMENT, {"mode": "auto"}, "me")
    for at in range(1, 4):
        plan = replace(plan_of(plan_id=f"a{at}"), kind=PlanKind.AUTOMATIC)
        plan.numbers["gain_lower"] = 0.1
        control.records.add(plan, PlanPhase.COMMITTED, Reason.COMMITTED, rig.clock.unix())
        gained = DeliveredGain(rig.clock.unix(), 0.0, 0.001, -0.01, 0.01, None, 64)
        rig.member.inbox.post(ctl.PlanMeasured(plan.plan_id, gained))
    await until(lambda: control.held)
    await rig.at_rest()
    status = LiveView(rig.member).status()
    assert (status.held, status.held_because) == (True, "gains_not_delivered")
    await rig.restart()
    assert rig.member.control.hold.because is Reason.GAINS_NOT_DELIVERED
    await rig.operations.resume(DEPLOYMENT, "me")
    since = rig.member.control.hold.judged_from
    assert since > 0
    await rig.restart()
    assert rig.member.control.hold == Hold(None, since)
