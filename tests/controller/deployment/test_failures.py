"""Pauses of deployments that failed."""

from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.controller.deployment.failures import DeploymentFailures
from evenkeel_moe.model.ids import DeploymentId

ONE = DeploymentId("one")


def test_the_pause_doubles_with_each_failure_in_a_row_up_to_five_minutes():
    failures, now, pauses = DeploymentFailures(), 0.0, []
    for _ in range(9):
        failure = failures.note(ONE, ValueError("bad"), now)
        pauses.append(failure.pause_s)
        assert failures.waiting(ONE, now + failure.pause_s - 0.1) == failure
        now += failure.pause_s
        assert failures.waiting(ONE, now) is None
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_after_ten_minutes_without_a_failure_the_pause_is_short_again():
    failures = DeploymentFailures()
    failures.note(ONE, ValueError("bad"), 0.0)
    assert failures.note(ONE, ValueError("bad"), 604.0).pause_s == 10
    assert failures.note(ONE, ValueError("bad"), 604.0 + 10 + 600).pause_s == 5


def test_a_failure_names_the_error_and_other_deployments_do_not_wait():
    failures = DeploymentFailures()
    assert failures.note(ONE, ValueError("x" * 1000), 0.0).detail == f"ValueError: {'x' * 288}"
    assert failures.waiting(DeploymentId("two"), 0.0) is None


@given(st.lists(st.integers(0, 3000), max_size=3000))
def test_the_memory_is_bounded(names):
    failures = DeploymentFailures()
    for name in names:
        failures.note(DeploymentId(str(name)), ValueError(), 0.0)
    assert len(failures._newest) <= 1024
