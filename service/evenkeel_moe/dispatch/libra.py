"""Libra as a replica choice: own tokens stay, others go to resident and transient replicas.

Transient replicas have slot ids after those of the placement: the j-th expert that rank r has
fetched for a layer is slot S + r * N + j. No placement holds such a slot, so none can be
migrated, reported or copied from.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.dispatch.choice import assign_quotas, check_demand
from evenkeel_moe.dispatch.counts import check_counts
from evenkeel_moe.dispatch.libra_replicas import (
    LibraVariant,
    TransientReplicas,
    plan_replicas,
)
from evenkeel_moe.dispatch.libra_sharding import shard_tokens
from evenkeel_moe.dispatch.tables import DispatchTables
from evenkeel_moe.errors import InvalidInput


@dataclass(frozen=True, eq=False, slots=True)
class LayerQuotas:
    """The sharding of one layer as every rank applies it: replicas and their numbers of tokens."""

    slots: Tensor
    """(E, R) int64 slot of the expert on the rank, resident or transient; if it has none, the
    expert's first slot."""
    quotas: Tensor
    """(E, R) int64 [tokens] that the rank computes for the expert, its own included."""
    demand: Tensor
    """(R, E) int64 [tokens]."""

    def assign(self, experts: Tensor, source: int) -> Tensor:
        """Return the (n, k) slots of the choices of a source rank; all ranks agree on them."""
        device = experts.device
        ranks = torch.arange(self.slots.shape[1], device=device).expand(self.slots.shape)
        slots, quotas, demand = (t.to(device) for t in (self.slots, self.quotas, self.demand))
        return assign_quotas(experts, slots, ranks, quotas, demand, source)


class LibraChoice:
    """Two-stage dispatch of one rank; all ranks compute the same plans from the same counts."""

    needs_demand = True

    def __init__(
        self,
        tables: DispatchTables,
        max_extra: int = 0,
        *,
        variant: LibraVariant = LibraVariant.PUBLISHED,
        locality: float = 0.5,
        tolerance: float = 0.0,
    ) -> None:
        """Prepare a placement.

        Args:
            tables: of this rank.
            max_extra: N, transient experts per rank and layer; 0 shards over the placement's
                replicas only.
            variant: the algorithms.
            locality: alpha of `plan_replicas`.
            tolerance: of `shard_tokens`.

        Raises:
            InvalidInput: settings out of range.
        """
        if max_extra < 0:
            raise InvalidInput(f"max_extra is {max_extra}, must not be negative")
        self._tables = tables
        self._max_extra = max_extra
        self._locality = locality
        self._variant = variant
        self._tolerance = tolerance
        layers, _, ranks, num_experts = tables.placement.sizes
        self._shape = (ranks, num_experts)
        self._resident = [tables.placement.held(layer) for layer in range(layers)]
        self._planned: dict[int, TransientReplicas] = {}

    @property
    def num_slots(self) -> int:
        """S + R * N, the number of slots an engine must be able to address."""
        return self._tables.placement.num_slots + self._tables.placement.num_ranks * self._max_extra

    def plan(self, layer: int, predicted: Tensor) -> TransientReplicas:
        """Choose the transient replicas of a layer; call it while the previous layer computes.

        Args:
            layer: the layer of the replicas.
            predicted: (R, E) [tokens] predicted demand of every source rank.

        Returns:
            The plan; the next `choose` for the layer uses it once.

        Raises:
            ShapeMismatch, InvalidInput: counts of another deployment or type.
        """
        counts = check_counts(predicted, self._shape, "predicted demand")
        plan = plan_replicas(
            counts.cpu().numpy(),
            self._resident[layer],
            self._max_extra,
            locality=self._locality,
            variant=self._variant,
        )
        self._planned[layer] = plan
        return plan

    def choose(self, layer: int, experts: Tensor, demand: Tensor | None = None) -> Tensor:
        """See `ReplicaChoice.choose`; slots from S on are transient. Runs on the CPU."""
        wanted = check_demand(self._tables, experts, demand)
        return self.shard(layer, wanted).assign(experts, self._tables.ep_rank)

    def hosts(self, layer: int) -> NDArray[np.bool_]:
        """Return (E, R) True for ranks that have an expert under the plan the next `shard` uses."""
        plan = self._planned.get(layer)
        return plan.hosts if plan is not None else self._resident[layer]

    def shard(self, layer: int, demand: Tensor) -> LayerQuotas:
        """Assign the tokens of a layer and consume its plan.

        It holds no lock and makes no GPU call, so it can run in a thread of its own.

        Args:
            layer: index of the layer.
            demand: (R, E) int64 [tokens] of every source rank.

        Raises:
            ShapeMismatch, InvalidInput: counts of another deployment or type.
        """
        counts = check_counts(demand.cpu(), self._shape, "demand", whole=True).to(torch.int64)
        hosts, plan = self.hosts(layer), self._planned.pop(layer, None)
        sharding = shard_tokens(
            counts.numpy(),
            hosts,
            self._resident[layer],
            variant=self._variant,
            tolerance=self._tolerance,
        )
        quotas = np.ascontiguousarray((sharding.local + sharding.remote).T)
        return LayerQuotas(self._slots(layer, plan), torch.from_numpy(quotas), counts)

    def _slots(self, layer: int, plan: TransientReplicas | None) -> Tensor:
        """Return (E, R) one slot for each expert and rank; see `LayerQuotas.slots`."""
        placement = self._tables.placement
        slots = placement.log2phy[layer, :, :1].repeat(placement.num_ranks, axis=1).astype(np.int64)
        row = placement.phy2log[layer]
        held = np.flatnonzero(row >= 0)[::-1]
        # Backwards, so that of two copies on one rank the first one is kept.
        slots[row[held], held // placement.slots_per_rank] = held
        if plan is not None:
            for rank, place in np.argwhere(plan.extra >= 0):
                first = placement.num_slots + int(rank) * self._max_extra
                slots[plan.extra[rank, place], rank] = first + int(place)
        return torch.from_numpy(slots)
