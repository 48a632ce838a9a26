"""Steps are fitted with the placement they ran under, whatever the phase and the order."""

import numpy as np
import pytest

from evenkeel_moe.model.load import LoadWindow, Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.problem.token_split import EVEN_SPLIT
from evenkeel_moe.telemetry.rank_times import RankTimes
from evenkeel_moe.telemetry.step_times import NoFit, TimeFit

SPREAD = Placement(np.array([[0, 1, 2, 3, 4, 5, 0, -1]], np.int32), 4, 6)
MOVED = Placement(np.array([[0, 1, 2, 3, 4, 5, 3, -1]], np.int32), 4, 6)
PER_TOKEN, PER_REPLICA = 1e-6, 5e-5


def carried(counts, placement):
    """Return the tokens and active replicas of each rank, slot by slot: (T, R) each."""
    tokens, active = np.zeros((len(counts), 4)), np.zeros((len(counts), 4))
    copies = [int((placement.phy2log[0] == expert).sum()) for expert in range(6)]
    for slot, expert in enumerate(placement.phy2log[0]):
        if expert >= 0:
            share = counts[:, 0, expert] / copies[expert]
            tokens[:, slot // 2] += share
            active[:, slot // 2] += np.minimum(share, 1.0)
    return tokens, active


def window(steps, placement, epoch, *, seed=0, measured=True) -> LoadWindow:
    rng = np.random.default_rng(seed + steps[0])
    counts = rng.poisson(rng.lognormal(0, 1.5, (len(steps), 1, 6)) * 20).astype(np.uint32)
    tokens, active = carried(counts, placement)
    seconds = PER_TOKEN * tokens + PER_REPLICA * active
    seconds = seconds * rng.lognormal(0, 0.01, seconds.shape)
    return LoadWindow(
        counts,
        np.array(steps),
        np.full(len(steps), epoch),
        np.ones((len(steps), 4), np.int64),
        seconds if measured else np.full(seconds.shape, np.nan),
    )


def fit_of(times) -> TimeFit:
    found = times.fit()
    assert isinstance(found, TimeFit), found
    return found


def test_both_slopes_are_found_from_windows():
    times = RankTimes(512)
    times.update({Phase.DECODE: [window(range(200), SPREAD, 1)]}, SPREAD, 1, EVEN_SPLIT)
    assert fit_of(times).s_per_token == pytest.approx(PER_TOKEN, rel=0.05)
    assert fit_of(times).s_per_replica == pytest.approx(PER_REPLICA, rel=0.05)


def test_steps_of_another_epoch_do_not_count_and_earlier_ones_outlive_a_move():
    times = RankTimes(512)
    before, after = window(range(100), SPREAD, 1), window(range(100, 130), MOVED, 2)
    times.update({Phase.DECODE: [before]}, SPREAD, 1, EVEN_SPLIT)
    first = fit_of(times)
    late = window(range(100, 120), SPREAD, 1)
    times.update({Phase.DECODE: [before, late]}, MOVED, 2, EVEN_SPLIT)
    assert times.fit() is first, "steps of the epoch before are not counted under the new one"
    times.update({Phase.DECODE: [before, late, after.slice(slice(20, 30))]}, MOVED, 2, EVEN_SPLIT)
    assert times.fit() is first, "a fit stands until 16 more steps came"
    more = window(range(130, 140), MOVED, 2)
    times.update({Phase.DECODE: [before, more]}, MOVED, 2, EVEN_SPLIT)
    second = fit_of(times)
    assert second.steps == 120
    assert second.s_per_replica == pytest.approx(PER_REPLICA, rel=0.05)


def test_phases_are_fitted_together_in_the_order_of_their_steps():
    times = RankTimes(64)
    slow = window(range(64, 128, 2), SPREAD, 1)
    slow.compute_s[:, 1] *= 1.3
    fast = window(range(65, 129, 2), SPREAD, 1, seed=9)
    fast.compute_s[:, 1] *= 1.3
    phases = {
        Phase.DECODE: [window(range(64), SPREAD, 1), slow],
        Phase.PREFILL: [fast],
    }
    times.update(phases, SPREAD, 1, EVEN_SPLIT)
    assert fit_of(times).steps == 64, "the newest steps of both phases are kept"
    assert fit_of(times).factors[1] == pytest.approx(1.3, rel=0.02)


def test_ranks_that_do_not_measure_are_no_fit_and_a_new_generation_forgets():
    times = RankTimes(512)
    silent = window(range(50), SPREAD, 1, measured=False)
    times.update({Phase.DECODE: [silent]}, SPREAD, 1, EVEN_SPLIT)
    assert times.fit() == NoFit("no rank reports seconds")
    times.update({Phase.DECODE: [window(range(50, 90), SPREAD, 1)]}, SPREAD, 1, EVEN_SPLIT)
    fit_of(times)
    times.clear()
    assert times.fit() == NoFit("no rank reports seconds")


def test_a_placement_without_an_expert_that_has_load_is_not_counted():
    lost = Placement(np.array([[0, 1, 2, 3, 4, -1, 0, -1]], np.int32), 4, 6)
    times = RankTimes(512)
    times.update({Phase.DECODE: [window(range(50), SPREAD, 1)]}, lost, 1, EVEN_SPLIT)
    assert times.fit() == NoFit("no rank reports seconds")


def test_a_fit_in_use_is_not_dropped_at_the_limit():
    rng = np.random.default_rng(8)
    first, later = window(range(64), SPREAD, 1), window(range(64, 576), SPREAD, 1)
    noise = rng.lognormal(0, 0.75, later.compute_s.shape)
    alone, after = RankTimes(512), RankTimes(512)
    noisy = LoadWindow(
        later.counts, later.steps, later.epochs, later.tokens, later.compute_s * noise
    )
    alone.update({Phase.DECODE: [noisy]}, SPREAD, 1, EVEN_SPLIT)
    refused = alone.fit()
    assert isinstance(refused, NoFit)
    assert "50% are needed" in refused.reason
    after.update({Phase.DECODE: [first]}, SPREAD, 1, EVEN_SPLIT)
    fit_of(after)
    after.update({Phase.DECODE: [first, noisy]}, SPREAD, 1, EVEN_SPLIT)
    assert 0.4 <= fit_of(after).explained < 0.5
