"""A short run of the simulation, each mutant at a seed that catches it, and the scenarios."""

import random
import re
from collections import Counter

import pytest

from evenkeel_moe.protocol.transitions import CONTROL, COORDINATOR, PARTICIPANT
from tests.sim.__main__ import FULL, OFTEN, is_clean, main
from tests.sim.foci import FOCI
from tests.sim.kit import all_pairs
from tests.sim.mutants import BY_NAME, MUTANTS
from tests.sim.run import pick_focus, run_seed
from tests.sim.scenario import SCRIPTS, parse, play
from tests.sim.search import Tally, hunt

CATCHING_SEEDS = {
    "R1": 2,
    "R2": 122,
    "R2b": 1256,
    "R3": 34,
    "R3b": 39,
    "R3c": 1,
    "R4": 168,
    "R5": 0,
    "R5b": 28,
    "R6": 108,
    "R7": 96,
    "R7b": 1,
    "R8": 706,
    "R9": 0,
    "R9b": 78,
    "R9c": 52,
    "R10": 2,
    "R11": 326,
    "R12": 3,
    "R13": 3,
    "R14": 3,
    "R15": 2,
    "R16": 124,
    "R17": 118,
    "R17b": 305,
    "R17c": 18,
}
"""A seed that catches each mutant. If the simulation has changed, the test searches for another."""


@pytest.mark.parametrize("first", range(0, 160, 40))
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
    reached = {(machine, str(state), event.__name__) for machine, state, event in +passed}
    assert reached <= all_pairs()
    assert len(all_pairs()) < len(PARTICIPANT) + len(COORDINATOR) + len(CONTROL)


@pytest.mark.parametrize(
    "focus", FOCI, ids=lambda focus: focus.pairs.partition(",")[0].replace(" ", "-")
)
def test_focus_brings_its_pairs_about(focus):
    """Otherwise its share of the seeds is wasted."""
    missing = set(focus.aims)
    assert missing <= all_pairs()
    for seed in range(8):
        passed: Counter = Counter()
        outcome = run_seed(seed, pairs=passed, about=focus)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.detail}"
        missing -= {(machine, str(state), event.__name__) for machine, state, event in passed}
        if not missing:
            return
    assert not missing, "in eight seeds of its own"


def test_seeds_without_focus_are_left():
    assert sum(focus.share for focus in FOCI) <= 730
    picked = [pick_focus(random.Random(seed)) for seed in range(200)]
    assert 40 < picked.count(None) < 120


def test_last_line_names_what_was_run(capsys):
    code = main(["--seeds", "4", "--mutant-seeds", "1", "--workers", "1"])
    *others, last = capsys.readouterr().out.splitlines()
    rarest = r"rarest pairs: \w+ \w+ \w+, 0 per 10\^7 events"
    assert sum(bool(re.fullmatch(rarest, line)) for line in others) == 5
    below = rf"pairs below 1000 per 10\^7 events: (\d+) of {len(all_pairs())}"
    counts = [int(found[1]) for line in others if (found := re.fullmatch(below, line))]
    assert len(counts) == 1 and 5 <= counts[0] < len(all_pairs())
    assert re.fullmatch(r"seeds 4 events \d+ pairs \d+/\d+ mutants \d+/\d+", last)
    assert code == 1, "four seeds do not pass every pair"


def test_only_a_full_run_must_pass_every_pair_often():
    rare = min(all_pairs())
    for events, passes, clean in (
        (FULL - 1, 1, True),
        (FULL - 1, 0, False),
        (FULL, 3 * OFTEN - 1, False),
        (FULL, 3 * OFTEN, True),
        (4 * FULL, 3 * OFTEN, False),
    ):
        pairs = Counter(dict.fromkeys(all_pairs(), 10 * OFTEN))
        pairs[rare] = passes
        assert is_clean(Tally(events=events, pairs=pairs)) is clean
    assert not is_clean(Tally(events=1, pairs=pairs, failures=[(0, "torn map", "")]))


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path):
    """`python -m tests.sim.scenario --rewrite` rewrites the traces; read the difference."""
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
        "rank_dies_in_a_wave",
        "store_away_while_committing",
        "old_leader_is_heard",
        "reload_in_a_wave",
        "store_flushed_in_a_wave",
        "prepare_without_its_transfer",
    }
    for path in SCRIPTS.glob("*.txt"):
        outputs = [line for _, _, expected in parse(path.read_text()) for line in expected]
        assert outputs and not any(line.startswith("BROKEN") for line in outputs)
