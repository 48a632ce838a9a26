"""Dispatch rules in real rank processes, while waves move experts."""

import pytest

from evenkeel_moe.engines.reference.config import DispatchRule
from tests.engines.reference.test_run import lines, run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


# Each rule is compared over real Gloo, across a change of the map, in test_dispatch.py.
@pytest.mark.parametrize("rule", [DispatchRule.LPLB, DispatchRule.LIBRA_REFINED])
def test_outputs_stay_exact_under_a_rule_while_experts_move(tmp_path, rule):
    script = {"seed": 7, "plans": 2, "uneven": True, "abort": []}
    report = run(tmp_path, script, steps=40, min_step_s=0.02, dispatch=rule)
    assert report.ok, report
    for rank in range(2):
        [check] = lines(tmp_path, rank, "check")
        assert check["ok"] and check["mismatches"] == 0 and check["rows_checked"] == 40 * 64
        assert check["swaps"] >= 2 and check["dropped_records"] == 0
    by_step = [
        [sum(load) for load in zip(*(row["served"] for row in rows), strict=True)]
        for rows in zip(*(lines(tmp_path, rank, "step") for rank in range(2)), strict=True)
    ]
    # Two ranks, 64 tokens each, two choices and one shared expert.
    assert by_step == [[2 * 64 * 3] * 3] * 40
