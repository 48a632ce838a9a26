"""vllm-ascend's newer model runner, which uses vLLM's `EplbState`; no such device was there."""

import numpy as np
import pytest

from tests.engines import ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def test_plans_and_loads_of_the_newer_runner():
    found = ranks.run("tests.engines.vllm.ascend", "place")
    for seen in found:
        for name in ("first", "second"):
            assert np.array_equal(seen[name]["map"], seen[name]["target"])
            assert (seen[name]["wrong"], seen[name]["trouble"]) == ([], "")
        assert not np.array_equal(seen["first"]["before"], seen["first"]["target"])
        assert seen["waited"] == 1, "it rearranges only once a rank has recorded load"
        assert seen["sides"] == {"destination"}
        assert seen["watched"]
        assert seen["tokens"] == [12] * 4
        assert seen["counts"].shape == (4, 3, 4), "the slots of this rank"
    executed = sum(seen["counts"].sum(axis=2) for seen in found)
    assert (executed == 2 * 2 * 12).all(), "tokens of both ranks times top-k in every layer"
