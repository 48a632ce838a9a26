"""Scenarios of a toy vLLM without faults; each function runs once in each rank's process."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenkeel_moe.engines.guest.settings import GuestMode, GuestSettings
from evenkeel_moe.engines.vllm.plugin import VllmPlugin
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.protocol.messages import Ack, StagingProgress
from evenkeel_moe.wire.link import KvCache
from tests.agent.fleet import PortLink
from tests.engines.driving import DrivenRank, is_told, toy_settings
from tests.engines.vllm import engine
from tests.engines.vllm.engine import Config, Model, ModelConfig
from tests.waiting import deadline

TOKENS = 12


class Rank(DrivenRank):
    """One rank of the toy engine, with the plugin unless `plugged` is false."""

    def __init__(
        self,
        rank,
        size,
        *,
        use_async,
        mode="place",
        before=None,
        config=None,
        make_link=PortLink,
        top_k=2,
        plugged=True,
        plugin=None,
        drafter=False,
        tensor_parallel="",
        stages=1,
        **changes,
    ):
        self.rank, self.size = rank, size
        self.tensor_parallel = tensor_parallel
        self.counted_times = 1
        self.modules = engine.load()
        everyone = list(range(size))
        self.lockstep = dist.new_group(everyone)
        if stages > 1:
            self.rank, self.size = rank, size = self.split_into_stages(stages)
        else:
            engine.GROUPS.ep = engine.group_of(dist.group.WORLD, dist.new_group(everyone))
            engine.GROUPS.eplb = engine.group_of(dist.new_group(everyone), dist.new_group(everyone))
        if tensor_parallel:
            engine.GROUPS.tp = SimpleNamespace(rank_in_group=rank, world_size=size)
        values = {
            "mode": mode,
            "node": f"node-{rank}",
            "gate_timeout_s": deadline(10),
            "stall_after_s": 60.0,
        }
        self.hot = False
        settings = toy_settings(**{**values, **changes})
        self.plugin = plugin or VllmPlugin(settings, engine.VERSION, make_link)
        if plugged:
            self.plugin.install()
        if before is not None:
            before(self)
        self.config = config if config is not None else Config(use_async=use_async)
        self.state = self.modules.state.EplbState(self.config, torch.device("cpu"))
        if drafter:  # vLLM loads it first.
            draft = Model(self.modules, rank, size, layers=1, top_k=top_k)
            self.state.add_model(draft, engine.DraftConfig())
        self.model = Model(self.modules, rank, size, top_k=top_k)
        self.model_config = ModelConfig()
        self.state.add_model(self.model, self.model_config)
        self.model_state = self.state.model_states["toy-hash"]
        wrapper = engine.WorkerWrapper(rank, self.state)
        wrapper.initialize_from_config([engine.KV_CACHE] * size)
        self.worker = wrapper.worker
        self.guest: Any = None
        self.agent: Any = None
        self.link: Any = None
        if plugged:
            self.guest = self.plugin.guest
            self.agent, self.link = self.guest.agent, self.guest.link
        self.worker_failed = threading.Event()
        if use_async:
            engine.start_worker(self.modules, self.state, self.worker_failed)
        self.taken = 0
        if self.link is not None and self.agent is not None:
            self.register()

    def split_into_stages(self, stages):
        """Make the groups of each pipeline stage; return this rank and the size of its group."""
        size = self.size // stages
        made = []
        for stage in range(stages):
            members = list(range(stage * size, (stage + 1) * size))
            made.append([dist.new_group(members) for _ in range(4)])
        stage = self.rank // size
        engine.GROUPS.pp = SimpleNamespace(rank_in_group=stage, world_size=stages)
        engine.GROUPS.ep = engine.group_of(*made[stage][:2])
        engine.GROUPS.eplb = engine.group_of(*made[stage][2:])
        return self.rank % size, size

    def step(self, dummy=False):
        """Run a forward pass, its all-to-all, and then vLLM's balancer.

        With tensor parallelism all ranks get the same tokens; each routes all of them, or, with
        "sequence", its chunk, as vLLM's `sequence_parallel_chunk` cuts it.
        """
        batch = 0 if self.tensor_parallel else self.rank
        generator = torch.Generator().manual_seed(100 * self.taken + batch)
        padded = TOKENS + 5
        scores = torch.rand(padded, self.model.num_logical_experts, generator=generator)
        if self.hot:
            # Experts 2 and 3 are on rank 0, have no replica, and get most of the tokens.
            scores[:, 2:4] += 0.6
        self.chosen = scores.topk(2).indices
        if not dummy:
            self.state.prepare_forward(self.model_config, TOKENS)
            self.state.prepare_forward(engine.DraftConfig(), 3)  # A drafter prepares its own pass.
            for _ in range(self.counted_times):
                self.model.forward(self.routed())
        dist.barrier(group=self.lockstep)
        self.state.step(is_dummy=dummy)
        self.taken += 1

    def routed(self):
        """Return the rows that this rank routes."""
        if self.tensor_parallel != "sequence":
            return self.chosen
        per_rank = -(-len(self.chosen) // self.size)
        filled = torch.nn.functional.pad(
            self.chosen, (0, 0, 0, per_rank * self.size - len(self.chosen))
        )
        return filled[self.rank * per_rank : (self.rank + 1) * per_rank]

    def until(self, done, limit_s=60.0, every=8):
        """Step until `done()` is true on every rank; all ranks stop at the same step."""
        end = time.monotonic() + deadline(limit_s)
        while True:
            self.steps(every, 0.002)
            here = torch.tensor([int(bool(done())), int(time.monotonic() < end)])
            dist.all_reduce(here, op=dist.ReduceOp.MIN, group=self.lockstep)
            if here[0] or not here[1]:
                return

    def carry_out(self, new):
        """Let the controller order a plan, and step until it has ended."""
        epoch = self.agent.epoch + 1
        vote = self.order(new, f"plan-{epoch}")
        self.until(lambda: self.agent.epoch >= epoch)
        return {**self.seen(), "target": new.phy2log, "vote": vote}

    def map(self):
        return self.model_state.physical_to_logical_map.numpy().copy()

    def seen(self):
        return {
            "map": self.map(),
            "epoch": self.agent.epoch,
            "placement": self.agent.placement.phy2log,
            "wrong": self.model.wrong_slots(self.rank, self.model_state.physical_to_logical_map),
            "trouble": self.agent.trouble,
            "refused": self.guest.agreement.refused,
        }


def place(rank, size, *, use_async, no_gain=False, step_interval=1000):
    """A plan is voted on, committed, and carried out by vLLM; then a second one.

    With `no_gain` vLLM runs on ROCm, and its own load window shows no load.
    """
    config = Config(use_async=use_async, step_interval=step_interval)
    one = Rank(rank, size, use_async=use_async, config=config)
    if no_gain:
        engine.be_rocm(one.modules.state)
        one.state._allreduce_list = lambda tensors: [torch.zeros_like(one) for one in tensors]
    one.steps(6)
    before = one.map()
    first = one.carry_out(one.target())
    said = one.sent(Ack | StagingProgress, is_told)
    ack = next(message for message in said if isinstance(message, Ack))
    progress = [message for message in said if isinstance(message, StagingProgress)]
    second = one.carry_out(one.target(seed=2))
    return {
        "first": {**first, "before": before, "ack": ack.epoch},
        "progress": [(p.bytes_done, p.bytes_total) for p in progress],
        "second": {**second, "ack": one.link.expect(Ack).epoch},
    }


def leave_slot_empty(rank, size, *, use_async):
    """On ROCm a plan leaves a slot of a replica empty, and the next one does not."""
    one = Rank(rank, size, use_async=use_async, before=lambda it: engine.be_rocm(it.modules.state))
    one.steps(3)
    old = one.agent.placement
    rows = old.phy2log.copy()
    rows[:, -1] = EMPTY
    vote = one.order(Placement(rows, size, old.num_logical_experts))
    one.steps(30, 0.002)
    if not vote.yes:
        one.order(one.target(seed=2), "plan-2")
    one.until(lambda: one.agent.epoch == 1)
    hello = one.agent.hello()
    return {**one.seen(), "vote": vote, "filled": hello.slots_stay_filled, "empty": rows}


def leave_another_slot_empty(rank, size):
    """A slot is empty before vLLM is on ROCm, and a plan for ROCm leaves another one empty."""
    one = Rank(rank, size, use_async=False)
    one.steps(3)
    for slot in (-1, -2):
        old = one.agent.placement
        rows = np.where(old.phy2log == EMPTY, 0, old.phy2log)
        rows[:, slot] = EMPTY
        seen = one.carry_out(Placement(rows, size, old.num_logical_experts))
        engine.be_rocm(one.modules.state)
    return seen


def second_engine(rank, size):
    """The process ends its engine, and makes another one with a model of the same size."""
    old = Rank(rank, size, use_async=False)
    plugin, at_exit = old.plugin, old.guest._at_exit
    old.steps(6)
    one = Rank(rank, size, use_async=False, plugin=plugin)
    closed = old.guest.agent is None and not at_exit.still_active()
    gone = weakref.ref(old.state)
    del old
    gc.collect()
    one.steps(6)
    return {**one.carry_out(one.target()), "closed": closed, "kept": gone() is not None}


def late_worker(rank, size, *, plans):
    """The worker of one rank asks for each plan some steps after the others."""
    one = Rank(rank, size, use_async=True)
    late: list[int] = []
    given = one.guest.plan

    def plan(current):
        begin = one.taken
        if rank == 1:
            while one.taken < begin + 3:
                time.sleep(0.001)
        late.append(one.taken - begin)
        return given(current)

    one.guest.plan = plan
    one.steps(3)
    for number in range(1, plans + 1):
        one.carry_out(one.target(seed=number))
    return {**one.seen(), "late": late}


def observe(rank, size):
    """Observe mode: steps, a dummy step, and the reports of them."""
    one = Rank(rank, size, use_async=True, mode="observe")
    kv_cache = one.link.expect(KvCache)
    one.steps(4)
    chosen = one.chosen[:TOKENS].reshape(-1)
    want = torch.bincount(chosen, minlength=one.model.num_logical_experts).numpy()
    one.step(dummy=True)
    one.steps(3)
    metas, counts = one.reported(8)
    hello = one.agent.hello()
    return {
        "steps": metas["step"].tolist(),
        "tokens": metas["tokens"].tolist(),
        "dummy": metas["dummy"].tolist(),
        "epochs": metas["epoch"].tolist(),
        "counts": counts,
        "want_3": want,
        "kv_cache": kv_cache,
        "warned": one.guest._warned_of_counts,
        "shape": hello.shape,
        "capabilities": sorted(hello.capabilities),
        "digest": hello.placement_digest,
        "placement": one.agent.placement.digest,
        "policy": one.modules.policies.EPLB_POLICIES["default"].__name__,
    }


def seconds(rank, size):
    """Steps of which one in three is measured; layers of two kinds of kernels."""
    one = Rank(rank, size, use_async=True, mode="observe", seconds_every=3)
    spent, told = one.model.spent, []
    for _ in range(8):
        before = np.array(spent.bounds)
        one.step()
        told.append((spent.bounds - before).tolist())
    metas, _ = one.reported(8)
    return {"seconds": metas["compute_s"].tolist(), "told": told}


def own_balancer(rank, size, *, mode):
    """vLLM's own planner moves experts: expected in observe mode, unexpected in place mode."""

    def before(one):
        if mode == "place":
            # Another plugin, loaded after ours, puts its planner into the registry.
            original = one.plugin._policy.__mro__[1]
            one.modules.policies.EPLB_POLICIES["default"] = original

    one = Rank(
        rank,
        size,
        use_async=False,
        mode=mode,
        before=before,
        config=Config(use_async=False, step_interval=12),
    )
    vote = one.order(one.target()) if mode == "place" else None
    before_map = one.map()
    # In place mode the guest holds the trigger back, so the other plugin calls rearrange itself.
    one.steps(8)
    if mode == "place":
        one.state.rearrange()
    one.steps(8)
    return {**one.seen(), "before": before_map, "vote": vote}


def controlled(rank, size, *, controllers):
    """A real controller over gRPC sees the loads and plans; vLLM carries the plan out."""
    config = Config(use_async=True, step_interval=100_000)
    one = Rank(
        rank,
        size,
        use_async=True,
        controllers=controllers,
        make_link=None,
        config=config,
    )
    one.hot = True
    before = one.map()
    end, after = time.monotonic() + deadline(60), 0
    while after < 40 and time.monotonic() < end:
        one.steps(8, 0.004)
        here = torch.tensor([one.agent.epoch, int(time.monotonic() >= end)])
        dist.all_reduce(here, op=dist.ReduceOp.MIN, group=one.lockstep)
        after += 8 if here[0] > 0 else 0
        if here[1]:
            break
    return {**one.seen(), "before": before}


def warm(rank, size, *, path):
    """vLLM starts from a file of `evenkeel placement export`; then a plan follows."""
    one = Rank(rank, size, use_async=True, placement=path)
    start = one.seen()
    one.steps(6)
    return {"start": start, **one.carry_out(one.target())}


def warm_start_map(rank, size, *, path, mode="place"):
    one = Rank(rank, size, use_async=False, placement=path, mode=mode)
    return one.seen()


def warm_refused(rank, size, *, path, folder):
    """Return True if the guest has no agent, so that vLLM's own planner answers."""
    without = {"controllers": "", "make_link": None}
    return Rank(rank, size, use_async=True, placement=path, record=folder, **without).agent is None


def warm_recorded(rank, size, *, path, folder):
    """vLLM starts from a file and records; other weights are loaded, and nobody plans."""
    without = {"controllers": "", "make_link": None}
    one = Rank(rank, size, use_async=True, placement=path, record=folder, **without)
    one.steps(6)
    one.worker.reload_weights(one.model.checkpoint(1))
    one.steps(40)
    return one.seen()


README_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
README_MAP = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def vectors(rank, size):
    """Ask the planner in vLLM's registry for the published vectors, with the plugin installed."""
    del rank, size
    modules = engine.load()
    engine.GROUPS.ep = engine.group_of(dist.group.WORLD, dist.group.WORLD)
    engine.GROUPS.eplb = engine.GROUPS.ep
    original = modules.policies.EPLB_POLICIES["default"]
    settings = GuestSettings(controllers="x:1", mode=GuestMode.PLACE)
    VllmPlugin(settings, engine.VERSION, PortLink).install()
    policy = modules.policies.EPLB_POLICIES["default"]
    readme = torch.tensor(README_LOAD)
    other = {
        "equal": (torch.full((1, 8), 10), 8, 2, 1, 4),
        "one_hot": (torch.tensor([[1000, 1, 1, 1, 1, 1, 1, 1]]), 12, 2, 2, 4),
        "not_divisible": (torch.tensor([[90, 132, 40, 61, 104, 165]]), 8, 3, 2, 4),
    }
    mixed = torch.tensor([[0, -1, 1, 2], [2, 1, -1, 0]])
    to_physical, replicas = modules.state.compute_logical_maps(mixed, 3)
    return {
        "name": policy.__name__,
        "readme": policy.rebalance_experts(readme, 16, 4, 2, 8).tolist(),
        "same": all(
            torch.equal(policy.rebalance_experts(*asked), original.rebalance_experts(*asked))
            for asked in other.values()
        ),
        "kept": policy.rebalance_experts(readme, 16, 4, 2, 8, torch.tensor(README_MAP)).tolist(),
        "shrunk": tuple(
            policy.rebalance_experts(
                readme, 16, 4, 2, 8, torch.tensor(README_MAP).repeat(1, 2)
            ).shape
        ),
        "empty_slots": (to_physical.tolist(), replicas.tolist()),
    }
