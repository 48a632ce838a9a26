"""The compiled code that the event loop calls itself."""

import numpy as np

from evenkeel.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel.model.load import CountingSide, LoadReport, Phase, StepMeta
from evenkeel.model.placement import Placement
from evenkeel.model.topology import ModelShape
from evenkeel.planning import metrics
from evenkeel.protocol.assembly import StepAssembler

__all__ = ["warm_kernels"]


def warm_kernels() -> None:
    """Compile it, or load it from the disk, by one step of a toy group: a first report must not hold up the others."""
    shape = ModelShape(1, 2, 2, 1, 1, 1)
    placement, assembler = Placement.initial(shape), StepAssembler(shape)
    assembler.learn_epoch(Epoch(0), placement)
    step = (StepMeta(0, 0, Phase.DECODE, 1),)
    for rank in range(shape.num_ranks):
        report = LoadReport(
            DeploymentId("warm"), Generation("warm"), EpRank(rank), 0, CountingSide.DESTINATION, step,
            np.ones((1, 1, 1), np.int32),
        )  # fmt: skip
        for _, window in assembler.take(report).complete:
            metrics.balancedness(metrics.rank_load(window.counts, placement))
