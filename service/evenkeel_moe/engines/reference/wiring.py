"""Connects an agent to the engine's slots, tables and lines, and to a link."""

import socket
from typing import Any

import torch

from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink
from evenkeel_moe.adapters.torch.groups import Communicator, make_communicator
from evenkeel_moe.agent import Agent, AgentConfig, RankLink, SwapRecord
from evenkeel_moe.engines.identity import device_name, gpu_uuid, rank_identity
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.lines import LineWriter
from evenkeel_moe.engines.reference.parts import RankParts
from evenkeel_moe.engines.reference.state import SavedPlacement, save_placement
from evenkeel_moe.model.placement import Placement


def make_agent(
    parts: RankParts,
    store: Any,
    generation: str,
    placement: Placement,
    lines: LineWriter,
    *,
    link: RankLink | None = None,
) -> Agent:
    """Make the agent of one rank; collective over the group.

    Args:
        parts: of this rank.
        store: of this attempt, for the agent's own communicators.
        generation: agreed by the group.
        placement: the placement the group starts with.
        lines: receives the lines on swaps, staging and the controller.
        link: used instead of gRPC to `config.controllers`.
    """
    config, device = parts.config, parts.model.device

    def on_swap(record: SwapRecord, placement: Placement) -> None:
        # Saved before the Ack, because a restarted group must have what the controller knows.
        save_placement(config.state_file, SavedPlacement(placement, record.epoch, generation))
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

    if link is None and config.controllers:
        link = GrpcRankLink(
            config.controllers,
            seed=config.rank,
            on_change=lambda why: lines.write("link", connected=not why, detail=why),
        )
    return Agent(
        _agent_config(config, generation, device),
        placement,
        parts.router.epoch,
        parts.weights,
        parts.router,
        connect=lambda name, where: connect_group(config, store, name, where),
        device=device,
        link=link,
        on_swap=on_swap,
        on_progress=lambda wave, done, total: lines.write(
            "staging",
            plan_id=wave.plan_id,
            wave_index=wave.wave_index,
            bytes_done=done,
            bytes_total=total,
        ),
    )


def _agent_config(config: RankConfig, generation: str, device: torch.device) -> AgentConfig:
    return AgentConfig(
        identity=rank_identity(config.deployment, config.rank, generation),
        shape=config.shape,
        node=config.node if config.nodes else socket.gethostname(),
        gpu_uuid=gpu_uuid(device),
        device_name=device_name(device),
        weight_format="fp32",
        dispatch=config.dispatch.told,
        staging_bytes=config.staging_bytes,
        poll_every=config.poll_every,
        resolve_after=config.poll_latency,
        gate_timeout_s=config.gate_timeout_s,
    )


def connect_group(config: RankConfig, store: Any, name: str, device: torch.device) -> Communicator:
    """Make a communicator over all ranks; collective, once for each name."""
    return make_communicator(
        store,
        name,
        config.rank,
        config.num_ranks,
        device=device,
        timeout_s=config.group_timeout_s,
        interface=config.interface,
    )
