"""One rank of the reference engine: joins the group, serves steps, and checks itself."""

import dataclasses
import os
import signal
import socket
import time
import traceback
import uuid
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.adapters.grpc.rank_link import GrpcRankLink
from evenkeel_moe.adapters.torch.groups import Communicator, make_communicator
from evenkeel_moe.agent import Agent, AgentConfig, GateFailed, RankLink, SwapRecord
from evenkeel_moe.engines.identity import device_name, gpu_uuid, rank_identity
from evenkeel_moe.engines.reference.checks import break_something, final_check, inspect_rank
from evenkeel_moe.engines.reference.config import ExitCode, RankConfig
from evenkeel_moe.engines.reference.dispatch import make_dispatch
from evenkeel_moe.engines.reference.exchange import EpochMismatch
from evenkeel_moe.engines.reference.forward import Forward, StepResult, Witness
from evenkeel_moe.engines.reference.lines import LineWriter
from evenkeel_moe.engines.reference.parts import RankParts
from evenkeel_moe.engines.reference.state import (
    SavedPlacement,
    agree_on_placement,
    load_placement,
    save_placement,
)
from evenkeel_moe.engines.reference.traffic import read_trace
from evenkeel_moe.errors import InvalidInput, Unavailable
from evenkeel_moe.model.load import Phase
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.wire.link import KvCache

_distributed: Any = torch.distributed
_LOGGED = ("start", "swap", "fault", "problem", "exit")
"""The lines for which an operator searches the log; the others come with every step."""


class StepObserver(Protocol):
    """Sees with which tables and weights each step is computed."""

    def before_step(self, step: int, parts: RankParts) -> None:
        """Look at the parts right before the computation of a step."""
        ...

    def after_step(self, step: int, parts: RankParts) -> None:
        """Look at the parts right after it, before the step boundary."""
        ...


def run_rank(
    config: RankConfig, link: RankLink | None = None, observer: StepObserver | None = None
) -> int:
    """Run one rank to its end; the main function of a rank process.

    SIGTERM stops the whole group after its current step. SIGINT is ignored.

    Args:
        config: of this rank.
        link: the agent's link, instead of gRPC to `config.controllers`.
        observer: called around each step.

    Returns:
        An ExitCode.
    """
    torch.set_num_threads(1)
    path = config.folder / f"rank-{config.rank}.jsonl"
    lines = LineWriter(path, logged=_LOGGED, rank=config.rank)
    code, reason, detail = ExitCode.FINISHED, "finished", ""
    rank, planned = None, False
    try:
        rank = _Rank(with_trace_sizes(config), lines, link, observer)
        if not rank.serve():
            code, reason = ExitCode.CHECK_FAILED, "check_failed"
        planned = True
    except EpochMismatch as error:
        code, reason, detail = ExitCode.EPOCH_MISMATCH, error.reason, str(error)
    except GateFailed as error:
        code, reason, detail = ExitCode.GATE_FAILED, error.reason, str(error)
    except Unavailable as error:
        code, reason, detail = ExitCode.GROUP_LOST, error.reason, str(error)
    except RuntimeError as error:
        # torch raises it when a peer's connection closes or a collective passes its deadline.
        code, reason, detail = ExitCode.GROUP_LOST, "rank_lost", str(error)
        traceback.print_exc()
    finally:
        if rank is not None:
            rank.close(planned=planned)
    lines.write("exit", code=int(code), reason=str(reason), detail=detail[:500])
    lines.close()
    return int(code)


def with_trace_sizes(config: RankConfig) -> RankConfig:
    """Return the configuration with the layers, experts and top_k of its trace, if it has one."""
    if not config.trace:
        return config
    ids, counts, top_k = read_trace(config.trace)
    if ids is not None:
        layers, experts = ids.shape[1], int(ids.max()) + 1
    else:
        assert counts is not None
        layers, experts = counts.shape[1], counts.shape[2]
    # The experts must divide evenly over the ranks. Additional ids are experts without tokens.
    experts = -(-experts // config.num_ranks) * config.num_ranks
    return config.replace(
        layers=layers, experts=experts, top_k=top_k, slots_per_rank=0, pool_slots_per_layer=0
    )


class _Rank:
    """The state of one rank process."""

    def __init__(
        self,
        config: RankConfig,
        lines: LineWriter,
        link: RankLink | None,
        observer: StepObserver | None,
    ) -> None:
        if config.rank < 0 or not config.rendezvous:
            raise InvalidInput("a rank needs its number and a rendezvous")
        self.config = config
        self.lines = lines
        self.observer = observer
        self.device = _device(config)
        self._stop_wanted = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.store, self.generation = _join(config)
        self.communicator = self._connect("engine")
        placement, self.first_epoch, warm = agree_on_placement(
            load_placement(config.state_file, config.shape),
            Placement.initial(config.shape),
            self.communicator,
        )
        self.parts = RankParts.build(
            config, placement, self.first_epoch, self.communicator, self.device
        )
        self.router = self.parts.router
        self.dispatch = make_dispatch(self.parts, self._connect)
        self.forward = Forward(self.parts, self.dispatch)
        self.witness = Witness(self.parts)
        self.mismatches = self.rows_checked = 0
        self.problems: list[str] = []
        self.fault_done = False
        self.agent: Agent | None = None
        if config.agent:
            self.agent = self._make_agent(placement, link)
            cost = self.parts.pace.cost(SystemClock().unix())
            if config.tell_cost and cost is not None:
                self.agent.tell(cost)
            if config.kv_bytes_per_token is not None and config.kv_free_bytes is not None:
                self.agent.tell(KvCache(config.kv_bytes_per_token, config.kv_free_bytes))
        lines.write(
            "start",
            attempt=config.attempt,
            pid=os.getpid(),
            generation=self.generation,
            epoch=self.first_epoch,
            warm=warm,
            step=config.first_step,
            device=str(self.device),
            placement_digest=placement.digest,
        )

    def serve(self) -> bool:
        """Run steps until the end or a stop, then the final check; return True if it passed."""
        step = self.config.first_step
        stop = False
        while not stop and (self.config.steps == 0 or step < self.config.steps):
            began = time.perf_counter()
            epoch = self.router.epoch
            if self.observer is not None:
                self.observer.before_step(step, self.parts)
            result = self.forward.step(step, self._stop_wanted)
            if self.observer is not None:
                self.observer.after_step(step, self.parts)
            if self.agent is not None:
                self._tell_agent(self.agent, step, epoch, result)
            seconds = time.perf_counter() - began
            stop = result.stop
            self._verify(step, result)
            self._write_step(step, epoch, result, seconds)
            self._break(step, result)
            left = self.config.min_step_s - (time.perf_counter() - began)
            if left > 0:
                time.sleep(left)
            step += 1
        return self._check()

    def close(self, *, planned: bool) -> None:
        """Stop the agent and the dispatch; the engine's communicator ends with the process."""
        self.dispatch.close()
        if self.agent is not None:
            self.agent.close(planned=planned)

    def _tell_agent(self, agent: Agent, step: int, epoch: int, result: StepResult) -> None:
        """Record the loads and run the step boundary: all that an engine adds to its step."""
        agent.record(
            step,
            result.counts,
            epoch=epoch,
            tokens=self.config.tokens_per_step,
            phase=Phase.PREFILL,
            compute_s=float(result.compute_s.sum()) if self.config.report_seconds else None,
        )
        agent.step_boundary(step)

    def _verify(self, step: int, result: StepResult) -> None:
        """Compare the outputs with the undistributed model, if it is time to."""
        config = self.config
        if not config.verify_every or step % config.verify_every:
            return
        mismatches = self.witness.mismatches(step, result)
        if mismatches and not self.mismatches:
            # Look for the cause now: a later swap may remove it.
            experts = self.witness.experts
            _, self.problems = inspect_rank(config.rank, self.router, self.parts.weights, experts)
            self.lines.write("problem", step=step, problems=self.problems)
        self.mismatches += mismatches
        self.rows_checked += config.tokens_per_step

    def _write_step(self, step: int, epoch: int, result: StepResult, seconds: float) -> None:
        self.lines.write(
            "step",
            step=step,
            seconds=round(seconds, 6),
            tokens=self.config.tokens_per_step,
            epoch=epoch,
            domain=self.parts.traffic.domain(step),
            rank_load=result.counts.sum(axis=1).tolist(),
            served=result.served.tolist(),
            compute_s=result.compute_s.round(6).tolist(),
            paced_s=[round(seconds, 6) for seconds in self.parts.pace.paced_s],
            mismatches=self.mismatches,
        )

    def _break(self, step: int, result: StepResult) -> None:
        """Damage this rank, if the configuration has a fault for it and it is time."""
        config = self.config
        if config.fault is None or self.fault_done or config.attempt:
            return
        swapped = self.router.epoch > self.first_epoch
        due = step >= config.fault_at if config.fault_at else swapped
        if due and config.rank == config.fault_rank:
            self.fault_done = True
            detail = break_something(
                config.fault, config.rank, self.router, self.parts.weights, result.counts
            )
            self.lines.write("fault", fault=config.fault.value, step=step, detail=detail)

    def _check(self) -> bool:
        check = final_check(
            self.config.rank,
            self.router,
            self.parts.weights,
            self.witness.experts,
            self.mismatches,
            self.communicator,
        )
        check.problems = list(dict.fromkeys([*self.problems, *check.problems]))
        self.lines.write(
            "check",
            ok=check.ok,
            **dataclasses.asdict(check),
            rows_checked=self.rows_checked,
            mismatches=self.mismatches,
            swaps=self.router.epoch - self.first_epoch,
            dropped_records=0 if self.agent is None else self.agent.dropped_steps,
        )
        return check.ok

    def _connect(self, name: str, device: torch.device | None = None) -> Communicator:
        """Make a communicator over all ranks; collective, once for each name."""
        config = self.config
        return make_communicator(
            self.store,
            name,
            config.rank,
            config.num_ranks,
            device=device or self.device,
            timeout_s=config.group_timeout_s,
            interface=config.interface,
        )

    def _make_agent(self, placement: Placement, link: RankLink | None) -> Agent:
        """Make the agent of this rank; collective over the group."""
        config, lines = self.config, self.lines
        if link is None and config.controllers:
            link = GrpcRankLink(
                config.controllers,
                seed=config.rank,
                on_change=lambda why: lines.write("link", connected=not why, detail=why),
            )
        return Agent(
            AgentConfig(
                identity=rank_identity(config.deployment, config.rank, self.generation),
                shape=config.shape,
                node=config.node if config.nodes else socket.gethostname(),
                gpu_uuid=gpu_uuid(self.device),
                device_name=device_name(self.device),
                weight_format="fp32",
                dispatch=config.dispatch.told,
                staging_bytes=config.staging_bytes,
                poll_every=config.poll_every,
                resolve_after=config.poll_latency,
                gate_timeout_s=config.gate_timeout_s,
            ),
            placement,
            self.router.epoch,
            self.parts.weights,
            self.router,
            connect=self._connect,
            device=self.device,
            link=link,
            on_swap=self._save,
            on_progress=lambda wave, done, total: lines.write(
                "staging",
                plan_id=wave.plan_id,
                wave_index=wave.wave_index,
                bytes_done=done,
                bytes_total=total,
            ),
        )

    def _save(self, record: SwapRecord, placement: Placement) -> None:
        """Save a placement before the Ack: a restarted group must have what is acknowledged."""
        saved = SavedPlacement(placement, record.epoch, self.generation)
        save_placement(self.config.state_file, saved)
        self.lines.write(
            "swap",
            step=record.step,
            epoch=record.epoch,
            plan_id=record.wave.plan_id,
            wave_index=record.wave.wave_index,
            layers=list(record.layers),
            seconds=round(record.seconds, 6),
            received_bytes=record.received_bytes,
        )

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop_wanted = True


def _device(config: RankConfig) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" or (config.device == "auto" and gpus >= config.num_ranks):
        device = torch.device("cuda", config.rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _join(config: RankConfig) -> tuple[Any, str]:
    """Return the store of this attempt, and the generation that the group agreed on through it."""
    iterator = _distributed.rendezvous(
        config.rendezvous, rank=config.rank, world_size=config.num_ranks
    )
    store, _, _ = next(iterator)
    if config.rank == 0:
        store.set("evenkeel/generation", str(uuid.uuid4()))
    return store, store.get("evenkeel/generation").decode()
