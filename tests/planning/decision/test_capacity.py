import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.cost import CostCurves, CostModel, CostSource
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import PlanLimits
from evenkeel_moe.model.topology import ModelShape, Topology
from evenkeel_moe.planning.decision import cycle
from evenkeel_moe.planning.decision.capacity import (
    CapacityInputs,
    CapacityRequest,
    cost_at_width,
    prepare_capacity,
    weigh_capacity,
    widths_of,
)
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory
from evenkeel_moe.planning.problem import moe_time
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.relabel import relabel_proposal
from tests.planning.decision.test_cycle import SHAPE, inputs, skewed

LOAD = skewed(60)
GIB = 2**30


def question(asked=None, **changes):
    """Return inputs; changes of the group are given by name like those of the comparison."""
    known: dict[str, Any] = {
        "planned_on": LOAD[:50].astype(np.float64),
        "scored_on": LOAD[50:],
        "asked": CapacityRequest(**(asked or {})),
        "kv": KvMemory(10, 50_000),
        "free_bytes": 500,
    }
    known |= {
        each.name: changes.pop(each.name) for each in fields(CapacityInputs) if each.name in changes
    }
    of_group = {"topology": Topology((0, 0, 1, 1)), "policy": "keel"} | changes
    return CapacityInputs(inputs(LOAD[:0], **of_group), **known)


def rows_of(asked=None, **changes):
    return weigh_capacity(question(asked, **changes)).rows


def test_later_steps_without_load_leave_time_and_balance_unknown():
    for row in rows_of({"to_ranks": (2,)}, scored_on=np.zeros_like(LOAD[50:])):
        assert np.isnan([row.moe_time, row.gain, row.balancedness]).all()
        assert "MoE time unknown" in row.words


def test_every_width_has_time_balance_memory_and_what_has_to_move():
    now, two, four, eight = rows_of({"to_ranks": (8, 2, 4)})
    assert [row.ranks for row in (now, two, four, eight)] == [4, 2, 4, 8]
    assert [row.present for row in (now, two, four, eight)] == [True, False, False, False]
    assert [row.nodes for row in (now, four, eight)] == [2, 2, 4]
    # 8 experts and 4 replicas in 2 layers of 1000 bytes.
    assert [row.slots for row in (now, two, four, eight)] == [12, 12, 12, 16]
    assert [row.expert_bytes for row in (now, two, four, eight)] == [6000, 12_000, 6000, 4000]
    assert [row.kv_tokens for row in (now, two, four, eight)] == [5000, 4400, 5000, 5200]
    assert two.moe_time > four.moe_time > eight.moe_time > 0
    for row in (two, four, eight):
        assert row.gain == pytest.approx(1 - row.moe_time / now.moe_time)
        assert row.gain_lower <= row.gain <= row.gain_upper
        assert 0 < row.balancedness <= 1
        assert row.copies >= row.least_copies
        assert row.bytes_to_move == 1000 * row.copies
    assert now.moe_time == pytest.approx(
        moe_time.predicted_time(LOAD[50:], Placement.initial(SHAPE)) / 10
    )
    assert (now.copies, now.retire, four.retire, eight.retire) == (0, (), (), ())
    assert four.least_copies == 0
    assert len(two.retire) == 2 and two.stranded == two.least_copies > 0
    assert "Retire ranks" in two.words and "live on them alone" in two.words
    slots = two.slots // 2
    assert f"needs a start with {slots} slots a rank in a layer, now {SHAPE.slots_per_rank}" in (
        two.words
    )
    assert "needs a start" not in four.words + eight.words


@pytest.mark.parametrize(
    ("kv", "free_bytes", "fits"),
    [
        (KvMemory(10, 50_000), None, True),
        (KvMemory(10, 5_000), 500, False),
        (None, 6_000, True),
        (None, 5_999, None),
        (KvMemory(10, 5_000), None, None),
        (None, None, None),
    ],
)
def test_memory_that_is_not_known_is_not_promised(kv, free_bytes, fits):
    _, two, eight = rows_of({"to_ranks": (2, 8)}, kv=kv, free_bytes=free_bytes)
    assert (two.fits, eight.fits) == (fits, True)
    assert (two.kv_tokens is None) == (kv is None)


def test_sizes_that_are_not_known_leave_counts():
    sizeless = replace(SHAPE, bytes_per_expert=0)
    _, two = rows_of({"to_ranks": (2,)}, shape=sizeless)
    assert two.copies > 0
    unknown = (two.expert_bytes, two.bytes_to_move, two.least_bytes, two.kv_tokens, two.fits)
    assert unknown == (None,) * 5


def test_a_window_that_tells_nothing_leaves_memory_and_moves():
    wordless = ("The window holds 3 complete steps, 24 are needed: nothing was planned.",)
    found = weigh_capacity(question({"to_ranks": (2,)}, unfit=wordless))
    assert found.words[0] == wordless[0]
    now, two = found.rows
    assert (now.expert_bytes, two.expert_bytes) == (6000, 12_000)
    assert two.copies == two.least_copies > 0
    for figure in (now.moe_time, two.moe_time, two.gain, two.balancedness):
        assert math.isnan(figure)


def test_a_resize_is_not_held_to_the_limits_of_plans():
    (_, free), (_, limited) = (
        rows_of({"to_ranks": (8,)}, objective=Objective(limits=limits))
        for limits in (PlanLimits(), PlanLimits(max_moves=0))
    )
    assert limited.copies == free.copies > 0


@pytest.mark.parametrize("policy", ["keel", "eplb"])
def test_a_replica_budget_holds_at_every_width_in_slots_that_divide_over_its_ranks(
    policy, monkeypatch
):
    asked: dict[int, Any] = {}

    def note(problem, proposal):
        asked[problem.shape.num_ranks] = problem.replica_budget
        replicas = proposal.placement.replicas_by_layer
        assert replicas.max() <= problem.replica_budget
        return relabel_proposal(problem, proposal)

    monkeypatch.setattr(cycle, "relabel_proposal", note)
    rows_of({"to_ranks": (2, 3, 4, 5, 16)}, policy=policy, replica_budget=0)
    assert asked == {2: 0, 3: 1, 4: 0, 5: 2, 16: 8}
    rows_of({"to_ranks": (2, 4), "to_slots": 8}, policy=policy, replica_budget=4)
    assert (asked[2], asked[4]) == (0, 0), "there are no more slots"
    group = inputs(LOAD, policy=policy, replica_budget=4)
    assert prepare_capacity(group, CapacityRequest((8,)), None, None)[0].group.replica_budget == 4


def test_curves_of_kept_ranks_stay_and_who_joins_has_the_mean():
    cost = CostModel(CostCurves.linear(np.array([1e-6, 2e-6, 3e-6])), source=CostSource.MEASURED)
    wider = cost_at_width(cost, [0, 1, 2], 5).curves
    assert wider is not None
    assert wider.slope_s_per_token.tolist() == pytest.approx([1e-6, 2e-6, 3e-6, 2e-6, 2e-6])
    smaller = cost_at_width(cost, [0, 2], 2)
    smaller.check_ranks(2)
    _, two = rows_of(
        {"retire": (1, 3)},
        objective=Objective(cost=CostModel(CostCurves.linear(np.array([1e-6, 9e-6, 1e-6, 9e-6])))),
    )
    assert two.retire == (1, 3)
    assert " ms a step" in two.words or " µs a step" in two.words
    assert two.gain > 0


def test_pooled_slots_stay_within_the_pools_of_a_width():
    pooled = ModelShape(2, 8, 4, 5, 2, 1000, pool_slots_per_rank=6)
    current = Placement.initial(pooled)
    now, two, eight = rows_of({"to_ranks": (2, 8)}, shape=pooled, current=current)
    assert (now.expert_bytes, two.expert_bytes, eight.expert_bytes) == (6000, 12_000, 4000)
    assert (now.slots, two.slots, eight.slots) == (12, 12, 16)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"to_ranks": (2,), "to_slots": 6}, ShapeMismatch, "cannot hold 8 experts"),
        ({"to_ranks": (3,), "to_slots": 16}, ShapeMismatch, "16 slots do not divide"),
        ({"to_ranks": (2,), "to_slots": 20}, ShapeMismatch, "at most 16 slots"),
        ({"to_slots": 13}, ShapeMismatch, "13 slots .* over 2, 4, 6, 8 ranks into at most 8"),
        ({"to_ranks": (0,)}, InvalidInput, "0 ranks"),
        ({"to_ranks": (5000,)}, InvalidInput, "1 to 4608"),
        ({"retire": (7,)}, InvalidInput, "ranks 7 do not exist"),
        ({"retire": (0, 1, 2, 3)}, InvalidInput, "one must stay"),
        ({"retire": (0,), "to_ranks": (3,)}, InvalidInput, "in two ways"),
        ({"to_ranks": (3,), "whole_nodes": True}, ShapeMismatch, "2 or 4 would be"),
        ({"retire": (0, 2), "whole_nodes": True}, ShapeMismatch, "ranks 1 of it stay"),
        ({"multi_node_bytes": -1}, InvalidInput, "must not be negative"),
    ],
)
def test_widths_that_cannot_be_are_refused_with_the_numbers(asked, error, words):
    with pytest.raises(error, match=words) as caught:
        widths_of(question(asked))
    few = "cannot hold" in words
    assert (caught.value.reason is Reason.EXPERT_WITHOUT_REPLICA) == few


def test_without_a_width_in_the_request_there_are_at_most_eight_that_fit_the_nodes():
    assert [w.shape.num_ranks for w in widths_of(question())] == [2, 4, 6, 8]
    one = Topology((0,) * 4)
    assert [w.shape.num_ranks for w in widths_of(question(topology=one))] == [*range(1, 9)]
    sixteen = question({"to_slots": 16}, topology=one)
    assert [w.shape.num_ranks for w in widths_of(sixteen)] == [2, 4, 8]
    large = replace(SHAPE, num_ranks=2400)
    fleet = question(shape=large, topology=Topology((0,) * 2400), current=Placement.initial(large))
    most = [w.shape.num_ranks for w in widths_of(fleet)]
    assert most == [576, 1152, 1728, 2304, 2400, 2880, 3456, 4032, 4608]


def test_a_deployments_window_is_split_as_by_a_cycle():
    cycle = inputs(skewed(60), policy="keel")
    asked = CapacityRequest((8,))
    known, widths = prepare_capacity(cycle, asked, None, None)
    assert (len(known.planned_on), len(known.scored_on)) == (50, 10)
    assert [width.shape.num_ranks for width in widths] == [8]
    short, _ = prepare_capacity(inputs(skewed(3)), asked, None, None)
    assert "3 complete steps, 24 are needed" in short.unfit[0]


def test_the_published_case_of_glm_5_2_on_8_and_16_gpus():
    """From the weights of a rank on 16 GPUs to those on 8, and from the KV tokens on 8 to 16.

    Source: llm-d.ai/blog/serving-glm-5-2-agentic-workloads-on-llm-d (2026-07-22): FP8 on H200, 576
    bytes of KV cache a token and layer in 78 layers. Weights are 89.5 GiB a GPU with TP=8 and 65.1
    GiB with DEP16; a rank holds about 182K KV tokens with DEP8 and 990K with DEP16. So there are
    two layouts of 8 GPUs: the 89.5 GiB are of the one where the weights beside the experts are
    sharded too. The experts: 256 of 3 x 6144 x 2048 bytes in 75 layers and the layer for drafts.

    What the transport of a group on two nodes takes is not published. It is what the other figures
    leave: the last check shows the arithmetic and no foresight. Without it 22 % too many tokens
    would be promised.
    """
    shape = ModelShape(76, 256, 8, 32, 8, 3 * 6144 * 2048)
    token = 78 * 576
    others = 65.1 * GIB - shape.bytes_per_expert * 16 * 76
    case = question(
        {"to_ranks": (16,)},
        planned_on=np.zeros((0, 76, 256)),
        scored_on=np.zeros((0, 76, 256)),
        shape=shape,
        topology=Topology.single_node(8),
        current=Placement.initial(shape),
        kv=KvMemory(token, 182_000 * token),
        free_bytes=None,
        unfit=("No load is known.",),
    )
    now, wide = weigh_capacity(case).rows
    assert now.expert_bytes is not None and wide.expert_bytes is not None
    assert (now.expert_bytes + others / 8) / GIB == pytest.approx(89.5, rel=0.05)
    assert wide.kv_tokens is not None
    assert wide.kv_tokens / 990_000 == pytest.approx(1.22, abs=0.01)
    transport = now.expert_bytes - wide.expert_bytes - (990_000 - 182_000) * token
    assert transport / GIB == pytest.approx(8.9, abs=0.1)
    _, wide = weigh_capacity(
        replace(case, asked=CapacityRequest((16,), multi_node_bytes=transport))
    ).rows
    assert wide.kv_tokens == pytest.approx(990_000, rel=0.05)
    # Half of every old rank's experts move to a new one, and nothing else.
    assert wide.least_copies == 76 * 128
