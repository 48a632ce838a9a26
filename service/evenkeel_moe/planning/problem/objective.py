"""The objective of a plan: cost model, dispatch model, price of copies and limits.

The same value goes from the settings through a cycle (or a replay) to the policy, so that all of
them minimise one thing.
"""

import math
from dataclasses import asdict, dataclass

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.cost import TOKENS, CostModel
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.plan import PlanLimits

PRICE_MARGIN = 1.5
"""Multiple, >= 1, of the price of its copies that a plan must gain to be adopted. The price is
spread over a lifetime that is only expected: with 1.5 a plan pays even if the placement lasts two
thirds of it."""


@dataclass(frozen=True, eq=False, slots=True)
class Objective:
    """The quantity that a plan minimises, and the limits it must keep.

    The score of a placement is its predicted MoE time, in the unit of `cost`.
    """

    cost: CostModel = TOKENS
    """The time of a rank; its unit is the unit of the score."""
    dispatch: DispatchModel = DispatchModel.EVEN
    copy_cost: float = 0.0
    """Price of one copy between ranks, in the unit of the score."""
    lifetime_steps: int = 1000
    """Steps a placement is expected to last: the price of its copies is spread over them."""
    cross_node_factor: float = 1.0
    """Price of a copy that no rank of the same node can send, as a multiple of `copy_cost`; at
    least 1."""
    limits: PlanLimits = PlanLimits()
    allow_duplicates: bool = False
    """True if one rank may hold an expert twice in a layer."""
    fill_slots: bool = False
    """True if the engine cannot leave a slot empty. Where slots are pooled this asks for nothing:
    an empty slot has no buffer there."""

    @property
    def cost_per_move(self) -> float:
        """Price of one copy between ranks, per step of the window, in the unit of the score."""
        return self.copy_cost / self.lifetime_steps

    def check(self) -> None:
        """Check the numbers.

        Raises:
            InvalidInput: a number is negative or not finite, or the cross-node factor is below 1.
        """
        numbers = {"copy_cost": self.copy_cost, "cross_node_factor": self.cross_node_factor}
        for name, value in (numbers | asdict(self.limits)).items():
            if value is not None and not 0 <= value < math.inf:
                raise InvalidInput(f"{name} is {value}, must be finite and not negative")
        if self.cross_node_factor < 1:
            raise InvalidInput(f"cross_node_factor is {self.cross_node_factor}, must be at least 1")
