"""The parts of one rank that its dispatch, its forward pass and its agent share."""

from dataclasses import dataclass

import torch

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.model import Model
from evenkeel_moe.engines.reference.pace import Pace
from evenkeel_moe.engines.reference.slots import PooledWeights, Router
from evenkeel_moe.engines.reference.traffic import RecordedTraffic, TextTraffic, Traffic, read_trace
from evenkeel_moe.model.placement import Placement


@dataclass(frozen=True, eq=False, slots=True)
class RankParts:
    """One rank's configuration, model, input, slots, tables and group."""

    config: RankConfig
    model: Model
    traffic: Traffic
    weights: PooledWeights
    router: Router
    communicator: Communicator
    """The engine's own, over all ranks."""
    pace: Pace

    @classmethod
    def build(
        cls,
        config: RankConfig,
        placement: Placement,
        epoch: int,
        communicator: Communicator,
        device: torch.device,
    ) -> "RankParts":
        """Make the parts of a rank that starts with a placement, with slots from the checkpoint."""
        model = Model.build(
            seed=config.seed,
            layers=config.layers,
            experts=config.experts,
            top_k=config.top_k,
            d_model=config.d_model,
            d_ffn=config.d_ffn,
            device=device,
        )
        buffers = config.layers * config.pool_slots_per_layer
        weights = PooledWeights(
            config.layers, config.slots_per_rank, buffers, config.d_model, config.d_ffn, device
        )
        weights.load(placement, config.rank, config.seed)
        router = Router(placement, epoch, device)
        traffic = _traffic(config, model)
        return cls(config, model, traffic, weights, router, communicator, Pace(config))


def _traffic(config: RankConfig, model: Model) -> Traffic:
    ranks, tokens = config.num_ranks, config.tokens_per_step
    if not config.trace:
        return TextTraffic(model, ranks, tokens, config.shift_at, config.shift_back)
    ids, counts, top_k = read_trace(config.trace)
    return RecordedTraffic(ranks, tokens, top_k, config.seed, ids, counts)
