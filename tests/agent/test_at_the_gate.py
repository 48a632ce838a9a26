"""The gate and the participant: one lock around them, and no step after an error in the gate."""

import threading

import numpy as np
import pytest

from evenkeel_moe.agent import GateFailed
from evenkeel_moe.agent.gate_polls import GatePolls
from evenkeel_moe.errors import Reason
from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Ack,
    Commit,
    ParticipantState,
    QueryState,
    RankState,
    Vote,
)
from evenkeel_moe.protocol.rank.gate import PollFailed, PollResolved
from evenkeel_moe.wire.link import Heartbeat
from tests.agent.fleet import Fleet
from tests.agent.ranks import CPU, LEADER, Group, prepare_for, run_ranks, two_rank_placements
from tests.waiting import deadline, wait_until

OLD, NEW = two_rank_placements()


class OwnedLock:
    """A lock that knows which thread holds it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.owner = None

    def __enter__(self):
        self._lock.acquire()
        self.owner = threading.get_ident()

    def __exit__(self, *_):
        self.owner = None
        self._lock.release()


def watch(agent, unlocked):
    """Give an agent an OwnedLock; add to `unlocked` what uses its machines without it."""
    lock = agent._lock = OwnedLock()

    def locked(name, method):
        def call(*arguments):
            if lock.owner != threading.get_ident():
                unlocked.append(name)
            return method(*arguments)

        return call

    for machine, names in (
        (agent._participant, ("handle", "snapshot")),
        (agent._gate, ("begin_poll", "handle", "on_failure", "request_rebuild")),
        (agent._saving, ("begin", "told", "outgoing", "end")),
    ):
        for name in names:
            setattr(machine, name, locked(name, getattr(machine, name)))


def test_one_lock_is_held_whenever_the_gate_or_the_participant_is_used():
    """A poll that sees half of a message of the network thread would tell the group a lie."""
    unlocked: list[str] = []
    with Fleet(OLD, steps=False) as fleet:
        for agent in fleet.agents:
            watch(agent, unlocked)
        for thread in fleet._threads:
            thread.start()
        dropped, stuck, done = (
            prepare_for(OLD, NEW, plan=plan, batch_deadline_s=1.0) for plan in ("d", "s", "p")
        )
        for wave in (dropped, stuck, done):
            fleet.weights[0].refuse = wave is stuck
            fleet.say(wave)
            for link in fleet.links:
                assert link.expect(Vote).yes is (wave is not stuck)
            fleet.say((Commit if wave is done else Abort)(LEADER, wave.wave))
            for agent, link in zip(fleet.agents, fleet.links, strict=True):
                answer = Ack if wave is done else AbortAnswer
                link.expect(answer, where=lambda answer: isinstance(answer, Ack) or answer.drained)
                agent.hello()
        fleet.say(QueryState(LEADER))
    assert unlocked == []


def test_a_rank_tells_the_steps_that_it_ran_since_its_last_poll():
    """R14: a fleet whose steps are slow would look idle from one poll to the next."""
    with Fleet(OLD, steps=False) as fleet:
        for _ in range(2):
            fleet.agents[0].step_boundary()
        fleet.say(QueryState(LEADER), [0])
        assert fleet.links[0].expect(RankState).step == 2


def test_each_reload_has_a_permit_of_its_own():
    """R4: a wave that a poll may still pass comes first, though an earlier reload was permitted."""
    prepare = prepare_for(OLD, NEW)
    with Fleet(OLD, steps=False) as fleet:
        assert all(agent.request_reload().is_set() for agent in fleet.agents)
        run_ranks(2, lambda rank: fleet.agents[rank].finish_reload(1))  # It was given up.
        fleet.arm(prepare)
        for _ in range(3):
            for agent in fleet.agents:
                agent.step_boundary()
        assert all(agent._participant.must_wait_for_poll() for agent in fleet.agents)
        permits = [agent.request_reload() for agent in fleet.agents]
        assert not any(permit.is_set() for permit in permits)
        for _ in range(3):
            run_ranks(2, lambda rank: fleet.agents[rank].step_boundary())
        assert all(permit.wait(deadline(20)) for permit in permits)
        assert all(weights.holds(NEW) for weights in fleet.weights)


class FailsOnce:
    """A backend whose reduction fails once."""

    def __init__(self, backend, at, error):
        self._backend, self._left, self._error = backend, at, error

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def allreduce(self, *arguments):
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._backend.allreduce(*arguments)


class Unplugged(Group):
    """The gate of rank 0 fails in its second poll; its first reduction compares the ranks."""

    def __init__(self, size, error):
        super().__init__(size)
        self.error = error

    def connect(self, rank, name, device=CPU):
        communicator = super().connect(rank, name, device)
        if rank == 0 and name.startswith("gate"):
            communicator._backend = FailsOnce(communicator._backend, 3, self.error)
        return communicator


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_after_any_error_in_the_gate_the_rank_leaves_and_takes_no_further_step(kind):
    """R8: an error in the gate means unknown, never "not agreed". Backends raise RuntimeError."""
    with Fleet(OLD, group=Unplugged(2, kind("the cable is out")), steps=False) as fleet:

        def steps(rank):
            for _ in range(5):
                fleet.agents[rank].step_boundary()

        run_ranks(2, steps)
        for _ in range(2):  # An engine that asks again gets the same answer.
            with pytest.raises(GateFailed, match="the cable is out") as caught:
                fleet.agents[0].step_boundary()
            assert caught.value.reason is Reason.GATE_FAILED
        fleet.agents[0].close()
        said = [m for _, m in list(fleet.links[0].sent.queue) if isinstance(m, Heartbeat)]
        assert not any(beat.stopping for beat in said), "no planned stop"


@pytest.mark.parametrize("left_out", [1, 3], ids=["before a poll", "before its use"])
def test_a_boundary_that_one_rank_leaves_out_ends_every_rank(left_out):
    """R9: the ranks would compute one step under two maps."""
    prepare = prepare_for(OLD, NEW)
    with Fleet(OLD, steps=False) as fleet:
        fleet.arm(prepare)
        participants = [agent._participant for agent in fleet.agents]
        wait_until(lambda: all(one.state is ParticipantState.ARMED for one in participants))

        def steps(rank):
            with pytest.raises(GateFailed) as caught:
                for step in range(12):
                    if (rank, step) != (1, left_out):
                        fleet.agents[rank].step_boundary(step)
            assert rank == 0 or "boundaries were left out" in str(caught.value)

        run_ranks(2, steps)
        assert (fleet.agents[1].epoch, fleet.weights[1].holds(OLD)) == (0, True)


def test_the_result_of_a_poll_is_the_least_of_all_ranks_and_is_used_once():
    """R8: the result of an earlier poll says nothing of what is armed now."""
    group = Group(2)

    def poll(rank):
        polls = GatePolls(group.connect(rank, "gate", CPU), 20.0)
        for round_ in range(2):
            polls.begin(np.array([rank, 1 - rank, 7 + round_ + rank], np.int64))
            result = polls.wait()
            assert isinstance(result, PollResolved)
            assert result.minima.tolist() == [0, 0, 7 + round_]
            with pytest.raises(AssertionError):
                polls.wait()

    run_ranks(2, poll)


def test_a_poll_that_a_rank_does_not_join_fails_at_its_deadline():
    group, over = Group(2), threading.Event()

    def poll(rank):
        polls = GatePolls(group.connect(rank, "gate", CPU), 0.1)
        if rank == 1:
            assert over.wait(deadline(20))
            return
        polls.begin(np.array([1], np.int64))
        result = polls.wait()
        over.set()
        assert isinstance(result, PollFailed) and result.detail

    run_ranks(2, poll)
