from dataclasses import replace

from evenkeel_moe.replay.walk import walk_forward
from evenkeel_moe.replay.walk_metrics import measure_walk
from evenkeel_moe.replay.words import COLUMNS


def test_the_best_values_are_those_shown_alike_in_columns_with_an_order(setup):
    result = measure_walk(walk_forward("initial", lambda replan: None, setup), 10)

    def best(key, *values):
        column = next(column for column in COLUMNS if column.key == key)
        cells = column.cells([replace(result, **{key: value}) for value in values])
        return [text for text, is_best in cells if is_best]

    assert best("time_over_fluid", 1.30004, 1.3, 1.4) == ["1.3000", "1.3000"]
    assert best("balancedness_mean", 0.8, 0.9, float("nan")) == ["0.9000"]
    assert best("bytes", 1, 2) == []
    assert best("time_over_fluid", float("nan")) == []
