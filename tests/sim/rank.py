"""A rank process: its sites, its gate, and its transfer communicator."""

from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.rank.gate import PollFailed, PollResolved
from tests.sim.checks import UNMATCHED_OPERATION
from tests.sim.network import NotLeading, describe
from tests.sim.site import Site


class SimRank:
    """One process of one rank."""

    def __init__(self, fleet, rank: int, generation, incarnation: int, start: dict) -> None:
        self.fleet = fleet
        self.world = fleet.world
        self.rank = rank
        self.generation = generation
        self.incarnation = incarnation
        self.alive = True
        self.comm_serial = 0
        self.comm_broken = False
        self.sites = {
            deployment: Site(self, deployment, placement, epoch, version)
            for deployment, (placement, epoch, version) in start.items()
        }
        poll_every, resolve_after = fleet.gate_numbers(rank)
        self.gate = self.world.kit.gate(
            [site.participant for site in self.sites.values()],
            poll_every=poll_every,
            resolve_after=resolve_after,
        )

    # --- messages ---------------------------------------------------------------------------------

    def on_message(self, stream, message) -> None:
        """Take a controller's message, also after its stream broke."""
        if not self.alive:
            return
        site = self.sites[stream.deployment]
        if isinstance(message, NotLeading):
            self.on_stream_closed(stream)
            return
        if stream is site.stream:
            site.heard_at = self.world.now
        if self.world.trace_lines is not None:
            self.world.note(f"rank {self.rank} <- {describe(message)}")
        before = site.participant.state
        site.carry(
            site.participant.handle(msg.FromController(stream.number, message), self.world.now)
        )
        if site.participant.state is not before:
            self.world.moment(f"rank is {site.participant.state}", rank=self, site=site)

    def on_stream_closed(self, stream) -> None:
        self.sites[stream.deployment].closed(stream)

    # --- step boundary ----------------------------------------------------------------------------

    def advance(self) -> bool:
        """Count a step boundary; return True if `boundary` must be called."""
        return self.gate.advance()

    def boundary(self) -> None:
        """Use and begin polls, after `gate.advance()` returned True."""
        if not self.alive:
            return
        gate, fleet = self.gate, self.fleet
        if gate.resolve_due:
            began = gate.calls - gate.resolve_after
            vectors = fleet.polls.get(began, {})
            if len(vectors) < len(fleet.ranks):
                detail = (
                    f"rank {self.rank} uses poll {began}, begun only by ranks {sorted(vectors)}"
                )
                self.world.checks.fail(UNMATCHED_OPERATION, detail)
            failed = fleet.poll_fails_at(self.rank, began)
            result = PollFailed("injected") if failed else PollResolved(fleet.reduced(began))
            for item in gate.handle(result, self.world.now):
                self.carry_gate(item)
                if not self.alive:
                    return
            swapping = [s for s in self.sites.values() if s.participant.state == "swapping"]
            if swapping:
                delay = (
                    0.03 if self.world.calm else self.world.slow_swaps
                ) * self.world.rng.random()
                self.world.after(delay, self.finish_swaps, swapping)
                return
        self.begin_poll()

    def carry_gate(self, item) -> None:
        match item.action:
            case msg.Swap():
                self.world.note(
                    f"rank {self.rank} swaps {item.action.wave.plan_id} to {item.action.epoch}"
                )
                self.world.moment("rank swaps", rank=self, site=self.sites[item.deployment])
                site = self.sites[item.deployment]
                if self.alive and self.fleet.stray_map(item.deployment, site.participant) is None:
                    site.swap(item.action)
            case msg.LeaveGroup(reason=reason, detail=detail):
                self.leave(f"{reason}: {detail}")
            case msg.RebuildTransport(serial=serial):
                self.rebuild(serial)
            case _:
                self.sites[item.deployment].carry([item.action])

    def finish_swaps(self, sites) -> None:
        if not self.alive:
            return
        for site in sites:
            part = site.participant
            if part.state != "swapping":
                continue
            if not self.world.calm and self.world.rng.random() < self.world.failing_swaps:
                site.feed(msg.SwapFailed(part.wave, "injected"))
                return
            stray = self.fleet.stray_map(site.deployment, part)
            if stray is not None:
                site.job = None
                site.rebalanced(stray)
                continue
            site.finish_swap()
            if not self.alive:
                return
        self.begin_poll()

    def begin_poll(self) -> None:
        gate = self.gate
        if gate.poll_due:
            self.fleet.polls.setdefault(gate.calls, {})[self.rank] = gate.begin_poll(self.world.now)
            armed = any(site.participant.state == "armed" for site in self.sites.values())
            self.world.moment("rank polls armed" if armed else "rank polls", rank=self)
            for site in self.sites.values():
                if site.wants_to_drop():
                    self.world.moment("rank polls to drop", rank=self, site=site)
        self.fleet.boundary_done(self)

    # --- transport communicator (R10) -------------------------------------------------------------

    def abort_communicator(self) -> None:
        """Abort the communicator after a batch's deadline; bytes in flight may still arrive."""
        if self.comm_broken:
            return
        self.world.note(f"rank {self.rank} aborts communicator {self.comm_serial}")
        self.comm_broken = True
        self.gate.request_rebuild(self.comm_serial)
        for site in self.sites.values():
            if site.job is not None:
                site.job.fail("transfer_timeout")

    def rebuild(self, serial: int) -> None:
        self.comm_serial = Epoch(serial)
        self.comm_broken = True
        for site in self.sites.values():
            if site.job is not None:
                site.job.fail("transfer_failed")
        self.world.after(0.05 + 0.1 * self.world.rng.random(), self.rebuilt, serial)

    def rebuilt(self, serial: int) -> None:
        if self.alive and self.comm_serial == serial:
            self.comm_broken = False
            for site in self.sites.values():
                if site.job is not None:
                    site.job.check_drained()

    # --- ends -------------------------------------------------------------------------------------

    def leave(self, why: str) -> None:
        """Leave the group; the engine restarts it."""
        if self.alive:
            self.world.note(f"rank {self.rank} leaves: {why}")
            self.die()

    def die(self, planned: bool = False) -> None:
        """End the process; if planned, its last heartbeat says so, and may be lost."""
        if not self.alive:
            return
        self.alive = False
        for site in self.sites.values():
            if planned:
                site.beat(stopping=True)
            if site.stream is not None:
                self.world.network.cut(site.stream)
        self.fleet.broken()
