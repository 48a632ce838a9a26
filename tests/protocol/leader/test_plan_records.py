"""Which ended plans a leader still knows, however many have ended since."""

import dataclasses

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import PlanId
from evenkeel_moe.model.plan import PlanKind, PlanPhase
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.operator import Operator
from evenkeel_moe.protocol.leader.plan_records import PlanRecords
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import AFTER_ONE, AFTER_TWO, BASE, ack, control_of, plan_of, vote

P = PlanPhase


def enter(book, name, phase, reason=Reason.EXPIRED, *, waves=0, kind=PlanKind.AUTOMATIC):
    """A plan that ended; each a second after the one before."""
    at = float(len(book.seen))
    book.seen.append(name)
    plan = plan_of(plan_id=name, kind=kind, created_at=at)
    book.add(plan, P.MIGRATING if waves else P.PROPOSED, Reason.MANUAL_REQUEST, at)
    book.change(
        book.get(PlanId(name)), "ended", at, phase=phase, reason=reason, waves_committed=waves
    )


class Book(PlanRecords):
    """One that notes what was entered."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def crowd(self, count=40):
        for _ in range(count):
            enter(self, f"dry{len(self.seen)}", P.EXPIRED, kind=PlanKind.MANUAL)

    def kept(self):
        return [str(name) for name in self.by_id if not name.startswith("dry")]


@pytest.fixture
def book():
    return Book()


def test_what_later_decisions_rest_on_outlives_newer_plans(book):
    enter(book, "earlier", P.COMMITTED, Reason.COMMITTED, waves=2)
    enter(book, "earlier-fault", P.ABORTED, Reason.RANK_LOST)
    enter(book, "carried-out", P.COMMITTED, Reason.COMMITTED, waves=2)
    enter(book, "partly", P.CANCELLED, Reason.CANCELLED, waves=1)
    enter(book, "stopped", P.CANCELLED, Reason.CANCELLED)
    enter(book, "failed", P.ABORTED, Reason.PREPARE_DEADLINE)
    enter(book, "refused", P.REFUSED, Reason.NO_SOURCE)
    enter(book, "outrun", P.ABORTED, Reason.GENERATION_CHANGED)
    wanted = ["carried-out", "partly", "stopped", "failed", "refused", "outrun"]
    book.crowd()
    assert book.kept() == wanted
    assert len(book.by_id) <= 16 + 1 + len(wanted), "and no more than a few of the others"


def test_failures_are_kept_back_to_the_last_plan_that_was_carried_out_and_not_without_end(book):
    enter(book, "fault-before", P.REFUSED, Reason.NO_SOURCE)
    enter(book, "carried-out", P.COMMITTED, Reason.COMMITTED, waves=2)
    for number in range(50):
        enter(book, f"fault{number}", P.REFUSED, Reason.NO_SOURCE)
    enter(book, "by-hand", P.REFUSED, Reason.NO_SOURCE, kind=PlanKind.MANUAL)
    book.crowd()
    assert book.kept() == ["carried-out", *(f"fault{number}" for number in range(34, 50))]


def test_plans_that_have_not_ended_are_kept_whatever_came_after(book):
    book.add(plan_of(plan_id="waits", created_at=-1.0), P.PROPOSED, Reason.MANUAL_REQUEST, 0.0)
    book.crowd()
    assert book.kept() == ["waits"]


def test_a_book_loaded_knows_the_same_as_one_that_was_kept(book):
    enter(book, "carried-out", P.COMMITTED, Reason.COMMITTED, waves=2)
    records = dict(book.by_id)
    for number in range(40):
        enter(book, f"dry{number}", P.EXPIRED)
        records |= book.by_id
    loaded = PlanRecords()
    loaded.load(reversed(records.values()))
    assert PlanId("carried-out") in loaded.by_id
    assert len(loaded.by_id) == 17


def test_rollback_undoes_the_whole_last_plan_however_many_dry_runs_came_after():
    """R16."""
    control = control_of(S.MIGRATING)
    vote(control)
    ack(control, AFTER_ONE, 1)
    vote(control, 1)
    ack(control, AFTER_TWO, 2, 1)
    operator = Operator(control)
    for number in range(40):
        now = 0.1 * number
        dry = plan_of(1, f"dry{number}", 2, base=AFTER_TWO, target=AFTER_TWO, created_at=now)
        operator.submit(dataclasses.replace(dry, expires_at=now + 0.05), now)
        control.handle(msg.Tick(), now + 0.09)
    assert operator.rollback_target(None) == (0, BASE)
