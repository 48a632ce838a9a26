"""A rank's machine: one deployment on one rank, from Prepare to the swap.

The table `transitions.PARTICIPANT` decides which event may change which state. Rules R1 to R17 are
in docs/protocol.md.

The machine holds no lock and reads no clock. Two threads of a rank use it: the engine's (polls,
swaps, reloads) and the network's (messages). The shell holds one lock around `handle`, `snapshot`
and the gate, and carries the returned actions out in order.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantAction, ParticipantState, WaveOutcome
from evenkeel_moe.protocol.rank.prepare_validation import prepare_refusal
from evenkeel_moe.protocol.rank.wave_memory import EndedWaves, HeldWave, PollView
from evenkeel_moe.protocol.transitions import IGNORED, ILLEGAL, PARTICIPANT, PARTICIPANT_OTHER_WAVE

_STAGING, _ABORTED = ParticipantState.STAGING, ParticipantState.ABORTED
_DROPPED = WaveOutcome.DROPPED


class Participant:
    """One deployment on one rank: its placement, the wave it holds, and its moves.

    The shell sets `disabled` and `step`, and the gate `observe_only`; they move nothing.

    Args:
        identity: this process of the rank; its generation fences every wave (R1).
        placement: the placement the group starts with.
        epoch: its epoch, equal on all ranks.
        weights_version: equal on all ranks.
        checksums: (L * E) unsigned 64-bit, layer-major (R4).
        staging_bytes: space for this rank's share of a wave.
        drop_after_s: time without a leader after which a rank that is not armed wants to drop.
        observe_only: refuse every wave, always.
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
        """The placement this rank routes by; only a swap or the engine itself replaces it."""
        self.epoch = epoch
        self.weights_version = weights_version
        self.checksums = tuple(checksums)
        self.staging_bytes = staging_bytes
        self.drop_after_s = drop_after_s
        self.observe_only = observe_only
        """Refuse every wave, until this process ends."""
        self.disabled = False
        """Refuse every wave while the rank has a fault; a wave it already holds goes on."""
        self.state = ParticipantState.IDLE
        self.leader: msg.Leader | None = None
        """The newest leader heard; its term belongs to its id (R2)."""
        self.step = 0
        """`step_boundary` calls so far; the shell sets it."""
        self.held: HeldWave | None = None
        """The wave it holds; None exactly in IDLE."""
        self.poll: PollView | None = None
        """The view the poll in flight took of this rank; None if no poll is in flight."""
        self.last_wave: WaveKey | None = None
        self.last_outcome: WaveOutcome | None = None
        self.reloading = False
        """True from a request to reload until its report; waves are refused meanwhile."""
        self._ended = EndedWaves()
        self._ack: msg.Ack | None = None
        """The Ack of the last swap; None before the first."""
        self._heard_at: float | None = None
        self._stream = 0
        self._story: deque[tuple[ParticipantState, str]] = deque(maxlen=16)

    @property
    def story(self) -> tuple[str, ...]:
        """The last events, oldest first, as `state+event`."""
        return tuple(f"{state}+{event}" for state, event in self._story)

    @property
    def prepare(self) -> msg.Prepare | None:
        """The Prepare of the held wave; None exactly in IDLE."""
        return None if self.held is None else self.held.prepare

    @property
    def wave(self) -> WaveKey | None:
        """The held wave; None exactly in IDLE."""
        return None if self.held is None else self.held.prepare.wave

    @property
    def next_placement(self) -> Placement | None:
        """The placement after the held wave; None exactly in IDLE."""
        return None if self.held is None else self.held.placement

    # --- events -----------------------------------------------------------------------------------

    def handle(self, event: object, now: float) -> list[ParticipantAction]:
        """Take one event and return the actions for the shell, in order.

        Args:
            event: `FromController` or a local event of the table.
            now: monotonic seconds.

        Raises:
            IllegalEvent: the table forbids a local event; never raised for a controller's message.
        """
        if not isinstance(event, msg.FromController):
            return self._dispatch(event)
        message = event.message
        if not self.accepts_leader(message.leader):
            assert self.leader is not None
            refusal = msg.TermRefused(self.identity, self.leader)
            return [msg.SendToController(refusal, event.stream)]
        self.leader = message.leader
        self._heard_at = now
        self._stream = event.stream
        return self._dispatch(message)

    def _dispatch(self, event: object) -> list[ParticipantAction]:
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

    def snapshot(self, now: float) -> PollView:
        """Return the view for the poll that begins now; only one poll may be in flight."""
        armed = self.held if self.state is ParticipantState.ARMED else None
        self.poll = PollView(
            armed_epoch=self.epoch + 1 if armed is not None else 0,
            fingerprint=armed.fingerprint if armed is not None else 0,
            want_drop=armed is None and self.leaderless(now),
            wave=self.wave,
        )
        return self.poll

    # --- Prepare ----------------------------------------------------------------------------------

    def _begin(self, prepare: msg.Prepare) -> list[ParticipantAction]:
        wave = prepare.wave
        if self._ended.outcome(wave) is WaveOutcome.SWAPPED:
            return [self._reply(self._ack_again(wave))]
        refusal = self.refusal(prepare)
        if refusal is not None:
            # Remembered, so that a late copy of this Prepare is refused too.
            self._ended.add(wave, WaveOutcome.REFUSED)
            return [self._reply(msg.Vote(wave, False, *refusal))]
        placement = self.placement.with_rows(prepare.body.layers, prepare.body.rows)
        _ = placement.digest  # Computed and cached here, so that the swap need not wait for it.
        given_up = msg.Vote(wave, False, Reason.WAVE_DROPPED, "given up here")
        self.held = HeldWave(prepare, placement, given_up, self._stream)
        self.state = _STAGING
        return [msg.StartStaging(prepare)]

    def _vote_later(self, _prepare: msg.Prepare) -> list[ParticipantAction]:
        self._holding.stream = self._stream
        return []

    def _vote_again(self, prepare: msg.Prepare) -> list[ParticipantAction]:
        self._holding.stream = self._stream
        return [self._reply(msg.Vote(prepare.wave, True))]

    def _refuse_again(self, _prepare: msg.Prepare) -> list[ParticipantAction]:
        return [self._reply(self._holding.refusal)]

    def _busy(self, prepare: msg.Prepare) -> list[ParticipantAction]:
        reason = Reason.TRANSPORT_NOT_DRAINED if self.state is _ABORTED else Reason.BUSY
        detail = f"{self.state} with {self.wave}"
        return [self._reply(msg.Vote(prepare.wave, False, reason, detail))]

    def _vote_yes(self, event: msg.StagingFinished) -> list[ParticipantAction]:
        self.state = ParticipantState.PREPARED
        return [msg.SendToController(msg.Vote(event.wave, True), self._holding.stream)]

    def _vote_no(self, event: msg.StagingFailed) -> list[ParticipantAction]:
        return self._refuse(event.reason, event.detail, WaveOutcome.REFUSED)

    def _refuse(self, reason: Reason, detail: str, outcome: WaveOutcome) -> list[ParticipantAction]:
        held = self._holding
        held.refusal = msg.Vote(held.prepare.wave, False, reason, detail)
        return [msg.SendToController(held.refusal, held.stream), *self._give_up(outcome)]

    # --- Commit -----------------------------------------------------------------------------------

    def _arm(self, commit: msg.Commit) -> list[ParticipantAction]:
        """R5: Commit only arms the rank; nothing the router reaches changes."""
        self.state = ParticipantState.ARMED
        return self._arm_again(commit)

    def _arm_again(self, _commit: msg.Commit) -> list[ParticipantAction]:
        self._holding.stream = self._stream
        return []

    def _not_held(self, event: msg.Commit | msg.Abort) -> list[ParticipantAction]:
        """The wave has ended or was given up; an unknown wave can never begin after this answer."""
        wave = event.wave
        if wave == self.wave:
            return [self._reply(self._abort_answer())]
        outcome = self._ended.add(wave, _DROPPED)
        if outcome is WaveOutcome.SWAPPED and isinstance(event, msg.Commit):
            return [self._reply(self._ack_again(wave))]
        return [self._reply(msg.AbortAnswer(wave, self.epoch, outcome, drained=True))]

    # --- Abort ------------------------------------------------------------------------------------

    def _abort(self, _abort: msg.Abort) -> list[ParticipantAction]:
        self._holding.abort_stream = self._stream
        actions = self._give_up(_DROPPED)
        return [*actions, self._reply(self._abort_answer())]

    def _abort_again(self, abort: msg.Abort) -> list[ParticipantAction]:
        self._holding.abort_stream = self._stream
        return self._not_held(abort)

    def _abort_armed(self, abort: msg.Abort) -> list[ParticipantAction]:
        """R7: the answer waits for every poll that took this rank as armed."""
        return self._abort_later(abort) if self.must_wait_for_poll() else self._abort(abort)

    def _abort_later(self, _abort: msg.Abort) -> list[ParticipantAction]:
        self._holding.abort_stream = self._stream
        return []

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

    # --- the gate ---------------------------------------------------------------------------------

    def _resolve(self, _event: object) -> list[ParticipantAction]:
        self.poll = None
        return []

    def _resolve_armed(self, _event: object) -> list[ParticipantAction]:
        """Nothing passed: do what had to wait for this poll (R4, R7)."""
        held, self.poll = self._holding, None
        if held.abort_stream is None and not self.reloading:
            return []
        actions = self._drop_for_reload() if self.reloading else self._give_up(_DROPPED)
        if held.abort_stream is not None:
            actions.append(msg.SendToController(self._abort_answer(), held.abort_stream))
        return [*actions, *self._permit_if_reloading()]

    def _drop_together(self, _event: object) -> list[ParticipantAction]:
        """R6: drop the wave of the snapshot, as every other rank does."""
        view, self.poll = self.poll, None
        if view is None or view.wave != self.wave:
            return []
        return self._give_up(_DROPPED)

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
        self._ack = msg.Ack(event.wave, self.epoch, self.placement.digest, event.swap_s)
        actions: list[ParticipantAction] = [msg.SendToController(self._ack, held.stream)]
        if held.abort_stream is not None:
            answer = msg.AbortAnswer(event.wave, self.epoch, WaveOutcome.SWAPPED, drained=True)
            actions.append(msg.SendToController(answer, held.abort_stream))
        return [*actions, *self._permit_if_reloading()]

    def _swap_elsewhere(self, event: msg.EngineRebalanced) -> list[ParticipantAction]:
        """The engine ended the wave with another map: it ends as dropped.

        If the engine has switched layers all the same, its map is that of a new epoch.
        """
        if event.placement.digest != self.placement.digest:
            self.placement, self.epoch = event.placement, Epoch(self.epoch + 1)
            self._ended.clear()
        held = self._end(_DROPPED)
        answer = msg.AbortAnswer(held.prepare.wave, self.epoch, _DROPPED, drained=True)
        streams = [held.stream]
        if held.abort_stream is not None and held.abort_stream != held.stream:
            streams.append(held.abort_stream)
        sent = [msg.SendToController(answer, stream) for stream in streams]
        return [*sent, *self._permit_if_reloading()]

    def _swap_failed(self, event: msg.SwapFailed) -> list[ParticipantAction]:
        return [msg.LeaveGroup(Reason.GATE_FAILED, f"swap failed: {event.detail}")]

    # --- reloads (R4) -----------------------------------------------------------------------------

    def _permit_if_reloading(self) -> list[ParticipantAction]:
        return [msg.PermitReload()] if self.reloading else []

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
        """The poll in flight may pass the wave on every rank: the engine waits for the result."""
        if self.must_wait_for_poll():
            return self._reload_later(event)
        return self._reload_drops(event)

    def _reloaded(self, event: msg.WeightsReloaded) -> list[ParticipantAction]:
        self.reloading = False
        if event.weights_version == self.weights_version and self.checksums:
            return []  # The engine gave the reload up.
        self.weights_version = event.weights_version
        self.checksums = event.checksums
        return [] if self.leader is None else [self._reply(self._rank_state(None))]

    def _reloaded_drops(self, event: msg.WeightsReloaded) -> list[ParticipantAction]:
        dropped = self._drop_for_reload()
        return [*dropped, *self._reloaded(event)]

    def _reloaded_armed(self, event: msg.WeightsReloaded) -> list[ParticipantAction]:
        if self.must_wait_for_poll():
            return self._reloaded_torn(event)
        return self._reloaded_drops(event)

    def _reloaded_torn(self, event: msg.WeightsReloaded) -> list[ParticipantAction]:
        """Other ranks may swap in bytes of the old weights: only a restart repairs this group."""
        detail = f"weights {event.weights_version} were loaded without permission under a poll"
        return [msg.LeaveGroup(Reason.WEIGHTS_VERSION_CHANGED, detail)]

    def _drop_for_reload(self) -> list[ParticipantAction]:
        """Vote no, also after a yes: no poll can pass the wave without this rank."""
        reason, detail = Reason.WEIGHTS_VERSION_CHANGED, "a reload is under way"
        return self._refuse(reason, detail, _DROPPED)

    # --- decisions of the engine ------------------------------------------------------------------

    def _follow_engine(self, event: msg.EngineRebalanced) -> list[ParticipantAction]:
        self.placement, self.epoch = event.placement, Epoch(self.epoch + 1)
        return []

    # --- rules ------------------------------------------------------------------------------------

    def accepts_leader(self, leader: msg.Leader) -> bool:
        """R2: refuse lower terms; a term belongs to the first leader id that used it."""
        known = self.leader
        return known is None or leader.term > known.term or leader == known

    @property
    def takes_waves(self) -> bool:
        """True unless the rank refuses every wave."""
        return not (self.observe_only or self.disabled)

    def refusal(self, prepare: msg.Prepare) -> tuple[Reason, str] | None:
        """Return the reason why an idle rank cannot take a Prepare; None if it can."""
        wave = prepare.wave
        if not self.takes_waves:
            return Reason.OBSERVE_ONLY, "this rank takes no waves"
        ended = self._ended.outcome(wave)
        if ended is not None:
            return Reason.WAVE_DROPPED, f"the wave already ended here as {ended}"
        if wave.generation != self.identity.generation:
            return Reason.GENERATION_CHANGED, f"this group is {self.identity.generation}"
        if self.is_stale(prepare):
            detail = f"based on epoch {prepare.base_epoch}, this rank is at {self.epoch}"
            return Reason.STALE_BASE, detail
        if self.is_of_other_weights(prepare):
            detail = f"for weights {wave.weights_version}, this rank has {self.weights_version}"
            detail += ", a reload is under way" if self.reloading else ""
            return Reason.WEIGHTS_VERSION_CHANGED, detail
        return self.wave_problem(prepare)

    def wave_problem(self, prepare: msg.Prepare) -> tuple[Reason, str] | None:
        """R4, R17: return what is wrong with the wave itself; None if nothing is."""
        return prepare_refusal(
            prepare,
            self.placement,
            self.identity.rank,
            self.shape,
            self.staging_bytes,
            self.checksums,
        )

    def is_stale(self, prepare: msg.Prepare) -> bool:
        """R3: a wave must be based on the epoch this rank is at."""
        return prepare.base_epoch != self.epoch

    def is_of_other_weights(self, prepare: msg.Prepare) -> bool:
        """R4: a wave is for one weights version, and none is taken during a reload."""
        return self.reloading or prepare.wave.weights_version != self.weights_version

    def must_wait_for_poll(self) -> bool:
        """R4, R7: the poll in flight took this rank as armed, so the wave may still pass."""
        return self.poll is not None and self.poll.armed_epoch > 0

    def leaderless(self, now: float) -> bool:
        """R6: no leader was heard for `drop_after_s`."""
        return self._heard_at is None or now - self._heard_at >= self.drop_after_s

    def is_drained(self) -> bool:
        """R7: no byte of the held wave is in flight."""
        return self.state not in (ParticipantState.STAGING, ParticipantState.ABORTED)

    # --- reports ----------------------------------------------------------------------------------

    @property
    def _holding(self) -> HeldWave:
        assert self.held is not None
        return self.held

    def _abort_answer(self) -> msg.AbortAnswer:
        held = self._holding
        return msg.AbortAnswer(held.prepare.wave, self.epoch, held.outcome, self.is_drained())

    def _ack_again(self, wave: WaveKey) -> msg.Ack:
        """Return the Ack of the last swap once more; the engine may have changed the map since."""
        assert self._ack is not None
        assert self._ack.wave == wave
        return replace(self._ack, swap_s=0.0)

    def _rank_state(self, query: msg.QueryState | None) -> msg.RankState:
        assert self.leader is not None  # It answers a leader's message, or tells one of a reload.
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
            highest_term=self.leader.term,
            step=self.step,
            query=query.query if query is not None else 0,
        )

    def _reply(self, message: msg.RankMessage) -> msg.SendToController:
        return msg.SendToController(message, self._stream)

    def _end(self, outcome: WaveOutcome) -> HeldWave:
        held, wave = self._holding, self._holding.prepare.wave
        self.last_wave, self.last_outcome = wave, outcome
        self._ended.add(wave, outcome)
        self.held = None
        self.state = ParticipantState.IDLE
        return held

    def _answer(self, query: msg.QueryState) -> list[ParticipantAction]:
        return [self._reply(self._rank_state(query))]
