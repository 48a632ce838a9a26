"""What `evenkeel plan show` says of a plan."""

import json
import re
from dataclasses import replace

import pytest

from evenkeel_moe.cli.tables import with_reason
from evenkeel_moe.errors import Reason, Unavailable
from evenkeel_moe.model.cost import CostBasis, CostSource
from evenkeel_moe.model.delivered import DeliveredGain, ServingSpeed
from evenkeel_moe.model.plan import PlanPhase
from tests.api.fakes import NOW, make_plan, make_status

FIGURES = {
    "balancedness_mean": 0.647,
    "balancedness_expected": 0.962,
    "gain": 0.339,
    "gain_lower": 0.335,
    "gain_upper": 0.342,
    "payback_steps": 0.017,
    "payback_s": 0.077,
    "layers": 4.0,
    "time_balance": 0.6,
    "expected_stall_s": 2.94e-4,
}


@pytest.fixture
def shown(run, operations):
    """Return a function that stores a plan and returns the lines of `plan show`."""

    def call(status=None, numbers=FIGURES, source=None, **changes):
        if status is not None:
            operations.views["demo"].shown = status
        record = make_plan("mine", **changes)
        plan = replace(record.plan, numbers=dict(numbers), cost_source=source)
        record = replace(record, plan=plan)
        operations.records["demo"] = [record]
        code, out, err = run("plan", "show", "mine", "-d", "demo")
        assert (code, err) == (0, "")
        return out.splitlines()

    return call


def cells(line):
    return re.split(" {2,}", line)


def test_a_plan_begins_with_what_it_gains_and_then_tells_what_it_moves(shown):
    lines = shown()
    assert [cells(line)[0] for line in lines[:10]] == [
        *("plan", "phase", "Balancedness", "Predicted saving of MoE time"),
        *("Copies between ranks", "Waves", "Extra replicas"),
        *("Pays for itself after", "Expected stall", "KV cache"),
    ]
    shown = [cells(line)[1] for line in lines[1:13]]
    assert shown[:7] == [
        "proposed: It waits for approval. Nothing has moved.",
        "0.647 -> 0.962 promised (mean of layers)",
        "33.9% (94 % interval 33.5% to 34.2%)",
        "1 (1 kB)",
        "0 of 1 committed (1 layer changes)",
        "4 (2 in every layer)",
        "less than 1 step (77 ms)",
    ]
    assert shown[7].startswith("294 µs (of one step for each wave")


def test_a_gain_by_tokens_does_not_claim_time(shown):
    """The label follows the cost model that scored the plan, not the one that is in force now."""
    timeless = {name: value for name, value in FIGURES.items() if name != "time_balance"}
    by_time, by_tokens = {"source": CostSource.PROFILED}, {"source": CostSource.TOKENS}
    # Under Waterfill a cycle by tokens has a time balance too; a source may be unknown.
    for asked, words in (
        (by_tokens, " (by tokens)"),
        ({"numbers": timeless} | by_tokens, " (by tokens)"),
        ({"numbers": timeless}, " (by tokens)"),
        ({}, ""),
        ({"numbers": timeless} | by_time, ""),
        ({"status": make_status(cost_model=CostBasis(CostSource.TOKENS))} | by_time, ""),
    ):
        names = [cells(line)[0] for line in shown(**asked)]
        assert f"Predicted saving of MoE time{words}" in names, asked
        assert f"Pays for itself after{words}" in names, asked
    lines = " ".join(" ".join(shown(make_status())).split())
    assert "Cost model now measured while the ranks served (1200 steps, mean error 3.4%)" in lines


def test_a_plan_is_shown_where_the_deployment_cannot_be_read(shown):
    lines = shown(Unavailable("no leader", Reason.NOT_LEADER))
    assert "Predicted saving" in "".join(lines) and "Cost model" not in "".join(lines)


def test_a_plan_that_ended_tells_what_it_delivered_and_how_long_it_took(shown):
    begun = {"at": NOW, "event": "wave_started"}
    story = (begun, {"at": NOW + 21.1, "event": "wave_committed"}, {"at": NOW + 90, "event": "x"})
    ended = {"phase": PlanPhase.COMMITTED, "reason": Reason.COMMITTED, "waves_committed": 1}
    ended["story"] = story
    gained = DeliveredGain(1.0, 0.331, 0.01, 0.32, 0.34, None, 64)
    before, after = ServingSpeed(0.0123, 1612.0), ServingSpeed(0.0101, 1748.0)
    gained = replace(gained, before=before, after=after)
    lines = [cells(line) for line in shown(delivered=gained, **ended)]
    words = "33.1% saved (95 % interval 32.0% to 34.0%, on 64 steps)"
    assert ["Delivered, by the ranks' seconds", words] in lines
    step = "12.3 ms -> 10.1 ms (1,612 -> 1,748 tokens/s; traffic may have changed too)"
    assert ["Step of the engine", step] in lines
    assert ["duration", "21.1 s for 1 wave"] in lines
    assert "not measured yet" in "".join(shown(**ended))
    running = shown(phase=PlanPhase.MIGRATING, reason=Reason.PLAN_STARTED, story=(begun,))
    assert re.search(r"duration +\S+ \w+ so far", "\n".join(running))
    lost = {"phase": PlanPhase.ABORTED, "reason": Reason.RANK_LOST}
    stopped = shown(story=(begun, {"at": NOW + 9, "event": "ended"}), **lost)
    assert ["duration", "9 s until it ended"] in [cells(line) for line in stopped]
    assert "duration" not in "\n".join(shown())


@pytest.mark.parametrize(
    ("phase", "reason", "words"),
    [
        ("cancelled", "cancelled", "cancelled"),
        ("committed", "committed", "committed"),
        ("proposed", "plan_proposed", "proposed"),
        ("recovering", "recovering", "recovering"),
        ("stalled", "ranks_missing", "stalled (ranks_missing)"),
    ],
)
def test_a_phase_and_its_reason_never_say_the_same(phase, reason, words):
    assert with_reason(phase, reason) == words


def test_a_cancelled_plan_says_so_once(shown, run):
    ended = {"phase": PlanPhase.CANCELLED, "reason": Reason.CANCELLED, "error": "cancelled"}
    assert cells(shown(**ended)[1]) == ["phase", "cancelled: An operator cancelled it."]
    record = json.loads(run("plan", "show", "mine", "-d", "demo", "-o", "json")[1])
    assert (record["phase"], record["reason"], record["error"]) == ("cancelled",) * 3
