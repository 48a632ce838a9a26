"""The comparison of what the ranks hold, and the map they go to."""

import numpy as np
import pytest

from evenkeel_moe.engines.guest.plan_agreement import ROW, PlanAgreement, find_disagreement


def table(**changes):
    """Return rows of four ranks that agree, except for column -> (rank, value)."""
    rows = np.tile(np.array([7, 1, 11, 22, 33, 100], np.int64), (4, 1))
    for name, (rank, value) in changes.items():
        rows[rank, ROW.index(name)] = value
    return rows


def test_equal_rows_have_no_disagreement():
    assert find_disagreement(table()) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": (2, 8)}, "ranks [2] of 4 have another version of this plugin"),
        ({"ordered": (1, 0)}, "ranks [1] of 4 have no plan where others have one"),
        ({"plan": (0, 12)}, "ranks [0] of 4 have another plan"),
        ({"target": (3, 0)}, "ranks [3] of 4 have another target map"),
        ({"base": (3, 0)}, "ranks [3] of 4 have another map now"),
        ({"step": (2, 99)}, "ranks {2: 99} of 4 have another step, the others 100"),
    ],
)
def test_any_difference_is_named_with_its_ranks(changes, words):
    assert find_disagreement(table(**changes)) == words


def test_ranks_without_a_plan_are_named_also_if_they_are_the_majority():
    rows = table()
    rows[1:, ROW.index("ordered")] = 0
    assert find_disagreement(rows) == "ranks [1, 2, 3] of 4 have no plan where others have one"


def test_without_a_plan_the_map_stays_and_nothing_is_refused():
    agreement, now = PlanAgreement(), np.arange(12).reshape(2, 6)
    assert np.array_equal(agreement.agree(now, lambda row: np.stack([row, row])), now)
    assert agreement.refused == ""
