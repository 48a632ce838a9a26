"""Where every rank has one slot, the numbers of copies are searched."""

import itertools

import numpy as np
import pytest

from evenkeel_moe.planning.policies.keel.single_slots import ExchangeRules, exchange_copies

EXPERTS, RANKS, LEAST = 32, 64, 1e-6
WEIGHT = np.array([0.1, 0.2, 0.3, 0.4])


def tokens_of(seed):
    """Return (E, T) loads that sum to one time of a mean rank load on every rank."""
    load = np.random.default_rng(seed).gamma(1.0, 1.0, (EXPERTS, 4)) + 0.05
    return load * RANKS / load.sum(axis=0)


def value_of(tokens, copies):
    """The 8-norm over ranks of each step, averaged over the steps."""
    each = tokens / copies[:, None]
    return float(WEIGHT @ ((copies[:, None] * each**8).sum(axis=0) ** 0.125))


def counted(row):
    return np.bincount(row[row >= 0], minlength=EXPERTS)


def exchanged(seed, price, most=RANKS, filled=RANKS):
    row = np.full(RANKS, -1, np.int32)
    row[:filled] = np.arange(filled) % EXPERTS
    return row, exchange_copies(
        tokens_of(seed), WEIGHT, row, row, ExchangeRules(price, LEAST, 3, most)
    )


@pytest.mark.parametrize("price", [0.0, 0.02])
def test_no_exchange_is_left_that_gains_more_than_its_copy_costs(price):
    for seed in range(20):
        start, row = exchanged(seed, price)
        tokens, had, copies = tokens_of(seed), counted(start), counted(row)
        paid = price * np.maximum(copies - had, 0).sum()
        cost = value_of(tokens, copies) + paid
        assert cost <= value_of(tokens, had)
        best = min(
            value_of(tokens, other) + price * np.maximum(other - had, 0).sum()
            for more, less in itertools.permutations(range(EXPERTS), 2)
            if copies[less] > 1
            for other in [
                copies + np.eye(EXPERTS, dtype=int)[more] - np.eye(EXPERTS, dtype=int)[less]
            ]
        )
        # The best exchange is found by its gain in one copy more and one copy less, apart.
        assert best > cost - 0.01


def test_at_a_high_price_nothing_changes_and_at_none_more_than_at_a_low_one():
    made = []
    for price in (10.0, 0.02, 0.0):
        rows = [exchanged(seed, price) for seed in range(10)]
        made.append(sum(int((row != start).sum()) for start, row in rows))
    assert made[0] == 0 < made[1] < made[2]


def test_slots_change_only_for_further_copies():
    for seed in range(10):
        start, row = exchanged(seed, 0.0)
        further = np.maximum(counted(row) - counted(start), 0).sum()
        assert (row != start).sum() == further > 0


def test_empty_slots_are_filled_up_to_the_budget():
    for most in (40, 50, 64):
        _, row = exchanged(0, 0.0, most=most, filled=35)
        assert (row >= 0).sum() == most
        assert counted(row).min() >= 1
