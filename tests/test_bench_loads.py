"""Drawn traffic is what its labels say."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.loads import Regime, drawn_traffic
from evenkeel_moe.errors import InvalidInput

PLAIN = Regime(steps=256, layers=2, experts=64, tokens=20_000)


def measured_labels(load):
    """The labels of (T, L, E) [tokens], each the mean over layers.

    An expert is temporal if it has no token in half of the steps, and in the others more than half
    of the mean load of an expert. Skew is that of the mean over all steps, which drift lowers;
    drift is between the first and the last eighth of the steps.
    """
    eighth = len(load) // 8
    start, end = (part.mean(axis=0) for part in (load[:eighth], load[-eighth:]))
    mean = load.mean(axis=(0, 2))[:, None]
    used = load > 0
    share = used.mean(axis=0)
    when_used = load.sum(axis=0) / np.maximum(used.sum(axis=0), 1)
    temporal = (share > 0) & (share < 0.5) & (when_used > mean / 2)
    moved = np.abs(end / end.sum(axis=1, keepdims=True) - start / start.sum(axis=1, keepdims=True))
    return SimpleNamespace(
        skew=(load.mean(axis=0).max(axis=1) / mean[:, 0]).mean(),
        temporal=temporal.sum(axis=1).mean(),
        active=share[temporal].mean() if temporal.any() else 0.0,
        burst=(when_used / mean)[temporal].mean() if temporal.any() else 0.0,
        drift=moved.sum(axis=1).mean() / 2,
    )


@pytest.mark.parametrize("experts", [16, 64, 256, 896])
@pytest.mark.parametrize("skew", [1.5, 4.0, 10.0])
def test_the_hottest_expert_has_as_many_times_the_mean_as_asked(experts, skew):
    asked = replace(PLAIN, experts=experts, skew=skew, steps=64, tokens=50_000)
    load = drawn_traffic(asked)
    assert load.shape == (64, 2, experts) and (load.sum(axis=2) == 50_000).all()
    for layer in range(2):
        assert measured_labels(load[:, [layer]]).skew == pytest.approx(skew, rel=0.03)


@pytest.mark.parametrize(("count", "active", "burst"), [(3, 0.17, 3.0), (8, 0.1, 6.0)])
def test_temporal_experts_are_used_together_in_as_many_steps_as_asked(count, active, burst):
    asked = replace(PLAIN, skew=4.0, temporal=count, active=active, burst=burst)
    load = drawn_traffic(asked)
    found = measured_labels(load)
    assert found.temporal == count
    assert found.active == pytest.approx(active, abs=0.5 / asked.steps)
    assert found.burst == pytest.approx(burst, rel=0.03)
    assert found.skew == pytest.approx(4.0, rel=0.03)
    for layer in range(2):
        used = (load[:, layer] > 0).mean(axis=0)
        together = np.corrcoef(load[:, layer, used < 0.5].T)
        assert together.min() > 0.9, "the paper's pair has 0.88"
    # The mean over steps does not show them: they look like cold experts.
    assert burst * active < 1.0


@pytest.mark.parametrize("drift", [0.1, 0.3])
def test_as_much_load_as_asked_moves_to_other_experts_and_the_skew_stays(drift):
    load = drawn_traffic(replace(PLAIN, skew=5.0, drift=drift, tokens=100_000))
    found = measured_labels(load)
    assert found.drift == pytest.approx(drift, abs=0.02)
    in_each_step = load.max(axis=2) / load.mean(axis=2)
    assert in_each_step == pytest.approx(5.0, rel=0.06)
    still = measured_labels(drawn_traffic(replace(PLAIN, skew=5.0, tokens=100_000)))
    assert still.drift < 0.02


def test_the_same_seed_draws_the_same_and_another_seed_does_not():
    assert np.array_equal(drawn_traffic(PLAIN), drawn_traffic(PLAIN))
    assert not np.array_equal(drawn_traffic(PLAIN), drawn_traffic(replace(PLAIN, seed=1)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"skew": 0.9}, "skew is 0.9"),
        ({"skew": 65.0}, "skew is 65"),
        ({"temporal": 64}, "temporal is 64"),
        ({"temporal": 3, "active": 1.5}, "active is 1.5"),
        ({"temporal": 40, "burst": 3.0}, "of a step"),
        ({"skew": 5.0, "drift": 1.0}, "drift is 1"),
    ],
)
def test_labels_that_cannot_be_drawn_are_refused(changes, words):
    with pytest.raises(InvalidInput, match=words):
        drawn_traffic(replace(PLAIN, **changes))
