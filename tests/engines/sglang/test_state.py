"""SGLang's maps, which also have rows for dense layers."""

from types import SimpleNamespace

import numpy as np
import pytest

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.sglang.state import MoeRows, WarmUp, counting_side, dispatcher


def test_dense_layers_keep_their_rows():
    rows = MoeRows((1, 3))
    hidden = np.arange(16).reshape(4, 4)
    assert np.array_equal(rows.moe(hidden), hidden[[1, 3]])
    new = rows.hidden(np.zeros((2, 4)), hidden)
    assert not new[[1, 3]].any()
    assert np.array_equal(new[[0, 2]], hidden[[0, 2]])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"ep_dispatch_algorithm": "static", "enable_waterfill": False}, "nearest"),
        ({"ep_dispatch_algorithm": "dynamic"}, "even"),
        ({"ep_dispatch_algorithm": "lp"}, "optimal"),
        ({"ep_dispatch_algorithm": "fake"}, "fake"),
        ({"ep_dispatch_algorithm": None}, ""),
        ({}, ""),
        ({"ep_dispatch_algorithm": "static", "enable_waterfill": True}, "waterfill"),
    ],
)
def test_the_dispatcher_has_the_planners_name_where_it_has_one(options, name):
    assert dispatcher(SimpleNamespace(**options)) == name


def gatherer(name, **attributes):
    return type(name, (), attributes)()


@pytest.mark.fault(
    "who serves with an SGLang that renamed a part of its recorder",
    "routed tokens were taken for received ones",
)
def test_a_recorder_that_does_not_tell_what_it_counts_is_refused_by_name():
    everywhere = "_enable_global_physical_experts"
    assert counting_side(gatherer("_SelectExperts", **{everywhere: True})) == "source"
    assert counting_side(gatherer("_DeepepLowLatency", **{everywhere: False})) == "destination"
    assert counting_side(gatherer("_DeepepNormalSinglePassGatherer")) == "destination"
    for renamed in ({}, {"_all_physical_experts": True}, {everywhere: None}):
        with pytest.raises(Unsupported, match=f"gathers with _Renamed, whose {everywhere} is None"):
            counting_side(gatherer("_Renamed", **renamed))


def test_the_warm_up_is_the_first_request_alone():
    warm_up = WarmUp(expected=True)
    passes = [None, [], ["HEALTH_CHECK_1"], ["a"], ["a"], ["a", "b"], ["b"], ["a"]]
    assert [warm_up.has(rids) for rids in passes] == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    clients = WarmUp(expected=True)
    assert not clients.has(["a", "b"]) and not clients.has(["a"]), "two clients came first"
    assert not WarmUp(expected=False).has(["a"])
