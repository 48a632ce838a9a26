"""The cost models under which policies are compared, and the options that choose among them."""

import argparse

from evenkeel_moe.model.cost import CostModel, ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.planning.problem.objective import Objective

READS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
DISPATCHES = (DispatchModel.EVEN, DispatchModel.WATERFILL, DispatchModel.FEWEST)


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that choose traces, fleets and cost models."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", help="traces; default all")
    parser.add_argument(
        "--fleet",
        type=lambda text: tuple(map(int, text.split("x"))),
        action="append",
        metavar="RANKSxSLOTS",
        help="default 8x72 and 16x80, which keel's constants were chosen on, and 32x288 and 32x320"
        " for 256 experts",
    )
    parser.add_argument("--k", type=float, action="append", help="default 0 to 4")
    parser.add_argument("--dispatch", type=DispatchModel, action="append")
    return parser


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
