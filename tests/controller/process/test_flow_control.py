"""The pace of reports follows the lag of the event loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.controller.process.flow_control import Pacer
from evenkeel_moe.wire.link import FlowControl

FLOW = FlowControl(0.25, stride=1, from_step=0, max_steps_per_report=256)


def run(pacer, lag_s, samples):
    return sum(pacer.sample(lag_s, 32) for _ in range(samples))


def test_it_slows_down_by_steps_and_leaves_steps_out_only_at_last():
    pacer, seen = Pacer(FLOW, 2000), []
    for _ in range(10):
        run(pacer, 0.5, 4)
        seen.append((pacer.flow.report_interval_s, pacer.flow.stride))
    assert seen[:6] == [(0.5, 1), (1.0, 1), (2.0, 1), (2.0, 2), (2.0, 4), (2.0, 8)]
    assert seen[6:] == [(2.0, 8)] * 4, "there is a slowest pace"


def test_one_pause_changes_nothing_and_recovery_takes_longer_than_trouble():
    pacer = Pacer(FLOW, 2000)
    for _ in range(50):
        assert not pacer.sample(0.9, 32)
        assert not pacer.sample(0.0, 32)
    assert run(pacer, 0.3, 8) == 2
    assert run(pacer, 0.1, 1000) == 0, "neither behind nor idle"
    assert run(pacer, 0.0, 39) == 0
    assert run(pacer, 0.0, 1) == 1
    assert run(pacer, 0.0, 40) == 1
    assert pacer.flow == FLOW
    assert run(pacer, 0.0, 1000) == 0


@pytest.mark.parametrize(
    ("ranks", "interval_s"),
    [(500, 0.25), (501, 0.5), (1000, 0.5), (2048, 2.0), (4608, 2.0), (100_000, 2.0)],
)
def test_many_ranks_send_longer_messages_from_the_start(ranks, interval_s):
    pacer = Pacer(FLOW, 2000)
    assert pacer.sample(0.0, ranks) == (interval_s > 0.25)
    assert (pacer.flow.report_interval_s, pacer.flow.stride) == (interval_s, 1)
    for _ in range(200):  # An idle event loop does not make the messages shorter.
        assert not pacer.sample(0.0, ranks)


def test_when_most_ranks_have_left_the_others_report_as_the_settings_say():
    pacer = Pacer(FLOW, 2000)
    pacer.sample(0.0, 4608)
    assert run(pacer, 0.0, 200) == 3
    assert pacer.flow == FLOW


def test_a_late_event_loop_still_leaves_steps_out():
    pacer = Pacer(FLOW, 2000)
    pacer.sample(0.0, 4608)
    assert run(pacer, 0.5, 4) == 1
    assert (pacer.flow.report_interval_s, pacer.flow.stride) == (2.0, 2)


@given(st.lists(st.floats(0, 5), max_size=300), st.integers(1, 8))
def test_it_never_reports_more_often_or_more_densely_than_the_settings_say(lags, stride):
    pacer = Pacer(FlowControl(0.25, stride), 2000)
    for lag in lags:
        before = pacer.flow
        assert pacer.sample(lag, 32) == (pacer.flow != before)
        assert pacer.flow.report_interval_s >= 0.25
        assert pacer.flow.stride >= stride
        assert pacer.flow.stride % stride == 0
