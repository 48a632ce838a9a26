"""A short run of the simulation, every mutant at a seed that catches it, and the scenario scripts."""

import re
from collections import Counter

import pytest

from evenkeel.protocol.tables import CONTROL, COORDINATOR, PARTICIPANT
from tests.sim.__main__ import main
from tests.sim.kit import all_pairs
from tests.sim.mutants import BY_NAME, MUTANTS
from tests.sim.run import run_seed
from tests.sim.scenario import SCRIPTS, parse, play
from tests.sim.search import hunt

CATCHING_SEEDS = {
    "R1": 81,
    "R2": 3,
    "R3": 55,
    "R4": 22,
    "R5": 0,
    "R6": 555,
    "R7": 216,
    "R7b": 114,
    "R8": 440,
    "R9": 0,
    "R9b": 78,
    "R10": 10,
    "R11": 9,
    "R12": 10,
    "R13": 10,
    "R14": 39,
    "R15": 1,
    "R16": 2199,
    "R17": 9,
}
"""Where the search found each mutant; a changed simulation finds them elsewhere, the test searches then."""


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_no_invariant_breaks(first):
    for seed in range(first, first + 40):
        outcome = run_seed(seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.detail}"


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_every_rule_once_broken_is_caught(name):
    """A rule whose mutant survives is not needed, or not tested."""
    known = run_seed(CATCHING_SEEDS[name], BY_NAME[name].kit)
    if known.violation is None:
        assert hunt(name, 2500).invariant, f"{BY_NAME[name].breaks}: nothing noticed"
    sound = run_seed(CATCHING_SEEDS[name])
    assert sound.violation is None, "the seed alone breaks nothing"


def test_every_rule_of_the_switch_has_a_mutant():
    assert {mutant.rule for mutant in MUTANTS} == {f"R{number}" for number in range(1, 18)}
    assert CATCHING_SEEDS.keys() == BY_NAME.keys()


def test_seed_replays_exactly():
    first, second = run_seed(17, trace=True), run_seed(17, trace=True)
    assert first.trace == second.trace and len(first.trace) > 100
    assert run_seed(17).events == first.events, "tracing changes nothing"


def test_pairs_are_those_of_the_tables():
    passed: Counter = Counter()
    for seed in range(20):
        run_seed(seed, pairs=passed)
    reached = {(machine, str(state), event.__name__) for machine, state, event in passed}
    assert reached <= all_pairs()
    assert len(all_pairs()) < len(PARTICIPANT) + len(COORDINATOR) + len(CONTROL)


def test_last_line_names_what_was_run(capsys):
    code = main(["--seeds", "4", "--mutant-seeds", "3", "--workers", "1"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"seeds 4 events \d+ pairs \d+/\d+ mutants \d+/\d+", last)
    assert code == 1, "four seeds do not pass every pair"


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path):
    """`python -m tests.sim.scenario --rewrite` writes the traces anew; read the difference."""
    assert play(path.read_text()) == path.read_text()


def test_scenarios_cover_the_named_failures():
    names = {path.stem for path in SCRIPTS.glob("*.txt")}
    assert names >= {
        "commit_lost",
        "abort_versus_poll",
        "leader_dies_before_commit",
        "one_rank_refused",
        "store_lost_last_write",
        "late_bytes",
        "gate_error",
    }
    for path in SCRIPTS.glob("*.txt"):
        outputs = [line for _, _, expected in parse(path.read_text()) for line in expected]
        assert outputs and not any(line.startswith("BROKEN") for line in outputs)
