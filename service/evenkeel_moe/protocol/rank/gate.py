"""The gate: the small all-reduce at a step boundary by which an EP group decides together.

One gate serves all deployments of one EP group (R9). It counts `step_boundary` calls, says at
which calls the shell must begin a poll and at which it must use its result, and turns results
into actions. A poll begun at call n is used by every rank at call n + D, 1 <= D <= K, so at most
one is in flight. The vectors are reduced with MIN over ranks; x and -x together give min and max.

The engine's thread, every step (the common case is one call and no lock)::

    if gate.advance():
        with lock:
            if gate.resolve_due:
                event = ...            # wait for the reduction: PollResolved(vector) or PollFailed
                for item in gate.handle(event, now): carry out
            if gate.poll_due:
                vector = gate.begin_poll(now)
                ...                    # start the MIN all-reduce of `vector` in the background

A Swap must be carried out at once and reported to its participant (SwapFinished or SwapFailed)
before `poll_due` is looked at.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch
from evenkeel_moe.protocol.messages import (
    LeaveGroup,
    ParticipantAction,
    PollDropped,
    PollNotPassed,
    PollPassed,
    RebuildTransport,
)
from evenkeel_moe.protocol.rank.participant import Participant

__all__ = ["HEADER", "PER_DEPLOYMENT", "Gate", "GateAction", "PollFailed", "PollResolved"]

HEADER = ("minus_wanted_serial", "digest", "minus_digest")
"""First entries of the vector."""
PER_DEPLOYMENT = ("armed_epoch", "minus_armed_epoch", "h", "minus_h", "want_drop")
"""Entries of each deployment, in the order the gate was given them."""

_NEVER = 2**62


@dataclass(frozen=True, eq=False, slots=True)
class PollResolved:
    """The reduction finished; the same values on every rank."""

    minima: NDArray[np.int64]
    """(vector_length,) int64 - minimum over ranks of each entry."""


@dataclass(frozen=True, slots=True)
class PollFailed:
    """The reduction raised or timed out here: what the others saw is unknown (R8)."""

    detail: str


@dataclass(frozen=True, slots=True)
class GateAction:
    """One thing the shell must do at this boundary."""

    deployment: DeploymentId | None
    """Whose participant asked for it; None when it concerns the whole group."""
    action: ParticipantAction


class Gate:
    """One poll per EP group for all deployments on it.

    Args:
        participants: one per deployment, in the same order on every rank.
        poll_every: K, calls of `advance` between polls.
        resolve_after: D, calls from a poll's beginning to the use of its result; at least the poll's
            time divided by a step's, rounded up, or the engine waits for the network.

    Raises:
        InvalidInput: not 1 <= D <= K, or two participants of one deployment.
    """

    def __init__(
        self, participants: Sequence[Participant], *, poll_every: int, resolve_after: int
    ) -> None:
        if not 1 <= resolve_after <= poll_every:
            raise InvalidInput(f"needs 1 <= D <= K, got D = {resolve_after}, K = {poll_every}")
        self.participants = tuple(participants)
        names = [participant.identity.deployment for participant in self.participants]
        if len(set(names)) != len(names):
            raise InvalidInput(f"one participant per deployment, got {names}")
        self.poll_every = poll_every
        self.resolve_after = resolve_after
        self.digest = _digest(names, poll_every, resolve_after)
        """What all ranks must agree on before the first poll; also `Hello.gate_digest`."""
        self.vector_length = len(HEADER) + len(PER_DEPLOYMENT) * len(self.participants)
        self.calls = 0
        """`advance` calls since the group started, dummy steps included."""
        self.next_due = _NEVER
        """Call at which there is something to do; `_NEVER` until the ranks agreed."""
        self.observe_only = True
        """No polls: the ranks' digests differ, or were not compared yet."""
        self.left = False
        """The rank must leave the group; nothing is polled any more."""
        self.transport_serial = 0
        """Number of the transfer communicator all ranks agreed on."""
        self.faults: list[str] = []
        """Errors of our own that were kept from stopping the polling."""
        self._wanted_serial = 0
        self._began: int | None = None

    # --- at the start of the group ----------------------------------------------------------------

    def agreement(self) -> NDArray[np.int64]:
        """(2,) int64 to reduce with MIN over the ranks once, before the first `advance`."""
        number = self._digest_number
        return np.array([number, -number], np.int64)

    def settle(self, minima: NDArray[np.int64]) -> bool:
        """Take the reduced `agreement`; False leaves the group in observe-only, alike on all ranks."""
        self.observe_only = not self.agrees(minima)
        for participant in self.participants:
            participant.observe_only = participant.observe_only or self.observe_only
        self.next_due = _NEVER if self.observe_only else self._next_poll()
        return not self.observe_only

    def agrees(self, minima: NDArray[np.int64]) -> bool:
        """R9: K, D and the layout are the same on every rank."""
        return int(minima[0]) == -int(minima[1]) == self._digest_number

    # --- every step ---------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Count one step boundary; True when a poll must be resolved or begun at this one."""
        self.calls += 1
        return self.calls >= self.next_due

    def rest(self) -> None:
        """Count one step boundary at which the engine does not let the gate poll."""
        self.calls += 1
        for participant in self.participants:
            participant.step = self.calls

    @property
    def resolve_due(self) -> bool:
        """Whether the result of the poll in flight is to be used at this call."""
        return self._began is not None and self.calls >= self._began + self.resolve_after

    @property
    def poll_due(self) -> bool:
        """Whether a poll begins at this call."""
        return (
            not self.observe_only and not self.left and self._began is None and self.is_poll_call()
        )

    def is_poll_call(self) -> bool:
        """R9: whether anyone holds a wave or not, polls begin at the same calls on all ranks."""
        return self.calls % self.poll_every == 0

    def begin_poll(self, now: float) -> NDArray[np.int64]:
        """Snapshot every participant into the vector to reduce with MIN over the ranks.

        Returns: (vector_length,) int64 - HEADER, then PER_DEPLOYMENT for each participant.
        """
        number = self._digest_number
        entries = [-self._wanted_serial, number, -number]
        for participant in self.participants:
            participant.step = self.calls
            try:
                view = participant.snapshot(now)
            except Exception as error:  # a bug of ours must not stop the polling (R9)
                self.faults.append(f"snapshot of {participant.identity.deployment}: {error!r}")
                participant.observe_only = True
                entries += (0, 0, 0, 0, 0)
                continue
            armed, h = view.armed_epoch, view.fingerprint
            entries += (armed, -armed, h, -h, int(view.want_drop))
        self._began = self.calls
        self.next_due = self.calls + self.resolve_after
        return np.array(entries, np.int64)

    def handle(self, event: PollResolved | PollFailed, now: float) -> list[GateAction]:
        """Use the result of the poll in flight, at the call where `resolve_due` is true."""
        self._began = None
        self.next_due = self._next_poll()
        match event:
            case PollFailed(detail=detail):
                return self.on_failure(detail)
            case PollResolved(minima=minima):
                return self._resolve(minima.tolist(), now)
            case _:
                assert_never(event)

    def on_failure(self, detail: str) -> list[GateAction]:
        """R8: unknown is never "not agreed": the rank leaves and the engine restarts the group."""
        return self._leave(detail)

    def request_rebuild(self, serial: int) -> None:
        """The communicator `serial` was aborted here: ask all ranks to build the next one (R10)."""
        self._wanted_serial = max(self._wanted_serial, serial + 1)

    # --- results --------------------------------------------------------------------------------

    def _resolve(self, minima: list[int], now: float) -> list[GateAction]:
        if len(minima) != self.vector_length or not minima[1] == -minima[2] == self._digest_number:
            return self._leave(
                f"another gate answered: header {minima[:3]} of {len(minima)} entries"
            )
        actions = []
        serial = self.agreed_serial(minima)
        if serial > self.transport_serial:
            self.transport_serial = serial
            self._wanted_serial = max(self._wanted_serial, serial)
            actions.append(GateAction(None, RebuildTransport(serial)))
        for index, participant in enumerate(self.participants):
            start = len(HEADER) + index * len(PER_DEPLOYMENT)
            event = self.verdict(minima[start : start + len(PER_DEPLOYMENT)])
            deployment = participant.identity.deployment
            try:
                answers = participant.handle(event, now)
            except Exception as error:  # the others acted on this result, and we could not (R8)
                return self._leave(f"{deployment} could not take {event}: {error!r}")
            for action in answers:
                if isinstance(action, LeaveGroup):
                    return self._leave(action.detail, action.reason)
                actions.append(GateAction(deployment, action))
        return actions

    def agreed_serial(self, minima: list[int]) -> int:
        """R10: the highest communicator any rank wished for, known alike to all ranks."""
        return -minima[0]

    def verdict(self, entries: list[int]) -> PollPassed | PollNotPassed | PollDropped:
        """What one deployment's reduced entries mean; the same on every rank."""
        armed_min, armed_max = entries[0], -entries[1]
        h_min, h_max = entries[2], -entries[3]
        if 0 < armed_min == armed_max and h_min == h_max:
            return PollPassed(Epoch(armed_min))
        if armed_max == 0 and entries[4] == 1:
            return PollDropped()
        return PollNotPassed()

    # --- small parts ----------------------------------------------------------------------------

    def _leave(self, detail: str, reason: Reason = Reason.GATE_FAILED) -> list[GateAction]:
        self.left = True
        self.next_due = _NEVER
        return [GateAction(None, LeaveGroup(reason, detail))]

    def _next_poll(self) -> int:
        """The first poll call that is not behind us; this one if its poll has not begun."""
        return -(-max(self.calls, 1) // self.poll_every) * self.poll_every

    @property
    def _digest_number(self) -> int:
        return int(self.digest[:15], 16)


def _digest(deployments: Sequence[str], poll_every: int, resolve_after: int) -> str:
    text = f"K={poll_every} D={resolve_after} {HEADER} {PER_DEPLOYMENT} {list(deployments)}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
