"""The members of the EP group, and the values on which all must agree."""

import dataclasses

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.protocol.control_messages import RankConnected, RankLost
from evenkeel_moe.protocol.leader.liveness import Liveness
from evenkeel_moe.protocol.leader.membership import Membership
from evenkeel_moe.protocol.messages import Lineage
from evenkeel_moe.protocol.transitions import ControlState
from tests.protocol.machines import (
    CONTROL_TIMING,
    DEPLOYMENT,
    SHAPE,
    control_of,
    hello_of,
    identity_of,
    state_of,
)

LEASE_S = 5.0


def group(*hellos, now=0.0):
    members = Membership(DEPLOYMENT, lease_s=LEASE_S)
    answers = [members.register(hello, 10 + n, now) for n, hello in enumerate(hellos)]
    return members, answers


def test_generation_is_registered_only_when_all_ranks_are_present():
    """R1."""
    members, (first, second) = group(hello_of(0), hello_of(1))
    assert (first.accepted, first.new_generation) == (True, False)
    assert (second.accepted, second.new_generation) == (True, True)
    assert members.generation == "g1" and members.shape == SHAPE
    assert members.quorum(4.9).ok


def test_quorum_says_why_not():
    members, _ = group(hello_of(0))
    assert members.quorum(0.0)[:2] == (False, Reason.RANKS_MISSING)
    members.register(hello_of(1), 20, 3.0)
    answer = members.quorum(6.0)
    assert (answer.ok, answer.reason, answer.missing) == (False, Reason.RANKS_MISSING, (0,))
    assert members.heard(0, 1, 10, 6.0)
    assert members.quorum(6.0).ok


def leave(members):
    """End the streams of all ranks, so long ago that nobody waits for them any more."""
    for rank, member in members.members.items():
        members.closed(rank, member.stream, -5.0)


def test_newest_incarnation_wins_and_older_ones_are_refused():
    """R1. A restarted group may be at a lower epoch."""
    members, _ = group(hello_of(0, epoch=9), hello_of(1, epoch=9))
    leave(members)
    newer = members.register(hello_of(0, "g2", incarnation=5), 30, 1.0)
    assert newer.accepted and not newer.new_generation
    assert members.quorum(1.0).reason is Reason.RANKS_MISSING, "the old group is broken"
    old = members.register(hello_of(0, incarnation=1), 31, 1.0)
    assert (old.accepted, old.reason) == (False, Reason.STALE_INCARNATION)
    assert "incarnation 1" in old.detail
    assert "5" not in old.detail, "a stranger could take the place of a rank with it"
    assert members.register(hello_of(1, "g2", incarnation=5), 32, 1.0).new_generation
    assert members.generation == "g2"


def test_life_that_seems_older_is_taken_when_the_newer_one_is_no_longer_heard():
    """R1: incarnations are clock readings; a host whose clock lags must not lock its rank out."""
    members, _ = group(hello_of(0, incarnation=9), hello_of(1, incarnation=9))
    late = hello_of(0, "g2", incarnation=3)
    assert members.register(late, 40, 4.9).reason is Reason.STALE_INCARNATION
    assert members.register(late, 41, 5.0).accepted
    assert members.heard(0, 3, 41, 5.1)


def test_a_registered_generation_keeps_its_shape_also_with_one_rank():
    one = dataclasses.replace(SHAPE, num_ranks=1, slots_per_rank=6)
    members, _ = group(hello_of(0, shape=one))
    larger = dataclasses.replace(one, num_layers=one.num_layers + 1)
    answer = members.register(hello_of(0, incarnation=5, shape=larger), 30, 1.0)
    assert (answer.accepted, answer.reason) == (False, Reason.SHAPE_DISAGREES)
    assert members.shape == one
    leave(members)
    assert members.register(hello_of(0, "g2", incarnation=5, shape=larger), 31, 1.0).new_generation
    assert members.shape == larger


def came_from(rank, generation="g0"):
    return {"lineage": Lineage(Generation(generation), rank)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (came_from(0), {}),
        (came_from(0), came_from(1, "another")),
        (came_from(3), came_from(3)),
    ],
    ids=["one rank came from none", "two groups", "one rank became two"],
)
def test_ranks_that_cannot_come_from_one_group_are_refused(one, other):
    members, (_, second) = group(hello_of(0, **one), hello_of(1, **other))
    assert (second.accepted, second.reason) == (False, Reason.SHAPE_DISAGREES)
    assert str(one["lineage"]) in second.detail and members.generation is None


@pytest.mark.parametrize("joined", [None, 2])
def test_a_group_knows_the_one_it_came_from(joined):
    members, _ = group(hello_of(0, **came_from(5)), hello_of(1, **came_from(joined)))
    assert (members.generation, members.came_from) == ("g1", "g0")
    assert group(hello_of(0), hello_of(1))[0].came_from is None


def test_messages_count_only_from_the_newest_stream():
    """R1."""
    members, _ = group(hello_of(0), hello_of(1))
    again = members.register(hello_of(0), 30, 1.0)
    assert again.accepted and again.closes == (), "it displaces nobody"
    assert not members.heard(0, 1, 10, 2.0)
    assert not members.heard(0, 2, 30, 2.0)
    assert members.heard(0, 1, 30, 2.0)
    assert not members.register(hello_of(0), 12, 3.0).accepted, "an older stream of the same life"


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"shape": dataclasses.replace(SHAPE, top_k=2)}, Reason.SHAPE_DISAGREES, "top_k=2"),
        ({"checksums_digest": "other"}, Reason.CHECKSUM_MISMATCH, "other"),
    ],
)
def test_ranks_that_disagree_are_refused_with_the_numbers(changes, reason, words):
    """R4: one checksum per expert and a weights version, equal on every replica."""
    members, (_, second) = group(hello_of(0), hello_of(1, **changes))
    assert (second.accepted, second.reason) == (False, reason)
    assert words in second.detail and members.generation is None


def test_a_rank_is_not_compared_with_the_checksums_before_a_repeated_reload():
    """R4: a reload that left no checksums is repeated as the same version."""

    def loaded(rank, digest):
        return hello_of(rank, weights_version=2, checksums_digest=digest)

    members, _ = group(loaded(0, "none yet"), loaded(1, "none yet"))
    for rank in (0, 1):
        members.report(state_of(rank, weights_version=2))
    assert members.register(loaded(0, "of 2"), 20, 0.0).accepted
    refused = members.register(loaded(1, "other"), 21, 0.0)
    assert refused.reason is Reason.CHECKSUM_MISMATCH, "rank 0 has told those of the reload"
    assert members.register(loaded(1, "of 2"), 22, 0.0).accepted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights_version": 2, "checksums_digest": "of 2"}, Reason.WEIGHTS_VERSION_CHANGED),
        ({"gate_digest": "other K"}, Reason.GATE_LAYOUT_DISAGREES),
        ({"capabilities": frozenset()}, Reason.OBSERVE_ONLY),
    ],
)
def test_group_that_cannot_migrate_is_known_but_has_no_quorum(changes, reason):
    """R9: a mismatch means observe only."""
    members, _ = group(hello_of(0), hello_of(1, **changes))
    assert members.generation == "g1"
    assert members.quorum(0.0)[:2] == (False, reason)


def test_a_troubled_rank_stops_migration_until_its_trouble_is_over():
    """Its Hello offered to migrate, but the trouble is newer."""
    members, _ = group(hello_of(0), hello_of(1))
    members.troubled(1, 11, "after a reload its replicas differ")
    answer = members.quorum(0.0)
    assert answer[:2] == (False, Reason.OBSERVE_ONLY) and answer.missing == ()
    assert (
        answer.detail
        == "ranks [1] take no wave any more; rank 1: after a reload its replicas differ"
    )
    members.troubled(1, 11, "")
    assert members.quorum(0.0).ok


def test_a_rank_that_stops_as_planned_is_missing_at_once_and_back_with_its_next_hello():
    members, _ = group(hello_of(0), hello_of(1))
    members.stopped(1, 9)
    assert members.quorum(0.0).ok, "not its newest stream"
    members.stopped(1, 11)
    assert members.quorum(0.0)[:2] == (False, Reason.RANKS_MISSING)
    assert members.quorum(0.0).missing == (1,) and not members.all_stopped
    assert members.quorum(0.0).detail == "ranks [1] stopped as planned"
    assert members.quorum(9.0).detail == "ranks [1] stopped as planned, ranks [0] not heard for 5 s"
    members.heard(1, 1, 11, 0.5)
    assert not members.fresh(1, 0.5), "a late message does not bring it back"
    members.stopped(0, 10)
    assert members.all_stopped
    assert members.register(hello_of(1), 30, 1.0).accepted
    assert members.fresh(1, 1.0) and not members.all_stopped


def test_trouble_counts_from_the_newest_stream_and_gives_nothing_that_was_not_offered():
    """R1. A heartbeat without trouble does not offer to migrate."""
    members, _ = group(hello_of(0), hello_of(1))
    members.troubled(1, 11, "the engine has stopped")
    assert members.register(hello_of(1), 30, 1.0).accepted
    assert not members.quorum(1.0).ok, "the same process: it has not said that the trouble is over"
    members.troubled(1, 30, "")
    members.troubled(1, 11, "the engine has stopped")
    assert members.quorum(1.0).ok, "trouble counts from the newest stream only"
    members.troubled(1, 30, "the engine has stopped")
    assert members.register(hello_of(1, incarnation=8), 32, 1.0).accepted
    assert members.quorum(1.0).ok, "another process"
    assert members.register(hello_of(1, incarnation=8, capabilities=frozenset()), 33, 2.0).accepted
    members.troubled(1, 33, "")
    members.troubled(7, 33, "nobody's")
    assert members.quorum(2.0).detail == "ranks [1] only observe"


def test_reports_raise_the_weights_version_and_the_groups_step():
    members, _ = group(hello_of(0), hello_of(1))
    members.report(state_of(0, weights_version=2, step=40))
    assert members.weights_version() is None and members.step() == 40
    members.report(state_of(1, weights_version=2, step=38))
    assert members.weights_version() == 2 and members.step() == 40


def test_closed_stream_leaves_the_rank_a_member_until_its_lease_runs_out():
    """A rank that is not heard stays a member of the group."""
    members, _ = group(hello_of(0), hello_of(1))
    members.closed(0, 10, 0.5)
    assert members.members[0].closed_at == 0.5
    assert members.quorum(1.0).ok
    assert members.quorum(5.0).missing == (0, 1)


def test_strangers_do_not_displace_a_group_whose_ranks_are_all_present():
    """R1."""
    members, _ = group(hello_of(0), hello_of(1))
    answer = members.register(hello_of(0, "g2", 5), 30, 1.0)
    assert (answer.accepted, answer.reason) == (False, Reason.DEPLOYMENT_IN_USE)
    assert "all 2 ranks of another group" in answer.detail and "g2" in answer.detail
    assert "g1" not in answer.detail, "a stranger could take the place of a rank with it"
    assert [(one.rank, one.stream) for one in answer.closes] == [(0, 30)]
    assert members.heard(0, 1, 10, 1.0) and members.quorum(1.0).ok


def test_a_group_with_a_rank_that_is_not_heard_gives_way_and_is_told():
    members, _ = group(hello_of(0), hello_of(1))
    members.heard(1, 1, 11, 4.0)
    first = members.register(hello_of(0, "g2", 5), 30, 5.0)
    second = members.register(hello_of(1, "g2", 5), 31, 5.0)
    assert second.new_generation and members.generation == "g2"
    closes = [*first.closes, *second.closes]
    assert [(one.rank, one.stream, one.reason) for one in closes] == [
        (0, 10, Reason.DISPLACED),
        (1, 11, Reason.DISPLACED),
    ]
    assert "g1" in closes[0].detail and "g2" in closes[0].detail


def test_a_certificate_that_names_the_ranks_may_take_the_place_of_a_group():
    members, _ = group(hello_of(0), hello_of(1))
    for rank in (0, 1):
        answer = members.register(hello_of(rank, "g2", 5), 30 + rank, 1.0, certified=True)
        assert answer.accepted and [one.stream for one in answer.closes] == [10 + rank]
    assert members.generation == "g2"


def test_a_displaced_group_comes_back_once_the_other_has_left():
    members, _ = group(hello_of(0), hello_of(1))
    for rank in (0, 1):
        members.register(hello_of(rank, "g2", 5), 30 + rank, 1.0, certified=True)
    leave(members)
    for rank in (0, 1):
        answer = members.register(hello_of(rank), 40 + rank, 5.9)
        assert answer.reason is Reason.STALE_INCARNATION, "the other may only have reconnected"
        assert members.register(hello_of(rank), 50 + rank, 6.1).accepted
    assert members.generation == "g1" and members.quorum(6.1).ok


def test_a_group_may_come_back_smaller_and_the_ranks_beyond_it_are_told():
    members, _ = group(hello_of(0), hello_of(1))
    one = dataclasses.replace(SHAPE, num_ranks=1, slots_per_rank=6)
    answer = members.register(hello_of(0, "g2", 5, shape=one), 30, 1.0, certified=True)
    assert sorted(close.stream for close in answer.closes) == [10, 11]
    assert list(members.members) == [0] and members.shape == one


def test_slots_of_the_group_stay_filled_if_one_rank_needs_it():
    assert not group(hello_of(0), hello_of(1))[0].slots_stay_filled()
    assert group(hello_of(0), hello_of(1, slots_stay_filled=True))[0].slots_stay_filled()


UNKNOWN = EpRank(5)
LARGER = dataclasses.replace(SHAPE, num_ranks=3)


def whole_group():
    """Two ranks on streams 10 and 11, heard at time 0."""
    return group(hello_of(0), hello_of(1))[0]


def larger(rank, stream, members, now=1.0, certified=True):
    hello = hello_of(rank, "g2", incarnation=5, shape=LARGER)
    return members.register(hello, stream, now, certified=certified)


def test_a_rank_that_never_said_hello_is_not_heard_and_changes_nothing():
    members = whole_group()
    before = dict(members.members)
    members.troubled(UNKNOWN, 10, "x")
    members.stopped(UNKNOWN, 10)
    members.closed(UNKNOWN, 10, 0.0)
    members.report(dataclasses.replace(state_of(0), identity=identity_of(UNKNOWN)))
    assert members.heard(UNKNOWN, 1, 10, 0.0) is False
    assert not members.fresh(UNKNOWN, 0.0)
    assert members.members == before and members.newest(UNKNOWN) is None


def test_an_earlier_stream_ends_nothing_and_an_answer_of_another_process_is_not_noted():
    members = whole_group()
    members.closed(EpRank(0), 9, 0.0)
    members.stopped(EpRank(0), 9)
    members.report(dataclasses.replace(state_of(0), identity=identity_of(0, "g0"), step=7))
    member = members.members[EpRank(0)]
    assert (member.closed_at, member.stopped, member.state) == (None, False, None)


def test_some_or_all_ranks_are_heard_or_stopped():
    empty, members = Membership(DEPLOYMENT, lease_s=LEASE_S), whole_group()
    assert (empty.any_fresh(0.0), empty.all_stopped) == (False, False)
    assert members.heard(EpRank(0), 1, 10, 3.0)
    assert (members.any_fresh(LEASE_S), members.any_fresh(3.0 + LEASE_S)) == (True, False)
    members.stopped(EpRank(0), 10)
    assert not members.all_stopped
    members.stopped(EpRank(1), 11)
    assert members.all_stopped and not members.any_fresh(0.0)


def test_ranks_of_a_larger_group_are_no_members_until_all_are_there():
    members = whole_group()
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
    members = whole_group()
    larger(0, 20, members)
    larger(1, 21, members)
    assert members.quorum(1.0)[:3] == (False, Reason.RANKS_MISSING, "the group is restarting")
    assert not members.is_complete(members.generation)


def test_a_process_without_a_stream_is_not_told_that_it_lost_its_place():
    members = whole_group()
    members.closed(EpRank(0), 10, 1.0)
    assert larger(0, 20, members).closes == ()
    (closed,) = larger(1, 21, members).closes
    assert (closed.stream, closed.reason) == (11, Reason.DISPLACED)


@pytest.mark.parametrize(("after_s", "accepted"), [(0.99, False), (1.0, True)])
def test_a_stream_that_ended_keeps_its_place_for_a_fifth_of_a_lease(after_s, accepted):
    members = whole_group()
    members.closed(EpRank(0), 10, 1.0)
    assert larger(0, 20, members, now=1.0 + after_s, certified=False).accepted is accepted


def test_the_steps_of_the_group_are_those_of_its_generation():
    members = whole_group()
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
    refused = whole_group().register(hello_of(rank), 30, 0.0)
    assert (refused.accepted, refused.reason) == (False, Reason.WRONG_SHAPE)


def test_a_rank_of_another_deployment_is_refused():
    identity = dataclasses.replace(identity_of(0), deployment=DeploymentId("other"))
    refused = whole_group().register(dataclasses.replace(hello_of(0), identity=identity), 30, 0.0)
    assert (refused.accepted, refused.reason) == (False, Reason.UNKNOWN_DEPLOYMENT)


def test_a_rank_is_not_compared_with_the_process_that_it_replaces():
    members = Membership(DEPLOYMENT, lease_s=LEASE_S)
    members.register(hello_of(0), 10, 0.0)
    assert members.register(hello_of(0, checksums_digest="loaded again"), 20, 0.0).accepted


def test_a_process_is_outdated_by_a_newer_one_or_by_its_own_newer_stream():
    """R1."""
    members = whole_group()
    assert members.register(hello_of(0), 10, 0.0).reason is Reason.STALE_INCARNATION
    assert members.register(hello_of(0), 9, 0.0).reason is Reason.STALE_INCARNATION
    assert members.register(hello_of(0, incarnation=2), 9, 0.0).accepted


ONE = EpRank(1)


def liveness_of_group():
    control = control_of(ControlState.READY)
    liveness = Liveness(control.as_leader.recovery)
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
