"""Problems for tests of the planner."""

from dataclasses import fields

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem

_OF_OBJECTIVE = {field.name for field in fields(Objective)}


def a_problem(load, shape, topology=None, **changes):
    """Return a problem of a shape, on one node if no topology is given.

    Fields of the objective may be given by name like those of the problem.
    """
    if named := {name: changes.pop(name) for name in _OF_OBJECTIVE & changes.keys()}:
        changes["objective"] = Objective(**named)
    topology = Topology.single_node(shape.num_ranks) if topology is None else topology
    return PlacementProblem(load, shape, topology, **changes)


def started(load, shape, topology=None, **changes):
    """Return the problem of engines that have just started."""
    return a_problem(load, shape, topology, current=Placement.initial(shape), **changes)
