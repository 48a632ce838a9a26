"""The results of a run with a slow rank: promised against measured."""

from dataclasses import replace

import pytest

from evenkeel_moe.engines.demo.fleet_log import FleetLog
from evenkeel_moe.engines.demo.options import DemoOptions
from evenkeel_moe.engines.demo.slow_rank import CostSeen, saving, slow_rank_checks
from evenkeel_moe.engines.demo.watch import Watch
from evenkeel_moe.engines.reference.config import DispatchRule
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.policy import CostChoice
from tests.engines.demo.lines import plan, step_lines, swap_line

OPTIONS = DemoOptions(ranks=2, steps=300, slow=True)
SLOW = "60 steps; rank 1 takes 1.12 times as long as the median rank"
COSTS = [
    CostSeen(90, "measured", "60 steps", 0.97),
    CostSeen(120, "measured", SLOW, 0.89),
    CostSeen(190, "measured", SLOW, 0.96),
    CostSeen(210, "measured", "60 steps", 0.93),
    CostSeen(290, "measured", "60 steps", 0.98),
]


RECOVERED = (
    "MoE time fell by at least 80% of the promise when it recovered, within the error of the"
    " measurement"
)


def slow_run(after=950, noise=0.0):
    """Ranks 0 and 1 with 1000 tokens each; rank 1 is slow, gets `after` tokens, and recovers."""
    lines = []
    for step in range(300):
        slow = 100 <= step < 200
        mine = after if 140 < step <= 240 else 1000
        tokens = (2000 - mine, mine)
        pace = 1e-5 * (1 + noise * (step * 7 % 10 - 2.25) / 10)
        seconds = (tokens[0] * pace, tokens[1] * pace * (1.12 if slow else 1.0))
        rows = step_lines(step, tokens)
        lines += [
            row | {"compute_s": [s], "paced_s": [s]} for row, s in zip(rows, seconds, strict=True)
        ]
        if step in (140, 240):
            lines += [swap_line(rank, step, "p1" if step == 140 else "p2") for rank in range(2)]
    return lines


def plans(gain=0.05):
    return [
        plan("p1", 120.0, numbers={"gain": gain}),
        plan("p2", 220.0, numbers={"gain": 0.03}),
    ]


def fleet(**changes):
    one = FleetLog(2)
    one.feed(slow_run(**changes))
    return one


def failed(run, made, costs=COSTS, options=OPTIONS):
    return [one.promise for one in slow_rank_checks(run, made, costs, options) if not one.held]


def test_a_run_that_finds_the_rank_slow_and_recovered_keeps_every_promise():
    assert failed(fleet(), plans()) == []
    found = saving(fleet(), plans(), 100, 200)
    assert found.promised == pytest.approx(0.05)
    assert found.measured == pytest.approx(1 - 10.64 / 11.2)
    assert "11.2 -> 10.6 ms" in found.words and "50.0% -> 47.5%" in found.words
    assert "5.0% less, promised 5.0%: 100% delivered, standard error 0%" in found.words
    assert "1 plan, 3 copies, in force after 40 steps" in found.words


def test_the_lines_say_after_how_many_steps_each_change_was_found():
    checks = slow_rank_checks(fleet(), plans(), COSTS, OPTIONS)
    found = {one.promise: one.detail for one in checks}
    name = "the cost model is measured and shows that rank 1 is slow"
    assert found[name].startswith("after 20 steps: 60 steps; rank 1 takes 1.12")
    assert found["the cost model shows that the rank has recovered"] == "after 10 steps: 60 steps"


def test_a_recovery_may_deliver_less_within_the_error_of_the_measurement():
    made = [plans()[0], plans()[1] | {"numbers": {"gain": 0.062}}]
    assert failed(fleet(), made) == [RECOVERED]
    noisy = fleet(noise=0.1)
    back = saving(noisy, made, 200, 300)
    assert back.measured == pytest.approx(1 - 10 / 10.5, abs=5e-3)
    assert 0.003 < back.error < 0.01
    assert RECOVERED not in failed(noisy, made)


def test_steps_that_other_processes_delay_do_not_count():
    run = fleet()
    for row in run.rows[::2]:
        late_s = row.layer_s * (row.step % 3)
        row.layer_s[:] += late_s
        row.delay_s[:] += late_s
    assert failed(run, plans()) == []


def test_what_chance_gives_the_slowest_rank_is_no_saving():
    """Before the plan chance moves tokens of the slow rank, after it both ranks are always even."""
    run = fleet()
    for row in run.rows:
        if row.step <= 140:
            row.layer_s[:] *= 1.0 + 0.1 * (row.step % 5 - 2)
    found = saving(run, plans(), 100, 200)
    assert found.measured == pytest.approx(1 - 10.64 / 11.2)


def test_two_plans_promise_what_both_save():
    two = [*plans()[:1], plan("p3", 150.0, numbers={"gain": 0.1})]
    assert saving(fleet(), two, 100, 200).promised == pytest.approx(1 - 0.95 * 0.9)


def test_a_plan_that_delivers_too_little_is_a_broken_promise():
    fell = "MoE time fell by at least 80% of the promise"
    assert failed(fleet(), plans(gain=0.07)) == [fell]
    assert failed(fleet(), plans(gain=0.06)) == []
    assert failed(fleet(), [replaced_numbers(plans()[0]), plans()[1]]) == [fell]


def replaced_numbers(one):
    return one | {"numbers": {"gain": None}}


def test_no_plan_is_a_broken_promise():
    missing = failed(fleet(), plans()[:1])
    assert missing == [
        "the controller planned for the recovered rank by itself",
        "the recovered rank got tokens back",
        RECOVERED,
    ]
    assert "the controller planned for the slow rank by itself" in failed(fleet(), plans()[1:])
    manual = [plans()[0] | {"kind": "manual"}, plans()[1]]
    assert failed(fleet(), manual) == ["the controller planned for the slow rank by itself"]


def test_a_rank_that_is_not_found_slow_or_not_found_recovered_is_a_broken_promise():
    by_tokens = [replace(one, source="tokens", time_balance=None) for one in COSTS]
    assert len(failed(fleet(), plans(), by_tokens)) == 3
    stuck = [*COSTS[:-1], replace(COSTS[-1], detail=SLOW)]
    assert failed(fleet(), plans(), stuck) == ["the cost model shows that the rank has recovered"]
    worse = [*COSTS[:-1], replace(COSTS[-1], time_balance=0.9)]
    assert failed(fleet(), plans(), worse) == ["time balance rose again"]


def test_the_watch_names_a_reason_that_the_phase_does_not_say():
    watch = Watch(OPTIONS)
    phases = [("proposed", "plan_proposed"), ("committed", "committed"), ("refused", "stale_base")]
    for phase, reason in phases:
        watch.feed_plans([plan("p1", 1.0, phase=phase) | {"reason": reason, "error": ""}], 2.0)
    told = [line.split("plan p1 is ")[1] for line in watch.events if " is " in line]
    assert told == ["proposed", "committed", "refused (stale_base)"]


def test_the_watch_reports_when_the_cost_model_names_other_ranks():
    watch = Watch(OPTIONS)
    watch.feed_lines(step_lines(5, (1, 1)), 1.0)
    for one in (*COSTS, COSTS[-1]):
        cost = {"source": one.source, "detail": one.detail}
        watch.feed_status({"cost_model": cost, "time_balance": one.time_balance}, 2.0)
    assert len(watch.costs) == len(COSTS) + 1
    told = [line for line in watch.events if "cost model" in line]
    assert len(told) == 3
    assert "rank 1 takes 1.12 times as long" in told[1] and "time balance 0.890" in told[1]


@pytest.mark.parametrize(
    "values",
    [
        {"told": True},
        {"slow": True, "mode": "observe"},
        {"slow": True, "dispatch": DispatchRule.LIBRA},
        {"slow": True, "console": True},
    ],
)
def test_options_that_contradict_a_slow_rank_are_refused(values):
    with pytest.raises(InvalidInput):
        DemoOptions(**values)


def test_a_told_rank_is_slow_from_the_start_and_stays_slow():
    told = DemoOptions(slow=True, told=True)
    assert (told.shift_at, told.slow_from, told.slow_until) == (0, 0, 0)
    assert (OPTIONS.shift_at, OPTIONS.slow_from, OPTIONS.slow_until) == (0, 100, 200)


@pytest.mark.parametrize("values", [{"slow": True}, {"console": True}, {"by_time": True}])
def test_a_run_whose_ranks_differ_in_speed_is_planned_by_time(values):
    """Others are planned by tokens, because their checks are of tokens."""
    assert DemoOptions(**values).cost is CostChoice.AUTO
    assert DemoOptions().cost is CostChoice.TOKENS
