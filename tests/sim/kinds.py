"""The kinds of runs: ranks with the bare machines, and ranks with the real agent around them."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.agents.mutants import GLUE_MUTANTS
from tests.sim.agents.run import run_agent_seed
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


MACHINES = Kind("machines", "python -m tests.sim", run_seed, MUTANTS, True)
AGENTS = Kind("agents", "python -m tests.sim --agents", run_agent_seed, GLUE_MUTANTS, False)
KINDS = {kind.name: kind for kind in (MACHINES, AGENTS)}
