"""The newest steps of all phases are checked, step by step, with those that do not add up."""

import numpy as np
import pytest

from evenkeel_moe.model.finding import doubts
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.signals.live_findings import StepSums, check_live
from evenkeel_moe.telemetry.load_check import LoadCheck
from evenkeel_moe.telemetry.step_kernels import sum_counts
from tests.planning.signals.test_live_findings import LOST
from tests.planning.signals.test_load_findings import routed
from tests.telemetry.reports import load_window

SHAPE = ModelShape(6, 16, 4, 4, 2, 10)
PLACEMENT = Placement.initial(SHAPE)
HALVED = pytest.mark.fault(
    "an operator whose engine counts wrongly under graphs",
    "every step was refused, and no status said that the layers disagree",
)


def window(counts, steps, epoch=0):
    return load_window(counts, steps, 4, epoch=epoch)


def codes(check, placement=PLACEMENT, epoch=0):
    findings = check.findings(placement, epoch)
    return None if findings is None else [str(each.code) for each in doubts(findings)]


def halved(counts):
    counts = counts.copy()
    counts[:, 2] //= 2
    return counts


@pytest.mark.parametrize("seed", range(8))
def test_step_by_step_it_finds_what_a_check_of_the_whole_window_does(seed):
    """The slow way: keep all steps, take the newest, and sum them."""
    rng = np.random.default_rng(seed)
    counts = routed(seed, steps=90)
    counts[30:70, :, 4:8] = 0
    counts[50:, 3] //= 2
    phases = rng.choice(list(Phase), 90)
    check, rings = LoadCheck(20), {phase: [] for phase in Phase}
    for step in range(90):
        rings[phases[step]].append(window(counts[step : step + 1], [step]))
        check.update({phase: parts for phase, parts in rings.items() if parts})
        newest = counts[max(0, step - 19) : step + 1]
        sums = StepSums(newest.sum(axis=2), newest.any(axis=0))
        assert check.findings(PLACEMENT, 0) == check_live(sums, sums, PLACEMENT)


def test_counts_of_32_bits_are_summed_over_experts_and_over_steps():
    counts = np.random.default_rng(0).integers(0, 2**32, (5, 3, 7), np.uint32)
    counts[0] = 2**32 - 1
    by_step, by_expert = sum_counts(counts)
    assert by_step.tolist() == counts.sum(axis=2, dtype=np.int64).tolist()
    assert by_expert.tolist() == counts.sum(axis=0, dtype=np.int64).tolist()


def test_every_step_counts_once_also_the_first_ones():
    check, counts = LoadCheck(64), routed(steps=24)
    for end in (12, 12, 24, 24):
        check.update({Phase.DECODE: [window(counts[:end], range(end))]})
        assert check._steps[0].tolist() == list(range(end))


def test_without_a_step_nothing_is_known():
    check = LoadCheck(64)
    assert check.findings(PLACEMENT, 0) is None
    check.add(window(np.zeros((3, 6, 16)), range(3)))
    assert check.findings(PLACEMENT, 0) is None
    check.add(window(routed(), range(3, 27)))
    assert check.findings(PLACEMENT, 0) == ()
    other = Placement.initial(ModelShape(5, 16, 4, 4, 2, 10))
    assert check.findings(other, 0) is None
    check.clear()
    assert check.findings(PLACEMENT, 0) is None


@HALVED
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_steps_that_do_not_add_up_are_checked_among_those_of_the_windows(share):
    counts, rng = routed(steps=100), np.random.default_rng(0)
    wrong = rng.random(100) < share
    check = LoadCheck(64)
    check.add(window(halved(counts[wrong]), np.flatnonzero(wrong)))
    if not wrong.all():
        check.update({Phase.DECODE: [window(counts[~wrong], np.flatnonzero(~wrong))]})
    assert codes(check) == ["uneven_layers"]


def test_a_few_steps_that_do_not_add_up_are_forgotten_with_the_window():
    counts = routed(steps=200)
    check = LoadCheck(64)
    check.add(window(halved(counts[:8]), range(8)))
    assert codes(check) == ["uneven_layers"]
    for end in range(40, 201, 40):
        check.update({Phase.DECODE: [window(counts[8:end], range(8, end))]})
    assert codes(check) == []


def test_one_odd_step_among_many_is_no_doubt():
    counts = routed(steps=256)
    check = LoadCheck(256)
    check.add(window(halved(counts[100:101]), [100]))
    rest = np.delete(np.arange(256), 100)
    check.update({Phase.DECODE: [window(counts[rest], rest)]})
    assert codes(check) == []
    findings = check.findings(PLACEMENT, 0)
    assert findings is not None and [str(each.severity) for each in findings] == ["note"]


@LOST
def test_a_rank_whose_counts_end_is_found_once_they_have_left_the_window():
    counts = routed(steps=200)
    counts[80:, :, 4:8] = 0
    check, seen = LoadCheck(64), []
    for end in range(8, 201, 8):
        check.update({Phase.DECODE: [window(counts[:end], range(end))]})
        seen.append("idle_experts" in codes(check))
    assert not any(seen[: 80 // 8])
    assert all(seen[(80 + 64 + 8) // 8 :])


@LOST
def test_only_steps_of_the_present_placement_tell_about_a_rank():
    """The experts that a plan brought to a silent rank counted before, on another one."""
    turned = Placement(np.roll(PLACEMENT.phy2log, 4, axis=1), 4, 16)
    check, counts = LoadCheck(256), routed(steps=120)
    counts[60:, turned.only_rank == 1] = 0
    check.update({Phase.DECODE: [window(counts[:60], range(60))]})
    assert codes(check) == []
    check.update({Phase.DECODE: [window(counts[60:], range(60, 120), epoch=1)]})
    assert "idle_experts" in codes(check, turned, epoch=1)


@pytest.mark.parametrize("steps", [1, 3, 16, 63])
def test_a_window_that_has_just_begun_is_no_finding(steps):
    for seed in range(10):
        check = LoadCheck(64)
        check.update({Phase.DECODE: [window(routed(seed, steps=steps), range(steps))]})
        assert codes(check) == []


def test_bursts_and_changes_of_traffic_are_no_finding():
    quiet, burst = routed(0, steps=40, choices=20), routed(1, steps=10, choices=4000)
    other = routed(2, steps=50)
    other[:, :, 8:] //= 50  # Another domain leaves half of the experts nearly alone.
    totals = other.sum(axis=2)
    other[:, :, 0] += totals.max(axis=1)[:, None] - totals
    counts = np.concatenate([quiet, burst, other, quiet])
    check = LoadCheck(64)
    for end in range(5, len(counts) + 1, 5):
        check.update({Phase.DECODE: [window(counts[:end], range(end))]})
        assert codes(check) == []
