"""What a guest tells the controller when its process ends."""

from typing import Any

import pytest

from evenkeel_moe.engines.guest.engine_guest import _say_that_it_stops


class Agent:
    def __init__(self):
        self.closed = []

    def close(self, *, planned):
        self.closed.append(planned)


def _ends(error):
    agent: Any = Agent()
    try:
        if error is not None:
            raise error
    except BaseException:
        _say_that_it_stops(agent)
    else:
        _say_that_it_stops(agent)
    return agent.closed


@pytest.mark.parametrize("error", [None, SystemExit(0), SystemExit(1)])
def test_an_exit_is_planned(error):
    assert _ends(error) == [True]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_an_error_that_ends_the_process_is_not_planned(error):
    assert _ends(error) == [False]
