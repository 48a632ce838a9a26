"""Set-up of every test: fixed seeds, a clean environment, deadlines that scale with load.

Warnings are errors; that is set in pyproject.toml.
"""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.waiting import deadline

# A run starts hundreds of processes. Without bytecode files, each would compile the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

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


def pytest_collection_modifyitems(config, items):
    """Scale the time limit of each test like every other deadline."""
    default = float(config.getini("timeout"))
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0]) if marker is not None else default
        item.add_marker(pytest.mark.timeout(deadline(seconds)), append=False)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """Hide the settings in the environment of this machine from the tests."""
    for name in list(os.environ):
        if name.startswith("EVENKEEL_"):
            monkeypatch.delenv(name)
