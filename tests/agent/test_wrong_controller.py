"""Agents on real Gloo groups under a controller that does what no right one does."""

import numpy as np

from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.protocol.messages import Abort, AbortAnswer, Commit, Vote
from tests.agent.fleet import Fleet
from tests.agent.ranks import LEADER, prepare_for, two_rank_placements

OLD, NEW = two_rank_placements()


def map_of(*row):
    return Placement(np.tile(np.array(row, np.int32), (2, 1)), 2, 4)


def test_ranks_that_were_sent_different_maps_under_one_key_never_swap():
    """Each map is right in itself, and copies inside one rank need no other rank."""
    orders = [
        prepare_for(OLD, map_of(1, 0, EMPTY, 2, 3, EMPTY)),
        prepare_for(OLD, map_of(0, 1, EMPTY, 3, 2, EMPTY)),
    ]
    wave = orders[0].wave
    assert wave == orders[1].wave
    with Fleet(OLD) as fleet:
        for rank, prepare in enumerate(orders):
            fleet.say(prepare, ranks=[rank])
            assert fleet.links[rank].expect(Vote).yes
        fleet.say(Commit(LEADER, wave))
        fleet.wait_steps(15)
        assert all(weights.holds(OLD) for weights in fleet.weights)
        assert all((maps.rows == OLD.phy2log).all() for maps in fleet.maps)
        fleet.say(Abort(LEADER, wave))
        for link in fleet.links:
            assert int(link.expect(AbortAnswer, where=lambda answer: answer.drained).epoch) == 0
