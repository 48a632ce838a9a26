"""One rank process of the reference engine: serves steps in one group after another."""

import dataclasses
import os
import signal
import time
import traceback
from types import FrameType
from typing import Protocol

import torch

from evenkeel_moe.agent import GateFailed
from evenkeel_moe.engines.reference.checks import (
    FinalCheck,
    break_something,
    compare_maps,
    inspect_rank,
)
from evenkeel_moe.engines.reference.config import ExitCode, RankConfig
from evenkeel_moe.engines.reference.exchange import EpochMismatch
from evenkeel_moe.engines.reference.forward import StepResult
from evenkeel_moe.engines.reference.group import Group, MakeLink
from evenkeel_moe.engines.reference.joining import Upcoming
from evenkeel_moe.engines.reference.lines import LineWriter
from evenkeel_moe.engines.reference.parts import ProcessParts, RankParts
from evenkeel_moe.engines.reference.resize import resized_placement
from evenkeel_moe.engines.reference.state import SavedPlacement, save_placement
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Unavailable
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.schedule.survivors import surviving_placement

_LOOK_S = 0.005
"""Time between two looks for the group that follows a death."""
_LOGGED = ("start", "lost", "resized", "swap", "fault", "problem", "exit")
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
    config: RankConfig, make_link: MakeLink | None = None, observer: StepObserver | None = None
) -> int:
    """Run one rank to its end; the main function of a rank process.

    SIGTERM stops the whole group after its current step. SIGINT is ignored.

    Args:
        config: of this rank.
        make_link: makes the agent's link, instead of gRPC to `config.controllers`.
        observer: called around each step.

    Returns:
        An ExitCode.
    """
    torch.set_num_threads(1)
    lines = _lines_of(config)
    code, reason, detail = ExitCode.FINISHED, "finished", ""
    rank, planned = None, False
    try:
        rank = _Rank(config, lines, make_link, observer)
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
            rank.group.close(planned=planned)
            lines = rank.lines
    lines.write("exit", code=int(code), reason=str(reason), detail=detail[:500])
    lines.close()
    return int(code)


class _Rank:
    """The state of one rank process. `config`, `lines` and `group` change with each group."""

    def __init__(
        self,
        config: RankConfig,
        lines: LineWriter,
        make_link: MakeLink | None,
        observer: StepObserver | None,
    ) -> None:
        if config.rank < 0 or not config.rendezvous:
            raise InvalidInput("a rank needs its number and a rendezvous")
        self.lines = lines
        self._make_link = make_link
        self._observer = observer
        self._stop_wanted = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._process = ProcessParts.build(config, _device(config))
        self._mismatches = self._rows_checked = 0
        self._problems: list[str] = []
        self._fault_done = False
        self._step = config.first_step
        """The newest step that has begun."""
        if config.former:
            self._process.read_ahead(config)
            lines.write("ready", pid=os.getpid())
        self.group = Group(config, self._process, lines, make_link, config.first_step)
        self._begin_group()

    @property
    def config(self) -> RankConfig:
        """The configuration of this rank in its present group."""
        return self.group.config

    def _begin_group(self) -> None:
        group, config = self.group, self.config
        self._retiring = False
        self._drained_for = config.group  # the next group that was told
        self._upcoming = Upcoming(config)
        self.lines.write(
            "start",
            attempt=config.attempt,
            pid=os.getpid(),
            generation=group.generation,
            epoch=group.first_epoch,
            warm=group.warm,
            step=group.first_step,
            device=str(self._process.model.device),
            placement_digest=group.placement.digest,
            ranks=config.num_ranks,
            former_rank=config.former_rank,
            loaded_bytes=self._process.weights.loaded_bytes,
        )

    def serve(self) -> bool:
        """Serve until the end, a stop or retirement, then check; return True if it passed."""
        step = self.group.first_step
        while True:
            try:
                step = self._serve_steps(step)
            except RuntimeError as error:  # of torch: another rank is gone
                if not self.config.shrinks:
                    raise
                self._outlive(error)
                step = self.group.first_step
                continue
            ended = time.perf_counter()
            group = self.group
            compared = compare_maps(group.router, group.communicator)
            following = self._next_group(step)
            if following is None:
                return self._check(compared)
            try:
                placement = resized_placement(group.placement, following.former)
            except InfeasiblePlan as error:  # the same on all ranks, who have the same map
                self._upcoming.refuse()
                group_number, why = following.group, str(error)
                self.lines.write("refused", next_group=group_number, detail=why)
                continue
            if self.config.rank not in following.former:
                for left in group.parts.traffic.give_up():
                    self.lines.write("gave_up", **left)
                return self._check(compared)
            self._problems += compared.problems
            self._follow(following, placement, step, ended)

    def _serve_steps(self, step: int) -> int:
        """Run steps until one after which the whole group stops; return the number of the next."""
        stop = False
        while not stop and (self.config.steps == 0 or step < self.config.steps):
            self._step, began = step, time.perf_counter()
            group, parts = self.group, self.group.parts
            epoch = group.router.epoch
            wants_stop = self._group_ends() or self._stop_wanted
            if self._observer is not None:
                self._observer.before_step(step, parts)
            result = group.step(step, wants_stop)
            if self._observer is not None:
                self._observer.after_step(step, parts)
            group.end_step(step, epoch, result)
            seconds = time.perf_counter() - began
            stop = result.stop
            self._verify(step, result)
            self._write_step(step, epoch, result, seconds)
            for ended in parts.traffic.end_step(result.final):
                self.lines.write("request", **ended)
            self._break(step, result)
            left = self.config.min_step_s - (time.perf_counter() - began)
            if left > 0:
                time.sleep(left)
            step += 1
        return step

    def _group_ends(self) -> bool:
        """Return True if another group is to follow now; a rank that will retire drains before."""
        following, traffic = self._upcoming.look(), self.group.parts.traffic
        retires = following is not None and self.config.rank not in following.former
        if retires and not self._retiring:
            traffic.stop_arrivals()
        elif self._retiring and not retires:
            traffic.resume_arrivals()
        self._retiring = retires
        if following is None:
            return False
        if retires and self._drained_for != following.group and traffic.drained():
            self._drained_for = following.group
            self.lines.write("drained", next_group=following.group)
        return following.forming

    def _next_group(self, step: int) -> RankConfig | None:
        """Return the group that follows, or None at the end of the run; the same on all ranks."""
        if self.config.steps and step >= self.config.steps:
            return None
        if self.group.any_rank(self._stop_wanted):
            return None
        following = self._upcoming.look()
        if following is None or not following.forming:
            raise Unavailable(
                f"another rank left group {self.config.group} for one that {self.config.file} does"
                " not describe"
            )
        return following

    def _outlive(self, error: RuntimeError) -> None:
        """Go on in a group without the ranks that died, once the supervisor says which.

        Raises:
            Unavailable: it does not in time, or the run is stopping.
        """
        noticed, group, config = time.perf_counter(), self.group, self.config
        group.lose()
        self.lines.write(
            "lost", next_step=self._step + 1, epoch=group.router.epoch, detail=str(error)[:500]
        )
        while True:
            following = self._upcoming.look()
            if following is not None and following.dead and following.forming:
                break
            if self._stop_wanted or time.perf_counter() > noticed + config.group_timeout_s:
                raise Unavailable(f"a rank is gone, and no group follows: {error}")
            time.sleep(_LOOK_S)
        if self._retiring:  # The resize that it drained for was given up.
            group.parts.traffic.resume_arrivals()
        placement = surviving_placement(group.placement, following.former, following.shape)
        self._follow(following, placement, following.first_step, noticed)

    def _follow(self, following: RankConfig, placement: Placement, step: int, ended: float) -> None:
        """Leave the group for the next one, with the experts and requests of this process.

        Args:
            following: configuration of the next group.
            placement: with which it begins.
            step: its first.
            ended: `time.perf_counter` at the end of the step before.
        """
        agreed, old = time.perf_counter(), self.group
        former_rank = old.config.rank
        config = following.replace(rank=following.former.index(former_rank))
        if not old.close(planned=True):
            raise Unavailable(f"a copy of group {old.config.group} still uses slots")
        closed = time.perf_counter()
        held = old.placement.phy2log.reshape(config.layers, old.config.num_ranks, -1)
        recovered = self._process.recover(config, placement, held[:, former_rank])
        # Also for a restart, should a process end before the next group has formed.
        epoch = old.router.epoch + 1
        save_placement(config.state_file, SavedPlacement(placement, epoch, old.generation))
        self.lines.close()
        self.lines = _lines_of(config)
        self.group = Group(config, self._process, self.lines, self._make_link, step, old.generation)
        old.disconnect()
        self._begin_group()
        now = time.perf_counter()
        self.lines.write(
            "resized",
            pause_s=round(now - ended, 6),
            agreed_s=round(agreed - ended, 6),
            closed_s=round(closed - agreed, 6),
            joined_s=round(self.group.joined - closed, 6),
            started_s=round(now - self.group.joined, 6),
            recovered=recovered,
        )

    def _verify(self, step: int, result: StepResult) -> None:
        """Compare the outputs with the undistributed model, if it is time to."""
        config = self.config
        if not config.verify_every or step % config.verify_every:
            return
        group = self.group
        mismatches = group.witness.mismatches(step, result)
        if mismatches and not self._mismatches:
            # Look for the cause now: a later swap may remove it.
            experts, weights = self._process.model.experts, self._process.weights
            _, _, found = inspect_rank(config.rank, group.router, weights, experts)
            self.lines.write("problem", step=step, problems=found)
            self._problems += found
        self._mismatches += mismatches
        self._rows_checked += len(result.final)

    def _write_step(self, step: int, epoch: int, result: StepResult, seconds: float) -> None:
        parts = self.group.parts
        self.lines.write(
            "step",
            step=step,
            seconds=round(seconds, 6),
            tokens=len(result.final),
            epoch=epoch,
            domain=parts.traffic.domain(step),
            rank_load=result.counts.sum(axis=1).tolist(),
            served=result.served.tolist(),
            **({"spans": result.spans} if result.spans else {}),
            compute_s=result.compute_s.round(6).tolist(),
            paced_s=[round(seconds, 6) for seconds in parts.pace.paced_s],
            mismatches=self._mismatches,
            **parts.traffic.state(),
        )

    def _break(self, step: int, result: StepResult) -> None:
        """Damage this rank after its first swap, if the configuration has a fault for it."""
        config, router = self.config, self.group.router
        if config.fault is None or self._fault_done or config.attempt:
            return
        if router.epoch > self.group.first_epoch and config.rank == config.fault_rank:
            self._fault_done = True
            weights = self._process.weights
            detail = break_something(config.fault, config.rank, router, weights, result.counts)
            self.lines.write("fault", fault=config.fault.value, step=step, detail=detail)

    def _check(self, check: FinalCheck) -> bool:
        """Complete the comparison of the maps with a check of this rank; write what was found."""
        group, rank = self.group, self.config.rank
        experts, weights = self._process.model.experts, self._process.weights
        checked, wrong, found = inspect_rank(rank, group.router, weights, experts)
        check.slots_checked, check.wrong_slots = checked, wrong
        if self._mismatches:
            found.append(
                f"rank {rank}: {self._mismatches} rows differ from the undistributed model"
            )
        check.problems = list(dict.fromkeys([*self._problems, *check.problems, *found]))
        self.lines.write(
            "check",
            ok=check.ok,
            **dataclasses.asdict(check),
            rows_checked=self._rows_checked,
            mismatches=self._mismatches,
            swaps=group.router.epoch - group.first_epoch,
            dropped_records=0 if group.agent is None else group.agent.dropped_steps,
        )
        return check.ok

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop_wanted = True


def _lines_of(config: RankConfig) -> LineWriter:
    path = config.folder / f"rank-{config.rank}.jsonl"
    return LineWriter(path, logged=_LOGGED, rank=config.rank, group=config.group)


def _device(config: RankConfig) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" or (config.device == "auto" and gpus >= config.num_ranks):
        device = torch.device("cuda", config.rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
