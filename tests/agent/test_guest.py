"""The agent of an engine that copies experts itself: votes, reports, and faults."""

from typing import Any

import pytest

from evenkeel_moe.agent import AgentConfig, GateFailed, GuestAgent
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, EpRank
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.protocol.messages import (
    Abort,
    Ack,
    Commit,
    ParticipantState,
    QueryState,
    RankIdentity,
    RankState,
    Vote,
)
from evenkeel_moe.wire.link import (
    CostCurve,
    FlowControl,
    KvCache,
    Registration,
    RegistrationOutcome,
)
from tests.agent.fleet import PortLink
from tests.agent.ranks import (
    CPU,
    GENERATION,
    LEADER,
    Group,
    ToyWeights,
    expert_tensors,
    prepare_for,
    run_ranks,
    shape_of,
    two_rank_placements,
)
from tests.waiting import deadline, wait_until


class ToyEngine:
    """Copies one layer per step; the attributes below make it misbehave."""

    def __init__(self, placement, rank):
        self.map = placement.phy2log.copy()
        self.rank = rank
        self.weights = ToyWeights(placement, rank)
        self.version = 0
        self.agent: Any = None
        self.todo: list[int] = []
        self.target: Any = None
        self.broken = ""
        self.no = None
        self.stop_after = None
        self.corrupt = False
        self.wrong_map = False

    def refusal(self, prepare, new):
        return self.no

    def begin(self, move):
        self.target, self.todo = move.placement.phy2log, list(range(len(self.map)))

    def fault(self):
        return self.broken or None

    def step(self):
        self.switch_layer()
        self.agent.step_boundary()

    def finish(self, move):
        while self.todo and self.stop_after != 0:
            self.switch_layer()

    def switch_layer(self):
        if self.todo and self.stop_after != 0:
            layer = self.todo.pop(0)
            self.stop_after = None if self.stop_after is None else self.stop_after - 1
            self.map[layer] = self.target[layer]
            self._copy(layer)
            self.agent.layer_switched(layer, 0.001)
            if not self.todo:
                if self.wrong_map:
                    self.map[0, 0] = 1
                self.agent.move_finished(self.map)

    def _copy(self, layer):
        per_rank = self.map.shape[1] // 2
        for local in range(per_rank):
            expert = int(self.map[layer, self.rank * per_rank + local])
            if expert >= 0:
                wrong = expert + 1 if self.corrupt else expert
                source = expert_tensors(layer, wrong, self.version)
                for have, want in zip(self.weights.slots[layer, local], source, strict=True):
                    have.copy_(want)

    def load(self, version):
        """Replace the weights in all slots."""
        self.version = version
        for layer in range(len(self.map)):
            self._copy(layer)


class Guests:
    """Two ranks on threads that run steps in lockstep."""

    def __init__(self, old, **settings):
        self.old = old
        self.group = Group(2)
        self.engines = [ToyEngine(old, rank) for rank in range(2)]
        self.links = [PortLink() for _ in range(2)]
        self.settings = {"stall_after_s": 0.05, "stall_after_steps": 10, **settings}
        self.agents = run_ranks(2, self._make)
        for engine, agent, link in zip(self.engines, self.agents, self.links, strict=True):
            engine.agent = agent
            assert link.ready.wait(deadline(20))
            flow = FlowControl(report_interval_s=0.05)
            link.say(Registration(RegistrationOutcome.ACCEPTED, 1.0, 5.0, flow))

    def _make(self, rank):
        config = AgentConfig(
            identity=RankIdentity(DeploymentId("toy"), EpRank(rank), GENERATION, 1000 + rank),
            shape=shape_of(self.old),
            node="node-0",
            staging_bytes=1 << 20,
            poll_every=3,
            resolve_after=2,
            gate_timeout_s=2.0,
        )
        return GuestAgent(
            config,
            self.old,
            0,
            self.engines[rank].weights,
            self.engines[rank],
            connect=lambda name, device: self.group.connect(rank, name, device),
            device=CPU,
            link=self.links[rank],
            **self.settings,
        )

    def steps(self, count):
        for _ in range(count):
            run_ranks(2, lambda rank: self.engines[rank].step())

    def steps_until(self, ask):
        """Run steps until the answer is true."""
        wait_until(lambda: ask() or self.steps(1), every_s=0.005)

    def say(self, message):
        for link in self.links:
            link.say(message)

    def order(self, new, **changes):
        prepare = prepare_for(self.old, new, **changes)
        self.say(prepare)
        votes = [link.expect(Vote) for link in self.links]
        if all(vote.yes for vote in votes):
            self.say(Commit(LEADER, prepare.wave))
        return prepare, votes

    def troubles(self):
        return [agent.trouble for agent in self.agents]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for agent in self.agents:
            agent.close()


def test_the_engine_copies_and_every_rank_is_at_the_new_epoch():
    old, new = two_rank_placements()
    with Guests(old) as guests:
        guests.order(new)
        guests.steps(20)
        for agent, engine, link in zip(guests.agents, guests.engines, guests.links, strict=True):
            ack = link.expect(Ack)
            assert (ack.epoch, ack.placement_digest, ack.swap_s) == (1, new.digest, 0.001)
            assert agent.placement == new
            assert engine.weights.holds(new)
            assert agent.move is None
        assert guests.troubles() == ["", ""]


def test_until_the_last_layer_the_rank_reports_swapping_and_the_old_epoch():
    old, new = two_rank_placements()
    with Guests(old) as guests:
        for engine in guests.engines:
            engine.stop_after = 1
        prepare, _ = guests.order(new)
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
        for engine in guests.engines:
            engine.stop_after = None
        guests.steps(10)
        for link in guests.links:
            assert link.expect(Ack).epoch == 1


def test_steps_go_on_counting_while_the_gate_rests():
    """The controller's deadlines count steps: a stopped move must not look like a stopped fleet."""
    old, new = two_rank_placements()
    with Guests(old) as guests:
        for engine in guests.engines:
            engine.stop_after = 0
        guests.order(new)
        guests.steps(40)
        assert guests.agents[0].move is not None
        assert {agent.heartbeat().step for agent in guests.agents} == {40}


def test_an_engine_that_stops_half_way_is_reported():
    old, new = two_rank_placements()
    with Guests(old) as guests:
        for engine in guests.engines:
            engine.stop_after = 1
        guests.order(new)
        guests.steps_until(lambda: all(guests.troubles()))
        for agent in guests.agents:
            assert "stopped with 1 of 2 layers switched: no layer for" in agent.trouble
            assert agent.heartbeat().trouble == agent.trouble
            assert agent.observe_only
        for engine in guests.engines:
            assert engine.weights.holds(Placement(engine.map, 2, 4)), "every layer is whole"


def test_a_known_fault_is_named_at_once():
    old, new = two_rank_placements()
    with Guests(old, stall_after_s=1000.0) as guests:
        guests.engines[0].stop_after = guests.engines[1].stop_after = 0
        guests.order(new)
        guests.steps(12)
        assert guests.troubles() == ["", ""]
        guests.engines[0].broken = "its worker ended"
        guests.steps(1)
        assert "its worker ended" in guests.agents[0].trouble


def test_a_map_that_is_not_the_agreed_one_is_no_success():
    old, new = two_rank_placements()
    with Guests(old) as guests:
        for engine in guests.engines:
            engine.wrong_map = True
        guests.order(new)
        guests.steps(20)
        for agent in guests.agents:
            assert "1 of 12 slots not as planned, in layers [0]" in agent.trouble
            assert agent.epoch == 0


def test_wrong_bytes_are_found_after_the_copy():
    """Wrong bytes (R4): copied experts are compared with the checksums registered at load."""
    old, new = two_rank_placements()
    with Guests(old) as guests:
        guests.engines[1].corrupt = True
        guests.order(new)
        guests.steps(20)
        for link in guests.links:
            link.expect(Ack)
        wait_until(lambda: guests.agents[1].trouble, every_s=0.01)
        assert "checksum_mismatch" in guests.agents[1].trouble
        assert guests.agents[0].trouble == ""


def test_a_wave_the_engine_refuses_gets_a_no_vote():
    old, new = two_rank_placements()
    with Guests(old) as guests:
        guests.engines[1].no = (Reason.UNSUPPORTED, "no empty slots here")
        _, votes = guests.order(new)
        guests.steps(10)
        assert [vote.yes for vote in votes] == [True, False]
        assert votes[1].reason is Reason.UNSUPPORTED
        assert [agent.epoch for agent in guests.agents] == [0, 0]


def test_a_map_the_engine_changed_by_itself_is_followed():
    old, new = two_rank_placements()
    with Guests(old) as guests:
        for agent in guests.agents:
            agent.engine_rebalanced(new.phy2log)
        assert [agent.epoch for agent in guests.agents] == [1, 1]
        assert guests.agents[0].placement == new
        stale = prepare_for(old, new)
        guests.say(stale)
        for link in guests.links:
            assert link.expect(Vote).reason is Reason.STALE_BASE


def test_a_failed_gate_disables_migration_and_the_engine_goes_on():
    old, _ = two_rank_placements()
    with Guests(old) as guests:
        guests.steps(4)
        guests.agents[1]._gate_group.abort()
        for _ in range(12):
            run_ranks(2, lambda rank: guests.engines[rank].step())
        assert "the gate failed, and no wave was under way" in guests.agents[1].trouble


def test_an_armed_rank_without_a_poll_result_leaves():
    """Torn map (R8): the others may have begun, and would wait for this rank's collectives."""
    old, new = two_rank_placements()
    with Guests(old) as guests:
        guests.order(new)
        agent = guests.agents[1]
        wait_until(lambda: agent._participant.state is ParticipantState.ARMED, every_s=0.01)
        guests.agents[0].step_boundary()
        with pytest.raises(GateFailed):
            for _ in range(8):
                if agent._participant.must_wait_for_poll():
                    agent._polls._poll = (agent._polls._poll[0], _Failed())
                agent.step_boundary()


class _Failed:
    def wait(self, timeout=None):
        raise RuntimeError("a peer went away")


def test_facts_are_sent_on_every_stream_and_a_newer_one_replaces_its_kind():
    old, _ = two_rank_placements()
    with Guests(old) as guests:
        curve, cache = CostCurve(64, (1e-3, 2e-3), 1e-5), KvCache(70_000, 10**10)
        for fact in (curve, KvCache(1, 1), cache):
            guests.agents[0].tell(fact)
            assert guests.links[0].expect(type(fact)) == fact
        guests.links[0].say(
            Registration(RegistrationOutcome.ACCEPTED, 1.0, 5.0, FlowControl(0.05)), stream=2
        )
        assert guests.links[0].expect(CostCurve) == curve
        assert guests.links[0].expect(KvCache) == cache
