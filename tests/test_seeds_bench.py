"""The bench of the papers' figures without recorded traces."""

import json

import numpy as np
import pytest

from bench import report, seeds, seeds_kv
from bench.dispatch_tokens import waterfill_rule_rows
from bench.dispatch_traces import Recorded
from bench.loads import zipf_load
from bench.seeds_gem import RESTARTS, gem_search_rows
from bench.seeds_kv import memory_rows
from bench.seeds_regimes import regime_rows


def test_without_traces_it_says_so_and_uses_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "OUT", tmp_path / "out")
    monkeypatch.setattr(seeds, "TRACES", tmp_path)
    seeds.main(["craft", "lplb", "waterfill", "metro"])
    said = capsys.readouterr().out
    assert f"no traces in {tmp_path}: only the example trace" in said
    rows = json.loads((tmp_path / "out" / "seeds.json").read_text())["rows"]
    value = {row["name"]: row["value"] for row in rows}
    # Without redundant slots there is nothing to split; more of them give more to split.
    assert value["lplb_0_redundant_saved_mean"] == 0.0
    assert value["lplb_32_redundant_saved_mean"] > value["lplb_8_redundant_saved_mean"] > 0.0
    # The fewest active experts never exceed those of an even split.
    assert value["metro_8_redundant_active_on_worst_rank_saved_mean"] > 0.0
    assert value["waterfill_own_no_eplb_ideal_saved_mean"] > 0.0


def test_the_rule_of_waterfill_saves_less_than_its_ideal_and_more_with_more_to_choose_from():
    rng = np.random.default_rng(4)
    # Each rank's tokens have hot experts of their own, so ranks alone cannot know where room is.
    own = rng.permuted(np.tile(1.0 / np.arange(1, 65) ** 0.5, (8, 1)), axis=1)
    law = np.tile(np.repeat(own, 256, axis=0), (4, 1))
    drawn = rng.exponential(size=(3, *law.shape)) / law
    tokens = np.argsort(drawn, axis=2)[:, :, :4].transpose(1, 0, 2)
    [rows] = waterfill_rule_rows({"A_drawn": tokens})
    saved = {row.name: row.value for row in rows}
    for share in ("own", "one_to_8"):
        for placement in ("no_eplb", "eplb_0_redundant", "eplb_8_redundant", "eplb_16_redundant"):
            forms = [
                saved[f"waterfill_{share}_{placement}_A_drawn_{form}_saved"]
                for form in ("rule_static", "rule", "rule_all_ranks", "ideal")
            ]
            assert forms == sorted(forms), (share, placement)
            assert forms[0] < forms[-1]


def test_more_restarts_of_gem_never_lose_on_the_window_and_few_tokens_are_profiled():
    load = np.stack([zipf_load(2, 16, tokens=800, seed=step) for step in range(80)])
    trace = Recorded("drawn", load, load[:, None], None, None, 2, 1)
    rows = {row.name: row.value for part in gem_search_rows([trace]) for row in part}
    window = [rows[f"gem_restarts_{count}_window_saved_mean"] for count in RESTARTS]
    assert window == sorted(window) and window[0] > 0.0
    assert 0 <= rows["gem_swaps_mean"] <= rows["gem_swaps_most"]
    assert rows["gem_profile_counts"] <= 62
    assert rows["gem_profile_counts_saved"] > 200
    gaps = [rows[f"gem_gap_{ranks}_ranks"] for ranks in (4, 8, 16, 32, 64)]
    assert gaps == sorted(gaps)
    assert gaps[0] == pytest.approx(0.119, abs=0.002)


def test_craft_shines_on_skewed_layers_and_gem_on_temporal_experts():
    rows = {row.name: row.value for part in regime_rows() for row in part}
    craft = [rows[f"regime_skew_{skew}_craft_share_of_eplb_gain"] for skew in (2, 5, 10)]
    gem = [rows[f"regime_temporal_{n}_low_gem_over_eplb_mean_saved"] for n in (0, 3, 8)]
    assert craft == sorted(craft) and craft[-1] > 0.8
    assert gem == sorted(gem) and gem[-1] > 0.02


def test_the_papers_shares_of_the_kv_cache_follow_from_the_sizes_of_its_models():
    rows = {row.name: row.value for row in memory_rows()}
    assert rows["kv_paper_D8_share_taken"] == pytest.approx(0.19, abs=0.01)
    # One amount of memory does not explain both shares that are printed for Kimi-K2.
    assert rows["kv_paper_K12_share_taken"] < 0.2 < rows["kv_paper_K12_share_taken_claimed"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fewer_replicas_leave_more_kv_cache_and_serve_more_requests_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(seeds_kv, "OUT", tmp_path)
    config = seeds_kv.SERVED.replace(steps=50)
    rows = {row.name: row.value for part in seeds_kv.kv_rows(config, (6,)) for row in part}
    found = {
        figure: [rows[f"kv_24_buffers_{policy}_{figure}"] for policy in ("none", "craft", "eplb")]
        for figure in ("replicas_per_rank", "kv_tokens_per_rank", "batch_per_rank")
    }
    assert found["replicas_per_rank"] == [0, 1, 4]
    assert found["kv_tokens_per_rank"] == [256, 224, 128]
    none, craft, eplb = found["batch_per_rank"]
    assert none > craft > eplb
    # The less a step gets longer with its batch, the more the KV cache is worth.
    over_eplb = [rows[f"kv_24_buffers_{what}_craft_over_eplb"] for what in ("compute", "read")]
    assert 1.0 < over_eplb[0] < over_eplb[1]
    assert "EPLB" in (tmp_path / "goodput.svg").read_text()


def test_an_unknown_section_is_refused_with_those_that_exist(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(seeds, "TRACES", tmp_path)
    with pytest.raises(SystemExit):
        seeds.main(["nosuch"])
    assert "unknown sections nosuch; known: craft, gem" in capsys.readouterr().err
