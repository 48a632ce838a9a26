"""The picture of the README: the plan brings the fullest rank near the mean of the same tokens."""

import numpy as np

from deploy.readme_picture import draw, rank_tokens


def test_the_plan_lowers_the_fullest_rank_of_the_shipped_trace(tmp_path):
    _, (before, after) = rank_tokens()
    assert np.isclose(before.sum(), after.sum())
    assert after.max() / after.mean() < 1.15 < before.max() / before.mean()
    draw(tmp_path / "ranks.svg")
    assert (tmp_path / "ranks.svg").read_text().startswith("<?xml")
