"""The limit of open files."""

import resource

import pytest

from evenkeel_moe.adapters.open_files import allow_open_files


@pytest.fixture(autouse=True)
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_rises_as_far_as_the_hard_one_allows(limits):
    hard = limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    assert allow_open_files(600) == 600
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, hard)
    assert allow_open_files(hard + 1) == hard


def test_a_limit_that_suffices_is_left_alone(limits):
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    assert allow_open_files(400) == 512
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, limits[1])
