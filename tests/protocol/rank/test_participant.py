"""The rank's machine, rule by rule."""

import pytest

from evenkeel_moe.errors import IllegalEvent, Reason
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol import messages as msg
from evenkeel_moe.protocol.messages import Ack, SendToController, WaveOutcome
from evenkeel_moe.protocol.messages import ParticipantState as State
from evenkeel_moe.protocol.rank.save_barrier import SaveBarrier
from evenkeel_moe.protocol.rank.wave_memory import EndedWaves
from tests.protocol.machines import (
    BASE,
    LEADER,
    STREAM,
    drop,
    from_controller,
    key_of,
    next_digest,
    of_kind,
    only,
    participant_in,
    participant_of,
    prepare_of,
    reply,
    sent,
    wave_of,
)

KEY = key_of()


def test_prepare_starts_staging_and_the_yes_goes_back_by_its_stream():
    rank = participant_of()
    start = reply(rank, prepare_of(), msg.StartStaging, stream=3)
    assert start.prepare.wave == KEY
    vote = only(rank.handle(msg.StagingFinished(KEY), 0.0), msg.SendToController)
    assert vote == msg.SendToController(msg.Vote(KEY, True), 3)


def test_vote_follows_the_stream_that_got_the_newest_prepare():
    """R1: votes count only from the stream that got the Prepare."""
    rank = participant_of()
    rank.handle(from_controller(prepare_of(), stream=3), 0.0)
    rank.handle(from_controller(prepare_of(), stream=4), 0.0)
    assert only(rank.handle(msg.StagingFinished(KEY), 0.0), msg.SendToController).stream == 4


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (prepare_of(key=key_of(generation="g0")), Reason.GENERATION_CHANGED),
        (prepare_of(base_epoch=1), Reason.STALE_BASE),
        (prepare_of(base_epoch=5), Reason.STALE_BASE),
        (prepare_of(key=key_of(version=2)), Reason.WEIGHTS_VERSION_CHANGED),
    ],
)
def test_a_wave_planned_for_another_state_than_the_ranks_is_refused(prepare, reason):
    """R1, R3, R4: a wave names the generation, the epoch and the weights it was planned for."""
    vote = reply(participant_of(), prepare, msg.Vote)
    assert (vote.yes, vote.reason) == (False, reason)


@pytest.mark.parametrize(
    "leader", [msg.Leader("b", 4), msg.Leader("b", 5)], ids=["lower", "same, other id"]
)
def test_lower_term_and_bound_term_are_refused_with_the_newest_leader(leader):
    """R2: ranks refuse lower terms and name theirs; a term belongs to its first leader id."""
    rank = participant_of()
    rank.handle(from_controller(msg.QueryState(msg.Leader("a", 5))), 0.0)
    refused = reply(rank, prepare_of(leader=leader), msg.TermRefused)
    assert refused.leader == msg.Leader("a", 5)
    assert rank.state is State.IDLE


def test_higher_term_is_bound():
    rank = participant_of()
    rank.handle(from_controller(msg.QueryState(msg.Leader("a", 5))), 0.0)
    state = reply(rank, msg.QueryState(msg.Leader("b", 6), query=9), msg.RankState)
    assert (state.highest_term, state.query) == (6, 9)


def test_refused_prepare_is_not_taken_when_it_comes_again():
    rank = participant_of(observe_only=True)
    assert reply(rank, prepare_of(), msg.Vote).reason is Reason.OBSERVE_ONLY
    rank.observe_only = False
    assert reply(rank, prepare_of(), msg.Vote).reason is Reason.WAVE_DROPPED


def test_commit_only_arms():
    """R5."""
    rank = participant_in(State.PREPARED)
    assert rank.handle(from_controller(msg.Commit(LEADER, KEY)), 0.0) == []
    assert (rank.state, rank.epoch, rank.placement) == (State.ARMED, 0, BASE)


def test_the_ack_follows_the_stream_of_the_newest_commit():
    rank = participant_in(State.PREPARED)
    for stream in (8, 9):
        rank.handle(from_controller(msg.Commit(LEADER, KEY), stream), 0.0)
    rank.snapshot(0.0)
    rank.handle(msg.PollPassed(Epoch(1)), 0.0)
    swapped = rank.handle(msg.SwapFinished(KEY, next_digest(rank)), 0.0)
    assert only(swapped, msg.SendToController).stream == 9


def test_prepared_participant_never_aborts_alone():
    """R6: a prepared or armed rank that hears nothing keeps its staging and keeps polling."""
    for state in (State.PREPARED, State.ARMED):
        rank = participant_in(state)
        for n in range(50):
            rank.snapshot(100.0 + n)
            assert rank.handle(msg.PollNotPassed(), 100.0 + n) == []
        assert rank.state is state


def test_want_drop_is_said_by_leaderless_ranks_that_are_not_armed():
    """R6: if no rank is armed and all want to drop, the poll says so."""
    assert participant_in(State.PREPARED).snapshot(9.9).want_drop is False
    assert participant_in(State.PREPARED).snapshot(10.0).want_drop is True
    assert participant_in(State.ARMED).snapshot(99.0).want_drop is False
    assert participant_of().snapshot(0.0).want_drop is True, (
        "a rank no leader ever spoke to holds nothing back"
    )
    rank = participant_in(State.PREPARED)
    rank.handle(from_controller(msg.QueryState(LEADER)), 5.0)
    assert [rank.snapshot(now).want_drop for now in (14.9, 15.0)] == [False, True]


def test_dropping_together_gives_up_what_was_held_at_the_snapshot():
    rank = participant_in(State.PREPARED)
    rank.snapshot(50.0)
    rank.handle(from_controller(msg.Commit(LEADER, KEY)), 51.0)
    assert only(rank.handle(msg.PollDropped(), 52.0), msg.CancelStaging).wave == KEY


def test_abort_is_answered_only_after_the_poll_in_flight_resolved():
    """R7: a rank answers Abort only after every poll that snapshotted it as armed has resolved."""
    rank = participant_in(State.ARMED, polled=True)
    assert rank.handle(from_controller(msg.Abort(LEADER, KEY)), 0.0) == []
    actions = rank.handle(msg.PollNotPassed(), 0.0)
    answer = only(actions, msg.AbortAnswer)
    assert (answer.outcome, answer.drained, answer.epoch) == (WaveOutcome.DROPPED, False, 0)


def test_abort_that_lost_to_the_poll_is_answered_at_the_new_epoch():
    """R7: if that poll passed, the answer is "at the new epoch"."""
    rank = participant_in(State.ARMED, polled=True)
    rank.handle(from_controller(msg.Abort(LEADER, KEY), stream=9), 0.0)
    assert only(rank.handle(msg.PollPassed(Epoch(1)), 0.0), msg.Swap).epoch == 1
    actions = rank.handle(msg.SwapFinished(KEY, next_digest(rank)), 0.0)
    answer = only(actions, msg.AbortAnswer)
    assert (answer.outcome, answer.epoch, answer.drained) == (WaveOutcome.SWAPPED, 1, True)
    assert only(actions, msg.Ack).epoch == 1


def test_poll_that_saw_the_rank_before_it_was_armed_holds_no_abort_back():
    rank = participant_in(State.PREPARED)
    rank.snapshot(0.0)
    rank.handle(from_controller(msg.Commit(LEADER, KEY)), 0.0)
    assert reply(rank, msg.Abort(LEADER, KEY), msg.AbortAnswer).outcome == "dropped"


def test_drained_is_said_when_the_transport_drained():
    """R7: its answer says that its transport has drained."""
    rank = participant_in(State.PREPARED)
    first = reply(rank, msg.Abort(LEADER, KEY), msg.AbortAnswer, stream=8)
    again = reply(rank, msg.Abort(LEADER, KEY), msg.AbortAnswer, stream=9)
    assert not first.drained and not again.drained
    busy = reply(rank, prepare_of(key=key_of("q")), msg.Vote)
    assert busy.reason is Reason.TRANSPORT_NOT_DRAINED
    last = only(rank.handle(msg.TransportDrained(KEY), 0.0), msg.SendToController)
    assert last.stream == 9 and last.message.drained
    assert rank.state is State.IDLE
    once = participant_in(State.STAGING)
    once.handle(from_controller(msg.Abort(LEADER, KEY), stream=8), 0.0)
    assert only(once.handle(msg.TransportDrained(KEY), 0.0), msg.SendToController).stream == 8


def test_abort_of_a_wave_never_seen_keeps_a_late_prepare_of_it_out():
    """R7: Abort is resent until answered, and an answer is final."""
    rank = participant_of()
    answer = reply(rank, msg.Abort(LEADER, KEY), msg.AbortAnswer)
    assert (answer.outcome, answer.drained) == (WaveOutcome.DROPPED, True)
    assert reply(rank, prepare_of(), msg.Vote).reason is Reason.WAVE_DROPPED


def test_repeats_after_the_swap_are_answered_alike():
    rank = participant_in(State.SWAPPING)
    digest = next_digest(rank)
    rank.handle(msg.SwapFinished(KEY, digest), 0.0)
    for message in (prepare_of(), msg.Commit(LEADER, KEY)):
        assert reply(rank, message, msg.Ack) == msg.Ack(KEY, Epoch(1), digest)
    answer = reply(rank, msg.Abort(LEADER, KEY), msg.AbortAnswer)
    assert (answer.outcome, answer.epoch) == (WaveOutcome.SWAPPED, 1)


def test_a_repeated_acknowledgement_names_the_map_of_the_wave():
    """The engine may have moved experts since: the wave led to its own map all the same."""
    rank = participant_in(State.SWAPPING)
    digest = next_digest(rank)
    rank.handle(msg.SwapFinished(KEY, digest, 0.5), 0.0)
    rank.handle(msg.EngineRebalanced(BASE), 0.0)
    answer = reply(rank, msg.Commit(LEADER, KEY), msg.Ack)
    assert answer == msg.Ack(KEY, Epoch(1), digest)


def test_repeated_prepare_repeats_the_vote():
    yes = reply(participant_in(State.PREPARED), prepare_of(), msg.SendToController, stream=8)
    assert yes == msg.SendToController(msg.Vote(KEY, True), 8)
    no = participant_in(State.ABORTED)
    assert reply(no, prepare_of(), msg.Vote).reason is Reason.TRANSFER_FAILED


def test_second_wave_is_refused_as_busy_and_may_come_later():
    rank = participant_in(State.PREPARED)
    other = prepare_of(key=key_of("q"))
    refusal = reply(rank, other, msg.Vote)
    assert (refusal.yes, refusal.reason) == (False, Reason.BUSY)
    drop(rank)
    assert reply(rank, other, msg.StartStaging)


def test_nothing_reachable_changes_before_the_swap():
    """R11: received bytes stay in staging until the swap; only Swap installs a map."""
    rank = participant_in(State.ARMED, polled=True)
    assert rank.placement == BASE
    rank.handle(msg.PollPassed(Epoch(1)), 0.0)
    assert rank.placement == BASE
    rank.handle(msg.SwapFinished(KEY, next_digest(rank)), 0.0)
    assert rank.placement == BASE.with_rows((0,), wave_of().rows)


def test_a_pass_of_another_epoch_leaves_the_group():
    """R8: an impossible result means that the gate's result is unknown."""
    rank = participant_in(State.ARMED, polled=True)
    assert (
        only(rank.handle(msg.PollPassed(Epoch(9)), 0.0), msg.LeaveGroup).reason
        is Reason.EPOCH_MISMATCH
    )
    other = participant_in(State.SWAPPING)
    assert only(other.handle(msg.SwapFinished(KEY, "another map"), 0.0), msg.LeaveGroup)
    half = participant_in(State.SWAPPING)
    assert only(half.handle(msg.SwapFailed(KEY, "out of memory"), 0.0), msg.LeaveGroup)


def test_a_wave_that_the_engine_ends_elsewhere_is_dropped_and_its_map_followed():
    """R12: no rank is at the plan's new map, so the wave is not committed."""
    for rows, epoch in (((), 0), ((0,), 1)):
        rank = participant_in(State.SWAPPING)
        found = BASE.with_rows(rows, BASE.phy2log[list(rows)][:, ::-1])
        answer = only(rank.handle(msg.EngineRebalanced(found), 0.0), msg.AbortAnswer)
        assert (answer.epoch, answer.outcome, answer.drained) == (epoch, WaveOutcome.DROPPED, True)
        assert (rank.state, rank.epoch, rank.placement) == (State.IDLE, epoch, found)
        late = reply(rank, msg.Commit(LEADER, KEY), msg.AbortAnswer)
        assert late.outcome is WaveOutcome.DROPPED


def test_rank_state_has_all_that_a_new_leader_decides_from():
    """R12, R15: epoch, wave held, last wave, and the full map when asked for."""
    rank = participant_in(State.SWAPPING)
    held = reply(rank, msg.QueryState(LEADER), msg.RankState)
    assert (held.state, held.wave, held.placement, held.checksums) == (
        State.SWAPPING,
        KEY,
        None,
        None,
    )
    rank.handle(msg.SwapFinished(KEY, next_digest(rank)), 0.0)
    query = msg.QueryState(LEADER, want_placement=True, want_checksums=True, query=4)
    state = reply(rank, query, msg.RankState)
    assert (state.epoch, state.last_wave, state.last_outcome) == (1, KEY, WaveOutcome.SWAPPED)
    assert state.placement.digest == state.placement_digest and len(state.checksums) == 8


def test_wave_larger_than_this_ranks_staging_is_refused():
    rank = participant_of(staging_bytes=9)
    assert reply(rank, prepare_of(), msg.Vote).reason is Reason.STAGING_TOO_SMALL
    assert reply(participant_of(staging_bytes=10), prepare_of(), msg.StartStaging)
    sender = participant_of(rank=1, staging_bytes=0)
    assert reply(sender, prepare_of(), msg.StartStaging)


def test_illegal_local_event_raises_with_the_history_and_changes_nothing():
    rank = participant_in(State.PREPARED)
    with pytest.raises(IllegalEvent, match="staging\\+StagingFinished") as caught:
        rank.handle(msg.SwapFinished(KEY, ""), 0.0)
    assert caught.value.state == State.PREPARED
    assert rank.state is State.PREPARED


def test_news_of_another_waves_copies_is_ignored():
    rank = participant_in(State.STAGING)
    for event in (msg.StagingFinished, msg.TransportDrained):
        assert rank.handle(event(key_of("old")), 0.0) == []
    assert rank.handle(msg.StagingFailed(key_of("old"), Reason.TRANSFER_FAILED), 0.0) == []
    assert rank.state is State.STAGING


def test_commit_of_a_wave_given_up_is_answered_as_gone():
    rank = participant_in(State.ABORTED)
    answer = reply(rank, msg.Commit(LEADER, KEY), msg.AbortAnswer, stream=STREAM)
    assert (answer.outcome, answer.drained) == (WaveOutcome.REFUSED, False)
    assert sent(rank.handle(msg.TransportDrained(KEY), 0.0)) == [], "nobody asked to abort"


def test_placement_changed_by_the_engine_makes_plans_for_the_old_one_stale():
    """R3."""
    rank, moved = participant_of(), BASE.with_rows((0,), wave_of().rows)
    assert rank.handle(msg.EngineRebalanced(moved), 0.0) == []
    assert (rank.placement, rank.epoch) == (moved, 1)
    actions = rank.handle(from_controller(prepare_of()), 0.0)
    assert only(actions, msg.Vote).reason is Reason.STALE_BASE


OTHER = key_of("q")
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
    """R4: it ends a wave of the old weights that no poll can pass."""
    rank = participant_in(state)
    actions = rank.handle(msg.ReloadRequested(), 0.0)
    assert only(actions, msg.CancelStaging).wave == KEY and only(actions, msg.PermitReload)
    told = only(actions, msg.Vote)
    assert (told.yes, told.reason) == (False, Reason.WEIGHTS_VERSION_CHANGED)
    assert rank.state is State.ABORTED
    rank.handle(msg.TransportDrained(KEY), 0.0)
    vote = reply(rank, prepare_of(key=OTHER), msg.Vote)
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
    answer = reply(rank, msg.QueryState(LEADER), msg.RankState)
    assert (answer.step, answer.wave, rank.prepare) == (0, None, None)
    prepare = prepare_of()
    rank.handle(from_controller(prepare), 0.0)
    assert rank.prepare is prepare


def test_a_refusal_during_a_reload_says_so():
    rank = participant_in(State.IDLE)
    other = from_controller(prepare_of(key=key_of(version=2)))
    assert not only(rank.handle(other, 0.0), msg.Vote).detail.endswith("a reload is under way")
    rank.handle(msg.ReloadRequested(), 0.0)
    refused = reply(rank, prepare_of(), msg.Vote)
    assert refused.detail.endswith("a reload is under way")


KEYS = [key_of(str(number)) for number in range(1025)]


@pytest.fixture
def full():
    """Return as many ended waves as are remembered."""
    ended = EndedWaves()
    for key in KEYS[:-1]:
        assert ended.add(key, WaveOutcome.DROPPED) is WaveOutcome.DROPPED
    return ended


def test_the_oldest_of_too_many_ended_waves_is_forgotten(full):
    assert full.outcome(KEYS[0]) is WaveOutcome.DROPPED
    full.add(KEYS[-1], WaveOutcome.DROPPED)
    assert full.outcome(KEYS[0]) is None
    assert all(full.outcome(key) is WaveOutcome.DROPPED for key in KEYS[1:])


def test_a_wave_that_ends_again_keeps_its_first_outcome_and_no_wave_is_forgotten(full):
    assert full.add(KEYS[1], WaveOutcome.REFUSED) is WaveOutcome.DROPPED
    assert full.outcome(KEYS[0]) is WaveOutcome.DROPPED


ACKS = [SendToController(Ack(key_of(), Epoch(1), "new"), stream) for stream in range(300)]


def test_answers_wait_for_the_save_and_keep_their_order():
    barrier = SaveBarrier()
    assert barrier.outgoing(ACKS[0]) == [ACKS[0]]
    barrier.begin(Epoch(0), "old")
    assert [barrier.outgoing(ack) for ack in ACKS[:3]] == [[], [], []]
    assert barrier.told(Epoch(1), "new") == (0, "old")
    assert barrier.end() == ACKS[:3]
    assert barrier.end() == []
    assert barrier.told(Epoch(1), "new") == (1, "new")
    assert barrier.outgoing(ACKS[0]) == [ACKS[0]]


def test_a_bounded_number_of_answers_waits():
    barrier = SaveBarrier()
    barrier.begin(Epoch(0), "old")
    for ack in ACKS:
        barrier.outgoing(ack)
    assert barrier.end() == ACKS[-256:]


def test_while_two_saves_are_under_way_the_first_saved_placement_is_told():
    barrier = SaveBarrier()
    barrier.begin(Epoch(0), "zero")
    barrier.begin(Epoch(1), "one")
    assert barrier.told(Epoch(2), "two") == (0, "zero")
    barrier.end()
    assert barrier.told(Epoch(2), "two") == (2, "two")


def test_a_no_after_a_yes_follows_the_stream_that_asked_last():
    rank = participant_in(State.PREPARED)
    rank.handle(from_controller(prepare_of(), stream=8), 0.0)
    no = only(rank.handle(msg.ReloadRequested(), 0.0), msg.SendToController)
    assert (no.message.reason, no.stream) == (Reason.WEIGHTS_VERSION_CHANGED, 8)
