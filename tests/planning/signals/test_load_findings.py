"""What no router can have routed is a finding, and what engines do record is none."""

import numpy as np
import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.formats import read_trace
from evenkeel_moe.model.finding import (
    Finding,
    FindingCode,
    Severity,
    doubts,
    judge_findings,
    spans,
)
from evenkeel_moe.planning.signals.load_findings import (
    check_hidden_layers,
    check_recording,
    check_window,
)
from tests.replay.conftest import SHIPPED

TRACES = SHIPPED.parents[2].parent / "shared" / "traces"
STEPS, LAYERS, EXPERTS, CHOICES = 24, 6, 16, 320
BROKEN = pytest.mark.fault(
    "a user of evenkeel offline", "a recorder that counted wrongly led to a confident verdict"
)


def routed(seed=0, *, steps=STEPS, layers=LAYERS, experts=EXPERTS, choices=CHOICES):
    """Return (T, L, E) counts as a router makes them: all layers of a step route as much."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(experts, 2.0), layers)
    tokens = rng.integers(choices // 2, choices, steps)
    return np.array(
        [[rng.multinomial(count, share) for share in shares] for count in tokens], np.int64
    )


def found(counts):
    findings = check_recording(counts, tuple(range(3, 3 + counts.shape[1])))
    return [(str(each.code), str(each.severity), each.where) for each in findings]


@pytest.mark.parametrize("seed", range(5))
def test_routed_loads_show_nothing(seed):
    assert found(routed(seed)) == []
    assert found(routed(seed, steps=1)) == []
    assert found(routed(seed, layers=1)) == []


@pytest.mark.traces
def test_recorded_loads_show_nothing():
    paths = [SHIPPED, *sorted(TRACES.glob("*.npz"))]
    paths = [path for path in paths if "T" in np.load(path).files]
    traces = [read_trace(path, first_moe_layer=0) for path in paths]
    assert traces
    assert all(trace.findings == () for trace in traces)


def half(counts):
    counts[:, 2] //= 2


def double(counts):
    counts[:, 2] *= 2


def lose_steps(counts):
    counts[::3, 2] = 0


def lose_a_rank_in_one_layer(counts):
    counts[:, 2, :4] = 0


def shift_a_step(counts):
    counts[:, 2] = np.roll(counts[:, 2], 1, axis=0)


@BROKEN
@pytest.mark.parametrize(
    "damage", [half, double, lose_steps, lose_a_rank_in_one_layer, shift_a_step]
)
def test_a_layer_that_counts_otherwise_than_most_is_named(damage):
    counts = routed()
    damage(counts)
    ((code, severity, where),) = found(counts)
    assert (code, severity) == ("uneven_layers", "doubt")
    assert where.startswith("layer 5 in ")


@BROKEN
def test_of_two_layers_the_one_that_counts_less_is_named():
    counts = routed(layers=2)
    counts[:, 0] //= 2
    assert found(counts)[0][2].startswith("layer 3 in ")


def test_a_deviation_that_decides_nothing_is_a_note():
    counts = routed()
    counts[0, 2, 0] += 1
    assert found(counts) == [("uneven_layers", "note", f"layer 5 in 1 of {STEPS} steps")]


@BROKEN
def test_layers_that_never_count_beside_others_are_named():
    counts = routed()
    counts[:, [0, 4]] = 0
    assert found(counts) == [("idle_layers", "doubt", "layers 3, 7")]


@BROKEN
@pytest.mark.parametrize(
    ("lost", "where"),
    [
        (slice(4, 8), "experts 4..7"),
        (slice(8, None), "experts 8..15"),
        (slice(1, None, 8), "experts 1, 9"),
    ],
)
def test_experts_that_are_idle_in_every_layer_are_named(lost, where):
    counts = routed()
    counts[:, :, lost] = 0
    assert found(counts)[-1] == ("idle_experts", "doubt", where)


def test_a_dead_expert_of_one_layer_and_few_tokens_are_no_finding():
    counts = routed(layers=1)
    counts[:, :, 3] = 0
    assert found(counts) == []
    few = np.zeros((2, 2, 16), np.int64)
    few[:, :, :4] = 5
    assert found(few) == []


@BROKEN
@pytest.mark.parametrize("layers", [1, LAYERS])
def test_totals_that_are_never_reset_are_refused(layers):
    ((code, severity, _),) = found(routed(layers=layers).cumsum(axis=0))
    assert (code, severity) == ("rising_totals", "refusal")


@BROKEN
@pytest.mark.parametrize("before", [400, 2000])
def test_totals_that_began_long_before_the_recording_are_in_doubt(before):
    totals = routed(steps=before + 400).cumsum(axis=0)[before:]
    assert found(totals) == [("rising_totals", "doubt", "all 400 steps")]


@BROKEN
@pytest.mark.parametrize("starts", [(40, 20), (12, 9, 30), (25, 8)])
@pytest.mark.parametrize("idle", [(), (3, 15)])
def test_totals_that_begin_anew_after_a_restart_or_rest_in_an_idle_step_are_refused(starts, idle):
    steps = routed(steps=sum(starts))
    steps[list(idle)] = 0
    parts = np.split(steps, np.cumsum(starts)[:-1])
    totals = np.concatenate([part.cumsum(axis=0) for part in parts])
    assert ("rising_totals", "refusal", f"all {sum(starts)} steps") in found(totals)


@BROKEN
@pytest.mark.parametrize(("loads", "totals", "refused"), [(20, 30, True), (60, 12, False)])
def test_totals_after_loads_are_refused_if_they_are_most_of_the_steps(loads, totals, refused):
    steps = routed(steps=loads + totals)
    steps[loads:] = steps[loads:].cumsum(axis=0)
    assert ("rising_totals" in [code for code, _, _ in found(steps)]) == refused


@BROKEN
@pytest.mark.parametrize("busy", [(4,), (0, 7, 30), (9, 20, 21, 39), range(24, 32)])
def test_idle_steps_are_no_totals(busy):
    steps = np.zeros((40, LAYERS, EXPERTS), np.int64)
    steps[list(busy)] = routed(steps=len(busy))
    assert "rising_totals" not in [code for code, _, _ in found(steps)]


def test_traffic_that_grows_is_no_total():
    counts = np.stack([routed(seed, steps=1, choices=100 * 2**seed)[0] for seed in range(8)])
    assert found(counts) == []


@BROKEN
def test_one_layer_counted_for_several_is_named():
    counts = routed()
    counts[:, [1, 5]] = counts[:, [0]]
    assert found(counts) == [("equal_layers", "doubt", "layers 4, 8")]


@BROKEN
@pytest.mark.parametrize("again", [slice(0, 6), slice(20, 24)])
def test_a_part_that_is_in_a_recording_twice_is_named(again):
    counts = routed()
    ((code, severity, where),) = found(np.concatenate([counts, counts[again]]))
    assert (code, severity) == ("repeated_steps", "doubt")
    assert where == f"steps 24..{24 + len(counts[again]) - 1}"


@BROKEN
@pytest.mark.parametrize(
    ("choices", "severity"),
    [([8, 4, 4, 0], None), ([9, 3, 3, 1], "doubt"), ([5, 4, 3, 3], "doubt")],
    ids=["possible", "more choices of an expert than tokens", "a choice is missing"],
)
def test_counts_that_top_k_cannot_give_are_named(choices, severity):
    counts = np.tile(np.array(choices, np.int64), (3, 2, 1))
    told = {each.code: each for each in check_recording(counts, (3, 7), 2)}
    impossible = told.get(FindingCode.IMPOSSIBLE_CHOICES)
    assert (impossible and impossible.severity) == severity
    if impossible is not None:
        assert impossible.amount.startswith(
            "6 of 6 sums of a layer and step; first: step 0, layer 3"
        )
    assert FindingCode.IMPOSSIBLE_CHOICES not in {
        each.code for each in check_recording(counts, (3, 7))
    }


def test_a_window_is_checked_by_its_sums():
    counts = routed()
    counts[:, :, 4:8] = 0
    counts[:, 2] = 0
    findings = check_window(counts.sum(axis=2), counts.any(axis=0), range(LAYERS))
    assert {each.code for each in findings} == {"idle_layers", "uneven_layers", "idle_experts"}
    assert check_window(np.zeros((0, 3), int), np.zeros((3, 4), bool), range(3)) == ()


def hidden(pattern):
    findings = check_hidden_layers(np.array([mark == "x" for mark in pattern]))
    return [(str(each.code), str(each.severity), each.where) for each in findings]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("xxxx", []),
        ("...xxxxxxx", [("leading_idle_layers", "note", "layers 0..2 of 10")]),
        (
            ".x.x.x.x",
            [
                ("leading_idle_layers", "note", "layer 0 of 8"),
                ("idle_layers", "note", "layers 2, 4, 6"),
            ],
        ),
        ("x...x...x...", [("idle_layers", "note", "layers 1..3, 5..7, 9..11")]),
    ],
)
def test_dense_layers_are_assumed_where_models_have_them(pattern, expected):
    assert hidden(pattern) == expected


@BROKEN
@pytest.mark.parametrize(
    ("pattern", "where"),
    [
        ("xxxxxx....", "layers 6..9 of 10"),
        ("xxx.xxxxxx", "layer 3 of 10"),
        ("xxxxxxxxx.", "layer 9 of 10"),
        ("x.x.xxxxxx", "layers 1, 3 of 10"),
    ],
)
def test_layers_that_are_missing_after_the_first_are_named(pattern, where):
    assert hidden(pattern) == [("idle_layers", "doubt", where)]


@BROKEN
@pytest.mark.parametrize("first", [24, 30])
def test_a_last_pipeline_stage_without_the_first_is_in_doubt(first):
    where = f"layers 0..{first - 1} of 60"
    assert hidden("." * first + "x" * (60 - first)) == [("leading_idle_layers", "doubt", where)]


@BROKEN
@pytest.mark.parametrize("pattern", ["x.........", ".........x", "xx........", "....xx...."])
def test_a_model_that_is_mostly_idle_is_refused(pattern):
    ((code, severity, _),) = hidden(pattern)
    assert (code, severity) == ("mostly_idle_layers", "refusal")


def a_finding(code, severity):
    return Finding(code, severity, "what", "where", "amount", "Do this")


def test_a_finding_that_is_accepted_becomes_a_note():
    refusal = a_finding(FindingCode.RISING_TOTALS, Severity.REFUSAL)
    doubt = a_finding(FindingCode.UNEVEN_LAYERS, Severity.DOUBT)
    note = a_finding(FindingCode.ASSUMED, Severity.NOTE)
    with pytest.raises(InvalidInput, match=r"what: where, amount\. Do this\. If .*rising_totals"):
        judge_findings([note, refusal, doubt], ["uneven_layers"])
    judged = judge_findings([note, refusal, doubt], ["rising_totals"])
    assert [str(each.code) for each in judged] == ["uneven_layers", "assumed", "rising_totals"]
    assert doubts(judged) == (doubt,)
    with pytest.raises(InvalidInput, match="there is no finding thirst; known: uneven_layers"):
        judge_findings([], ["thirst"])


def test_whole_numbers_are_shown_as_ranges():
    assert spans("step", [4]) == "step 4"
    assert spans("step", [7, 0, 1, 2]) == "steps 0..2, 7"
    assert spans("step", range(0, 20, 2)) == "steps 0, 2, 4, 6, 8, 10 and 4 more"
