"""The rules by which engines split the tokens of an expert over its replicas."""

from enum import StrEnum


class DispatchModel(StrEnum):
    """The rule by which the engine splits an expert's tokens over its replicas."""

    EVEN = "even"
    """Every replica takes the same share."""
    NEAREST = "nearest"
    """A source rank uses its own replica, else one on its node, else an even share."""
    OPTIMAL = "optimal"
    """Per-batch LP (LPLB): the split that minimises the largest rank load."""
