"""The bench of the papers' figures without recorded traces."""

import json

import pytest

from bench import report, seeds


def test_without_traces_it_says_so_and_uses_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "OUT", tmp_path / "out")
    seeds.main(["--traces", str(tmp_path), "craft", "lplb", "waterfill", "metro", "capacity"])
    said = capsys.readouterr().out
    assert f"no traces in {tmp_path}: only the example trace" in said
    rows = json.loads((tmp_path / "out" / "seeds.json").read_text())["rows"]
    value = {row["name"]: row["value"] for row in rows}
    # Without redundant slots there is nothing to split; more of them give more to split.
    assert value["lplb_0_redundant_saved_mean"] == 0.0
    assert value["lplb_32_redundant_saved_mean"] > value["lplb_8_redundant_saved_mean"] > 0.0
    # The fewest active experts never exceed those of an even split.
    assert value["metro_8_redundant_active_on_worst_rank_saved_mean"] > 0.0
    assert value["waterfill_own_no_eplb_saved_mean"] > 0.0


def test_an_unknown_section_is_refused_with_those_that_exist(tmp_path, capsys):
    with pytest.raises(SystemExit):
        seeds.main(["--traces", str(tmp_path), "nosuch"])
    assert "unknown sections nosuch; known: craft, gem" in capsys.readouterr().err
