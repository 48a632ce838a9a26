import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.model.plan import PlanLimits
from evenkeel.planning import metrics, relabel
from evenkeel.planning.eplb import plan_eplb
from evenkeel.planning.keel import plan_keel
from evenkeel.planning.problem import DispatchModel, PlacementProblem
from tests.strategies import cost_curves, loads, placements, shapes, topologies


@st.composite
def problems(draw, /, **fixed):
    shape = draw(shapes())
    fields = {
        "load": draw(loads(shape.num_layers, shape.num_logical_experts)),
        "shape": shape,
        "topology": draw(topologies(shape.num_ranks)),
        "current": draw(st.none() | placements(shape)),
        "costs": draw(st.none() | cost_curves(shape.num_ranks)),
        "dispatch": draw(st.sampled_from(DispatchModel)),
        "max_evaluations": 3000,
    }
    return PlacementProblem(**(fields | fixed))


@given(problems())
def test_proposals_are_sound_and_never_score_below_the_bound(problem):
    proposal = plan_keel(problem)
    proposal.placement.check(problem.shape)
    assert proposal.score == pytest.approx(metrics.score(problem, proposal.placement))
    assert proposal.lower_bound is not None
    assert proposal.lower_bound <= proposal.score * (1 + 1e-9)


@given(problems(), st.integers(0, 4), st.integers(0, 2))
def test_limits_hold(problem, moves, layers):
    if problem.current is None:
        return
    limited = PlacementProblem(
        problem.load,
        problem.shape,
        problem.topology,
        current=problem.current,
        limits=PlanLimits(max_moves=moves, max_layers=layers),
        max_evaluations=3000,
    )
    placement = plan_keel(limited).placement
    assert relabel.count_moves(problem.current, placement) <= moves
    assert (relabel.moves_by_layer(problem.current, placement) > 0).sum() <= layers


@given(problems(current=None, dispatch=DispatchModel.EVEN))
def test_from_nothing_it_is_never_worse_than_eplb(problem):
    assert plan_keel(problem).score <= plan_eplb(problem).score * (1 + 1e-9)


@given(problems())
def test_replaying_the_evaluations_used_gives_the_same_bytes(problem):
    first = plan_keel(problem)
    again = PlacementProblem(
        problem.load,
        problem.shape,
        problem.topology,
        current=problem.current,
        costs=problem.costs,
        dispatch=problem.dispatch,
        max_evaluations=first.evaluations,
    )
    assert plan_keel(again).placement.digest == first.placement.digest
