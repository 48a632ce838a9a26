"""Seeds of the simulation in which the ranks run the real agent."""

from collections import Counter

from structlog.testing import capture_logs

from tests.sim.agents.fleet import AgentFleet
from tests.sim.agents.kit import AgentKit
from tests.sim.run import FleetWorld, Outcome, run_seed

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


def run_agent_seed(
    seed: int,
    kit: AgentKit | None = None,
    pairs: Counter | None = None,
    trace: bool = False,
) -> Outcome:
    """Run one seed with real agents to its end or to the first broken invariant."""
    with capture_logs() as logs:
        outcome = run_seed(seed, kit or AgentKit(), pairs, trace, world_type=AgentWorld)
    errors = [line for line in logs if line["event"] in ERRORS]
    if errors and outcome.violation is None:
        outcome.violation, outcome.detail = AGENT_ERROR, f"{errors[0]}"
    return outcome
