"""One EP group: its engine's steps, polls, restarts, reloads and idle times."""

from typing import Any

import numpy as np

from evenkeel_moe.model.ids import Epoch, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol import messages as msg
from tests.sim.checks import UNMATCHED_OPERATION
from tests.sim.copies import checksum
from tests.sim.rank import SimRank


class Fleet:
    """The engine and its supervisor.

    Step model: every rank passes its step boundary, then all exchange tokens. A rank that died or
    left makes the exchange fail, and the supervisor restarts the group as a new generation, warm
    from a map some rank had saved.
    """

    def __init__(
        self, world, shapes: dict, *, poll_every: int, resolve_after: int, name: str = "g"
    ) -> None:
        self.name = name
        self.world = world
        self.shapes = shapes
        self.num_ranks = next(iter(shapes.values())).num_ranks
        self.poll_every = poll_every
        self.resolve_after = resolve_after
        self.misconfigured = False
        """One rank has another K: the group must end up observe-only (R9)."""
        self.staging_experts = 4
        self.drop_after_s = 3.0
        self.step_s = 0.05
        self.idle = False
        self.ranks: list[Any] = []
        """`SimRank`s, or what offers the same."""
        self.generation = Generation("none")
        self.generations = 0
        self.steps = 0
        self.dirty = True
        """True if a byte or placement changed since the last check of all bytes."""
        self.polls: dict = {}
        self.failing_polls: dict = {}
        self.versions = dict.fromkeys(shapes, 1)
        self.saved = {deployment: [] for deployment in shapes}
        self.restarting = False
        self.reload: tuple | None = None
        self.rebalancing = None
        """The deployment whose experts the engine moves as soon as no rank holds a wave."""
        self.loading = 0
        """The ranks that loaded other weights and have not reported it; one reload at a time."""
        self._stray: dict = {}
        self._waiting: set = set()
        self._reduced: tuple = (-1, None)
        self._sums: dict = {}

    # --- lives of the group -----------------------------------------------------------------------

    def start(self) -> None:
        """Start a new generation with a placement that the supervisor picks."""
        world = self.world
        self.restarting = False
        self.generations += 1
        self.generation = Generation(f"{self.name}{self.generations}")
        self.polls.clear()
        self.failing_polls.clear()
        self.reload = None
        start = {}
        for deployment, shape in self.shapes.items():
            saved = self.saved[deployment]
            if not saved:
                placement, epoch = Placement.initial(shape), Epoch(0)
            elif world.rng.random() < 0.6:
                epoch, placement = max(saved, key=lambda pair: pair[0])
            else:
                epoch, placement = world.rng.choice(saved)
            self.saved[deployment] = [(epoch, placement)]
            start[deployment] = (placement, epoch, self.versions[deployment])
        incarnation = 100_000 + int(world.now * 1000) + self.generations
        self.make_ranks(incarnation, start)

    def make_ranks(self, incarnation: int, start: dict) -> None:
        """Make the ranks of a generation, and let their gates agree."""
        ranks = [
            SimRank(self, rank, self.generation, incarnation - self.clock_lag(), start)
            for rank in range(self.num_ranks)
        ]
        minima = np.minimum.reduce([rank.gate.agreement() for rank in ranks])
        for rank in ranks:
            rank.gate.settle(minima)
        self.begin(ranks, start)

    def begin(self, ranks: list, start: dict) -> None:
        """Let the ranks of a generation connect and take steps."""
        world, self.ranks = self.world, ranks
        for deployment, (placement, epoch, _) in start.items():
            world.checks.installed(deployment, self.generation, epoch, placement)
            world.checks.saved.add((deployment, self.generation, epoch))
        for rank in ranks:
            for site in rank.sites.values():
                world.after(0.2 * world.rng.random(), site.connect)
        self.dirty = True
        world.note(
            f"group starts as {self.generation}: {[(str(e), v) for _, e, v in start.values()]}"
        )
        world.after(self.step_s, self.step, self.generation)

    def stop(self) -> None:
        """End the group for good."""
        self.restarting = True
        for rank in self.ranks:
            rank.die()

    def close(self) -> None:
        """Free what the ranks hold, after the end of the run."""

    def clock_lag(self) -> int:
        """Return the milliseconds by which a rank's clock is slow; most are not."""
        return 5000 if self.world.rng.random() < 0.05 else 0

    def broken(self) -> None:
        """A rank is gone: the supervisor ends the other ranks and restarts the group."""
        if self.restarting:
            return
        self.restarting = True
        self.world.moment("group breaks", fleet=self)
        self.world.after(0.1 + 0.5 * self.world.rng.random(), self.restart)

    def restart(self) -> None:
        for rank in self.ranks:
            rank.die(planned=self.world.rng.random() < 0.7)
        self.world.after(0.2 + 0.8 * self.world.rng.random(), self.start)

    def remember(self, site, epoch, placement) -> None:
        """Save a rank's placement for the next start."""
        saved = self.saved[site.deployment]
        saved.append((epoch, placement))
        self.world.checks.saved.add((site.deployment, site.rank.generation, epoch))
        if len(saved) > 4 * self.num_ranks:
            del saved[: self.num_ranks]

    def gate_numbers(self, rank: int) -> tuple[int, int]:
        """Return (K, D) as configured on a rank."""
        extra = 1 if self.misconfigured and rank == self.num_ranks - 1 else 0
        return self.poll_every + extra, self.resolve_after

    # --- steps ------------------------------------------------------------------------------------

    def step(self, generation) -> None:
        """Let all ranks pass a step boundary; ranks with a poll pass it in random order."""
        if generation != self.generation or self.restarting:
            return
        world = self.world
        if self.idle or self.reload_blocks():
            world.after(0.2, self.step, generation)
            return
        due = [rank for rank in self.ranks if rank.alive and rank.advance()]
        self._waiting = {rank.rank for rank in self.ranks}
        if not due:
            self.exchange(generation)
            return
        busy = {rank.rank for rank in due}
        self._waiting = set(busy)
        for rank in due:
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
        self.rebalance()
        self.world.checks.step(self.ranks)
        if self.dirty:
            self.dirty = False
            for rank in self.ranks:
                for site in rank.sites.values():
                    self.world.checks.reachable(site)
        if len(self.polls) > 8:
            for old in sorted(self.polls)[:-4]:
                del self.polls[old]
        self.world.after(self.step_s * (0.8 + 0.4 * self.world.rng.random()), self.step, generation)

    def rebalance(self) -> None:
        """Let the engine move experts by itself, on every rank between the same two steps.

        Each rank takes over what the rank before it held.
        """
        if self.rebalancing is None or self.loading or self.reload is not None:
            return
        sites = [rank.sites[self.rebalancing] for rank in self.ranks]
        if any(site.participant.state != "idle" for site in sites):
            return
        old, slots = sites[0].map, self.shapes[self.rebalancing].slots_per_rank
        rows = np.roll(old.phy2log, slots, axis=1)
        placement = Placement(rows, old.num_ranks, old.num_logical_experts)
        self.move_experts(self.rebalancing, placement)
        self.rebalancing = None

    def move_experts(self, deployment, placement: Placement) -> None:
        """Let the engine switch to another placement by itself, on every rank between two steps."""
        self.world.note(f"the engine moves the experts of {deployment}")
        for rank in self.ranks:
            rank.sites[deployment].rebalanced(placement)
        self.dirty = True

    def stray_map(self, deployment, participant):
        """Return the map with which the engine ends a wave instead of the agreed one, or None.

        It is the same on all ranks: the map before the wave, or that with one layer switched.
        """
        world, wave = self.world, participant.wave
        key = deployment, self.generation, wave
        if key not in self._stray:
            found = None
            if not world.calm and world.rng.random() < world.stray_swaps:
                found, new = participant.placement, participant.next_placement
                layer = participant.prepare.body.layers[0]
                mixed = found.with_rows((layer,), new.phy2log[layer : layer + 1])
                if mixed.digest != new.digest and world.rng.random() < 0.5:
                    found = mixed
            self._stray[key] = found
        return self._stray[key]

    def replace(self, generation) -> None:
        """Restart the group unless it has restarted since."""
        if generation == self.generation:
            self.broken()

    # --- polls ------------------------------------------------------------------------------------

    def reduced(self, began: int):
        """Return the MIN over the ranks of the poll that began at a call."""
        key = (self.generation, began)
        if self._reduced[0] != key:
            vectors = list(self.polls[began].values())
            if len({len(vector) for vector in vectors}) != 1:
                self.world.checks.fail(
                    UNMATCHED_OPERATION, f"poll {began} has vectors of other lengths"
                )
            self._reduced = (key, np.minimum.reduce(vectors))
        return self._reduced[1]

    def fail_poll(self, ranks) -> None:
        """Let the next poll fail on these ranks."""
        for rank in ranks:
            self.failing_polls[rank] = True

    def poll_fails_at(self, rank: int, _began: int) -> bool:
        return self.failing_polls.pop(rank, False)

    # --- reloads (R4) -----------------------------------------------------------------------------

    def checksums(self, deployment, version: int) -> tuple[int, ...]:
        """Return the checksums every rank registers after load."""
        key = (deployment, version)
        if key not in self._sums:
            shape = self.shapes[deployment]
            self._sums[key] = tuple(
                checksum((version, layer, expert))
                for layer in range(shape.num_layers)
                for expert in range(shape.num_logical_experts)
            )
        return self._sums[key]

    def begin_reload(self, deployment, announced: bool) -> None:
        """The engine wants to load other weights on all ranks."""
        if self.reload is not None or self.loading or self.restarting:
            return
        self.world.note(f"reload of {deployment}, announced={announced}")
        if not announced:
            self.load(deployment, announced=False)
            return
        self.reload = (deployment, set())
        for rank in self.ranks:
            site = rank.sites[deployment]
            self.world.after(0.1 * self.world.rng.random(), site.feed, msg.ReloadRequested())

    def reload_permitted(self, site) -> None:
        """Note that one rank may load; when all may, they load between two steps."""
        if self.reload is not None and self.reload[0] == site.deployment:
            self.reload[1].add(site.rank.rank)

    def reload_blocks(self) -> bool:
        """Load if every rank permits it; return True if the step has to wait for that."""
        if self.reload is None:
            return False
        deployment, permitted = self.reload
        if len(permitted) < self.num_ranks:
            return False
        self.reload = None
        self.load(deployment, announced=True)
        return True

    def load(self, deployment, announced: bool) -> None:
        """Put new bytes into every slot; an announced reload delays the steps until all report."""
        if not all(rank.alive for rank in self.ranks):
            return
        self.versions[deployment] += 1
        version = self.versions[deployment]
        sums = self.checksums(deployment, version)
        for rank in self.ranks:
            site = rank.sites[deployment]
            site.version = version
            site.fill()
            event = msg.WeightsReloaded(version, sums)
            if announced:
                self.loading += 1
                self.world.after(0.05 * self.world.rng.random(), self.loaded, site, event)
            else:
                site.feed(event)
        self.dirty = True

    def loaded(self, site, event) -> None:
        """One rank reports that it has loaded the other weights."""
        self.loading -= 1
        site.feed(event)
