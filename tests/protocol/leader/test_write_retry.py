"""Failed writes: which are kept, and which sends were skipped with them."""

from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.write_retry import WriteRetry
from tests.protocol.machines import LEADER, key_of

COMMIT = ctl.SendToRank(EpRank(0), 10, msg.Commit(LEADER, key_of()))
QUERY = ctl.SendToRank(EpRank(0), 10, msg.QueryState(LEADER))
POLICY = ctl.PersistDocument("policy", {})


def decision(number):
    return ctl.PersistDecision({"cycle": number})


def same(action):
    return action


def test_the_newest_decisions_and_all_other_writes_are_kept():
    retry = WriteRetry()
    retry.failed([POLICY, *(decision(number) for number in range(150))], same)
    assert retry.order([], flush=True) == [POLICY, *(decision(number) for number in range(50, 150))]


def test_only_sends_that_need_the_store_were_skipped_with_the_writes():
    assert COMMIT.needs_store and not QUERY.needs_store
    retry = WriteRetry()
    assert retry.order([COMMIT, POLICY, QUERY]) == [POLICY, COMMIT, QUERY]
    assert retry.failed([POLICY], same) == (COMMIT,)
    assert retry.failed([POLICY], same) == ()


def test_a_batch_without_writes_keeps_its_order_and_the_sends_of_the_batch_before():
    retry = WriteRetry()
    retry.order([POLICY, COMMIT])
    assert retry.order([QUERY], flush=True) == [QUERY]
    assert retry.failed([POLICY], same) == (COMMIT,)
