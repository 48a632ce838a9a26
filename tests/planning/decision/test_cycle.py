import math
from dataclasses import replace

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.policy import Mode
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision.calibration import Calibration
from evenkeel_moe.planning.decision.cycle import (
    CycleInputs,
    WindowSplit,
    plan_target,
    run_cycle,
)
from evenkeel_moe.planning.decision.gates import GateMemory, GateSettings
from evenkeel_moe.planning.policies.policy_entry import PolicyEntry, PolicyInputs
from evenkeel_moe.planning.policies.registry import POLICIES
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import Proposal
from evenkeel_moe.planning.schedule.relabel import count_moves
from evenkeel_moe.planning.signals.change_detection import Change

SHAPE = ModelShape(2, 8, 4, 3, 2, 1000)
SETTINGS = GateSettings(
    cooldown_s=10, min_window_steps=24, consecutive_windows=1, min_held_out_steps=8
)


def skewed(steps: int, hot: tuple[int, ...] = (0, 1), seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mean = np.full((2, 8), 20.0)
    mean[:, list(hot)] = 150.0
    return rng.poisson(mean, (steps, 2, 8)).astype(np.uint32)


def inputs(load, **changes) -> CycleInputs:
    known = {
        "load": load,
        "shape": SHAPE,
        "topology": Topology.single_node(4),
        "current": Placement.initial(SHAPE),
        "policy": "eplb",
        "settings": SETTINGS,
        "staging_bytes": (4000,) * 4,
        "now_unix": 1000.0,
        "mode": Mode.AUTO,
        "ranks_fresh": 4,
        "newest_step_age_s": 0.5,
        "recent_steps": 16,
    }
    return CycleInputs(**(known | changes))


def faster(one, other, load):
    """Return True if a placement takes a tenth less time than another."""
    return moe_time.predicted_time(load, one) < 0.9 * moe_time.predicted_time(load, other)


def listening(monkeypatch, name="listener", inputs=None):
    """Register a policy; return the list of the problems that it will be asked.

    It plans on the inputs of the policy that it replaces, unless others are given.
    """
    asked = []

    def plan(problem):
        asked.append(problem)
        return Proposal(Placement.initial(SHAPE), 1.0)

    if inputs is None:
        inputs = POLICIES[name].inputs if name in POLICIES else PolicyInputs()
    monkeypatch.setitem(POLICIES, name, PolicyEntry(name, "", plan, inputs=inputs))
    return asked


def test_the_policy_is_told_what_it_may_spend(monkeypatch):
    told = listening(monkeypatch)
    objective = Objective(cross_node_factor=3.0)
    run_cycle(inputs(skewed(60), policy="listener", objective=objective, max_evaluations=77))
    assert [(one.objective.cross_node_factor, one.max_evaluations) for one in told] == [(3.0, 77)]


def test_a_policy_that_fails_in_its_own_way_ends_the_cycle_with_its_error(monkeypatch):
    def broken(problem):
        raise ValueError("nobody thought of this")

    monkeypatch.setitem(POLICIES, "broken", PolicyEntry("broken", "", broken))
    ended = run_cycle(inputs(skewed(60), policy="broken"))
    assert (ended.passed, ended.reason) == (False, Reason.PLANNER_FAILED)
    line = broken.__code__.co_firstlineno + 1
    assert ended.detail == f"ValueError: nobody thought of this ({__name__}:{line})"


def test_a_cycle_scales_its_verdict_by_what_earlier_plans_delivered():
    plain = run_cycle(inputs(skewed(60)))
    scaled = run_cycle(inputs(skewed(60), calibration=Calibration(0.5, 4)))
    assert scaled.numbers["gain"] == pytest.approx(0.5 * plain.numbers["gain"])
    assert scaled.numbers["gain_modelled"] == pytest.approx(plain.numbers["gain"])


def test_a_skewed_window_ends_in_waves_that_reach_a_better_target():
    load = skewed(60)
    result = run_cycle(inputs(load))
    assert result.passed
    assert result.reason is Reason.BALANCE_BELOW_THRESHOLD
    reached = Placement.initial(SHAPE)
    for wave in result.waves:
        reached = reached.with_rows(wave.layers, wave.rows)
    assert reached == result.target
    assert faster(reached, Placement.initial(SHAPE), skewed(30, seed=1))
    assert result.numbers["gain_lower"] > 0
    assert result.numbers["balancedness_expected"] > result.numbers["balancedness_mean"]


def test_after_a_change_only_the_steps_since_are_planned_on():
    load = np.concatenate([skewed(64, (0, 1)), skewed(24, (6, 7))])
    settled = run_cycle(inputs(skewed(64, (0, 1)), policy="keel")).target
    result = run_cycle(inputs(load, current=settled, policy="keel"))
    assert (result.passed, result.reason) == (True, Reason.LOAD_CHANGED)
    assert result.numbers["planned_on_steps"] == 16
    assert result.numbers["held_out_steps"] == 8
    assert faster(result.target, settled, skewed(30, (6, 7), seed=2))


@pytest.mark.parametrize("least", [4, 8])
def test_no_fewer_steps_than_set_count_as_a_change(least):
    settled = run_cycle(inputs(skewed(64, (0, 1)))).target
    load = np.concatenate([skewed(64, (0, 1)), skewed(4, (6, 7))])
    settings = replace(SETTINGS, min_changed_steps=least)
    result = run_cycle(inputs(load, current=settled, settings=settings))
    assert result.numbers["changed_steps"] == least


def test_balance_is_compared_with_the_steps_just_before_the_change():
    older, old, new = skewed(160, (6, 7), seed=1), skewed(8, (0, 1)), skewed(8, (6, 7))
    settled = run_cycle(inputs(skewed(64, (0, 1)), policy="keel")).target
    # Over all steps before the change, the placement was almost as poor as since then.
    result = run_cycle(
        inputs(
            np.concatenate([older, old, new]),
            current=settled,
            policy="keel",
            memory=GateMemory(change_steps=40),
            steps_since_move=6,
            last_plan_ended_unix=999.0,
        )
    )
    assert (result.passed, result.reason) == (True, Reason.LOAD_CHANGED)


def test_a_few_steps_since_a_change_are_enough_for_a_gain_that_is_certain():
    settled = run_cycle(inputs(skewed(64, (0, 1)), policy="keel")).target
    load = np.concatenate([skewed(64, (0, 1)), skewed(8, (6, 7))])
    result = run_cycle(inputs(load, current=settled, steps_since_move=40, policy="keel"))
    assert (result.passed, result.reason) == (True, Reason.LOAD_CHANGED)
    assert (result.numbers["planned_on_steps"], result.numbers["held_out_steps"]) == (4, 4)
    assert result.memory.change_steps == 8
    assert faster(result.target, settled, skewed(30, (6, 7), seed=2))


@pytest.mark.parametrize("steps", [4, 8, 12, 24])
def test_few_steps_of_traffic_that_the_placement_suits_move_nothing(steps):
    suited = run_cycle(inputs(skewed(64, (6, 7)), policy="keel")).target
    for seed in range(5):
        load = np.concatenate([skewed(64, (0, 1)), skewed(steps, (6, 7), seed)])
        result = run_cycle(inputs(load, policy="keel", current=suited))
        assert not result.passed
        assert result.memory.change_steps is None


def test_a_plan_on_few_steps_is_refined_before_the_cooldown_ends():
    settled = run_cycle(inputs(skewed(64, (0, 1)))).target
    first = run_cycle(
        inputs(np.concatenate([skewed(64, (0, 1)), skewed(4, (6, 7))]), current=settled)
    )
    assert first.passed
    load = np.concatenate([skewed(64, (0, 1)), skewed(12, (6, 7))])
    soon = {
        "current": first.target,
        "memory": first.memory,
        "steps_since_move": 5,
        "last_plan_ended_unix": 999.0,
    }
    assert run_cycle(inputs(load[:-5], **soon)).reason is Reason.COOLDOWN
    refined = run_cycle(inputs(load, **soon))
    assert refined.reason is not Reason.COOLDOWN
    assert refined.split is not None
    assert refined.split.begin == 64


def test_layers_that_did_not_change_are_planned_on_all_their_steps(monkeypatch):
    asked = listening(monkeypatch, inputs=POLICIES["keel"].inputs)
    load = skewed(80, (0, 1))
    load[64:, 1] = skewed(16, (6, 7))[:, 1]
    run_cycle(inputs(load, policy="listener"))
    (problem,) = asked
    assert len(problem.load) == 72
    np.testing.assert_array_equal(problem.load[:, 0], load[:72, 0])
    before, after = problem.load[:64, 1].mean(axis=0), load[64:72, 1].mean(axis=0)
    np.testing.assert_allclose(before / before.sum(), after / after.sum())


@pytest.mark.parametrize("name", sorted({*POLICIES} - {"keel"}))
def test_published_policies_plan_on_the_steps_as_they_were_whatever_changed(monkeypatch, name):
    asked = listening(monkeypatch, name)
    load = np.concatenate([skewed(64, (0, 1)), skewed(24, (6, 7))])
    result = run_cycle(inputs(load, policy=name))
    assert result.split is not None
    assert (result.split.begin, result.split.cut) == (64, 80)
    planned = load[64:80] if name == "gem" else load[:80]
    (problem,) = asked
    np.testing.assert_array_equal(problem.load, planned)
    assert result.numbers["planned_on_steps"] == len(planned)


def test_gem_plans_on_the_papers_window_and_every_policy_on_as_many_steps_as_are_set(monkeypatch):
    load = skewed(60)
    options = {"eplb": {"plan_steps": 7}, "gem": {"plan_steps": 4, "restarts": 2}}
    for name, steps in (("eplb", 7), ("metro", 50)):
        asked = listening(monkeypatch, name)
        result = run_cycle(inputs(load, policy=name, policy_options=options))
        np.testing.assert_array_equal(asked[0].load, load[50 - steps : 50])
        assert result.numbers["planned_on_steps"] == steps
    assert run_cycle(inputs(load, policy="gem")).numbers["planned_on_steps"] == 16
    gem = run_cycle(inputs(load, policy="gem", policy_options=options))
    assert gem.numbers["planned_on_steps"] == 4
    # More than there are is all there are.
    many = {"keel": {"plan_steps": 1000}}
    keel = run_cycle(inputs(load, policy="keel", policy_options=many))
    assert keel.numbers["planned_on_steps"] == 50


def test_a_change_that_a_plan_has_answered_is_no_reason_to_plan_again():
    load = np.concatenate([skewed(64, (0, 1)), skewed(40, (6, 7))])
    assert run_cycle(inputs(load)).reason is Reason.LOAD_CHANGED
    assert run_cycle(inputs(load, steps_since_move=40)).reason is Reason.LOAD_CHANGED
    answered = run_cycle(inputs(load, steps_since_move=39))
    assert (answered.passed, answered.reason) == (True, Reason.BALANCE_BELOW_THRESHOLD)
    # Steps before the change are still left out.
    assert answered.split is not None
    assert answered.split.begin == 64


def test_the_copies_are_on_the_bill():
    cheap = run_cycle(inputs(skewed(60), objective=Objective(copy_cost=1.0), step_s=0.02))
    assert cheap.verdict is not None
    assert cheap.verdict.copy_cost == cheap.numbers["copies"]
    assert cheap.numbers["payback_s"] == pytest.approx(0.02 * cheap.numbers["payback_steps"])
    dear = run_cycle(inputs(skewed(60), objective=Objective(copy_cost=1e6)))
    assert (dear.passed, dear.reason) == (False, Reason.PAYBACK_TOO_LONG)


def test_no_steps_is_insufficient_data_and_never_a_balance():
    result = run_cycle(inputs(skewed(0), newest_step_age_s=math.nan))
    assert result.reason is Reason.INSUFFICIENT_DATA
    assert "balancedness_mean" not in result.numbers


def test_a_lost_rank_stops_the_cycle_whatever_the_balance_and_without_any_it_is_unknown():
    lost, gone = (run_cycle(inputs(skewed(60), ranks_fresh=fresh)) for fresh in (3, 0))
    assert lost.reason is gone.reason is Reason.RANKS_MISSING
    assert "balancedness_mean" in lost.numbers
    assert gone.numbers.keys() == {"ranks_fresh", "ranks_expected"}


def asked_of_a_policy(monkeypatch, load, source_load):
    """The problem a cycle makes of some steps."""
    asked = listening(monkeypatch)
    asking = inputs(load, policy="listener", source_load=source_load)
    plan_target(asking, WindowSplit(0, len(load), Change(0, math.nan), 16))
    return asked[0]


def test_source_sums_of_the_window_say_where_tokens_start_and_not_how_many(monkeypatch):
    load = skewed(60)[:40]
    sums = np.random.default_rng(4).integers(1, 99, (4, 2, 8)).astype(np.float64)
    source = asked_of_a_policy(monkeypatch, load, sums).source_load
    np.testing.assert_allclose(source.sum(axis=0), load.sum(axis=0))
    np.testing.assert_allclose(source / source.sum(axis=0), sums / sums.sum(axis=0))
    other_steps = 2.0 ** np.random.default_rng(5).integers(-3, 9, (2, 8))
    np.testing.assert_array_equal(
        asked_of_a_policy(monkeypatch, load, sums * other_steps).source_load, source
    )


def test_an_expert_with_load_and_no_source_sums_starts_evenly(monkeypatch):
    load = skewed(60)
    sums = np.ones((4, 2, 8))
    sums[:, 1, 0] = 0.0
    source = asked_of_a_policy(monkeypatch, load, sums).source_load
    np.testing.assert_array_equal(source[:, 1, 0], np.full(4, load[:, 1, 0].sum() / 4))
    assert asked_of_a_policy(monkeypatch, load, None).source_load is None


def test_after_a_change_source_sums_of_before_make_no_expert_hot():
    before, after = skewed(64, (0, 1)), skewed(40, (6, 7))
    load = np.concatenate([before, after])
    sums = np.repeat(load.sum(axis=0, dtype=np.float64)[None] / 4, 4, axis=0)
    known = run_cycle(inputs(load, policy="libra", source_load=sums))
    assert known.split is not None
    assert known.split.begin == 64
    assert known.target == run_cycle(inputs(load, policy="libra")).target


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(
    ("sums", "reason", "words"),
    [
        (
            np.full((4, 2, 8), np.nan),
            Reason.PLANNER_FAILED,
            "source_load holds 64 values that are not finite",
        ),
        (np.full((4, 2, 8), -1.0), Reason.PLANNER_FAILED, "64 negative values, smallest -1"),
        (np.ones((4, 2, 7)), Reason.WRONG_SHAPE, "must be (4, 2, 8), got (4, 2, 7)"),
    ],
)
def test_source_sums_that_cannot_be_end_the_cycle_in_words(policy, sums, reason, words):
    result = run_cycle(inputs(skewed(60), policy=policy, source_load=sums))
    assert (result.passed, result.reason) == (False, reason)
    assert words in result.detail


def test_noise_alone_moves_nothing():
    rng = np.random.default_rng(3)
    load = rng.poisson(20.0, (60, 2, 8)).astype(np.uint32)
    result = run_cycle(inputs(load))
    assert not result.passed
    assert result.reason in {Reason.GAIN_TOO_SMALL, Reason.GAIN_UNCERTAIN, Reason.NO_CHANGE}


def test_an_unknown_policy_ends_the_cycle_by_name():
    result = run_cycle(inputs(skewed(60), policy="wishful"))
    assert result.reason is Reason.UNKNOWN_POLICY
    assert "wishful" in result.detail


def test_staging_too_small_for_one_expert_says_so():
    result = run_cycle(inputs(skewed(60), staging_bytes=(999,) * 4))
    assert result.reason is Reason.STAGING_TOO_SMALL
    assert "staging holds 0" in result.detail


def test_an_explicit_target_is_judged_and_kept():
    target = run_cycle(inputs(skewed(60))).target
    result = run_cycle(inputs(skewed(60, seed=5), target=target, manual=True, policy="none needed"))
    assert result.reason is Reason.MANUAL_REQUEST
    assert result.target == target


def test_copies_that_steps_of_a_layer_take_beside_those_of_the_plan_count_for_the_limits():
    """Four experts with one replica change ranks in a circle, and staging holds one of them."""
    base = np.array([[4, 5, 0, 6, 7, 1, 2, 3, 0, 1, 2, 3]] * 2, np.int32)
    rows = base.copy()
    rows[0, :6] = [6, 7, 0, 5, 4, 1]
    asked = inputs(
        skewed(60),
        current=Placement(base, 4, 8),
        target=Placement(rows, 4, 8),
        manual=True,
        staging_bytes=(1000,) * 4,
    )
    passed = run_cycle(asked)
    moves = sum(wave.moves(SHAPE.slots_per_rank) for wave in passed.waves)
    assert (passed.passed, passed.numbers["copies"]) == (True, 4) and moves > 4
    limited = replace(asked, objective=Objective(limits=PlanLimits(max_moves=moves - 1)))
    refused = run_cycle(limited)
    assert (refused.passed, refused.reason) == (False, Reason.LIMIT_EXCEEDED)
    assert refused.detail == f"the plan needs {moves}, the limit max_moves is {moves - 1}"


def test_a_cycle_uses_the_options_of_its_policy_alone():
    def target(options):
        asked = inputs(skewed(60), policy="craft", policy_options=options, manual=True)
        return run_cycle(asked)

    few = target({"craft": {"max_replicas_per_rank": 0}, "gem": {"restarts": 3}}).target
    assert few is not None and (few.phy2log >= 0).sum() == 16
    many = target({"gem": {"restarts": 3}}).target
    assert many is not None and (many.phy2log >= 0).sum() > 16
    broken = target({"craft": {"rule": "best"}})
    assert (broken.passed, broken.reason) == (False, Reason.PLANNER_FAILED)
    assert "craft.rule is 'best'" in broken.detail


FULL = Objective(fill_slots=True)
SPARE = ModelShape(2, 8, 4, 4, 2, 1000)
"""Eight spare slots, of which craft and gem leave some or all empty."""


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_plan_for_an_engine_without_empty_slots_fills_them_and_passes_the_gates(name):
    asked = inputs(
        skewed(60),
        shape=SPARE,
        current=Placement.initial(SPARE),
        policy=name,
        objective=FULL,
        staging_bytes=(16_000,) * 4,
        manual=True,
    )
    result = run_cycle(asked)
    assert result.passed, (result.reason, result.detail)
    assert result.target is not None
    result.target.check(SPARE, fill_slots=True)


def test_without_that_need_the_slots_of_such_plans_stay_empty():
    asked = inputs(
        skewed(60), shape=SPARE, current=Placement.initial(SPARE), policy="gem", manual=True
    )
    target = run_cycle(asked).target
    assert target is not None
    assert (target.phy2log < 0).sum() == 16


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(
    ("row", "allowed", "changes", "reason"),
    [
        ([0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 0, 1], {}, {}, Reason.EXPERT_WITHOUT_REPLICA),
        (
            [0, 0, 1, 2, 3, 4, 4, 5, 6, 6, 7, 0],
            {"objective": Objective(allow_duplicates=True)},
            {},
            Reason.DUPLICATE_ON_RANK,
        ),
        (
            [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 0],
            {},
            {"shape": replace(SHAPE, pool_slots_per_rank=5)},
            Reason.POOL_EXCEEDED,
        ),
        ([0, 1, -1, 2, 3, 4, 4, 5, 6, 6, 7, 0], {}, {"objective": FULL}, Reason.EMPTY_SLOTS),
    ],
)
def test_nobody_may_break_an_invariant(monkeypatch, row, allowed, changes, reason, manual):
    target = Placement(np.array([row, row]), 4, 8)
    plan = PolicyEntry("unsound", "", lambda _: Proposal(target, 1.0))
    monkeypatch.setitem(POLICIES, "unsound", plan)
    for asked in ({"policy": "unsound"}, {"target": target}):
        ended = run_cycle(inputs(skewed(60), manual=manual, **asked, **changes))
        assert (ended.passed, ended.reason) == (False, reason)
        assert ended.detail and not ended.waves
        if reason is Reason.EMPTY_SLOTS:
            assert "2 slots are empty, first: layer 0 slot 2" in ended.detail
        if reason is not Reason.EXPERT_WITHOUT_REPLICA:
            free = run_cycle(inputs(skewed(60), manual=manual, **asked, **allowed))
            assert free.reason is not reason


def test_a_plan_that_survives_a_failure_says_so_in_its_numbers():
    options = {"keel": {"survive": "rank", "plan_steps": 40}}
    shape = replace(SHAPE, slots_per_rank=4)
    asked = inputs(
        skewed(60),
        policy="keel",
        policy_options=options,
        shape=shape,
        current=Placement.initial(shape),
    )
    result = run_cycle(asked)
    assert result.target is not None
    assert (result.target.logcnt == 2).all()
    assert (result.numbers["survive_lost"], result.numbers["survive_experts"]) == (0, 16)
    assert 0 <= result.numbers["survive_price"] < 1
    plain = run_cycle(inputs(skewed(60), policy="keel")).numbers
    assert not [name for name in plain if name.startswith("survive")]


# --- The price of a plan's copies in a cycle ------------------------------------------------------


def test_a_copy_from_another_node_has_its_price_in_the_verdict():
    current = Placement.initial(SHAPE)
    rows = current.phy2log.reshape(2, 4, 3)
    # Ranks of two nodes swap all their experts.
    target = Placement(rows[:, [2, 3, 0, 1]].reshape(2, 12).copy(), 4, 8)
    asked = inputs(
        skewed(60),
        target=target,
        manual=True,
        topology=Topology((0, 0, 1, 1)),
    )

    def price(factor):
        objective = Objective(copy_cost=7.0, cross_node_factor=factor)
        verdict = run_cycle(replace(asked, objective=objective)).verdict
        assert verdict is not None
        return verdict.copy_cost

    copies = count_moves(current, target)
    held = [set(row.tolist()) for row in rows[0]]
    nodes = held[0] | held[1], held[2] | held[3]
    crossing = 2 * sum(len(held[(rank + 2) % 4] - nodes[rank // 2]) for rank in range(4))
    assert 0 < crossing <= copies
    assert price(1.0) == 7.0 * copies
    assert price(10.0) == 7.0 * (copies + 9 * crossing)


def test_stationary_traffic_is_no_change():
    for seed in range(5):
        assert run_cycle(inputs(skewed(96, seed=seed))).reason is Reason.BALANCE_BELOW_THRESHOLD


def test_the_same_inputs_give_the_same_bytes():
    one, two = run_cycle(inputs(skewed(60))), run_cycle(inputs(skewed(60)))
    assert one.target == two.target
    assert one.numbers == two.numbers
