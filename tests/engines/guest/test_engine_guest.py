"""What a guest tells the controller when its process ends."""

from typing import Any

import pytest
import structlog

from evenkeel_moe.engines.guest.engine_guest import EngineGuest, _say_that_it_stops
from tests.engines.driving import toy_settings


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


class Guest(EngineGuest):
    engine_name = "toy"

    refusal: Any = None
    fault: Any = None
    finish: Any = None
    _plan_group: Any = None
    _expert_calls: Any = None

    def _deliver(self, note, counts):
        del note, counts


@pytest.mark.fault(
    "who serves with an engine that cannot tell the size of its KV cache",
    "the error ended the engine",
)
@pytest.mark.parametrize("error", [NotImplementedError(), KeyError("pool"), IndexError(0)])
def test_a_kv_cache_that_cannot_be_read_stays_unknown(error):
    def read():
        raise error

    with structlog.testing.capture_logs() as said:
        Guest(toy_settings()).kv_cache_allocated(read)
    assert [line["event"] for line in said] == ["kv_cache_unknown"]
