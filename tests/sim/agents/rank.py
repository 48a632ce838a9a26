"""A rank process that runs the real agent; offers what `SimRank` offers."""

from evenkeel_moe.agent.ports import GateFailed
from tests.sim.agents.site import AgentSite
from tests.sim.agents.threads import SimThreads
from tests.sim.network import NotLeading


class AgentRank:
    """One process of one rank: its threads, its agent, its engine."""

    site_type: type[AgentSite] = AgentSite

    def __init__(self, fleet, rank: int, generation, incarnation: int, start: dict) -> None:
        self.fleet = fleet
        self.world = fleet.world
        self.rank = rank
        self.generation = generation
        self.incarnation = incarnation
        self.alive = True
        self.leaves_out = 0
        """The next boundaries that the engine leaves out by mistake."""
        self.threads = SimThreads(self.world)
        self.sites = {
            deployment: self.site_type(self, deployment, placement, epoch, version)
            for deployment, (placement, epoch, version) in start.items()
        }

    @property
    def comm_serial(self) -> int:
        """The number of the transfer communicator on which the gate agreed."""
        [site] = self.sites.values()
        return site.agent._gate.transport_serial

    def begin(self) -> None:
        """Make the agent together with the other ranks."""
        [site] = self.sites.values()
        site.make_agent()
        self.fleet.arrived(self)

    def told(self, moment: str, site) -> None:
        """Report a moment once the running thread waits."""
        self.world.after(0.0, self.tell, moment, site)

    def tell(self, moment: str, site) -> None:
        if self.alive:
            self.world.moment(moment, rank=self, site=site)

    # --- messages ---------------------------------------------------------------------------------

    def on_message(self, stream, message) -> None:
        """Take a controller's message, also after its stream broke."""
        if not self.alive:
            return
        if isinstance(message, NotLeading):
            self.on_stream_closed(stream)
        else:
            self.sites[stream.deployment].take(stream, message)

    def on_stream_closed(self, stream) -> None:
        self.sites[stream.deployment].closed(stream)

    # --- step boundary ----------------------------------------------------------------------------

    def advance(self) -> bool:
        """Return True: the agent counts its boundaries itself."""
        return True

    def boundary(self) -> None:
        """Pass the step boundary, on the engine's thread."""
        if self.alive:
            self.threads.start(self.pass_boundary, "engine")

    def pass_boundary(self) -> None:
        [site] = self.sites.values()
        try:
            if not self.leaves_boundary_out(site.agent._gate):
                self.take_step(site)
        except GateFailed as error:
            self.leave(f"{error.reason}: {error}")
            return
        self.fleet.boundary_done(self)

    def take_step(self, site) -> None:
        site.agent.step_boundary(self.fleet.steps)

    def leaves_boundary_out(self, gate) -> bool:
        """Return True if the engine leaves this boundary out by mistake.

        Never that of a swap: then only an engine whose exchange carries the epoch notices (R8).
        """
        if not self.leaves_out or (gate.polling and gate.calls + 1 >= gate.next_due):
            return False
        self.leaves_out -= 1
        return True

    # --- ends -------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Stop the process for so long, as a debugger or a full disk does."""
        if self.alive:
            self.world.note(f"rank {self.rank} is paused for {seconds:.1f} s")
            self.threads.pause(seconds)

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
        self.threads.end()
        for site in self.sites.values():
            if planned:
                site.beat(stopping=True)
            if site.stream is not None:
                self.world.network.cut(site.stream)
        self.fleet.fabric.died(self.rank)
        self.fleet.broken()
