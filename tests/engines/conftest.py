"""A real controller for the ranks of the engines."""

import json

import pytest

from tests.integration.whole import EAGER, Served


@pytest.fixture
def controller(tmp_path):
    """Start `evenkeel serve` on free ports, with short deadlines for a stalled wave."""
    served = Served(
        tmp_path,
        WINDOW__STEPS=128,
        WINDOW__PLAN_STEPS=128,
        PLANNER__POLICY="keel",
        PLANNER__CYCLE_S=1,
        PLANNER__THRESHOLDS=json.dumps(EAGER),
        MIGRATION__COMMIT_DEADLINE_S=2,
        ADVANCED__COMMIT_DEADLINE_STEPS=64,
        MIGRATION__STALL_AFTER_S=2,
    )
    try:
        served.start()
        yield served
    finally:
        served.http.close()
        served.stop()
