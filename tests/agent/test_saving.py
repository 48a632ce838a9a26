"""The controller is told of a swap only once its placement is saved, whatever it asks."""

import threading

from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Ack,
    Commit,
    QueryState,
    RankState,
)
from tests.agent.fleet import Fleet
from tests.agent.ranks import LEADER, prepare_for, two_rank_placements
from tests.waiting import deadline, wait_until

OLD, NEW = two_rank_placements()


class SlowDisk(Fleet):
    """Ranks whose disk takes a placement only after `free` is set."""

    def __init__(self, *args, **kwargs):
        self.free = threading.Event()
        super().__init__(*args, **kwargs)

    def save(self, rank, record, placement):
        assert self.free.wait(deadline(30))
        super().save(rank, record, placement)


def test_no_answer_names_the_new_epoch_before_its_placement_is_saved():
    """A group that restarts now comes back on the old placement."""
    prepare = prepare_for(OLD, NEW)
    with SlowDisk(OLD) as fleet:
        try:
            fleet.arm(prepare)
            wait_until(lambda: all(agent.epoch == 1 for agent in fleet.agents), what="the swap")
            fleet.say(Commit(LEADER, prepare.wave))
            fleet.say(QueryState(LEADER, want_placement=True, query=7))
            fleet.say(Abort(LEADER, prepare.wave))
            fleet.say(prepare)
            fleet.wait_steps(10)
            for rank, link in enumerate(fleet.links):
                assert link.nothing((Ack, RankState, AbortAnswer))
                hello = fleet.agents[rank].hello()
                assert (hello.epoch, hello.placement_digest) == (0, OLD.digest)
                assert not fleet.swaps[rank]
        finally:
            fleet.free.set()
        for rank, link in enumerate(fleet.links):
            assert link.expect(Ack).epoch == 1
            assert link.expect(RankState).epoch == 1
            assert fleet.swaps[rank], "saved before"
            hello = fleet.agents[rank].hello()
            assert (hello.epoch, hello.placement_digest) == (1, NEW.digest)
