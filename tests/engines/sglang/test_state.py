"""SGLang's maps, which also have rows for dense layers."""

from types import SimpleNamespace

import numpy as np
import pytest

from evenkeel_moe.engines.sglang.state import MoeRows, dispatcher
from evenkeel_moe.errors import ShapeMismatch


def test_dense_layers_keep_their_rows():
    rows = MoeRows((1, 3))
    hidden = np.arange(16).reshape(4, 4)
    assert np.array_equal(rows.moe(hidden), hidden[[1, 3]])
    new = rows.hidden(np.zeros((2, 4)), hidden)
    assert not new[[1, 3]].any()
    assert np.array_equal(new[[0, 2]], hidden[[0, 2]])
    with pytest.raises(ShapeMismatch, match=r"\(3, 4\) layers and slots, SGLang has \(2, 4\)"):
        rows.hidden(np.zeros((3, 4)), hidden)


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
