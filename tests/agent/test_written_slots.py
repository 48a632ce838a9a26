"""An engine renews derived state after a swap, and experts are asked between its next steps."""

import pytest
import structlog
import torch

from evenkeel_moe.errors import PeerViolation
from evenkeel_moe.protocol.messages import Ack, MovedAnswers
from tests.agent.fleet import Fleet
from tests.agent.ranks import (
    ToyWeights,
    prepare_for,
    run_ranks,
    two_rank_placements,
)

OLD, NEW = two_rank_placements()


def fused(tensors):
    """Return what an engine computes once from the tensors of an expert, such as a fused alpha."""
    matrix, narrow, scale = tensors
    return (matrix.abs().amax() * narrow.float().abs().amax() * scale.float()).item()


class Fusing(Fleet):
    """Ranks that keep a fused number for each slot; with `renews`, they use the hook."""

    def __init__(self, placement, *, renews):
        self.renews = renews
        self.fused = [{}, {}]
        self.written = [[], []]
        super().__init__(placement)

    def _make(self, rank):
        agent = super()._make(rank)
        for key in self.weights[rank].slots:
            self.fuse(rank, key)
        return agent

    def fuse(self, rank, key):
        self.fused[rank][key] = fused(self.weights[rank].tensors(*key))

    def hooks(self, rank):
        def renew(slots):
            # The tables are those of the new map already.
            self.written[rank].append((tuple(slots), self.maps[rank].epoch))
            for key in slots:
                self.fuse(rank, key)

        return {"slots_written": renew} if self.renews else {}

    def stale(self):
        """Return (rank, layer, local slot) of slots whose number is not that of their tensors."""
        return {
            (rank, *key)
            for rank in range(2)
            for key, tensors in self.weights[rank].slots.items()
            if self.fused[rank][key] != fused(tensors)
        }


@pytest.mark.parametrize("renews", [True, False])
def test_state_derived_from_weights_is_stale_unless_it_is_renewed_in_the_hook(renews):
    """vllm#48355: alphas fused at load stayed with their slots when the experts moved."""
    with Fusing(OLD, renews=renews) as fleet:
        fleet.arm(prepare_for(OLD, NEW))
        for link in fleet.links:
            link.expect(Ack)
    # Experts 2 and 3 come to slots 0 and 2 of rank 0, expert 0 to slot 0 of rank 1.
    moved = [{(layer, slot) for layer in range(2) for slot in slots} for slots in ((0, 2), (0,))]
    if renews:
        assert fleet.stale() == set()
        for rank in range(2):
            [(slots, epoch)] = fleet.written[rank]
            assert set(slots) == moved[rank] and len(slots) == len(moved[rank])
            assert epoch == 1
    else:
        assert fleet.stale() == {(rank, *key) for rank in range(2) for key in moved[rank]}


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


def test_a_scale_that_moves_with_its_expert_answers_as_before():
    with Scaled(OLD, moves=True) as fleet:
        prepare = prepare_for(OLD, NEW)
        fleet.arm(prepare)
        found = [link.expect(MovedAnswers) for link in fleet.links]
        assert found == [MovedAnswers(prepare.wave, moved, moved, 0, 0) for moved in (4, 2)]
        assert {agent.trouble for agent in fleet.agents} == {""}


def test_replicas_that_compute_different_outputs_are_not_copied():
    """They would be taken for equal by their checksums."""
    with structlog.testing.capture_logs() as said:
        with Scaled(NEW, wrong_replica=True) as fleet:
            assert all(agent.observe_only for agent in fleet.agents)
    assert {line["compared"] for line in said if line["event"] == "replicas_differ"} == {"answer"}


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
    said = {}

    class Refused(Scaled):
        def _make(self, rank):
            try:
                return super()._make(rank)
            except PeerViolation as error:
                said[rank] = str(error).partition(" on their ")[2]
                raise

    with pytest.raises(PeerViolation):
        Refused(OLD, probing=(0,))
    assert said == {0: "probe; this rank has True", 1: "probe; this rank has False"}
