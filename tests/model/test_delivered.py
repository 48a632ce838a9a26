"""A measured gain has an interval around it, or a reason why it is unknown."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.delivered import DeliveredGain

KNOWN: dict[str, Any] = {"gain": 0.1, "error": 0.01, "lower": 0.08, "upper": 0.12}


@pytest.mark.parametrize(
    "changes",
    [
        {"gain": None},
        {"error": None},
        {"error": -0.1},
        {"lower": 0.11},
        {"upper": 0.09},
        {"upper": 1.1},
        {"gain": math.nan},
        {"lower": -math.inf},
        {"modelled": math.inf},
        {"modelled": 1.5},
        {"at": math.nan},
        {"steps": -1},
    ],
)
def test_impossible_values_are_refused(changes):
    with pytest.raises(InvalidInput, match="gain"):
        DeliveredGain(**{"at": 1.0, **KNOWN, "steps": 64} | changes)


def test_what_is_unknown_has_a_reason():
    assert DeliveredGain(1.0, unknown_because="no rank reports seconds").gain is None
    with pytest.raises(InvalidInput):
        DeliveredGain(1.0)


@given(st.none() | st.floats(-1, 1))
def test_only_a_promise_can_be_kept(promised):
    kept = DeliveredGain(1.0, **KNOWN).over(promised)
    assert kept == (0.1 / promised if promised is not None and promised > 0 else None)
    assert DeliveredGain(1.0, unknown_because="why").over(promised) is None
