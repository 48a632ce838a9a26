"""The pace of reports follows the lag of the event loop."""

from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.controller.process.flow_control import Pacer
from evenkeel_moe.wire.link import FlowControl

FLOW = FlowControl(0.25, stride=1, from_step=0, max_steps_per_report=256)


def run(pacer, lag_s, samples):
    return sum(pacer.sample(lag_s) for _ in range(samples))


def test_it_slows_down_by_steps_and_leaves_steps_out_only_at_last():
    pacer, seen = Pacer(FLOW), []
    for _ in range(10):
        run(pacer, 0.5, 4)
        seen.append((pacer.flow.report_interval_s, pacer.flow.stride))
    assert seen[:6] == [(0.5, 1), (1.0, 1), (2.0, 1), (2.0, 2), (2.0, 4), (2.0, 8)]
    assert seen[6:] == [(2.0, 8)] * 4, "there is a slowest pace"


def test_one_pause_changes_nothing_and_recovery_takes_longer_than_trouble():
    pacer = Pacer(FLOW)
    for _ in range(50):
        assert not pacer.sample(0.9)
        assert not pacer.sample(0.0)
    assert run(pacer, 0.3, 8) == 2
    assert run(pacer, 0.1, 1000) == 0, "neither behind nor idle"
    assert run(pacer, 0.0, 39) == 0
    assert run(pacer, 0.0, 1) == 1
    assert run(pacer, 0.0, 40) == 1
    assert pacer.flow == FLOW
    assert run(pacer, 0.0, 1000) == 0


@given(st.lists(st.floats(0, 5), max_size=300), st.integers(1, 8))
def test_it_never_reports_more_often_or_more_densely_than_the_settings_say(lags, stride):
    pacer = Pacer(FlowControl(0.25, stride))
    for lag in lags:
        before = pacer.flow
        assert pacer.sample(lag) == (pacer.flow != before)
        assert pacer.flow.report_interval_s >= 0.25
        assert pacer.flow.stride >= stride
        assert pacer.flow.stride % stride == 0
