"""Weights that are replaced under the agent of an engine that copies experts itself."""

import pytest

from evenkeel_moe.agent.trouble import FaultEnd
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import Ack, ParticipantState, QueryState, RankState, Vote
from tests.agent.guests import NEW, OLD, Guests
from tests.agent.ranks import LEADER, prepare_for, run_ranks
from tests.waiting import wait_until


def reload(guests, versions):
    """Replace the weights on every rank as an engine does; `versions` by rank."""

    def one(rank):
        moves, engine = guests.moves[rank], guests.engines[rank]
        moves.begin_reload()
        engine.load(versions[rank])
        moves.end_reload()

    run_ranks(2, one)


def order_back(guests, weights):
    """Order the way back to the old map, with the checksums that the ranks registered."""
    agent = guests.agents[0]
    old = agent.placement
    prepare = prepare_for(old, OLD, plan="back", epoch=agent.epoch, weights=weights)
    checksums = agent._participant.checksums
    transfers = [transfer for batch in prepare.body.batches for transfer in batch]
    sums = tuple(checksums[t.layer * old.num_logical_experts + t.logical_expert] for t in transfers)
    guests.old = old
    return guests.order(OLD, plan="back", epoch=agent.epoch, weights=weights, checksums=sums)


def test_a_move_under_way_ends_before_weights_are_replaced_and_the_next_plan_works():
    with Guests(OLD) as guests:
        guests.say(QueryState(LEADER))
        guests.order(NEW)
        guests.steps_until(lambda: guests.moves[0].move is not None)
        reload(guests, versions=(1, 1))
        for agent, engine, link in zip(guests.agents, guests.engines, guests.links, strict=True):
            assert link.expect(Ack).epoch == 1
            assert link.expect(RankState, lambda state: state.weights_version == 2)
            assert engine.weights.holds(NEW, version=1)
            assert agent.placement == NEW
        _, votes = order_back(guests, weights=2)
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
        for engine in guests.engines:
            engine.stop_after = 1
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


def test_weights_that_differ_between_ranks_are_trouble_until_the_next_good_ones():
    with Guests(NEW) as guests:  # Expert 3 lies on both ranks.
        reload(guests, versions=(1, 2))
        for agent in guests.agents:
            assert "replicas of an expert differ" in agent.heartbeat().trouble
            assert agent.observe_only
        reload(guests, versions=(3, 3))
        for agent in guests.agents:
            assert agent.heartbeat().trouble == ""
            assert not agent.observe_only


def test_wrong_bytes_after_a_copy_are_trouble_until_weights_are_loaded_again():
    with Guests(OLD) as guests:
        guests.engines[1].corrupt = True
        guests.order(NEW)
        guests.steps(20)
        wait_until(lambda: guests.agents[1].trouble, every_s=0.01)
        assert "checksum_mismatch" in guests.agents[1].trouble
        guests.engines[1].corrupt = False
        reload(guests, versions=(1, 1))
        assert guests.troubles() == ["", ""]
        _, votes = order_back(guests, weights=2)
        assert all(vote.yes for vote in votes)


def test_a_fault_of_the_balancer_outlasts_new_weights():
    with Guests(OLD) as guests:
        guests.agents[0].disable_migration("replicas differ", FaultEnd.RELOAD)
        guests.agents[0].disable_migration("another planner")
        reload(guests, versions=(1, 1))
        assert guests.agents[0].trouble == "another planner"
        assert guests.agents[0].observe_only
