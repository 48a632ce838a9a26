"""`evenkeel replay` with options of the KV cache: replicas are weighed against it."""

from html import escape

import pytest

from evenkeel_moe.errors import InvalidInput
from tests.cli.conftest import FLEET, SMALL, replayed, run_replay
from tests.replay.conftest import SHIPPED

EXPERT = 44_040_192
KV = {"kv_bytes_per_token": 70_000, "kv_free_bytes": 10**10}


def rows_of(answer):
    return {(row["rule"], row["level"]): row for row in answer["replica_tradeoff"]["rows"]}


def test_compare_weighs_every_number_of_replicas_on_the_shipped_trace(tmp_path):
    args = ("compare", SHIPPED, "--slots", 72, "-p", "eplb")
    plain = replayed(*args, bytes_per_expert=EXPERT)
    assert "replica_tradeoff" not in plain
    asked = {**KV, "bytes_per_expert": EXPERT, "tokens_per_sequence": 4096, "moe_share": 0.4}
    answer = replayed(*args, **asked)
    layers, rows = answer["layers"], rows_of(answer)
    assert rows["uniform", 8]["present"] is True
    none = rows["uniform", 0]
    assert none["extra_bytes_per_rank"] == -layers * EXPERT
    # One replica per layer and rank less: its bytes come back as KV tokens.
    assert none["kv_tokens"] == (10**10 + layers * EXPERT) // 70_000
    assert none["sequences"] == none["kv_tokens"] // 4096
    now = rows["uniform", 8]["sequences"]
    step = 1 - 0.4 * none["gain"]
    assert none["goodput_lower"] == pytest.approx(none["sequences"] / now / step - 1)
    # CRAFT with one replica per layer and rank uses no more memory than that in every layer.
    assert rows["craft", layers]["replicas"] <= rows["uniform", 8]["replicas"]
    assert rows["craft", 1]["kv_tokens_lost"] < 0 < rows["uniform", 16]["kv_tokens_lost"]
    page = tmp_path / "page.html"
    text = " ".join(run_replay(*args, "--out", page, **asked).split())
    assert "Extra replicas against KV cache" in text
    assert answer["replica_tradeoff"]["words"] in text
    written = page.read_text()
    assert escape(answer["replica_tradeoff"]["words"]) in written
    assert f"<td>{none['kv_tokens']:,}</td>" in written


def test_plan_weighs_them_on_the_newest_steps(small, tmp_path):
    plan = ("plan", small, *FLEET, "-p", "eplb", "--out", tmp_path / "out")
    kv = {"kv_bytes_per_token": 10, "kv_free_bytes": 10_000, "bytes_per_expert": 100}
    answer = replayed(*plan, **kv)
    rows = rows_of(answer)
    assert [row["sequences"] for row in rows.values()] == [None] * len(rows)
    present = next(row for row in rows.values() if row["present"])
    assert (present["kv_tokens"], present["kv_tokens_lost"]) == (1000, 0)
    assert answer["replica_tradeoff"]["words"] in " ".join(run_replay(*plan, **kv).split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_bytes_per_token": 10}, "need each other"),
        ({"kv_free_bytes": 10}, "need each other"),
        ({"tokens_per_sequence": 10}, "tokens_per_sequence needs kv_bytes_per_token"),
        ({"moe_share": 0.5}, "moe_share needs kv_bytes_per_token"),
    ],
)
def test_options_of_the_kv_cache_belong_together(small, tmp_path, options, words):
    for command in (("compare", *SMALL), ("plan", *FLEET, "--out", tmp_path / "out")):
        with pytest.raises(InvalidInput, match=words):
            run_replay(command[0], small, *command[1:], **options)


def test_a_window_of_one_step_cannot_be_scored(small, tmp_path):
    with pytest.raises(InvalidInput, match="a window of 1 steps is too short"):
        run_replay("plan", small, *FLEET, "--out", tmp_path / "out", window=1, **KV)
