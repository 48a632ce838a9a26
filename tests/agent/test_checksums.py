"""The table of checksums that a group agrees on before its first step."""

import dataclasses

import numpy as np
import pytest
import torch

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.agent import AgentConfig
from evenkeel_moe.agent.checksums import agree_on_checksums, agree_on_start, checksums_digest
from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.ids import Generation
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.protocol.messages import (
    Abort,
    AbortAnswer,
    Commit,
    MovedAnswers,
    Vote,
)
from tests.agent.fleet import Fleet, start_errors
from tests.agent.ranks import (
    CPU,
    LEADER,
    Group,
    ToyWeights,
    expert_tensors,
    identity_of,
    prepare_for,
    run_ranks,
    shape_of,
    two_rank_placements,
)

TWICE = Placement(np.array([[0, 1, 1, 2, 3, 0]], np.int32), 2, 4)
"""Rank 0 holds expert 1 twice, and no other rank holds it."""


def agreed(weights):
    group = Group(2)
    return run_ranks(
        2,
        lambda rank: agree_on_checksums(
            group.connect(rank, "gate", CPU), rank, TWICE, weights[rank]
        ),
    )


@pytest.mark.parametrize("spoiled", [None, (0, 1), (0, 2)])
def test_copies_of_an_expert_on_one_rank_are_compared_too(spoiled):
    """R4: a copy from the wrong one would pass every later check."""
    weights = [ToyWeights(TWICE, rank) for rank in range(2)]
    if spoiled is not None:
        weights[0].slots[spoiled] = expert_tensors(0, 1, version=9)
        with pytest.raises(PeerViolation, match="replicas of 1 experts differ") as differ:
            agreed(weights)
        assert differ.value.reason is Reason.CHECKSUM_MISMATCH
        return
    table = tuple(checksum(expert_tensors(0, expert)) for expert in range(4))
    assert agreed(weights) == [table, table]


def test_an_expert_that_no_rank_holds_is_named():
    """Such a group may serve, but has nothing to compare a copy of that expert with."""
    lacking = Placement(np.array([[0, 1, 1, 2], [0, 1, 2, 3]], np.int32), 2, 4)
    group, weights = Group(2), [ToyWeights(lacking, rank) for rank in range(2)]

    def agree(rank):
        gate = group.connect(rank, "gate", CPU)
        return agree_on_checksums(gate, rank, lacking, weights[rank])

    with pytest.raises(PeerViolation, match="no rank holds 1 experts, first: layer 0 expert 3"):
        run_ranks(2, agree)


def test_the_digest_of_a_table_tells_its_order_and_takes_the_largest_checksums():
    tables = [(), (1, 2), (2, 1), (1, 2, 0), (1, (1 << 64) - 1)]
    digests = [checksums_digest(table) for table in tables]
    assert len(set(digests)) == len(tables) and {len(digest) for digest in digests} == {32}


FACTS = ["generation", "deployment", "placement", "epoch", "weights version", "shape", "probe"]


@pytest.mark.parametrize("first", range(len(FACTS)))
def test_the_first_fact_on_which_ranks_disagree_is_named(first):
    """R1: rank 1 has another value of this fact and of all that follow."""
    group = Group(2)

    def work(rank):
        other = [rank == 1 and index >= first for index in range(len(FACTS))]
        identity = identity_of(rank, f"d{int(other[1])}")
        config = AgentConfig(
            dataclasses.replace(identity, generation=Generation(f"{other[0]}")),
            shape_of(TWICE, top_k=1 + other[5]),
            "node",
            weights_version=1 + other[4],
        )
        placement = Placement(TWICE.phy2log[:, ::-1], 2, 4) if other[2] else TWICE
        gate = group.connect(rank, "gate", CPU)
        with pytest.raises(PeerViolation, match=f"on their {FACTS[first]}; this rank has"):
            agree_on_start(gate, config, placement, int(other[3]), other[6])

    run_ranks(2, work)


# --- An engine renews derived state after a swap, and experts are asked between its next steps ----


OLD, NEW = two_rank_placements()


class Renewing(Fleet):
    """Ranks that note which slots they have to renew, and their epoch then."""

    def __init__(self, placement, **options):
        self.written = {0: [], 1: []}
        super().__init__(placement, **options)

    def hooks(self, rank):
        def renew(slots):
            self.written[rank].append((sorted(slots), self.maps[rank].epoch))

        return {"slots_written": renew}


def test_the_hook_of_a_swap_names_the_slots_that_were_written_under_the_new_tables():
    """vllm#48355: alphas fused at load stayed with their slots when the experts moved."""
    with Renewing(OLD) as fleet:
        fleet.commit(prepare_for(OLD, NEW))
    # Experts 2 and 3 come to slots 0 and 2 of rank 0, expert 0 to slot 0 of rank 1.
    moved = [[(layer, slot) for layer in range(2) for slot in slots] for slots in ((0, 2), (0,))]
    assert [fleet.written[rank] for rank in range(2)] == [[(slots, 1)] for slots in moved]


class Scaled(Fleet):
    """Ranks with a scale for each slot that `tensors` does not declare; `moves` takes it along."""

    def __init__(self, placement, *, moves=False, probing=(0, 1), wrong_replica=False, **options):
        self.moves, self.probing = moves, probing
        self.placement = placement
        self.scale = [
            {key: self.scale_of(placement, rank, key) for key in ToyWeights(placement, rank).slots}
            for rank in range(2)
        ]
        if wrong_replica:
            self.scale[0][0, 2] += 1.0  # the replica of expert 3 on rank 0
        super().__init__(placement, **options)

    def scale_of(self, placement, rank, key):
        layer, local = key
        return 1.0 + int(placement.phy2log[layer, rank * placement.slots_per_rank + local])

    def hooks(self, rank):
        def probe(layer, local):
            matrix = self.weights[rank].tensors(layer, local)[0]
            return torch.ones(matrix.shape[0]) @ matrix * self.scale[rank][layer, local]

        def move(slots):
            for key in slots:
                self.scale[rank][key] = self.scale_of(NEW, rank, key)

        hooks = {"probe": probe} if rank in self.probing else {}
        return {**hooks, "slots_written": move} if self.moves else hooks


def test_a_scale_that_nobody_declared_is_named_and_ends_migration_on_that_rank():
    """All declared bytes arrived, so the checksums agree; only the outputs show it."""
    with Scaled(OLD) as fleet:
        fleet.arm(prepare_for(OLD, NEW))
        for rank, link in enumerate(fleet.links):
            # Experts 2 and 3 come to rank 0 and expert 0 to rank 1, in both layers.
            told = link.expect(MovedAnswers)
            assert (told.moved, told.same) == ((4, 0), (2, 0))[rank]
        assert all(weights.holds(NEW) for weights in fleet.weights)
        for agent, expert in zip(fleet.agents, (2, 0), strict=True):
            assert f"layer 0 expert {expert} in slot" in agent.heartbeat().trouble
            assert agent.observe_only
        assert fleet.left == [None, None], "the engine serves on"


def test_a_cancelled_reload_does_not_end_the_fault_of_a_moved_expert():
    """Its wrong answer would be registered as the right one: no replica shows the difference."""
    rows = OLD.phy2log.copy()
    rows[:, [0, 3]] = rows[:, [3, 0]]
    with Scaled(OLD) as fleet:
        fleet.arm(prepare_for(OLD, Placement(rows, 2, 4)))
        for link in fleet.links:
            link.expect(MovedAnswers)
        fleet.wait_steps(5)
        fleet._stop = True
        fleet.wait_left()
        run_ranks(2, lambda rank: fleet.agents[rank].finish_reload(1))
        for agent in fleet.agents:
            assert "does not answer" in agent.trouble and agent.observe_only


def test_a_scale_that_moves_with_its_expert_answers_as_before():
    with Scaled(OLD, moves=True) as fleet:
        prepare = prepare_for(OLD, NEW)
        fleet.arm(prepare)
        found = [link.expect(MovedAnswers) for link in fleet.links]
        assert found == [MovedAnswers(prepare.wave, moved, moved, 0, 0) for moved in (4, 2)]
        assert {agent.trouble for agent in fleet.agents} == {""}


def test_replicas_that_compute_different_outputs_are_not_copied():
    """They would be taken for equal by their checksums."""
    with Scaled(NEW, wrong_replica=True) as fleet:
        for agent in fleet.agents:
            assert agent.observe_only
            assert "replicas of an expert differ in their answer" in agent.heartbeat().trouble


def test_a_reload_registers_the_probes_again():
    with Scaled(NEW, steps=False) as fleet:
        for rank in range(2):
            fleet.weights[rank].slots = ToyWeights(NEW, rank, version=2).slots
            fleet.scale[rank] = dict.fromkeys(fleet.scale[rank], 7.0)
        run_ranks(2, lambda rank: fleet.agents[rank].finish_reload(2))
        assert not any(agent.trouble for agent in fleet.agents)
        fleet.scale[0][0, 2] = 1.0
        run_ranks(2, lambda rank: fleet.agents[rank].finish_reload(3))
        assert all("replicas of an expert differ" in agent.trouble for agent in fleet.agents)


def test_a_probe_on_one_rank_alone_is_refused_at_the_start():
    """Registering is collective: the other rank would not come."""
    errors = start_errors(Scaled, OLD, probing=(0,))
    for rank, here in enumerate((True, False)):
        assert isinstance(errors[rank], PeerViolation)
        assert str(errors[rank]).endswith(f" on their probe; this rank has {here}")


# --- Agents on real Gloo groups under a controller that does what no right one does ---------------


def map_of(*row):
    return Placement(np.tile(np.array(row, np.int32), (2, 1)), 2, 4)


def test_ranks_that_were_sent_different_maps_under_one_key_never_swap():
    """Each map is right in itself, and copies inside one rank need no other rank."""
    orders = [
        prepare_for(OLD, map_of(1, 0, EMPTY, 2, 3, EMPTY)),
        prepare_for(OLD, map_of(0, 1, EMPTY, 3, 2, EMPTY)),
    ]
    wave = orders[0].wave
    assert wave == orders[1].wave
    with Fleet(OLD) as fleet:
        for rank, prepare in enumerate(orders):
            fleet.say(prepare, ranks=[rank])
            assert fleet.links[rank].expect(Vote).yes
        fleet.say(Commit(LEADER, wave))
        fleet.wait_steps(15)
        assert all(weights.holds(OLD) for weights in fleet.weights)
        assert all((maps.rows == OLD.phy2log).all() for maps in fleet.maps)
        fleet.say(Abort(LEADER, wave))
        for link in fleet.links:
            assert int(link.expect(AbortAnswer, where=lambda answer: answer.drained).epoch) == 0


class UnequalWeights(ToyWeights):
    """The second layer has its tensors in another order."""

    def __init__(self, placement, rank):
        super().__init__(placement, rank)
        for key, tensors in self.slots.items():
            self.slots[key] = tensors[:: 1 - 2 * key[0]]


def test_ranks_that_were_sent_different_copies_under_one_key_do_not_end_each_other():
    """Gloo ends the process of a rank that gets more bytes than it made room for."""
    weights = [UnequalWeights(OLD, rank) for rank in range(2)]
    sums = {0: {}, 1: {}}
    for rank in range(2):
        for (layer, local), tensors in weights[rank].slots.items():
            expert = int(OLD.phy2log[layer, 3 * rank + local])
            sums[layer][expert] = checksum(tensors)
    right = prepare_for(OLD, NEW, batch_deadline_s=1.0)
    batches = right.body.batches
    half = len(batches) // 2
    assert {t.layer for (t,) in batches[:half]} == {0} and {t.layer for (t,) in batches[half:]} == {
        1
    }
    with Fleet(OLD, weights=weights) as fleet:
        for rank, order in enumerate((batches, (*batches[half:], *batches[:half]))):
            body = dataclasses.replace(right.body, batches=order)
            told = tuple(sums[t.layer][t.logical_expert] for (t,) in order)
            fleet.say(dataclasses.replace(right, body=body, checksums=told), ranks=[rank])
        for link in fleet.links:
            vote = link.expect(Vote)
            assert not vote.yes
            assert vote.reason in (Reason.TRANSFER_TIMEOUT, Reason.TRANSFER_FAILED)
        fleet.wait_steps(15)


def test_a_deadline_and_a_rate_that_no_clock_counts_fail_nothing():
    """A batch whose peer does not come must end some day, and a pause must end at all."""
    prepare = prepare_for(OLD, NEW, one_batch=True, batch_deadline_s=1e300, max_bytes_per_s=1e-300)
    with Fleet(OLD) as fleet:
        fleet.say(prepare)
        fleet.wait_steps(5)
        # A cancellation ends the pause.
        fleet.say(Abort(LEADER, prepare.wave))
        for link in fleet.links:
            assert link.expect(AbortAnswer, where=lambda answer: answer.drained)
        assert all(agent._gate.transport_serial == 0 for agent in fleet.agents)
