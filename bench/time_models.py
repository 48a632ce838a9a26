"""The cost models under which bench.time compares policies and checks verdicts."""

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.planning.problem.objective import Objective

READS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
DISPATCHES = (DispatchModel.EVEN, DispatchModel.WATERFILL, DispatchModel.FEWEST)


def roofline(
    expert_tokens: float, reading: float, dispatch: DispatchModel, top_k: int
) -> Objective:
    """Return an objective under which reading an expert is worth k times its mean tokens.

    Args:
        expert_tokens: mean tokens of an expert in a layer and step.
        reading: k, >= 0.
        dispatch: Waterfill has the work of one shared expert.
        top_k: routed experts of a token.
    """
    shared = 1.0 / top_k if dispatch is DispatchModel.WATERFILL else 0.0
    replica = ReplicaWork(read_tokens=reading * expert_tokens)
    return Objective(cost=CostModel(replica=replica, shared_tokens=shared), dispatch=dispatch)
