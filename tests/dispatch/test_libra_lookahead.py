"""The prediction of the experts of the next layer."""

import numpy as np
import pytest
import torch

from evenkeel_moe.dispatch import (
    Lookahead,
    prediction_accuracy,
)
from evenkeel_moe.errors import InvalidInput, ShapeMismatch


def test_lookahead_asks_the_next_gate_about_this_hidden_state():
    gates = [lambda x, shift=shift: (x.long() + shift) % 4 for shift in range(3)]
    lookahead = Lookahead(gates)
    hidden = torch.tensor([[0.0], [1.0]])
    ahead = lookahead.predict(0, hidden)
    assert ahead is not None and ahead.tolist() == [[1], [2]]
    assert lookahead.predict(2, hidden) is None
    with pytest.raises(InvalidInput):
        lookahead.predict(3, hidden)


def test_accuracy_is_the_share_of_chosen_experts_predicted():
    actual = torch.tensor([[0, 1], [2, -1], [-1, -1]])
    assert prediction_accuracy(torch.tensor([[1, 3], [2, 0], [0, 1]]), actual) == pytest.approx(
        2 / 3
    )
    assert np.isnan(
        prediction_accuracy(torch.zeros((1, 2), dtype=torch.int64), torch.full((1, 2), -1))
    )
    with pytest.raises(ShapeMismatch):
        prediction_accuracy(torch.zeros((2, 2), dtype=torch.int64), actual)
