"""What a guest tells the controller when its process ends."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from evenkeel_moe.engines.guest.engine_guest import EngineGuest, _say_that_it_stops
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.topology import ModelShape
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


FACTS: Any = SimpleNamespace(device=torch.device("cpu"))


class Guest(EngineGuest):
    engine_name = "toy"

    refusal: Any = None
    fault: Any = None
    finish: Any = None
    _plan_group: Any = None
    _expert_calls: Any = None


def test_a_rank_that_cannot_read_its_engine_is_heard_before_any_other_message():
    guest, sent = Guest(toy_settings()), []

    def gather(row):
        sent.append(row.tolist())
        return np.array([[0], [1]])

    guest._gather = gather  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match=r"ranks \[1\]"):
        guest._start_agent(0, ModelShape(1, 2, 2, 2, 1, 8), lambda: FACTS)
    assert sent == [[0]]


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
