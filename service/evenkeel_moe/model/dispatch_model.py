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
    WATERFILL = "waterfill"
    """An even split; the work of shared experts goes to the ranks with the least routed load."""
    FEWEST = "fewest"
    """Per batch, one replica computes all tokens of an expert, chosen so that the rank with the
    most active experts has the fewest (METRO)."""

    @property
    def per_batch(self) -> bool:
        """True if every batch is split by its own counts, so that slots have no fixed share."""
        return self in (DispatchModel.OPTIMAL, DispatchModel.FEWEST)
