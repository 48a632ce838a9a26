"""The agent of an engine that copies experts itself: votes, reports, and faults."""

import threading
from dataclasses import replace

import pytest

from evenkeel_moe.agent import GateFailed
from evenkeel_moe.agent.trouble import FaultEnd
from evenkeel_moe.errors import InvalidInput, Reason, Unavailable
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Ack,
    Commit,
    MovedAnswers,
    ParticipantState,
    QueryState,
    RankState,
    Vote,
    WaveOutcome,
)
from evenkeel_moe.wire.link import (
    CostCurve,
    Heartbeat,
    KvCache,
)
from tests.agent.guests import NEW, OLD, Guests
from tests.agent.ranks import LEADER, prepare_for, registered_prepare, run_ranks
from tests.waiting import wait_until


def test_the_engine_copies_and_every_rank_is_at_the_new_epoch():
    with Guests(OLD) as guests:
        guests.order(NEW)
        guests.steps(20)
        for agent, engine, link in zip(guests.agents, guests.engines, guests.links, strict=True):
            ack = link.expect(Ack)
            assert (ack.epoch, ack.placement_digest, ack.swap_s) == (1, NEW.digest, 0.001)
            assert agent.placement == NEW
            assert engine.weights.holds(NEW)
            assert engine.moves.move is None
        assert guests.troubles() == ["", ""]


def test_until_the_last_layer_the_rank_reports_swapping_and_the_old_epoch():
    with Guests(OLD) as guests:
        guests.let(stop_after=1)
        prepare, _ = guests.order(NEW)
        guests.steps(14)
        guests.say(QueryState(LEADER, query=7))
        guests.say(Abort(LEADER, prepare.wave))
        for link in guests.links:
            state = link.expect(RankState)
            assert (state.state, state.epoch, state.wave) == (
                ParticipantState.SWAPPING,
                0,
                prepare.wave,
            )
        guests.let(stop_after=None)
        guests.steps(10)
        for link in guests.links:
            assert link.expect(Ack).epoch == 1


def test_steps_go_on_counting_while_the_gate_rests():
    """The controller's deadlines count steps: a stopped move must not look like a stopped fleet."""
    with Guests(OLD) as guests:
        guests.let(stop_after=0)
        guests.order(NEW)
        guests.steps(40)
        assert guests.moves[0].move is not None
        assert {agent.heartbeat().step for agent in guests.agents} == {40}


def test_an_engine_that_stops_half_way_is_trouble_until_the_move_ends():
    with Guests(OLD) as guests:
        guests.let(stop_after=1)
        guests.order(NEW)
        guests.steps_until(lambda: all(guests.troubles()))
        for agent in guests.agents:
            assert "stopped with 1 of 2 layers switched: no layer for" in agent.trouble
            assert agent.heartbeat().trouble == agent.trouble
            assert agent.observe_only
        for engine in guests.engines:
            assert engine.weights.holds(Placement(engine.map, 2, 4)), "every layer is whole"
        guests.let(stop_after=None)
        guests.steps(10)
        assert guests.troubles() == ["", ""]
        for agent, link in zip(guests.agents, guests.links, strict=True):
            assert link.expect(Ack).epoch == 1
            assert not agent.observe_only and "migrate" in agent.hello().capabilities


def test_a_known_fault_is_named_at_once():
    with Guests(OLD, stall_after_s=1000.0) as guests:
        guests.let(stop_after=0)
        guests.order(NEW)
        guests.steps(12)
        assert guests.troubles() == ["", ""]
        guests.engines[0].broken = "its worker ended"
        guests.steps(1)
        assert "its worker ended" in guests.agents[0].trouble


def test_a_map_that_is_not_the_agreed_one_ends_the_wave_and_the_next_plan_works():
    with Guests(OLD) as guests:
        found = OLD.with_rows((0,), NEW.phy2log[:1])
        guests.let(target_map=found.phy2log)
        prepare, _ = guests.order(NEW)
        guests.steps(20)
        for agent, moves, link in zip(guests.agents, guests.moves, guests.links, strict=True):
            answer = link.expect(AbortAnswer)
            assert (answer.wave, answer.epoch, answer.drained) == (prepare.wave, 1, True)
            assert answer.outcome is WaveOutcome.DROPPED
            assert (moves.move, agent.epoch, agent.placement) == (None, 1, found)
        assert guests.troubles() == ["", ""]
        guests.let(target_map=None)
        order_back(guests)
        guests.steps(20)
        assert [link.expect(Ack).epoch for link in guests.links] == [2, 2]


def test_an_engine_that_moves_nothing_stays_at_its_epoch():
    with Guests(OLD) as guests:
        guests.let(target_map=OLD.phy2log)
        prepare, _ = guests.order(NEW)
        guests.steps(20)
        for agent, link in zip(guests.agents, guests.links, strict=True):
            answer = link.expect(AbortAnswer)
            assert (answer.wave, answer.epoch) == (prepare.wave, 0)
            assert agent.placement == OLD
        assert guests.troubles() == ["", ""]


def test_a_map_without_an_expert_is_trouble_until_a_restart():
    with Guests(OLD) as guests:
        guests.let(wrong_map=True)
        guests.order(NEW)
        guests.steps(20)
        for agent in guests.agents:
            assert "1 of 12 slots not as planned, in layers [0]" in agent.trouble
            assert "an expert has no slot" in agent.trouble
            assert agent.epoch == 0


def test_maps_that_differ_between_ranks_are_trouble_until_a_restart():
    with Guests(OLD) as guests:
        guests.engines[0].target_map = OLD.phy2log
        other = NEW.phy2log.copy()
        other[0, 0] = 1
        guests.engines[1].target_map = other
        guests.order(NEW)
        guests.steps(20)
        for agent in guests.agents:
            assert "the ranks differ in their map" in agent.trouble
            assert agent.epoch == 0
        assert all(moves.move is not None for moves in guests.moves)


def test_a_wave_the_engine_refuses_gets_a_no_vote():
    with Guests(OLD) as guests:
        guests.engines[1].no = (Reason.UNSUPPORTED, "no empty slots here")
        _, votes = guests.order(NEW)
        guests.steps(10)
        assert [vote.yes for vote in votes] == [True, False]
        assert votes[1].reason is Reason.UNSUPPORTED
        assert [agent.epoch for agent in guests.agents] == [0, 0]


def test_a_map_the_engine_changed_by_itself_is_followed():
    with Guests(OLD) as guests:
        for moves in guests.moves:
            moves.engine_rebalanced(NEW.phy2log)
        assert [agent.epoch for agent in guests.agents] == [1, 1]
        assert guests.agents[0].placement == NEW
        stale = prepare_for(OLD, NEW)
        guests.say(stale)
        for link in guests.links:
            assert link.expect(Vote).reason is Reason.STALE_BASE


STALE_MAP = pytest.mark.fault(
    "an engine that moved experts by itself while a plan was prepared",
    "the rank went on with the map from before and never learned the new one",
)
ELSEWHERE = OLD.with_rows((0,), OLD.phy2log[:1, ::-1].copy())


@STALE_MAP
@pytest.mark.parametrize("state", [ParticipantState.PREPARED, ParticipantState.ARMED])
def test_a_map_that_the_engine_changed_during_a_wave_is_followed_once_the_wave_has_ended(state):
    with Guests(OLD) as guests:
        prepare = prepare_for(OLD, NEW)
        guests.say(prepare)
        for link in guests.links:
            assert link.expect(Vote).yes
        if state is ParticipantState.ARMED:
            guests.say(Commit(LEADER, prepare.wave))
        wait_until(
            lambda: {agent._participant.state for agent in guests.agents} == {state}, every_s=0.01
        )
        for moves in guests.moves:
            moves.engine_rebalanced(ELSEWHERE.phy2log)
        for agent in guests.agents:
            assert (agent.placement, agent.epoch) == (ELSEWHERE, 0)
        guests.say(Abort(LEADER, prepare.wave))
        guests.steps_until(lambda: [agent.epoch for agent in guests.agents] == [1, 1])
        assert [agent.placement for agent in guests.agents] == [ELSEWHERE] * 2
        guests.say(QueryState(LEADER, query=7))
        for link in guests.links:
            state_told = link.expect(RankState)
            assert (state_told.epoch, state_told.placement_digest) == (1, ELSEWHERE.digest)


@STALE_MAP
def test_a_wave_that_passes_after_the_engine_moved_leaves_the_map_of_the_wave():
    with Guests(OLD) as guests:
        guests.order(NEW)
        for moves in guests.moves:
            moves.engine_rebalanced(ELSEWHERE.phy2log)
        guests.steps_until(lambda: [agent.epoch for agent in guests.agents] == [1, 1])
        guests.steps(3)
        assert [(agent.placement, agent.epoch) for agent in guests.agents] == [(NEW, 1)] * 2


@STALE_MAP
def test_an_engine_that_moved_there_and_back_during_a_wave_keeps_its_epoch():
    with Guests(OLD) as guests:
        prepare, _ = guests.order(NEW)
        for moves in guests.moves:
            moves.engine_rebalanced(ELSEWHERE.phy2log)
            moves.engine_rebalanced(OLD.phy2log)
        guests.say(Abort(LEADER, prepare.wave))
        for link in guests.links:
            link.expect(AbortAnswer)
        guests.steps(3)
        assert {agent.epoch for agent in guests.agents} == {0}
        assert {moves.moved_to for moves in guests.moves} == {None}


BLOCKED = pytest.mark.fault(
    "the peers of a rank whose gate failed",
    "their engines waited for it up to the timeout of the gate",
)


def leave_boundaries_out(guests, at):
    """Let rank 1 leave boundaries out before step `at`, which ends its gate and no other one."""
    for step in range(at):
        run_ranks(2, lambda rank, step=step: guests.agents[rank].step_boundary(step))
    run_ranks(2, lambda rank: guests.agents[rank].step_boundary(at + 3 * rank))
    assert "boundaries were left out" in guests.agents[1].trouble
    assert guests.agents[0].trouble == ""


@BLOCKED
@pytest.mark.parametrize("at", [3, 4, 5])
def test_the_peers_of_a_rank_whose_gate_failed_do_not_wait_for_it(at):
    with Guests(OLD) as guests:
        leave_boundaries_out(guests, at)
        for step in range(at + 1, at + 12):
            guests.agents[0].step_boundary(step)
        assert "the gate failed, and no wave was under way" in guests.agents[0].trouble
        assert "timed out" not in guests.agents[0].trouble.lower()
        guests.agents[0].close()
        said = [m for _, m in list(guests.links[0].sent.queue) if isinstance(m, Heartbeat)]
        assert any(beat.stopping for beat in said), "its engine goes on, and stops as planned"


@BLOCKED
@pytest.mark.parametrize("at", [3, 4, 5])
def test_weights_can_be_replaced_after_a_gate_failed(at):
    with Guests(OLD) as guests:
        leave_boundaries_out(guests, at)
        for step in range(at + 1, at + 12):
            run_ranks(2, lambda rank, step=step: guests.agents[rank].step_boundary(step))

        def replace(rank):
            guests.moves[rank].begin_reload()
            guests.engines[rank].load(1)
            guests.moves[rank].end_reload()

        run_ranks(2, replace)
        assert [agent._participant.weights_version for agent in guests.agents] == [2, 2]


@BLOCKED
def test_a_poll_that_fails_while_weights_are_replaced_is_trouble_and_no_rank_leaves_alone():
    """No rank was armed: as at a step boundary, the engine goes on on all ranks."""
    with Guests(OLD) as guests:
        leave_boundaries_out(guests, 2)  # Rank 0 began a poll that rank 1 does not join.
        assert guests.agents[0]._gate.polling

        def load(rank):
            guests.moves[rank].begin_reload()
            guests.moves[rank].end_reload()

        run_ranks(2, load)
        assert "the gate failed, and no wave was under way" in guests.agents[0].trouble


def test_a_check_that_takes_too_long_on_one_rank_refuses_the_reload_on_all():
    with Guests(OLD) as guests:
        for moves in guests.moves:
            moves._config = replace(moves._config, gate_timeout_s=0.2)
        busy = threading.Event()
        guests.agents[1].later(lambda: busy.wait(5.0) and None)
        errors = run_ranks(2, lambda rank: refused(guests.moves[rank]))
        busy.set()
        assert "ranks [1] cannot end the move" in errors[0] and "takes too long" in errors[1]
        assert not any(moves.reloading for moves in guests.moves)


def test_an_armed_rank_without_a_poll_result_leaves():
    """Torn map (R8): the others may have begun, and would wait for this rank's collectives."""
    with Guests(OLD) as guests:
        guests.order(NEW)
        agent = guests.agents[1]
        wait_until(lambda: agent._participant.state is ParticipantState.ARMED, every_s=0.01)
        guests.agents[0].step_boundary()
        with pytest.raises(GateFailed):
            for _ in range(8):
                if agent._participant.must_wait_for_poll():
                    agent._polls._poll = (agent._polls._poll[0], _Failed())
                agent.step_boundary()


def test_hooks_that_nobody_would_call_are_refused():
    with pytest.raises(InvalidInput, match="calls no hooks of a swap"):
        Guests(OLD, hooks={"slots_written": lambda *_: None})


@pytest.mark.parametrize("forgets", [False, True])
def test_moved_experts_are_asked_once_the_engine_has_moved_them(forgets):
    """The checksums agree: the engine forgets what it has not declared."""
    with Guests(OLD, answers=True) as guests:
        guests.let(forgets=forgets)
        prepare, _ = guests.order(NEW)
        guests.steps(20)
        for link, moved in zip(guests.links, (4, 2), strict=True):
            same = 0 if forgets else moved
            assert link.expect(MovedAnswers) == MovedAnswers(
                prepare.wave, moved, same, moved - same, 0
            )
        for agent in guests.agents:
            assert ("does not answer as when it was registered" in agent.trouble) == forgets


class _Failed:
    def wait(self, timeout=None):
        raise RuntimeError("a peer went away")


def test_facts_are_sent_on_every_stream_and_a_newer_one_replaces_its_kind():
    with Guests(OLD) as guests:
        curve, cache = CostCurve(64, (1e-3, 2e-3), 1e-5), KvCache(70_000, 10**10)
        for fact in (curve, KvCache(1, 1), cache):
            guests.agents[0].tell(fact)
            assert guests.links[0].expect(type(fact)) == fact
        guests.links[0].accept(stream=2)
        assert guests.links[0].expect(CostCurve) == curve
        assert guests.links[0].expect(KvCache) == cache


# --- Weights that are replaced under the agent of an engine that copies experts itself ------------


def reload(guests, versions):
    """Replace the weights on every rank as an engine does; `versions` by rank."""

    def one(rank):
        moves, engine = guests.moves[rank], guests.engines[rank]
        moves.begin_reload()
        engine.load(versions[rank])
        moves.end_reload()

    run_ranks(2, one)


def order_back(guests):
    """Order the way back to the old map, with the checksums that the ranks registered."""
    return guests.send(registered_prepare(guests.agents[0], OLD, "back"))


@pytest.mark.parametrize(
    "gate",
    [
        (3, 2),
        pytest.param(
            (3, 3),
            marks=pytest.mark.fault(
                "new weights while experts move, with K = D", "every rank left the group"
            ),
        ),
    ],
)
def test_a_move_under_way_ends_before_weights_are_replaced_and_the_next_plan_works(gate):
    with Guests(OLD, gate=gate) as guests:
        guests.say(QueryState(LEADER))
        guests.order(NEW)
        guests.steps_until(lambda: guests.moves[0].move is not None)
        reload(guests, versions=(1, 1))
        for agent, engine, link in zip(guests.agents, guests.engines, guests.links, strict=True):
            assert link.expect(Ack).epoch == 1
            assert link.expect(RankState, lambda state: state.weights_version == 2)
            assert engine.weights.holds(NEW, version=1)
            assert agent.placement == NEW
        votes = order_back(guests)
        assert all(vote.yes for vote in votes)
        guests.steps(20)
        for engine, link in zip(guests.engines, guests.links, strict=True):
            assert link.expect(Ack).epoch == 2
            assert engine.weights.holds(OLD, version=1)
        assert guests.troubles() == ["", ""]


def test_a_wave_that_a_poll_may_still_pass_is_carried_out_first():
    with Guests(OLD) as guests:
        guests.order(NEW)
        parts = [agent._participant for agent in guests.agents]
        wait_until(
            lambda: all(part.state is ParticipantState.ARMED for part in parts), every_s=0.01
        )
        while not all(part.must_wait_for_poll() for part in parts):
            for rank in range(2):
                guests.agents[rank].step_boundary()
        reload(guests, versions=(1, 1))
        assert [agent.epoch for agent in guests.agents] == [1, 1]
        assert all(engine.weights.holds(NEW, version=1) for engine in guests.engines)


def test_a_staged_wave_that_is_not_armed_is_dropped():
    with Guests(OLD) as guests:
        prepare = prepare_for(OLD, NEW)
        guests.say(prepare)
        assert all(link.expect(Vote).yes for link in guests.links)
        reload(guests, versions=(1, 1))
        guests.steps(9)
        assert [agent.epoch for agent in guests.agents] == [0, 0]
        assert guests.troubles() == ["", ""]


def test_ranks_at_different_steps_refuse_new_weights():
    with Guests(OLD) as guests:
        guests.steps(2)
        guests.agents[1].step_boundary()
        for agent in guests.agents:
            assert agent.heartbeat().step in (2, 3)
        errors = run_ranks(2, lambda rank: refused(guests.moves[rank]))
        assert all("the ranks differ in their steps; pause the engine" in text for text in errors)
        assert {agent.hello().weights_version for agent in guests.agents} == {1}


def test_a_move_that_cannot_end_refuses_new_weights():
    with Guests(OLD) as guests:
        guests.let(stop_after=1)
        guests.order(NEW)
        guests.steps_until(lambda: guests.engines[0].stop_after == 0)
        errors = run_ranks(2, lambda rank: refused(guests.moves[rank]))
        assert all("plan cannot end" in text for text in errors)
        for engine in guests.engines:
            assert engine.weights.holds(Placement(engine.map, 2, 4))


def refused(moves):
    with pytest.raises(Unavailable) as refusal:
        moves.begin_reload()
    return str(refusal.value)


def test_wrong_bytes_after_a_copy_are_trouble_until_weights_are_loaded_again():
    """Wrong bytes (R4): copied experts are compared with the checksums registered at load."""
    with Guests(OLD) as guests:
        guests.engines[1].corrupt = True
        guests.order(NEW)
        guests.steps(20)
        wait_until(lambda: guests.agents[1].trouble, every_s=0.01)
        assert "checksum_mismatch" in guests.agents[1].trouble
        assert guests.agents[0].trouble == ""
        guests.engines[1].corrupt = False
        reload(guests, versions=(1, 1))
        assert guests.troubles() == ["", ""]
        votes = order_back(guests)
        assert all(vote.yes for vote in votes)


def test_the_fault_of_new_weights_is_told_in_place_of_that_of_the_old_ones():
    with Guests(NEW) as guests:
        for agent in guests.agents:
            agent.disable_migration("a moved expert answers otherwise", FaultEnd.RELOAD)
        reload(guests, versions=(1, 2))
        for agent in guests.agents:
            assert "replicas of 2 experts differ" in agent.trouble
            assert agent.observe_only


def test_a_fault_of_the_balancer_outlasts_new_weights():
    with Guests(OLD) as guests:
        guests.agents[0].disable_migration("replicas differ", FaultEnd.RELOAD)
        guests.agents[0].disable_migration("another planner")
        reload(guests, versions=(1, 1))
        assert guests.agents[0].trouble == "another planner"
        assert guests.agents[0].observe_only
