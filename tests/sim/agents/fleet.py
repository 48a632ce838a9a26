"""One EP group whose ranks run the real agent."""

import torch

from tests.sim.agents.fabric import Fabric
from tests.sim.agents.rank import AgentRank
from tests.sim.fleet import Fleet


class AgentFleet(Fleet):
    """The engine and its supervisor, over ranks with real agents."""

    device = torch.device("cpu")
    rank_type: type[AgentRank] = AgentRank

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.fabric: Fabric
        self.arriving: list[AgentRank] = []
        """The ranks that make their agents together."""
        self._starting: dict = {}
        self._unasked: list = []
        """Deployments that load other weights before the next step, without asking."""

    # --- lives of the group -----------------------------------------------------------------------

    def make_ranks(self, incarnation: int, start: dict) -> None:
        self.fabric = Fabric(self.world, self.num_ranks, self.poll_error)
        self.loading = 0
        self._starting, self._unasked = start, []
        self.arriving = [
            self.rank_type(self, rank, self.generation, incarnation - self.clock_lag(), start)
            for rank in range(self.num_ranks)
        ]
        self._waiting = {rank.rank for rank in self.arriving}
        for rank in self.arriving:
            rank.threads.start(rank.begin, "engine")

    def arrived(self, rank: AgentRank) -> None:
        """A rank has made its agent; after the last one the group takes steps."""
        self._waiting.discard(rank.rank)
        if not self._waiting:
            ranks, self.arriving = self.arriving, []
            self.begin(ranks, self._starting)

    def stop(self) -> None:
        super().stop()
        for rank in self.arriving:
            rank.die()

    def close(self) -> None:
        """End all threads at the end of a run."""
        for rank in (*self.ranks, *self.arriving):
            rank.threads.ended = True
            rank.threads.unwind()

    def poll_error(self, rank: int) -> Exception | None:
        """Return the error that a poll's wait meets on a rank, or None."""
        if not self.poll_fails_at(rank, 0):
            return None
        # The first is an error that backends raise, the second is one that nobody expects.
        return self.world.rng.choice((RuntimeError, OSError))("injected")

    # --- reloads ----------------------------------------------------------------------------------

    def begin_reload(self, deployment, announced: bool) -> None:
        if announced or self.loading or self.restarting:
            super().begin_reload(deployment, announced)
        elif self.reload is None:
            self._unasked.append(deployment)

    def reload_blocks(self) -> bool:
        """Load between two steps; return True if the step has to wait for that."""
        if self.loading:
            return True
        if self._unasked:
            self.load(self._unasked.pop(), announced=False)
            return True
        return super().reload_blocks()

    def load(self, deployment, announced: bool) -> None:
        """Put new bytes into every slot, and let all agents register them."""
        del announced
        if not all(rank.alive for rank in self.ranks):
            return
        self.versions[deployment] += 1
        for rank in self.ranks:
            site = rank.sites[deployment]
            site.version = self.versions[deployment]
            site.fill()
            self.loading += 1
            rank.threads.start(site.finish_reload, "engine")
        self.dirty = True

    def rebalance(self) -> None:
        """The engine leaves its experts where they are."""
        self.rebalancing = None
