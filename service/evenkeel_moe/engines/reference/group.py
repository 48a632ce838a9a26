"""One rank in one group, from joining it to leaving it."""

import socket
import time
from collections.abc import Callable

import torch

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink
from evenkeel_moe.adapters.torch.groups import Communicator, make_communicator
from evenkeel_moe.agent import (
    Agent,
    AgentConfig,
    EpRank,
    Generation,
    Lineage,
    RankLink,
    SwapRecord,
    canary_token,
)
from evenkeel_moe.engines.identity import device_name, gpu_uuid, rank_identity
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.dispatch import make_dispatch
from evenkeel_moe.engines.reference.forward import Forward, StepResult, Witness
from evenkeel_moe.engines.reference.joining import agree_on_placement, join
from evenkeel_moe.engines.reference.lines import LineWriter
from evenkeel_moe.engines.reference.model import expert_forward
from evenkeel_moe.engines.reference.parts import ProcessParts, RankParts
from evenkeel_moe.engines.reference.slots import KvBlocks
from evenkeel_moe.engines.reference.state import (
    SavedPlacement,
    first_placement,
    load_placement,
    save_placement,
)
from evenkeel_moe.errors import PeerViolation
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.wire.link import KvCache

_POLL_EVERY, _RESOLVE_AFTER = 4, 2
"""K and D of the gate: steps between two polls, and from a poll to the use of its result."""
MakeLink = Callable[[RankConfig], RankLink]
"""Makes the agent's link of a rank of a group."""


class Group:
    """A rank's group: its communicators, its map, and the parts that belong to them.

    The constructor is collective over the group.

    Args:
        config: of this rank in this group.
        process: what the process keeps from group to group.
        lines: of this rank of this group.
        make_link: makes the agent's link, instead of gRPC to `config.controllers`.
        first_step: see `joining.join`.
        came_from: the same.
    """

    def __init__(
        self,
        config: RankConfig,
        process: ProcessParts,
        lines: LineWriter,
        make_link: MakeLink | None,
        first_step: int,
        came_from: str = "",
    ) -> None:
        self.config = config
        self._lines = lines
        self._device = process.model.device
        self._connected: list[Communicator] = []
        self._store, self._beginning = join(config, first_step, came_from)
        self.communicator = self._connect("engine")
        placement, self.first_epoch, self.warm = self._agree()
        # An even share; after a resize a replica more in each layer, because the plan that fills
        # the ranks that join comes at once.
        share = -(-config.experts // config.num_ranks) + bool(config.former)
        process.weights.expected = config.layers * share
        if config.former_rank is None:
            process.begin(config, placement)
        self.joined = time.perf_counter()
        """`time.perf_counter` when the ranks had found each other and agreed on a placement."""
        self.parts = RankParts.build(
            config, process, placement, self.first_epoch, self.communicator
        )
        self.router = self.parts.router
        self.witness = Witness(self.parts)
        self._dispatch = make_dispatch(self.parts, self._connect)
        self._forward = Forward(self.parts, self._dispatch)
        self.agent: Agent | None = None
        if config.agent:
            self.agent = self._make_agent(placement, make_link)
            self._tell_facts(self.agent)

    @property
    def generation(self) -> str:
        """The name of the group, new for each."""
        return self._beginning.generation

    @property
    def first_step(self) -> int:
        """The number of its first step."""
        return self._beginning.first_step

    @property
    def placement(self) -> Placement:
        """The map in use."""
        return Placement(self.router.phy2log, self.router.num_ranks, self.config.experts)

    def step(self, step: int, stop: bool) -> StepResult:
        """Run one step; see `Forward.step`."""
        return self._forward.step(step, stop)

    def end_step(self, step: int, epoch: int, result: StepResult) -> None:
        """Record the loads and run the step boundary: all that an engine adds to its step."""
        if self.agent is None:
            return
        self.agent.record(
            step,
            result.counts,
            epoch=epoch,
            tokens=len(result.final),
            phase=Phase.MIXED if self.config.requests_per_s else Phase.PREFILL,
            compute_s=float(result.compute_s.sum()) if self.config.report_seconds else None,
        )
        self.agent.step_boundary(step)

    def any_rank(self, wants: bool) -> bool:
        """Return True if some rank passes True; collective."""
        mine = torch.tensor([int(wants)], device=self.communicator.device)
        return bool(self.communicator.all_gather(mine).any())

    def close(self, *, planned: bool) -> bool:
        """Stop the agent and the dispatch; the communicators end with the process.

        Returns:
            True if nothing of this group uses the slots any more.
        """
        self._dispatch.close()
        return self.agent is None or self.agent.close(planned=planned)

    def lose(self) -> None:
        """End all that other ranks may wait for, after one has died: so they notice it too."""
        self.communicator.abort()
        if self.agent is not None:
            self.agent.abort_polls()
        self.disconnect()

    def disconnect(self) -> None:
        """End the communicators of a group that no rank is in any more."""
        for communicator in self._connected:
            communicator.abort()

    def _agree(self) -> tuple[Placement, int, bool]:
        """Return (placement, epoch, True if it was saved), the same on all ranks; collective."""
        config = self.config
        joins = bool(config.former) and config.former_rank is None
        # A file of a rank that joins is of another process, which had its number before.
        saved = None if joins else load_placement(config.state_file, config.shape)
        placement, epoch, warm = agree_on_placement(
            saved, first_placement(config), self.communicator
        )
        if joins:
            self._save(placement, epoch)
        elif config.former and (saved is None or saved.placement != placement):
            raise PeerViolation(
                f"rank {config.rank} kept its experts, and the group agreed on another placement"
            )
        return placement, epoch, warm

    def _connect(self, name: str, device: torch.device | None = None) -> Communicator:
        """Make a communicator over all ranks; collective, once for each name."""
        config = self.config
        made = make_communicator(
            self._store,
            name,
            config.rank,
            config.num_ranks,
            device=device or self._device,
            timeout_s=config.group_timeout_s,
            interface="lo",
        )
        self._connected.append(made)
        return made

    def _make_agent(self, placement: Placement, make_link: MakeLink | None) -> Agent:
        """Make the agent of this rank; collective over the group."""
        config, lines, came_from = self.config, self._lines, self._beginning.came_from
        link: RankLink | None = None
        if make_link is not None:
            link = make_link(config)
        elif config.controllers:
            link = GrpcRankLink(
                config.controllers,
                seed=config.rank,
                on_change=lambda why: lines.write("link", connected=not why, detail=why),
            )
        former = None if config.former_rank is None else EpRank(config.former_rank)
        return Agent(
            AgentConfig(
                identity=rank_identity(config.deployment, config.rank, self.generation),
                shape=config.shape,
                node=config.node if config.nodes else socket.gethostname(),
                gpu_uuid=gpu_uuid(self._device),
                device_name=device_name(self._device),
                weight_format="fp32",
                dispatch=config.dispatch.model.value,
                lineage=Lineage(Generation(came_from), former) if came_from else None,
                staging_bytes=config.staging_bytes,
                poll_every=_POLL_EVERY,
                resolve_after=_RESOLVE_AFTER,
                gate_timeout_s=config.gate_timeout_s,
            ),
            placement,
            self.router.epoch,
            self.parts.weights,
            self.router,
            connect=self._connect,
            device=self._device,
            link=link,
            on_swap=self._swapped,
            probe=self._answer,
            on_progress=lambda wave, done, total: lines.write(
                "staging",
                plan_id=wave.plan_id,
                wave_index=wave.wave_index,
                bytes_done=done,
                bytes_total=total,
            ),
        )

    def _tell_facts(self, agent: Agent) -> None:
        cost = self.parts.pace.cost(SystemClock().unix())
        if self.config.tell_cost and cost is not None:
            agent.tell(cost)
        kv_cache = self._kv_cache()
        if kv_cache is not None:
            agent.tell(kv_cache)

    def _kv_cache(self) -> KvCache | None:
        """Return the KV cache to tell of: of requests the real one, else that of the config."""
        config, blocks = self.config, KvBlocks(self.parts.weights).free_buffers
        if config.requests_per_s:
            each = config.bytes_per_expert // (config.d_ffn // config.layers)
            return KvCache(each, blocks * config.bytes_per_expert)
        if config.kv_bytes_per_token is None or config.kv_free_bytes is None:
            return None
        return KvCache(config.kv_bytes_per_token, config.kv_free_bytes)

    def _answer(self, layer: int, local_slot: int) -> torch.Tensor:
        """Return what the expert in a slot computes for the canary's token; see `Probe`."""
        token = canary_token(self.config.d_model, torch.float32, self._device)
        # The model computes with integers in -8..8.
        return expert_forward(
            self.parts.weights.tensors(layer, local_slot), (4 * token).round_()[None]
        )

    def _swapped(self, record: SwapRecord, placement: Placement) -> None:
        """Save a placement before the Ack: a restarted group must have what is acknowledged."""
        self._save(placement, record.epoch)
        self._lines.write(
            "swap",
            step=record.step,
            epoch=record.epoch,
            plan_id=record.wave.plan_id,
            wave_index=record.wave.wave_index,
            layers=list(record.layers),
            seconds=round(record.seconds, 6),
            received_bytes=record.received_bytes,
        )

    def _save(self, placement: Placement, epoch: int) -> None:
        save_placement(self.config.state_file, SavedPlacement(placement, epoch, self.generation))
