"""Libra's lookahead predictor: the gate of the next layer on the hidden state of this layer.

Hidden states change little from layer to layer, so the prediction is mostly right, and it is known
before the next layer starts.

Source: Libra, section 3.2; accuracy as in its Table 1.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from evenkeel_moe.errors import InvalidInput, ShapeMismatch


class Lookahead:
    """Predicts the experts of layer l + 1 from the hidden state that enters the MoE of layer l."""

    def __init__(self, gates: Sequence[Callable[[Tensor], Tensor]]) -> None:
        """Take the (L,) routers as the model uses them: (n, D) hidden -> (n, k) experts.

        Complete routers keep norms, biases and group limits in the prediction.
        """
        self._gates = gates

    def predict(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Predict the experts the tokens will choose in layer + 1.

        Args:
            layer: the present layer.
            hidden: (n, D) hidden state before its MoE.

        Returns:
            (n, k) int64, None after the last layer.

        Raises:
            InvalidInput: the layer does not exist.
        """
        if not 0 <= layer < len(self._gates):
            raise InvalidInput(f"layer {layer} is outside 0..{len(self._gates) - 1}")
        return self._gates[layer + 1](hidden) if layer + 1 < len(self._gates) else None


def prediction_accuracy(predicted: Tensor, actual: Tensor) -> float:
    """Return the share of the chosen experts that were predicted, in any order.

    Args:
        predicted: (n, k') int64.
        actual: (n, k) int64, -1 for padding.

    Returns:
        0..1; NaN if no expert was chosen.

    Raises:
        ShapeMismatch: the numbers of tokens differ.
    """
    if predicted.ndim != 2 or actual.ndim != 2 or predicted.shape[0] != actual.shape[0]:
        raise ShapeMismatch(
            f"predicted {tuple(predicted.shape)} and actual {tuple(actual.shape)} differ"
        )
    chosen = actual >= 0
    hit = (actual.unsqueeze(2) == predicted.unsqueeze(1)).any(dim=2) & chosen
    total = int(chosen.sum())
    return int(hit.sum()) / total if total else float("nan")
