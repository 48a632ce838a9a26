"""Libra: computes local tokens while it shards the rest, and fetches the next experts ahead.

The stages are those of Libra's section 3.1. One all-gather carries the gate's counts and those of
the lookahead. A thread shards the remote tokens while this one computes the local ones. The
tokens are all-gathered, so dispatch waits for no decision. The next layer's experts travel while
the remote tokens are computed.

Fetched experts are in two sets of buffers, for even and odd layers. They are in no placement and no
map, and every copy is sent from a slot of the placement.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from evenkeel_moe.adapters.torch.groups import Communicator, Operation, Work
from evenkeel_moe.dispatch import (
    LayerQuotas,
    LibraChoice,
    LibraVariant,
    PrefetchBuffers,
    TransientReplicas,
    count_choices,
)
from evenkeel_moe.engines.reference.exchange import check_epochs
from evenkeel_moe.engines.reference.model import expert_forward
from evenkeel_moe.engines.reference.parts import LayerOutcome, RankParts


class TwoStageDispatch:
    """The two-stage dispatch of one rank."""

    def __init__(self, parts: RankParts, prefetch: Communicator, *, lookahead: bool) -> None:
        """Collective.

        Args:
            parts: of this rank.
            prefetch: another communicator of the group, because weights must not wait for tokens.
            lookahead: predict with the gate of the next layer on the hidden state of this one,
                which changes little from layer to layer; otherwise with the demand of the layer in
                the last step.
        """
        self._parts = parts
        self._config = config = parts.config
        self._first_slot = config.rank * config.slots_per_rank
        self._model = model = parts.model
        self._weights = parts.weights
        self._router = parts.router
        self._communicator = parts.communicator
        self._prefetch = prefetch
        self._lookahead = lookahead
        self._last_demand: dict[int, Tensor] = {}
        places = config.transient_experts
        self._buffers = [
            [tuple(torch.zeros_like(t) for t in model.shared[0]) for _ in range(places)]
            for _ in range(2)
        ]
        self._held = PrefetchBuffers(places)
        self._fetch: tuple[int, list[Work]] | None = None
        """(layer, copies) of experts that are on their way."""
        self._batches = 0
        self._choice: LibraChoice | None = None
        self._choice_epoch = -1
        self._sharder = ThreadPoolExecutor(1, thread_name_prefix="shard")

    def close(self) -> None:
        """End the sharding thread and the communicator of the weights."""
        self._sharder.shutdown(wait=True)
        self._prefetch.abort()

    def layer(
        self, layer: int, x: Tensor, chosen: Tensor, token_hash: Tensor, stop: bool
    ) -> LayerOutcome:
        """See `LayerDispatch.layer`; the hash is not used."""
        choice = self._current_choice()
        demand, predicted, any_stop = self._exchange_demand(layer, x, chosen, stop)
        hosts = choice.hosts(layer)
        sharding = self._sharder.submit(choice.shard, layer, demand)
        everyone = self._communicator.all_gather(x)
        all_chosen = self._communicator.all_gather(chosen)

        self._await_fetch(layer)
        experts_here = self._experts_here(layer)
        began = time.perf_counter()
        outputs = torch.empty(*chosen.shape, x.shape[1], device=x.device)
        stays = torch.from_numpy(hosts[:, self._config.rank].copy()).to(chosen.device)[chosen]
        _compute(x, chosen, stays, experts_here, outputs)
        local_s = time.perf_counter() - began
        quotas = sharding.result()
        if predicted is not None:
            self._start_fetch(layer + 1, choice.plan(layer + 1, predicted))

        began = time.perf_counter()
        results, sent_rows = self._compute_remote(quotas, everyone, all_chosen, experts_here)
        remote_s = time.perf_counter() - began
        self._combine(quotas, chosen, results, sent_rows, outputs)
        self._held.end(layer)
        return LayerOutcome(
            choices=outputs,
            shared=None,
            counts=self._counts(layer, quotas),
            served=int(quotas.quotas[:, self._config.rank].sum()) + len(x),
            compute_s=local_s + remote_s,
            stop=any_stop,
        )

    def _current_choice(self) -> LibraChoice:
        if self._choice is None or self._choice_epoch != self._router.epoch:
            self._choice = LibraChoice(
                self._parts.dispatch_tables(),
                self._config.transient_experts,
                variant=LibraVariant(self._config.dispatch.value),
            )
            self._choice_epoch = self._router.epoch
        return self._choice

    def _exchange_demand(
        self, layer: int, x: Tensor, chosen: Tensor, stop: bool
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Return (demand (R, E), predicted demand of the next layer, any stop).

        Refuses ranks with different epochs (R8). There is no prediction for the last layer, or
        without fetched experts.
        """
        experts, epoch = self._config.experts, self._router.epoch
        counts = count_choices(chosen, experts)
        guess = torch.zeros_like(counts)
        if self._lookahead and layer + 1 < self._config.layers:
            guess = count_choices(self._model.route(layer + 1, x), experts)
        header = torch.tensor([epoch, int(stop)], dtype=torch.int64, device=counts.device)
        gathered = self._communicator.all_gather(torch.cat([header, counts, guess]))
        check_epochs(gathered[:, 0].tolist())
        demand = gathered[:, 2 : 2 + experts]
        predicted: Tensor | None = gathered[:, 2 + experts :]
        if not self._lookahead:
            predicted = self._last_demand.get(layer + 1)
            self._last_demand[layer] = demand
        if layer + 1 >= self._config.layers or self._config.transient_experts == 0:
            predicted = None
        return demand, predicted, bool(gathered[:, 1].any())

    def _experts_here(self, layer: int) -> dict[int, Sequence[Tensor]]:
        """Return the tensors of every expert that this rank can compute in a layer."""
        here: dict[int, Sequence[Tensor]] = {
            expert: self._buffers[layer % 2][place]
            for place, expert in enumerate(self._held.begin(layer))
        }
        for local, expert in self._held_here(layer):
            here[expert] = self._weights.tensors(layer, local)
        return here

    def _held_here(self, layer: int) -> list[tuple[int, int]]:
        """Return (local slot, expert) of this rank's filled slots, last slot first."""
        first = self._first_slot
        row = self._router.phy2log[layer, first : first + self._config.slots_per_rank]
        return [(local, int(row[local])) for local in np.flatnonzero(row >= 0)[::-1].tolist()]

    def _compute_remote(
        self,
        quotas: LayerQuotas,
        everyone: Tensor,
        all_chosen: Tensor,
        experts_here: dict[int, Sequence[Tensor]],
    ) -> tuple[Tensor, list[int]]:
        """Compute other ranks' choices that this rank serves.

        Returns:
            (results by source rank, number of rows of each source).
        """
        parts, rows = [], []
        for source in range(self._config.num_ranks):
            if source == self._config.rank:
                rows.append(0)
                continue
            chosen = all_chosen[source]
            mine = self._rank_of(quotas.assign(chosen, source)) == self._config.rank
            outputs = torch.empty(*chosen.shape, everyone.shape[2], device=everyone.device)
            _compute(everyone[source], chosen, mine, experts_here, outputs)
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
        """Send results to their sources, and put the received ones into `outputs`."""
        rank_of = self._rank_of(quotas.assign(chosen, self._config.rank))
        away = rank_of != self._config.rank
        received = torch.bincount(rank_of[away], minlength=self._config.num_ranks).tolist()
        arrived = torch.empty(sum(received), outputs.shape[2], device=outputs.device)
        self._communicator.all_to_all(arrived, results.contiguous(), received, sent_rows)
        row, column = torch.nonzero(away, as_tuple=True)
        order = torch.argsort(rank_of[away], stable=True)
        outputs[row[order], column[order]] = arrived

    def _rank_of(self, slots: Tensor) -> Tensor:
        """Return the rank of each slot of the placement or of fetched experts."""
        total = self._router.phy2log.shape[1]
        places = max(1, self._config.transient_experts)
        return torch.where(
            slots < total, slots // self._config.slots_per_rank, (slots - total) // places
        )

    def _counts(self, layer: int, quotas: LayerQuotas) -> Tensor:
        """Return (slots_per_rank,) tokens to record.

        Tokens of a fetched expert count for the first slot of the placement that has the expert.
        """
        per_rank, first_slot = self._config.slots_per_rank, self._first_slot
        row = self._router.phy2log[layer]
        counts = torch.zeros(per_rank, dtype=torch.int64)
        for local, expert in self._held_here(layer):
            slots = np.flatnonzero(row == expert)
            # Of two copies on one rank, the first serves.
            if slots[slots >= first_slot][0] != first_slot + local:
                continue
            counts[local] = int(quotas.quotas[expert, self._config.rank])
            if slots[0] == first_slot + local:
                resident = np.unique(slots // per_rank)
                of_expert = quotas.quotas[expert]
                counts[local] += int(of_expert.sum() - of_expert[resident].sum())
        return counts

    def _start_fetch(self, layer: int, plan: TransientReplicas) -> None:
        """Post the copies of a plan; all ranks list them in the same order."""
        config = self._config
        mine = tuple(int(expert) for expert in plan.extra[config.rank] if expert >= 0)
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
                    buffers = self._buffers[parity][place]
                    operations += [Operation(t, source, False) for t in buffers]
        self._batches += 1
        self._fetch = layer, self._prefetch.start_exchange(operations, self._batches)

    def _await_fetch(self, layer: int) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            return
        fetched, works = fetch
        assert fetched == layer, f"experts of layer {fetched} arrive in layer {layer}"
        for work in works:
            work.wait()


def _compute(
    x: Tensor,
    chosen: Tensor,
    mine: Tensor,
    experts_here: dict[int, Sequence[Tensor]],
    outputs: Tensor,
) -> None:
    """Fill outputs (n, k, D) where `mine` (n, k) is true, one expert after the other."""
    for expert in torch.unique(chosen[mine]).tolist():
        row, column = torch.nonzero(mine & (chosen == expert), as_tuple=True)
        outputs[row, column] = expert_forward(experts_here[expert], x[row])
