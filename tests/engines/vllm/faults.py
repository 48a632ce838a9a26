"""Scenarios of a toy vLLM with faults, and what the plugin refuses."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist

from evenkeel_moe.engines.guest.guards import Hook, Unsupported
from evenkeel_moe.engines.guest.settings import GuestMode, GuestSettings
from evenkeel_moe.engines.vllm import hooks
from evenkeel_moe.engines.vllm.plugin import VllmPlugin, register
from evenkeel_moe.protocol.messages import AbortAnswer
from tests.agent.fleet import PortLink
from tests.engines.vllm import engine
from tests.engines.vllm.engine import Config
from tests.engines.vllm.scenarios import TOKENS, Rank

TOY: Any = engine
"""The same module, for what a scenario replaces in it."""


def fail_second_layer(one):
    """vLLM's worker raises in the second layer it moves."""
    transfer = one.modules.worker.transfer_layer

    def fails(*args, layer_idx, **kwargs):
        if layer_idx == 1:
            raise RuntimeError("no more device memory")
        return transfer(*args, layer_idx=layer_idx, **kwargs)

    one.modules.worker.transfer_layer = fails


def worker_dies(rank, size):
    """The worker of rank 1 raises in the second layer, which vLLM itself does not report."""
    one = Rank(rank, size, use_async=True, stall_after_s=0.5)
    if rank == 1:
        fail_second_layer(one)
    one.steps(4)
    one.order(one.target())
    one.until(lambda: one.agent.trouble)
    one.steps(20)
    beat = one.agent.heartbeat()
    return {
        **one.seen(),
        "beat": beat.trouble,
        "target": one.target().phy2log,
        "old": one.agent.placement.phy2log,
    }


def start_fails(rank, size, *, how):
    """The guest cannot start on one rank; the engine's groups still work for the engine."""
    ways: dict[str, dict[str, Any]] = {
        "model": {"top_k": None} if rank == 1 else {},
        "store": {"host": "no.such.host.invalid"},
    }
    changes = ways[how]
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
        "before": before,
        "map": one.map(),
    }


def plugin_missing(rank, size):
    """One rank has no plugin: vLLM balances by itself on all ranks, as without the plugin."""
    config = Config(use_async=False, step_interval=12)
    one = Rank(rank, size, use_async=False, config=config, group_timeout_s=3.0, plugged=rank == 0)
    before = one.map()
    one.steps(30)
    return {
        "agent": one.agent is not None,
        "before": before,
        "map": one.map(),
        "wrong": one.model.wrong_slots(rank, one.model_state.physical_to_logical_map),
    }


def adapters(rank, size, *, mode):
    """vLLM has wrapped the experts of the last layer for LoRA adapters."""
    make = TOY.kernels.make_layer

    def make_wrapped(*args, is_monolithic):
        layer = make(*args, is_monolithic=is_monolithic)
        layer.routed_experts.lora_base_layer_prefix = "base_layer." if is_monolithic else ""
        return layer

    TOY.kernels.make_layer = make_wrapped
    one = Rank(rank, size, use_async=False, mode=mode)
    one.steps(3)
    return one.agent is not None


def hook_fails(rank, size):
    """In the middle of a move, an object of vLLM on one rank is not what the plugin expects."""
    one = Rank(rank, size, use_async=True, stall_after_s=0.5)
    one.steps(4)
    one.order(one.target())
    if rank == 1:
        one.state.async_worker = object()
    one.until(lambda: rank == 0 or one.agent.trouble)
    one.steps(20)
    return one.seen()


def hash_fails(rank, size):
    """The configuration of the model fails when the plugin asks for its hash, after vLLM has."""
    asked = []

    def compute_hash(_config):
        asked.append(True)
        if len(asked) == 2:
            raise RuntimeError("no hash")
        return "toy-hash"

    TOY.ModelConfig.compute_hash = compute_hash
    config = Config(use_async=False, step_interval=12)
    one = Rank(rank, size, use_async=False, config=config)
    before = one.map()
    one.steps(30)
    return {"agent": one.agent is not None, "moved": not np.array_equal(before, one.map())}


def last_copies_fail(rank, size):
    """On ROCm vLLM leaves the plan out, and the plugin's own copies fail."""
    one = Rank(rank, size, use_async=False)
    engine.be_rocm(one.modules.state)
    one.state._allreduce_list = lambda tensors: [torch.zeros_like(one) for one in tensors]

    def fails(*_args):
        raise RuntimeError("no more device memory")

    one.modules.state.rearrange_expert_weights_inplace = fails
    one.steps(4)
    one.order(one.target())
    one.until(lambda: one.agent.trouble)
    one.steps(20)
    return one.seen()


def unknown_worker(rank, size, *, how):
    """vLLM starts its workers in a way that the plugin does not watch, or they lack a function."""
    original = TOY.WorkerWrapper.initialize_from_config

    def before(_one):
        if how == "not wrapped":
            TOY.WorkerWrapper.initialize_from_config = original
        else:
            TOY.Worker = type("OtherWorker", (TOY.Worker,), {"discard": None})

    with structlog.testing.capture_logs() as said:
        one = Rank(rank, size, use_async=False, before=before)
        one.steps(4)
    lines = [line for line in said if line["event"] == "worker_not_watched"]
    return {**one.seen(), "said": len(lines)}


def warm_up(rank, size):
    """Passes of vLLM's start: like served ones, and without a step of its balancer."""
    one = Rank(rank, size, use_async=True, mode="observe")

    def start():
        one.steps(3)
        one.model.forward(one.chosen)

    one.model.forward(torch.zeros(4, 2, dtype=torch.int64))
    one.worker.warm_up = start
    one.worker.compile_or_warm_up_model()
    one.step()
    chosen = one.chosen[:TOKENS].reshape(-1)
    want = torch.bincount(chosen, minlength=one.model.num_logical_experts).numpy()
    one.steps(3)
    metas, counts = one.reported(7)
    return {
        "tokens": metas["tokens"].tolist(),
        "dummy": metas["dummy"].tolist(),
        "counts": counts,
        "want": want,
    }


def resized(rank, size, *, slots):
    """vLLM commits a map of another number of slots, as when ranks come or go."""
    one = Rank(rank, size, use_async=False, mode="observe")
    one.steps(3)
    new = torch.arange(slots).repeat(3, 1) % 6
    one.modules.state._commit_eplb_maps(one.model_state, new_physical_to_logical_map=new)
    return {"map": one.map().shape, "trouble": one.agent.trouble, "epoch": one.agent.epoch}


def disagree_once(rank, size, *, use_async):
    """The ranks differ about one plan, so vLLM keeps its map; they agree on the next plan."""
    one = Rank(rank, size, use_async=use_async)
    one.steps(3)
    begin = one.guest.begin

    def begin_late(move):
        begin(move)
        one.guest.agreement.begin(move, 1000 + rank)

    one.guest.begin = begin_late
    before = one.map()
    one.order(one.target(), "plan-0")
    one.until(lambda: one.guest.agreement.refused and one.guest.moves.move is None)
    said = one.link.expect(AbortAnswer)
    first = {"before": before, "outcome": said.outcome, **one.seen()}
    one.guest.begin = begin
    return {"first": first, **one.carry_out(one.target(seed=2))}


def controlled_until_it_stalls(rank, size, *, controllers, seen):
    """Like `controlled`, but rank 1's worker dies; steps go on until the file `seen` exists."""
    config = Config(use_async=True, step_interval=100_000)
    changes = {
        "controllers": controllers,
        "make_link": None,
        "config": config,
        "stall_after_s": 0.5,
    }
    one = Rank(rank, size, use_async=True, **changes)
    if rank == 1:
        fail_second_layer(one)
    one.hot = True
    one.until(lambda: seen.exists(), limit_s=120.0)
    return one.seen()


def refusals(rank, size):
    """Change vLLM in every way that the plugin must refuse; nothing may be wrapped then."""
    del rank, size
    modules = engine.load()
    state, policies = modules.state, modules.policies
    untouched = (state.EplbState.step, state._move_to_workspace, dict(policies.EPLB_POLICIES))
    settings = GuestSettings(controllers="x:1", mode=GuestMode.PLACE)
    sys.modules["vllm"].__spec__ = ModuleSpec("vllm", None)
    found, checked = {}, {}

    def attempt(name, version=engine.VERSION):
        try:
            VllmPlugin(settings, version, PortLink).install()
            found[name] = "installed"
        except Unsupported as error:
            found[name] = str(error)
        same = (
            state.EplbState.step,
            state._move_to_workspace,
            dict(policies.EPLB_POLICIES),
        ) == untouched
        found[name] += "" if same else " BUT CHANGED"
        report = hooks.report()
        assert report is not None
        checked[name] = next(iter(report.differences), Hook("")).difference

    attempt("version", "9.9.9")
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
    policies.EplbRebalanceContext = object
    attempt("context")
    del policies.EplbRebalanceContext
    find_spec = importlib.util.find_spec

    def finds_ascend(name: str, package: str | None = None) -> ModuleSpec | None:
        return find_spec("json") if name == "vllm_ascend" else find_spec(name, package)

    importlib.util.find_spec = finds_ascend
    attempt("ascend")
    importlib.util.find_spec = find_spec
    for name in ("reload_weights", "reset_weights", "compile_or_warm_up_model"):
        function = getattr(TOY.Worker, name)
        setattr(TOY.Worker, name, lambda worker: None)
        attempt(f"other {name}")
        delattr(TOY.Worker, name)
        attempt(f"no {name}")
        setattr(TOY.Worker, name, function)
    allocate = TOY.WorkerWrapper.initialize_from_config
    del TOY.WorkerWrapper.initialize_from_config
    attempt("no initialize_from_config")
    TOY.WorkerWrapper.initialize_from_config = allocate
    workers = sys.modules.pop("vllm.v1.worker.worker_base")
    attempt("no workers")
    sys.modules["vllm.v1.worker.worker_base"] = workers
    return found, checked


def environment(rank, size):
    """Call `register` as vLLM does: without controllers, with wrong settings, and twice."""
    del rank, size
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
