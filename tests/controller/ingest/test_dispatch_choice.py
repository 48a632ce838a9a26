"""The dispatch model that is in force, and the disagreements that operators are told of."""

import pytest
from structlog.testing import capture_logs

from evenkeel_moe.controller.cycles.cycle_inputs import PlanBase
from evenkeel_moe.controller.ingest.dispatch_choice import choose_dispatch
from evenkeel_moe.controller.operations.status import live_view
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.plan import PlanLimits
from tests.controller.replicas import DEMO, replicas

EVEN, NEAREST, OPTIMAL = DispatchModel.EVEN, DispatchModel.NEAREST, DispatchModel.OPTIMAL


@pytest.mark.parametrize(
    ("operator", "told", "setting", "model", "words"),
    [
        (None, (), EVEN, EVEN, ""),
        (None, ("", ""), OPTIMAL, OPTIMAL, ""),
        (None, ("nearest", "nearest"), EVEN, NEAREST, ""),
        (None, ("nearest", ""), EVEN, NEAREST, ""),
        (None, ("nearest",), NEAREST, NEAREST, ""),
        (None, ("even",), OPTIMAL, EVEN, "planner.dispatch is 'optimal', the ranks report 'even'"),
        (
            None,
            ("even", "nearest"),
            OPTIMAL,
            OPTIMAL,
            "dispatchers, 'even' and 'nearest'",
        ),
        (None, ("fake", "fake"), NEAREST, NEAREST, "'fake', which has no model; plans are for 'n"),
        (OPTIMAL, ("optimal",), EVEN, OPTIMAL, ""),
        (OPTIMAL, ("", ""), NEAREST, OPTIMAL, ""),
        (
            OPTIMAL,
            ("even",),
            EVEN,
            OPTIMAL,
            "sets dispatch 'optimal', the ranks report 'even'",
        ),
        (EVEN, ("even", "x"), EVEN, EVEN, "sets dispatch 'even', the ranks report 'even' and 'x'"),
    ],
)
def test_the_policy_comes_first_then_the_ranks_then_the_setting(
    operator, told, setting, model, words
):
    choice = choose_dispatch(operator, told, setting)
    assert choice.model is model
    assert bool(choice.warning) == bool(words)
    assert words in choice.warning


def test_names_of_ranks_do_not_make_a_warning_long():
    choice = choose_dispatch(None, (f"{rank}\n{'x' * 60}" for rank in range(99)), EVEN)
    assert len(choice.warning) < 250 and "\n" not in choice.warning


def dispatch_of(replica):
    """The choice that plans use, after the objective of a cycle was built."""
    planner, control = replica.member.planner, replica.member.control
    base = PlanBase.current(control)
    inputs = planner._builder.build(base, control.policy.policy, PlanLimits())
    assert inputs.objective.dispatch is inputs.token_split.dispatch
    return inputs.objective.dispatch


async def test_plans_and_status_follow_the_ranks_until_an_operator_decides():
    async with replicas("a") as (one, _):
        await one.lead(dispatch="nearest")
        assert dispatch_of(one) is NEAREST
        assert one.member.loads.split().dispatch is NEAREST
        status = live_view(one.member).status()
        assert (status.dispatch, status.dispatch_warning) == ("nearest", "")
        await one.operations.set_policy(DEMO, {"dispatch": "optimal"}, "eve")
        with capture_logs() as log:
            assert dispatch_of(one) is dispatch_of(one) is OPTIMAL
        warning = "The policy sets dispatch 'optimal', the ranks report 'nearest'."
        assert [row["detail"] for row in log if row["event"] == "dispatch_disagrees"] == [warning]
        status = live_view(one.member).status()
        assert (status.dispatch, status.dispatch_warning) == ("optimal", warning)
        await one.operations.set_policy(DEMO, {"dispatch": None}, "eve")
        with capture_logs() as log:
            assert dispatch_of(one) is NEAREST
        assert not log


async def test_options_cost_and_full_slots_reach_the_inputs_of_a_cycle():
    async with replicas("a") as (one, _):
        await one.lead(slots_stay_filled=True)
        options = {"gem": {"restarts": 2}}
        await one.operations.set_policy(DEMO, {"policy_options": options}, "eve")
        control = one.member.control
        inputs = one.member.planner._builder.build(
            PlanBase.current(control), control.policy.policy, PlanLimits()
        )
        assert inputs.policy_options == options
        assert inputs.objective.fill_slots
