"""A rank becomes slow in `auto`; `make bench-vllm_delivered` prints the gains of more plans."""

import time

import pytest

from bench.vllm_delivered import REPEATED, SLOW_RANK, started
from tests.integration.whole import plans
from tests.vllm.server import TENSOR_PARALLEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
NEWEST_S = 5.0
CLEARLY = 0.03
"""Of the tokens."""


def wait_for_plans(run, since, holds, what):
    """Wait until plans that began since then were measured, and the slow rank's share fits."""

    def found():
        carried_out = [one for one in plans(run.served, "committed") if one["created_at"] > since]
        measured = [one for one in carried_out if one["delivered"] is not None]
        return measured and holds(run.share_of(SLOW_RANK, NEWEST_S)) and measured

    return run.served.wait(found, 120, what)


def test_a_slow_rank_computes_less_until_it_recovers(capsys):
    with started(TENSOR_PARALLEL) as run:
        cost = run.wait_until_measured()
        assert cost["unit"] == "s"
        run.served.patch_policy(mode="auto")
        run.topic(0)
        usual, began = run.share_of(SLOW_RANK, NEWEST_S), time.time()
        run.server.call("repeat_experts", rank=SLOW_RANK, share=REPEATED)
        found = wait_for_plans(
            run, began, lambda share: share < usual - CLEARLY, "the slow rank to be relieved"
        )
        slowness = run.served.get()["ranks"][SLOW_RANK]["slowness"]
        relieved, recovered = run.share_of(SLOW_RANK, NEWEST_S), time.time()
        run.server.call("repeat_experts", rank=SLOW_RANK, share=0.0)
        found += wait_for_plans(
            run, recovered, lambda share: share > relieved + CLEARLY, "experts to be given back"
        )
        again = run.share_of(SLOW_RANK, NEWEST_S)
    assert slowness > 1.15
    known = [one["delivered"] for one in found if one["delivered"]["gain"] is not None]
    assert known, [one["delivered"]["unknown_because"] for one in found]
    assert all(one["lower"] <= one["gain"] <= one["upper"] for one in known)
    assert any(one["before"] and one["after"] and one["after"]["tokens_per_s"] > 0 for one in known)
    with capsys.disabled():
        print(
            f"\nrank {SLOW_RANK}, {slowness:.2f} times as slow as the median rank: {usual:.0%} of"
            f" the tokens, then {relieved:.0%}, after its recovery {again:.0%}"
        )
        for one in known:
            print(
                f"promised {one['promised']:.1%}, delivered {one['gain']:.1%} +- {one['error']:.1%}"
            )
