"""Set-up of every test: fixed seeds, a clean environment, deadlines that scale with load.

Warnings are errors; that is set in pyproject.toml.
"""

import gc
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.faults import attach_faults
from tests.waiting import deadline

# A run starts hundreds of processes. Without bytecode files, each would compile the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that starts the tests in the background lets them ignore Ctrl-C, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Derandomised: the same examples in every run. No deadline: a first call may compile a kernel.
settings.register_profile(
    "evenkeel",
    derandomize=True,
    deadline=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("evenkeel")

LONG_S = 180
"""Tests that may take so long begin first. If one of them began last, it would run alone."""


def _limit_s(item):
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else float(item.config.getini("timeout"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Let each worker begin with long tests, and scale time limits like every other deadline."""
    attach_faults(items)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if _limit_s(item) >= LONG_S]
    rest = [item for item in items if _limit_s(item) < LONG_S]
    # A worker gets successive tests, so long ones stand in front of each worker's part of the rest.
    size = len(rest) // workers + 1
    parts = [long[n::workers] + rest[n * size : (n + 1) * size] for n in range(workers)]
    items[:] = [item for part in parts for item in part]
    for item in items:
        item.add_marker(pytest.mark.timeout(deadline(_limit_s(item))), append=False)


def pytest_collection_finish():
    """Take what was imported and collected out of garbage collection, where it costs much time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """Hide the settings in the environment of this machine from the tests."""
    for name in list(os.environ):
        if name.startswith("EVENKEEL_"):
            monkeypatch.delenv(name)
