"""Libra in the reference engine: local tokens first, the rest sharded meanwhile, next experts fetched ahead.

The stages of `dispatch.libra_schedule`, in its order: the gate's counts and the lookahead's go round in one
all-gather; a thread shards the remote tokens while this one computes the local ones; tokens are all-gathered, so
dispatch waits for no decision; the next layer's experts travel while the remote tokens are computed.

Experts fetched ahead live in two buffers, even and odd layers. They are in no placement and no map; every copy is
sent from a slot that holds its expert for good.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.adapters.torch.groups import Communicator, Operation, Work
from evenkeel_moe.dispatch import (
    LayerQuotas,
    LibraChoice,
    Lookahead,
    PrefetchBuffers,
    TransientReplicas,
    count_choices,
)
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.exchange import EpochMismatch
from evenkeel_moe.engines.reference.layers import LayerOutcome, tables_of
from evenkeel_moe.engines.reference.model import Model, expert_forward
from evenkeel_moe.engines.reference.slots import PooledWeights, Router

__all__ = ["StageSeconds", "TwoStageDispatch"]


@dataclass(slots=True)
class StageSeconds:
    """Where the time of the layers so far went."""

    shard_s: float = 0.0
    """In token sharding, on its own thread."""
    shard_wait_s: float = 0.0
    """Of that, what the engine's thread had to wait for: the part not hidden by the local stage."""
    local_s: float = 0.0
    remote_s: float = 0.0
    prefetch_wait_s: float = 0.0
    """Waiting for experts that should have been there."""


@dataclass(slots=True)
class _Fetch:
    """Experts on their way."""

    layer: int
    works: list[Work] = field(default_factory=list)


class TwoStageDispatch:
    """One rank's two-stage dispatch."""

    def __init__(
        self,
        config: RankConfig,
        model: Model,
        weights: PooledWeights,
        router: Router,
        communicator: Communicator,
        prefetch: Communicator,
        *,
        lookahead: bool,
    ) -> None:
        """Collective.

        Args:
            config: of this rank.
            model: gates for the lookahead.
            weights: the rank's slots.
            router: the rank's maps.
            communicator: the engine's.
            prefetch: another of the same group: weights must not wait for tokens.
            lookahead: ask the next gate; without, the step before stands for this one.
        """
        self._config = config
        self._model = model
        self._weights = weights
        self._router = router
        self._communicator = communicator
        self._prefetch = prefetch
        gates = [lambda x, layer=layer: model.route(layer, x) for layer in range(config.layers)]
        self._lookahead = Lookahead(gates) if lookahead else None
        self._last_demand: dict[int, Tensor] = {}
        places = config.transient_experts
        self._buffers = [
            [tuple(torch.zeros_like(t) for t in model.shared[0]) for _ in range(places)]
            for _ in range(2)
        ]
        self._held = PrefetchBuffers(places)
        self._fetch: _Fetch | None = None
        self._batches = 0
        self._choice: LibraChoice | None = None
        self._choice_epoch = -1
        self._sharder = ThreadPoolExecutor(1, thread_name_prefix="shard")
        self.seconds = StageSeconds()

    def close(self) -> None:
        """End the sharding thread and the weights' communicator."""
        self._sharder.shutdown(wait=True)
        self._prefetch.abort()

    def layer(
        self, layer: int, x: Tensor, chosen: Tensor, token_hash: Tensor, stop: bool
    ) -> LayerOutcome:
        """See `LayerDispatch.layer`; the hash is not used."""
        choice = self._current_choice()
        demand, predicted, any_stop = self._exchange_demand(layer, x, chosen, stop)
        hosts = choice.hosts(layer)
        sharding = self._sharder.submit(self._shard, choice, layer, demand)
        everyone = self._communicator.all_gather(x)
        all_chosen = self._communicator.all_gather(chosen)

        self._await_fetch(layer)
        experts_here = self._experts_here(layer)
        began = time.perf_counter()
        outputs = torch.empty(*chosen.shape, x.shape[1], device=x.device)
        stays = torch.from_numpy(hosts[:, self._config.rank].copy()).to(chosen.device)[chosen]
        self._compute(x, chosen, stays, experts_here, outputs)
        local_done = time.perf_counter()
        quotas = sharding.result()
        decided = time.perf_counter()
        if predicted is not None:
            self._start_fetch(layer + 1, choice.plan(layer + 1, predicted))

        remote_began = time.perf_counter()
        results, sent_rows = self._remote(quotas, everyone, all_chosen, experts_here)
        compute_s = local_done - began + time.perf_counter() - remote_began
        self.seconds.local_s += local_done - began
        self.seconds.shard_wait_s += decided - local_done
        self.seconds.remote_s += time.perf_counter() - remote_began
        self._combine(quotas, chosen, results, sent_rows, outputs)
        self._held.end(layer)
        return LayerOutcome(
            choices=outputs,
            shared=None,
            counts=self._counts(layer, quotas),
            served=int(quotas.quotas[:, self._config.rank].sum()) + len(x),
            compute_s=compute_s,
            stop=any_stop,
        )

    def _current_choice(self) -> LibraChoice:
        if self._choice is None or self._choice_epoch != self._router.epoch:
            self._choice = LibraChoice(
                tables_of(self._config, self._router, self._model.device),
                self._config.transient_experts,
            )
            self._choice_epoch = self._router.epoch
        return self._choice

    def _exchange_demand(
        self, layer: int, x: Tensor, chosen: Tensor, stop: bool
    ) -> tuple[Tensor, Tensor | None, bool]:
        """(demand (R, E), predicted demand of the next layer or None, any stop); refuses mixed epochs (R8)."""
        experts, epoch = self._config.experts, self._router.epoch
        ahead = self._lookahead.predict(layer, x) if self._lookahead is not None else None
        counts = count_choices(chosen, experts)
        guess = count_choices(ahead, experts) if ahead is not None else torch.zeros_like(counts)
        header = torch.tensor([epoch, int(stop)], dtype=torch.int64, device=counts.device)
        gathered = self._communicator.all_gather(torch.cat([header, counts, guess]))
        epochs = gathered[:, 0].tolist()
        if any(other != epoch for other in epochs):
            listed = ", ".join(f"rank {rank} at {other}" for rank, other in enumerate(epochs))
            raise EpochMismatch(f"epochs differ: {listed}")
        demand = gathered[:, 2 : 2 + experts]
        predicted: Tensor | None = gathered[:, 2 + experts :]
        if self._lookahead is None:
            predicted = self._last_demand.get(layer + 1)
            self._last_demand[layer] = demand
        if layer + 1 >= self._config.layers or self._config.transient_experts == 0:
            predicted = None
        return demand, predicted, bool(gathered[:, 1].any())

    def _shard(self, choice: LibraChoice, layer: int, demand: Tensor) -> LayerQuotas:
        began = time.perf_counter()
        quotas = choice.shard(layer, demand)
        self.seconds.shard_s += time.perf_counter() - began
        return quotas

    def _experts_here(self, layer: int) -> dict[int, Sequence[Tensor]]:
        """Tensors of every expert this rank can compute in a layer."""
        rank, per_rank = self._config.rank, self._config.slots_per_rank
        row = self._router.phy2log[layer, rank * per_rank : (rank + 1) * per_rank]
        here: dict[int, Sequence[Tensor]] = {
            expert: self._buffers[layer % 2][place]
            for place, expert in enumerate(self._held.begin(layer))
        }
        for local in np.flatnonzero(row >= 0)[::-1].tolist():
            here[int(row[local])] = self._weights.tensors(layer, local)
        return here

    @staticmethod
    def _compute(
        x: Tensor,
        chosen: Tensor,
        mine: Tensor,
        experts_here: dict[int, Sequence[Tensor]],
        outputs: Tensor,
    ) -> None:
        """Fill outputs (n, k, D) where `mine` (n, k) says so, one expert after the other."""
        for expert in torch.unique(chosen[mine]).tolist():
            row, column = torch.nonzero(mine & (chosen == expert), as_tuple=True)
            outputs[row, column] = expert_forward(experts_here[expert], x[row])

    def _remote(
        self,
        quotas: LayerQuotas,
        everyone: Tensor,
        all_chosen: Tensor,
        experts_here: dict[int, Sequence[Tensor]],
    ) -> tuple[Tensor, list[int]]:
        """Results for other ranks' choices that are this rank's to compute, source by source, and how many each."""
        parts, rows = [], []
        for source in range(self._config.num_ranks):
            if source == self._config.rank:
                rows.append(0)
                continue
            chosen = all_chosen[source]
            mine = self._rank_of(quotas.assign(chosen, source)) == self._config.rank
            outputs = torch.empty(*chosen.shape, everyone.shape[2], device=everyone.device)
            self._compute(everyone[source], chosen, mine, experts_here, outputs)
            parts.append(outputs[mine])
            rows.append(int(mine.sum()))
        return torch.cat(parts) if parts else everyone.new_empty(0, everyone.shape[2]), rows

    def _combine(
        self,
        quotas: LayerQuotas,
        chosen: Tensor,
        results: Tensor,
        sent_rows: list[int],
        outputs: Tensor,
    ) -> None:
        """Send results to their sources, and put this rank's own, as they come back, where they belong."""
        rank_of = self._rank_of(quotas.assign(chosen, self._config.rank))
        away = rank_of != self._config.rank
        received = [
            int((rank_of == rank).sum()) if rank != self._config.rank else 0
            for rank in range(self._config.num_ranks)
        ]
        arrived = torch.empty(sum(received), outputs.shape[2], device=outputs.device)
        self._communicator.all_to_all(arrived, results.contiguous(), received, sent_rows)
        row, column = torch.nonzero(away, as_tuple=True)
        order = torch.argsort(rank_of[away], stable=True)
        outputs[row[order], column[order]] = arrived

    def _rank_of(self, slots: Tensor) -> Tensor:
        """Owner of resident and transient slots."""
        total = self._router.phy2log.shape[1]
        places = max(1, self._config.transient_experts)
        return torch.where(
            slots < total, slots // self._config.slots_per_rank, (slots - total) // places
        )

    def _counts(self, layer: int, quotas: LayerQuotas) -> Tensor:
        """(slots_per_rank,) tokens to record: a transient expert's go to the first slot that holds it for good."""
        rank, per_rank = self._config.rank, self._config.slots_per_rank
        row = self._router.phy2log[layer]
        first_here = rank * per_rank
        counts = torch.zeros(per_rank, dtype=torch.int64)
        held: NDArray[np.int32] = row[first_here : first_here + per_rank]
        for local in np.flatnonzero(held >= 0)[::-1].tolist():
            expert = int(held[local])
            slots = np.flatnonzero(row == expert)
            tokens = int(quotas.quotas[expert, rank])
            if slots[0] == first_here + local:
                resident = np.unique(slots // per_rank)
                tokens += int(quotas.quotas[expert].sum() - quotas.quotas[expert, resident].sum())
            # Of two copies on one rank the first serves.
            first = int(slots[slots >= first_here][0]) - first_here
            counts[local] = tokens if first == local else 0
        return counts

    def _start_fetch(self, layer: int, plan: TransientReplicas) -> None:
        """Post the copies of a plan; all ranks list them in the same order."""
        config = self._config
        mine = tuple(int(e) for e in plan.extra[config.rank] if e >= 0)
        parity = self._held.prefetch(layer, mine)
        row = self._router.phy2log[layer]
        operations = []
        for rank in range(config.num_ranks):
            for place, expert in enumerate(plan.extra[rank].tolist()):
                if expert < 0:
                    continue
                holders = np.flatnonzero(row == expert)
                slot = int(holders[(rank + place) % len(holders)])
                source, local = divmod(slot, config.slots_per_rank)
                if source == config.rank:
                    tensors = self._weights.tensors(layer, local)
                    operations += [Operation(t, rank, True) for t in tensors]
                if rank == config.rank:
                    operations += [
                        Operation(t, source, False) for t in self._buffers[parity][place]
                    ]
        self._batches += 1
        self._fetch = _Fetch(layer, self._prefetch.start_exchange(operations, self._batches))

    def _await_fetch(self, layer: int) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            return
        assert fetch.layer == layer, f"experts of layer {fetch.layer} arrive in layer {layer}"
        began = time.perf_counter()
        for work in fetch.works:
            work.wait()
        self.seconds.prefetch_wait_s += time.perf_counter() - began
