"""The gate: a small all-reduce at a step boundary, by which an EP group decides together.

Each agent has a gate (R9). It counts `step_boundary` calls, tells the shell at which calls to begin
a poll and at which to use its result, and turns results into actions. Every rank uses the poll
begun at call n at call n + D, with 1 <= D <= K, so at most one poll is in flight. The vectors are
reduced with MIN over the ranks; entries x and -x give minimum and maximum.

The engine's thread runs this at every step, usually with one call and no lock::

    if gate.advance():
        with lock:
            if gate.resolve_due:
                event = ...            # wait for the reduction: PollResolved(vector) or PollFailed
                for action in gate.handle(event, now): carry out
            if gate.poll_due:
                vector = gate.begin_poll(now)
                ...                    # start the MIN all-reduce of `vector` in the background

The shell must carry a Swap out at once, and report it to its participant (SwapFinished or
SwapFailed), before it reads `poll_due`.
"""

import hashlib
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol.messages import (
    LeaveGroup,
    ParticipantAction,
    PollDropped,
    PollNotPassed,
    PollPassed,
    RebuildTransport,
)
from evenkeel_moe.protocol.rank.participant import Participant

HEADER = ("minus_wanted_serial", "digest", "minus_digest", "step", "minus_step")
"""The first entries of the vector."""
VIEW = ("armed_epoch", "minus_armed_epoch", "h", "minus_h", "want_drop")
"""The other entries: what the participant says."""

_NEVER = 2**62


@dataclass(frozen=True, eq=False, slots=True)
class PollResolved:
    """The reduction finished, with the same values on every rank."""

    minima: NDArray[np.int64]
    """(10,) int64 - the minimum of each entry over the ranks."""


@dataclass(frozen=True, slots=True)
class PollFailed:
    """The reduction failed or timed out on this rank: the result of the others is unknown (R8)."""

    detail: str


class Gate:
    """The polls of one EP group.

    Args:
        participant: the deployment of this rank.
        poll_every: K, the calls of `advance` between two polls.
        resolve_after: D, the calls from the start of a poll to the use of its result. If D steps
            take less time than the poll, the engine waits for the network.

    Raises:
        InvalidInput: not 1 <= D <= K.
    """

    def __init__(self, participant: Participant, *, poll_every: int, resolve_after: int) -> None:
        if not 1 <= resolve_after <= poll_every:
            raise InvalidInput(f"needs 1 <= D <= K, got D = {resolve_after}, K = {poll_every}")
        self.participant = participant
        self.deployment = participant.identity.deployment
        self.poll_every = poll_every
        self.resolve_after = resolve_after
        self.digest = _digest(self.deployment, poll_every, resolve_after)
        """All ranks must have the same digest before the first poll; also `Hello.gate_digest`."""
        self.calls = 0
        """The `advance` calls since the group started, dummy steps included."""
        self.next_due = _NEVER
        """The call at which a poll begins or is used next; `_NEVER` until the ranks have agreed."""
        self.observe_only = True
        """True while nothing is polled: the ranks' digests differ or were not compared yet."""
        self.left = False
        """True if the rank must leave the group; then nothing is polled any more."""
        self.transport_serial = 0
        """The number of the transfer communicator on which all ranks agreed."""
        self.faults: list[str] = []
        """Errors of ours in a poll; the polling went on all the same."""
        self._wanted_serial = 0
        self._began: int | None = None
        self._step: int | None = None
        """The engine's number of the last step; None if it told none."""

    # --- start of the group -----------------------------------------------------------------------

    def agreement(self) -> NDArray[np.int64]:
        """Return the (2,) int64 to reduce with MIN over the ranks before the first `advance`."""
        number = self._digest_number
        return np.array([number, -number], np.int64)

    def settle(self, minima: NDArray[np.int64]) -> bool:
        """Take the reduced `agreement`; if False, every rank of the group stays observe-only."""
        self.observe_only = not self.agrees(minima)
        self.participant.observe_only = self.participant.observe_only or self.observe_only
        self.next_due = _NEVER if self.observe_only else self._next_poll()
        return not self.observe_only

    def agrees(self, minima: NDArray[np.int64]) -> bool:
        """R9: K, D and the layout are equal on all ranks."""
        return int(minima[0]) == -int(minima[1]) == self._digest_number

    # --- every step -------------------------------------------------------------------------------

    def advance(self, step: int | None = None) -> bool:
        """Count one step boundary; return True if a poll must be used or begun at it.

        Args:
            step: the engine's number of the step before this boundary, the same on all ranks, one
                higher at each boundary. None: the count of boundaries takes its place in the polls.
                Polls begin at equal counts, so the count does not show a boundary that the engine
                left out.

        Raises:
            InvalidInput: the engine left a boundary out.
        """
        self.calls += 1
        if step is not None:
            last, self._step = self._step, step
            if last is not None and step != last + 1 and not self.observe_only:
                raise InvalidInput(f"step {step} came after step {last}: boundaries were left out")
        return self.calls >= self.next_due

    def rest(self) -> None:
        """Count one step boundary at which the engine does not let the gate poll."""
        self.calls += 1
        self._step = None

    @property
    def polling(self) -> bool:
        """True while a poll is in flight."""
        return self._began is not None

    @property
    def resolve_due(self) -> bool:
        """True if the result of the poll in flight must be used at this call."""
        return self._began is not None and self.calls >= self._began + self.resolve_after

    @property
    def poll_due(self) -> bool:
        """True if a poll begins at this call."""
        return (
            not self.observe_only and not self.left and self._began is None and self.is_poll_call()
        )

    def is_poll_call(self) -> bool:
        """R9: polls begin at the same calls on all ranks, even if no rank holds a wave."""
        return self.calls % self.poll_every == 0

    def begin_poll(self, now: float) -> NDArray[np.int64]:
        """Return the vector to reduce with MIN over the ranks, from a snapshot of the participant.

        Returns:
            (10,) int64 - HEADER, then VIEW.
        """
        number = self._digest_number
        step = self.calls if self._step is None else self._step
        header = [-self._wanted_serial, number, -number, step, -step]
        try:
            view = self.participant.snapshot(now)
            armed, h, want_drop = view.armed_epoch, view.fingerprint, int(view.want_drop)
        except Exception as error:  # A bug of ours must not stop the polling (R9).
            self.faults.append(f"snapshot of {self.deployment}: {error!r}")
            self.participant.observe_only = True
            armed = h = want_drop = 0
        self._began = self.calls
        self.next_due = self.calls + self.resolve_after
        return np.array([*header, armed, -armed, h, -h, want_drop], np.int64)

    def handle(self, event: PollResolved | PollFailed, now: float) -> list[ParticipantAction]:
        """Use the result of the poll in flight, at the call for which `resolve_due` is true."""
        self._began = None
        self.next_due = self._next_poll()
        match event:
            case PollFailed(detail=detail):
                return self.on_failure(detail)
            case PollResolved(minima=minima):
                return self._resolve(minima.tolist(), now)
            case _:
                assert_never(event)

    def on_failure(self, detail: str) -> list[ParticipantAction]:
        """R8: unknown does not mean "not agreed": the rank leaves, and the group restarts."""
        return self._leave(detail)

    def request_rebuild(self, serial: int) -> None:
        """Ask all ranks to replace the communicator `serial`, which this rank aborted (R10)."""
        self._wanted_serial = max(self._wanted_serial, serial + 1)

    # --- results ----------------------------------------------------------------------------------

    def _resolve(self, minima: list[int], now: float) -> list[ParticipantAction]:
        if (
            len(minima) != len(HEADER) + len(VIEW)
            or not minima[1] == -minima[2] == self._digest_number
        ):
            return self._leave(
                f"another gate answered: header {minima[:3]} of {len(minima)} entries"
            )
        if self.is_out_of_step(minima):
            return self._leave(
                f"the poll began at step {minima[3]} on one rank, at step {-minima[4]} on another"
            )
        actions: list[ParticipantAction] = []
        serial = self.agreed_serial(minima)
        if serial > self.transport_serial:
            self.transport_serial = serial
            actions.append(RebuildTransport(serial))
        event = self.verdict(minima[len(HEADER) :])
        try:
            actions += self.participant.handle(event, now)
        except Exception as error:  # The other ranks acted on this result (R8).
            return self._leave(f"{self.deployment} could not take {event}: {error!r}")
        for action in actions:
            if isinstance(action, LeaveGroup):
                return self._leave(action.detail, action.reason)
        return actions

    def agreed_serial(self, minima: list[int]) -> int:
        """R10: return the highest communicator any rank asked for, the same on all ranks."""
        return -minima[0]

    def is_out_of_step(self, minima: list[int]) -> bool:
        """R9: the ranks were not at the same step; if they swapped, one step would see two maps."""
        return minima[3] != -minima[4]

    def verdict(self, entries: list[int]) -> PollPassed | PollNotPassed | PollDropped:
        """Return the event that the reduced entries of VIEW mean, the same on every rank."""
        armed_min, armed_max = entries[0], -entries[1]
        h_min, h_max = entries[2], -entries[3]
        if 0 < armed_min == armed_max and h_min == h_max:
            return PollPassed(Epoch(armed_min))
        if armed_max == 0 and entries[4] == 1:
            return PollDropped()
        return PollNotPassed()

    # --- end and schedule -------------------------------------------------------------------------

    def _leave(self, detail: str, reason: Reason = Reason.GATE_FAILED) -> list[ParticipantAction]:
        self.left = True
        self.next_due = _NEVER
        return [LeaveGroup(reason, detail)]

    def _next_poll(self) -> int:
        """Return the next call at which a poll begins, which may be the present one."""
        return -(-max(self.calls, 1) // self.poll_every) * self.poll_every

    @property
    def _digest_number(self) -> int:
        return int(self.digest[:15], 16)


def _digest(deployment: str, poll_every: int, resolve_after: int) -> str:
    text = f"K={poll_every} D={resolve_after} {HEADER} {VIEW} {[deployment]}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
