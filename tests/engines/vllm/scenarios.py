"""What ranks of a toy vLLM go through; every function runs once in each rank's process."""

import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenkeel.engines.guest.guards import Unsupported
from evenkeel.engines.guest.settings import GuestSettings
from evenkeel.engines.vllm.plugin import Plugin, register
from evenkeel.model.load import LoadReport
from evenkeel.model.placement import Placement
from evenkeel.model.plan import Wave
from evenkeel.protocol.messages import Ack, StagingProgress, Vote
from tests.agent.fleet import PortLink
from tests.engines.driving import DrivenRank, is_told, steps_of
from tests.engines.vllm import engine
from tests.engines.vllm.engine import Config, Model, ModelConfig

TOKENS = 12


class Rank(DrivenRank):
    """One rank of the toy engine with the plugin beside it."""

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
        **changes,
    ):
        self.rank, self.size = rank, size
        self.modules = engine.load()
        everyone = list(range(size))
        self.lockstep = dist.new_group(everyone)
        engine.GROUPS.ep = engine.group_of(dist.group.WORLD, dist.new_group(everyone))
        engine.GROUPS.eplb = engine.group_of(dist.new_group(everyone), dist.new_group(everyone))
        values = {
            "controllers": "127.0.0.1:1",
            "deployment": "toy",
            "mode": mode,
            "host": "127.0.0.1",
            "interface": "lo",
            "poll_every": 4,
            "resolve_after": 2,
            "node": f"node-{rank}",
            "gate_timeout_s": 10.0,
            "stall_after_s": 60.0,
        }
        self.hot = False
        self.plugin = Plugin(GuestSettings(**{**values, **changes}), engine.VERSION, make_link)
        self.plugin.install()
        if before is not None:
            before(self)
        self.config = config if config is not None else Config(use_async=use_async)
        self.state = self.modules.state.EplbState(self.config, torch.device("cpu"))
        self.model = Model(self.modules, rank, size, top_k=top_k)
        self.model_config = ModelConfig()
        self.state.add_model(self.model, self.model_config)
        self.model_state = self.state.model_states["toy-hash"]
        self.guest = self.plugin.guests[self.state]
        self.agent = self.guest.agent
        self.link: Any = self.guest._link
        self.worker_failed = threading.Event()
        if use_async:
            engine.start_worker(self.modules, self.state, self.worker_failed)
        self.taken = 0
        if self.link is not None and self.agent is not None:
            self.register()

    def step(self, dummy=False):
        """One forward pass, its all-to-all, and vLLM's balancer after it."""
        generator = torch.Generator().manual_seed(100 * self.taken + self.rank)
        padded = TOKENS + 5
        scores = torch.rand(padded, self.model.num_logical_experts, generator=generator)
        if self.hot:
            # Experts 2 and 3 lie on rank 0, have no replica, and take most of the tokens.
            scores[:, 2:4] += 0.6
        self.chosen = scores.topk(2).indices
        if not dummy:
            self.state.prepare_forward(self.model_config, TOKENS)
            self.model.forward(self.chosen)
        dist.barrier(group=self.lockstep)
        self.state.step(is_dummy=dummy)
        self.taken += 1

    def until(self, done, limit_s=60.0):
        """Step until `done()` holds on every rank; all ranks stop at the same step."""
        deadline = time.monotonic() + limit_s
        while True:
            self.steps(8, 0.002)
            here = torch.tensor([int(bool(done())), int(time.monotonic() < deadline)])
            dist.all_reduce(here, op=dist.ReduceOp.MIN, group=self.lockstep)
            if here[0] or not here[1]:
                return

    def map(self):
        return self.model_state.physical_to_logical_map.numpy().copy()

    def seen(self):
        return {
            "map": self.map(),
            "epoch": self.agent.epoch,
            "placement": self.agent.placement.phy2log,
            "wrong": self.model.wrong_slots(self.rank, self.model_state.physical_to_logical_map),
            "trouble": self.agent.trouble,
            "refused": self.guest.orders.refused,
            "steps": self.taken,
        }


def place(rank, size, *, use_async):
    """A plan arrives, is voted on, committed, and carried out by vLLM; then a second one."""
    one = Rank(rank, size, use_async=use_async)
    one.steps(6)
    before = one.map()
    new = one.target()
    vote = one.order(new)
    one.until(lambda: one.agent.epoch == 1)
    said = one.sent(Ack | StagingProgress, is_told)
    ack = next(message for message in said if isinstance(message, Ack))
    first = {**one.seen(), "before": before, "target": new.phy2log, "vote": vote.yes, "ack": ack.epoch}
    progress = [message for message in said if isinstance(message, StagingProgress)]
    again = one.target(seed=2)
    one.order(again, "plan-2")
    one.until(lambda: one.agent.epoch == 2)
    second = one.link.expect(Ack)
    return {
        "first": first,
        "progress": [(p.bytes_done, p.bytes_total) for p in progress],
        "second": {**one.seen(), "target": again.phy2log, "ack": second.epoch},
    }


def observe(rank, size):
    """Nothing but counts: a step, a dummy step, and what arrived."""
    one = Rank(rank, size, use_async=True, mode="observe")
    one.steps(4)
    chosen = one.chosen[:TOKENS].reshape(-1)
    want = torch.bincount(chosen, minlength=one.model.num_logical_experts).numpy()
    one.step(dummy=True)
    one.steps(3)
    reports = one.sent(LoadReport, lambda reports: steps_of(reports) >= 8)
    metas = [meta for report in reports for meta in report.steps]
    counts = np.concatenate([report.counts for report in reports if report.steps])
    hello = one.agent.hello()
    return {
        "steps": [meta.step for meta in metas],
        "tokens": [meta.tokens for meta in metas],
        "dummy": [meta.dummy for meta in metas],
        "epochs": [meta.epoch for meta in metas],
        "counts": counts,
        "want_3": want,
        "shape": hello.shape,
        "capabilities": sorted(hello.capabilities),
        "digest": hello.placement_digest,
        "placement": one.agent.placement.digest,
        "policy": one.modules.policies.EPLB_POLICIES["default"].__name__,
    }


def own_balancer(rank, size, *, mode):
    """vLLM's own planner moves experts while we watch (observe), or behind our back (place)."""

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
    # In place mode our hold on the trigger is in force; the other planner calls rearrange by itself.
    one.steps(8)
    if mode == "place":
        one.state.rearrange()
    one.steps(8)
    return {**one.seen(), "before": before_map, "vote": vote}


def fail_second_layer(one):
    """vLLM's worker raises in the second layer it moves."""
    transfer = one.modules.worker.transfer_layer

    def fails(*args, layer_idx, **kwargs):
        if layer_idx == 1:
            raise RuntimeError("no more device memory")
        return transfer(*args, layer_idx=layer_idx, **kwargs)

    one.modules.worker.transfer_layer = fails


def worker_dies(rank, size):
    """vLLM's worker of rank 1 raises in the second layer: vLLM itself goes on without a word."""
    one = Rank(rank, size, use_async=True, stall_after_s=0.5)
    if rank == 1:
        fail_second_layer(one)
    one.steps(4)
    one.order(one.target())
    one.until(lambda: one.agent.trouble)
    before = one.taken
    one.steps(20)
    beat = one.agent.heartbeat()
    return {
        **one.seen(),
        "further": one.taken - before,
        "beat": beat.trouble,
        "target": one.target().phy2log,
        "old": one.agent.placement.phy2log,
    }


def never_consumed(rank, size):
    """The result of a layer is published and never taken: the stop of which vLLM says nothing."""
    one = Rank(rank, size, use_async=True, stall_after_s=0.5)
    one.steps(4)
    one.order(one.target())
    one.state._all_ranks_result_ready = lambda _model_state: False
    one.until(lambda: one.agent.trouble)
    before = one.taken
    one.steps(20)
    return {**one.seen(), "further": one.taken - before}


def start_fails(rank, size, *, how):
    """The guest cannot start on one rank; the engine's groups carry the engine's words all the same."""
    changes = {"model": {"top_k": None} if rank == 1 else {}, "store": {"host": "no.such.host.invalid"}}[how]
    config = Config(use_async=False, step_interval=12)
    one = Rank(rank, size, use_async=False, config=config, group_timeout_s=5.0, **changes)
    told = []
    for group in (engine.GROUPS.ep.cpu_group, engine.GROUPS.eplb.cpu_group):
        mine = torch.tensor([10 + rank])
        rows = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(rows, mine, group=group)
        told.append([int(row) for row in rows])
    before = one.map()
    one.steps(30)
    return {
        "agent": one.agent is not None,
        "told": told,
        "steps": one.taken,
        "before": before,
        "map": one.map(),
    }


def plugin_missing(rank, size):
    """One rank has no plugin at all: vLLM balances by itself on all of them, as if none had one."""
    if rank == 0:
        config = Config(use_async=False, step_interval=12)
        one = Rank(rank, size, use_async=False, config=config, group_timeout_s=3.0)
        state, step, agent = one.state, one.step, one.agent
    else:
        modules = engine.load()
        one = object.__new__(Rank)
        one.rank, one.size, one.modules, one.hot, one.taken = rank, size, modules, False, 0
        everyone = list(range(size))
        one.lockstep = dist.new_group(everyone)
        engine.GROUPS.ep = engine.group_of(dist.group.WORLD, dist.new_group(everyone))
        engine.GROUPS.eplb = engine.group_of(dist.new_group(everyone), dist.new_group(everyone))
        state = one.state = modules.state.EplbState(
            Config(use_async=False, step_interval=12), torch.device("cpu")
        )
        one.model, one.model_config = Model(modules, rank, size), ModelConfig()
        state.add_model(one.model, one.model_config)
        one.model_state = state.model_states["toy-hash"]
        step, agent = one.step, None
    before = one.map()
    for _ in range(30):
        step()
    wrong = one.model.wrong_slots(rank, one.model_state.physical_to_logical_map)
    return {
        "agent": agent is not None,
        "steps": one.taken,
        "before": before,
        "map": one.map(),
        "wrong": wrong,
    }


def hook_fails(rank, size):
    """Something of vLLM's is not what the plugin takes it for, in the middle of a move, on one rank."""
    one = Rank(rank, size, use_async=True, stall_after_s=0.5)
    one.steps(4)
    one.order(one.target())
    if rank == 1:
        one.state.async_worker = object()
    one.until(lambda: one.agent.trouble)
    before = one.taken
    one.steps(20)
    return {**one.seen(), "further": one.taken - before}


def resized(rank, size, *, slots):
    """vLLM commits a map of another number of slots, as when ranks come or go."""
    one = Rank(rank, size, use_async=False, mode="observe")
    one.steps(3)
    new = torch.arange(slots).repeat(3, 1) % 6
    one.modules.state._commit_eplb_maps(one.model_state, new_physical_to_logical_map=new)
    return {"map": one.map().shape, "trouble": one.agent.trouble, "epoch": one.agent.epoch}


def disagree(rank, size, *, how):
    """Straight into the planner with ranks that hold different things."""
    one = Rank(rank, size, use_async=False)
    one.steps(3)
    new = one.target()
    move_like = one.prepare(new)
    from evenkeel.agent.guest import Move

    move = Move(move_like.wave, new, move_like.body.layers, None, 0.0)  # type: ignore[arg-type]
    if how == "shape":
        bigger = np.concatenate([new.phy2log, new.phy2log[:1]])
        move.placement = Placement(bigger, size, new.num_logical_experts)
    if not (how == "missing" and rank == 1):
        one.guest.orders.move = move
    if how == "step" and rank == 1:
        one.guest.orders.step += 1
    if how == "target" and rank == 1:
        move.placement = one.target(seed=9)
    one.state.rearrange()
    one.guest.orders.move = None
    seen = {**one.seen(), "target": new.phy2log}
    one.steps(5)
    return {**seen, "after": one.taken}


def wrong_shape(rank, size):
    """A Prepare for another shape is refused before anything is agreed."""
    one = Rank(rank, size, use_async=False)
    good = one.prepare(one.target())
    rows = np.concatenate([good.body.rows, good.body.rows], axis=1)
    body = Wave(0, good.body.layers, rows, good.body.batches)
    one.link.say(one.prepare(one.target(), body=body))
    vote = one.link.expect(Vote)
    one.steps(5)
    return {**one.seen(), "vote": vote}


def away(rank, size):
    """Many more steps than the recorder keeps, and no controller: the engine neither waits nor fails."""
    one = Rank(rank, size, use_async=False)
    one.link.listener.lost(1)
    began = time.monotonic()
    one.steps(1500)
    return {**one.seen(), "dropped": one.agent.dropped_steps, "seconds": time.monotonic() - began}


def controlled(rank, size, *, controllers, mode):
    """A real controller over gRPC: it sees the loads, plans by itself, and vLLM carries the plan out."""
    config = Config(use_async=True, step_interval=100_000)
    one = Rank(rank, size, use_async=True, mode=mode, controllers=controllers, make_link=None, config=config)
    one.hot = True
    before = one.map()
    deadline, after = time.monotonic() + 60, 0
    while after < 40 and time.monotonic() < deadline:
        one.steps(8, 0.004)
        here = torch.tensor([one.agent.epoch, int(time.monotonic() >= deadline)])
        dist.all_reduce(here, op=dist.ReduceOp.MIN, group=one.lockstep)
        after += 8 if here[0] > 0 or (mode == "observe" and one.taken > 400) else 0
        if here[1]:
            break
    return {**one.seen(), "before": before}


def controlled_until_it_stalls(rank, size, *, controllers, seen):
    """The same, and vLLM's worker of rank 1 dies in the middle of it; steps go on until `seen` is there."""
    config = Config(use_async=True, step_interval=100_000)
    changes = {"controllers": controllers, "make_link": None, "config": config, "stall_after_s": 0.5}
    one = Rank(rank, size, use_async=True, mode="place", **changes)
    if rank == 1:
        fail_second_layer(one)
    one.hot = True
    one.until(lambda: seen.exists(), limit_s=120.0)
    return {**one.seen(), "served": one.taken}


def warm(rank, size, *, path):
    """A file of `evenkeel export` starts vLLM where it says; one that does not fit is left out."""
    one = Rank(rank, size, use_async=True, placement=path)
    one.steps(6)
    new = one.target()
    one.order(new)
    one.until(lambda: one.agent.epoch == 1)
    return {**one.seen(), "target": new.phy2log, "start": one.agent.hello().placement_digest}


def warm_start_map(rank, size, *, path):
    one = Rank(rank, size, use_async=False, placement=path)
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
    """The planner's published vectors, asked of whatever stands in vLLM's registry after the plugin."""
    del rank, size
    modules = engine.load()
    engine.GROUPS.ep = engine.group_of(dist.group.WORLD, dist.group.WORLD)
    engine.GROUPS.eplb = engine.GROUPS.ep
    original = modules.policies.EPLB_POLICIES["default"]
    Plugin(GuestSettings(controllers="x:1", mode="place"), engine.VERSION, PortLink).install()
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
            policy.rebalance_experts(readme, 16, 4, 2, 8, torch.tensor(README_MAP).repeat(1, 2)).shape
        ),
        "empty_slots": (to_physical.tolist(), replicas.tolist()),
    }


def refusals(rank, size):
    """Every way in which vLLM may not be the one this plugin knows; nothing may be changed then."""
    del rank, size
    modules = engine.load()
    state, policies = modules.state, modules.policies
    untouched = (state.EplbState.step, state._move_to_workspace, dict(policies.EPLB_POLICIES))
    settings = GuestSettings(controllers="x:1", mode="place")
    found = {}

    def attempt(name, version=engine.VERSION):
        try:
            Plugin(settings, version, PortLink).install()
            found[name] = "installed"
        except Unsupported as error:
            found[name] = str(error)
        same = (state.EplbState.step, state._move_to_workspace, dict(policies.EPLB_POLICIES)) == untouched
        found[name] += "" if same else " BUT CHANGED"

    attempt("version", "0.34.0")
    step = state.EplbState.step
    state.EplbState.step = lambda self, dummy: None
    untouched = (state.EplbState.step, *untouched[1:])
    attempt("signature")
    state.EplbState.step = step
    untouched = (step, *untouched[1:])
    commit = state._commit_eplb_maps
    del state._commit_eplb_maps
    attempt("missing")
    state._commit_eplb_maps = commit
    policies.EPLB_POLICIES["swift"] = policies.EPLB_POLICIES["default"]
    untouched = (*untouched[:2], dict(policies.EPLB_POLICIES))
    attempt("policies")
    del policies.EPLB_POLICIES["swift"]
    fields = state.EplbModelState
    state.EplbModelState = type("EplbModelState", (), {})
    untouched = (*untouched[:2], dict(policies.EPLB_POLICIES))
    attempt("fields")
    state.EplbModelState = fields
    return found


def environment(rank, size):
    """`register` as vLLM calls it: off without controllers, and silent about nothing else."""
    del rank, size
    import os

    modules = engine.load()
    step = modules.state.EplbState.step
    register()
    off = modules.state.EplbState.step is step
    os.environ["EVENKEEL_RANK__CONTROLLERS"] = "127.0.0.1:1"
    os.environ["EVENKEEL_RANK__DEPLOYMENT"] = "Not A Name"
    register()
    refused = modules.state.EplbState.step is step
    os.environ["EVENKEEL_RANK__DEPLOYMENT"] = "toy"
    register()
    wrapped = modules.state.EplbState.step
    register()
    return {
        "off": off,
        "refused": refused,
        "on": wrapped is not step,
        "once": modules.state.EplbState.step is wrapped,
    }
