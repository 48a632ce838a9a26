"""Agents on real Gloo groups under a controller that does what no right one does."""

import dataclasses

import numpy as np
import torch

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.protocol.messages import Abort, AbortAnswer, Commit, Vote
from tests.agent.fleet import Fleet
from tests.agent.ranks import LEADER, ToyWeights, prepare_for, two_rank_placements

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


class UnequalWeights(ToyWeights):
    """The second layer has larger experts."""

    def __init__(self, placement, rank):
        super().__init__(placement, rank)
        for key, (matrix, *others) in self.slots.items():
            self.slots[key] = (torch.cat([matrix] * (1 + key[0])), *others)


def test_ranks_that_were_sent_different_copies_under_one_key_do_not_end_each_other():
    """Gloo ends the process of a rank that gets more bytes than it made room for."""
    weights = [UnequalWeights(OLD, rank) for rank in range(2)]
    sums = {0: {}, 1: {}}
    for rank in range(2):
        for (layer, local), tensors in weights[rank].slots.items():
            expert = int(OLD.phy2log[layer, 3 * rank + local])
            sums[layer][expert] = checksum(tensors)
    right = prepare_for(OLD, NEW, batch_deadline_s=1.0)
    batches = right.body.batches
    half = len(batches) // 2
    assert {t.layer for (t,) in batches[:half]} == {0} and {t.layer for (t,) in batches[half:]} == {
        1
    }
    with Fleet(OLD, weights=weights) as fleet:
        for rank, order in enumerate((batches, (*batches[half:], *batches[:half]))):
            body = dataclasses.replace(right.body, batches=order)
            told = tuple(sums[t.layer][t.logical_expert] for (t,) in order)
            fleet.say(dataclasses.replace(right, body=body, checksums=told), ranks=[rank])
        for link in fleet.links:
            vote = link.expect(Vote)
            assert not vote.yes
            assert vote.reason in (Reason.TRANSFER_TIMEOUT, Reason.TRANSFER_FAILED)
        fleet.wait_steps(15)


def test_a_deadline_and_a_rate_that_no_clock_counts_fail_nothing():
    """A batch whose peer does not come must end some day, and a pause must end at all."""
    prepare = prepare_for(OLD, NEW, one_batch=True, batch_deadline_s=1e300, max_bytes_per_s=1e-300)
    with Fleet(OLD) as fleet:
        fleet.say(prepare)
        fleet.wait_steps(5)
        # A cancellation ends the pause.
        fleet.say(Abort(LEADER, prepare.wave))
        for link in fleet.links:
            assert link.expect(AbortAnswer, where=lambda answer: answer.drained)
        assert all(agent._gate.transport_serial == 0 for agent in fleet.agents)
