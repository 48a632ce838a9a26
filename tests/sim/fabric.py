"""The network between the ranks of a group: backends that stand in for Gloo's process groups.

The real `Communicator` runs over them. Halves of a copy meet by source, target and tag; the bytes
are copied when they land, also after a rank has aborted its communicator, as with Gloo.
"""

from collections import defaultdict, deque

import torch

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.errors import Unavailable
from tests.sim.checks import UNMATCHED_OPERATION
from tests.sim.threads import SimThreads

CONNECT_S = 1.0
"""A rank waits so long for the others when they connect."""
HANG_UP_S = 0.3
"""An operation ends within this time after a rank that it needs has hung up."""
COLLECTIVE_S = 0.004
"""The longest time of a collective, from the last rank on."""


class OperationFailed(RuntimeError):
    """An operation of several ranks failed, as backends report it."""


class SimWork:
    """An operation in flight on one rank."""

    def __init__(self, backend: "SimBackend", tensor: torch.Tensor, peer: int | None) -> None:
        self.backend = backend
        self.threads = backend.threads
        self.tensor = tensor
        self.peer = peer
        """The other rank of a copy; None for a collective."""
        self.met = False
        """True once the other ranks have come."""
        self.over = False
        self.error = ""
        self._waiting: list = []

    def end(self, error: str = "") -> None:
        """End the operation; its memory is not written any more."""
        if not self.over:
            self.over, self.error = True, error
            self.threads.notify_all(self._waiting)

    def end_unmet(self) -> None:
        """End the operation, unless the other ranks have come, because one has hung up."""
        if not self.met:
            self.end("a rank has hung up")

    def wait(self, timeout=None) -> bool:
        """Return once it is over; raise RuntimeError if it failed or the time has passed."""
        if not self.over:
            seconds = None if timeout is None else timeout.total_seconds()
            self.threads.wait(self._waiting, seconds)
        if not self.over:
            raise RuntimeError("timed out")
        if self.error:
            raise OperationFailed(self.error)
        return True


class SimPoll(SimWork):
    """A reduction of the gate, whose result a rank may fail to get."""

    def wait(self, timeout=None) -> bool:
        error = self.backend.group.poll_error(self.backend.rank) if timeout is not None else None
        if error is not None:
            raise error
        return super().wait(timeout)


class SimBackend:
    """One rank's end of a communicator; has the methods of Gloo's backend that are used."""

    def __init__(self, group: "SimGroup", rank: int, threads: SimThreads) -> None:
        self.group = group
        self.rank = rank
        self.threads = threads
        self.gone = False
        """True once this rank has aborted it or died."""
        self.works: list[SimWork] = []
        self.calls = 0

    def allreduce(self, tensors, _options) -> SimWork:
        [value] = tensors
        work = self._work(value, poll=True)

        def reduce(works) -> None:
            least = torch.stack([each.tensor for each in works]).amin(dim=0)
            for each in works:
                each.tensor.copy_(least)

        self.group.join(self, "allreduce", work, reduce)
        return work

    def allgather(self, gathered, tensors) -> SimWork:
        [value], [rows] = tensors, gathered
        work = self._work(value)
        work.rows = rows  # type: ignore[attr-defined]

        def gather(works) -> None:
            for each in works:
                for row, other in zip(each.rows, works, strict=True):
                    row.copy_(other.tensor)

        self.group.join(self, "allgather", work, gather)
        return work

    def send(self, tensors, peer: int, tag: int) -> SimWork:
        return self._post(tensors[0], self.rank, peer, tag, sends=True)

    def recv(self, tensors, peer: int, tag: int) -> SimWork:
        return self._post(tensors[0], peer, self.rank, tag, sends=False)

    def abort(self) -> None:
        """Hang up: what has not met its other half ends with an error, here and at the peers."""
        if not self.gone:
            self.gone = True
            self.group.end_unmet_soon()

    def _work(self, tensor, peer: int | None = None, poll: bool = False) -> SimWork:
        self.works = [work for work in self.works if not work.over]
        self.works.append((SimPoll if poll else SimWork)(self, tensor, peer))
        return self.works[-1]

    def _post(self, tensor, source: int, target: int, tag: int, *, sends: bool) -> SimWork:
        work = self._work(tensor, target if sends else source)
        self.group.post(work, source, target, tag, sends=sends)
        return work


class SimGroup:
    """One communicator over all ranks."""

    def __init__(self, world, size: int, name: str, poll_error) -> None:
        self.world = world
        self.size = size
        self.name = name
        self.poll_error = poll_error
        """Called with a rank that waits for a poll; returns an error to raise, or None."""
        self.backends: dict[int, SimBackend] = {}
        self.waiting: list = []
        self._collectives: dict = defaultdict(dict)
        self._halves: dict = defaultdict(deque)

    # --- collectives ------------------------------------------------------------------------------

    def join(self, backend: SimBackend, kind: str, work: SimWork, finish) -> None:
        """Enter the next collective of a rank; it runs when all ranks have entered it."""
        backend.calls += 1
        entered = self._collectives[backend.calls]
        entered[backend.rank] = kind, work
        kinds = {(kind, tuple(work.tensor.shape)) for kind, work in entered.values()}
        if len(kinds) > 1:
            detail = f"collective {backend.calls} of {self.name} is {sorted(kinds)}"
            self.world.checks.fail(UNMATCHED_OPERATION, detail)
        if len(entered) < self.size:
            self.end_unmet_soon()
            return
        del self._collectives[backend.calls]
        works = [entered[rank][1] for rank in range(self.size)]
        for each in works:
            each.met = True
        delay = COLLECTIVE_S * self.world.rng.random()
        self.world.after(delay, self.finish_collective, works, finish)

    def finish_collective(self, works, finish) -> None:
        finish(works)
        for work in works:
            work.end()

    # --- copies -----------------------------------------------------------------------------------

    def post(self, work: SimWork, source: int, target: int, tag: int, *, sends: bool) -> None:
        """Post one half of a copy; the bytes travel once both halves are there."""
        others = self._halves[source, target, tag, not sends]
        while others and (others[0].over or others[0].backend.gone):
            others.popleft()
        if not others:
            self._halves[source, target, tag, sends].append(work)
            self.end_unmet_soon()
            return
        other = others.popleft()
        out, into = (work, other) if sends else (other, work)
        out.met = into.met = True
        world = self.world
        if out.tensor.nbytes != into.tensor.nbytes:
            detail = f"{out.tensor.nbytes} bytes are sent, {into.tensor.nbytes} are received"
            world.checks.fail(UNMATCHED_OPERATION, f"{self.name}, {source} to {target}: {detail}")
        first_exchange = out.tensor.nbytes == 1
        delay = 0.002 if first_exchange else world.copy_delay(world.timing.batch_deadline_s)
        world.after(delay, self.land, out, into, not first_exchange and world.corrupts())

    def land(self, out: SimWork, into: SimWork, damaged: bool) -> None:
        """Write the bytes to their memory, also if the receiver has hung up meanwhile."""
        if out.threads.ended:
            into.end("the sender has died")
            return
        if not into.over and not into.threads.ended:
            into.tensor.copy_(out.tensor)
            if damaged:
                into.tensor[0] += 1
        into.end()
        out.end()

    # --- ends -------------------------------------------------------------------------------------

    def end_unmet_soon(self) -> None:
        """End what waits for a rank that has hung up."""
        gone = {rank for rank, backend in self.backends.items() if backend.gone}
        for rank, backend in self.backends.items() if gone else ():
            for work in backend.works:
                needs = gone if work.peer is None else gone & {rank, work.peer}
                if needs and not work.met:
                    self.world.after(HANG_UP_S * self.world.rng.random(), work.end_unmet)


class Fabric:
    """All communicators of one generation of a group."""

    def __init__(self, world, size: int, poll_error) -> None:
        self.world = world
        self.size = size
        self._poll_error = poll_error
        self._groups: dict[str, SimGroup] = {}

    def connect(self, rank: int, threads: SimThreads, name: str) -> Communicator:
        """Connect all ranks, on a thread of a rank.

        Raises:
            Unavailable: not all ranks came in time.
        """
        group = self._groups.setdefault(
            name, SimGroup(self.world, self.size, name, self._poll_error)
        )
        group.backends[rank] = backend = SimBackend(group, rank, threads)
        if len(group.backends) == self.size:
            threads.notify_all(group.waiting)
        elif not threads.wait(group.waiting, CONNECT_S):
            backend.gone = True
            raise Unavailable(f"communicator {name}: not all ranks came")
        return Communicator(backend, rank, self.size, torch.device("cpu"))

    def died(self, rank: int) -> None:
        """End what waits for a process that has died."""
        for group in self._groups.values():
            if rank in group.backends:
                group.backends[rank].abort()
