import json
import re

import pytest

from evenkeel_moe.cli.tables import decisions_table, deployments_table
from evenkeel_moe.cli.units import dated
from evenkeel_moe.model.cost import CostBasis
from evenkeel_moe.model.delivered import DeliveredGain
from evenkeel_moe.model.plan import PlanKind
from tests.api.fakes import make_plan, make_rank
from tests.cli.conftest import drawn


def test_status_tells_the_cost_model_and_what_is_not_known(run, operations):
    def shown(**changes):
        operations.show(**changes)
        return " ".join(run("status", "demo")[1].split())

    measured = "measured while the ranks served (1200 steps, mean error 3.4%)"
    assert f"cost model {measured}; time balance 0.700, 0.500 worst layer" in shown()
    tokens = shown(cost_model=CostBasis(), time_balance=None, time_balance_worst=None)
    assert "cost model by tokens, because nothing is known of time" in tokens
    assert "time balance" not in tokens
    assert "cost model -" in shown(cost_model=None, time_balance=None, time_balance_worst=None)


def test_a_plan_shows_promise_and_delivery(run, operations):
    gained = DeliveredGain(1.0, -0.021, 0.01, -0.04, -0.002, None, 64)
    record = make_plan("mine", delivered=gained)
    record.plan.numbers.update(gain=0.081, time_balance=0.9)
    operations.records["demo"] = [record]
    shown = " ".join(run("plan", "show", "mine", "-d", "demo")[1].split())
    interval = "95 % interval 0.2% slower to 4.0% slower, on 64 steps"
    assert f"Delivered, by the ranks' seconds 2.1% slower ({interval})" in shown
    assert "Predicted saving of MoE time 8.1% (94 % interval" in shown
    listed = run("plan", "list", "-d", "demo")[1]
    assert re.search(r" 8.1% +2.1% slower ", listed)
    assert "slower: MoE time rose" in listed
    unknown = DeliveredGain(1.0, unknown_because="no rank reports seconds")
    operations.records["demo"] = [make_plan("mine", delivered=unknown)]
    shown = " ".join(run("plan", "show", "mine", "-d", "demo")[1].split())
    assert "by the ranks' seconds unknown (no rank reports seconds)" in shown


def test_status_says_why_automatic_plans_are_held(run, operations):
    operations.show(held=True, held_because="held_after_rollback")
    words = "held Automatic plans are held after a rollback, until"
    assert words in " ".join(run("status", "demo")[1].split())
    operations.show()
    assert re.search(r"^held +no$", run("status", "demo")[1], re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "width"), [("demo", 80), ("deepseek-v3-decode-eu-west-1", 80), ("demo", 60)]
)
def test_what_an_operator_needs_is_visible_at_usual_widths(run, operations, name, width):
    """A proposal or a trouble must not hide the reason, the epoch, the balance or the ranks."""
    ranks = tuple(make_rank(rank, fresh=rank > 0) for rank in range(2))
    operations.views.clear()
    operations.show(
        name,
        state="degraded",
        reason="ranks_missing",
        mode="propose",
        held=True,
        ranks=ranks,
        proposals=[make_plan("automatic-4-973ef643a194")],
    )
    rows = json.loads(run("status", "-o", "json")[1])
    lines = drawn(deployments_table(rows), width)
    assert max(map(len, lines)) <= max(width, 62 + len(name))
    text = " ".join(" ".join(lines[: lines.index("")]).split())
    for told in (name, "degraded", "propose", "held", " 3", "0.800", "1/2", "1", "proposed"):
        assert told in text, text
    assert any(line.startswith("ranks_missing: ") for line in lines)
    assert f"{name} is bad: 1 rank of 2 not connected." in " ".join(lines)
    wide = " ".join(drawn(deployments_table(rows), 200, wide=True))
    assert "ranks_missing" in wide and "automatic-4-973ef643a194" in wide


def test_a_state_without_news_needs_no_reason(run, operations):
    operations.show(reason="recovered")
    assert run("status")[1].splitlines()[1].split()[:3] == ["demo", "ready", "auto"]
    assert "recovered" not in run("status")[1] + run("status", "demo")[1]


def test_texts_of_a_rank_are_shown_unchanged(run, operations):
    """Brackets and colons are not markup; as markup, the place of a failure would be lost."""
    words = "rank 3: [/lib/gloo/pair.cc:553] closed by [oncall] :warning:"
    rows = ({"at": 1.0, "event": "ended", "detail": words},)
    operations.records["demo"] = [make_plan("mine", story=rows, error=words)]
    operations.show(ranks=(make_rank(0, node="[a]", trouble=words),))
    for command in (("plan", "story", "mine"), ("plan", "show", "mine")):
        code, out, _ = run(*command, "-d", "demo")
        assert (code, words in out) == (0, True)
    out = run("status", "demo")[1]
    assert words in out
    assert "[a]" in out
    operations.document = {"schedule": {"note": words}}
    assert words in run("policy", "get", "-d", "demo")[1]


def decision(at, reason, plan_id=None, **numbers):
    row = {"at": at, "reason": reason, "reason_text": "Words.", "plan_id": plan_id}
    return row | {"numbers": numbers}


def test_a_cycle_that_waits_for_approval_shows_the_proposal_and_until_when():
    rows = [decision(3600.0, "plan_proposed", "automatic-0-0bc37c751748", expires_in_s=600.0)]
    lines = drawn(decisions_table(rows))
    assert lines[0].split() == ["AT", "(UTC)", "DECISION", "PLAN", "COMPARED"]
    assert lines[1] == "01:00:00  plan_proposed  automatic-0-0bc37c751748  expires in 10 min"
    assert "all on 1970-01-01" in lines


@pytest.mark.parametrize("width", [80, 100])
def test_decisions_about_a_plan_take_one_line_each(width):
    plan = {"gain": 0.3421, "gain_lower": 0.33, "gain_upper": 0.35, "copies": 35, "bytes": 2.3e6}
    figures = {"balancedness_mean": 0.648, "balancedness_expected": 0.963, **plan}
    figures["planned_on_steps"] = 214
    rows = [decision(at, "observe_mode", **figures) for at in (60.0, 58.0)]
    lines = drawn(decisions_table(rows), width)
    assert lines[1] == ("00:01:00  observe_mode  0.648 -> 0.963  34.2%  35, 2.3 MB")
    assert lines[2].startswith("00:00:58")
    both_days = drawn(decisions_table([rows[0], decision(90_000.0, "cooldown")]), 100)
    assert both_days[1].startswith("1970-01-01 00:01:00")


def test_figures_that_a_gate_compared_are_shown_on_a_narrow_terminal():
    plan = {"gain": 0.3421, "gain_lower": 0.33, "gain_upper": 0.35, "copies": 35, "bytes": 2.3e6}
    short = decision(60.0, "gain_too_small", **plan, min_gain=0.4)
    gate = {"balancedness_mean": 0.648, "windows_below": 1.0, "consecutive_windows": 2}
    waits = decision(59.0, "waiting_consecutive_windows", **gate)
    lines = drawn(decisions_table([short, waits]), 80)
    begin = lines[0].index("COMPARED")
    words = " ".join(line[begin:].strip() for line in lines[1 : lines.index("")])
    assert words == "min gain 40.0% windows below 1, consecutive windows 2"
    wide = drawn(decisions_table([short, waits]), 200, wide=True)
    assert "33.0% to 35.0%" in wide[1] and wide[2].endswith("consecutive windows 2")


def test_a_decision_with_words_shows_them():
    """A store that came back empty has no figures; its row of the decision log has a sentence."""
    words = "the store came back empty: mode, freeze and hold stay as they were"
    row = decision(60.0, "recovered") | {"detail": words}
    assert words in drawn(decisions_table([row]), 100)[1]
    assert words in " ".join(" ".join(drawn(decisions_table([row]), 60)).split())


def test_a_rollback_that_saves_less_is_told_to_be_intended(run, operations):
    lost = DeliveredGain(1.0, -0.204, 0.01, -0.22, -0.19, None, 64)
    record = make_plan("back", delivered=lost)
    operations.records["demo"] = [record]
    words = "returns to an earlier placement, so MoE time may rise"
    assert words not in run("plan", "show", "back", "-d", "demo")[1]
    object.__setattr__(record.plan, "kind", PlanKind.ROLLBACK)
    shown = " ".join(run("plan", "show", "back", "-d", "demo")[1].split())
    interval = "95 % interval 19.0% slower to 22.0% slower, on 64 steps"
    assert f"20.4% slower ({interval}. A rollback returns to an earlier placement" in shown
    assert words in run("plan", "list", "-d", "demo")[1]


def test_moments_of_one_day_show_only_the_time():
    def moments(*unix):
        rows, day = dated([{"at": at} for at in unix])
        return [row["at"] for row in rows], day

    assert moments(0.0, 61.0) == (["00:00:00", "00:01:01"], ["all on 1970-01-01"])
    assert moments(0.0, 86_400.0) == (["1970-01-01 00:00:00", "1970-01-02 00:00:00"], [])
    assert moments(0.0, None) == (["1970-01-01 00:00:00", "-"], [])
    assert moments(None) == (["-"], [])
    assert moments() == ([], [])
