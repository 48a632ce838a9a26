"""Libra: computes local tokens while it shards the rest, and fetches the next experts ahead.

The stages are those of Libra's section 3.1. One all-gather carries the gate's counts and those of
the lookahead. Two more carry the tokens and their choices, which wait for no decision. While this
thread computes the tokens that stay, another one waits for the counts, shards the remote tokens,
plans the experts of the next layer and starts to fetch them. They travel until the next layer
begins.

Fetched experts are in two sets of buffers, for even and odd layers. They are in no placement and no
map, and every copy is sent from a slot of the placement.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from evenkeel_moe.adapters.torch.groups import Communicator, Gathering, Operation
from evenkeel_moe.dispatch import (
    LayerQuotas,
    LibraChoice,
    LibraVariant,
    count_choices,
)
from evenkeel_moe.engines.reference.exchange import check_epochs
from evenkeel_moe.engines.reference.model import expert_forward
from evenkeel_moe.engines.reference.parts import LayerOutcome, RankParts, Span


class TwoStageDispatch:
    """The two-stage dispatch of one rank."""

    def __init__(self, parts: RankParts, prefetch: Communicator) -> None:
        """Collective.

        Args:
            parts: of this rank.
            prefetch: another communicator of the group, because weights must not wait for tokens.
        """
        self._parts = parts
        self._config = config = parts.config
        self._first_slot = config.rank * config.slots_per_rank
        self._model = model = parts.model
        self._weights = parts.weights
        self._router = parts.router
        self._communicator = parts.communicator
        self._prefetch = prefetch
        places = config.transient_experts
        self._buffers = [
            [tuple(torch.zeros_like(t) for t in model.shared[0]) for _ in range(places)]
            for _ in range(2)
        ]
        self._fetched: dict[int, tuple[int, ...]] = {}
        """The experts in the buffers of a layer that has not begun, in the order of the buffers."""
        self._fetch: Future[None] | None = None
        """The experts of the next layer that are on their way."""
        self._spans: list[Span] = []
        """The stages that ended in this layer, of both threads."""
        self._batches = 0
        self._choice: LibraChoice | None = None
        self._choice_epoch = -1
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="libra")

    def close(self) -> None:
        """End the helper thread and the communicator of the weights."""
        self._helper.shutdown(wait=True, cancel_futures=True)
        self._prefetch.abort()

    def layer(
        self, layer: int, x: Tensor, chosen: Tensor, token_hash: Tensor, stop: bool
    ) -> LayerOutcome:
        """See `LayerDispatch.layer`; the hash is not used."""
        choice = self._current_choice()
        self._await_fetch()
        experts_here = self._experts_here(layer)
        hosts = choice.hosts(layer)  # Sharding uses the plan up.
        gather = self._communicator.start_all_gather
        counts = gather(self._counts_of_gates(layer, x, chosen, stop))
        tokens, choices, gathered = gather(x), gather(chosen), None
        decision = self._helper.submit(self._decide, choice, layer, counts)
        if not self._config.overlap:
            decision.result()
            self._await_fetch()
            gathered = tokens.wait(), choices.wait()

        began = time.perf_counter()
        outputs = torch.empty(*chosen.shape, x.shape[1], device=x.device)
        stays = torch.from_numpy(hosts[:, self._config.rank].copy()).to(chosen.device)[chosen]
        _compute(x, chosen, stays, experts_here, outputs)
        local_s = self._note(layer, "local", began)
        quotas, any_stop = decision.result()
        everyone, all_chosen = gathered or (tokens.wait(), choices.wait())
        began = time.perf_counter()
        results, sent_rows = self._compute_remote(quotas, everyone, all_chosen, experts_here)
        remote_s = self._note(layer, "remote", began)
        began = time.perf_counter()
        self._combine(quotas, chosen, results, sent_rows, outputs)
        self._note(layer, "combine", began)
        # The helper may note the end of a fetch meanwhile.
        spans = self._spans[:]
        del self._spans[: len(spans)]
        return LayerOutcome(
            choices=outputs,
            shared=None,
            counts=self._counts(layer, quotas),
            served=int(quotas.quotas[:, self._config.rank].sum()) + len(x),
            compute_s=local_s + remote_s,
            stop=any_stop,
            spans=spans if self._config.timeline else (),
        )

    def _note(self, layer: int, stage: str, began: float) -> float:
        """Note that a stage ends now; return its seconds."""
        span = Span(layer, stage, began, time.perf_counter())
        self._spans.append(span)
        return span.ended - began

    def _current_choice(self) -> LibraChoice:
        if self._choice is None or self._choice_epoch != self._router.epoch:
            self._choice = LibraChoice(
                self._parts.dispatch_tables(),
                self._config.transient_experts,
                variant=LibraVariant(self._config.dispatch.value),
            )
            self._choice_epoch = self._router.epoch
        return self._choice

    def _counts_of_gates(self, layer: int, x: Tensor, chosen: Tensor, stop: bool) -> Tensor:
        """Return (2 + 2 E,): epoch, stop, tokens by expert here, and the same for the next layer.

        The last part is what the gate of the next layer chooses for the hidden state of this one,
        which changes little from layer to layer; zero in the last layer.
        """
        experts, epoch = self._config.experts, self._router.epoch
        counts = count_choices(chosen, experts)
        guess = torch.zeros_like(counts)
        if layer + 1 < self._config.layers:
            guess = count_choices(self._model.route(layer + 1, x), experts)
        header = torch.tensor([epoch, int(stop)], dtype=torch.int64, device=counts.device)
        return torch.cat([header, counts, guess])

    def _decide(
        self, choice: LibraChoice, layer: int, counts: Gathering
    ) -> tuple[LayerQuotas, bool]:
        """Shard the tokens of a layer, and let the experts of the next one be fetched.

        Refuses ranks with different epochs (R8). There is no prediction for the last layer, or
        without fetched experts. Runs in the helper thread.

        Returns:
            (quotas of the layer, True if some rank asked to stop).
        """
        began, experts = time.perf_counter(), self._config.experts
        gathered = counts.wait()
        self._note(layer, "demand", began)
        check_epochs(gathered[:, 0].tolist())
        began, demand = time.perf_counter(), gathered[:, 2 : 2 + experts]
        quotas = choice.shard(layer, demand)
        self._note(layer, "shard", began)
        if layer + 1 < self._config.layers and self._config.transient_experts > 0:
            predicted = gathered[:, 2 + experts :]
            self._fetch = self._helper.submit(self._fetch_experts, choice, layer + 1, predicted)
        return quotas, bool(gathered[:, 1].any())

    def _experts_here(self, layer: int) -> dict[int, Sequence[Tensor]]:
        """Return the tensors of every expert that this rank can compute in a layer."""
        here: dict[int, Sequence[Tensor]] = {
            expert: self._buffers[layer % 2][place]
            for place, expert in enumerate(self._fetched.pop(layer, ()))
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

    def _fetch_experts(self, choice: LibraChoice, layer: int, predicted: Tensor) -> None:
        """Plan the experts that each rank fetches for a layer, and wait for those of this rank.

        All ranks list the copies in the same order. Runs in the helper thread.
        """
        began = time.perf_counter()
        plan = choice.plan(layer, predicted)
        self._note(layer, "plan", began)
        began = time.perf_counter()
        config = self._config
        mine = plan.extra[config.rank]
        self._fetched[layer] = tuple(mine[mine >= 0].tolist())
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
                    buffers = self._buffers[layer % 2][place]
                    operations += [Operation(t, source, False) for t in buffers]
        self._batches += 1
        for work in self._prefetch.start_exchange(operations, self._batches):
            work.wait()
        self._note(layer, "fetch", began)

    def _await_fetch(self) -> None:
        """Wait for the experts that are on their way."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.result()


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
