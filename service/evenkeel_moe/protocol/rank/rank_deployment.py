"""One deployment on one rank: its placement, the wave it holds, and the reports about both."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState, WaveOutcome
from evenkeel_moe.protocol.rank.prepare_validation import prepare_refusal
from evenkeel_moe.protocol.rank.wave_memory import EndedWaves, HeldWave, PollView


class RankDeployment:
    """One deployment on one rank. Only `Participant` changes it, by the events it handles.

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
