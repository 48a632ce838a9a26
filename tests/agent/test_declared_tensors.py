"""What an engine declares is checked on all ranks before anything is copied."""

import dataclasses

import pytest
import torch

from evenkeel_moe.agent.checksums import agree_on_start
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.declared_tensors import agree_on_tensors
from evenkeel_moe.errors import InvalidInput, PeerViolation, ShapeMismatch, Unavailable
from evenkeel_moe.model.ids import EpRank
from tests.agent.fleet import Fleet, start_errors
from tests.agent.ranks import (
    CPU,
    EXPERT_BYTES,
    Group,
    ToyWeights,
    identity_of,
    run_ranks,
    shape_of,
    two_rank_placements,
)

MAP, OTHER = two_rank_placements()


class Altered(ToyWeights):
    """Slots whose tensors a function changes: `alter(layer, local, tensors)`."""

    def __init__(self, rank, alter):
        super().__init__(MAP, rank)
        self.alter = alter

    def tensors(self, layer, local_slot):
        return self.alter(layer, local_slot, super().tensors(layer, local_slot))


def as_is(layer, local, tensors):
    return tensors


def reordered(layer, local, tensors):
    return tensors[::-1]


def another_type(layer, local, tensors):
    return (tensors[0].view(torch.int32), *tensors[1:]) if layer else tensors


def all_copied(layer, local, tensors):
    return tuple(tensor.clone() for tensor in tensors)


def one_copied(layer, local, tensors):
    return (tensors[0], tensors[1].clone(), tensors[2])


def one_left_out(layer, local, tensors):
    return tensors[:2] if layer else tensors


def one_slot_reordered(layer, local, tensors):
    return tensors[::-1] if local else tensors


def fails(layer, local, tensors):
    raise KeyError("no such slot")


def outcomes(work):
    """Return what each of two ranks raised; None where nothing."""

    def caught(rank):
        try:
            work(rank)
        except Exception as error:
            return error
        return None

    return run_ranks(2, caught)


@pytest.mark.parametrize("alter", [reordered, another_type])
def test_ranks_that_declare_a_layer_otherwise_are_refused(alter):
    """Gloo would end the process of the rank that gets more bytes than it made room for."""
    group, weights = Group(2), [Altered(0, as_is), Altered(1, alter)]

    def agree(rank):
        gate = group.connect(rank, "gate", CPU)
        agree_on_tensors(gate, rank, MAP, weights[rank], EXPERT_BYTES)

    layer = 1 if alter is another_type else 0
    for error in outcomes(agree):
        assert isinstance(error, PeerViolation)
        assert f"on the tensors of an expert in layer {layer}; this rank has " in str(error)


@pytest.mark.parametrize(
    ("alter", "refusal", "words"),
    [
        (all_copied, InvalidInput, "layer 0 slot 0 of rank 1: tensor 0 is a copy"),
        (one_copied, InvalidInput, "layer 0 slot 0 of rank 1: tensor 1 is a copy"),
        (one_left_out, InvalidInput, "layer 1 slot 0 of rank 1: the tensors of an expert have 544"),
        (one_slot_reordered, InvalidInput, "rank 1 has tensors bfloat16 (), int8 (8, 4), float32"),
        (fails, KeyError, "no such slot"),
    ],
)
def test_a_rank_that_declares_wrong_tensors_is_refused_and_no_other_rank_waits(
    alter, refusal, words
):
    group, weights = Group(2), [Altered(0, as_is), Altered(1, alter)]

    def agree(rank):
        gate = group.connect(rank, "gate", CPU)
        agree_on_tensors(gate, rank, MAP, weights[rank], EXPERT_BYTES)

    other, own = outcomes(agree)
    assert isinstance(own, refusal) and words in str(own)
    assert isinstance(other, Unavailable) and "ranks [1] cannot declare" in str(other)


def test_an_agent_is_refused_with_tensors_into_which_a_swap_could_not_write():
    weights = [Altered(0, as_is), Altered(1, one_copied)]
    with pytest.raises((InvalidInput, Unavailable)):
        Fleet(MAP, weights=weights)


def test_replicas_that_differ_at_the_start_are_trouble_until_sound_weights_are_loaded():
    weights = [ToyWeights(OTHER, rank, version=rank) for rank in range(2)]
    with Fleet(OTHER, weights=weights, steps=False) as fleet:
        for agent in fleet.agents:
            assert agent.observe_only
            assert agent.heartbeat().trouble.startswith("replicas of 2 experts differ")
        for rank in range(2):
            fleet.weights[rank].slots = ToyWeights(OTHER, rank, version=2).slots
        run_ranks(2, lambda rank: fleet.agents[rank].finish_reload(2))
        assert not any(agent.observe_only or agent.trouble for agent in fleet.agents)


@pytest.mark.parametrize(
    ("alter", "words"), [(one_copied, "tensor 1 is a copy"), (fails, "KeyError('no such slot')")]
)
def test_tensors_of_a_reload_that_are_refused_are_trouble_and_the_engine_serves_on(alter, words):
    weights = [Altered(0, as_is), Altered(1, as_is)]
    with Fleet(MAP, weights=weights, steps=False) as fleet:
        weights[1].alter = alter
        run_ranks(2, lambda rank: fleet.agents[rank].finish_reload(2))
        first, second = (agent.trouble for agent in fleet.agents)
        assert "ranks [1] cannot declare" in first and words in second


@pytest.mark.parametrize("limits", [{"resolve_after": 9}, {"staging_bytes": 1 << 60}])
def test_a_rank_that_cannot_make_its_parts_is_refused_and_no_other_rank_waits(limits):
    def make(fleet, rank):
        return fleet.config(rank, **(limits if rank == 1 else {}))

    errors = start_errors(Fleet, MAP, make_config=make)
    assert isinstance(errors[0], Unavailable) and "ranks [1] cannot" in str(errors[0])
    assert isinstance(errors[1], InvalidInput | RuntimeError)


START = AgentConfig(identity_of(0), shape_of(MAP), "node")


@pytest.mark.parametrize(
    ("rank", "shape", "epoch", "refusal", "words"),
    [
        (0, {}, 0, InvalidInput, "this rank is 0, and number 1 of its communicator"),
        (1, {"num_ranks": 4}, 0, InvalidInput, "the group has 2 ranks, its shape 4"),
        (1, {}, -3, InvalidInput, "epoch is -3"),
        (1, {"num_layers": 3}, 0, ShapeMismatch, r"placement is \(L, S, R, E\) = \(2, 6, 2, 4\)"),
    ],
)
def test_a_start_whose_parts_do_not_fit_is_refused_on_every_rank(
    rank, shape, epoch, refusal, words
):
    group = Group(2)

    def start(at):
        wrong = at == 1
        identity = dataclasses.replace(START.identity, rank=EpRank(rank if wrong else at))
        config = dataclasses.replace(
            START, identity=identity, shape=shape_of(MAP, **(shape if wrong else {}))
        )
        gate = group.connect(at, "gate", CPU)
        agree_on_start(gate, config, MAP, epoch if wrong else 0, False)

    other, own = outcomes(start)
    with pytest.raises(refusal, match=words):
        raise own
    assert isinstance(other, Unavailable) and "ranks [1] cannot start" in str(other)
