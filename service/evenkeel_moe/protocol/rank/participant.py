"""A rank's half of the switch: one deployment on one rank, from Prepare to the swap.

Rule 1: which event may move which state lives in `tables.PARTICIPANT`; a method named there does
one move and nothing else moves the state. Rules R1-R17 are in docs/protocol.md.

The machine holds no lock and reads no clock. Two threads of a rank meet in it, the engine's
(polls, swaps, reloads) and the network's (messages): the shell holds one lock around `handle`,
`snapshot` and the gate, and carries the returned actions out in order.
"""

from collections import deque
from collections.abc import Sequence

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantAction, ParticipantState, WaveOutcome
from evenkeel_moe.protocol.rank.prepare_validation import screen
from evenkeel_moe.protocol.rank.wave_memory import EndedWaves, HeldWave, PollView
from evenkeel_moe.protocol.transitions import IGNORED, ILLEGAL, PARTICIPANT, PARTICIPANT_OTHER_WAVE

__all__ = ["Participant", "PollView"]

_STAGING, _ABORTED = ParticipantState.STAGING, ParticipantState.ABORTED


class Participant:
    """One deployment on one rank.

    Args:
        identity: this life of the rank; its generation fences every wave (R1).
        shape: the deployment's.
        placement: map the group starts on; epoch: its number, equal on all ranks.
        weights_version: equal on all ranks; checksums: unsigned 64-bit, layer-major (L * E) (R4).
        staging_bytes: room for one wave's share of this rank.
        drop_after_s: silence of leaders after which a rank that is not armed asks the group to drop.
        observe_only: refuse every wave.
    """

    def __init__(
        self,
        identity: msg.RankIdentity,
        shape: ModelShape,
        placement: Placement,
        *,
        epoch: Epoch,
        weights_version: int,
        checksums: Sequence[int] = (),
        staging_bytes: int,
        drop_after_s: float = 30.0,
        observe_only: bool = False,
    ) -> None:
        self.identity = identity
        self.shape = shape
        self.placement = placement
        """The map this rank routes by; replaced only by a swap."""
        self.epoch = epoch
        self.weights_version = weights_version
        self.checksums = tuple(checksums)
        self.staging_bytes = staging_bytes
        self.drop_after_s = drop_after_s
        self.observe_only = observe_only
        self.state = ParticipantState.IDLE
        self.leader: msg.Leader | None = None
        """Newest leader heard; its term is bound to its id (R2)."""
        self.step = 0
        """step_boundary calls as of the last poll; set by the gate."""
        self.held: HeldWave | None = None
        """The wave held; None exactly in IDLE."""
        self.poll: PollView | None = None
        """What the poll in flight took of us; None when no poll is in flight."""
        self.last_wave: WaveKey | None = None
        self.last_outcome: WaveOutcome | None = None
        self.reloading = False
        """A reload was requested and has not been reported; waves are refused meanwhile."""
        self._ended = EndedWaves()
        self._heard_at: float | None = None
        self._stream = 0
        self._story: deque[tuple[ParticipantState, str]] = deque(maxlen=16)

    # --- the one door ---------------------------------------------------------------------------

    def handle(self, event: object, now: float) -> list[ParticipantAction]:
        """Take one event and return what the shell must do, in order.

        Args:
            event: `FromController` or a local event of the table.
            now: monotonic seconds.

        Raises:
            IllegalEvent: a local event the table forbids; never for what a controller sent.
        """
        if isinstance(event, msg.FromController):
            message = event.message
            if not self.accepts_leader(message.leader):
                assert self.leader is not None
                return [
                    msg.SendToController(msg.TermRefused(self.identity, self.leader), event.stream)
                ]
            self.leader = message.leader
            self._heard_at = now
            self._stream = event.stream
            return self._dispatch(message)
        return self._dispatch(event)

    def snapshot(self, now: float) -> PollView:
        """What the poll beginning now takes of this rank; at most one poll may be in flight."""
        wave = self.wave
        armed = self.state is ParticipantState.ARMED and wave is not None
        self.poll = PollView(
            armed_epoch=self.epoch + 1 if armed else 0,
            fingerprint=wave.fingerprint if armed and wave is not None else 0,
            want_drop=not armed and self.leaderless(now),
            wave=wave,
        )
        return self.poll

    @property
    def story(self) -> tuple[str, ...]:
        """The last moves, oldest first, as `state+event`."""
        return tuple(f"{state}+{event}" for state, event in self._story)

    @property
    def prepare(self) -> msg.Prepare | None:
        """The Prepare of the wave held; None exactly in IDLE."""
        return None if self.held is None else self.held.prepare

    @property
    def wave(self) -> WaveKey | None:
        """The wave held; None exactly in IDLE."""
        return None if self.held is None else self.held.prepare.wave

    @property
    def next_placement(self) -> Placement | None:
        """The map of the wave held; None exactly in IDLE."""
        return None if self.held is None else self.held.placement

    # --- predicates: one rule each ---------------------------------------------------------------

    def accepts_leader(self, leader: msg.Leader) -> bool:
        """R2: no lower term, and a term belongs to the first leader id that used it."""
        known = self.leader
        return known is None or leader.term > known.term or leader == known

    def refusal(self, prepare: msg.Prepare) -> tuple[Reason, str] | None:
        """Why a Prepare cannot be taken while idle; None if it can."""
        if self.observe_only:
            return Reason.OBSERVE_ONLY, "this rank takes no waves"
        ended = self._ended.outcome(prepare.wave)
        if ended is not None:
            return Reason.WAVE_DROPPED, f"the wave already ended here as {ended}"
        if prepare.wave.generation != self.identity.generation:
            return Reason.GENERATION_CHANGED, f"this group is {self.identity.generation}"
        if self.is_stale(prepare):
            return (
                Reason.STALE_BASE,
                f"based on epoch {prepare.base_epoch}, this rank is at {self.epoch}",
            )
        if self.is_of_other_weights(prepare):
            return (
                Reason.WEIGHTS_VERSION_CHANGED,
                f"for weights {prepare.wave.weights_version}, this rank has {self.weights_version}"
                + (", a reload is under way" if self.reloading else ""),
            )
        return screen(prepare, self.placement, self.identity.rank, self.shape, self.staging_bytes)

    def is_stale(self, prepare: msg.Prepare) -> bool:
        """R3: a wave builds on exactly the epoch this rank is at."""
        return prepare.base_epoch != self.epoch

    def is_of_other_weights(self, prepare: msg.Prepare) -> bool:
        """R4: a wave carries one weights version; none is taken while a reload is under way."""
        return self.reloading or prepare.wave.weights_version != self.weights_version

    def must_wait_for_poll(self) -> bool:
        """R7 (and R4): a poll in flight took this rank as armed, so the wave may pass yet."""
        return self.poll is not None and self.poll.armed_epoch > 0

    def leaderless(self, now: float) -> bool:
        """R6: no leader was heard for `drop_after_s`."""
        return self._heard_at is None or now - self._heard_at >= self.drop_after_s

    # --- Prepare --------------------------------------------------------------------------------

    def _begin(self, prepare: msg.Prepare) -> list[ParticipantAction]:
        wave = prepare.wave
        if self._ended.outcome(wave) is WaveOutcome.SWAPPED:
            return [self._reply(self._ack(wave))]
        refusal = self.refusal(prepare)
        if refusal is not None:
            # Remembered: a repeat of this Prepare must not be taken once the cause is gone.
            self._ended.add(wave, WaveOutcome.REFUSED)
            return [self._reply(msg.Vote(wave, False, *refusal))]
        placement = self.placement.with_rows(prepare.body.layers, prepare.body.rows)
        _ = (
            placement.digest
        )  # hashed now: the step that swaps waits for nothing it need not wait for
        self.held = HeldWave(
            prepare,
            placement,
            msg.Vote(wave, False, Reason.WAVE_DROPPED, "given up here"),
            vote_stream=self._stream,
            ack_stream=self._stream,
        )
        self.state = _STAGING
        return [msg.StartStaging(prepare)]

    def _vote_later(self, _prepare: msg.Prepare) -> list[ParticipantAction]:
        self._holding.vote_stream = self._stream
        return []

    def _vote_again(self, prepare: msg.Prepare) -> list[ParticipantAction]:
        return [self._reply(msg.Vote(prepare.wave, True))]

    def _refuse_again(self, _prepare: msg.Prepare) -> list[ParticipantAction]:
        return [self._reply(self._holding.refusal)]

    def _busy(self, prepare: msg.Prepare) -> list[ParticipantAction]:
        reason = Reason.TRANSPORT_NOT_DRAINED if self.state is _ABORTED else Reason.BUSY
        return [
            self._reply(msg.Vote(prepare.wave, False, reason, f"{self.state} with {self.wave}"))
        ]

    def _vote_yes(self, event: msg.StagingFinished) -> list[ParticipantAction]:
        self.state = ParticipantState.PREPARED
        return [msg.SendToController(msg.Vote(event.wave, True), self._holding.vote_stream)]

    def _vote_no(self, event: msg.StagingFailed) -> list[ParticipantAction]:
        return self._refuse(event.reason, event.detail, WaveOutcome.REFUSED)

    def _refuse(self, reason: Reason, detail: str, outcome: WaveOutcome) -> list[ParticipantAction]:
        held = self._holding
        held.refusal = msg.Vote(held.prepare.wave, False, reason, detail)
        return [msg.SendToController(held.refusal, held.vote_stream), *self._give_up(outcome)]

    # --- Commit ---------------------------------------------------------------------------------

    def _arm(self, commit: msg.Commit) -> list[ParticipantAction]:
        """R5: Commit only arms; nothing reachable changes."""
        self.state = ParticipantState.ARMED
        return self._arm_again(commit)

    def _arm_again(self, _commit: msg.Commit) -> list[ParticipantAction]:
        self._holding.ack_stream = self._stream
        return []

    def _gone(self, event: msg.Commit | msg.Abort) -> list[ParticipantAction]:
        """The wave is not held, or given up: an unknown one can never begin here after this."""
        wave = event.wave
        if wave == self.wave:
            return [self._reply(self._abort_answer())]
        outcome = self._ended.add(wave, WaveOutcome.DROPPED)
        if outcome is WaveOutcome.SWAPPED and isinstance(event, msg.Commit):
            return [self._reply(self._ack(wave))]
        return [self._reply(msg.AbortAnswer(wave, self.epoch, outcome, drained=True))]

    # --- Abort ----------------------------------------------------------------------------------

    def _abort(self, _abort: msg.Abort) -> list[ParticipantAction]:
        self._holding.abort_stream = self._stream
        actions = self._give_up(WaveOutcome.DROPPED)
        return [*actions, self._reply(self._abort_answer())]

    def _abort_again(self, abort: msg.Abort) -> list[ParticipantAction]:
        self._holding.abort_stream = self._stream
        return self._gone(abort)

    def _abort_armed(self, abort: msg.Abort) -> list[ParticipantAction]:
        """R7: the answer waits until every poll that took this rank as armed has resolved."""
        return self._abort_later(abort) if self.must_wait_for_poll() else self._abort(abort)

    def _abort_later(self, _abort: msg.Abort) -> list[ParticipantAction]:
        self._holding.abort_stream = self._stream
        return []

    def is_drained(self) -> bool:
        """R7: no byte of the wave held is still on its way."""
        return self.state not in (_STAGING, _ABORTED)

    def _give_up(self, outcome: WaveOutcome) -> list[ParticipantAction]:
        self._holding.outcome = outcome
        self.state = _ABORTED
        return [msg.CancelStaging(self._holding.prepare.wave)]

    def _drained(self, event: msg.TransportDrained) -> list[ParticipantAction]:
        held = self._end(self._holding.outcome)
        if held.abort_stream is None:
            return []
        answer = msg.AbortAnswer(event.wave, self.epoch, held.outcome, drained=True)
        return [msg.SendToController(answer, held.abort_stream)]

    # --- the gate -------------------------------------------------------------------------------

    def _resolve(self, _event: object) -> list[ParticipantAction]:
        self.poll = None
        return []

    def _resolve_armed(self, _event: object) -> list[ParticipantAction]:
        """Nothing passed: what had to wait for this poll happens now (R4, R7)."""
        waited, held = self.must_wait_for_poll(), self._holding
        self.poll = None
        if not waited or (held.abort_stream is None and not self.reloading):
            return []
        actions = self._give_up(WaveOutcome.DROPPED)
        if held.abort_stream is not None:
            actions.append(msg.SendToController(self._abort_answer(), held.abort_stream))
        if self.reloading:
            actions.append(msg.PermitReload())
        return actions

    def _drop_together(self, _event: object) -> list[ParticipantAction]:
        """R6: every rank took the same decision on what it held at the snapshot."""
        view, self.poll = self.poll, None
        if view is None or view.wave is None or view.wave != self.wave:
            return []
        return self._give_up(WaveOutcome.DROPPED)

    def _pass(self, event: msg.PollPassed) -> list[ParticipantAction]:
        view, self.poll = self.poll, None
        if view is None or view.wave != self.wave or event.epoch != self.epoch + 1:
            detail = f"passed to epoch {event.epoch}, rank at {self.epoch} was seen as {view}"
            return [msg.LeaveGroup(Reason.EPOCH_MISMATCH, detail)]
        self.state = ParticipantState.SWAPPING
        return [msg.Swap(self._holding.prepare.wave, event.epoch)]

    def _swapped(self, event: msg.SwapFinished) -> list[ParticipantAction]:
        held = self._holding
        if event.wave != self.wave or event.placement_digest != held.placement.digest:
            return [msg.LeaveGroup(Reason.EPOCH_MISMATCH, f"swapped {event}, held {self.wave}")]
        self.placement, self.epoch = held.placement, Epoch(self.epoch + 1)
        self._ended.clear()
        self._end(WaveOutcome.SWAPPED)
        actions: list[ParticipantAction] = [
            msg.SendToController(self._ack(event.wave, event.swap_s), held.ack_stream)
        ]
        if held.abort_stream is not None:
            answer = msg.AbortAnswer(event.wave, self.epoch, WaveOutcome.SWAPPED, drained=True)
            actions.append(msg.SendToController(answer, held.abort_stream))
        if self.reloading:
            actions.append(msg.PermitReload())
        return actions

    def _swap_failed(self, event: msg.SwapFailed) -> list[ParticipantAction]:
        return [msg.LeaveGroup(Reason.GATE_FAILED, f"swap failed: {event.detail}")]

    # --- reloads (R4) ---------------------------------------------------------------------------

    def _permit(self, _event: msg.ReloadRequested) -> list[ParticipantAction]:
        self.reloading = True
        return [msg.PermitReload()]

    def _reload_later(self, _event: msg.ReloadRequested) -> list[ParticipantAction]:
        self.reloading = True
        return []

    def _reload_drops(self, _event: msg.ReloadRequested) -> list[ParticipantAction]:
        self.reloading = True
        return [*self._drop_for_reload(), msg.PermitReload()]

    def _reload_armed(self, event: msg.ReloadRequested) -> list[ParticipantAction]:
        """The poll in flight may pass the wave on every rank: the engine waits for it to resolve."""
        if self.must_wait_for_poll():
            return self._reload_later(event)
        return self._reload_drops(event)

    def _reloaded(self, event: msg.WeightsReloaded) -> list[ParticipantAction]:
        self.reloading = False
        if event.weights_version == self.weights_version:
            return []  # The engine gave the reload up.
        self.weights_version = event.weights_version
        self.checksums = event.checksums
        if self.leader is None:
            return []
        return [self._reply(self._rank_state())]

    def _reloaded_drops(self, event: msg.WeightsReloaded) -> list[ParticipantAction]:
        dropped = self._drop_for_reload()
        return [*dropped, *self._reloaded(event)]

    def _reloaded_armed(self, event: msg.WeightsReloaded) -> list[ParticipantAction]:
        if self.must_wait_for_poll():
            return self._reloaded_torn(event)
        return self._reloaded_drops(event)

    def _reloaded_torn(self, event: msg.WeightsReloaded) -> list[ParticipantAction]:
        """The others may swap in bytes of the old weights: only a restart makes this group whole."""
        detail = f"weights {event.weights_version} were loaded without permission under a poll"
        return [msg.LeaveGroup(Reason.WEIGHTS_VERSION_CHANGED, detail)]

    def _drop_for_reload(self) -> list[ParticipantAction]:
        if self.state is _STAGING:
            reason, detail = Reason.WEIGHTS_VERSION_CHANGED, "a reload is under way"
            return self._refuse(reason, detail, WaveOutcome.DROPPED)
        return self._give_up(WaveOutcome.DROPPED)

    # --- what the engine decides ------------------------------------------------------------------

    def _disable(self, _event: msg.MigrationDisabled) -> list[ParticipantAction]:
        self.observe_only = True
        return []

    def _follow_engine(self, event: msg.EngineRebalanced) -> list[ParticipantAction]:
        self.placement, self.epoch = event.placement, Epoch(self.epoch + 1)
        return []

    # --- small parts ----------------------------------------------------------------------------

    def _dispatch(self, event: msg.ControllerMessage | object) -> list[ParticipantAction]:
        kind = type(event)
        cell = PARTICIPANT.get((self.state, kind), ILLEGAL)
        if self.held is not None and kind in PARTICIPANT_OTHER_WAVE:
            if getattr(event, "wave", None) != self.wave:
                cell = PARTICIPANT_OTHER_WAVE[kind]
        if cell is IGNORED:
            return []
        if cell is ILLEGAL:
            raise IllegalEvent("participant", self.state, event, self.story)
        self._story.append((self.state, kind.__name__))
        actions: list[ParticipantAction] = getattr(self, cell)(event)
        return actions

    def _reply(self, message: msg.RankMessage) -> msg.SendToController:
        return msg.SendToController(message, self._stream)

    @property
    def _holding(self) -> HeldWave:
        assert self.held is not None
        return self.held

    def _end(self, outcome: WaveOutcome) -> HeldWave:
        held, wave = self._holding, self._holding.prepare.wave
        self.last_wave, self.last_outcome = wave, outcome
        self._ended.add(wave, outcome)
        self.held = None
        self.state = ParticipantState.IDLE
        return held

    def _abort_answer(self) -> msg.AbortAnswer:
        held = self._holding
        return msg.AbortAnswer(held.prepare.wave, self.epoch, held.outcome, self.is_drained())

    def _ack(self, wave: WaveKey, swap_s: float = 0.0) -> msg.Ack:
        return msg.Ack(wave, self.epoch, self.placement.digest, swap_s)

    def _answer(self, query: msg.QueryState) -> list[ParticipantAction]:
        return [self._reply(self._rank_state(query))]

    def _rank_state(self, query: msg.QueryState | None = None) -> msg.RankState:
        return msg.RankState(
            identity=self.identity,
            state=self.state,
            wave=self.wave,
            epoch=self.epoch,
            placement_digest=self.placement.digest,
            weights_version=self.weights_version,
            drained=self.is_drained(),
            last_wave=self.last_wave,
            last_outcome=self.last_outcome,
            placement=self.placement if query is not None and query.want_placement else None,
            checksums=self.checksums if query is not None and query.want_checksums else None,
            highest_term=self.leader.term if self.leader is not None else 0,
            step=self.step,
            query=query.query if query is not None else 0,
        )
