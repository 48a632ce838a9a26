"""Slow ranks are logged, and the curves of ranks are joined for the planner."""

import numpy as np
from structlog.testing import capture_logs

from evenkeel_moe.model.cost import CostModel
from evenkeel_moe.planning.problem.moe_time import rank_times
from evenkeel_moe.telemetry.rank_speeds import Device, SlowRanks, join_curves
from evenkeel_moe.wire.link import CostCurve


def test_a_slow_rank_is_named_once_with_its_device_and_once_when_it_recovers():
    watch = SlowRanks(checks=2)
    devices = {1: Device("node-b", "GPU-1234")}
    slow, well = np.array([1.0, 1.3]), np.array([1.0, 1.01])
    with capture_logs() as said:
        for factors in (slow, well, slow, slow, slow, np.array([1.0, 1.1]), well, well, well):
            watch.update("demo", factors, devices)
    assert [row["event"] for row in said] == ["rank_slow", "rank_no_longer_slow"]
    assert {key: said[0][key] for key in ("rank", "node", "gpu_uuid", "factor")} == {
        "rank": 1,
        "node": "node-b",
        "gpu_uuid": "GPU-1234",
        "factor": 1.3,
    }
    assert watch.slow == {}


def test_measured_curves_are_what_the_planner_scores_with():
    fast = CostCurve(64, (1e-3, 1e-3, 2e-3), 1e-5)
    slow = CostCurve(64, (2e-3, 4e-3), 5e-5)
    joined = join_curves([fast, slow])
    assert joined is not None
    assert np.allclose(rank_times(np.array([[65.0, 64.0]]), CostModel(joined)), [[1e-3, 2e-3]])
    times = rank_times(np.array([[192.0, 192.0]]), CostModel(joined))
    assert np.allclose(times, [[2e-3, 4e-3 + 64 * 5e-5]])
    assert join_curves([fast, None]) is None
    assert join_curves([fast, CostCurve(32, (1e-3,), 0.0)]) is None
    assert join_curves([]) is None
