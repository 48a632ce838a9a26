"""Machines in any state, and messages of a small deployment for them."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.hold import Retirement
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, Transfer, Wave, WaveKey
from evenkeel_moe.model.policy import DeploymentPolicy
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.leader.coordinator import Coordinator
from evenkeel_moe.protocol.leader.planning_loop import PlanningLoop
from evenkeel_moe.protocol.rank.gate import Gate
from evenkeel_moe.protocol.rank.participant import Participant
from evenkeel_moe.protocol.timing import ControlTiming, WaveTiming
from evenkeel_moe.protocol.transitions import ControlState, CoordinatorState

DEPLOYMENT = DeploymentId("d")
GENERATION = Generation("g1")
LEADER = msg.Leader("a", 1)
SHAPE = ModelShape(2, 4, 2, 3, 1, 10)
BASE = Placement.initial(SHAPE)
"""Rank 0: 0 1 2, rank 1: 2 3 0, in both layers."""
STREAM = 7


def wave_of(layer: int = 0, index: int = 0, src: int = 4, dst: int = 2) -> Wave:
    """One layer changes one slot: dst takes the expert of src."""
    rows = BASE.phy2log[[layer]].copy()
    rows[0, dst] = rows[0, src]
    transfer = Transfer(layer, int(rows[0, src]), src, dst, SHAPE.bytes_per_expert)
    return Wave(index, (layer,), rows, ((transfer,),))


def key_of(plan_id: str = "p", index: int = 0, version: int = 1, generation: str = "g1") -> WaveKey:
    return WaveKey(Generation(generation), PlanId(plan_id), index, version)


def prepare_of(
    wave: Wave | None = None,
    key: WaveKey | None = None,
    base_epoch: int = 0,
    leader: msg.Leader = LEADER,
) -> msg.Prepare:
    body = wave or wave_of()
    return msg.Prepare(
        leader, key or key_of(), Epoch(base_epoch), body, (5,) * len(body.transfers), 1.0
    )


def plan_of(waves: int = 2, plan_id: str = "p", base_epoch: int = 0, **changes) -> Plan:
    """A plan whose waves change one layer each."""
    bodies = tuple(wave_of(layer=index, index=index) for index in range(waves))
    target = BASE
    for body in bodies:
        target = target.with_rows(body.layers, body.rows)
    values: dict[str, Any] = {
        "plan_id": PlanId(plan_id),
        "deployment": DEPLOYMENT,
        "kind": PlanKind.MANUAL,
        "policy": "keel",
        "reason": Reason.MANUAL_REQUEST,
        "generation": GENERATION,
        "weights_version": 1,
        "base_epoch": Epoch(base_epoch),
        "base": BASE,
        "target": target,
        "waves": bodies,
        "created_at": 0.0,
    }
    return Plan(**(values | changes))


def participant_of(rank: int = 0, **changes) -> Participant:
    identity = msg.RankIdentity(DEPLOYMENT, EpRank(rank), GENERATION, 1)
    values: dict[str, Any] = {
        "epoch": Epoch(0),
        "weights_version": 1,
        "checksums": (5,) * 8,
        "staging_bytes": 100,
        "drop_after_s": 10.0,
    }
    return Participant(identity, SHAPE, BASE, **(values | changes))


def arm(rank: Participant, prepare: msg.Prepare) -> Participant:
    """Let a rank without a wave take one, up to its Commit."""
    rank.handle(from_controller(prepare), 0.0)
    rank.handle(msg.StagingFinished(prepare.wave), 0.0)
    rank.handle(from_controller(msg.Commit(LEADER, prepare.wave)), 0.0)
    assert rank.state is msg.ParticipantState.ARMED
    return rank


def drop(rank: Participant) -> None:
    """Let a rank give its wave up, until nothing of it is in flight."""
    assert rank.wave is not None
    rank.handle(from_controller(msg.Abort(LEADER, rank.wave)), 0.0)
    rank.handle(msg.TransportDrained(rank.wave), 0.0)


def gates_of(ranks, poll_every=3, resolve_after=2):
    """The gates of the ranks of a group, which have agreed."""
    gates = [Gate(rank, poll_every=poll_every, resolve_after=resolve_after) for rank in ranks]
    minima = np.minimum.reduce([gate.agreement() for gate in gates])
    for gate in gates:
        gate.settle(minima)
    return gates


def next_digest(rank: Participant) -> str:
    """Return the digest of the map that a rank has after the wave it holds."""
    assert rank.next_placement is not None
    return rank.next_placement.digest


def from_controller(message, stream: int = STREAM) -> msg.FromController:
    return msg.FromController(stream, message)


def participant_in(state: msg.ParticipantState, *, polled: bool = False) -> Participant:
    """A participant that took the usual way to a state; `polled`: a poll in flight saw it armed."""
    rank, key = participant_of(), key_of()
    if state is msg.ParticipantState.IDLE:
        return rank
    rank.handle(from_controller(prepare_of()), 0.0)
    if state is msg.ParticipantState.STAGING:
        return rank
    if state is msg.ParticipantState.ABORTED:
        rank.handle(msg.StagingFailed(key, Reason.TRANSFER_FAILED), 0.0)
        return rank
    rank.handle(msg.StagingFinished(key), 0.0)
    if state is msg.ParticipantState.PREPARED:
        return rank
    rank.handle(from_controller(msg.Commit(LEADER, key)), 0.0)
    if polled or state is msg.ParticipantState.SWAPPING:
        rank.snapshot(0.0)
    if state is msg.ParticipantState.SWAPPING:
        rank.handle(msg.PollPassed(Epoch(1)), 0.0)
    assert rank.state is state
    return rank


def sent(actions) -> list:
    """The messages among actions."""
    return [action.message for action in actions if hasattr(action, "message")]


def only(actions, kind):
    """The one action or message of a kind."""
    found = [item for item in [*actions, *sent(actions)] if isinstance(item, kind)]
    assert len(found) == 1, actions
    return found[0]


def prepares(actions) -> list[msg.Prepare]:
    return [message for message in sent(actions) if isinstance(message, msg.Prepare)]


def queries(actions) -> list[msg.QueryState]:
    return [message for message in sent(actions) if isinstance(message, msg.QueryState)]


def reply(rank: Participant, message, kind, stream: int = STREAM):
    """The one action or message of a kind with which a rank answers its controller."""
    return only(rank.handle(from_controller(message, stream), 0.0), kind)


def of_kind(actions, kind) -> list:
    return [action for action in actions if isinstance(action, kind)]


assert np.array_equal(BASE.phy2log[0], [0, 1, 2, 2, 3, 0])


# --- the controller's side ------------------------------------------------------------------------


class Operator:
    """Makes requests of a machine, and returns the plan they are about with the actions."""

    def __init__(self, control: DeploymentControl) -> None:
        self.control = control

    def submit(self, plan: Plan, now: float, **request):
        return self._about(ctl.PlanSubmitted(plan, **request), plan.plan_id, now)

    def repeat(self, plan_id: PlanId, digest: str, now: float = 0.0):
        return self._about(ctl.RequestRepeated(plan_id, digest), plan_id, now)

    def approve(self, plan_id: PlanId, by: str, now: float):
        return self._about(ctl.PlanApproved(plan_id, by), plan_id, now)

    def cancel(self, plan_id: PlanId, by: str, now: float):
        return self._about(ctl.PlanCancelled(plan_id, by), plan_id, now)

    def resume(self, now: float) -> list:
        return self.control.handle(ctl.AutomaticPlansResumed(), now)

    def freeze(self, seconds: float, now: float) -> list:
        return self.control.handle(ctl.PlansFrozen(seconds), now)

    def retire(
        self,
        retiring: Retirement,
        now: float,
        evacuation: Plan | None = None,
        base: Placement = BASE,
    ) -> list:
        submitted = None if evacuation is None else ctl.PlanSubmitted(evacuation, True)
        return self.control.handle(ctl.RanksRetired(retiring, base, submitted), now)

    def set_policy(self, policy: DeploymentPolicy, document, now: float) -> list:
        return self.control.handle(ctl.PolicySet(policy, document), now)

    def _about(self, request: ctl.OperatorRequest, plan_id: PlanId, now: float):
        actions = self.control.handle(request, now)
        return self.control.records.by_id.get(plan_id), actions


def from_rank(rank: int, message, incarnation: int = 1, stream: int | None = None) -> ctl.FromRank:
    return ctl.FromRank(EpRank(rank), incarnation, 10 + rank if stream is None else stream, message)


TIMING = WaveTiming(
    resend_s=1.0,
    resend_max_s=4.0,
    prepare_deadline_s=10.0,
    commit_deadline_s=10.0,
    commit_deadline_steps=50,
    stall_after_s=10.0,
    stall_after_steps=50,
    idle_after_s=5.0,
)
PEERS = {EpRank(0): (1, 10), EpRank(1): (1, 11)}
"""(incarnation, stream) of two ranks."""


def coordinator_of() -> Coordinator:
    """A coordinator of two ranks that has asked its first question at time 0."""
    wave = Coordinator(key_of(), LEADER, PEERS, TIMING, prepare=prepare_of())
    wave.start(0.0, 0)
    return wave


def recovering_coordinator() -> Coordinator:
    """A coordinator of a wave found on the ranks, its query number 5."""
    wave = Coordinator(key_of(), LEADER, PEERS, TIMING, query=5)
    wave.start(0.0, 0)
    return wave


def coordinator_in(state: CoordinatorState) -> Coordinator:
    """A coordinator that took the usual way to a state."""
    if state is CoordinatorState.RECOVERING:
        return recovering_coordinator()
    wave, key = coordinator_of(), key_of()
    if state is CoordinatorState.PREPARING:
        return wave
    if state in (CoordinatorState.ABORTING, CoordinatorState.ABORTED):
        wave.handle(from_rank(0, msg.Vote(key, False, Reason.TRANSFER_TIMEOUT)), 0.0)
        if state is CoordinatorState.ABORTED:
            for rank in (0, 1):
                answer = msg.AbortAnswer(key, Epoch(0), msg.WaveOutcome.DROPPED, True)
                wave.handle(from_rank(rank, answer), 0.0)
        return wave
    for rank in (0, 1):
        wave.handle(from_rank(rank, msg.Vote(key, True)), 0.0)
    if state is CoordinatorState.COMMITTED:
        wave.handle(from_rank(0, msg.Ack(key, Epoch(1), "digest")), 0.0)
    assert wave.state is state
    return wave


def identity_of(rank: int = 0, generation: str = "g1", incarnation: int = 1) -> msg.RankIdentity:
    return msg.RankIdentity(DEPLOYMENT, EpRank(rank), Generation(generation), incarnation)


def hello_of(rank: int = 0, generation: str = "g1", incarnation: int = 1, **changes) -> msg.Hello:
    values: dict[str, Any] = {
        "identity": identity_of(rank, generation, incarnation),
        "shape": SHAPE,
        "node": "n0",
        "gpu_uuid": "",
        "epoch": Epoch(0),
        "placement_digest": BASE.digest,
        "weights_version": 1,
        "checksums_digest": "c",
        "free_bytes": 0,
        "staging_bytes": 100,
        "gate_digest": "gate",
    }
    return msg.Hello(**(values | changes))


def state_of(
    rank: int = 0, query: int = 0, epoch: int = 0, placement=BASE, **changes
) -> msg.RankState:
    values: dict[str, Any] = {
        "identity": identity_of(rank),
        "state": msg.ParticipantState.IDLE,
        "wave": None,
        "epoch": Epoch(epoch),
        "placement_digest": placement.digest,
        "weights_version": 1,
        "drained": True,
        "last_wave": None,
        "last_outcome": None,
        "placement": placement,
        "checksums": (5,) * 8,
        "query": query,
    }
    return msg.RankState(**(values | changes))


def control_of(
    state: ControlState = ControlState.READY, stored=None, **changes
) -> DeploymentControl:
    """A control at time 0 that took the usual way to a state."""
    values: dict[str, Any] = {"timing": CONTROL_TIMING, "policy": DeploymentPolicy(cycle_s=30.0)}
    control = DeploymentControl(DEPLOYMENT, **(values | changes))
    if state is ControlState.FOLLOWER:
        return control
    control.handle(ctl.LeaseAcquired(LEADER, stored or ctl.StoredRecords()), 0.0)
    if state is ControlState.WAITING_FOR_RANKS:
        return control
    for rank in (0, 1):
        control.handle(from_rank(rank, hello_of(rank)), 0.0)
    if state is ControlState.RECOVERING:
        return control
    answer_queries(control)
    if state is ControlState.MIGRATING:
        Operator(control).submit(plan_of(), 0.0, approve=True)
    assert control.state is state
    return control


CONTROL_TIMING = ControlTiming(
    heartbeat_s=1.0,
    rank_lease_s=3.0,
    recovery_deadline_s=20.0,
    cycle_deadline_s=300.0,
    wave=TIMING,
)


def group_leaves(control: DeploymentControl) -> None:
    """The streams of all ranks end, so long ago that nobody waits for the ranks any more."""
    for rank, member in control.membership.members.items():
        control.handle(ctl.StreamClosed(rank, member.stream), -CONTROL_TIMING.rank_lease_s)


def come(control: DeploymentControl, *ranks: int, now: float = 1.0, **changes) -> list:
    """Ranks of the generation g2 say hello, as its incarnation 5."""
    return [
        action
        for rank in ranks
        for action in control.handle(
            from_rank(rank, hello_of(rank, "g2", 5, **changes), 5, 30 + rank), now
        )
    ]


def restarts(control: DeploymentControl, *reached: tuple[int, Placement], now: float = 1.0) -> list:
    """The group leaves and comes back as g2, each rank at an epoch and a map; at 0 by default."""
    group_leaves(control)
    return [
        action
        for rank, (epoch, placement) in enumerate(reached or [(0, BASE)] * 2)
        for action in come(control, rank, now=now, epoch=epoch, placement_digest=placement.digest)
    ]


def query_of(control: DeploymentControl) -> int:
    """Return the number of the newest query to all ranks."""
    return control.as_leader.recovery.query


def state_in(control: DeploymentControl) -> ControlState:
    """Return the state of a control, which its next event may change."""
    return control.state


def wave_state(control: DeploymentControl) -> CoordinatorState:
    """Return the state of the wave in progress."""
    assert control.coordinator is not None
    return control.coordinator.state


def planning_loop_of(control: DeploymentControl) -> PlanningLoop:
    """Return the planning loop of a leader."""
    return control.as_leader.planning_loop


def answer_queries(control: DeploymentControl, now: float = 0.0, **changes) -> list:
    """Both ranks answer the newest query alike."""
    actions: list = []
    recovery = control.as_leader.recovery
    for rank in (0, 1):
        state = state_of(rank, query=recovery.query, **changes)
        actions += control.handle(from_rank(rank, state), now)
    return actions


AFTER_ONE = BASE.with_rows((0,), plan_of().waves[0].rows)
AFTER_TWO = plan_of().target


def after_wave(index: int, plan_id: str = "p") -> dict[str, Any]:
    """The answers of ranks that have swapped this wave of the plan, and no other since."""
    return {
        "epoch": index + 1,
        "placement": (AFTER_ONE, AFTER_TWO)[index],
        "last_wave": key_of(plan_id, index),
        "last_outcome": msg.WaveOutcome.SWAPPED,
    }


def both(control, message_of, now=0.0):
    """Both ranks say the same."""
    return [
        action
        for rank in (0, 1)
        for action in control.handle(from_rank(rank, message_of(rank)), now)
    ]


def vote(control, index=0, now=0.0):
    return both(control, lambda rank: msg.Vote(key_of(index=index), True), now)


def ack(control, placement, epoch, index=0, now=0.0):
    return both(
        control, lambda rank: msg.Ack(key_of(index=index), Epoch(epoch), placement.digest), now
    )


def stored_plan(**changes) -> ctl.StoredRecords:
    """The records of a leader whose plan ran, with changes of the plan's record."""
    kept = dataclasses.replace(record(control_of(ControlState.MIGRATING)), **changes)
    return ctl.StoredRecords(plans=(kept,), epochs={Epoch(0): BASE})


def find_armed(control, wave: WaveKey | None = None) -> None:
    """Both ranks tell a new leader, and then its query about it, that they are armed for a wave."""
    armed: dict[str, Any] = {"state": msg.ParticipantState.ARMED, "wave": wave or key_of()}
    for query in (1, 2):
        both(control, lambda rank, query=query: state_of(rank, query=query, **armed))


def carry_out(control, waves=2):
    """Both ranks vote for and acknowledge the first waves of the plan."""
    actions: list = []
    for index in range(waves):
        vote(control, index)
        actions = ack(control, (AFTER_ONE, AFTER_TWO)[index], index + 1, index)
    return actions


def refused(error, ask):
    """Return the reason and the words with which a request is refused."""
    with pytest.raises(error) as caught:
        ask()
    return caught.value.reason, str(caught.value)


def abort_answers(control, index=0, now=0.0):
    gone = msg.AbortAnswer(key_of(index=index), Epoch(index), msg.WaveOutcome.DROPPED, True)
    return both(control, lambda rank: gone, now)


def record(control, plan_id="p"):
    return control.records.get(PlanId(plan_id))


def progress(control, plan_id="p"):
    """Return the phase of a plan and the number of its waves that are committed."""
    found = record(control, plan_id)
    return found.phase, found.waves_committed


def phase_and_reason(control, plan_id="p"):
    """Return the phase of a plan and its reason."""
    found = record(control, plan_id)
    return found.phase, found.reason
