"""Puts a guest agent beside an engine's rank: a store of its own, a generation, an identity, a link."""

import json
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTls
from evenkeel_moe.adapters.torch.groups import Communicator, make_communicator
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.guest import GuestAgent, HostEngine
from evenkeel_moe.agent.ports import ExpertWeights, RankLink
from evenkeel_moe.agent.profiler import load_curve
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.errors import InvalidInput, Unavailable
from evenkeel_moe.model.ids import DeploymentId, EpRank, Generation
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import RankIdentity
from evenkeel_moe.wire.link import CostCurve

__all__ = ["Broadcast", "make_guest"]

_log = structlog.get_logger(__name__)
_distributed: Any = torch.distributed

Broadcast = Callable[[bytes | None], bytes]
"""Rank 0's bytes on every rank; collective over a CPU group of the engine's, called once."""


def make_guest(
    settings: GuestSettings,
    rank: int,
    shape: ModelShape,
    placement: Placement,
    weights: ExpertWeights,
    engine: HostEngine,
    *,
    broadcast: Broadcast,
    device: torch.device,
    side: CountingSide = CountingSide.SOURCE,
    link: RankLink | None = None,
) -> GuestAgent:
    """The agent of one rank; collective over the EP group.

    Args:
        settings: the plugin's.
        rank: in the EP group.
        shape: of the deployment.
        placement: what the engine starts on.
        weights: the engine's slots, read only.
        engine: the engine's balancer.
        broadcast: the engine's, to tell the ranks of our store.
        device: where the weights lie.
        side: what will be recorded.
        link: instead of gRPC to the controllers.

    Raises:
        Unavailable: the ranks do not reach rank 0's store, or not all came.
        PeerViolation: the ranks start on different things.
    """
    store, generation = _meet(settings, rank, shape.num_ranks, broadcast)

    def connect(name: str, where: torch.device) -> Communicator:
        return make_communicator(
            store,
            name,
            rank,
            shape.num_ranks,
            device=where,
            timeout_s=settings.group_timeout_s,
            interface=settings.interface,
        )

    identity = RankIdentity(
        DeploymentId(settings.deployment),
        EpRank(rank),
        Generation(generation),
        int(SystemClock().unix() * 1e9),
    )
    config = AgentConfig(
        identity=identity,
        shape=shape,
        node=settings.node,
        gpu_uuid=str(torch.cuda.get_device_properties(device).uuid)
        if device.type == "cuda"
        else "",
        weights_version=settings.weights_version,
        side=side,
        # The engine brings its own room, a layer at a time: a plan is one wave, whatever it moves.
        staging_bytes=shape.num_layers * shape.slots_per_rank * shape.bytes_per_expert,
        poll_every=settings.poll_every,
        resolve_after=settings.resolve_after,
        gate_timeout_s=settings.gate_timeout_s,
    )
    curve = _curve(settings, config.gpu_uuid)
    agent = GuestAgent(
        config,
        placement,
        0,
        weights,
        engine,
        connect=connect,
        device=device,
        link=link
        if link is not None
        else GrpcRankLink(settings.addresses, seed=rank, tls=_tls(settings)),
        stall_after_s=settings.stall_after_s,
    )
    if curve is not None:
        agent.tell_curve(curve)
    return agent


def _tls(settings: GuestSettings) -> LinkTls | None:
    """How the link speaks TLS; None: it does not."""
    if settings.tls_ca_file is None:
        return None
    return LinkTls(settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file)


def _curve(settings: GuestSettings, gpu_uuid: str) -> CostCurve | None:
    """The device's measured curve; a folder without one, or with a damaged one, costs the curve alone."""
    if not settings.curves:
        return None
    try:
        curve = load_curve(Path(settings.curves), gpu_uuid)
    except InvalidInput as error:
        _log.error("curve_unusable", detail=str(error))
        return None
    if curve is None:
        _log.warning("curve_missing", folder=settings.curves, gpu_uuid=gpu_uuid)
    return curve


def _meet(settings: GuestSettings, rank: int, size: int, broadcast: Broadcast) -> tuple[Any, str]:
    """(store, generation): rank 0 opens a small store on a free port and tells the others where."""
    timeout = timedelta(seconds=settings.group_timeout_s)
    store = None
    told: bytes | None = None
    if rank == 0:
        host = settings.host or socket.gethostname()
        try:
            store = _distributed.TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
            place = {"host": host, "port": store.port, "generation": str(uuid.uuid4())}
        except (
            RuntimeError
        ) as error:  # the others wait for a word, and would take the engine's next for it
            place = {"error": f"rank 0 cannot open its store at {host}: {str(error)[:300]}"}
        told = json.dumps(place).encode()
    place = json.loads(broadcast(told))
    if "error" in place:
        raise Unavailable(place["error"])
    if store is None:
        try:
            store = _distributed.TCPStore(
                place["host"], place["port"], size, False, timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            raise Unavailable(
                f"rank {rank} does not reach rank 0 at {place['host']}:{place['port']}: {error}"
            ) from error
    return store, str(place["generation"])
