"""The parts of a rank's guest that do not depend on the engine.

A guest counts the tokens of each step, and gives the engine's own balancer the controller's plans.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.device_recorder import StepCounts
from evenkeel_moe.agent.engine_moves import EngineMoves, HostEngine, Move
from evenkeel_moe.agent.ports import GateFailed, RankLink
from evenkeel_moe.agent.together import together
from evenkeel_moe.engines.guest.bootstrap import EngineFacts, make_guest
from evenkeel_moe.engines.guest.counts import StepNote, count_once, record_step
from evenkeel_moe.engines.guest.expert_times import (
    ExpertCall,
    ExpertTimes,
    Seconds,
    make_clock,
    unknown,
)
from evenkeel_moe.engines.guest.guards import Unsupported
from evenkeel_moe.engines.guest.plan_agreement import PlanAgreement, gather_rows
from evenkeel_moe.engines.guest.settings import GuestSettings
from evenkeel_moe.model.load import CountingSide
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.wire.link import KvCache

_log = structlog.get_logger(__name__)


def _say_that_it_stops(agent: Agent) -> None:
    """Close an agent at the end of its process; an error that ends the process is not planned."""
    error = sys.exc_info()[1]
    agent.close(planned=error is None or isinstance(error, SystemExit))


class EngineGuest(HostEngine, ABC):
    """One rank's guest. Its subclasses implement the rest of `HostEngine` for the agent.

    Args:
        settings: the plugin's settings.
        make_link: makes the link of each agent; None connects to the controllers over gRPC.
    """

    engine_name: str
    """The engine's name in messages."""

    def __init__(
        self, settings: GuestSettings, make_link: Callable[[], RankLink] | None = None
    ) -> None:
        self.settings = settings
        self.agreement = PlanAgreement()
        self.agent: Agent | None = None
        """None until the guest has started, and for good if it could not start."""
        self.moves = self._new_moves()
        self._kv_cache: KvCache | None = None
        self._make_link = make_link
        self.link: RankLink | None = None
        """The link of the agent, if `make_link` made it."""
        self._at_exit: Finalize | None = None
        self._left: list[tuple[Agent, EngineMoves]] = []
        """Closed agents, with communicators that are still open, and their moves."""
        self._counts: StepCounts | None = None
        self._times: ExpertTimes | None = None
        """None if the seconds of the experts are not measured."""
        self._top_k = 1
        self._side = CountingSide.SOURCE
        """The shape of the engine's counts."""
        self._place_in_batch, self._ranks_of_batch = 0, 1
        """Position among the ranks that get the same batch, and the most ranks that share one."""
        self._filler: int | None = None
        """See `count_once`."""
        self._warned_of_counts = False
        self._slots = slice(0)
        """The slots of this rank, among those of a layer."""
        self._step = 0
        self._due = False
        """The engine must start a rebalance at the current step."""

    def _new_moves(self) -> EngineMoves:
        return EngineMoves(self, stall_after_s=self.settings.stall_after_s)

    @property
    def places(self) -> bool:
        """See `GuestSettings`."""
        return self.settings.places

    def begin(self, move: Move) -> None:
        """Let the engine rebalance at this step; its planner then asks for the plan."""
        self.agreement.begin(move, self._step)
        self._due = True

    def kv_cache_allocated(self, read: Callable[[], KvCache | None]) -> None:
        """Tell the controller the engine's KV cache, also if the agent starts later.

        Args:
            read: returns the cache, or None if a token has no fixed size in it. If it fails, the
                cache stays unknown, and plans go on.
        """
        try:
            self._kv_cache = read()
        except Exception as error:
            _log.warning("kv_cache_unknown", engine=self.engine_name, detail=repr(error)[:300])
        self._tell_kv_cache()

    def _tell_kv_cache(self) -> None:
        if self.agent is not None and self._kv_cache is not None:
            self.agent.tell(self._kv_cache)

    @contextmanager
    def protect_engine(self, hook: str) -> Iterator[None]:
        """Keep errors of plugin code inside an engine function away from the engine.

        After an error this rank takes no more plans; the engine goes on.

        Raises:
            GateFailed: the one error that must end the engine; see `Agent.step_boundary`.
        """
        try:
            yield
        except GateFailed:
            raise
        except Exception as error:
            agent = self.agent
            if agent is None or not agent.trouble:
                _log.exception("hook_failed", hook=hook)
            if agent is not None:
                agent.disable_migration(f"the plugin failed in {hook}: {error!r:.200}")

    def close(self) -> None:
        """End the agent and its communicators: this rank's engine has ended."""
        if self.agent is not None:
            self._leave_group(self.agent)
        self._end_left()

    @abstractmethod
    def _plan_group(self) -> Any:
        """Return the engine's CPU group over which the ranks agree."""

    @abstractmethod
    def _expert_calls(self) -> Sequence[ExpertCall]:
        """Return the function that computes the experts of each layer.

        Raises:
            Unsupported: it also communicates, or waits for other ranks; or it was not found.
        """

    def _gather(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        return gather_rows(row, self._plan_group())

    def all_gather(self, value: Tensor) -> Tensor:
        """See `agent.together.RankGroup`: a guest stands for the ranks of its engine's group."""
        return torch.from_numpy(self._gather(value.numpy()))

    def _try_to_start(self, start: Callable[[], None]) -> None:
        """Run `start`; if it fails, the engine serves without a guest."""
        try:
            start()
        except Unsupported as error:
            _log.error("guest_not_started", reason=error.reason, detail=str(error))
        except Exception as error:
            _log.exception("guest_not_started", detail=str(error)[:300])

    def _start_agent(self, rank: int, shape: ModelShape, read: Callable[[], EngineFacts]) -> Agent:
        """Start the agent on all ranks or on none; collective."""
        # A message of its own tells that: the next ones of `make` have other lengths.
        facts = together(self, "read the engine", read)

        def make() -> Agent:
            self._measure_experts(facts.device)
            self.link = None if self._make_link is None else self._make_link()
            return make_guest(
                self.settings,
                rank,
                shape,
                facts,
                self.moves,
                gather=self._gather,
                link=self.link,
            )

        self._top_k = shape.top_k
        self._slots = slice(rank * shape.slots_per_rank, (rank + 1) * shape.slots_per_rank)
        self._counts = StepCounts(shape.num_logical_experts)
        self.agent = together(self, "start an agent", make, Agent.close)
        self._tell_kv_cache()
        # Engines run a rank in a child process, which ends without atexit's functions.
        self._at_exit = Finalize(None, _say_that_it_stops, (self.agent,), exitpriority=0)
        deployment = self.settings.deployment
        _log.info("guest_started", deployment=deployment, rank=rank, shape=str(shape))
        return self.agent

    def _leave_group(self, agent: Agent) -> None:
        """Close the agent; its communicators end later, see `_end_left`."""
        self.agent = None
        if self._at_exit is not None:
            self._at_exit.cancel()
        agent.close()
        self._left.append((agent, self.moves))
        self.moves, self.agreement, self._due = self._new_moves(), PlanAgreement(), False

    def _end_left(self) -> None:
        """End the communicators of the groups that were left: no rank is in them any more."""
        while self._left:
            agent, moves = self._left.pop()
            agent.abort_polls()
            moves.meeting.abort()

    def _measure_experts(self, device: torch.device) -> None:
        """Begin to measure the seconds of the experts, unless that was done or is not possible."""
        if self._times is not None or not self.settings.seconds_every:
            return
        try:
            clock = make_clock(device)
            self._times = ExpertTimes(self.settings.seconds_every, clock, self._expert_calls)
        except Exception as error:  # It costs the seconds; the rank goes on.
            _log.warning("seconds_not_measured", engine=self.engine_name, detail=str(error)[:300])

    def _begin_step(self) -> None:
        """Measure the next step if its turn has come; called at the very end of a boundary."""
        if self._times is not None:
            self._times.begin_step(self._step)

    def _end_step(self) -> Seconds:
        """Return the seconds of the step that ended; called once for each step."""
        return unknown if self._times is None else self._times.end_step()

    def _count(self, step: int, take: Callable[[StepCounts], None]) -> None:
        """Count one step; an error costs telemetry, never the step or a poll of the gate (R9)."""
        counts = self._counts
        if counts is None:
            return
        try:
            counts.pick_up()
            take(counts)
        except Exception:  # It costs the telemetry of this step; the engine goes on.
            counts.failed(step)

    def _deliver(self, agent: Agent, note: StepNote, counts: NDArray[np.int64]) -> None:
        """Record the counts of one step."""
        if self._side is CountingSide.SOURCE:
            counts, tokens = self._part_of_batch(note, counts)
        else:
            batch = note.prepared_tokens
            if batch is None and not note.dummy:
                return  # It is not known how many of the tokens were this rank's own.
            # The first of the ranks that get the same batch reports it.
            tokens = 0 if self._place_in_batch or batch is None else batch
        record_step(agent, note, counts, tokens, self.settings.phase)

    def _part_of_batch(
        self, note: StepNote, counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], int]:
        """Return this rank's part of the (L, E) counts of its batch, and its tokens."""
        counted, batch = int(counts[0].sum()) // self._top_k, note.prepared_tokens
        if batch is None or note.dummy:
            return counts, counted
        self._check_counts(note.step, counted, batch)
        return count_once(counts, counted, batch, self._place_in_batch, self._filler)

    def _check_counts(self, step: int, counted: int, batch: int) -> None:
        """Warn once if the ranks that share a batch cannot have counted each token once."""
        ranks = self._ranks_of_batch
        # What remains for the ranks behind the first one can be less.
        are_all = bool(self._place_in_batch) or batch <= ranks * counted
        is_filled = counted > batch and self._filler is None
        if self._warned_of_counts or (are_all and not is_filled):
            return
        self._warned_of_counts = True
        _log.warning(
            "tokens_counted_otherwise",
            step=step,
            prepared=batch,
            counted=counted,
            ranks_of_batch=ranks,
            detail="this rank counted more tokens than its batch has: the totals are reduced to"
            " the batch"
            if counted > batch
            else "the ranks of the batch counted fewer tokens than it has: the totals are too low",
        )

    def _follow(self, agent: Agent, phy2log: NDArray[np.int64]) -> None:
        """Follow a map that the engine changed without a plan; in place mode, refuse new plans."""
        if np.array_equal(phy2log, agent.placement.phy2log):
            return
        if self.places:
            agent.disable_migration(
                f"{self.engine_name}'s EPLB moved experts without a plan:"
                " something else also controls the placement"
            )
        self.moves.engine_rebalanced(phy2log)

    def _disagreement(self) -> str | None:
        """Return why the ranks refused the last plan; None if they did not."""
        refused = self.agreement.refused
        return f"the ranks did not agree on the plan: {refused}" if refused else None
