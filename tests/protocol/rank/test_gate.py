"""The gate: one poll per EP group, used at the same call by all ranks."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel_moe.errors import InvalidInput, Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch
from evenkeel_moe.model.plan import hash_of
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState as State
from evenkeel_moe.protocol.rank.gate import Gate, PollFailed, PollResolved
from tests.protocol.machines import (
    LEADER,
    arm,
    drop,
    from_controller,
    gates_of,
    key_of,
    next_digest,
    only,
    participant_in,
    participant_of,
    prepare_of,
    reply,
    wave_of,
)


def steps(gates, count, now=0.0):
    """Let all ranks take steps; return (call, rank, action) of every action."""
    decided, vectors = [], []
    for _ in range(count):
        due = [gate.advance() for gate in gates]
        for number, gate in enumerate(gates):
            if due[number] and gate.resolve_due:
                actions = gate.handle(PollResolved(np.minimum.reduce(vectors)), now)
                decided += [(gate.calls, number, action) for action in actions]
        if gates[0].poll_due:
            vectors = [gate.begin_poll(now) for gate in gates]
    return decided


def test_all_ranks_swap_at_the_call_the_poll_is_due():
    """Rule of the gate: the result of the poll begun at call n is used by all at call n + D."""
    gates = gates_of([participant_in(State.ARMED), participant_in(State.ARMED)])
    decided = steps(gates, 5)
    assert decided == [(5, rank, msg.Swap(key_of(), Epoch(1))) for rank in (0, 1)]


def test_one_rank_not_armed_holds_all_back():
    """If the minimum does not show every rank armed, nobody swaps."""
    gates = gates_of([participant_in(State.ARMED), participant_in(State.PREPARED)])
    assert steps(gates, 30) == []


def test_all_drop_together_when_all_are_leaderless_and_none_is_armed():
    """R6."""
    ranks = [participant_in(State.PREPARED), participant_of()]
    decided = steps(gates_of(ranks), 5, now=50.0)
    assert decided == [(5, 0, msg.CancelStaging(key_of()))]
    armed = [participant_in(State.ARMED), participant_of()]
    assert steps(gates_of(armed), 30, now=50.0) == []


@given(st.integers(1, 6), st.data())
def test_at_most_one_poll_is_in_flight_for_every_k_and_d(poll_every, data):
    resolve_after = data.draw(st.integers(1, poll_every))
    gate = gates_of([participant_of()], poll_every, resolve_after)[0]
    began: list[int] = []
    used: list[int] = []
    vector: Any = None
    for _ in range(40):
        if not gate.advance():
            assert not gate.resolve_due and not gate.poll_due, (
                "a boundary without work costs no lock"
            )
            continue
        assert gate.resolve_due or gate.poll_due
        if gate.resolve_due:
            used.append(gate.calls)
            gate.handle(PollResolved(vector), 0.0)
        if gate.poll_due:
            began.append(gate.calls)
            vector = gate.begin_poll(0.0)
    assert began == list(range(poll_every, 41, poll_every))
    assert used == [call + resolve_after for call in began if call + resolve_after <= 40]


def test_failed_poll_leaves_the_group_and_polls_no_more():
    """R8: an error inside the gate means unknown, never "not agreed"."""
    gate = gates_of([participant_in(State.ARMED)])[0]
    steps([gate], 4)
    gate.advance()
    left = only(gate.handle(PollFailed("timeout after 5 s"), 0.0), msg.LeaveGroup)
    assert left.reason is Reason.GATE_FAILED
    assert gate.left and not any(gate.advance() or gate.poll_due for _ in range(20))


def test_ranks_that_disagree_on_k_only_observe():
    """R9: a mismatch of K, D or the layout means observe only, on all ranks alike."""
    ranks = [participant_of(), participant_of()]
    gates = [
        Gate(ranks[0], poll_every=3, resolve_after=2),
        Gate(ranks[1], poll_every=4, resolve_after=2),
    ]
    minima = np.minimum.reduce([gate.agreement() for gate in gates])
    assert [gate.settle(minima) for gate in gates] == [False, False]
    assert not any(gate.advance() for gate in gates for _ in range(20))
    assert all(rank.observe_only for rank in ranks)


def test_digest_depends_on_k_d_and_the_deployment():
    draft = participant_of()
    draft.identity = dataclasses.replace(draft.identity, deployment=DeploymentId("draft"))
    digests = {
        Gate(participant_of(), poll_every=3, resolve_after=2).digest,
        Gate(participant_of(), poll_every=4, resolve_after=2).digest,
        Gate(participant_of(), poll_every=3, resolve_after=3).digest,
        Gate(draft, poll_every=3, resolve_after=2).digest,
    }
    assert len(digests) == 4


def test_rebuild_is_agreed_by_the_vector():
    """R10: rebuilding the communicator is agreed in the poll vector; one rank's wish is enough."""
    gates = gates_of([participant_of(), participant_of()])
    gates[1].request_rebuild(0)
    assert steps(gates, 5) == [(5, rank, msg.RebuildTransport(1)) for rank in (0, 1)]
    gates[0].request_rebuild(0)
    assert steps(gates, 6) == [], "news of a communicator that is already replaced"
    gates[0].request_rebuild(1)
    assert [action for _, _, action in steps(gates, 6)] == [msg.RebuildTransport(2)] * 2


def test_error_of_ours_in_a_snapshot_does_not_stop_the_polling(monkeypatch):
    """R9: no exception in the agent may stop polling; the rank holds the group back instead."""
    ranks = [participant_in(State.ARMED), participant_in(State.ARMED)]
    gates = gates_of(ranks)
    monkeypatch.setattr(ranks[1], "snapshot", lambda now: 1 / 0)
    assert steps(gates, 30) == []
    assert "ZeroDivisionError" in gates[1].faults[0]
    assert ranks[1].observe_only and not ranks[0].observe_only
    assert poll(gate_of(ranks[1]), now=99.0)[5:] == [0, 0, 0, 0, 0], "nor does it drop anything"


def test_rank_that_cannot_follow_a_result_leaves_the_group():
    """R8: the other ranks acted on the result."""
    gates = gates_of([participant_in(State.ARMED), participant_in(State.ARMED)])
    gates[1].participant.handle = lambda event, now: 1 / 0
    calls = [
        (call, rank) for call, rank, action in steps(gates, 5) if isinstance(action, msg.LeaveGroup)
    ]
    assert calls == [(5, 1)]


@pytest.mark.parametrize("armed", [True, False])
def test_ranks_at_different_steps_of_the_engine_all_leave_before_a_swap(armed):
    """R9: the polls and swaps of one come a step later."""
    state = State.ARMED if armed else State.IDLE
    ranks = [participant_in(state), participant_in(state)]
    gates = gates_of(ranks)
    for number, gate in enumerate(gates):
        for step in range(3):
            gate.advance(step + 2 * number)
    vectors = [gate.begin_poll(0.0) for gate in gates]
    assert [vector[3:5].tolist() for vector in vectors] == [[2, -2], [4, -4]]
    for gate in gates:
        left = only(gate.handle(PollResolved(np.minimum.reduce(vectors)), 0.0), msg.LeaveGroup)
        assert (left.reason, gate.left) == (Reason.GATE_FAILED, True)
        assert "step 2 on one rank, at step 4 on another" in left.detail
    assert [rank.state for rank in ranks] == [state, state]


def test_a_boundary_that_the_engine_left_out_is_found_at_the_next_one():
    """R9: also between the start of a poll and its use."""
    gate = gates_of([participant_in(State.ARMED)], poll_every=3, resolve_after=3)[0]
    assert not gate.advance(7)
    gate.rest()
    assert gate.advance(12), "steps at which the gate rests are not compared"
    gate.begin_poll(0.0)
    assert not gate.advance(13)
    with pytest.raises(InvalidInput, match="step 15 came after step 13"):
        gate.advance(15)
    unused = Gate(participant_of(), poll_every=3, resolve_after=2)
    assert not any(unused.advance(step) for step in (0, 5, 6))


@pytest.mark.parametrize(("poll_every", "resolve_after"), [(0, 0), (3, 0), (3, 4)])
def test_d_must_lie_between_one_and_k(poll_every, resolve_after):
    with pytest.raises(InvalidInput, match="1 <= D <= K"):
        Gate(participant_of(), poll_every=poll_every, resolve_after=resolve_after)


@pytest.mark.parametrize(
    "spoiled",
    [lambda vector: vector[:3], lambda vector: [*vector, 0], lambda vector: [0] * len(vector)],
    ids=["shorter", "longer", "digest"],
)
def test_answer_of_another_gate_leaves_the_group(spoiled):
    """R8."""
    gate = gate_of(participant_of())
    vector = poll(gate)
    assert only(gate.handle(PollResolved(np.array(spoiled(vector))), 0.0), msg.LeaveGroup)
    assert gate.left


KEY = key_of()


def gate_of(participant, poll_every=3, resolve_after=2):
    return gates_of([participant], poll_every, resolve_after)[0]


def poll(gate, now=0.0):
    """Take steps up to the next poll; return its vector as a list."""
    while not (gate.advance() and gate.poll_due):
        pass
    return gate.begin_poll(now).tolist()


def number_of(gate):
    return int(gate.agreement()[0])


def test_a_vector_has_the_rebuild_the_digest_and_what_each_participant_says():
    rank = participant_in(State.ARMED)
    gate = gate_of(rank)
    number, h = number_of(gate), hash_of(f"{KEY.fingerprint}/{next_digest(rank)}")
    assert poll(gate) == [0, number, -number, 3, -3, 1, -1, h, -h, 0]
    asks = gate_of(participant_in(State.PREPARED))
    asks.request_rebuild(4)
    assert poll(asks, now=99.0) == [-5, number, -number, 3, -3, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "other",
    [prepare_of(key=key_of("q")), prepare_of(wave_of(dst=3))],
    ids=["another wave", "another map under the same key"],
)
def test_ranks_that_are_armed_for_different_waves_or_maps_do_not_pass(other):
    vectors = [poll(gate_of(arm(participant_of(), prepare))) for prepare in (prepare_of(), other)]
    minima = np.minimum(*np.array(vectors))[5:].tolist()
    assert gate_of(participant_of()).verdict(minima) == msg.PollNotPassed()


@pytest.mark.parametrize(
    ("entries", "verdict"),
    [
        ((3, -3, 7, -7, 0), msg.PollPassed(Epoch(3))),
        ((3, -4, 7, -7, 0), msg.PollNotPassed()),
        ((3, -3, 7, -8, 0), msg.PollNotPassed()),
        ((0, -3, 0, -7, 0), msg.PollNotPassed()),
        ((0, 0, 0, 0, 1), msg.PollDropped()),
        ((0, 0, 0, 0, 0), msg.PollNotPassed()),
        ((0, -3, 0, -7, 1), msg.PollNotPassed()),
    ],
)
def test_all_armed_for_one_wave_pass_and_none_armed_may_drop(entries, verdict):
    assert gate_of(participant_of()).verdict(list(entries)) == verdict


def test_nothing_is_polled_before_the_ranks_have_agreed_nor_after_they_disagreed():
    rank = participant_of()
    gate = Gate(rank, poll_every=1, resolve_after=1)
    assert not any(gate.advance() or gate.poll_due for _ in range(5))
    assert not gate.settle(gate.agreement() + 1)
    assert not any(gate.advance() or gate.poll_due for _ in range(5))
    assert rank.observe_only


def test_a_rank_that_only_observes_still_does_after_the_ranks_have_agreed():
    rank = participant_of(observe_only=True)
    assert gate_of(rank).observe_only is False
    assert rank.observe_only


def test_a_poll_in_flight_is_used_before_the_next_begins():
    gate = gate_of(participant_of(), poll_every=3, resolve_after=3)
    assert not gate.polling
    vector = np.array(poll(gate))
    assert gate.polling
    for _ in range(3):
        assert not gate.poll_due
        gate.advance()
    assert gate.resolve_due and not gate.poll_due
    gate.handle(PollResolved(vector), 0.0)
    assert gate.poll_due and not gate.polling


def test_a_boundary_at_which_the_gate_rests_is_counted():
    gate = gate_of(participant_of(), poll_every=2, resolve_after=1)
    gate.rest()
    assert gate.calls == 1
    assert gate.advance() and gate.poll_due


def test_a_rank_that_was_not_armed_for_what_passed_leaves_with_the_reason():
    """R8."""
    rank, other = participant_in(State.PREPARED), key_of("q")
    gate = gate_of(rank)
    number = number_of(gate)
    poll(gate)
    drop(rank)
    arm(rank, prepare_of(key=other))
    h = other.fingerprint
    minima = np.array([0, number, -number, 3, -3, 1, -1, h, -h, 0])
    left = only(gate.handle(PollResolved(minima), 0.0), msg.LeaveGroup)
    assert (left.reason, gate.left) == (Reason.EPOCH_MISMATCH, True)
    assert not any(gate.advance() or gate.poll_due for _ in range(9))


# --- A poll counts once and for the wave that it saw, and what is refused stays refused -----------


OTHER = key_of("q")
ABORT = from_controller(msg.Abort(LEADER, KEY))
COMMIT = from_controller(msg.Commit(LEADER, KEY))
PASSED = msg.PollPassed(Epoch(1))


@pytest.mark.parametrize("state", [State.PREPARED, State.ARMED])
def test_a_resolved_poll_does_not_pass_later(state):
    """R8: nobody has seen this rank armed since."""
    rank = participant_in(state)
    rank.snapshot(0.0)
    rank.handle(msg.PollNotPassed(), 0.0)
    if state is State.PREPARED:
        rank.handle(COMMIT, 0.0)
    assert only(rank.handle(PASSED, 0.0), msg.LeaveGroup).reason is Reason.EPOCH_MISMATCH


def test_a_resolved_poll_holds_no_abort_back():
    rank = participant_in(State.ARMED, polled=True)
    rank.handle(msg.PollNotPassed(), 0.0)
    assert only(rank.handle(ABORT, 0.0), msg.AbortAnswer).outcome is msg.WaveOutcome.DROPPED


def test_a_poll_drops_only_the_wave_that_it_saw():
    """R6: the other ranks drop what they held at the poll."""
    held, idle = participant_in(State.PREPARED), participant_of()
    for rank in (held, idle):
        rank.snapshot(50.0)
        if rank.wave is not None:
            drop(rank)
        rank.handle(from_controller(prepare_of(key=OTHER)), 50.0)
    never_polled = participant_in(State.STAGING)
    for rank in (held, idle, never_polled):
        assert rank.handle(msg.PollDropped(), 50.0) == []
        assert rank.state is State.STAGING


def test_a_wave_that_was_given_up_gets_no_yes_any_more():
    """R7: its staging memory may be gone."""
    for event, reason in (
        (ABORT, Reason.WAVE_DROPPED),
        (msg.ReloadRequested(), Reason.WEIGHTS_VERSION_CHANGED),
    ):
        rank = participant_in(State.PREPARED)
        rank.handle(event, 0.0)
        vote = reply(rank, prepare_of(), msg.Vote)
        assert (vote.yes, vote.reason) == (False, reason)


def test_reload_waits_for_the_poll_in_flight_and_drops_when_it_did_not_pass():
    """R4: reload ends waves of the old weights, but not under a poll in flight."""
    rank = participant_in(State.ARMED, polled=True)
    assert rank.handle(msg.ReloadRequested(), 0.0) == []
    actions = rank.handle(msg.PollNotPassed(), 0.0)
    assert only(actions, msg.PermitReload) and only(actions, msg.CancelStaging)
    assert only(actions, msg.Vote).reason is Reason.WEIGHTS_VERSION_CHANGED


def test_reload_waits_for_the_swap_of_a_poll_that_passed():
    rank = participant_in(State.ARMED, polled=True)
    rank.handle(msg.ReloadRequested(), 0.0)
    assert only(rank.handle(msg.PollPassed(Epoch(1)), 0.0), msg.Swap)
    actions = rank.handle(msg.SwapFinished(KEY, next_digest(rank)), 0.0)
    assert only(actions, msg.PermitReload)
    assert rank.epoch == 1


def test_reload_without_permission_under_a_poll_leaves_the_group():
    rank = participant_in(State.ARMED, polled=True)
    assert (
        only(rank.handle(msg.WeightsReloaded(2), 0.0), msg.LeaveGroup).reason
        is Reason.WEIGHTS_VERSION_CHANGED
    )


def test_no_wave_is_taken_between_permission_and_reload():
    rank = participant_of()
    rank.handle(msg.ReloadRequested(), 0.0)
    assert not reply(rank, prepare_of(), msg.Vote).yes
    state = only(rank.handle(msg.WeightsReloaded(2, (6,) * 8), 0.0), msg.RankState)
    assert state.weights_version == 2
    of_old = prepare_of(key=key_of("old", version=2))
    vote = reply(rank, of_old, msg.Vote)
    assert vote.reason is Reason.CHECKSUM_MISMATCH, "its checksums are those of the old weights"
    of_new = dataclasses.replace(prepare_of(key=key_of(version=2)), checksums=(6,))
    assert reply(rank, of_new, msg.StartStaging)


def test_reload_given_up_lets_waves_in_again():
    rank = participant_of()
    rank.handle(msg.ReloadRequested(), 0.0)
    assert rank.handle(msg.WeightsReloaded(1), 0.0) == []
    assert reply(rank, prepare_of(), msg.StartStaging)


def test_a_reload_of_the_same_version_registers_checksums_where_there_were_none():
    rank = participant_of(checksums=())
    rank.handle(msg.WeightsReloaded(1, (5,) * 8), 0.0)
    assert rank.checksums == (5,) * 8


@pytest.mark.parametrize("state", State)
def test_disabled_rank_refuses_the_next_wave_and_finishes_the_one_it_holds(state):
    rank = participant_in(state)
    rank.disabled = True
    assert not rank.takes_waves
    if state is State.IDLE:
        actions = rank.handle(from_controller(prepare_of()), 0.0)
        assert only(actions, msg.Vote).reason is Reason.OBSERVE_ONLY
        rank.disabled = False
        again = rank.handle(from_controller(prepare_of(key=key_of("p-2"))), 0.0)
        assert only(again, msg.StartStaging)
