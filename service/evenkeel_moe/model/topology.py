"""The shape of a deployment, which its ranks declare and must agree on, and its nodes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from evenkeel_moe.errors import EvenkeelError, InvalidInput, Reason, ShapeMismatch
from evenkeel_moe.model.checks import undivided


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one deployment. Only MoE layers count as layers."""

    num_layers: int
    """L."""
    num_logical_experts: int
    """E, per layer."""
    num_ranks: int
    """R."""
    slots_per_rank: int
    """Slots of one rank in one layer; S = R * slots_per_rank."""
    top_k: int
    bytes_per_expert: int
    """Bytes of all tensors of one expert, scales included."""
    num_expert_groups: int = 1
    """G, DeepSeek routing groups; 1 if the model has none."""
    pool_slots_per_rank: int | None = None
    """Weight buffers of one rank, shared by all layers; null if each layer has its own."""
    shared_experts: float | None = None
    """Work of the shared experts for one token, in routed experts; null if it is not known."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_logical_experts", "num_ranks", "slots_per_rank", "top_k"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidInput(f"{name} is {value}, must be at least 1")
        if self.bytes_per_expert < 0:
            raise InvalidInput(f"bytes_per_expert is {self.bytes_per_expert}, must not be negative")
        if self.shared_experts is not None and not 0 <= self.shared_experts < math.inf:
            raise InvalidInput(
                f"shared_experts is {self.shared_experts}, must be finite and not negative"
            )
        if self.top_k > self.num_logical_experts:
            raise InvalidInput(f"top_k {self.top_k} exceeds {self.num_logical_experts} experts")
        groups = self.num_expert_groups
        if words := undivided(self.num_logical_experts, "experts", groups, "expert groups"):
            raise InvalidInput(words)
        if self.num_slots < self.num_logical_experts:
            raise ShapeMismatch(
                f"{self.num_ranks} ranks x {self.slots_per_rank} slots = {self.num_slots} slots"
                f" cannot hold {self.num_logical_experts} experts",
                Reason.EXPERT_WITHOUT_REPLICA,
            )
        pool = self.pool_slots_per_rank
        if pool is not None and pool * self.num_ranks < self.num_layers * self.num_logical_experts:
            raise ShapeMismatch(
                f"{self.num_ranks} ranks x {pool} pooled slots cannot hold"
                f" {self.num_layers} layers x {self.num_logical_experts} experts",
                Reason.POOL_EXCEEDED,
            )

    @classmethod
    def of_document(cls, sizes: object) -> "ModelShape | None":
        """Return the shape that `asdict` gave; None if the sizes are no shape."""
        if not isinstance(sizes, Mapping):
            return None
        whole = {name: value for name, value in sizes.items() if name != "shared_experts"}
        if not all(type(value) is int for value in whole.values() if value is not None):
            return None
        try:
            return cls(**sizes)
        except (EvenkeelError, TypeError, OverflowError):
            return None

    @property
    def num_slots(self) -> int:
        """S, slots of one layer on all ranks."""
        return self.num_ranks * self.slots_per_rank

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(L, S, R, E)."""
        return self.num_layers, self.num_slots, self.num_ranks, self.num_logical_experts

    @property
    def pooled(self) -> bool:
        """True if the layers share their slots."""
        return self.pool_slots_per_rank is not None

    @property
    def mean_slots_per_rank(self) -> float:
        """Slots that a rank can fill in a layer, on average over the layers."""
        if self.pool_slots_per_rank is None:
            return float(self.slots_per_rank)
        return min(float(self.slots_per_rank), self.pool_slots_per_rank / self.num_layers)

    @property
    def expert_bytes_per_rank(self) -> int | None:
        """Bytes of all slots of a rank over all layers; None if an expert's size is not known."""
        pool = self.pool_slots_per_rank
        slots = self.slots_per_rank * self.num_layers if pool is None else pool
        return self.bytes_of(slots)

    def bytes_of(self, experts: int) -> int | None:
        """Return the bytes of so many experts; None if an expert's size is not known."""
        return experts * self.bytes_per_expert if self.bytes_per_expert or not experts else None

    @property
    def num_redundant(self) -> int:
        """Replicas that an average layer can have beyond one per expert, rounded down."""
        if self.pool_slots_per_rank is None:
            return self.num_slots - self.num_logical_experts
        total = self.pool_slots_per_rank * self.num_ranks
        return min(total // self.num_layers, self.num_slots) - self.num_logical_experts


def slots_of_rank(slots: int, ranks: int, experts: int) -> int:
    """Return the slots that each rank has in a layer of some experts.

    Args:
        slots: of the layer over all ranks.
        ranks: that share them evenly.
        experts: of the layer.

    Raises:
        ShapeMismatch: they do not divide over the ranks, or a rank cannot use so many.
    """
    if words := undivided(slots, "slots", ranks, "ranks", least=experts):
        raise ShapeMismatch(words)
    per_rank = slots // ranks
    if per_rank > experts:
        raise ShapeMismatch(
            f"{slots} slots on {ranks} ranks are {per_rank} per rank, the model has {experts}"
            f" experts; at most {experts * ranks} slots can be used"
        )
    return per_rank


@dataclass(frozen=True, slots=True)
class Topology:
    """The node of each rank. A node is a set of ranks with fast links."""

    node_of_rank: tuple[int, ...]
    """(R,) node index, 0..N-1."""

    def __post_init__(self) -> None:
        nodes = sorted(set(self.node_of_rank))
        if not nodes or nodes != list(range(len(nodes))):
            raise InvalidInput(f"node indices must be 0..N-1 without gaps, got {nodes}")

    @classmethod
    def single_node(cls, num_ranks: int) -> "Topology":
        """Return a topology with all ranks on one node."""
        return cls((0,) * num_ranks)

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        """N."""
        return max(self.node_of_rank) + 1
