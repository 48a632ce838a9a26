"""Compiles, before the controller serves, the kernels that its event loop calls."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import structlog

from evenkeel_moe.adapters.redis.encoding import pack_window
from evenkeel_moe.model.cost import ReplicaWork
from evenkeel_moe.model.dispatch_model import DispatchModel
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.load import (
    CountingSide,
    LoadReport,
    LoadWindow,
    Phase,
    StepMeta,
    step_table,
)
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.problem import metrics, moe_time
from evenkeel_moe.planning.problem.token_split import SplitModel
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.telemetry.assembly import StepAssembler
from evenkeel_moe.telemetry.step_kernels import sum_counts
from evenkeel_moe.wire.reports import decode_report, encode_report

_log = structlog.get_logger(__name__)
_SHAPE = ModelShape(1, 2, 2, 1, 1, 1)
_MAX_KERNELS = 20
"""Most kernels that a single use may call."""


def warm_kernels() -> None:
    """Compile the kernels, or load them from the disk, by one step of a toy group.

    Otherwise the first report of a rank would delay all others. Every dispatch model is used once:
    which of them a deployment has becomes known only from its ranks and its policy.
    """
    for use in _uses():
        for _ in range(_MAX_KERNELS):
            try:
                use()
                break
            except OSError as error:
                # Numba could not write a kernel to its cache. The kernel is compiled all the same
                # and stays in memory, so the next attempt goes one kernel further.
                _log.warning("kernel_not_cached", error=str(error))


def _uses() -> Iterator[Callable[[], object]]:
    """Yield functions that each call some kernels for the first time."""
    placement, load = Placement.initial(_SHAPE), np.ones((1, 1, 2))
    yield _assemble
    for split in map(SplitModel, DispatchModel):
        yield partial(metrics.rank_load, load.astype(np.uint32), placement, split)
        yield partial(metrics.rank_load, load, placement, split)
        yield partial(metrics.rank_totals, load.astype(np.uint32), placement, split)
        yield partial(moe_time.predicted_time, load.astype(np.uint32), placement, split=split)
    yield partial(sum_counts, load.astype(np.uint32))
    yield lambda: moe_time.replica_work(np.ones(1), ReplicaWork(start_tokens=1.0))
    one, none = np.zeros((1, 1)), np.zeros(1, np.int64)
    yield lambda: pack_window(LoadWindow(load.astype(np.uint32), none, none, none[:, None], one))


def _assemble() -> None:
    assembler = StepAssembler(_SHAPE)
    assembler.learn_epoch(Epoch(0), Placement.initial(_SHAPE))
    step = step_table([StepMeta(0, 0, Phase.DECODE, 1)])
    for rank in range(_SHAPE.num_ranks):
        who = RankIdentity(DeploymentId("warm"), EpRank(rank), Generation("warm"), 0)
        report = LoadReport(
            who.deployment, who.generation, who.rank, 0, CountingSide.DESTINATION, step,
            np.ones((1, 1, 1), np.int32),
        )  # fmt: skip
        # Encoded and decoded, because read-only arrays are another type to the compiler.
        assembler.take(decode_report(encode_report(report), who, _SHAPE))
