"""The bound that lets the search leave out the roots of a norm."""

import numpy as np
import pytest

from evenkeel_moe.planning.policies.keel.gains import Norms, gain_is_at_most, gain_of_power_change

STEPS = 7


def gain_and_bound(doublings: int, taken: np.ndarray) -> tuple[float, float]:
    """Return the gain if these shares of the power sum are taken away, and the least bound."""
    weight = np.full(STEPS, 1 / STEPS)
    power_sum = np.linspace(0.5, 20.0, STEPS)
    norm = power_sum ** (0.5**doublings)
    norms = Norms(weight, norm, power_sum, 1 / power_sum, np.empty(STEPS), doublings)
    change = -taken * power_sum

    def holds(least: float) -> bool:
        return bool(gain_is_at_most(least, norms, change))

    low, high = -1e6, 1e6
    assert holds(high) and not holds(low)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return gain_of_power_change(norms, change.copy()), high


@pytest.mark.parametrize("doublings", [1, 2, 3, 5])
def test_no_gain_is_above_its_bound(doublings):
    """Random shares, from four times the power sum more to all of it less."""
    rng = np.random.default_rng(doublings)
    for _ in range(200):
        gain, bound = gain_and_bound(doublings, rng.uniform(rng.choice([-4.0, -0.2]), 1.0, STEPS))
        assert gain <= bound


@pytest.mark.parametrize("share", [-0.3, 0.0, 1e-3, 0.05, 0.2, 0.5, 1.0])
def test_a_gain_is_not_far_below_its_bound(share):
    """A loose bound would leave out nothing."""
    gain, bound = gain_and_bound(3, np.full(STEPS, share))
    assert bound == pytest.approx(gain, rel=0.35 if share > 0.2 else 0.12, abs=1e-8)


def test_a_step_without_load_gains_nothing():
    none = np.zeros(1)
    norms = Norms(np.ones(1), none, none, none, np.empty(1), 3)
    assert gain_is_at_most(1e-9, norms, np.zeros(1))
