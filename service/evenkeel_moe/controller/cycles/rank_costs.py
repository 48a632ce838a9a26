"""Collects what is known of the ranks' times, and chooses the cost model that cycles score by."""

from dataclasses import dataclass, field

import numpy as np
import structlog
from numpy.typing import NDArray

from evenkeel_moe.controller.cycles.cycle_inputs import PlanBase
from evenkeel_moe.controller.ingest.group_loads import GroupLoads
from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.model.cost import CostModel, CostSource
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.policy import CostChoice
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.ports.stores import Clock
from evenkeel_moe.protocol.leader.deployment_state import DeploymentState
from evenkeel_moe.telemetry.cost_choice import ChosenCost, KnownCosts, RankNumbers, choose_cost

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class RankCosts:
    """The cost model of one deployment."""

    control: DeploymentState
    loads: GroupLoads
    ranks: RankSessions
    clock: Clock
    _source: CostSource | None = field(default=None, init=False)
    """The source that was logged last."""

    def choose(
        self,
        base: PlanBase,
        shape: ModelShape,
        load: NDArray[np.uint32],
        asked: CostChoice,
        *,
        curves: bool = False,
    ) -> CostModel:
        """Return the cost model in force, and log a change of its source.

        Args:
            base: the placement that the ranks use.
            shape: of the deployment.
            load: (T, L, E) tokens, at whose mean the models are compared.
            asked: the operator's choice.
            curves: True for a policy that plans on the ranks' curves.
        """
        times = self.loads.times
        times.update(
            self.loads.ingest.parts(),
            base.placement,
            base.epoch,
            self.loads.split(),
            self.control.history,
        )
        each = max(1, load.shape[0] * load.shape[1] * shape.num_ranks)
        choice = choose_cost(
            KnownCosts(
                shape=shape,
                ranks=[self._told(EpRank(rank)) for rank in range(shape.num_ranks)],
                fit=times.fit(),
                tokens_per_rank=float(load.sum()) / each,
                active_per_rank=float(np.count_nonzero(load)) / each,
                now_unix=self.clock.unix(),
                dispatch=self.loads.split().dispatch,
            ),
            asked,
            curves=curves,
        )
        self._log_source(choice)
        return choice.model

    def _told(self, rank: EpRank) -> RankNumbers:
        member = self.control.membership.members.get(rank)
        if member is None:
            return RankNumbers()
        session = self.ranks.by_stream.get(member.stream)
        return RankNumbers(
            member.hello.device,
            member.hello.weight_format,
            None if session is None else session.curve,
            None if session is None else session.replica_cost,
            None if session is None else session.clock,
        )

    def _log_source(self, choice: ChosenCost) -> None:
        if choice.model.source is self._source:
            return
        self._source = choice.model.source
        _log.info(
            "cost_model",
            deployment=self.control.deployment,
            source=choice.model.source.value,
            detail=choice.model.detail,
            others={source.value: reason for source, reason in choice.reasons.items()}
            | {source.value: f"time ratio {ratio}" for source, ratio in choice.ratios.items()},
        )
