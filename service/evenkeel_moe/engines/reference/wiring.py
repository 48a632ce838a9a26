"""How an engine takes an agent on board: its slots, its tables, a link, and where commits are saved."""

import socket
from typing import Any

import torch

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink
from evenkeel_moe.adapters.torch.groups import Communicator, make_communicator
from evenkeel_moe.agent import Agent, AgentConfig, RankLink, SwapRecord
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.lines import LineWriter
from evenkeel_moe.engines.reference.slots import PooledWeights, Router
from evenkeel_moe.engines.reference.state import SavedPlacement, save_placement
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import RankIdentity

__all__ = ["make_agent"]


def make_agent(
    config: RankConfig,
    store: Any,
    generation: str,
    placement: Placement,
    epoch: int,
    weights: PooledWeights,
    router: Router,
    lines: LineWriter,
    *,
    device: torch.device,
    link: RankLink | None = None,
) -> Agent:
    """The agent of one rank of the reference engine; collective over the group.

    Args:
        config: this rank.
        store: of this attempt, for communicators beside the engine's own.
        generation: agreed by the group.
        placement: what the group starts on, loaded into `weights`.
        epoch: its number.
        weights: the rank's slots.
        router: the rank's tables.
        lines: where swaps and staging are written down.
        device: where the weights lie.
        link: instead of gRPC to `config.controllers`.
    """

    if link is None and config.controllers:
        link = GrpcRankLink(config.controllers, seed=config.rank)
    return Agent(
        _agent_config(config, generation, device),
        placement,
        epoch,
        weights,
        router,
        connect=lambda name, where: _connect(config, store, name, where),
        device=device,
        link=link,
        on_swap=lambda record, placement: _on_swap(config, generation, lines, record, placement),
        on_progress=lambda wave, done, total: lines.write(
            "staging",
            plan_id=wave.plan_id,
            wave_index=wave.wave_index,
            bytes_done=done,
            bytes_total=total,
        ),
    )


def _agent_config(config: RankConfig, generation: str, device: torch.device) -> AgentConfig:
    identity = RankIdentity(
        DeploymentId(config.deployment),
        EpRank(config.rank),
        Generation(generation),
        int(SystemClock().unix() * 1e9),
    )
    return AgentConfig(
        identity=identity,
        shape=config.shape,
        node=config.node if config.nodes else socket.gethostname(),
        gpu_uuid=str(torch.cuda.get_device_properties(device).uuid)
        if device.type == "cuda"
        else "",
        staging_bytes=config.staging_bytes,
        poll_every=config.poll_every,
        resolve_after=config.poll_latency,
        gate_timeout_s=config.gate_timeout_s,
    )


def _connect(config: RankConfig, store: Any, name: str, device: torch.device) -> Communicator:
    return make_communicator(
        store,
        name,
        config.rank,
        config.num_ranks,
        device=device,
        timeout_s=config.group_timeout_s,
        interface=config.interface,
    )


def _on_swap(
    config: RankConfig, generation: str, lines: LineWriter, record: SwapRecord, placement: Placement
) -> None:
    """Saved first: a restarted group must find what the controller was told."""
    path = config.folder / "state" / f"rank-{config.rank}.npz"
    save_placement(path, SavedPlacement(placement, record.epoch, generation))
    lines.write(
        "swap",
        step=record.step,
        epoch=record.epoch,
        plan_id=record.wave.plan_id,
        wave_index=record.wave.wave_index,
        layers=list(record.layers),
        seconds=round(record.seconds, 6),
        received_bytes=record.received_bytes,
    )
