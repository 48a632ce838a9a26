"""`evenkeel record sglang` with SGLang's own recorder and dump."""

import socket
import threading

import numpy as np
import pytest

from evenkeel_moe.engines.demo.processes import free_ports
from evenkeel_moe.formats import read_trace
from tests.engines import ranks
from tests.engines.sglang.engine import MOE_LAYERS
from tests.integration.whole import evenkeel
from tests.waiting import deadline, wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def test_a_trace_is_recorded_over_sglangs_routes(tmp_path):
    port, found = free_ports(1)[0], []
    scenario = "tests.engines.sglang.records", "serves"
    fleet = threading.Thread(
        target=lambda: found.extend(ranks.run(*scenario, folder=str(tmp_path), port=port))
    )
    fleet.start()
    try:
        wait_until(lambda: is_open(port), within_s=60)
        out = tmp_path / "trace.npz"
        where = ("--address", f"http://127.0.0.1:{port}", "--dumps", tmp_path, "--out", out)
        said = evenkeel("record", "sglang", "-s", 0.3, *where)
    finally:
        fleet.join(deadline(250))
    assert "Next: evenkeel offline" in said
    trace = read_trace(out)
    assert trace.layer_ids == MOE_LAYERS
    routed = np.sum([np.array(rank) for rank in found], axis=0)
    # SGLang keeps the newest passes, as many as its buffer has.
    assert 1 < trace.num_steps <= len(routed)
    assert sorted(map(tuple, trace.counts[:, 0].tolist())) == sorted(
        map(tuple, routed[-trace.num_steps :].tolist())
    )


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
