"""Weights that SGLang replaces between and during plans."""

import numpy as np
import pytest

from tests.engines import ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
SCENARIOS = "tests.engines.sglang.reloads"


@pytest.mark.parametrize(
    "way",
    [
        *("disk", "ipc", "tensor", "distributed", "release"),
        pytest.param(
            "new tensors",
            marks=pytest.mark.fault(
                "who serves with SGLang's transformers backend",
                "a reload of weights ended migration for good",
            ),
        ),
    ],
)
def test_updates_during_and_after_a_plan_leave_the_new_bytes_and_the_next_plan_works(way):
    for seen in ranks.run(SCENARIOS, "replaced", way=way):
        assert seen["first"]["epoch"] == 1
        assert seen["moving"], "the first update comes in the middle of a move"
        for name in ("during", "after"):
            part = seen[name]
            assert (part["epoch"], part["wrong"], part["trouble"]) == (2, [], "")
            assert np.array_equal(part["moe"], part["placement"])
        assert all(seen["answers"]) and seen["vote"]
        assert np.array_equal(seen["moe"], seen["target"])
        assert (seen["epoch"], seen["wrong"], seen["trouble"]) == (3, [], "")


def test_a_draft_keeps_the_version_replaced_tensors_are_found_and_a_release_is_not_refused():
    for seen in ranks.run(SCENARIOS, "other_sessions"):
        assert seen["versions"] == (1, 1)
        assert seen["trouble"].startswith("3 of 3 tensors that SGLang would move in layer 2 are no")
        assert seen["said"] == ["release_not_prepared"]


def test_observing_changes_nothing_about_an_update():
    for seen in ranks.run(SCENARIOS, "observed"):
        assert (seen["wrong"], seen["trouble"]) == ([], "")
