"""Members at the edges: unknown ranks, other streams, and a larger group that gathers."""

import dataclasses

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, EpRank
from evenkeel_moe.protocol.leader.membership import Membership
from tests.protocol.machines import DEPLOYMENT, SHAPE, hello_of, identity_of, state_of

UNKNOWN = EpRank(5)
LARGER = dataclasses.replace(SHAPE, num_ranks=3)
LEASE_S = 5.0


def group():
    """Two ranks on streams 10 and 11, heard at time 0."""
    members = Membership(DEPLOYMENT, lease_s=LEASE_S)
    for rank in (0, 1):
        members.register(hello_of(rank), 10 + rank, 0.0)
    return members


def larger(rank, stream, members, now=1.0, certified=True):
    hello = hello_of(rank, "g2", incarnation=5, shape=LARGER)
    return members.register(hello, stream, now, certified=certified)


def test_a_rank_that_never_said_hello_is_not_heard_and_changes_nothing():
    members = group()
    before = dict(members.members)
    members.troubled(UNKNOWN, 10, "x")
    members.stopped(UNKNOWN, 10)
    members.closed(UNKNOWN, 10, 0.0)
    members.report(dataclasses.replace(state_of(0), identity=identity_of(UNKNOWN)))
    assert members.heard(UNKNOWN, 1, 10, 0.0) is False
    assert not members.fresh(UNKNOWN, 0.0)
    assert members.members == before and members.newest(UNKNOWN) is None


def test_an_earlier_stream_ends_nothing_and_an_answer_of_another_process_is_not_noted():
    members = group()
    members.closed(EpRank(0), 9, 0.0)
    members.stopped(EpRank(0), 9)
    members.report(dataclasses.replace(state_of(0), identity=identity_of(0, "g0"), step=7))
    member = members.members[EpRank(0)]
    assert (member.closed_at, member.stopped, member.state) == (None, False, None)


def test_some_or_all_ranks_are_heard_or_stopped():
    empty, members = Membership(DEPLOYMENT, lease_s=LEASE_S), group()
    assert (empty.any_fresh(0.0), empty.all_stopped) == (False, False)
    assert members.heard(EpRank(0), 1, 10, 3.0)
    assert (members.any_fresh(LEASE_S), members.any_fresh(3.0 + LEASE_S)) == (True, False)
    members.stopped(EpRank(0), 10)
    assert not members.all_stopped
    members.stopped(EpRank(1), 11)
    assert members.all_stopped and not members.any_fresh(0.0)


def test_ranks_of_a_larger_group_are_no_members_until_all_are_there():
    members = group()
    assert larger(2, 22, members).accepted
    assert (sorted(members.members), sorted(members.everyone)) == ([0, 1], [0, 1, 2])
    assert members.newest(EpRank(2)) is not None
    members.closed(EpRank(2), 22, 1.0)
    assert members.newest(EpRank(2)) is None, "nothing is left of it"
    larger(2, 23, members)
    assert not larger(0, 20, members).new_generation
    larger(1, 21, members)
    assert (members.generation, sorted(members.members)) == ("g2", [0, 1, 2])
    members.register(hello_of(2, "g2", incarnation=5, shape=LARGER), 24, 1.0)
    assert members.everyone[EpRank(2)].stream == 24, "not the one it gathered with"


def test_a_group_of_which_no_process_is_left_is_restarting():
    """Its ranks 0 and 1 belong to a larger group now, whose rank 2 has not come yet."""
    members = group()
    larger(0, 20, members)
    larger(1, 21, members)
    assert members.quorum(1.0)[:3] == (False, Reason.RANKS_MISSING, "the group is restarting")
    assert not members.is_complete(members.generation)


def test_a_process_without_a_stream_is_not_told_that_it_lost_its_place():
    members = group()
    members.closed(EpRank(0), 10, 1.0)
    assert larger(0, 20, members).closes == ()
    (closed,) = larger(1, 21, members).closes
    assert (closed.stream, closed.reason) == (11, Reason.DISPLACED)


@pytest.mark.parametrize(("after_s", "accepted"), [(0.99, False), (1.0, True)])
def test_a_stream_that_ended_keeps_its_place_for_a_fifth_of_a_lease(after_s, accepted):
    members = group()
    members.closed(EpRank(0), 10, 1.0)
    assert larger(0, 20, members, now=1.0 + after_s, certified=False).accepted is accepted


def test_the_steps_of_the_group_are_those_of_its_generation():
    members = group()
    assert members.step() == 0
    members.report(state_of(0, step=3))
    members.report(state_of(1, step=1))
    assert members.step() == 3
    larger(0, 20, members)
    other = dataclasses.replace(state_of(0, step=9), identity=identity_of(0, "g2", 5))
    members.report(other)
    assert members.step() == 3, "the group has taken them, though rank 0 has left"


@pytest.mark.parametrize("rank", [-1, SHAPE.num_ranks])
def test_a_rank_outside_its_group_is_refused(rank):
    refused = group().register(hello_of(rank), 30, 0.0)
    assert (refused.accepted, refused.reason) == (False, Reason.WRONG_SHAPE)


def test_a_rank_of_another_deployment_is_refused():
    identity = dataclasses.replace(identity_of(0), deployment=DeploymentId("other"))
    refused = group().register(dataclasses.replace(hello_of(0), identity=identity), 30, 0.0)
    assert (refused.accepted, refused.reason) == (False, Reason.UNKNOWN_DEPLOYMENT)


def test_a_rank_is_not_compared_with_the_process_that_it_replaces():
    members = Membership(DEPLOYMENT, lease_s=LEASE_S)
    members.register(hello_of(0), 10, 0.0)
    assert members.register(hello_of(0, checksums_digest="loaded again"), 20, 0.0).accepted


def test_a_process_is_outdated_by_a_newer_one_or_by_its_own_newer_stream():
    """R1."""
    members = group()
    assert members.register(hello_of(0), 10, 0.0).reason is Reason.STALE_INCARNATION
    assert members.register(hello_of(0), 9, 0.0).reason is Reason.STALE_INCARNATION
    assert members.register(hello_of(0, incarnation=2), 9, 0.0).accepted
