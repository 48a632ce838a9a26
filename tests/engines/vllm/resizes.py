"""Scenarios of a toy vLLM whose number of ranks changes; each runs once in each rank's process."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenkeel_moe.engines.vllm.plugin import VllmPlugin
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.placement import Placement
from tests.agent.fleet import PortLink
from tests.engines.driving import toy_settings
from tests.engines.vllm import elastic, engine
from tests.engines.vllm.scenarios import Rank
from tests.waiting import deadline

SLOTS = 4
"""Slots of a rank in each layer."""


class ElasticRank(Rank):
    """One rank of a toy vLLM with elastic expert parallelism.

    Args:
        rank: this rank.
        size: ranks of the group in which it starts.
        phase: names the store over which the groups are made.
        lockstep: a group of the test over these ranks.
        joins: a group of the ranks below serves already.
    """

    def __init__(
        self,
        rank,
        size,
        phase,
        lockstep,
        *,
        use_async,
        joins=False,
        mode="place",
        plugged=True,
        make_link=PortLink,
        **changes,
    ):
        self.rank, self.size, self.lockstep = rank, size, lockstep
        self.tensor_parallel, self.counted_times, self.hot, self.taken = "", 1, False, 0
        self.modules = elastic.load()
        engine.sys.modules["vllm.envs"].VLLM_ELASTIC_EP_SCALE_UP_LAUNCH = joins  # type: ignore[attr-defined]
        # The default group of an engine of vLLM has the ranks of that engine alone.
        whole = dist.get_world_size
        torch.distributed.get_world_size = lambda group=None: 1 if group is None else whole(group)
        store, _ = elastic.coordinate(rank, phase)
        elastic.join_groups(rank, size, store)
        self.config = elastic_config(use_async, rank, size)
        values = {
            "mode": mode,
            "node": f"node-{rank}",
            "gate_timeout_s": deadline(10),
            "group_timeout_s": deadline(20),
            "stall_after_s": 60.0,
        }
        self.plugin = VllmPlugin(toy_settings(**{**values, **changes}), engine.VERSION, make_link)
        if plugged:
            self.plugin.install()
        self.state = self.modules.state.EplbState(self.config, torch.device("cpu"))
        redundant = SLOTS * size - 6
        self.model = elastic.Model(self.modules, rank, size, joins=joins, redundant=redundant)
        self.model_config = engine.ModelConfig()
        self.state.add_model(self.model, self.model_config)
        self.model_state = self.state.model_states["toy-hash"]
        self.guest: Any = self.plugin.guest
        self._worker = elastic.Worker(self.state, self.model, self.model_config, self.config)
        self.executor: Any = self.modules.elastic.ElasticEPScalingExecutor(self._worker)
        # Weights that are not experts, and the warm-up of device groups.
        self.executor.transfer_weights = self.executor._warm_target_groups = lambda *_: None
        if use_async and not joins:
            self.state.start_async_loop()
        if self.agent is not None and self.link is not None:
            self.register()

    @property
    def agent(self):
        return None if self.guest is None else self.guest.agent

    @property
    def link(self):
        return self.guest.link

    def grow(self, size, phase, lockstep, meanwhile=lambda: None):
        """Let ranks join, as vLLM does: prepare while this rank serves, then commit."""
        self._prepare(size, phase, meanwhile)
        self._commit(size, lockstep, lambda: self.executor.commit_scale_up(True))

    def joined(self, lockstep):
        self._commit(self.size, lockstep, lambda: self.executor.commit_scale_up(False))

    def shrink(self, size, phase, lockstep):
        """Let the ranks above a size leave; only those that stay prepare."""
        removing = self.rank >= size
        if not removing:
            self._prepare(size, phase)
        self._commit(size, lockstep, lambda: self.executor.commit_scale_down(size, removing))

    def _prepare(self, size, phase, meanwhile=lambda: None):
        _, port = elastic.coordinate(self.rank, phase)
        request = SimpleNamespace(
            new_data_parallel_size=size,
            new_data_parallel_rank=-1,
            new_data_parallel_rank_local=-1,
            new_data_parallel_master_ip=elastic.HOST,
            new_data_parallel_master_port=0,
            coord_store_port=port,
        )
        errors: list[BaseException] = []

        def prepare():
            try:
                self.executor.prepare_reconfiguration(request, False)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=prepare)
        thread.start()
        meanwhile()
        thread.join(deadline(60))
        assert not thread.is_alive() and not errors, errors

    def _commit(self, size, lockstep, commit):
        # vLLM commits once all ranks are ready, those that join too.
        dist.barrier(group=lockstep if size >= self.size else self.lockstep)
        commit()
        self.size, self.lockstep = size, lockstep
        if self.agent is not None and self.link is not None:
            self.register()

    def seen(self):
        """Return what a rank holds right after a resize."""
        told = None if self.agent is None else self.agent.hello()
        return {
            "map": self.map(),
            "wrong": self.model.wrong_slots(self.rank, self.model_state.physical_to_logical_map),
            "agent": self.agent is not None,
            "placement": None if told is None else self.agent.placement.phy2log,
            "epoch": None if told is None else self.agent.epoch,
            "trouble": None if told is None else self.agent.trouble,
            "generation": None if told is None else told.identity.generation,
            "lineage": None if told is None else told.lineage,
            "step": self.guest._step if self.guest is not None else None,
            "replicas": self.model_state.logical_replica_count.numpy().copy(),
        }


def elastic_config(use_async, rank, size):
    config: Any = engine.Config(use_async=use_async)
    config.eplb_config.num_redundant_experts = SLOTS * size - 6
    config.enable_elastic_ep, config.elastic_ep_max_dp_size = True, 4
    config.data_parallel_size, config.data_parallel_rank = size, rank
    config.tensor_parallel_size = config.world_size = 1
    config.use_sequence_parallel_moe = False
    config.all2all_backend = "nixl_ep"
    return config


def lone_expert(placement, rank):
    """Return the placement, shuffled, in which expert 5 of each layer lives on one rank alone."""
    rng = np.random.default_rng(7)
    rows = placement.phy2log.copy()
    for layer in range(len(rows)):
        row = rng.permutation(np.resize(np.arange(6, dtype=np.int32), rows.shape[1]))
        row[row == 5] = 0
        row[rank * SLOTS + layer % SLOTS] = 5
        rows[layer] = row
    return Placement(rows, placement.num_ranks, placement.num_logical_experts)


def two_four_three(rank, size, *, use_async):
    """2 ranks, then 4, then 3; plans of the controller between, and the bytes after each step."""
    pair, whole, three = (dist.new_group(list(range(n))) for n in (2, 4, 3))
    seen: dict[str, Any] = {}
    if rank < 2:
        one = ElasticRank(rank, 2, "start", pair, use_async=use_async)
        one.steps(6)
        seen["two"] = one.carry_out(one.target())
        one.grow(4, "grow", whole, lambda: one.steps(20, 0.005))
    else:
        one = ElasticRank(rank, 4, "grow", whole, use_async=use_async, joins=True)
        one.joined(whole)
    seen["grown"] = one.seen()
    one.steps(6)
    seen["four"] = one.carry_out(lone_expert(one.agent.placement, 3))
    one.shrink(3, "shrink", three)
    seen["shrunk"] = one.seen() if rank < 3 else {"agent": one.agent is not None}
    if rank < 3:
        one.steps(6)
        seen["three"] = one.carry_out(one.target(seed=5))
    dist.barrier()
    return seen


def uninvited(rank, size):
    """A rank joins without the plugin: vLLM balances all of them by itself."""
    pair, whole = (dist.new_group(list(range(n))) for n in (2, size))
    if rank < 2:
        one = ElasticRank(rank, 2, "start", pair, use_async=False)
        one.steps(4)
        one.grow(size, "grow", whole)
    else:
        one = ElasticRank(rank, size, "grow", whole, use_async=False, joins=True, plugged=False)
        one.joined(whole)
    seen = one.seen()
    one.steps(4)
    if one.guest is not None:  # As without the plugin: nothing is refused.
        one.guest.before_sleep(1)
        one.guest.before_weights()
    return seen


def cut_short(rank, size, *, begun):
    """Ranks join in the middle of a plan; then weights would be loaded.

    Args:
        begun: vLLM's worker brings the layers; else the poll is in flight that passes the plan.
    """
    pair, whole = (dist.new_group(list(range(n))) for n in (2, size))
    seen: dict[str, Any] = {}
    if rank < 2:
        one = ElasticRank(rank, 2, "start", pair, use_async=begun)
        one.steps(4)
        new, moves, participant = one.target(), one.guest.moves, one.agent._participant
        one._prepare(size, "grow")
        vote = one.order(new)
        one.until(lambda: moves.move if begun else participant.must_wait_for_poll(), every=1)
        seen = {"target": new.phy2log, "vote": vote.yes}
        seen["moved"] = None if moves.move is None else len(moves.move.done)
        one._commit(size, whole, lambda: one.executor.commit_scale_up(True))
    else:
        one = ElasticRank(rank, size, "grow", whole, use_async=begun, joins=True)
        one.joined(whole)
    seen |= one.seen()
    refused = ""
    try:
        one.guest.before_weights()
    except Unavailable as error:
        refused = str(error)
    return {**seen, "refused": refused}


def observed(rank, size):
    """In observe mode vLLM places by itself, and the counts go on in the group that follows."""
    pair, whole = (dist.new_group(list(range(n))) for n in (2, size))
    if rank < 2:
        one = ElasticRank(rank, 2, "start", pair, use_async=False, mode="observe")
        one.steps(5)
        one.grow(size, "grow", whole)
    else:
        one = ElasticRank(rank, size, "grow", whole, use_async=False, mode="observe", joins=True)
        one.joined(whole)
    seen = one.seen()
    one.steps(4)
    metas, _ = one.reported(4)
    return {**seen, "steps": metas["step"].tolist(), "first": seen["step"]}


def followed(rank, size, *, controllers, folder):
    """A controller plans for 2 ranks, for 4, and before one leaves; the test writes the files."""
    pair, whole, three = (dist.new_group(list(range(n))) for n in (2, 4, 3))
    served = {"use_async": True, "make_link": None, "controllers": controllers}
    if rank < 2:
        one = ElasticRank(rank, 2, "start", pair, **served)
        one.hot = True
        one.until(lambda: one.agent.epoch >= 1)
        one.grow(4, "grow", whole, lambda: one.steps(20, 0.005))
    else:
        one = ElasticRank(rank, 4, "grow", whole, joins=True, **served)
        one.joined(whole)
        one.hot = True
    seen = {"grown": one.seen()}
    one.until(lambda: one.agent.epoch > seen["grown"]["epoch"])
    seen["four"] = one.seen()
    (folder / f"four-{rank}").touch()
    one.until(lambda: (folder / "evacuated").exists(), 120)
    seen["evacuated"] = one.seen()
    one.shrink(3, "shrink", three)
    if rank < 3:
        seen["shrunk"] = one.seen()
        one.until(lambda: (folder / "end").exists(), 120)
    dist.barrier()
    return seen
