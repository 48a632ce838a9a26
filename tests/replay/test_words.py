from dataclasses import replace

import numpy as np

from evenkeel_moe.replay.report import render_report
from evenkeel_moe.replay.walk_metrics import COPY_BYTES_PER_S
from evenkeel_moe.replay.words import sentences
from tests.replay.test_report import _compare


def test_the_best_policy_is_named_with_what_it_gains_and_costs(setup):
    comparison = _compare(setup, "eplb", "initial")
    comparison = replace(
        comparison,
        results=tuple(
            replace(one, time_over_fluid=over, bytes=4_000_000_000, copy_s=0.5, replans=3)
            for one, over in zip(comparison.results, (1.1, 1.375), strict=True)
        ),
    )
    verdict, copies, *_ = sentences(comparison)
    assert verdict == (
        "eplb has the least predicted MoE time (by tokens), 10.0% above a perfect split of tokens,"
        " 20.0% less than the initial placement."
    )
    assert copies == "A replan of eplb copies 2 GB between ranks, about 0.25 s at 5 GB/s per rank."
    worse = replace(comparison, results=tuple(reversed(comparison.results)))
    assert sentences(worse)[0].startswith("eplb ")
    alone = replace(comparison, results=(replace(comparison.results[0], bytes=0),))
    assert sentences(alone)[1] == "After its first plan eplb copies nothing."
    unknown = replace(comparison.results[0], time_over_fluid=np.nan)
    nothing = sentences(replace(comparison, results=(unknown,)))
    assert "no load" in nothing[0] and nothing[1].startswith("Cost model")


def test_ranks_copy_at_the_same_time(setup):
    (result,) = _compare(setup, "eplb").results
    assert result.bytes > 0
    assert result.copy_s == result.bytes / 2 / COPY_BYTES_PER_S


def test_the_page_begins_with_the_sentence_and_names_its_command(setup):
    comparison = _compare(setup, "eplb")
    page = render_report(comparison, made_by="evenkeel replay compare '<b>'")
    assert page.index(sentences(comparison)[0]) < page.index("<table>")
    assert "compare &#x27;&lt;b&gt;&#x27;</code>" in page
    assert "Made by" not in render_report(comparison)
