import pytest
from rich.console import Console

from evenkeel_moe.replay.tables import COLUMNS, comparison_table
from evenkeel_moe.replay.walk_metrics import WalkMetrics


def _figures(policy, time, balance=0.8):
    nan = float("nan")
    return WalkMetrics(
        policy,
        balance,
        0.7,
        0.6,
        time,
        1.1,
        1.2,
        1.3,
        14,
        48.6,
        60.6,
        50.6,
        723_700_000_000,
        nan,
        1007.9,
        nan,
    )


def _printed(width):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(comparison_table([_figures("once", 1.4), _figures("keel+verdict", 1.2)], width))
    console.file.close()
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
