"""The real machines take random runs of the model, and machines with a broken rule do not.

The first test belongs to `make test`. It is skipped where `make quint` has not parsed the model.
"""

import pytest

from tests.quint.judge import TREE
from tests.quint.replay import FOUND, STEPS, difference, runs_until_found
from tests.quint.walks import Walker
from tests.sim.kit import Kit
from tests.sim.mutants import BY_NAME

pytestmark = pytest.mark.skipif(not TREE.exists(), reason="needs `make quint`")


def test_machines_take_runs_of_the_model() -> None:
    walker, swaps = Walker(), 0
    for seed in range(10):
        run = walker.run(seed, STEPS)
        assert difference(walker, run, Kit()) == "", f"run {seed}"
        swaps += sum(step.event[0] == "Swapped" for step in run[1])
    assert swaps > 20


@pytest.mark.quint
def test_replay_finds_broken_rules() -> None:
    found = runs_until_found(Walker(), {name: BY_NAME[name].kit for name in FOUND}, 60)
    assert all(found.values()), found
