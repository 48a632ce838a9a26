"""A short run of the simulation, each mutant at a seed that catches it, and the scenarios."""

import random
import re

import pytest

from evenkeel_moe.protocol.control_messages import PersistDocument
from evenkeel_moe.protocol.rank.gate import Gate
from evenkeel_moe.protocol.rank.participant import Participant
from tests.explore.catalogue import MUTANT_WORLDS
from tests.sim.__main__ import main
from tests.sim.checks import AGENT_ERROR, TORN_MAP
from tests.sim.guests import run_guest_seed
from tests.sim.hazards import HAZARDS, LEFT_OUT, hazard_of
from tests.sim.kit import Kit
from tests.sim.mutants import BY_NAME, NOT_SIMULATED, RULES, Mutant, VotesYesAnyway
from tests.sim.run import FleetWorld, run_seed
from tests.sim.scenario import SCRIPTS, parse, play
from tests.sim.search import hunt
from tests.sim.store import StoreDown

CATCHING_SEEDS = {
    "R1": 6,
    "R2": 0,
    "R3c": 1,
    "R4": 12,
    "R5": 2,
    "R5b": 14,
    "R7": 43,
    "R8": 168,
    "R9": 155,
    "R9c": 9,
    "R10": 3,
    "R11": 6,
    "R12": 35,
    "R12b": 0,
    "R13": 7,
    "R14": 3,
    "R15": 3,
    "R16": 0,
    "R17": 6,
    "R17b": 6,
    "R17c": 14,
    "retiring": 2,
    "retired": 2,
    "old plans": 4,
    "save": 1,
    "barrier": 0,
    "gate": 15,
    "lock": 0,
    "hash": 4,
    "flight": 3,
    "batch": 1,
    "renew": 1,
    "reload": 10,
    "swap": 3,
    "map": 2,
    "under way": 3,
    "armed": 2,
}
"""A seed that catches each mutant. If the simulation has changed, the test searches for another."""
GUESTS = 18
"""The first seeds of an engine that moves its experts itself."""
SOUND = 120
"""The first seeds, run with the production parts."""


@pytest.mark.parametrize("first", range(0, SOUND, 20))
def test_no_invariant_breaks(first):
    waves = 0
    for seed in range(first, first + 20):
        outcome = run_seed(seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.detail}"
        waves += outcome.committed
    assert waves > 50, "plans run"


@pytest.mark.parametrize("name", CATCHING_SEEDS)
def test_every_rule_once_broken_is_caught(name):
    """A rule whose mutant survives is not needed, or not tested."""
    seed, mutant = CATCHING_SEEDS[name], BY_NAME[name]
    hazard, run = HAZARDS.get(mutant.hazard), run_guest_seed if mutant.guest else run_seed
    caught = hunt(name, 300, first=seed)
    assert caught.seed is not None, f"{mutant.breaks}: nothing noticed"
    assert run(caught.seed, hazard=hazard).violation is None, "the seed alone breaks nothing"


class FailsAtCommit(Participant):
    def _arm(self, commit):
        raise RuntimeError("injected")


def test_an_error_of_a_mutant_is_not_a_catch(monkeypatch):
    mutant = Mutant("fails", "nothing", Kit(participant=FailsAtCommit))
    monkeypatch.setitem(BY_NAME, "fails", mutant)
    assert run_seed(0, mutant.kit).violation == AGENT_ERROR
    assert hunt("fails", 5).seed is None


@pytest.mark.parametrize("first", range(0, GUESTS, 6))
def test_no_invariant_breaks_in_an_engine_that_moves_its_experts_itself(first):
    waves = 0
    for seed in range(first, first + 6):
        outcome = run_guest_seed(seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.detail}"
        waves += outcome.committed
    assert waves > 20, "plans run"


def test_every_rule_of_the_switch_has_a_mutant_and_every_mutant_is_caught():
    rules = {mutant.name.rstrip("bcd") for mutant in RULES}
    assert rules == {f"R{number}" for number in range(1, 18)}
    assert CATCHING_SEEDS.keys() == BY_NAME.keys() - NOT_SIMULATED.keys()
    assert NOT_SIMULATED.keys() - MUTANT_WORLDS.keys() == {"R2b", "R9b"}


def test_a_rank_that_obeys_a_leader_of_a_lower_term_changes_a_scenario():
    text = (SCRIPTS / "plan_id_used_again.txt").read_text()
    assert play(text, BY_NAME["R2b"].kit) != text


def test_a_swap_refuses_what_another_wave_has_staged():
    """R8: the same seed breaks the invariants once the swap does not compare the wave."""
    hazard = HAZARDS[BY_NAME["swap"].hazard]
    kit = Kit(worker=VotesYesAnyway)
    assert run_seed(CATCHING_SEEDS["swap"], kit, hazard=hazard).violation is None


def test_a_write_that_fails_may_have_happened():
    store, happened = FleetWorld(0).store, set()
    leader = store.acquire("c0", 1.0, 0)
    store.down = True
    for number in range(100):
        try:
            store.write(PersistDocument("control", {"number": number}), leader)
        except StoreDown:
            happened.add(store.shelf.control.get("number") == number)
    assert happened == {True, False}


def test_a_group_that_ended_for_good_starts_no_more():
    world = FleetWorld(0)
    world.begin()
    world.fleet.broken()
    world.fleet.stop()
    world.run_until(world.now + 5.0)
    world.close()
    assert world.fleet.generations == 1


class TakesAnyStep(Gate):
    def advance(self, step=None):
        return super().advance()


LEAVES_OUT_SEEDS = (0, 3)


def test_a_boundary_that_one_rank_leaves_out_ends_the_group_before_a_swap():
    """R9; without the comparison of the steps the ranks swap at different ones."""
    left = []
    for seed in LEAVES_OUT_SEEDS:
        outcome = run_seed(seed, hazard=LEFT_OUT, trace=True)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.detail}"
        left += [line for line in outcome.trace if "boundaries were left out" in line]
    assert left
    mutants = [run_seed(s, Kit(gate=TakesAnyStep), hazard=LEFT_OUT) for s in LEAVES_OUT_SEEDS]
    assert TORN_MAP in [outcome.violation for outcome in mutants]


def test_seed_replays_exactly():
    first, second = run_seed(3, trace=True), run_seed(3, trace=True)
    assert first.trace == second.trace and len(first.trace) > 100
    assert run_seed(3).events == first.events, "tracing changes nothing"


@pytest.mark.parametrize("name", HAZARDS)
def test_every_hazard_has_waves_and_breaks_nothing(name):
    outcomes = [run_seed(seed, hazard=HAZARDS[name]) for seed in range(1000, 1003)]
    assert [outcome.detail for outcome in outcomes if outcome.violation] == []
    assert sum(outcome.committed for outcome in outcomes)


def test_every_hazard_has_seeds_and_others_are_left():
    picked = [hazard_of(random.Random(f"hazard {seed}")) for seed in range(300)]
    assert set(picked) == {*HAZARDS.values(), None}
    assert 50 < picked.count(None) < 130


def test_the_command_replays_a_mutant(capsys):
    assert main(["--seed", str(CATCHING_SEEDS["swap"]), "--mutant", "swap"]) == 1
    assert "torn map" in capsys.readouterr().out


def test_last_line_names_what_was_run(capsys, monkeypatch):
    monkeypatch.setattr("tests.sim.__main__.NOT_SIMULATED", set(BY_NAME) - {"R1", "swap"})
    assert main(["--seeds", "2", "--mutant-seeds", "1", "--workers", "1"]) == 1, "mutants survive"
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"seeds 2 events \d+ waves \d+ failures 0 mutants \d/2", last)


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path):
    """`python -m tests.sim.scenario --rewrite` rewrites the traces; read the difference."""
    text = path.read_text()
    assert play(text) == text
    outputs = [line for _, _, expected in parse(text) for line in expected]
    assert outputs and not any(line.startswith("BROKEN") for line in outputs)
