"""Agents of one EP group on threads that run steps in lockstep, and links driven by the test."""

import asyncio
import queue
import threading
import time
from typing import Any

import pytest

from evenkeel_moe.agent import Agent, AgentConfig, GateFailed
from evenkeel_moe.protocol.messages import Ack, Commit, Vote
from evenkeel_moe.wire.link import FlowControl, Registration, RegistrationOutcome
from tests.agent.ranks import (
    CPU,
    LEADER,
    Group,
    ToyMaps,
    ToyWeights,
    identity_of,
    run_ranks,
    shape_of,
)
from tests.waiting import deadline, wait_until


class PortLink:
    """A RankLink without a network: the test sends the controller's messages."""

    def __init__(self):
        self.sent: queue.Queue[Any] = queue.Queue()
        self.ready = threading.Event()
        self.listener: Any = None

    async def run(self, listener):
        self.listener = listener
        self.ready.set()
        await asyncio.Event().wait()

    def send(self, message, stream=None):
        self.sent.put((stream, message))

    async def finish(self, message):
        self.send(message)

    def say(self, message, stream=1):
        self.listener.received(stream, message)

    def accept(self, stream=1):
        """Accept the rank as the controller does, and ask for frequent reports."""
        flow = FlowControl(report_interval_s=0.02)
        self.say(Registration(RegistrationOutcome.ACCEPTED, 1.0, 30.0, flow), stream)

    def expect(self, kind, where=lambda message: True):
        """Wait for the next message of a kind; drop those before it."""
        ends_at = time.monotonic() + deadline(20)
        while True:
            _, message = self.sent.get(timeout=max(0.01, ends_at - time.monotonic()))
            if isinstance(message, kind) and where(message):
                return message

    def nothing(self, kind):
        """Assert that no message of a kind was sent so far."""
        while not self.sent.empty():
            assert not isinstance(self.sent.get()[1], kind)
        return True


def make_agent(config, placement, group, weights, maps, link, **options):
    """Return the agent of a rank that starts at epoch 0 on a CPU; collective over the group."""
    rank = config.identity.rank
    return Agent(
        config,
        placement,
        0,
        weights,
        maps,
        connect=lambda name, device: group.connect(rank, name, device),
        device=CPU,
        link=link,
        **options,
    )


class Fleet:
    """R ranks that run steps until told to stop; they all stop at the same step."""

    def __init__(self, old, *, make_config=None, group=None, weights=None, steps=True):
        self.old = old
        self.size = old.num_ranks
        self.group = group if group is not None else Group(self.size)
        self.links = [PortLink() for _ in range(self.size)]
        self.weights = (
            weights if weights is not None else [ToyWeights(old, r) for r in range(self.size)]
        )
        self.maps = [ToyMaps(old) for _ in range(self.size)]
        self.swaps: list[list[Any]] = [[] for _ in range(self.size)]
        self.left: list[Any] = [None] * self.size
        self.epochs: list[list[int]] = [[] for _ in range(self.size)]
        self.make_config = make_config
        self._stop = False
        self._stop_now = False
        self._barrier = threading.Barrier(self.size, action=self._sample)
        self.agents = run_ranks(self.size, self._make)
        self._threads = [
            threading.Thread(target=self._steps, args=(rank,), daemon=True)
            for rank in range(self.size)
        ]
        for link in self.links:
            assert link.ready.wait(deadline(20))
        if steps:
            for thread in self._threads:
                thread.start()

    def config(self, rank, **changes):
        values = {
            "identity": identity_of(rank),
            "shape": shape_of(self.old),
            "node": "node-0",
            "staging_bytes": 1 << 16,
            "poll_every": 3,
            "resolve_after": 2,
            "gate_timeout_s": 2.0,
        }
        return AgentConfig(**{**values, **changes})

    def _make(self, rank):
        config = self.config(rank) if self.make_config is None else self.make_config(self, rank)
        return make_agent(
            config,
            self.old,
            self.group,
            self.weights[rank],
            self.maps[rank],
            self.links[rank],
            on_swap=lambda record, placement: self.save(rank, record, placement),
            **self.hooks(rank),
        )

    def boundary(self, rank):
        """Do what an engine does between two steps, on the thread of the rank."""
        self.agents[rank].step_boundary()

    def hooks(self, rank):
        """Return further arguments of a rank's agent."""
        return {}

    def save(self, rank, record, placement):
        """Save a placement, on the transfer thread of the rank."""
        self.swaps[rank].append((record, placement))

    def _sample(self):
        self._stop_now = self._stop

    def _steps(self, rank):
        try:
            while True:
                self._barrier.wait(deadline(30))
                if self._stop_now:
                    return
                self.boundary(rank)
                self.epochs[rank].append(self.maps[rank].epoch)
        except GateFailed as error:
            self.left[rank] = error
            self._barrier.abort()
        except threading.BrokenBarrierError:
            self._last_steps(rank)

    def _last_steps(self, rank):
        """Run further steps after a peer has left, until the gate notices."""
        try:
            for _ in range(20):
                self.boundary(rank)
        except GateFailed as error:
            self.left[rank] = error

    def register(self):
        for link in self.links:
            link.accept()

    def say(self, message, ranks=None):
        for rank in range(self.size) if ranks is None else ranks:
            self.links[rank].say(message)

    def prepare(self, prepare):
        """Send a Prepare; every rank votes yes."""
        self.say(prepare)
        for link in self.links:
            vote = link.expect(Vote)
            assert vote.yes, vote

    def arm(self, prepare):
        """Send a Prepare, and after a yes of every rank the Commit."""
        self.prepare(prepare)
        self.say(Commit(LEADER, prepare.wave))

    def commit(self, prepare):
        """Carry a wave out on every rank; return the Acks."""
        self.arm(prepare)
        return [link.expect(Ack) for link in self.links]

    def wait_steps(self, count):
        """Wait until every rank has run at least this number of further steps."""
        goal = max(len(epochs) for epochs in self.epochs) + count
        wait_until(lambda: min(map(len, self.epochs)) >= goal, every_s=0.005, what="steps")

    def wait_left(self):
        for thread in self._threads:
            thread.join(deadline(30))
            assert not thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop = True
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(deadline(30))
                assert not thread.is_alive(), "a rank hangs in its step"
        for agent in self.agents:
            agent.close()
        # The invariant of every test: at every step all ranks route by the same epoch.
        if not any(self.left):
            assert all(epochs == self.epochs[0] for epochs in self.epochs)


def start_errors(kind, *args, **options):
    """Return by rank why its agent did not start."""
    errors = {}

    class Starting(kind):  # type: ignore[misc, valid-type]
        def _make(self, rank):
            try:
                return super()._make(rank)
            except Exception as error:
                errors[rank] = error
                raise

    with pytest.raises(Exception):  # noqa: B017
        Starting(*args, **options)
    return errors
