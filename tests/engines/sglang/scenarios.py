"""Scenarios of a toy SGLang; each function runs once in each rank's process."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist

from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.guest.settings import GuestMode, GuestSettings
from evenkeel_moe.engines.sglang.plugin import SglangPlugin, register
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.protocol.messages import Ack, MovedAnswers, StagingProgress
from evenkeel_moe.wire.link import KvCache
from tests.agent.fleet import PortLink
from tests.engines.driving import DrivenRank, is_told, toy_settings
from tests.engines.sglang import engine

TOKENS = 9


class Rank(DrivenRank):
    """One rank of the toy engine with the plugin's hooks applied."""

    def __init__(
        self,
        rank,
        size,
        *,
        mode="place",
        chunk=None,
        interval=10_000,
        init="trivial",
        a2a="deepep",
        deepep_mode="normal",
        elastic=None,
        ep_size=2,
        attention=1,
        fp4=False,
        recorder="stat",
        quantizes=False,
        routed_by="recorder",
        **changes,
    ):
        self.rank, self.size, self.routed_by = rank, size, routed_by
        self.groups = [TOKENS // 3, TOKENS - TOKENS // 3] if attention > 1 else None
        modules = self.modules = engine.load(rank)
        self.lockstep = dist.new_group(list(range(size)))
        moe = engine.EXEC.moe
        moe.eplb_rebalance_layers_per_chunk, moe.eplb_rebalance_num_iterations = chunk, interval
        moe.expert_distribution_recorder_buffer_size = min(16, interval)
        moe.init_expert_location = init
        moe.moe_a2a_backend, moe.deepep_mode = a2a, deepep_mode
        moe.expert_distribution_recorder_mode = recorder
        moe.elastic_ep_backend, engine.PARALLEL.ep_size = elastic, ep_size
        engine.PARALLEL.attn_dp_size, engine.PARALLEL.gathers_fp4 = attention, fp4
        self.shared_batch = not engine.routes_own_tokens() or deepep_mode == "low_latency"
        engine.PARALLEL.attn_tp_rank = rank if self.shared_batch else 0
        settings = toy_settings(**{"mode": mode, "stall_after_s": 0.5, **changes})
        self.links: list[Any] = []

        def make_link():
            self.links.append(PortLink())
            return self.links[-1]

        self.plugin = SglangPlugin(settings, engine.VERSION, make_link)
        self.plugin.install()
        modules.hooks.HookRegistry.apply_hooks()
        location, record = modules.expert_location, modules.expert_distribution
        config = engine.ModelConfig()
        metadata = location.compute_initial_expert_location_metadata(config, rank % ep_size)
        location.set_global_expert_location_metadata(metadata)
        self.metadata = location.get_global_expert_location_metadata()
        self.recorder = record.ExpertDistributionRecorder.init_new(self.metadata, rank % ep_size)
        record.set_global_expert_distribution_recorder(self.recorder)
        updater = modules.expert_location_updater.ExpertLocationUpdater()
        self.model: Any = None
        self.manager = modules.eplb_manager.EPLBManager(
            model_config=config,
            get_model=lambda: self.model,
            get_expert_location_updater=lambda: updater,
            get_expert_backup_client=lambda: None,
            get_weight_updater=lambda: SimpleNamespace(update_weights_from_disk=None),
        )
        self.model = engine.Model(self.metadata, rank % ep_size)
        if quantizes:
            self.model.replace_parameters(torch.clone)
        self.runner = engine.ModelRunner(self.manager)
        self.runner.model = self.model
        self.runner.alloc_memory_pool()
        self.runner.post_capture_resize_kv_pool()
        self.taken = 0
        self.request = "first"
        self.step()
        self.guest = self.plugin.guest_of(self.manager)
        self.agent = self.guest.agent
        if self.agent is not None:
            self.link = self.links[0]
            self.register()

    def step(self):
        """Run a forward pass as ModelRunner does; padding tokens are routed to -1."""
        batch = 0 if self.shared_batch else self.rank
        generator = torch.Generator().manual_seed(100 * self.taken + batch)
        self.chosen = torch.rand(TOKENS, engine.EXPERTS, generator=generator).topk(2).indices
        padded = torch.zeros(TOKENS + 4, dtype=torch.int64)
        batch = engine.ForwardBatch(padded, [self.request], TOKENS, self.groups)
        with self.recorder.with_forward_pass(self.taken, batch):
            for layer in engine.MOE_LAYERS:
                slots_of = self.metadata.logical_to_all_physical_map[layer, :, 0]
                slots, filler = slots_of[self.chosen], slots_of[0]
                fill = filler if self.routed_by == "padding too" else -1
                padded = torch.cat([slots, torch.full((4, 2), int(fill))])
                with self.recorder.with_current_layer(layer):
                    if self.routed_by != "kernel":
                        self.recorder.on_select_experts(padded)
                    self.recorder.on_deepep_dispatch_low_latency(self.received(slots))
        rows = self.chosen[:, :1].float()
        for module in self.model.layers:
            assert torch.equal(module.forward_impl(rows, None), 2 * rows)
        dist.barrier(group=self.lockstep)
        self.manager.on_forward_pass_end()
        self.taken += 1

    def received(self, slots):
        """Return the tokens that each slot of this rank got, if each rank sends its own part."""
        here = self.metadata.num_local_physical_experts
        sent = slots[self.rank :: self.size] if self.shared_batch else slots
        counts = torch.bincount(sent.reshape(-1), minlength=here * self.size)
        dist.all_reduce(counts, group=self.lockstep)
        return counts[self.rank * here : (self.rank + 1) * here]

    def map(self):
        return self.metadata.physical_to_logical_map_cpu.numpy().copy()

    def seen(self):
        return {
            "map": self.map(),
            "moe": self.map()[list(engine.MOE_LAYERS)],
            "epoch": self.agent.epoch,
            "placement": self.agent.placement.phy2log,
            "wrong": self.model.wrong_slots(self.metadata.physical_to_logical_map_cpu),
            "trouble": self.agent.trouble,
        }


def place(rank, size, *, chunk):
    """A plan is voted on, committed, and carried out by SGLang's manager."""
    one = Rank(rank, size, chunk=chunk)
    one.steps(4)
    before, new = one.map(), one.target()
    vote = one.order(new)
    one.steps(40)
    said = one.sent(Ack | StagingProgress, is_told)
    return {
        **one.seen(),
        "before": before,
        "target": new.phy2log,
        "vote": vote.yes,
        "acks": [message.epoch for message in said if isinstance(message, Ack)],
        "progress": [
            message.bytes_done for message in said if isinstance(message, StagingProgress)
        ],
    }


def asked(rank, size, *, forgets):
    """A plan whose experts are asked; with `forgets`, a scale stays with its slot."""
    one = Rank(rank, size, canary_step_s=1.0)
    layer = one.model.layers[1]
    one.steps(4)
    new = one.target()
    one.order(new)
    if forgets and rank == 1:
        moved = np.flatnonzero(new.phy2log[1, 4:] != one.agent.placement.phy2log[1, 4:])
        # No checksum has it, and the expert that was here when it was registered had no such scale.
        layer.alpha[moved[0]] = 1.01
    one.steps(40)
    (told,) = one.sent(MovedAnswers, bool)
    return {
        **one.seen(),
        "told": told,
        "slot": 4 + int(layer.alpha.argmax()),
        "target": new.phy2log,
    }


def observe(rank, size):
    """Observe mode: only counts. SGLang runs with `--dp-size 2`, and this is its second group."""
    engine.PARALLEL.dp_size, engine.PARALLEL.dp_rank = 2, 1
    one = Rank(rank, size, mode="observe")
    kv_cache = one.link.expect(KvCache)
    one.steps(5)
    want = torch.bincount(one.chosen.reshape(-1), minlength=engine.EXPERTS).numpy()
    metas, counts = one.reported(5)
    return {
        "steps": metas["step"].tolist(),
        "tokens": set(metas["tokens"].tolist()),
        "kv_cache": kv_cache,
        "sides": one.sides,
        "last": counts[-1],
        "want": want,
        "shape": one.agent.hello().shape,
        "deployment": one.agent.hello().identity.deployment,
        "capabilities": sorted(one.agent.hello().capabilities),
        "dispatch": one.agent.hello().dispatch,
        "slots_stay_filled": one.agent.hello().slots_stay_filled,
    }


def seconds(rank, size, *, a2a):
    """Passes of which one in three is measured; the first one starts the agent."""
    one = Rank(rank, size, mode="observe", seconds_every=3, a2a=a2a)
    spent, told = one.model.spent, []
    for _ in range(7):
        before = np.array(spent.bounds)
        one.step()
        told.append((spent.bounds - before).tolist())
    metas, _ = one.reported(7)
    return {
        "steps": metas["step"].tolist(),
        "seconds": metas["compute_s"].tolist(),
        "told": told,
    }


def own_requests(rank, size, *, skip, a2a, deepep_mode):
    """Passes of the server's warm-up, of a client's request, of a health check and of another."""
    engine.SERVING.skip_server_warmup = skip
    one = Rank(rank, size, mode="observe", a2a=a2a, deepep_mode=deepep_mode)
    for request in ("first", "first", "second", "HEALTH_CHECK_7f", "third"):
        one.request = request
        one.step()
    metas, counts = one.reported(5)
    return {"dummy": metas["dummy"].tolist(), "counted": counts.any(axis=(1, 2)).tolist()}


def own_batches(rank, size):
    """NVFP4 without an all-to-all: each rank routes the batch of its own attention group."""
    one = Rank(rank, size, mode="observe", a2a="none", attention=2, fp4=True)
    one.steps(3)
    metas, counts = one.reported(3)
    want = torch.bincount(one.chosen.reshape(-1), minlength=engine.EXPERTS).numpy()
    return {"tokens": metas["tokens"].tolist(), "last": counts[-1], "want": want}


def shared_batch(rank, size, **parallelism):
    """Both ranks got the same batch: without all-to-all, or as one attention group of DeepEP."""
    one = Rank(rank, size, mode="observe", **parallelism)
    one.steps(5)
    metas, counts = one.reported(5)
    return {
        "tokens": metas["tokens"].tolist(),
        "counts": counts,
        "side": one.sides,
        "want": torch.bincount(one.chosen.reshape(-1), minlength=engine.EXPERTS).numpy(),
        "moe": one.map()[list(engine.MOE_LAYERS)],
    }


def prefills(rank, size):
    """A prefill server without an all-to-all routes the batches of two groups on every rank."""
    engine.DISAGG.disaggregation_mode = "prefill"
    engine.EXEC.graph.cuda_graph_config.prefill.backend = "disabled"
    return shared_batch(rank, size, a2a="none", deepep_mode="normal", attention=2)


def padding(rank, size, *, hip):
    """SGLang gives the rows that pad a batch to expert 0, as on ROCm, and counts them."""
    torch.version.hip = hip
    with structlog.testing.capture_logs() as said:
        one = Rank(rank, size, mode="observe", routed_by="padding too")
        one.steps(3)
    metas, counts = one.reported(3)
    return {
        "tokens": metas["tokens"].tolist(),
        "last": counts[-1],
        "want": torch.bincount(one.chosen.reshape(-1), minlength=engine.EXPERTS).numpy(),
        "said": [line for line in said if line["event"] == "tokens_counted_otherwise"],
    }


def routed_by_kernel(rank, size):
    """The MoE kernel chooses the experts itself, which SGLang's recorder does not see."""
    one = Rank(rank, size, routed_by="kernel")
    one.steps(4)
    vote = one.order(one.target())
    return {
        "vote": vote,
        "trouble": one.agent.trouble,
        "reports": one.sent(LoadReport, bool, 1.0),
    }


def not_recorded(rank, size):
    """A pass of a draft model is recorded; the two passes of the model after it are not."""
    one = Rank(rank, size, mode="observe")
    one.steps(2)
    batch = engine.ForwardBatch(torch.zeros(TOKENS, dtype=torch.int64), ["first"], TOKENS)
    with one.recorder.with_forward_pass(one.taken, batch):
        pass
    one.recorder.stop_record()
    one.steps(2)
    one.recorder.start_record()
    one.steps(1)
    metas, counts = one.reported(3)
    return {
        "steps": metas["step"].tolist(),
        "counted": counts.sum(axis=2).tolist(),
        "trouble": one.agent.trouble,
    }


def own_balancer(rank, size):
    """SGLang's own planner rebalances in observe mode."""
    one = Rank(rank, size, mode="observe", interval=6)
    before = one.map()
    one.steps(10)
    return {**one.seen(), "before": before}


def disabled(rank, size):
    """SGLang switches its rebalancing off between the vote and the step."""
    one = Rank(rank, size)
    one.steps(4)
    new = one.target()
    one.order(new)
    one.manager._rebalance_disabled_reason = "scaling"
    one.steps(30)
    late = one.order(new, "plan-2")
    off = one.seen()
    one.manager._rebalance_disabled_reason = None
    one.order(new, "plan-3")
    one.steps(30)
    return {"off": off, "late": late, "target": new.phy2log, **one.seen()}


def refused(rank, size, *, options):
    """The ranks are grouped in a way that the plugin does not support."""
    with structlog.testing.capture_logs() as said:
        one = Rank(rank, size, group_timeout_s=3.0, **dict(options))
    one.steps(5)
    return {
        "agent": one.agent is not None,
        "said": [line for line in said if line["event"] == "guest_not_started"],
    }


def refused_on_one(rank, size):
    """Rank 1 starts no plugin, and SGLang's watchdog would end the server after five seconds."""
    engine.load(rank)
    engine.DEVICE.watchdog_timeout = 5.0
    with structlog.testing.capture_logs() as said:
        Rank(rank, size, elastic="mooncake" if rank else None)
    return [line["detail"] for line in said if line["event"] == "guest_not_started"]


def starts_with(rank, size, *, text, layers=engine.LAYERS):
    """SGLang starts a model of so many layers from a given text of `--init-expert-location`."""
    engine.LAYERS, engine.MOE_LAYERS = layers, tuple(range(engine.DENSE, layers))
    return Rank(rank, size, init=text).seen()


def refusals(rank, size):
    """Change SGLang in every way that the plugin must refuse; then switch the entry point on."""
    del size
    import os

    modules = engine.load(rank)
    registry = modules.hooks.HookRegistry
    found = {}

    def attempt(name, version=engine.VERSION):
        try:
            SglangPlugin(
                GuestSettings(controllers="x:1", mode=GuestMode.PLACE), version, PortLink
            ).install()
            found[name] = "installed"
        except Unsupported as error:
            found[name] = str(error)
        found[name] += " BUT HOOKED" if registry._hooks else ""

    attempt("version", "9.9.9")
    planner = modules.eplb_algorithms.rebalance_experts
    modules.eplb_algorithms.rebalance_experts = lambda weight: weight
    attempt("signature")
    modules.eplb_algorithms.rebalance_experts = planner
    register()
    found["off"] = str(len(registry._hooks))
    os.environ["EVENKEEL_RANK__CONTROLLERS"] = "127.0.0.1:1"
    register()
    found["on"] = str(len(registry._hooks))
    return found
