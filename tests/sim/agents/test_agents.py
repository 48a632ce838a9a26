"""A short run with real agents, and each mutant of the glue at a seed that catches it."""

import random

import pytest

from evenkeel_moe.protocol.rank.gate import Gate
from tests.sim.__main__ import main
from tests.sim.agents.guests import run_guest_seed
from tests.sim.agents.hazards import FAILING_POLLS, HAZARDS, LEFT_OUT, RELOADS, hazard_of
from tests.sim.agents.kit import AgentKit
from tests.sim.agents.mutants import (
    GLUE_BY_NAME,
    GLUE_MUTANTS,
    GUEST_MUTANTS,
    RULE_MUTANTS,
    VotesYesAnyway,
)
from tests.sim.agents.run import run_agent_seed
from tests.sim.checks import TORN_MAP
from tests.sim.search import hunt

CATCHING_SEEDS = {
    "save": 0,
    "barrier": 0,
    "gate": 3,
    "lock": 0,
    "hash": 2,
    "flight": 52,
    "batch": 10,
    "renew": 1,
    "reload": 14,
    "swap": 11,
}
"""A seed that catches each mutant. If the simulation has changed, the test searches for another."""


CATCHING_RULES = {"R3c": 0, "R5": 0, "R9": 3, "R10": 4, "R13": 24, "R14": 3}
"""A seed that catches a mutant of a rule; the others need more seeds, or the bare machines."""

CATCHING_GUESTS = {"map": (4, None), "under way": (24, RELOADS), "armed": (0, FAILING_POLLS)}
"""The same for an engine that moves its experts itself, with the hazard of the seed."""

GUESTS = 18
"""The first seeds of such an engine."""

SOUND = 24
"""The first seeds, run with the production parts."""


@pytest.mark.parametrize("first", range(0, SOUND, 8))
def test_no_invariant_breaks_with_real_agents(first):
    waves = 0
    for seed in range(first, first + 8):
        outcome = run_agent_seed(seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.detail}"
        waves += outcome.committed
    assert waves > 20, "plans run"


@pytest.mark.parametrize("name", [mutant.name for mutant in GLUE_MUTANTS])
def test_every_mistake_in_the_glue_is_caught(name):
    seed = CATCHING_SEEDS[name]
    assert seed < SOUND or run_agent_seed(seed).violation is None, "the seed alone breaks nothing"
    known = run_agent_seed(seed, GLUE_BY_NAME[name].kit)
    if known.violation is None:
        found = hunt(name, 200, "agents")
        assert found.invariant, f"{GLUE_BY_NAME[name].breaks}: nothing noticed"


@pytest.mark.parametrize("first", range(0, GUESTS, 6))
def test_no_invariant_breaks_in_an_engine_that_moves_its_experts_itself(first):
    waves = 0
    for seed in range(first, first + 6):
        outcome = run_guest_seed(seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.detail}"
        waves += outcome.committed
    assert waves > 20, "plans run"


@pytest.mark.parametrize("mutant", GUEST_MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mistake_around_the_engines_moves_is_caught(mutant):
    seed, hazard = CATCHING_GUESTS[mutant.name]
    assert run_guest_seed(seed, hazard=hazard).violation is None, "the seed alone breaks nothing"
    seeds = (seed, *range(60))
    assert any(run_guest_seed(one, mutant.kit, hazard=hazard).violation for one in seeds)


@pytest.mark.parametrize("name", CATCHING_RULES)
def test_a_broken_rule_is_caught_with_real_agents_too(name):
    kits = {mutant.name: mutant.kit for mutant in RULE_MUTANTS}
    known = run_agent_seed(CATCHING_RULES[name], kits[name])
    if known.violation is None:
        assert hunt(name, 60, "rules").invariant, f"{name}: nothing noticed"


def test_a_swap_refuses_what_another_wave_has_staged():
    """R8: the same seed breaks the invariants once the swap does not compare the wave."""
    outcome = run_agent_seed(CATCHING_SEEDS["swap"], AgentKit(worker=VotesYesAnyway))
    assert outcome.violation is None


class TakesAnyStep(Gate):
    def advance(self, step=None):
        return super().advance()


LEAVES_OUT_SEEDS = (0, 3)


def test_a_boundary_that_one_rank_leaves_out_ends_the_group_before_a_swap():
    """R9; without the comparison of the steps the ranks swap at different ones."""
    left = []
    for seed in LEAVES_OUT_SEEDS:
        outcome = run_agent_seed(seed, hazard=LEFT_OUT, trace=True)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.detail}"
        left += [line for line in outcome.trace if "boundaries were left out" in line]
    assert left
    mutants = (
        run_agent_seed(seed, AgentKit(gate=TakesAnyStep), hazard=LEFT_OUT)
        for seed in LEAVES_OUT_SEEDS
    )
    assert any(outcome.violation == TORN_MAP for outcome in mutants)


def test_a_seed_with_agents_replays_exactly():
    first, second = run_agent_seed(3, trace=True), run_agent_seed(3, trace=True)
    assert first.trace == second.trace and len(first.trace) > 100
    assert run_agent_seed(3).events == first.events, "tracing changes nothing"


def test_every_hazard_has_seeds_and_others_are_left():
    picked = [hazard_of(random.Random(f"hazard {seed}")) for seed in range(200)]
    assert set(picked) == {*HAZARDS, None}
    assert 50 < picked.count(None) < 110


def test_the_command_runs_agents(capsys):
    assert main(["--agents", "--seed", "11", "--mutant", "swap"]) == 1
    assert "torn map" in capsys.readouterr().out
    assert main(["--agents", "rules", "--seed", "0", "--mutant", "R3c"]) == 1
    assert "records disagree" in capsys.readouterr().out
