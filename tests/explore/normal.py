"""The attributes of machines that are set to a fixed value after every event, and why they may be.

Times: every time is set as if it were taken at the present moment, 0. An event that needs a
deadline to be over comes with a later `now`, so each deadline may end at any moment or never. A
rank that is not heard, or does not hear its leader, is marked by the time `AGES_AGO`.

Counts that only grow: the steps of the group, and the number of times a question was asked, of
which the machines use only whether it is 0 or 1 more than before.

Texts, durations and histories for people: no machine decides by them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from evenkeel_moe.model.plan import PlanRecord
from evenkeel_moe.protocol.messages import ParticipantState, RankState
from tests.explore.small import SOON_S

AGES_AGO = float("-inf")


def _since(moment: float | None) -> float | None:
    """Return the time as 0, unless it is unknown or marks something that was long ago."""
    return moment if moment is None or moment == AGES_AGO else 0.0


def normal_record(record: PlanRecord) -> PlanRecord:
    """Return a record without the time and the texts for people."""
    error = None if record.error is None else ""
    return replace(record, updated_at=0.0, error=error, story=())


def _participant(machine: Any) -> None:
    machine.step = 0
    machine._heard_at = _since(machine._heard_at)
    machine._story.clear()
    view = machine.poll
    if view is not None and not (view.armed_epoch or view.want_drop):
        machine.poll = view._replace(wave=None)  # Read only if the poll passes or drops.


def _gate(machine: Any) -> None:
    calls, machine.calls = machine.calls, 0
    if machine._began is not None:
        machine._began -= calls
    if not (machine.left or machine.observe_only):
        machine.next_due -= calls
    assert not machine.faults, machine.faults


def _peer(peer: Any) -> None:
    peer.resend_at, peer.wait_s = SOON_S, 0.0
    peer.times_asked = min(peer.times_asked, 2)
    if peer.state is not None:
        peer.state = replace(peer.state, query=0)


def _coordinator(machine: Any) -> None:
    machine._entered_at = machine._stepped_at = 0.0
    machine._entered_step = machine._step = 0
    machine._story.clear()


def _query_round(questions: Any) -> None:
    questions.resend_at = SOON_S
    questions.answers = {
        rank: replace(answer, query=0) for rank, answer in questions.answers.items()
    }
    if questions.repeat_at is not None:
        questions.repeat_at = SOON_S


def _recovery(machine: Any) -> None:
    machine._began_at, machine._alerted = 0.0, None


def _liveness(machine: Any) -> None:
    machine._asked_at = 0.0


def _member(member: Any) -> None:
    """Keep only the epoch of a rank's newest answer; the time to come back is over at once."""
    member.last_seen = _since(member.last_seen)
    member.closed_at = None if member.closed_at is None else AGES_AGO
    state = member.state
    if state is not None:
        member.state = RankState(
            state.identity, ParticipantState.IDLE, None, state.epoch, "", 0, True, None, None
        )


def _plan_records(records: Any) -> None:
    records.by_id = {name: normal_record(record) for name, record in records.by_id.items()}


def _plan_executor(executor: Any) -> None:
    executor._durations = None
    if executor._waiting is not None:
        executor._waiting = (executor._waiting[0], 0.0)


def _planning_loop(loop: Any) -> None:
    loop._last_cycle_at, loop.last = 0.0, None


def _write_retry(writes: Any) -> None:
    """The search reports a failed write at once, so the sends of earlier batches are not read."""
    writes._sends = ()


RULES: dict[str, Callable[[Any], None]] = {
    "Participant": _participant,
    "Gate": _gate,
    "Peer": _peer,
    "Coordinator": _coordinator,
    "QueryRound": _query_round,
    "Recovery": _recovery,
    "Liveness": _liveness,
    "Member": _member,
    "PlanRecords": _plan_records,
    "PlanExecutor": _plan_executor,
    "PlanningLoop": _planning_loop,
    "WriteRetry": _write_retry,
}
"""The rule of each class, by its name; it holds for classes derived from it."""
