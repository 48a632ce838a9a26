import pytest

from evenkeel_moe.planning.policies.registry import warm_kernels


@pytest.fixture(scope="session", autouse=True)
def _warm_kernels():
    warm_kernels()
