"""The parts that the toy ranks of all engines share: steps, and a controller's messages."""

import queue
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import Ack, Commit, StagingProgress, Vote
from tests.agent.ranks import LEADER, registered_prepare
from tests.waiting import deadline


def toy_settings(**changes) -> GuestSettings:
    """Return settings of a plugin on this machine that polls the gate often."""
    values = {
        "controllers": "127.0.0.1:1",
        "deployment": "toy",
        "mode": "place",
        "host": "127.0.0.1",
        "interface": "lo",
        "poll_every": 4,
        "resolve_after": 2,
    }
    return GuestSettings(**{**values, **changes})


class DrivenRank:
    """One rank of a toy engine; the test sends what a controller would send."""

    agent: Any
    link: Any
    lockstep: Any
    """A group of all ranks that the engine does not use."""

    def step(self) -> None:
        """Run one forward pass as the engine does."""
        raise NotImplementedError

    def steps(self, count, compute_s=0.0):
        """Run steps, each followed by `compute_s` in which other threads can work."""
        for _ in range(count):
            self.step()
            if compute_s:
                threading.Event().wait(compute_s)

    def register(self):
        """Accept the rank as the controller does, and ask for frequent reports."""
        assert self.link.ready.wait(deadline(20))
        self.link.accept()

    def target(self, seed=1):
        """Return a map with the slots of each layer shuffled; the same on every rank."""
        rng = np.random.default_rng(seed)
        old = self.agent.placement
        rows = np.stack([rng.permutation(row) for row in old.phy2log])
        return Placement(rows, old.num_ranks, old.num_logical_experts)

    def order(self, new, plan="plan-1"):
        """Send Prepare, and Commit after a yes; the gate starts the move some steps later."""
        prepare = registered_prepare(self.agent, new, plan, batch_deadline_s=deadline(10))
        self.link.say(prepare)
        vote = self.link.expect(Vote)
        dist.barrier(group=self.lockstep)
        if vote.yes:
            self.link.say(Commit(LEADER, prepare.wave))
        return vote

    def sent(self, kind, enough, limit_s=30.0):
        """Return the rank's messages of a kind, once `enough(messages)` is true."""
        found: list[Any] = []
        end = time.monotonic() + deadline(limit_s)
        while not enough(found) and time.monotonic() < end:
            try:
                _, message = self.link.sent.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(message, kind):
                found.append(message)
        return found

    def reported(self, steps):
        """Return the steps, and their counts, of the reports of at least so many steps."""
        reports = self.sent(LoadReport, lambda got: sum(len(one.steps) for one in got) >= steps)
        self.sides = {report.side.value for report in reports}
        return (
            np.concatenate([report.steps for report in reports]),
            np.concatenate([report.counts for report in reports]),
        )


def is_told(said):
    """Return True if the Ack and the last layer's progress are among the messages."""
    whole = any(
        isinstance(one, StagingProgress) and one.bytes_done == one.bytes_total for one in said
    )
    return whole and any(isinstance(one, Ack) for one in said)


def expert_rows(layer: int, expert: int, version: int = 0) -> list[torch.Tensor]:
    """Return an expert's tensors: a float matrix, one-byte values, and a scale."""
    seed = torch.Generator().manual_seed(1_000_000 * version + 1000 * layer + expert)
    return [
        torch.randn(6, 4, generator=seed),
        torch.randint(0, 255, (8,), generator=seed, dtype=torch.uint8),
        torch.randn(1, generator=seed).to(torch.bfloat16),
    ]
