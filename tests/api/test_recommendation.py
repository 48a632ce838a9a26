import math
from dataclasses import asdict, replace

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.planning.decision.kv_promise import KvPromise
from evenkeel_moe.planning.decision.recommendation import PolicyScore, Recommendation
from evenkeel_moe.planning.decision.verdict import Call, Verdict
from tests.api.conftest import assert_problem
from tests.api.fakes import NOW, make_advice

PATH = "/v1/deployments/demo/recommendation"


async def test_a_recommendation_with_its_figures_and_null_for_unknown(client):
    body = (await client.get(PATH)).json()
    assert (body["call"], body["reason"], body["at"]) == ("recommend", "plan_started", NOW)
    assert (body["window_steps"], body["planned_on_steps"], body["scored_on_steps"]) == (60, 40, 20)
    assert body["verdict"] == body["policies"][0]["verdict"]
    assert (body["verdict"]["gain"], body["verdict"]["copy_cost_share"]) == (0.2, 0.002)
    assert body["verdict"]["net_gain"] == pytest.approx(0.198)
    assert body["verdict"]["payback_steps"] == 10
    for unknown in (
        body["verdict"]["payback_s"],
        body["free_bytes"],
        body["steps_since_change"],
        body["policies"][1]["verdict"],
        body["policies"][1]["copies"],
        body["redundancy"]["levels"][2]["fits"],
        body["redundancy"]["levels"][0]["marginal_gain"],
    ):
        assert unknown is None
    assert body["policies"][1]["detail"] == "ZeroDivisionError: 1 / 0"
    assert body["redundancy"]["levels"][0]["extra_bytes_per_rank"] == -1000
    assert body["shadow"] == {"keel": {"at": NOW, "gain": 0.1, "call": "recommend"}}
    assert body["words"] == ["eplb would make 2 copies."]
    assert (
        body["cost_model"]
        == body["verdict"]["cost_model"]
        == {
            "source": "tokens",
            "detail": "",
            "unit": "tokens",
            "fit_error": None,
            "words": "by tokens, because nothing is known of time",
        }
    )


async def test_insufficient_evidence_is_a_result_and_not_an_error(client, operations):
    found = Recommendation(
        Call.INSUFFICIENT_EVIDENCE,
        Reason.INSUFFICIENT_DATA,
        ("The window holds 3 complete steps, 64 are needed: nothing was planned.",),
        *(3, 0, 0, None),
    )
    operations.advice = make_advice(recommendation=found, newest_step=None, shadow={})
    body = (await client.get(PATH)).json()
    assert (body["call"], body["reason"]) == ("insufficient_evidence", "insufficient_data")
    assert (body["verdict"], body["redundancy"], body["policies"]) == (None, None, [])


async def test_figures_that_are_not_finite_are_null(client, operations):
    verdict = Verdict(
        Call.INSUFFICIENT_EVIDENCE,
        1,
        -0.1,
        math.nan,
        math.nan,
        -5.0,
        0.0,
        1000,
        0.0,
        math.inf,
        None,
    )
    advice = make_advice()
    score = PolicyScore("eplb", Reason.GAIN_TOO_SMALL, 1, 1, math.nan, verdict)
    known = advice.recommendation.redundancy
    assert known is not None
    level = replace(known.levels[0], gain=math.nan, gain_upper=math.inf)
    found = replace(
        advice.recommendation, policies=(score,), redundancy=replace(known, levels=(level,))
    )
    operations.advice = replace(advice, recommendation=found)
    body = (await client.get(PATH)).json()
    assert body["verdict"]["gain"] == -0.1
    assert (body["verdict"]["gain_lower"], body["verdict"]["payback_steps"]) == (None, None)
    assert body["policies"][0]["balancedness_expected"] is None
    shown = body["redundancy"]["levels"][0]
    assert (shown["gain"], shown["gain_lower"], shown["gain_upper"]) == (None, -0.12, None)
    assert body["replica_tradeoff"]["rows"][0]["gain"] is None


async def test_the_caller_chooses_the_largest_age_of_the_result(client, operations):
    assert (await client.get(PATH)).status_code == 200
    assert (await client.get(PATH, params={"max_age_s": 0})).status_code == 200
    assert operations.calls == [("recommendation", "demo", None), ("recommendation", "demo", 0.0)]
    for age in (-1, "old", 1e9, math.inf):
        assert_problem(await client.get(PATH, params={"max_age_s": age}), 422)


async def test_replicas_are_weighed_against_the_kv_cache(client):
    """50,000 bytes hold 5000 tokens of 10 bytes; 4 replicas a layer take 2000 bytes of them."""
    found = (await client.get(PATH, params={"tokens_per_sequence": 1000})).json()
    weighed = found["replica_tradeoff"]
    assert weighed["kv"] == {"bytes_per_token": 10, "free_bytes": 50_000}
    assert (weighed["tokens_per_sequence"], weighed["moe_share"]) == (1000, None)
    rows = {(row["rule"], row["level"]): row for row in weighed["rows"]}
    assert set(rows) == {("uniform", 0), ("uniform", 2), ("uniform", 4), ("craft", 1)}
    more = rows["uniform", 4]
    assert (more["kv_tokens_lost"], more["kv_tokens"], more["sequences"]) == (200, 4800, 4)
    assert more["balancedness"] == 0.9
    assert more["goodput_lower"] == pytest.approx(-0.2)
    assert more["goodput_upper"] == pytest.approx(0.8 / 0.99 - 1)
    assert rows["uniform", 2]["present"] is True
    assert rows["craft", 1]["kv_tokens_lost"] == -100
    assert found["redundancy"]["craft_factors"]["memory"] is None
    unasked = (await client.get(PATH)).json()["replica_tradeoff"]
    assert {row["sequences"] for row in unasked["rows"]} == {None}


async def test_without_a_told_kv_cache_its_loss_is_unknown_and_not_zero(client, operations):
    operations.advice = make_advice(kv=None)
    weighed = (await client.get(PATH)).json()["replica_tradeoff"]
    for row in weighed["rows"]:
        assert (row["kv_tokens_lost"], row["kv_tokens"], row["goodput_lower"]) == (None, None, None)
    assert weighed["kv"] is None
    assert "unknown" in weighed["words"]


@pytest.mark.parametrize("tokens", [0, -1, "many", 2**31 + 1])
async def test_a_length_that_no_sequence_has_is_refused(client, tokens):
    assert_problem(await client.get(PATH, params={"tokens_per_sequence": tokens}), 422)


async def test_promised_kv_tokens_are_compared_with_those_reported(client, operations):
    assert (await client.get(PATH)).json()["kv_promise"] is None
    promise = KvPromise(4, 5, 80, 76, 0.95, "5 slots promised 80 KV tokens, 76 are there.")
    operations.advice = make_advice(kv_promise=promise)
    body = (await client.get(PATH)).json()
    assert body["kv_promise"] == asdict(promise)
    assert body["words"] == ["eplb would make 2 copies.", promise.words]
