"""Slow ranks are logged."""

import numpy as np
from structlog.testing import capture_logs

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.telemetry.slow_ranks import SlowRanks
from tests.protocol.machines import hello_of


def test_a_slow_rank_is_named_once_with_its_device_and_once_when_it_recovers():
    watch = SlowRanks()
    hellos = {EpRank(rank): hello_of(rank) for rank in (0, 1)}
    hellos[EpRank(1)] = hello_of(1, node="node-b", gpu_uuid="GPU-1234")
    slow, less, well, unknown = (np.array([1.0, one]) for one in (1.3, 1.1, 1.01, np.nan))
    with capture_logs() as said:
        for factors in (slow, slow, well, slow, slow, unknown, slow, slow, less, well, well, less):
            watch.update("demo", factors, hellos)
        assert [row["event"] for row in said] == ["rank_slow"]
        for factors in (well, well, well, well):
            watch.update("demo", factors, hellos)
    assert [row["event"] for row in said] == ["rank_slow", "rank_no_longer_slow"]
    told = {"rank": 1, "node": "node-b", "gpu_uuid": "GPU-1234", "factor": 1.3}
    assert told.items() <= said[0].items()
