"""The kinds of runs: ranks with the bare machines, and ranks with the real agent around them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.run import Outcome, run_seed


@dataclass(frozen=True)
class Kind:
    """One kind of runs."""

    name: str
    command: str
    run_seed: Callable[..., Outcome]
    """Runs (seed, kit, pairs, trace)."""
    mutants: tuple[Mutant, ...]
    covers_pairs: bool
    """True if a run must pass every pair of the machines' tables."""

    @property
    def by_name(self) -> dict[str, Mutant]:
        return {mutant.name: mutant for mutant in self.mutants}


def machines() -> Kind:
    """Return the runs of the bare machines."""
    return Kind("machines", "python -m tests.sim", run_seed, MUTANTS, True)


def agents() -> Kind:
    """Return the runs of real agents. They import torch, for which others need not wait."""
    from tests.sim.agents.mutants import GLUE_MUTANTS
    from tests.sim.agents.run import run_agent_seed

    return Kind("agents", "python -m tests.sim --agents", run_agent_seed, GLUE_MUTANTS, False)


def rules() -> Kind:
    """Return the runs of real agents whose mutants are those of the rules."""
    from tests.sim.agents.mutants import RULE_MUTANTS

    command = "python -m tests.sim --agents rules"
    return replace(agents(), name="rules", command=command, mutants=RULE_MUTANTS)


def guests() -> Kind:
    """Return the runs of real agents in an engine that moves its experts itself."""
    from tests.sim.agents.guests import run_guest_seed
    from tests.sim.agents.mutants import GUEST_MUTANTS

    command = "python -m tests.sim --agents guests"
    return Kind("guests", command, run_guest_seed, GUEST_MUTANTS, False)


KINDS = {"machines": machines, "agents": agents, "rules": rules, "guests": guests}
