"""Which ranks were lost and came back, as the leader tells its wave."""

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol.control_messages import RankConnected, RankLost
from evenkeel_moe.protocol.leader.liveness import Liveness
from evenkeel_moe.protocol.transitions import ControlState
from tests.protocol.machines import CONTROL_TIMING, control_of, hello_of

ONE = EpRank(1)


def liveness_of_group():
    control = control_of(ControlState.READY)
    liveness = Liveness(control.membership, control.as_leader.recovery, CONTROL_TIMING)
    return control.membership, liveness


def hear(membership, ranks, now):
    for rank in ranks:
        assert membership.heard(EpRank(rank), 1, 10 + rank, now)


def test_a_lost_rank_and_its_return_are_each_told_once():
    membership, liveness = liveness_of_group()
    assert liveness.changes(0.0) == []
    hear(membership, [0], 3.0)
    assert liveness.changes(3.0) == [RankLost(ONE)]
    assert liveness.changes(3.1) == []
    hear(membership, [1], 3.2)
    assert liveness.changes(3.3) == [RankConnected(ONE, 1, 11)]
    assert liveness.changes(3.4) == []


def test_a_return_that_a_hello_has_told_is_not_told_again():
    membership, liveness = liveness_of_group()
    hear(membership, [0], 3.0)
    assert liveness.changes(3.0) == [RankLost(ONE)]
    membership.register(hello_of(1), 21, 3.1)
    liveness.connected(ONE)
    assert liveness.changes(3.2) == []


def test_a_rank_of_a_new_generation_that_is_lost_at_once_is_told():
    membership, liveness = liveness_of_group()
    assert liveness.changes(3.0) == [RankLost(EpRank(0)), RankLost(ONE)]
    for rank in (0, 1):
        membership.register(hello_of(rank, "g2", 5), 20 + rank, 3.1)
    assert membership.generation == "g2"
    liveness.begin_generation()
    membership.stopped(ONE, 21)
    assert liveness.changes(3.2) == [RankLost(ONE)]


def test_a_member_of_another_generation_is_lost():
    """R1: its process cannot answer for the wave."""
    membership, liveness = liveness_of_group()
    membership.closed(ONE, 11, -CONTROL_TIMING.rank_lease_s)
    assert membership.register(hello_of(1, "g2", 5), 21, 0.1).accepted
    assert liveness.changes(0.2) == [RankLost(ONE)]
