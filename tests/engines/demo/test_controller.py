"""The demo's controller."""

import pytest

from evenkeel_moe.engines.demo.controller import planner_started


@pytest.mark.parametrize(
    "event", ["planner_ready", "planner_does_not_start", "planner_kernels_do_not_compile"]
)
def test_the_demo_waits_for_an_event_that_the_planner_logs(event):
    assert not planner_started('{"event": "serving"}\n')
    assert planner_started(f'{{"event": "serving"}}\n{{"event": "{event}"}}\n')
