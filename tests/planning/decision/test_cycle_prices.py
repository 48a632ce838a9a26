"""The price of a plan's copies in a cycle."""

from dataclasses import replace

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.decision.cycle import run_cycle
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.relabel import count_moves
from tests.planning.decision.test_cycle import SHAPE, inputs, skewed


def test_a_copy_from_another_node_has_its_price_in_the_verdict():
    rows = Placement.initial(SHAPE).phy2log.reshape(2, 4, 3)
    # Ranks of two nodes swap all their experts.
    asked = inputs(
        skewed(60),
        target=Placement(rows[:, [2, 3, 0, 1]].reshape(2, 12).copy(), 4, 8),
        manual=True,
        topology=Topology((0, 0, 1, 1)),
    )
    near, far = (
        run_cycle(replace(asked, objective=Objective(copy_cost=7.0, cross_node_factor=factor)))
        for factor in (1.0, 10.0)
    )
    copies = count_moves(asked.current, asked.target)
    held = [set(row.tolist()) for row in rows[0]]
    nodes = held[0] | held[1], held[2] | held[3]
    crossing = 2 * sum(len(held[(rank + 2) % 4] - nodes[rank // 2]) for rank in range(4))
    assert 0 < crossing <= copies
    assert near.verdict.copy_cost == 7.0 * copies
    assert far.verdict.copy_cost == 7.0 * (copies + 9 * crossing)
