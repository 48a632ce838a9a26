"""The leader's machine reports its own state."""

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.transitions import ControlState as S
from tests.protocol.machines import DEPLOYMENT, control_of, record


def test_every_state_has_a_reason():
    migrating = control_of(S.MIGRATING)
    for control, reason, detail in (
        (control_of(S.FOLLOWER), Reason.NOT_LEADER, "another replica leads, or none yet"),
        (control_of(S.RECOVERING), Reason.RECOVERING, "asking all ranks where they stand"),
        (control_of(S.WAITING_FOR_RANKS), Reason.RANKS_MISSING, "0 ranks said hello so far"),
        (control_of(S.READY), Reason.RECOVERED, "all 2 ranks"),
        (migrating, Reason.PLAN_STARTED, "plan p is migrating"),
    ):
        assert control.state_reason(0.0) == (reason, detail)
    assert migrating.records.active is record(migrating)


def test_without_a_policy_it_uses_the_default():
    assert DeploymentControl(DEPLOYMENT).policy == DeploymentPolicy()


def test_a_follower_knows_of_no_plan_hold_or_freeze():
    follower = control_of(S.FOLLOWER)
    assert (follower.records.active, follower.held, follower.frozen_until) == (None, False, 0.0)
