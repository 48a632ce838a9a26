"""The price of a plan's copies in a cycle."""

from dataclasses import replace

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology
from evenkeel_moe.planning.decision.cycle import run_cycle
from evenkeel_moe.planning.problem.objective import Objective
from evenkeel_moe.planning.schedule.relabel import count_moves
from tests.planning.decision.test_cycle import SHAPE, inputs, skewed


def test_a_copy_from_another_node_has_its_price_in_the_verdict():
    current = Placement.initial(SHAPE)
    rows = current.phy2log.reshape(2, 4, 3)
    # Ranks of two nodes swap all their experts.
    target = Placement(rows[:, [2, 3, 0, 1]].reshape(2, 12).copy(), 4, 8)
    asked = inputs(
        skewed(60),
        target=target,
        manual=True,
        topology=Topology((0, 0, 1, 1)),
    )

    def price(factor):
        objective = Objective(copy_cost=7.0, cross_node_factor=factor)
        verdict = run_cycle(replace(asked, objective=objective)).verdict
        assert verdict is not None
        return verdict.copy_cost

    copies = count_moves(current, target)
    held = [set(row.tolist()) for row in rows[0]]
    nodes = held[0] | held[1], held[2] | held[3]
    crossing = 2 * sum(len(held[(rank + 2) % 4] - nodes[rank // 2]) for rank in range(4))
    assert 0 < crossing <= copies
    assert price(1.0) == 7.0 * copies
    assert price(10.0) == 7.0 * (copies + 9 * crossing)
