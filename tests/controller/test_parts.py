"""The controller's pure parts: balance, prices, phases, policy documents."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.controller.cycles.cycle_inputs import (
    CycleSettings,
    last_plan_ended,
    merge_phases,
    plan_failures,
    price,
    steps_since_move,
)
from evenkeel_moe.controller.cycles.manual_plans import request_digest
from evenkeel_moe.controller.ingest.group_loads import (
    shape_document,
    shape_from_document,
    topology_of,
)
from evenkeel_moe.controller.policy_document import (
    change_policy,
    policy_document,
    policy_from_document,
)
from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.ids import Epoch, Generation, PlanId
from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanKind, PlanLimits, PlanPhase
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.schedule import Schedule
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.problem import metrics
from evenkeel_moe.planning.problem.objective import DispatchModel, Objective
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.ports import PlanRequest
from evenkeel_moe.telemetry.balance import Balance
from tests.contracts.test_stores import make_record

SHAPE = ModelShape(2, 4, 2, 3, 2, 1000)
PLACEMENT = Placement.initial(SHAPE)


def make_window(steps, seed=0, *, seconds=None, source=False) -> LoadWindow:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 50, (len(steps), 2, 4)).astype(np.uint32)
    by_rank = metrics.rank_load(counts, PLACEMENT).sum(axis=1)
    return LoadWindow(
        counts,
        np.array(steps, np.int64),
        np.zeros(len(steps), np.int64),
        rng.integers(1, 9, (len(steps), 2)),
        np.full((len(steps), 2), math.nan) if seconds is None else by_rank * np.array(seconds),
        rng.integers(0, 9, (2, 2, 4)).astype(np.uint32) if source else None,
    )


# --- balance -----------------------------------------------------------------------------------


def test_a_map_that_lost_an_expert_with_load_leaves_the_balance_unknown():
    lost = PLACEMENT.phy2log.copy()
    lost[0][lost[0] == 3] = -1
    balance = Balance(8)
    balance.update({Phase.DECODE: [make_window(range(4))]}, PLACEMENT)
    assert balance.summary() != (None, None)
    balance.update({Phase.DECODE: [make_window(range(4))]}, Placement(lost, 2, 4))
    assert balance.summary() == (None, None)
    balance.update({Phase.DECODE: [make_window(range(5))]}, PLACEMENT)
    assert balance.summary() != (None, None)


def test_balance_kept_step_by_step_equals_balance_of_the_whole_window():
    window = make_window(range(60))
    window.counts[5] = 0
    balance = Balance(40)
    for end in (7, 8, 30, 60):
        parts = [window.slice(slice(0, end // 3)), window.slice(slice(end // 3, end))]
        balance.update({Phase.DECODE: parts}, PLACEMENT)
    by_rank = metrics.rank_load(window.last(40).counts, PLACEMENT)
    mean, worst = balance.summary()
    assert mean == pytest.approx(metrics.balancedness_mean(by_rank))
    assert worst == pytest.approx(metrics.balancedness_worst(by_rank))
    shares = balance.load_shares()
    assert shares is not None
    assert np.allclose(shares, by_rank.sum(axis=(0, 1)) / by_rank.sum())


def test_balance_of_phases_is_told_apart_and_together():
    decode, prefill = make_window(range(10)), make_window(range(10, 20), seed=1)
    balance = Balance(100)
    balance.update({Phase.DECODE: [decode], Phase.PREFILL: [prefill]}, PLACEMENT)
    for phase, window in ((Phase.DECODE, decode), (Phase.PREFILL, prefill)):
        expected = metrics.balancedness_mean(metrics.rank_load(window.counts, PLACEMENT))
        assert balance.summary(phase)[0] == pytest.approx(expected)
    assert balance.summary(Phase.MIXED) == (None, None)
    both = np.concatenate([decode.counts, prefill.counts])
    expected = metrics.balancedness_mean(metrics.rank_load(both, PLACEMENT))
    assert balance.summary()[0] == pytest.approx(expected)


def test_a_new_placement_is_judged_on_the_same_steps():
    window, balance = make_window(range(20)), Balance(100)
    balance.update({Phase.DECODE: [window]}, PLACEMENT)
    other = Placement(PLACEMENT.phy2log[:, ::-1].copy(), 2, 4)
    moved = Placement(np.array([[0, 1, 2, 3, 0, 1], [3, 2, 0, 1, 0, 2]], np.int32), 2, 4)
    for placement in (other, moved):
        balance.update({Phase.DECODE: [window]}, placement)
        expected = metrics.balancedness_mean(metrics.rank_load(window.counts, placement))
        assert balance.summary()[0] == pytest.approx(expected)


@pytest.mark.parametrize("dispatch", DispatchModel)
def test_balance_splits_tokens_as_the_gates_do(dispatch):
    rng = np.random.default_rng(4)
    counts = rng.integers(0, 90, (20, 2, 4)).astype(np.uint32)
    placement = Placement(
        np.array([[0, 1, 0, 2, 0, 3, 1, 2], [3, 1, 2, 3, 0, 3, 1, 2]], np.int32), 4, 4
    )
    steps, unknown = np.arange(20), np.full((20, 4), math.nan)
    window = LoadWindow(counts, steps, steps * 0, np.ones((20, 4), np.int64), unknown)
    now = [Topology((0, 0, 1, 1))]
    balance = Balance(100, lambda: SplitModel(dispatch, now[0]))
    for topology in (now[0], Topology((0, 1, 1, 1)), Topology((0, 0, 0, 0))):
        now[0] = topology  # Also a balance that knows the steps takes a new topology up.
        balance.update({Phase.DECODE: [window]}, placement)
        by_rank = metrics.rank_load(counts, placement, SplitModel(dispatch, topology))
        assert balance.summary() == (
            pytest.approx(metrics.balancedness_mean(by_rank)),
            pytest.approx(metrics.balancedness_worst(by_rank)),
        )


def test_what_is_not_known_is_none_and_not_zero():
    balance = Balance(10)
    assert balance.summary() == (None, None)
    assert balance.load_shares() is None
    assert len(balance.seconds_per_token()) == 0
    silent = make_window(range(3))
    silent.counts[:] = 0
    balance.update({Phase.DECODE: [silent]}, PLACEMENT)
    assert balance.summary() == (None, None)
    assert balance.load_shares() is None
    assert np.isnan(balance.seconds_per_token()).all()
    balance.clear()
    assert balance.load_shares() is None


def test_speed_is_seconds_over_tokens_carried():
    balance = Balance(100)
    balance.update({Phase.DECODE: [make_window(range(20), seconds=(1e-6, 3e-6))]}, PLACEMENT)
    assert np.allclose(balance.seconds_per_token(), [1e-6, 3e-6])


# --- what the planner is told --------------------------------------------------------------------


def test_phases_are_merged_in_step_order_and_the_newest_kept():
    decode, prefill = (
        make_window(range(0, 20, 2), source=True),
        make_window(range(1, 21, 2), seed=1, source=True),
    )
    counts, source = merge_phases([decode, prefill], SHAPE, 6)
    assert source is not None and decode.source is not None and prefill.source is not None
    wanted = [
        prefill.counts[7],
        decode.counts[8],
        prefill.counts[8],
        decode.counts[9],
        prefill.counts[9],
    ]
    assert np.array_equal(counts[1:], np.stack(wanted))
    assert len(counts) == 6
    assert np.array_equal(source, decode.source.astype(float) + prefill.source)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_merging_phases_is_sorting_all_their_steps(seed, lengths, num_steps):
    rng = np.random.default_rng(seed)
    windows = [
        make_window(np.sort(rng.choice(20, length, replace=False)), seed + at)
        for at, length in enumerate(lengths)
    ]
    newest = [window.last(num_steps) for window in windows]
    rows = [
        (step, at, counts)
        for at, w in enumerate(newest)
        for step, counts in zip(w.steps, w.counts, strict=True)
    ]
    rows = sorted(rows, key=lambda row: row[:2])[-num_steps:]
    wanted = np.array([counts for _, _, counts in rows], np.uint32).reshape(-1, 2, 4)
    counts, _ = merge_phases(windows, SHAPE, num_steps)
    assert counts.dtype == np.uint32
    assert np.array_equal(counts, wanted)


def test_no_load_is_an_empty_window():
    counts, source = merge_phases([], SHAPE, 6)
    assert counts.shape == (0, 2, 4)
    assert source is None
    alone, _ = merge_phases([make_window(range(9))], SHAPE, 4)
    assert len(alone) == 4


def settings(**changes) -> CycleSettings:
    values = {
        "plan_steps": 100,
        "recent_steps": 8,
        "copy_bytes_per_s": 1e6,
        "copy_cost_tokens": 77.0,
        "rank_speeds": False,
        "deadline_s": 60.0,
        "objective": Objective(),
    }
    return CycleSettings(**{**values, **changes})


def test_a_copy_costs_what_a_rank_computes_meanwhile():
    speeds = np.array([1e-6, 3e-6])
    assert price(speeds, 1000, settings()) == (None, pytest.approx(1e-3 / 2e-6))
    costs, in_seconds = price(speeds, 1000, settings(rank_speeds=True))
    assert costs is not None
    assert np.allclose(costs.slope_s_per_token, speeds)
    assert in_seconds == pytest.approx(1e-3)
    for unknown in (np.zeros(0), np.array([1e-6, math.nan])):
        assert price(unknown, 1000, settings(rank_speeds=True)) == (None, 77.0)


def test_nodes_are_numbered_as_ranks_name_them():
    assert topology_of(["b", "b", "a", "b"]).node_of_rank == (0, 0, 1, 0)


def test_only_plans_that_ran_start_the_cooldown():
    records = [
        make_record("a", phase=PlanPhase.COMMITTED, updated_at=5.0),
        make_record("b", phase=PlanPhase.EXPIRED, updated_at=9.0),
        make_record("c", phase=PlanPhase.ABORTED, updated_at=7.0),
    ]
    assert last_plan_ended(records) == 7.0
    assert last_plan_ended(records[1:2]) is None


def ended(plan_id, phase, reason, at, kind=PlanKind.AUTOMATIC):
    record = make_record(plan_id, phase=phase, reason=reason, updated_at=at)
    return replace(record, plan=replace(record.plan, kind=kind))


def test_failures_in_a_row_are_counted_back_to_the_last_plan_that_was_carried_out():
    done = ended("a", PlanPhase.COMMITTED, Reason.COMMITTED, 5.0)
    earlier = ended("b", PlanPhase.ABORTED, Reason.RANK_LOST, 3.0)
    refused = ended("c", PlanPhase.REFUSED, Reason.NO_SOURCE, 7.0)
    aborted = ended("d", PlanPhase.ABORTED, Reason.PREPARE_DEADLINE, 9.0)
    assert plan_failures([]) == (0, None)
    assert plan_failures([done, earlier]) == (0, None)
    assert plan_failures([aborted, done, refused, earlier]) == (2, 9.0)
    assert plan_failures([replace(done, updated_at=10.0), aborted, refused]) == (0, None)


def test_what_a_person_did_or_the_world_outran_is_no_failure():
    for phase, reason, kind in (
        (PlanPhase.CANCELLED, Reason.CANCELLED, PlanKind.AUTOMATIC),
        (PlanPhase.EXPIRED, Reason.EXPIRED, PlanKind.AUTOMATIC),
        (PlanPhase.REFUSED, Reason.STALE_BASE, PlanKind.AUTOMATIC),
        (PlanPhase.ABORTED, Reason.GENERATION_CHANGED, PlanKind.AUTOMATIC),
        (PlanPhase.ABORTED, Reason.RANK_VOTED_NO, PlanKind.MANUAL),
        (PlanPhase.MIGRATING, Reason.LOAD_CHANGED, PlanKind.AUTOMATIC),
    ):
        assert plan_failures([ended("a", phase, reason, 5.0, kind)]) == (0, None)


def test_steps_under_the_present_placement_are_those_of_its_epoch():
    window = make_window(range(10))
    window.epochs[6:] = 3
    other = make_window(range(10, 14))
    other.epochs[:] = 4
    assert steps_since_move([window, other], Epoch(3), 100) == 8
    assert steps_since_move([window, other], Epoch(3), 5) == 5
    assert steps_since_move([window], Epoch(4), 100) == 0


# --- documents -----------------------------------------------------------------------------------


def test_a_policy_survives_its_document():
    policy = DeploymentPolicy(
        Mode.AUTO,
        "eplb",
        PlanLimits(max_moves=3),
        5.0,
        60.0,
        ("keel", "gem"),
        {"min_gain": 0.2},
        Schedule(("daily 01:00 - 05:00",), ("fri 00:00 - mon 00:00",)),
    )
    again = policy_from_document(policy_document(policy), DeploymentPolicy())
    assert policy_document(again) == policy_document(policy)
    assert again.limits == policy.limits
    assert again.schedule == policy.schedule
    assert again.shadow_policies == ("keel", "gem")


def test_a_change_touches_only_what_it_names():
    policy = DeploymentPolicy(thresholds={"min_gain": 0.2})
    changed = change_policy(
        policy, {"mode": "auto", "limits": {"max_bytes": 9}, "thresholds": {"cooldown_s": 4}}
    )
    assert changed.mode is Mode.AUTO
    assert changed.limits == PlanLimits(max_bytes=9)
    assert (changed.thresholds["min_gain"], changed.thresholds["cooldown_s"]) == (0.2, 4.0)
    assert changed.cycle_s == policy.cycle_s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": {"windows": ["sometimes"]}}, "'sometimes' is no weekly span"),
        ({"schedule": {"windows": "daily 01:00 - 02:00"}}, "must be a list of weekly spans"),
        ({"schedule": {"holidays": []}}, "unknown schedule holidays; known: blackouts, windows"),
        ({"schedule": {"blackouts": ["daily 00:00 - 24:00"]}}, "no minute of the week"),
        ({"modus": "auto"}, "unknown policy fields modus; known: mode"),
        ({"mode": "never"}, "'never' is not observe"),
        ({"mode": 3}, "3 is not observe"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"policy": None}, "None is no name"),
        ({"shadow_policies": "keel"}, "shadow_policies is 'keel', must be a list"),
        ({"shadow_policies": ["keel", 3]}, "must be a list of policy names"),
        ({"shadow_policies": ["keel", "keel"]}, "names 2 policies, at most 8 and each once"),
        ({"shadow_policies": ["best"]}, "unknown policy 'best'"),
        ({"limits": {"max_move": 1}}, "unknown limits max_move; known: max_bytes"),
        ({"limits": {"max_moves": -1}}, "limits.max_moves is -1"),
        ({"limits": {"max_moves": True}}, "limits.max_moves is True"),
        ({"limits": 3}, "limits must be an object"),
        ({"thresholds": {"min_gian": 1}}, "unknown thresholds min_gian"),
        ({"thresholds": {"min_gain": "x"}}, "thresholds.min_gain is 'x'"),
        ({"thresholds": {"stop_above": 0.1}}, "does not hold"),
        ({"cycle_s": 0}, "cycle_s is 0"),
        ({"cycle_s": math.nan}, "cycle_s is nan"),
        ({"proposal_ttl_s": "1"}, "proposal_ttl_s is '1'"),
    ],
)
def test_changes_that_cannot_be_right_are_refused_in_words(changes, words):
    with pytest.raises(InvalidInput, match=words.replace("(", r"\(")):
        change_policy(DeploymentPolicy(), changes)


def test_a_stored_document_that_cannot_be_used_leaves_the_default():
    default = DeploymentPolicy(cycle_s=3.0)
    assert policy_from_document(None, default) is default
    assert policy_from_document({"mode": "gone"}, default) is default
    assert policy_from_document({"mode": "auto"}, default).cycle_s == 3.0


def test_a_shape_survives_its_document():
    generation = Generation("g")
    assert shape_from_document(shape_document(generation, SHAPE)) == (generation, SHAPE)
    for body in (None, {}, {"generation": "g"}, {"generation": "g", "shape": {"num_layers": 0}}):
        assert shape_from_document(body) is None


def test_requests_are_the_same_whoever_makes_them():
    one = PlanRequest(
        PlanId("a"), "eplb", PlanLimits(3), (Phase.DECODE, Phase.PREFILL), requested_by="x"
    )
    other = PlanRequest(
        None, "eplb", PlanLimits(3), (Phase.PREFILL, Phase.DECODE), requested_by="y"
    )
    assert request_digest(one) == request_digest(other)
    assert request_digest(one) != request_digest(PlanRequest(None, "eplb", PlanLimits(4)))
    target = PlanRequest(target=PLACEMENT)
    assert request_digest(target) != request_digest(PlanRequest())
