"""How a wave ends on a rank: by a swap, by the engine, by a reload."""

import pytest

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import ParticipantState as State
from tests.protocol.machines import (
    BASE,
    LEADER,
    STREAM,
    from_controller,
    key_of,
    next_digest,
    of_kind,
    only,
    participant_in,
    prepare_of,
    sent,
    wave_of,
)

KEY, OTHER = key_of(), key_of("q")
MOVED = BASE.with_rows((1,), wave_of(layer=1).rows)


def test_a_swap_of_another_wave_leaves_the_group():
    """R8."""
    rank = participant_in(State.SWAPPING)
    swapped = msg.SwapFinished(OTHER, next_digest(rank))
    assert only(rank.handle(swapped, 0.0), msg.LeaveGroup).reason is Reason.EPOCH_MISMATCH


@pytest.mark.parametrize("engine", [False, True])
def test_waves_that_ended_at_an_earlier_epoch_are_stale(engine):
    """R3: only those that ended at the present epoch are remembered."""
    rank = participant_in(State.ARMED)
    rank.handle(from_controller(msg.Abort(LEADER, OTHER)), 0.0)
    early = from_controller(prepare_of(key=OTHER))
    rank.snapshot(0.0)
    rank.handle(msg.PollPassed(Epoch(1)), 0.0)
    if engine:
        rank.handle(msg.EngineRebalanced(MOVED), 0.0)
    else:
        rank.handle(msg.SwapFinished(KEY, next_digest(rank)), 0.0)
    assert rank.epoch == 1
    assert only(rank.handle(early, 0.0), msg.Vote).reason is Reason.STALE_BASE


@pytest.mark.parametrize(("abort_stream", "streams"), [(STREAM, [STREAM]), (9, [STREAM, 9])])
def test_all_who_asked_hear_that_the_engine_ended_the_wave_elsewhere(abort_stream, streams):
    rank = participant_in(State.SWAPPING)
    rank.handle(from_controller(msg.Abort(LEADER, KEY), stream=abort_stream), 0.0)
    answers = of_kind(rank.handle(msg.EngineRebalanced(BASE), 0.0), msg.SendToController)
    assert [answer.stream for answer in answers] == streams


def test_a_rank_without_a_wave_permits_a_reload_at_once():
    for state in (State.IDLE, State.ABORTED):
        rank = participant_in(state)
        assert rank.handle(msg.ReloadRequested(), 0.0) == [msg.PermitReload()]


@pytest.mark.parametrize("state", [State.STAGING, State.PREPARED, State.ARMED])
def test_from_the_request_to_reload_on_no_wave_is_taken(state):
    """R4."""
    rank = participant_in(state)
    assert only(rank.handle(msg.ReloadRequested(), 0.0), msg.PermitReload)
    rank.handle(msg.TransportDrained(KEY), 0.0)
    vote = only(rank.handle(from_controller(prepare_of(key=OTHER)), 0.0), msg.Vote)
    assert (vote.yes, vote.reason) == (False, Reason.WEIGHTS_VERSION_CHANGED)


@pytest.mark.parametrize("state", [State.STAGING, State.PREPARED, State.ARMED])
def test_other_weights_drop_the_wave_and_are_told(state):
    """R4: no poll in flight has seen the rank armed."""
    rank = participant_in(state)
    actions = rank.handle(msg.WeightsReloaded(2, (6,) * 8), 0.0)
    assert only(actions, msg.CancelStaging).wave == KEY
    told = only(actions, msg.RankState)
    assert (told.query, told.placement, told.checksums) == (0, None, None), "nobody asked"
    assert (told.weights_version, rank.checksums, rank.state) == (2, (6,) * 8, State.ABORTED)
    assert not [m for m in sent(actions) if isinstance(m, msg.Vote) and m.yes]


def test_a_new_rank_has_taken_no_step_and_holds_no_wave():
    rank = participant_in(State.IDLE)
    answer = only(rank.handle(from_controller(msg.QueryState(LEADER)), 0.0), msg.RankState)
    assert (answer.step, answer.wave, rank.prepare) == (0, None, None)
    prepare = prepare_of()
    rank.handle(from_controller(prepare), 0.0)
    assert rank.prepare is prepare


def test_a_refusal_during_a_reload_says_so():
    rank = participant_in(State.IDLE)
    other = from_controller(prepare_of(key=key_of(version=2)))
    assert not only(rank.handle(other, 0.0), msg.Vote).detail.endswith("a reload is under way")
    rank.handle(msg.ReloadRequested(), 0.0)
    refused = only(rank.handle(from_controller(prepare_of()), 0.0), msg.Vote)
    assert refused.detail.endswith("a reload is under way")
