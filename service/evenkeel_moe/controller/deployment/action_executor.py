"""Carries out the actions of the control machine: stores records, sends to ranks, starts cycles."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from evenkeel_moe.controller.deployment.action_log import ActionLog
from evenkeel_moe.controller.leadership.leadership import Leadership
from evenkeel_moe.controller.ranks.rank_sessions import RankSessions
from evenkeel_moe.controller.shared_services import SharedServices
from evenkeel_moe.errors import Conflict, Unavailable
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol.messages import Prepare

_WAITING = 100
"""Decisions on a new deployment that are kept."""


@dataclass(eq=False, repr=False)
class ActionExecutor:
    """The executor of one deployment's actions; `driver.Executor` of its machine.

    Args:
        expect_wave: prepares for reports under the placement that a wave leads to.
        begin_cycle: plans in the background; ends with `CycleDecided`.
    """

    shared: SharedServices
    leadership: Leadership
    ranks: RankSessions
    log: ActionLog
    expect_wave: Callable[[Prepare], None]
    begin_cycle: Callable[[ctl.RunCycle], None]
    _waiting: deque[ctl.PersistAction] = field(
        default_factory=lambda: deque(maxlen=_WAITING), init=False
    )
    """Decisions on a new deployment: made-up names must leave nothing in the store."""
    _fenced_term: int = field(default=0, init=False)
    """The last term under which the store refused a write."""

    async def persist(self, actions: Sequence[ctl.PersistAction]) -> Sequence[object]:
        """Store all actions in order; of a new deployment only once it is claimed.

        Returns:
            `PersistFailed` with the actions that may not be stored, `LeaseLost` if another replica
            leads, or nothing.
        """
        for action in actions:
            self.log.persisting(action)
        if self._is_new() and all(isinstance(one, ctl.PersistDecision) for one in actions):
            self._waiting.extend(actions)
            return ()
        if self.shared.health.resting:
            return (ctl.PersistFailed(tuple(actions), self.shared.health.fault),)
        for position, action in enumerate(actions):
            try:
                await self._write_waiting()
                await self._write(action)
            except Unavailable as error:
                self.shared.health.failed(error)
                return (ctl.PersistFailed(tuple(actions[position:]), str(error)),)
            except Conflict as error:
                self._fenced_term = self.leadership.machine_term
                self.leadership.fenced(str(error))
                return (ctl.LeaseLost(),)
        self.shared.health.answered()
        return ()

    def _is_new(self) -> bool:
        """Return True while the ranks were never all here and no operator acted."""
        leadership = self.leadership
        return not leadership.keeper.lasting and leadership.control.generation is None

    async def _write_waiting(self) -> None:
        """Claim the deployment, and store the decisions that waited for that."""
        await self.leadership.claim()
        while self._waiting:
            await self._write(self._waiting[0])
            self._waiting.popleft()

    async def _write(self, action: ctl.PersistAction) -> None:
        store, term = self.shared.store, self.leadership.machine_term
        deployment = self.leadership.control.deployment
        match action:
            case ctl.PersistPlan(record):
                await store.store_plan(record, term)
            case ctl.PersistEpoch(_, epoch, placement, begins):
                await store.store_epoch(deployment, epoch, placement, term, begins)
            case ctl.PersistDocument(name, body):
                await store.store_document(deployment, name, body, term)
            case ctl.PersistDecision(row):
                await store.append_decision(deployment, row)

    def _is_fenced(self) -> bool:
        """Return True if another replica leads, and the machine does not know it yet."""
        return self.leadership.machine_term <= self._fenced_term

    def perform(self, action: ctl.ControlAction) -> None:
        """Carry out an action that is not a write."""
        match action:
            case ctl.SendToRank() if self._is_fenced():
                return  # R13.
            case ctl.SendToRank(rank, stream, message):
                self.ranks.send(rank, stream, message)
            case ctl.CloseStream(_, stream, reason, detail):
                self.ranks.refuse(stream, reason, detail)
            case ctl.RunCycle():
                self.begin_cycle(action)
            case ctl.RaiseTerm(at_least):
                self.leadership.raise_term(at_least)
            case ctl.WaveBegins(prepare):
                self.log.wave_begins(prepare.wave)
                self.expect_wave(prepare)
            case ctl.WaveEnded():
                # A fenced leader could not store the wave: the next one finds it and counts it.
                counts = action.newly_counted and not self._is_fenced()
                self.log.wave_ended(replace(action, newly_counted=counts))
            case ctl.WaveHealth():
                self.log.wave_health(action)
            case ctl.Alert():
                self.log.alert(action)
