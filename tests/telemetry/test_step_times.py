"""The speed of serving, by the moments at which steps were complete."""

import numpy as np
import pytest

from evenkeel_moe.telemetry.step_times import StepTimes, serving_speed
from tests.telemetry.reports import load_window


def times_of(*stretches, apart_s=0.5):
    """Return the moments of stretches of (steps, seconds a step), reported twice a second."""
    times, at, step = StepTimes(), 0.0, 0
    times.note(at, step)
    for steps, step_s in stretches:
        each = max(1, round(apart_s / step_s))
        for begin in range(0, steps, each):
            done = min(each, steps - begin)
            at, step = at + done * step_s, step + done
            times.note(at, step)
    return times


def window(first, steps, epoch, tokens):
    counts, told = np.zeros((steps, 1, 1)), np.full((steps, 2), tokens, np.int64)
    return load_window(counts, range(first, first + steps), 2, epoch=epoch, tokens=told)


def test_each_range_of_steps_has_its_own_time():
    times = times_of((256, 0.02), (256, 0.01))
    assert times.step_s(0, 256) == pytest.approx(0.02)
    assert times.step_s(256, 512) == pytest.approx(0.01)
    assert times.newest_s(2.0) == pytest.approx(0.01)


def test_a_time_without_requests_does_not_count():
    times = times_of((200, 0.01), (1, 60.0), (200, 0.01))
    assert times.step_s(0, 401) == pytest.approx(0.01)


def test_reports_of_several_ranks_at_once_are_one_moment():
    times = StepTimes()
    for batch in range(8):
        for rank in range(4):  # The last steps of the batch come with the last rank's report.
            times.note(0.5 * batch + 0.01 * rank, 50 * batch + rank)
    assert times.step_s(0, 400) == pytest.approx(0.01)


def test_two_reports_are_too_few():
    assert times_of((100, 0.01)).step_s(0, 100) is None
    assert StepTimes().newest_s(5.0) is None


def test_slow_reports_are_enough_for_the_newest_time():
    assert times_of((400, 0.1), apart_s=10.0).newest_s(5.0) == pytest.approx(0.1)


def test_the_speed_is_that_of_the_steps_of_a_placement_in_all_phases():
    times = times_of((256, 0.04), (256, 0.02))
    parts = [
        *(window(0, 128, 0, 3), window(128, 128, 0, 5)),
        *(window(256, 128, 1, 7), window(384, 128, 1, 9)),
    ]
    for epoch, until, most, newest, step_s, tokens in (
        (0, 255, 512, True, 0.04, 8),
        (0, 255, 128, True, 0.04, 10),
        (1, 511, 128, False, 0.02, 14),
        (1, 383, 512, False, 0.02, 14),
    ):
        found = serving_speed(times, parts, epoch, until, most, newest=newest)
        assert found is not None
        assert found.step_s == pytest.approx(step_s)
        assert found.tokens_per_s == pytest.approx(tokens / step_s)
    assert serving_speed(times, parts, 2, 511, 128, newest=False) is None
    of_another_size = [part.at_width(3) for part in parts]
    assert serving_speed(times, of_another_size, 1, 511, 128, newest=False) is None
