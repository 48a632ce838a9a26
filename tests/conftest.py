"""What holds for every test: fixed seeds, a clean environment, warnings are errors (pyproject.toml)."""

import os

import pytest
from hypothesis import HealthCheck, settings

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


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """Settings of the machine that runs the tests must not reach them."""
    for name in list(os.environ):
        if name.startswith("EVENKEEL_"):
            monkeypatch.delenv(name)
