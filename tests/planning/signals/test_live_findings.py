"""What a deployment's newest steps show about its counters, and what traffic never shows."""

import numpy as np
import pytest

from evenkeel_moe.formats import read_trace
from evenkeel_moe.model.finding import LIVE_CODES
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.signals.live_findings import StepSums, check_live
from tests.planning.signals.test_load_findings import TRACES, routed
from tests.replay.conftest import SHIPPED

LOST = pytest.mark.fault(
    "an operator whose engine counts wrongly under graphs",
    "a plan was made on the counts of half a model",
)
INITIAL = Placement.initial(ModelShape(6, 16, 4, 4, 2, 10))


def after_plans(seed=0):
    """Return a placement that differs by layer, with some experts on two ranks."""
    rng = np.random.default_rng(seed)
    rows = [np.concatenate([rng.permutation(16), rng.permutation(4)]) for _ in range(6)]
    return Placement(
        np.array(rows, np.int32).reshape(6, 5, 4).transpose(0, 2, 1).reshape(6, 20), 4, 16
    )


def held_by(placement, rank):
    """Return (L, E) True for experts that live on one rank alone, slot by slot."""
    alone = np.zeros((placement.num_layers, placement.num_logical_experts), bool)
    for layer, expert in np.ndindex(*alone.shape):
        slots = np.flatnonzero(placement.phy2log[layer] == expert)
        alone[layer, expert] = {slot // placement.slots_per_rank for slot in slots} == {rank}
    return alone


def found(counts, placement=INITIAL, **thresholds):
    sums = StepSums(counts.sum(axis=2), counts.any(axis=0))
    shown = check_live(sums, sums, placement, **thresholds)
    assert {each.code for each in shown} <= set(LIVE_CODES)
    return [(str(each.code), str(each.severity), each.where) for each in shown]


@pytest.mark.parametrize("placement", [INITIAL, after_plans()])
def test_the_only_rank_of_an_expert(placement):
    for rank in range(4):
        assert np.array_equal(placement.only_rank == rank, held_by(placement, rank))


@LOST
@pytest.mark.parametrize("placement", [INITIAL, after_plans(1), after_plans(2)])
@pytest.mark.parametrize("ranks", [(0,), (3,), (1, 2)])
def test_ranks_whose_experts_never_count_are_named(placement, ranks):
    """After plans, the experts of a rank are others in each layer: none is idle in all of them."""
    counts = routed()
    for rank in ranks:
        counts[:, held_by(placement, rank)] = 0
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}..{ranks[1]}"
    shown = found(counts, placement, most_deviation=1)
    assert shown[-1] == ("idle_experts", "doubt", where)
    assert [code for code, severity, _ in shown if severity == "doubt"] == ["idle_experts"]
    # The layers disagree too, since a rank has another share of each.
    assert found(counts, placement)[0][:2] == ("uneven_layers", "doubt")


@LOST
@pytest.mark.parametrize(
    ("lost", "where"), [(slice(8, None), "experts 8..15"), (slice(1, 3), "experts 1..2")]
)
def test_experts_that_never_count_in_any_layer_are_named_if_they_are_not_those_of_a_rank(
    lost, where
):
    counts = routed()
    counts[:, :, lost] = 0
    shown = [row for row in found(counts, after_plans()) if row[0] == "idle_experts"]
    assert shown == [("idle_experts", "doubt", where)]


@LOST
def test_layers_that_disagree_or_never_count_are_named_by_their_number():
    counts = routed()
    counts[:, 1] //= 2
    counts[:, 4] = 0
    assert found(counts) == [
        ("idle_layers", "doubt", "layer 4"),
        ("uneven_layers", "doubt", "layer 1 in 24 of 24 steps"),
    ]


def test_thresholds_make_notes_of_what_an_operator_allows():
    counts = routed()
    counts[:, 1] = counts[:, 1] * 9 // 10
    assert found(counts, most_deviation=0.09)[0][1] == "doubt"
    assert found(counts, most_deviation=0.15)[0][1] == "note"
    counts[:, 4] = 0
    assert [row[1] for row in found(counts, most_deviation=0.99)] == ["doubt", "note"]
    assert [row[1] for row in found(counts, most_deviation=1)] == ["note", "note"]
    idle = routed()
    idle[:, :, :4] = 0
    assert found(idle, most_deviation=1, most_idle=0.2)[-1] == ("idle_experts", "doubt", "rank 0")
    assert found(idle, most_deviation=1, most_idle=0.25)[-1] == ("idle_experts", "note", "rank 0")
    assert found(idle, after_plans(), most_deviation=1, most_idle=0.25)[-1][1] == "note"


@pytest.mark.parametrize("placement", [INITIAL, after_plans()])
def test_experts_that_are_cold_are_no_finding(placement):
    """A tenth of the experts of each layer never count, others in each layer."""
    for seed in range(20):
        rng, counts = np.random.default_rng(seed), routed(seed)
        for layer in range(6):
            cold, warm = rng.choice(16, 2, replace=False)
            counts[:, layer, warm] += counts[:, layer, cold]
            counts[:, layer, cold] = 0
        assert found(counts, placement) == []


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers_show_only_a_rank_of_several_experts(layers):
    placement = Placement(INITIAL.phy2log[:layers], 4, 16)
    cold, lost = routed(layers=layers), routed(layers=layers)
    cold[:, :, [5, 6]] = 0
    lost[:, :, 4:8] = 0
    assert found(cold, placement, most_deviation=1)[layers > 1 :] == []
    shown = found(lost, placement, most_deviation=1)
    assert shown[-1] == ("idle_experts", "doubt", "rank 1")


def test_a_rank_with_a_single_expert_alone_in_few_layers_may_be_cold():
    placement = Placement(np.array([[0, 1, 2, 3]] * 3, np.int32), 4, 4)
    counts = np.full((50, 3, 4), 40)
    counts[:, :, 2] = 0
    assert found(counts, placement) == []


def test_few_tokens_show_nothing_about_experts():
    counts = np.zeros((16, 6, 16), np.int64)
    counts[:, :, :4] = 1  # A rank of 24 experts could expect 96 choices.
    assert found(counts) == []
    assert found(counts * 2) == [("idle_experts", "doubt", "ranks 1..3")]


@pytest.mark.traces
def test_recorded_loads_show_nothing_in_windows_of_any_length():
    paths = [SHIPPED, *sorted(TRACES.glob("*.npz"))]
    traces = [read_trace(path) for path in paths if "T" in np.load(path).files]
    assert traces
    rng = np.random.default_rng(0)
    for trace in traces:
        layers, experts = trace.num_layers, trace.num_experts
        ranks = next(ranks for ranks in (16, 8, 4, 2, 1) if experts % ranks == 0)
        rows = np.array([rng.permutation(experts) for _ in range(layers)], np.int32)
        placement = Placement(rows, ranks, experts)
        for steps in (1, 8, 64, 256, trace.num_steps):
            assert found(trace.counts[:steps], placement) == [], (trace.name, steps)
            assert found(trace.counts[-steps:], placement) == [], (trace.name, steps)
