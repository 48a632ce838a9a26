"""One EP group: its engine's steps, restarts, reloads and idle times."""

import contextlib
import dataclasses

import torch

from evenkeel_moe.engines.reference.resize import former_ranks, resized_placement
from evenkeel_moe.errors import EvenkeelError
from evenkeel_moe.model.ids import Epoch, EpRank, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.schedule.survivors import surviving_placement
from evenkeel_moe.protocol.messages import Lineage
from tests.sim.fabric import Fabric
from tests.sim.rank import SimRank


def kept_placement(placement: Placement, former: tuple, _shape) -> Placement:
    """Return what ranks that stay keep; refuse to lose an expert."""
    return resized_placement(placement, former)


class Fleet:
    """The engine and its supervisor.

    Step model: every rank passes its step boundary, then all exchange tokens. A rank that died or
    left makes the exchange fail, and the supervisor restarts the group as a new generation, warm
    from a map some rank had saved.
    """

    device = torch.device("cpu")
    rank_type: type[SimRank] = SimRank
    may_resize = True

    def __init__(
        self, world, shape, *, poll_every: int, resolve_after: int, name: str = "g"
    ) -> None:
        self.name = name
        self.world = world
        self.shape = shape
        self.num_ranks = shape.num_ranks
        self.poll_every = poll_every
        self.resolve_after = resolve_after
        self.misconfigured = False
        """One rank has another K: the group must end up observe-only (R9)."""
        self.staging_experts = 4
        self.drop_after_s = 3.0
        self.step_s = 0.05
        self.idle = False
        self.fabric: Fabric
        self.ranks: list[SimRank] = []
        self.arriving: list[SimRank] = []
        """The ranks that make their agents together."""
        self.generation = Generation("none")
        self.generations = 0
        self.steps = 0
        self.dirty = True
        """True if a byte or placement changed since the last check of all bytes."""
        self.failing_polls: set[int] = set()
        """The ranks whose next poll fails."""
        self.version = 1
        """The version of the weights."""
        self.saved: list = []
        self.restarting = False
        self.stopped = False
        self.reload: set | None = None
        """The ranks that permit a reload that was asked for; None if there is none."""
        self.loading = 0
        """The ranks that loaded other weights and have not reported it; one reload at a time."""
        self.unasked = False
        """True if the engine loads other weights before the next step, without asking."""
        self.lineages: list = []
        """Where each rank of the group comes from; empty for a group that comes from none."""
        self.wanted: tuple = ()
        """The former rank of each rank of the group that is to follow; empty if none is."""
        self.outlives = False
        """True if ranks that are left after a death go on without the dead."""
        self._waiting: set = set()

    # --- lives of the group -----------------------------------------------------------------------

    def start(self) -> None:
        """Start a new generation with a placement that the supervisor picks."""
        world = self.world
        if not self.saved:
            placement, epoch = Placement.initial(self.shape), Epoch(0)
        elif world.rng.random() < 0.6:
            epoch, placement = max(self.saved, key=lambda pair: pair[0])
        else:
            epoch, placement = world.rng.choice(self.saved)
        self.begin(epoch, placement, [])

    def begin(self, epoch: Epoch, placement: Placement, lineages: list) -> None:
        """Begin a new generation, unless the group was ended for good."""
        if self.stopped:
            return
        world = self.world
        self.restarting = False
        self.generations += 1
        self.generation = Generation(f"{self.name}{self.generations}")
        self.failing_polls.clear()
        self.reload, self.loading, self.unasked = None, 0, False
        self.saved, self.lineages, self.wanted = [(epoch, placement)], lineages, ()
        self.num_ranks = placement.num_ranks
        self.shape = dataclasses.replace(self.shape, num_ranks=self.num_ranks)
        incarnation = 100_000 + int(world.now * 1000) + self.generations
        self.fabric = Fabric(world, self.num_ranks, self.poll_error)
        self.arriving = [
            self.rank_type(
                self, rank, incarnation - self.clock_lag(), placement, epoch, self.version
            )
            for rank in range(self.num_ranks)
        ]
        self._waiting = set(range(self.num_ranks))
        for rank in self.arriving:
            rank.threads.start(rank.make_agent, "engine")

    def arrived(self, rank: SimRank) -> None:
        """A rank has made its agent; after the last one they connect, and the group takes steps."""
        self._waiting.discard(rank.rank)
        if self._waiting:
            return
        world = self.world
        self.ranks, self.arriving = self.arriving, []
        [(epoch, placement)] = self.saved
        world.checks.installed(self.generation, epoch, placement)
        world.checks.saved.add((self.generation, epoch))
        for each in self.ranks:
            world.after(0.2 * world.rng.random(), each.connect)
        self.dirty = True
        world.note(f"group starts as {self.generation}: {[(str(epoch), self.version)]}")
        world.after(self.step_s, self.step, self.generation)

    def stop(self) -> None:
        """End the group for good, also if its restart is under way."""
        self.restarting = self.stopped = True
        for rank in (*self.ranks, *self.arriving):
            rank.die()

    def close(self) -> None:
        """End all threads at the end of a run."""
        for rank in (*self.ranks, *self.arriving):
            rank.threads.ended = True
            rank.threads.unwind()

    def clock_lag(self) -> int:
        """Return the milliseconds by which a rank's clock is slow; most are not."""
        return 5000 if self.world.rng.random() < 0.05 else 0

    def broken(self) -> None:
        """A rank is gone: the supervisor ends the other ranks and restarts the group."""
        if self.restarting:
            return
        self.restarting = True
        self.world.moment("group breaks", fleet=self)
        then = self.outlive if self.outlives and self.ranks else self.restart
        self.world.after(0.1 + 0.5 * self.world.rng.random(), then)

    def resize(self, num_ranks: int, retire=()) -> None:
        """Let a group of another size follow after a step, once no expert is lost by that."""
        if self.may_resize and not self.restarting:
            with contextlib.suppress(EvenkeelError):
                self.wanted = former_ranks(self.num_ranks, num_ranks, retire)

    def follows(self, former: tuple, place) -> bool:
        """Let another group follow; return False if it cannot.

        Args:
            former: the rank that each of its ranks has in this group; None for one that joins.
            place: returns its placement from (placement, former, shape).
        """
        known = next(rank for rank in self.ranks if rank.alive)
        try:
            shape = dataclasses.replace(self.shape, num_ranks=len(former))
            placement = place(known.map, former, shape)
            placement.check(shape)
        except EvenkeelError:
            return False
        experts = shape.num_layers * shape.num_logical_experts
        pool = shape.pool_slots_per_rank
        if pool is not None and shape.num_ranks * pool == experts:
            return False  # No plan could move an expert without a free buffer.
        world, generation = self.world, self.generation
        world.note(f"group goes over to ranks {former} of {generation}")
        self.restarting = True
        lineages = [
            Lineage(generation, None if before is None else EpRank(before)) for before in former
        ]
        for rank in self.ranks:
            rank.die(planned=world.rng.random() < 0.7)
        epoch = Epoch(known.epoch + 1)
        world.after(0.1 + 0.5 * world.rng.random(), self.begin, epoch, placement, lineages)
        return True

    def outlive(self) -> None:
        """Go on without the dead, unless the state of a wave is unknown to a rank."""
        left = [rank for rank in self.ranks if rank.alive]
        if any(rank.rank in self._waiting for rank in left):
            self.world.after(0.1, self.outlive)  # It is in a step boundary.
            return
        sure = not any(rank.left for rank in self.ranks) and len({r.epoch for r in left}) == 1
        former = tuple(rank.rank for rank in left)
        if len(left) < 2 or not sure or not self.follows(former, surviving_placement):
            self.restart()

    def restart(self) -> None:
        for rank in self.ranks:
            rank.die(planned=self.world.rng.random() < 0.7)
        self.world.after(0.2 + 0.8 * self.world.rng.random(), self.start)

    def replace(self, generation) -> None:
        """Restart the group unless it has restarted since."""
        if generation == self.generation:
            self.broken()

    def remember(self, rank, epoch, placement) -> None:
        """Save a rank's placement for the next start."""
        self.saved.append((epoch, placement))
        self.world.checks.saved.add((rank.generation, epoch))
        if len(self.saved) > 4 * self.num_ranks:
            del self.saved[: self.num_ranks]

    def gate_numbers(self, rank: int) -> tuple[int, int]:
        """Return (K, D) as configured on a rank."""
        extra = 1 if self.misconfigured and rank == self.num_ranks - 1 else 0
        return self.poll_every + extra, self.resolve_after

    # --- steps ------------------------------------------------------------------------------------

    def step(self, generation) -> None:
        """Let all ranks pass a step boundary, in random order."""
        if generation != self.generation or self.restarting:
            return
        world = self.world
        if self.idle or self.reload_blocks():
            world.after(0.2, self.step, generation)
            return
        self._waiting = {rank.rank for rank in self.ranks}
        for rank in self.ranks:
            world.after(0.02 * world.rng.random(), rank.boundary)

    def boundary_done(self, rank) -> None:
        """A rank has passed its boundary; after the last one all ranks exchange tokens."""
        self._waiting.discard(rank.rank)
        if not self._waiting:
            self.world.after(0.001, self.exchange, self.generation)

    def exchange(self, generation) -> None:
        """Exchange tokens; if a rank is missing, the group breaks."""
        if generation != self.generation or self.restarting:
            return
        if not all(rank.alive for rank in self.ranks):
            self.broken()
            return
        self.steps += 1
        self.world.checks.step(self.ranks)
        if self.dirty:
            self.dirty = False
            for rank in self.ranks:
                self.world.checks.reachable(rank)
        if self.wanted and not self.loading and self.follows(self.wanted, kept_placement):
            return
        self.world.after(self.step_s * (0.8 + 0.4 * self.world.rng.random()), self.step, generation)

    # --- polls ------------------------------------------------------------------------------------

    def poll_error(self, rank: int) -> Exception | None:
        """Return the error that a poll's wait meets on a rank, or None."""
        if rank not in self.failing_polls:
            return None
        self.failing_polls.discard(rank)
        # The first is an error that backends raise, the second is one that nobody expects.
        return self.world.rng.choice((RuntimeError, OSError))("injected")

    # --- reloads (R4) -----------------------------------------------------------------------------

    def begin_reload(self, announced: bool) -> None:
        """The engine wants to load other weights on all ranks."""
        if self.reload is not None or self.unasked or self.loading or self.restarting:
            return
        self.world.note(f"reload, announced={announced}")
        if not announced:
            self.unasked = True
            return
        self.reload = set()
        for rank in self.ranks:
            self.world.after(0.1 * self.world.rng.random(), rank.request_reload)

    def reload_permitted(self, rank) -> None:
        """Note that one rank may load; when all may, they load between two steps."""
        if self.reload is not None:
            self.reload.add(rank.rank)

    def reload_blocks(self) -> bool:
        """Load between two steps; return True if the step has to wait for that."""
        if self.loading:
            return True
        permitted = self.reload is not None and len(self.reload) == self.num_ranks
        if not permitted and not self.unasked:
            return False
        self.reload, self.unasked = None, False
        self.load()
        return True

    def load(self) -> None:
        """Put new bytes into every slot, and let all agents register them."""
        if not all(rank.alive for rank in self.ranks):
            return
        self.version += 1
        for rank in self.ranks:
            rank.version = self.version
            rank.memory.fill()
            self.loading += 1
            rank.threads.start(rank.finish_reload, "engine")
        self.dirty = True
