"""Experts that an agent cannot move as a whole are refused by name, before anything starts."""

from dataclasses import replace

import pytest

from evenkeel_moe.agent import LoraOnExperts
from evenkeel_moe.errors import InvalidInput
from tests.agent.fleet import Fleet
from tests.agent.ranks import EXPERT_BYTES, shape_of, two_rank_placements

OLD, NEW = two_rank_placements()


def test_experts_divided_by_tensor_parallelism_are_refused_with_the_number():
    with pytest.raises(InvalidInput, match=r"toy: .*over 4 ranks \(expert_shards=4\)"):
        Fleet(OLD, make_config=lambda fleet, rank: fleet.config(rank, expert_shards=4))


@pytest.mark.parametrize(
    ("times", "said"), [(2, "2 times as many"), (0.5, f"have {EXPERT_BYTES} bytes")]
)
def test_tensors_that_are_not_a_whole_expert_are_refused(times, said):
    """An engine that forgot to say it, or the limits of a wave would be wrong."""

    def make(fleet, rank):
        shape = replace(shape_of(OLD), bytes_per_expert=int(EXPERT_BYTES * times))
        return fleet.config(rank, shape=shape)

    with pytest.raises(InvalidInput, match=said):
        Fleet(OLD, make_config=make)


def test_adapters_on_experts_are_refused_unless_their_tensors_are_declared():
    def make(lora):
        return lambda fleet, rank: fleet.config(rank, lora=lora)

    with pytest.raises(InvalidInput, match=r"lora=not_declared"):
        Fleet(OLD, make_config=make(LoraOnExperts.NOT_DECLARED))
    with Fleet(OLD, make_config=make(LoraOnExperts.DECLARED), steps=False) as fleet:
        assert not any(agent.observe_only for agent in fleet.agents)
