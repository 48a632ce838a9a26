"""Counts the experts that a placement loses with one rank or node: those that live there alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import Topology


class Survive(StrEnum):
    """The failure that chosen experts survive: they have replicas in two fault domains."""

    NONE = "none"
    RANK = "rank"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The experts that the worst failure of one kind loses."""

    domain: Survive
    """RANK or NODE."""
    most_lost: int
    """Experts, over all layers, that are lost with the domain that holds the most alone."""
    covered: int
    """Experts, over all layers, that no failure of one domain loses."""
    experts: int
    """Experts over all layers."""

    @property
    def words(self) -> str:
        """The coverage as a phrase."""
        most = "at most " if self.most_lost else ""
        return (
            f"losing any one {self.domain} loses {most}{self.most_lost:,} of {self.experts:,}"
            " experts"
        )


def survival_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return those figures of a proposal that tell what a failure loses, and the price of it."""
    names = ("survive_lost", "survive_experts", "survive_price")
    return {name: numbers[name] for name in names if name in numbers}


def domain_of_rank(domain: Survive, topology: Topology) -> NDArray[np.int64]:
    """Return the (R,) fault domain of each rank, 0..D-1."""
    if domain is Survive.NODE:
        return np.array(topology.node_of_rank, np.int64)
    return np.arange(topology.num_ranks, dtype=np.int64)


def only_domain(placement: Placement, domains: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the (L, E) domain that alone holds an expert; -1 if several or none do.

    domains: (R,) of each rank.
    """
    sizes = placement.num_layers, placement.num_logical_experts
    lowest, highest = np.full(sizes, len(domains), np.int64), np.full(sizes, -1, np.int64)
    layer, slot = np.nonzero(placement.phy2log >= 0)
    where, expert = domains[placement.rank_of_slot()[slot]], placement.phy2log[layer, slot]
    np.minimum.at(lowest, (layer, expert), where)
    np.maximum.at(highest, (layer, expert), where)
    return np.where(lowest == highest, highest, -1)


def coverage(placement: Placement, topology: Topology, domain: Survive) -> Coverage:
    """Return what a placement loses with one rank or node of a topology."""
    domains = domain_of_rank(domain, topology)
    alone = only_domain(placement, domains)
    lost = np.bincount(alone[alone >= 0], minlength=int(domains.max()) + 1)
    return Coverage(domain, int(lost.max()), int((alone < 0).sum()), alone.size)
