"""The leader's half of one wave: a two-phase commit over all ranks.

The table `transitions.COORDINATOR` decides which event may change which state. Rules R1 to R17 are
in docs/protocol.md.

The gate of the EP group is the commit point, not this machine. The machine learns of a commit when
one rank is at the new epoch, and of an abort when all R ranks have dropped the wave and drained.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.ids import Epoch, EpRank
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.control_messages import (
    Alert,
    CancelWave,
    CoordinatorAction,
    FromRank,
    GroupProgress,
    RankConnected,
    RankLost,
    WaveHealth,
)
from evenkeel_moe.protocol.leader.peers import Peers
from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Ack,
    Commit,
    ControllerMessage,
    Leader,
    ParticipantState,
    Prepare,
    QueryState,
    RankState,
    Vote,
    WaveOutcome,
)
from evenkeel_moe.protocol.timing import WaveTiming
from evenkeel_moe.protocol.transitions import (
    COORDINATOR,
    IGNORED,
    ILLEGAL,
    VIOLATION,
    CoordinatorState,
)

_STALLED_FOR = {
    CoordinatorState.RECOVERING: (Reason.RECOVERY_DEADLINE, "no answer from"),
    CoordinatorState.ABORTING: (Reason.ABORT_DEADLINE, "no answer to Abort from"),
    CoordinatorState.COMMITTED: (Reason.GATE_DEADLINE, "the swap is not confirmed by"),
}


class Coordinator:
    """One wave.

    Args:
        leader: this controller with its term.
        peers: (incarnation, stream) of all R ranks of the wave's generation.
        prepare: the message to send; None to recover a wave that some rank was found holding (R12).
        placement_digest: of the map that the wave leads to; None if it is unknown, so that what the
            ranks say is not compared with it.
        query: the number of the recovery's query, above all numbers used before.
    """

    def __init__(
        self,
        wave: WaveKey,
        leader: Leader,
        peers: Mapping[EpRank, tuple[int, int]],
        timing: WaveTiming,
        *,
        prepare: Prepare | None = None,
        placement_digest: str | None = None,
        query: int = 0,
    ) -> None:
        self.wave = wave
        self.leader = leader
        self.timing = timing
        self.prepare = prepare
        self.placement_digest = placement_digest
        self.query = query
        self.peers = Peers(wave, peers, timing)
        self.state = CoordinatorState.RECOVERING if prepare is None else CoordinatorState.PREPARING
        self.reason = Reason.RECOVERING if prepare is None else Reason.PLAN_STARTED
        """The reason for the state, or for the end of the wave."""
        self.detail = ""
        self.health: WaveHealth | None = None
        """Set while the wave waits for something an operator should know (R14)."""
        self._elsewhere: set[EpRank] = set()
        """The ranks that are at another epoch or map than the wave leads to, if they swapped it."""
        self._entered_at = 0.0
        self._entered_step = 0
        self._step = 0
        self._stepped_at = 0.0
        self._story: deque[tuple[str, str]] = deque(maxlen=16)

    # --- events -----------------------------------------------------------------------------------

    def start(self, now: float, step: int) -> list[CoordinatorAction]:
        """Send Prepare, or the recovery's query, to all ranks; `step` is the group's last known."""
        self._step, self._stepped_at = step, now
        return self._enter(self.state, self.reason, "", now)

    def handle(self, event: object, now: float) -> list[CoordinatorAction]:
        """Take one event: `FromRank` with a rank's message, or a local event of the table.

        Raises:
            IllegalEvent: the table forbids a local event; never raised for a rank's message.
        """
        if isinstance(event, FromRank):
            known = self.peers.counts(event)
            return self._dispatch(type(event.message), event, now) if known else []
        return self._dispatch(type(event), event, now)

    def _dispatch(self, kind: type, event: object, now: float) -> list[CoordinatorAction]:
        cell = COORDINATOR.get((self.state, kind), ILLEGAL)
        if cell is IGNORED:
            return []
        if cell is VIOLATION:
            return [Alert(Reason.MALFORMED, f"{self.wave} is {self.state}, yet {event}")]
        if cell is ILLEGAL:
            raise IllegalEvent("coordinator", self.state, event, self.story)
        if kind is not GroupProgress:
            self._story.append((self.state, kind.__name__))
        actions: list[CoordinatorAction] = getattr(self, cell)(event, now)
        return actions

    @property
    def story(self) -> tuple[str, ...]:
        """The last events, oldest first, as `state+event`."""
        return tuple(f"{state}+{event}" for state, event in self._story)

    @property
    def done(self) -> bool:
        """True if the wave has ended and no rank holds anything of it.

        Only then the next Prepare may be sent (R7).
        """
        if self.state is CoordinatorState.COMMITTED:
            return not self.peers.pending
        return self.state is CoordinatorState.ABORTED

    @property
    def is_dropped(self) -> bool:
        """True if a rank has answered that it dropped the wave: then no rank swaps it (R6, R7)."""
        if self.state is not CoordinatorState.ABORTING:
            return self.state is CoordinatorState.ABORTED
        dropped = Reason.WAVE_DROPPED, Reason.WEIGHTS_VERSION_CHANGED
        return self.reason in dropped or self.peers.any_answered

    # --- rules ------------------------------------------------------------------------------------

    def outcome(self, answers: Iterable[RankState]) -> CoordinatorState:
        """R12: return how a wave found on the ranks must end.

        If one rank is at the new epoch, the wave is committed. Otherwise, if one rank refused or
        dropped it, it is aborted on all ranks, also on armed ones. Otherwise it is committed.
        """
        answers = list(answers)
        if any(self.has_swapped(a) and a.identity.rank not in self._elsewhere for a in answers):
            return CoordinatorState.COMMITTED
        if any(self.has_dropped(answer) for answer in answers):
            return CoordinatorState.ABORTING
        return CoordinatorState.COMMITTING

    def has_dropped(self, answer: RankState) -> bool:
        """R12: the rank refused or dropped the wave, never had it, or can still vote no."""
        return answer.wave != self.wave or answer.state in (
            ParticipantState.STAGING,
            ParticipantState.ABORTED,
        )

    def has_swapped(self, answer: RankState) -> bool:
        """R12: the wave was the last to end on the rank, and by a swap."""
        return answer.last_wave == self.wave and answer.last_outcome is WaveOutcome.SWAPPED

    def is_elsewhere(self, epoch: Epoch, placement_digest: str) -> bool:
        """R12: a rank that swapped is not where the wave leads, so it has not committed it."""
        return epoch != self.wave.epoch or self.placement_digest not in (None, placement_digest)

    def is_idle(self, now: float) -> bool:
        """R14: the group takes no steps, so no answer of its gate can be expected."""
        return now - self._stepped_at >= self.timing.idle_after_s

    # --- answers ----------------------------------------------------------------------------------

    def _vote(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        vote = event.message
        assert isinstance(vote, Vote)
        if not vote.yes:
            reason = vote.reason if vote.reason is not Reason.COMMITTED else Reason.RANK_VOTED_NO
            return self._abort(reason, f"rank {event.rank}: {vote.detail or vote.reason}", now)
        if self.state is CoordinatorState.COMMITTING:
            return []
        self.peers[event.rank].answered = True
        if self.peers.pending:
            return []
        return self._enter(
            CoordinatorState.COMMITTING, Reason.PLAN_STARTED, "all ranks voted yes", now
        )

    def _ack(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        ack = event.message
        assert isinstance(ack, Ack)
        if self.is_elsewhere(ack.epoch, ack.placement_digest):
            return self._at_other_map(event.rank, ack.epoch, ack.placement_digest, now)
        return self._at_new_epoch(event.rank, now)

    def _at_other_map(
        self, rank: EpRank, epoch: Epoch, digest: str, now: float
    ) -> list[CoordinatorAction]:
        """Handle a rank that says it swapped, and names another map: the wave is not committed.

        It holds nothing of the wave any more. The plan ends, and all ranks are asked (R15).
        """
        detail = (
            f"rank {rank} swapped wave {self.wave.wave_index + 1} of {self.wave.plan_id} and is at"
            f" epoch {epoch} with map {digest}, not at epoch {self.wave.epoch} with map"
            f" {self.placement_digest}"
        )
        actions: list[CoordinatorAction] = []
        if rank not in self._elsewhere:
            self._elsewhere.add(rank)
            actions.append(Alert(Reason.EPOCH_DISAGREES, detail))
        if self.state is CoordinatorState.COMMITTING:
            return [*actions, *self._abort(Reason.EPOCH_DISAGREES, detail, now)]
        if self.state is CoordinatorState.ABORTING:
            return actions  # The rank's answer to Abort follows.
        self.peers[rank].answered = True
        return actions if self.peers.pending else [*actions, *self._set_health(None)]

    def _at_new_epoch(self, rank: EpRank, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        if self.state is not CoordinatorState.COMMITTED:
            actions = self._committed(f"rank {rank} is at the new epoch", now)
        self.peers[rank].answered = True
        if not self.peers.pending:
            actions += self._set_health(None)
        return actions

    def _committed(self, detail: str, now: float) -> list[CoordinatorAction]:
        # In COMMITTING the other ranks have been sent Commit already: they are not asked again.
        asked = self.state is CoordinatorState.COMMITTING
        state, reason = CoordinatorState.COMMITTED, Reason.COMMITTED
        return self._enter(state, reason, detail, now, ask=not asked)

    def _commit_refused(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        """Handle a rank's answer to Commit that it does not hold the wave."""
        answer = event.message
        assert isinstance(answer, AbortAnswer)
        if answer.outcome is WaveOutcome.SWAPPED:
            return self._at_new_epoch(event.rank, now)
        return self._abort(Reason.WAVE_DROPPED, f"rank {event.rank} {answer.outcome} it", now)

    def _abort_answer(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        answer = event.message
        assert isinstance(answer, AbortAnswer)
        swapped = answer.outcome is WaveOutcome.SWAPPED
        if swapped and event.rank not in self._elsewhere:
            return self._at_new_epoch(event.rank, now)
        if not answer.drained:
            return []  # R7: late bytes may still arrive.
        self.peers[event.rank].answered = True
        return [] if self.peers.pending else self._aborted(now)

    def _aborted(self, now: float) -> list[CoordinatorAction]:
        state = CoordinatorState.ABORTED
        return self._enter(state, self.reason, self.detail, now, ask=False)

    def _late_abort_answer(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        answer = event.message
        assert isinstance(answer, AbortAnswer)
        if answer.outcome is WaveOutcome.SWAPPED:
            return self._at_new_epoch(event.rank, now)
        detail = f"{self.wave} is committed, yet rank {event.rank} {answer.outcome} it"
        return [Alert(Reason.EPOCH_DISAGREES, detail)]

    def _rank_state(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        answer = event.message
        assert isinstance(answer, RankState)
        if answer.query < self.query:
            return []
        peer = self.peers[event.rank]
        peer.answered, peer.state = True, answer
        # An engine that moved experts since is at a later epoch, with a map of its own.
        at_epoch = answer.epoch == self.wave.epoch
        if at_epoch and self.is_elsewhere(answer.epoch, answer.placement_digest):
            self._elsewhere.add(event.rank)
        if self.peers.pending:
            return []
        outcome = self.outcome(self.peers.states)
        if outcome is CoordinatorState.COMMITTED:
            return self._committed("found committed", now)
        if outcome is CoordinatorState.ABORTING:
            return self._abort(Reason.WAVE_DROPPED, "found on some ranks only", now)
        return self._enter(outcome, Reason.RECOVERED, "found prepared on all ranks", now)

    # --- local events -----------------------------------------------------------------------------

    def _cancel(self, event: CancelWave, now: float) -> list[CoordinatorAction]:
        return self._abort(event.reason, "before the votes were in", now)

    def _connected(self, event: RankConnected, now: float) -> list[CoordinatorAction]:
        peer = self.peers[event.rank]
        restarted = peer.incarnation != event.incarnation
        peer.incarnation, peer.stream, peer.lost = event.incarnation, event.stream, False
        if self.state is CoordinatorState.PREPARING and restarted:
            return self._abort(Reason.RANK_LOST, f"rank {event.rank} began a new life", now)
        # A question that waits for the store goes out with a tick, once the store has its writes.
        if peer.answered or not peer.times_asked:
            return []
        return [self.peers.ask(event.rank, self._question(), now)]

    def _lost_preparing(self, event: RankLost, now: float) -> list[CoordinatorAction]:
        self.peers[event.rank].lost = True
        return self._abort(Reason.RANK_LOST, f"rank {event.rank} is not heard", now)

    def _lost(self, event: RankLost, now: float) -> list[CoordinatorAction]:
        self.peers[event.rank].lost = True
        return self._watch(now)

    def _progress(self, event: GroupProgress, now: float) -> list[CoordinatorAction]:
        if event.step > self._step:
            self._step, self._stepped_at = event.step, now
        if event.swapping == self.wave:
            # The ranks agreed, and an engine that moves experts itself takes its time.
            self._entered_at, self._entered_step = now, self._step
        return []

    def _tick(self, _event: object, now: float) -> list[CoordinatorAction]:
        actions = self._watch(now)
        return [*actions, *self.peers.ask_again(self._question(), now)]

    # --- deadlines (R14) --------------------------------------------------------------------------

    def _watch(self, now: float) -> list[CoordinatorAction]:
        """Check the state's deadline; its effect depends on whether the ranks can answer at all."""
        pending, timing = list(self.peers.pending), self.timing
        if not pending:
            return []
        lost = [rank for rank in pending if self.peers[rank].lost]
        if lost:
            return self._stall(Reason.RANK_LOST, f"ranks {lost} are not heard")
        if self.peers.is_unsent():
            # The ranks' time to answer begins when they can be asked.
            self._entered_at, self._entered_step = now, self._step
            detail = "what its messages rest on is not stored yet"
            return self._stall(Reason.STORE_UNAVAILABLE, detail)
        waited, steps = now - self._entered_at, self._step - self._entered_step
        if self.state is CoordinatorState.PREPARING:
            if waited < timing.prepare_deadline_s:
                return self._set_health(None)
            detail = f"no vote from ranks {pending} in {timing.prepare_deadline_s:g} s"
            return self._abort(Reason.PREPARE_DEADLINE, detail, now)
        needs_steps = self.state is not CoordinatorState.RECOVERING
        if needs_steps and self.is_idle(now):
            detail = f"no step for {now - self._stepped_at:.0f} s"
            return self._set_health(WaveHealth(self.wave, False, Reason.NO_STEPS, detail))
        if self.state is CoordinatorState.COMMITTING:
            if waited < timing.commit_deadline_s or steps < timing.commit_deadline_steps:
                return self._set_health(None)
            detail = f"not agreed in {waited:.0f} s and {steps} steps"
            return self._abort(Reason.GATE_DEADLINE, detail, now)
        if waited < timing.stall_after_s or (needs_steps and steps < timing.stall_after_steps):
            return self._set_health(None)
        reason, words = _STALLED_FOR[self.state]
        return self._stall(reason, f"{words} ranks {pending} in {waited:.0f} s")

    def _stall(self, reason: Reason, detail: str) -> list[CoordinatorAction]:
        """R14: report the wave as stalled; it never ends for that."""
        return self._set_health(WaveHealth(self.wave, True, reason, detail))

    def _set_health(self, health: WaveHealth | None) -> list[CoordinatorAction]:
        """Report a change of health, once for each reason."""
        before = self.health
        if (before and before.reason) == (health and health.reason):
            return []
        self.health = health
        return [health if health is not None else WaveHealth(self.wave, False, None)]

    # --- moves ------------------------------------------------------------------------------------

    def _abort(self, reason: Reason, detail: str, now: float) -> list[CoordinatorAction]:
        return self._enter(CoordinatorState.ABORTING, reason, detail, now)

    def _enter(
        self, state: CoordinatorState, reason: Reason, detail: str, now: float, *, ask: bool = True
    ) -> list[CoordinatorAction]:
        """Change the state, and ask every rank the new state's question if `ask`."""
        self.state, self.reason, self.detail = state, reason, detail
        self._entered_at, self._entered_step = now, self._step
        actions = self._set_health(None)
        return [*actions, *self.peers.ask_all(self._question(), now)] if ask else actions

    def _question(self) -> ControllerMessage:
        match self.state:
            case CoordinatorState.PREPARING:
                assert self.prepare is not None
                return self.prepare
            case CoordinatorState.RECOVERING:
                return QueryState(self.leader, query=self.query)
            case CoordinatorState.ABORTING:
                return Abort(self.leader, self.wave)
            case _:
                return Commit(self.leader, self.wave)
