"""Plans on the reference engine deliver what they promise, by the seconds of its ranks."""

import pytest

from bench.delivered import run_once

pytestmark = pytest.mark.timed
LARGE = 0.1
"""A promise that noise of a busy machine does not reach."""


def test_a_large_promise_is_delivered_and_the_ranks_own_lines_agree():
    found = run_once(0)
    large = [one for one in found if one.delivered["promised"] >= LARGE]
    assert large, f"no plan promised {LARGE:.0%} of MoE time: {found}"
    for one in large:
        told = one.delivered
        assert 0.7 <= told["over_promised"] <= 1.3, one
        assert told["lower"] <= told["gain"] <= told["upper"]
        assert told["gain"] == pytest.approx(one.by_lines, abs=0.05), one
