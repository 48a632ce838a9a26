import numpy as np
import pytest
from hypothesis import given

from evenkeel_moe.planning.policies.keel.gains import Norms, gain_is_at_most, gain_of_power_change
from evenkeel_moe.planning.policies.keel.state import SmoothCosts, refresh
from evenkeel_moe.planning.policies.keel.swap_bounds import STEPS_AT_A_TIME, changes_gain_at_most
from evenkeel_moe.planning.policies.keel.swaps import best_swaps
from tests.planning.policies.keel.searches import LEAST, MANY, every_swap, is_exact, searches


@given(searches())
def test_no_swap_gains_more_than_the_best_one_found(drawn):
    search, price = drawn
    for i, layer in enumerate(search.layers):
        refresh(layer, search.objective)
        gains, _, _ = best_swaps(layer, search.objective, search.rooms[i], price, MANY, LEAST, MANY)
        brute = max([0.0, *every_swap(search, i, price)])
        assert (np.diff(gains) <= 0).all()
        assert max(gains, default=0.0) <= brute + 1e-9
        if is_exact(search):
            assert max(gains, default=LEAST) == pytest.approx(max(brute, LEAST), rel=1e-6, abs=2e-9)


class TwoRanks:
    """Two ranks with two experts each, of which the first ones may be swapped; p = 8."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        # Two whole parts and the rest of a third.
        self.work = rng.gamma(2.0, 0.2, (4, 2 * STEPS_AT_A_TIME + 5))
        # The bounds are close to the gain where little moves.
        self.work[[0, 2]] *= 0.3 if seed % 2 else 0.02
        steps = self.work.shape[1]
        self.rank_load = np.stack([self.work[0] + self.work[1], self.work[2] + self.work[3]])
        self.powers = self.rank_load**8
        power_sum = self.powers.sum(axis=0)
        norm, weight = power_sum**0.125, rng.dirichlet(np.ones(steps))
        self.norms = Norms(weight, norm, power_sum, 1 / power_sum, np.empty(steps), 3)
        self.costs = SmoothCosts(np.ones(2), 0.0, np.ones((2, 1)), 3)
        rank_slope = weight * self.rank_load**7 / norm**7
        tilt, moved = rank_slope[0] - rank_slope[1], self.work[0] - self.work[2]
        width = tilt * (self.rank_load[0] - self.rank_load[1])
        self.coarse = np.minimum(tilt * moved, width - tilt * moved)
        after = self.rank_load - np.stack([moved, -moved])
        self.gain = float(weight @ (norm - (after**8).sum(axis=0) ** 0.125))

    def gains_at_most(self, least: float) -> tuple[bool, np.ndarray]:
        """Return the kernel's answer and the changes that it computed."""
        changes = np.full(self.work.shape[1], np.nan)
        answer = changes_gain_at_most(
            least, self.norms, self.work, 0, 1.0, 2, 1.0, self.rank_load, self.powers, 0, 1,
            self.costs, self.coarse.copy(), changes,
        )  # fmt: skip
        return bool(answer), changes


@pytest.mark.parametrize("seed", range(50))
def test_no_swap_is_left_out_that_gains_more_than_asked_for(seed):
    ranks = TwoRanks(seed)
    left_out, changes = ranks.gains_at_most(ranks.gain - 1e-9)
    assert not left_out
    assert gain_of_power_change(ranks.norms, changes) == pytest.approx(ranks.gain, abs=1e-12)


@pytest.mark.parametrize("seed", range(50))
def test_a_swap_that_gains_much_less_is_left_out_early(seed):
    """The bound of the first steps, and the coarse one of the others, are enough."""
    ranks = TwoRanks(seed)
    left_out, changes = ranks.gains_at_most(ranks.coarse.sum() + 1e-9)
    assert left_out
    assert np.isnan(changes[STEPS_AT_A_TIME:]).all()


@pytest.mark.parametrize("seed", range(50))
def test_what_the_bound_of_all_steps_leaves_out_is_left_out(seed):
    ranks = TwoRanks(seed)
    _, changes = ranks.gains_at_most(ranks.gain - 1e-9)
    for least in ranks.gain + np.linspace(0.0, 1.0, 400):
        if gain_is_at_most(least, ranks.norms, changes):
            assert ranks.gains_at_most(least + 1e-12)[0]
