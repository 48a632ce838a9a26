"""The controller's half of the switch: one wave is one two-phase commit over all ranks.

Rule 1: which event may move which state lives in `tables.COORDINATOR`; a method named there does
one move and nothing else moves the state. Rules R1-R17 are in docs/protocol.md.

The gate of the EP group is the commit point, not this machine: it learns of a commit when one
rank says it is at the new epoch, and of an abort when all R say that the wave is gone and drained.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.control_messages import (
    Alert,
    CancelWave,
    CoordinatorAction,
    FromRank,
    GroupProgress,
    PersistIntent,
    PersistOutcome,
    RankConnected,
    RankLost,
    SendToRank,
    WaveHealth,
)
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

__all__ = ["Coordinator", "Peer"]


_SWAPPED = WaveOutcome.SWAPPED


@dataclass(slots=True)
class Peer:
    """What the coordinator knows of one rank. Invariant: `answered` is about the current state's question."""

    incarnation: int
    stream: int
    asked_on: int = -1
    """Stream that got the current question; -1 before it was asked."""
    times_asked: int = 0
    """How often the current state's question went out to it."""
    answered: bool = False
    lost: bool = False
    resend_at: float = 0.0
    wait_s: float = 0.0
    state: RankState | None = None
    """Answer to the query of a recovery."""


class Coordinator:
    """One wave.

    Args:
        wave: its key; leader: this controller with its term.
        peers: all R ranks of the wave's generation: (incarnation, stream).
        prepare: the message to send; None to recover a wave some rank was found holding (R12).
        query: number for the recovery's query, above every number used before.
    """

    def __init__(
        self,
        wave: WaveKey,
        leader: Leader,
        peers: dict[EpRank, tuple[int, int]],
        timing: WaveTiming,
        *,
        prepare: Prepare | None = None,
        query: int = 0,
    ) -> None:
        self.wave = wave
        self.leader = leader
        self.timing = timing
        self.prepare = prepare
        self.query = query
        self.peers = {rank: Peer(*peers[rank]) for rank in sorted(peers)}
        self.state = CoordinatorState.RECOVERING if prepare is None else CoordinatorState.PREPARING
        self.reason = Reason.RECOVERING if prepare is None else Reason.PLAN_STARTED
        """Why it is in this state; once ended, why it ended so."""
        self.detail = ""
        self.health: WaveHealth | None = None
        """Set while the wave waits for a reason a person should know (R14)."""
        self.ack: Ack | None = None
        """The first Ack, of the new epoch."""
        self._entered_at = 0.0
        self._entered_step = 0
        self._step = 0
        self._stepped_at = 0.0
        self._story: deque[tuple[str, str]] = deque(maxlen=16)

    # --- doors ----------------------------------------------------------------------------------

    def start(self, now: float, step: int) -> list[CoordinatorAction]:
        """Ask all ranks: Prepare, or the recovery's query. `step`: the group's, as last heard."""
        self._step, self._stepped_at = step, now
        return self._enter(self.state, self.reason, "", now)

    def handle(self, event: object, now: float) -> list[CoordinatorAction]:
        """Take one event: `FromRank` with a rank's message, or a local event of the table.

        Raises:
            IllegalEvent: a local event the table forbids; never for what a rank sent.
        """
        if isinstance(event, FromRank):
            return self._dispatch(type(event.message), event, now) if self.counts(event) else []
        return self._dispatch(type(event), event, now)

    def not_sent(self, messages: Iterable[SendToRank]) -> None:
        """These of its actions were not carried out, for what was to be stored before is not; the next tick tries again."""
        for action in messages:
            if getattr(action.message, "wave", None) == self.wave:
                peer = self.peers[action.rank]
                peer.times_asked = max(0, peer.times_asked - 1)
                if not peer.times_asked:
                    peer.wait_s = peer.resend_at = 0.0

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
        """The last moves, oldest first, as `state+event`."""
        return tuple(f"{state}+{event}" for state, event in self._story)

    @property
    def pending(self) -> tuple[EpRank, ...]:
        """Ranks that have not answered the current state's question."""
        return tuple(rank for rank, peer in self.peers.items() if not peer.answered)

    @property
    def done(self) -> bool:
        """Ended, and no rank holds anything of the wave any more: the next Prepare may go out (R7)."""
        if self.state is CoordinatorState.COMMITTED:
            return not self.pending
        return self.state is CoordinatorState.ABORTED

    # --- predicates: one rule each ----------------------------------------------------------------

    def counts(self, event: FromRank) -> bool:
        """R1: an answer counts only from the life and the stream that got the question."""
        peer = self.peers.get(event.rank)
        if peer is None or peer.incarnation != event.incarnation or peer.asked_on != event.stream:
            return False
        wave = getattr(event.message, "wave", None)
        return isinstance(event.message, RankState) or wave == self.wave

    def is_gone(self, answer: AbortAnswer) -> bool:
        """R7: a rank is through with an abort only when its transport has drained."""
        return answer.drained

    def ruling(self, states: Iterable[RankState]) -> CoordinatorState:
        """R12: what a wave found on the ranks comes to.

        One rank at the new epoch: committed. Else one that refused or dropped it: abort it
        everywhere, armed ranks too. Else all are prepared or armed: commit.
        """
        answers = list(states)
        if any(
            answer.last_wave == self.wave and answer.last_outcome is _SWAPPED for answer in answers
        ):
            return CoordinatorState.COMMITTED
        if any(self.has_dropped(answer) for answer in answers):
            return CoordinatorState.ABORTING
        return CoordinatorState.COMMITTING

    def has_dropped(self, answer: RankState) -> bool:
        """R12: this rank refused or dropped the wave, never had it, or could still vote no."""
        return answer.wave != self.wave or answer.state in (
            ParticipantState.STAGING,
            ParticipantState.ABORTED,
        )

    def gives_up(self) -> bool:
        """R14: a wave that cannot finish is stalled; it never ends for that."""
        return False

    def is_kept_back(self) -> bool:
        """R14: the state's question has not gone out to some rank, so that it waits for the store and not for that rank."""
        return any(not peer.answered and not peer.times_asked for peer in self.peers.values())

    def is_idle(self, now: float) -> bool:
        """R14: the group takes no steps, so nothing can be expected of its gate."""
        return now - self._stepped_at >= self.timing.idle_after_s

    # --- answers --------------------------------------------------------------------------------

    def _vote(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        vote = event.message
        assert isinstance(vote, Vote)
        if not vote.yes:
            reason = vote.reason if vote.reason is not Reason.COMMITTED else Reason.RANK_VOTED_NO
            return self._abort(reason, f"rank {event.rank}: {vote.detail or vote.reason}", now)
        self.peers[event.rank].answered = True
        if self.pending:
            return []
        assert self.prepare is not None
        commits = self._enter(
            CoordinatorState.COMMITTING, Reason.PLAN_STARTED, "all ranks voted yes", now
        )
        return [PersistIntent(self.wave, self.prepare.base_epoch), *commits]

    def _ack(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        ack = event.message
        assert isinstance(ack, Ack)
        self.ack = self.ack or ack
        return self._at_new_epoch(event.rank, now)

    def _at_new_epoch(self, rank: EpRank, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        if self.state is not CoordinatorState.COMMITTED:
            actions = self._commit_known(f"rank {rank} is at the new epoch", now)
        self.peers[rank].answered = True
        if not self.pending:
            actions += self._set_health(None)
        return actions

    def _commit_known(self, detail: str, now: float) -> list[CoordinatorAction]:
        outcome = PersistOutcome(self.wave, True, Reason.COMMITTED)
        if (
            self.state is CoordinatorState.COMMITTING
        ):  # the other ranks' Commit is on its way already
            self.state, self.reason, self.detail = (
                CoordinatorState.COMMITTED,
                Reason.COMMITTED,
                detail,
            )
            self._entered_at, self._entered_step = now, self._step
            return [outcome, *self._set_health(None)]
        return [outcome, *self._enter(CoordinatorState.COMMITTED, Reason.COMMITTED, detail, now)]

    def _gone_unasked(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        """An answer to Commit: the rank has the wave no more."""
        answer = event.message
        assert isinstance(answer, AbortAnswer)
        if answer.outcome is WaveOutcome.SWAPPED:
            return self._at_new_epoch(event.rank, now)
        return self._abort(Reason.WAVE_DROPPED, f"rank {event.rank} {answer.outcome} it", now)

    def _gone(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        answer = event.message
        assert isinstance(answer, AbortAnswer)
        if answer.outcome is WaveOutcome.SWAPPED:
            return self._at_new_epoch(event.rank, now)
        if not self.is_gone(answer):
            return []
        self.peers[event.rank].answered = True
        if self.pending:
            return []
        return self._aborted(now)

    def _aborted(self, now: float) -> list[CoordinatorAction]:
        self._enter(CoordinatorState.ABORTED, self.reason, self.detail, now)
        return [PersistOutcome(self.wave, False, self.reason), *self._set_health(None)]

    def _gone_late(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        answer = event.message
        assert isinstance(answer, AbortAnswer)
        if answer.outcome is WaveOutcome.SWAPPED:
            return self._at_new_epoch(event.rank, now)
        detail = f"{self.wave} is committed, yet rank {event.rank} {answer.outcome} it"
        return [Alert(Reason.EPOCH_DISAGREES, detail)]

    def _state(self, event: FromRank, now: float) -> list[CoordinatorAction]:
        answer = event.message
        assert isinstance(answer, RankState)
        if answer.query < self.query:
            return []
        peer = self.peers[event.rank]
        peer.answered, peer.state = True, answer
        if self.pending:
            return []
        ruling = self.ruling([p.state for p in self.peers.values() if p.state is not None])
        if ruling is CoordinatorState.COMMITTED:
            return self._commit_known("found committed", now)
        if ruling is CoordinatorState.ABORTING:
            return self._abort(Reason.WAVE_DROPPED, "found on some ranks only", now)
        return self._enter(
            CoordinatorState.COMMITTING, Reason.RECOVERED, "found prepared on all ranks", now
        )

    # --- local events -----------------------------------------------------------------------------

    def _cancel(self, event: CancelWave, now: float) -> list[CoordinatorAction]:
        return self._abort(event.reason, "before the votes were in", now)

    def _connected(self, event: RankConnected, now: float) -> list[CoordinatorAction]:
        peer = self.peers[event.rank]
        same_life = peer.incarnation == event.incarnation
        peer.incarnation, peer.stream, peer.lost = event.incarnation, event.stream, False
        if self.state is CoordinatorState.PREPARING and not same_life:
            return self._abort(Reason.RANK_LOST, f"rank {event.rank} began a new life", now)
        # What waits for the store goes out with a tick, once that has it.
        if peer.answered or not peer.times_asked:
            return []
        return [self._ask(event.rank, peer, now)]

    def _lost_preparing(self, event: RankLost, now: float) -> list[CoordinatorAction]:
        self.peers[event.rank].lost = True
        return self._abort(Reason.RANK_LOST, f"rank {event.rank} is not heard", now)

    def _lost(self, event: RankLost, now: float) -> list[CoordinatorAction]:
        self.peers[event.rank].lost = True
        return self._watch(now)

    def _progress(self, event: GroupProgress, now: float) -> list[CoordinatorAction]:
        if event.step > self._step:
            self._step, self._stepped_at = event.step, now
        return []

    def _tick(self, _event: object, now: float) -> list[CoordinatorAction]:
        actions = self._watch(now)
        for rank, peer in self.peers.items():
            if not peer.answered and now >= peer.resend_at:
                actions.append(self._ask(rank, peer, now))
        return actions

    # --- watchdogs (R14) ----------------------------------------------------------------------------

    def _watch(self, now: float) -> list[CoordinatorAction]:
        """Every state has a deadline; what it leads to depends on whether the group can answer at all."""
        timing, waited = self.timing, now - self._entered_at
        if not self.pending:
            return []
        lost = [rank for rank in self.pending if self.peers[rank].lost]
        if lost:
            return self._stall(Reason.RANK_LOST, f"ranks {lost} are not heard", now)
        if self.is_kept_back():
            # The ranks' time to answer begins when they can be asked.
            self._entered_at, self._entered_step = now, self._step
            return self._stall(
                Reason.STORE_UNAVAILABLE, "what its messages rest on is not stored yet", now
            )
        if self.state is CoordinatorState.PREPARING:
            if waited < timing.prepare_deadline_s:
                return self._set_health(None)
            detail = f"no vote from ranks {list(self.pending)} in {timing.prepare_deadline_s:g} s"
            return self._abort(Reason.PREPARE_DEADLINE, detail, now)
        if self.state is not CoordinatorState.RECOVERING and self.is_idle(now):
            detail = f"no step for {now - self._stepped_at:.0f} s"
            return self._set_health(WaveHealth(self.wave, False, Reason.NO_STEPS, detail))
        steps = self._step - self._entered_step
        if self.state is CoordinatorState.COMMITTING:
            if waited < timing.commit_deadline_s or steps < timing.commit_deadline_steps:
                return self._set_health(None)
            return self._abort(
                Reason.GATE_DEADLINE, f"not agreed in {waited:.0f} s and {steps} steps", now
            )
        needs_steps = self.state is not CoordinatorState.RECOVERING
        if waited < timing.stall_after_s or (needs_steps and steps < timing.stall_after_steps):
            return self._set_health(None)
        reason = {
            CoordinatorState.RECOVERING: Reason.RECOVERY_DEADLINE,
            CoordinatorState.ABORTING: Reason.ABORT_DEADLINE,
            CoordinatorState.COMMITTED: Reason.GATE_DEADLINE,
        }[self.state]
        return self._stall(
            reason, f"no answer from ranks {list(self.pending)} in {waited:.0f} s", now
        )

    def _stall(self, reason: Reason, detail: str, now: float) -> list[CoordinatorAction]:
        if self.gives_up():
            return self._aborted(now)
        return self._set_health(WaveHealth(self.wave, True, reason, detail))

    def _set_health(self, health: WaveHealth | None) -> list[CoordinatorAction]:
        """Report a change of health once; seconds in the detail do not make it another."""
        before = self.health
        if (before and before.reason) == (health and health.reason):
            return []
        self.health = health
        return [health if health is not None else WaveHealth(self.wave, False, None)]

    # --- small parts ----------------------------------------------------------------------------

    def _abort(self, reason: Reason, detail: str, now: float) -> list[CoordinatorAction]:
        return self._enter(CoordinatorState.ABORTING, reason, detail, now)

    def _enter(
        self, state: CoordinatorState, reason: Reason, detail: str, now: float
    ) -> list[CoordinatorAction]:
        """Move, and ask every rank the new state's question."""
        self.state, self.reason, self.detail = state, reason, detail
        self._entered_at, self._entered_step = now, self._step
        actions = self._set_health(None)
        for rank, peer in self.peers.items():
            peer.answered = state is CoordinatorState.ABORTED
            peer.wait_s, peer.times_asked = 0.0, 0
            if not peer.answered:
                actions.append(self._ask(rank, peer, now))
        return actions

    def _ask(self, rank: EpRank, peer: Peer, now: float) -> SendToRank:
        peer.wait_s = min(max(2 * peer.wait_s, self.timing.resend_s), self.timing.resend_max_s)
        peer.resend_at = now + peer.wait_s
        peer.asked_on = peer.stream
        peer.times_asked += 1
        return SendToRank(rank, peer.stream, self._question())

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
