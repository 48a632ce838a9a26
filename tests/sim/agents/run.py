"""Seeds of the simulation in which the ranks run the real agent."""

import random
from collections import Counter

from structlog.testing import capture_logs

from tests.sim.agents.fleet import AgentFleet
from tests.sim.agents.hazards import hazard_of
from tests.sim.agents.kit import AgentKit
from tests.sim.focus import Focus
from tests.sim.run import FleetWorld, Outcome, run_seed

LATE_S = 4.0
"""Late bytes land within this time after the deadline of their batch."""
PROBES = 0.3
"""Share of the seeds in which engines have probes."""
AGENT_ERROR = "error of the agent"
ERRORS = frozenset(
    {"participant_failed", "transfer_job_failed", "staging_failed", "staging_broke_off"}
)
"""Log lines of errors that the agent survives. The simulation injects none of them."""


class AgentWorld(FleetWorld):
    """A whole deployment whose ranks run the real agent."""

    fleet_type = AgentFleet
    sizes = (2, 3, 4)
    second_deployment = 0.0
    late_copies = 0.0
    """Probability that the bytes of a copy land seconds after the deadline of its batch."""

    def configure(self, rng) -> None:
        super().configure(rng)
        self.probes = random.Random(f"probes {self.seed}").random() < PROBES
        """True if engines probe what experts compute, which hides wrong bytes from the checks."""

    def begin(self) -> None:
        """Start the group before the controllers, whose moments need ranks."""
        self.fleet.start()
        self.run_until(1.0, lambda: bool(self.fleet.ranks))
        for replica in self.replicas:
            replica.start()

    def copy_delay(self, deadline: float) -> float:
        delay = super().copy_delay(deadline)
        if not self.calm and self.rng.random() < self.late_copies:
            delay = deadline + LATE_S * self.rng.random()
        return delay


def run_agent_seed(
    seed: int,
    kit: AgentKit | None = None,
    pairs: Counter | None = None,
    trace: bool = False,
    hazard: Focus | None = None,
    world_type: type[AgentWorld] = AgentWorld,
) -> Outcome:
    """Run one seed with real agents to its end or to the first broken invariant.

    Args:
        hazard: in place of the seed's own.
        world_type: the kind of engine.
    """
    hazard = hazard or hazard_of(random.Random(f"hazard {seed}"))
    with capture_logs() as logs:
        outcome = run_seed(seed, kit or AgentKit(), pairs, trace, hazard, world_type)
    errors = [line for line in logs if line["event"] in ERRORS]
    if errors and outcome.violation is None:
        outcome.violation, outcome.detail = AGENT_ERROR, f"{errors[0]}"
    return outcome
