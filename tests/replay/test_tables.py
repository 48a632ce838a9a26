import io

import pytest
from rich.console import Console

from evenkeel_moe.replay.tables import COLUMNS, comparison_table
from evenkeel_moe.replay.walk_metrics import WalkMetrics


def _metrics(policy, time):
    return WalkMetrics(
        policy=policy,
        balancedness_mean=0.8,
        balancedness_p5=0.7,
        balancedness_worst=0.6,
        time_over_fluid=time,
        step_time_p50=1.1,
        step_time_p90=1.2,
        step_time_p99=1.3,
        replans=14,
        copies_per_layer=48.6,
        copies_per_layer_raw=60.6,
        first_copies_per_layer=50.6,
        bytes=723_700_000_000,
        copy_s=18.1,
        first_bytes=0,
        plan_ms=1007.9,
        plan_ms_max=float("nan"),
    )


def _printed(width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison_table([_metrics("once", 1.4), _metrics("keel+verdict", 1.2)], width))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [48, 60, 80, 120])
def test_no_number_is_cut(width):
    lines = _printed(width)
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width
    assert "1.2000" in lines[-1]


def test_a_usual_terminal_shows_every_column():
    assert len(_printed(80)[-1].split()) >= len(COLUMNS)


def test_the_best_values_are_those_shown_alike_in_columns_with_an_order():
    by_key = {column.key: column for column in COLUMNS}
    assert by_key["time_over_fluid"].best([1.30004, 1.3, 1.4]) == {0, 1}
    assert by_key["balancedness_mean"].best([0.8, 0.9, float("nan")]) == {1}
    assert by_key["bytes"].best([1.0, 2.0]) == set()
    assert by_key["time_over_fluid"].best([float("nan")]) == set()
