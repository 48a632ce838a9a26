"""Makes the agent of an engine's rank, with its own store, generation, identity and link."""

import json
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink, LinkTls
from evenkeel_moe.adapters.torch.groups import make_communicator
from evenkeel_moe.adapters.torch.nvml_clock import NvmlClock
from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.canary_runs import Probe
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.engine_moves import EngineMoves
from evenkeel_moe.agent.ports import RankLink
from evenkeel_moe.agent.profile.files import SavedProfile, load_profile
from evenkeel_moe.agent.profile.replica_cost import remeasure
from evenkeel_moe.engines.guest.model_facts import weight_format
from evenkeel_moe.engines.guest.plan_agreement import Gather
from evenkeel_moe.engines.guest.record_link import RecordLink
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.engines.guest.slot_weights import SlotWeights
from evenkeel_moe.engines.identity import device_name, gpu_uuid, rank_identity
from evenkeel_moe.errors import InvalidInput, PeerViolation, Unavailable
from evenkeel_moe.model.ids import EpRank, Generation
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.messages import Lineage

_log = structlog.get_logger(__name__)
_distributed: Any = torch.distributed

_MESSAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Former:
    """The group of another size that a group comes from, as its ranks have left it."""

    generation: str
    epoch: int
    step: int
    """The number of the first step that it did not run."""
    weights_version: int
    checksums: str
    """Digest over the checksums of its experts."""

    @classmethod
    def of(cls, agent: Agent, step: int) -> "Former":
        """Return the group that an agent leaves before a step."""
        hello = agent.hello()
        return cls(
            str(hello.identity.generation),
            int(agent.epoch),
            step,
            hello.weights_version,
            hello.checksums_digest,
        )


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts of an engine that the agent of its rank needs, once the model is loaded."""

    placement: Placement
    """The placement the engine starts with."""
    weights: SlotWeights
    """The engine's slots, read only."""
    device: torch.device
    """The device that holds the weights."""
    dispatch: str
    """As in `AgentConfig`."""
    side: CountingSide = CountingSide.SOURCE
    """The shape of the counts that will be recorded."""
    probe: Probe | None = None
    """Asks the expert in a slot; None without a canary."""
    slots_stay_filled: bool = False
    """True if the engine cannot leave a slot empty."""
    former: Former | None = None
    """The group that this one comes from; None for a new one."""
    former_rank: int | None = None
    """This rank's number there; None if it joins."""


def make_guest(
    settings: GuestSettings,
    rank: int,
    shape: ModelShape,
    facts: EngineFacts,
    moves: EngineMoves,
    *,
    gather: Gather,
    link: RankLink | None = None,
) -> Agent:
    """Make the agent of one rank; collective over the EP group.

    Args:
        settings: the plugin's settings.
        rank: in the EP group.
        shape: of the deployment.
        facts: of the engine.
        moves: the moves of the engine's balancer.
        gather: over the ranks; tells them the address of the store.
        link: used instead of gRPC to the controllers.

    Raises:
        InvalidInput: a recording is asked for, and the engine counts by slot.
        Unavailable: some ranks cannot reach the store of rank 0, or did not come.
        PeerViolation: the ranks start with different values.
    """
    store, generation = _open_store(settings, rank, shape.num_ranks, gather)
    config = _agent_config(settings, rank, shape, generation, facts)
    saved = _load_profile(settings, config.gpu_uuid)
    agent = Agent(
        config,
        facts.placement,
        0 if facts.former is None else facts.former.epoch + 1,
        facts.weights,
        moves,
        connect=lambda name, where: make_communicator(
            store,
            name,
            rank,
            shape.num_ranks,
            device=where,
            timeout_s=settings.group_timeout_s,
            interface=settings.interface,
        ),
        device=facts.device,
        link=link or _make_link(settings, rank, facts.side),
        # It counts where ranks report no seconds.
        clock=NvmlClock(config.gpu_uuid) if config.gpu_uuid else None,
        # In observe mode the plugin does not see that weights are replaced.
        probe=facts.probe if settings.places else None,
    )
    if saved is not None:
        tell_profile(agent, saved, facts.device, settings.profile_s)
    return agent


def _make_link(settings: GuestSettings, rank: int, side: CountingSide) -> RankLink:
    """Return the link to the controllers, or to the folder of a recording.

    Raises:
        InvalidInput: a recording needs counts by expert, and the engine counts by slot.
    """
    if not settings.record:
        return GrpcRankLink(settings.addresses, seed=rank, tls=_tls(settings))
    if side is not CountingSide.SOURCE:
        raise InvalidInput(
            "this engine counts the tokens that slots receive, which a recording cannot hold:"
            " record with SGLang's own recorder, `evenkeel record sglang`"
        )
    return RecordLink(Path(settings.record), settings.record_steps)


def _agent_config(
    settings: GuestSettings,
    rank: int,
    shape: ModelShape,
    generation: str,
    facts: EngineFacts,
) -> AgentConfig:
    former, lineage = facts.former, None
    if former is not None:
        before = None if facts.former_rank is None else EpRank(facts.former_rank)
        lineage = Lineage(Generation(former.generation), before)
    return AgentConfig(
        identity=rank_identity(settings.deployment, rank, generation),
        shape=shape,
        node=settings.node,
        gpu_uuid=gpu_uuid(facts.device),
        device_name=device_name(facts.device),
        weight_format=weight_format(facts.weights.rows(0, 0)),
        dispatch=facts.dispatch,
        slots_stay_filled=facts.slots_stay_filled,
        observe_only=not settings.places,
        lineage=lineage,
        weights_version=settings.weights_version if former is None else former.weights_version,
        side=facts.side,
        # The engine stages one layer at a time in its own memory, so one wave can hold a whole
        # plan.
        staging_bytes=shape.num_layers * shape.slots_per_rank * shape.bytes_per_expert,
        poll_every=settings.poll_every,
        resolve_after=settings.resolve_after,
        gate_timeout_s=settings.gate_timeout_s,
        canary_step_s=settings.canary_step_s,
    )


def agree_on_former(mine: Former | None, gather: Gather) -> Former:
    """Return the group that the ranks come from, as rank 0 tells it; collective.

    Args:
        mine: the group that this rank was in; None if it joins.
        gather: over the ranks.

    Raises:
        PeerViolation: rank 0 was in none, or this rank in another one.
    """
    told = _from_rank_0({} if mine is None else asdict(mine), gather)
    former = Former(**told) if told else None
    if former is None or mine not in (None, former):
        raise PeerViolation(f"this rank comes from {mine}, rank 0 from {former}")
    return former


def _tls(settings: GuestSettings) -> LinkTls | None:
    """Return the TLS files of the link; None without TLS."""
    if settings.tls_ca_file is None:
        return None
    return LinkTls(settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file)


def _load_profile(settings: GuestSettings, gpu: str) -> SavedProfile | None:
    """Return the profile of the device; None if it is missing or damaged."""
    if not settings.curves:
        return None
    try:
        saved = load_profile(Path(settings.curves), gpu)
    except InvalidInput as error:
        _log.error("curve_unusable", detail=str(error))
        return None
    if saved is None:
        _log.warning("curve_missing", folder=settings.curves, gpu_uuid=gpu)
    return saved


def tell_profile(agent: Agent, saved: SavedProfile, device: torch.device, budget_s: float) -> None:
    """Tell the controller the saved profile, measured again if that is possible now."""
    agent.tell(saved.curve)
    cost = saved.replica_cost
    if saved.shape is not None and budget_s > 0:
        try:
            cost = remeasure(
                saved.shape,
                device,
                budget_s=budget_s,
                max_tokens=saved.max_tokens,
                now_unix_s=SystemClock().unix(),
            )
        except Exception as error:  # It costs the newer figures; the rank goes on.
            _log.warning("profile_not_measured_again", detail=str(error)[:300])
    if cost is not None:
        agent.tell(cost)


def _open_store(settings: GuestSettings, rank: int, size: int, gather: Gather) -> tuple[Any, str]:
    """Return (store, generation): rank 0 opens a small store on a free port, the others connect."""
    timeout = timedelta(seconds=settings.group_timeout_s)

    def open_at(host: str, port: int) -> Any:
        return _distributed.TCPStore(host, port, size, rank == 0, timeout, wait_for_workers=False)

    store, place = None, {}
    if rank == 0:
        host = settings.host or socket.gethostname()
        try:
            store = open_at(host, 0)
            place = {"host": host, "port": store.port, "generation": str(uuid.uuid4())}
        except RuntimeError as error:
            # The others wait for this message. Without it they would take the engine's next one.
            place = {"error": f"rank 0 cannot open its store at {host}: {error}"[:500]}
    place = _from_rank_0(place, gather)
    if "error" in place:
        raise Unavailable(place["error"])
    if store is None:
        try:
            store = open_at(place["host"], place["port"])
        except RuntimeError as error:
            address = f"{place['host']}:{place['port']}"
            raise Unavailable(f"rank {rank} cannot reach rank 0 at {address}: {error}") from error
    return store, str(place["generation"])


def _from_rank_0(message: Mapping[str, Any], gather: Gather) -> dict[str, Any]:
    """Return the message of rank 0, at most 4,096 bytes of JSON; collective."""
    row = np.frombuffer(json.dumps(message).encode().ljust(_MESSAGE_BYTES), np.int64)
    found: dict[str, Any] = json.loads(gather(row.copy())[0].tobytes())
    return found
