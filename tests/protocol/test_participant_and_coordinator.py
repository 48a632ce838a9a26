"""One wave of a coordinator with the participants and gates of both ranks."""

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.messages import ParticipantState as P
from evenkeel_moe.protocol.rank.gate import PollResolved
from evenkeel_moe.protocol.transitions import CoordinatorState as C
from tests.protocol.machines import (
    BASE,
    LEADER,
    PEERS,
    TIMING,
    from_controller,
    gates_of,
    key_of,
    only,
    participant_in,
    participant_of,
    prepare_of,
    wave_of,
)

NEW = BASE.with_rows((0,), wave_of().rows)


class Pair:
    """One coordinator and two ranks, with messages that a test may lose."""

    def __init__(self, leader=LEADER, ranks=None, query=0, lose=None):
        self.ranks = ranks or [participant_of(0), participant_of(1)]
        self.gates = gates_of(self.ranks, poll_every=2)
        prepare = prepare_of(leader=leader) if query == 0 else None
        self.wave = Coordinator(key_of(), leader, PEERS, TIMING, prepare=prepare, query=query)
        self.lose = lose
        self.poll: list = []
        self.to_ranks(self.wave.start(0.0, 0))

    def to_ranks(self, actions, now=0.0):
        for action in actions:
            if isinstance(action, ctl.SendToRank) and not self.is_lost(action.message, action.rank):
                rank = self.ranks[action.rank]
                self.from_rank(
                    rank, rank.handle(from_controller(action.message, action.stream), now), now
                )

    def state(self) -> C:
        return self.wave.state

    def is_lost(self, message, rank) -> bool:
        """Return True for the first message of the kind and rank to lose."""
        if self.lose != (type(message), rank):
            return False
        self.lose = None
        return True

    def cancel(self, now=0.0):
        """Abort the wave as its leader does when the gate's deadline passes."""
        now += TIMING.commit_deadline_s
        steps = TIMING.commit_deadline_steps + self.gates[0].calls
        self.to_ranks(self.wave.handle(ctl.GroupProgress(steps), now), now)
        self.tick(now)

    def from_rank(self, rank, actions, now=0.0):
        """Carry a rank's actions out; copies and drains succeed at once."""
        for action in actions:
            match action:
                case msg.SendToController(message=message, stream=stream):
                    if not self.is_lost(message, rank.identity.rank):
                        event = ctl.FromRank(rank.identity.rank, 1, stream, message)
                        self.to_ranks(self.wave.handle(event, now), now)
                case msg.StartStaging(prepare=prepare):
                    self.from_rank(rank, rank.handle(msg.StagingFinished(prepare.wave), now), now)
                case msg.CancelStaging(wave=wave):
                    self.from_rank(rank, rank.handle(msg.TransportDrained(wave), now), now)
                case msg.Swap(wave=wave):
                    digest = rank.next_placement.digest
                    self.from_rank(rank, rank.handle(msg.SwapFinished(wave, digest), now), now)

    def step(self, count=1, now=0.0):
        for _ in range(count):
            due = [gate.advance() for gate in self.gates]
            for rank, gate, busy in zip(self.ranks, self.gates, due, strict=True):
                if busy and gate.resolve_due:
                    for action in gate.handle(PollResolved(np.minimum.reduce(self.poll)), now):
                        self.from_rank(rank, [action], now)
            if self.gates[0].poll_due:
                self.poll = [gate.begin_poll(now) for gate in self.gates]
            assert len({rank.placement.digest for rank in self.ranks}) == 1, "torn map"

    def tick(self, now):
        self.to_ranks(self.wave.handle(msg.Tick(), now), now)


def test_wave_goes_through():
    pair = Pair()
    assert pair.state() is C.COMMITTING and [rank.state for rank in pair.ranks] == [
        P.ARMED,
        P.ARMED,
    ]
    pair.step(4)
    assert pair.wave.done and pair.state() is C.COMMITTED
    assert [(rank.epoch, rank.placement) for rank in pair.ranks] == [(1, NEW), (1, NEW)]


@pytest.mark.parametrize("kind", [msg.Prepare, msg.Vote, msg.Commit, msg.Ack])
@pytest.mark.parametrize("rank", [0, 1])
def test_lost_message_is_sent_again(kind, rank):
    """A lost question or answer is sent again, and taking it twice changes nothing."""
    pair = Pair(lose=(kind, rank))
    pair.step(8)
    if kind is not msg.Ack:
        assert [r.epoch for r in pair.ranks] == [0, 0], "not all are armed: nobody swaps"
    for now in (2.0, 4.0):
        pair.tick(now)
        pair.step(4, now)
    assert pair.wave.done and pair.state() is C.COMMITTED
    assert [r.placement for r in pair.ranks] == [NEW, NEW]


@pytest.mark.parametrize("kind", [msg.Abort, msg.AbortAnswer])
def test_lost_abort_is_sent_again(kind):
    pair = Pair(lose=(kind, 1))
    pair.cancel()
    assert pair.state() is C.ABORTING
    pair.tick(12.0)
    assert pair.state() is C.ABORTED


def test_abort_races_with_the_poll_and_loses():
    """R7: the answer to Abort is the new epoch, and the wave is recorded as committed once."""
    pair = Pair()
    pair.step(2)
    pair.cancel()
    assert pair.state() is C.ABORTING
    pair.step(2, 1.0)
    assert pair.state() is C.COMMITTED
    assert [rank.epoch for rank in pair.ranks] == [1, 1]


def test_abort_before_the_poll_wins():
    pair = Pair()
    pair.cancel()
    pair.step(6, 1.0)
    assert pair.state() is C.ABORTED
    assert [(rank.state, rank.epoch) for rank in pair.ranks] == [(P.IDLE, 0)] * 2


def test_leader_dies_between_votes_and_commit_and_the_next_one_commits():
    """R12: all are prepared or armed: commit."""
    prepared = [participant_in(P.PREPARED, rank) for rank in (0, 1)]
    second = Pair(msg.Leader("b", 2), prepared, query=1)
    assert second.state() is C.COMMITTING
    second.step(4)
    assert second.wave.done and second.state() is C.COMMITTED
    assert [rank.placement for rank in prepared] == [NEW, NEW]


def test_leader_dies_and_one_rank_never_heard_of_the_wave():
    """R12: one rank that does not hold the wave: abort it everywhere, armed ranks too."""
    armed, idle = participant_in(P.PREPARED), participant_of(1)
    pair = Pair(msg.Leader("b", 2), [armed, idle], query=1)
    assert pair.wave.done and pair.state() is C.ABORTED
    late = idle.handle(from_controller(prepare_of()), 0.0)
    assert only(late, msg.TermRefused), "the old leader's Prepare comes too late"
    again = idle.handle(from_controller(prepare_of(leader=msg.Leader("b", 2))), 0.0)
    assert only(again, msg.Vote).reason is Reason.WAVE_DROPPED


def test_old_leader_is_refused_once_a_new_one_spoke():
    """R13: a paused old leader finds its term refused."""
    ranks = [participant_of(0), participant_of(1)]
    for rank in ranks:
        rank.handle(from_controller(msg.QueryState(msg.Leader("b", 2))), 0.0)
    pair = Pair(LEADER, ranks)
    assert pair.state() is C.PREPARING and [rank.state for rank in ranks] == [P.IDLE, P.IDLE]


def test_reload_on_one_rank_ends_the_wave_on_all():
    """R4."""
    pair = Pair()
    pair.from_rank(pair.ranks[1], pair.ranks[1].handle(msg.ReloadRequested(), 0.0))
    pair.step(6)
    pair.tick(5.0)
    pair.step(4, 5.0)
    assert pair.wave.done and pair.state() is C.ABORTED
    assert pair.wave.reason is Reason.WEIGHTS_VERSION_CHANGED


def test_leaderless_ranks_drop_together_and_a_late_commit_finds_the_wave_gone():
    """R6."""
    ranks = [participant_in(P.PREPARED, rank) for rank in (0, 1)]
    gates = gates_of(ranks, poll_every=1, resolve_after=1)
    for gate in gates:
        gate.advance()
    poll = np.minimum.reduce([gate.begin_poll(50.0) for gate in gates])
    for rank, gate in zip(ranks, gates, strict=True):
        gate.advance()
        assert gate.handle(PollResolved(poll), 50.0) == [msg.CancelStaging(key_of())]
        rank.handle(msg.TransportDrained(key_of()), 50.0)
        actions = rank.handle(from_controller(msg.Commit(LEADER, key_of())), 51.0)
        assert only(actions, msg.AbortAnswer).outcome is msg.WaveOutcome.DROPPED
