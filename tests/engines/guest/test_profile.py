"""A rank that starts with a saved profile measures it again and tells the controller both."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenkeel_moe.agent.profile.files import SavedProfile, load_profile, save_curve
from evenkeel_moe.agent.profile.timing import Timing
from evenkeel_moe.agent.profile.token_curve import TokenProfile
from evenkeel_moe.engines.guest.bootstrap import tell_profile
from evenkeel_moe.wire.link import ReplicaCost

SAVED = ReplicaCost(1e-5, 1e-7, 2e-6, 0.0, 0.02, 1.0e9)
CPU = torch.device("cpu")


@pytest.fixture
def told() -> Any:
    messages: list[Any] = []
    return SimpleNamespace(tell=messages.append, messages=messages)


def saved_with(tmp_path, **about) -> SavedProfile:
    profile = TokenProfile(32, (32, 64), Timing((1e-3, 2e-3), 5, 0.1))
    save_curve(tmp_path, "", profile, about, SAVED)
    found = load_profile(tmp_path, "")
    assert found is not None
    return found


LAYER = {"d_model": 128, "d_ffn": 128, "experts": 4, "dtype": "float32"}


def test_the_time_by_replicas_is_measured_at_the_start(tmp_path, told):
    saved = saved_with(tmp_path, **LAYER)
    tell_profile(told, saved, CPU, 0.2)
    curve, cost = told.messages
    assert curve == saved.curve
    assert cost.measured_unix_s > SAVED.measured_unix_s


@pytest.mark.parametrize(
    ("about", "budget_s"),
    [(LAYER, 0.0), ({}, 0.2), ({**LAYER, "experts": 1}, 0.2), ({**LAYER, "dtype": "quint8"}, 0.2)],
    ids=["no time", "no layer named", "one expert", "a number type without arithmetic"],
)
def test_what_cannot_be_measured_again_is_told_as_it_was_saved(tmp_path, told, about, budget_s):
    saved = saved_with(tmp_path, **about)
    tell_profile(told, saved, CPU, budget_s)
    assert told.messages == [saved.curve, SAVED]
