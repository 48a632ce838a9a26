"""Mutants: the production parts with one rule broken, by replacing one predicate or move.

`RULES` break the machines; `GLUE` are small mistakes of the agent between machines and engine. If
no invariant catches a mutant, its rule is not needed or not tested.
"""

from dataclasses import dataclass, replace
from functools import partial

from evenkeel_moe.adapters.torch.transport import StageOutcome, TorchWeightTransport
from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.engine_moves import EngineMoves
from evenkeel_moe.agent.moves import SwapRecord
from evenkeel_moe.agent.staging import StagingWorker
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.leader.membership import Membership
from evenkeel_moe.protocol.leader.plan_executor import PlanExecutor
from evenkeel_moe.protocol.leader.planning_loop import PlanningLoop
from evenkeel_moe.protocol.leader.query_round import GroupState
from evenkeel_moe.protocol.leader.recovery import Recovery
from evenkeel_moe.protocol.messages import (
    ParticipantState,
    PollNotPassed,
    PollPassed,
    StagingFinished,
    Swap,
    SwapFinished,
    TransportDrained,
    WaveOutcome,
    WeightsReloaded,
)
from evenkeel_moe.protocol.rank.gate import Gate
from evenkeel_moe.protocol.rank.participant import Participant
from evenkeel_moe.protocol.rank.save_barrier import SaveBarrier
from tests.sim.kit import Kit


@dataclass(frozen=True)
class Mutant:
    """A kit that breaks one rule."""

    name: str
    """A letter may follow the rule that it breaks."""
    breaks: str
    kit: Kit
    hazard: str = ""
    """The hazard of the seeds that are searched for it; empty for that of each seed."""
    guest: bool = False
    """True for ranks in an engine that moves its experts itself."""


class RefuseLowerEpochs(Membership):
    def is_outdated(self, known, hello, stream, now):
        highest = known.hello.epoch if known.state is None else known.state.epoch
        return super().is_outdated(known, hello, stream, now) or hello.epoch < highest


class TermOfStoreOnly(DeploymentControl):
    def is_behind(self, known_term):
        return False


class ObeysAnyLeader(Participant):
    def accepts_leader(self, leader):
        return True


class KeepsItsEpoch(Participant):
    def _follow_engine(self, event):
        self.placement = event.placement
        return []


class IgnoresTrouble(DeploymentControl):
    def _troubled(self, event, now):
        return []


class TakesAnyBase(Participant):
    def is_stale(self, prepare):
        return False


class IgnoresLatePasses(Participant):
    """Breaks no rule by itself. Without it, leaving the group (R8) hides the next two mutants."""

    def handle(self, event, now):
        if isinstance(event, PollPassed) and self.state is not ParticipantState.ARMED:
            self.poll = None
            return []
        return super().handle(event, now)


class ReloadsUnderPoll(IgnoresLatePasses):
    def _reload_armed(self, event):
        return self._reload_drops(event)


class CommitSwaps(Participant):
    def _arm(self, commit):
        actions = super()._arm(commit)
        if self.state is not ParticipantState.ARMED:
            return actions
        self.state = ParticipantState.SWAPPING
        return [Swap(commit.wave, Epoch(self.epoch + 1))]


class SwapsWhenTold(Agent):
    """Breaks no rule by itself. Without it, the agent refuses a swap that no poll has passed."""

    def _carry_out(self, action):
        if isinstance(action, Swap):
            self._swap(action)
        else:
            super()._carry_out(action)


class PollsWithItsKeyAlone(Participant):
    def snapshot(self, now):
        view = super().snapshot(now)
        if view.fingerprint:
            assert view.wave is not None
            self.poll = view._replace(fingerprint=view.wave.fingerprint)
            return self.poll
        return view


class DropsAlone(Participant):
    def handle(self, event, now):
        held = self.state in (ParticipantState.PREPARED, ParticipantState.ARMED)
        if isinstance(event, PollPassed | PollNotPassed) and held and self.leaderless(now):
            self.poll = None
            return self._give_up(WaveOutcome.DROPPED)
        return super().handle(event, now)


class AbortsUnderPoll(IgnoresLatePasses):
    def _abort_armed(self, abort):
        return self._abort(abort)


class CallsItselfDrained(Participant):
    def handle(self, event, now):
        actions = super().handle(event, now)
        if self.state is ParticipantState.ABORTED:
            assert self.wave is not None
            actions += super().handle(TransportDrained(self.wave), now)
        return actions


class FailedPollMeansNo(Gate):
    def on_failure(self, detail):
        self.participant.handle(PollNotPassed(), 0.0)
        return []


class PollsWhenBusy(Gate):
    def is_poll_call(self):
        return super().is_poll_call() and self.participant.prepare is not None

    def advance(self, step=None):
        due = super().advance(step)
        if due and self._began is None and not self.is_poll_call():
            self.next_due = self.calls + 1
            return False
        return due


class AgreesWithAnyone(Gate):
    def agrees(self, minima):
        return True


class RebuildsAlone(Gate):
    def agreed_serial(self, minima):
        return self._wanted_serial


class FillsFreedBuffers(PlanExecutor):
    def pool_problem(self, plan, index):
        return None


class StoresNoAgreement(PlanExecutor):
    def _record_agreement(self, wave, now):
        return []


class NeverAbortsFoundWaves(Coordinator):
    def _abort(self, reason, detail, now):
        return [] if self.prepare is None else super()._abort(reason, detail, now)


class RemembersItsLastTerm(DeploymentControl):
    """Goes on with the records of a lost term."""

    kept: dict = {}

    def _follow(self, event, now):
        kept = dict(self.records.by_id)
        actions = super()._follow(event, now)
        self.kept = kept
        return actions

    def _lead(self, event, now):
        actions = super()._lead(event, now)
        self.records.by_id.update(self.kept)
        return actions


class StalledIsOver(Coordinator):
    def _watch(self, now):
        actions = super()._watch(now)
        stalled = self.health is not None and self.health.stalled
        return self._aborted(now) if stalled else actions


class TrustsTheStore(Recovery):
    def _bring_up(self, group):
        history = self.executor.history
        if history:
            newest = max(history)
            group = GroupState(newest, history[newest], group.weights_version, group.checksums)
        return super()._bring_up(group)


class TakesStalePlans(PlanExecutor):
    def is_stale(self, plan, waves_committed):
        return False


class TakesUnsoundPlans(PlanExecutor):
    def plan_problem(self, plan):
        return None

    def wave_problem(self, plan, index):
        return None


class SendsAnyTransfers(PlanExecutor):
    def wave_problem(self, plan, index):
        refusal = super().wave_problem(plan, index)
        of_transfers = (Reason.NO_SOURCE, Reason.INVALID_INPUT)
        return None if refusal is not None and refusal[0] in of_transfers else refusal


class TakesAnyTransfers(Participant):
    def wave_problem(self, prepare):
        return None


class TellsBeforeSaved(SaveBarrier):
    def outgoing(self, action):
        return [action]


class PlansWhileRanksRetire(PlanningLoop):
    def closed(self, now, kind):
        found = super().closed(now, kind)
        return None if found is Reason.RESIZING else found


class NeverEndsRetirement(DeploymentControl):
    def _end_retirement(self):
        return []


class ForgetsOldPlans(Recovery):
    def end_old_plans(self, now):
        return []


# --- mistakes of the agent ------------------------------------------------------------------------


class AcknowledgesBeforeSave(Agent):
    def _after_swap(self, record, placement):
        with self._lock:
            for answer in self._saving.end():
                self._carry_out(answer)
        super()._after_swap(record, placement)


class SavesWithoutBarrier(Agent):
    def _finish_swap(self, ready, layers, seconds):
        self._carry_out_answers(SwapFinished(ready.wave, ready.digest, seconds))
        step, received = self._recorder.last_step, ready.received_bytes
        record = SwapRecord(ready.wave, self.epoch, step, layers, seconds, received)
        self.later(partial(self._after_swap, record, self.placement))


class LivesThroughGateErrors(Agent):
    def step_boundary(self, step=None):
        if self._gate.advance(step):
            try:
                self._at_gate()
            except Exception:
                return


class PollsWithoutLock(Agent):
    def _at_gate(self):
        gate = self._gate
        if gate.resolve_due:
            result = self._polls.wait()
            with self._lock:
                self._carry_out_gate(gate.handle(result, self.now()))
        if gate.poll_due:
            self._polls.begin(gate.begin_poll(self.now()))


class HashesFirstExpert(TorchWeightTransport):
    def stage(self, prepare, cancel, progress):
        self.hashed = False
        return super().stage(prepare, cancel, progress)

    def _verify(self, transfer, expected):
        if self.hashed:
            return StageOutcome()
        self.hashed = True
        return super()._verify(transfer, expected)


class LeavesOperationsInFlight(TorchWeightTransport):
    def _give_up(self, flights, reason, detail):
        self.abort()
        return StageOutcome(reason, detail)


class WaitsForNoBatch(TorchWeightTransport):
    def _end(self, flights, deadline):
        flight = flights[0]
        while flight.works:
            flight.works = []
            self._post(flight)


class VotesYesAnyway(StagingWorker):
    """Breaks nothing by itself: a swap refuses what another wave has staged (R8)."""

    def _stage(self, prepare, old, new, cancel):
        self._try_stage(prepare, old, new, cancel)
        if self._transport.broken:
            self._events.request_rebuild(self._transport.serial)
        self._events.feed(StagingFinished(prepare.wave))

    def _forget(self):
        ready = self._ready
        super()._forget()
        self._ready = ready


class SwapsWhateverIsStaged(VotesYesAnyway):
    def swap(self, wave):
        if self._ready is not None:
            wave = self._ready.wave
        return super().swap(wave)


class RenewsFirstSlot(StagingWorker):
    def swap(self, wave):
        ready = super().swap(wave)
        return replace(ready, staged=dict(list(ready.staged.items())[:1]))


class KeepsOldChecksums(Agent):
    def finish_reload(self, weights_version):
        self._moves.register(self.placement)
        self.feed(WeightsReloaded(weights_version, self._participant.checksums))


RULES = (
    Mutant("R1", "refuses a new generation at a lower epoch", Kit(membership=RefuseLowerEpochs)),
    Mutant(
        "R2", "takes its term from the store alone", Kit(control=TermOfStoreOnly), "an empty store"
    ),
    Mutant("R2b", "a rank obeys a leader of a lower term", Kit(participant=ObeysAnyLeader)),
    Mutant("R3", "a rank takes a Prepare of any base", Kit(participant=TakesAnyBase)),
    Mutant("R3b", "the engine moves experts, the epoch stays", Kit(participant=KeepsItsEpoch)),
    Mutant("R3c", "tells an epoch before it is saved", Kit(barrier=TellsBeforeSaved)),
    Mutant("R4", "reloads under a poll in flight", Kit(participant=ReloadsUnderPoll), "reloads"),
    Mutant("R5", "Commit swaps", Kit(participant=CommitSwaps, agent=SwapsWhenTold)),
    Mutant("R5b", "polls with the wave's key alone", Kit(participant=PollsWithItsKeyAlone)),
    Mutant("R6", "a rank drops alone", Kit(participant=DropsAlone)),
    Mutant(
        "R7",
        "answers Abort under a poll in flight",
        Kit(participant=AbortsUnderPoll),
        "aborts race with polls",
    ),
    Mutant("R7b", "calls itself drained at once", Kit(participant=CallsItselfDrained)),
    Mutant("R8", "a failed poll means not agreed", Kit(gate=FailedPollMeansNo)),
    Mutant("R9", "polls only while a wave is held", Kit(gate=PollsWhenBusy)),
    Mutant("R9b", "polls although K differs", Kit(gate=AgreesWithAnyone)),
    Mutant("R9c", "begins a wave that a rank refuses", Kit(control=IgnoresTrouble)),
    Mutant("R10", "rebuilds its communicator alone", Kit(gate=RebuildsAlone)),
    Mutant("R11", "fills buffers the wave frees", Kit(executor=FillsFreedBuffers)),
    Mutant("R12", "never aborts a wave it finds", Kit(coordinator=NeverAbortsFoundWaves)),
    Mutant("R12b", "stores no agreement", Kit(executor=StoresNoAgreement)),
    Mutant("R13", "keeps its plans when the lease is lost", Kit(control=RemembersItsLastTerm)),
    Mutant("R14", "ends a stalled wave", Kit(coordinator=StalledIsOver)),
    Mutant("R15", "takes the placement from the store", Kit(recovery=TrustsTheStore)),
    Mutant(
        "R16",
        "begins a plan on a stale base",
        Kit(executor=TakesStalePlans),
        "plans of a stale base",
    ),
    Mutant("R17", "begins a plan that breaks an invariant", Kit(executor=TakesUnsoundPlans)),
    Mutant("R17b", "sends transfers that do not fit the rows", Kit(executor=SendsAnyTransfers)),
    Mutant("R17c", "a rank takes a Prepare wrong in itself", Kit(participant=TakesAnyTransfers)),
)
RESIZES = (
    Mutant(
        "retiring",
        "begins plans while ranks retire",
        Kit(planning=PlansWhileRanksRetire),
        "other sizes",
    ),
    Mutant(
        "retired",
        "keeps the retirement of ranks that have left",
        Kit(control=NeverEndsRetirement),
        "other sizes",
    ),
    Mutant(
        "old plans",
        "goes on with plans of the group of another size",
        Kit(recovery=ForgetsOldPlans),
        "other sizes",
    ),
)
"""Of groups that change their size; see docs/resizing.md."""
GLUE = (
    Mutant("save", "acknowledges before the save (R3)", Kit(agent=AcknowledgesBeforeSave)),
    Mutant("barrier", "begins no save barrier (R3)", Kit(agent=SavesWithoutBarrier)),
    Mutant("gate", "lives through an error at the gate (R8)", Kit(agent=LivesThroughGateErrors)),
    Mutant("lock", "polls without the lock (R7)", Kit(agent=PollsWithoutLock)),
    Mutant(
        "hash",
        "hashes the first expert only (R4)",
        Kit(transport=HashesFirstExpert),
        "damaged bytes",
    ),
    Mutant(
        "flight",
        "does not wait for operations (R7)",
        Kit(transport=LeavesOperationsInFlight),
        "late bytes",
    ),
    Mutant("batch", "waits for no batch (R10)", Kit(transport=WaitsForNoBatch)),
    Mutant("renew", "renews the first written slot (R11)", Kit(worker=RenewsFirstSlot)),
    Mutant("reload", "keeps the old checksums (R4)", Kit(agent=KeepsOldChecksums), "reloads"),
    Mutant(
        "swap", "swaps whatever is staged (R8)", Kit(worker=SwapsWhateverIsStaged), "late bytes"
    ),
)


class TakesAnyMap(EngineMoves):
    """Ends a move as agreed, whatever map the engine went to."""

    def move_finished(self, phy2log):
        if self.move is not None:
            super().move_finished(self.move.placement.phy2log.astype("int64"))


class ReloadsDuringMoves(EngineMoves):
    """Lets weights be replaced while a move is under way, without the permission of the ranks."""

    def begin_reload(self):
        self._agent.request_reload()
        self.reloading = True


class GoesOnArmed(Agent):
    """Serves on after a poll that may have passed a wave on other ranks."""

    def _raise_if_left(self):
        self._without_gate = self._left is not None


GUESTS = (
    Mutant("map", "takes any map for the agreed one (R8)", Kit(moves=TakesAnyMap), guest=True),
    Mutant(
        "under way", "reloads during moves (R4)", Kit(moves=ReloadsDuringMoves), "reloads", True
    ),
    Mutant(
        "armed", "serves on after a lost poll (R8)", Kit(agent=GoesOnArmed), "failing polls", True
    ),
)
"""In an engine that moves its experts itself."""

MUTANTS = (*RULES, *RESIZES, *GLUE, *GUESTS)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
NOT_SIMULATED = {
    "R2b": "it takes two leaders at one moment: a scenario shows it",
    "R3": "it takes a Prepare that is late by a wave: the search of small worlds finds it",
    "R3b": "no simulated engine moves experts unasked: the search of small worlds finds it",
    "R6": "it takes polls that fail to agree twice: the search of small worlds finds it",
    "R7b": "a real agent waits for its thread first: the search of small worlds finds it",
    "R9b": "the ranks find at the first poll that they are out of step: a unit test shows it",
}
"""The mutants that seeds do not find, or not in some hundreds, and what finds them."""
