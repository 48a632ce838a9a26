"""Derives the slots that a plan may fill from the shape's memory and the replica budget."""

from dataclasses import dataclass

from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.model.checks import undivided
from evenkeel_moe.planning.problem.placement_problem import PlacementProblem


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """The number of slots a plan may fill per layer, in all, and per rank of a pool."""

    per_layer: int
    """Copies one layer may hold. With pooled slots this is the average: any layer may then hold
    `shape.num_slots`."""
    total: int
    """Copies all layers together may hold."""
    pool_per_rank: int | None
    """Slots of one rank over all layers; None where each layer owns its slots."""

    @classmethod
    def of(cls, problem: PlacementProblem) -> "SlotBudget":
        """Return the budget of a problem.

        Raises:
            InfeasiblePlan: the replica budget is negative or asks for more copies than there are
                slots.
        """
        shape, redundant = problem.shape, problem.replica_budget
        experts, layers, ranks = shape.num_logical_experts, shape.num_layers, shape.num_ranks
        pool = shape.pool_slots_per_rank
        # A second copy of an expert on the same rank is useless.
        most = min(shape.num_slots, experts * ranks)
        if redundant is None:
            return cls(most, most * layers if pool is None else pool * ranks, pool)
        if redundant < 0:
            raise InfeasiblePlan(
                f"a replica budget of {redundant} leaves experts without a slot",
                Reason.EXPERT_WITHOUT_REPLICA,
            )
        wanted = experts + redundant
        if wanted > shape.num_slots:
            raise InfeasiblePlan(
                f"{experts} experts + {redundant} redundant = {wanted} copies a layer exceed"
                f" {ranks} ranks x {shape.slots_per_rank} slots = {shape.num_slots}",
                Reason.MEMORY_EXCEEDED,
            )
        if pool is not None and wanted * layers > pool * ranks:
            raise InfeasiblePlan(
                f"{layers} layers x {wanted} copies exceed {ranks} ranks x {pool} pooled slots",
                Reason.POOL_EXCEEDED,
            )
        per_layer = min(wanted, most)
        return cls(per_layer, per_layer * layers, pool)

    def equal_share(self, layers: int) -> int:
        """Return the number of copies each layer can hold if all layers hold the same number."""
        return min(self.per_layer, self.total // layers)


def equal_slots_per_rank(problem: PlacementProblem) -> int:
    """Return the number of slots every rank fills in every layer, if all fill the same number.

    Raises:
        InvalidInput: the replica budget does not divide over the ranks.
        InfeasiblePlan: the slots cannot hold one copy of every expert.
    """
    shape = problem.shape
    ranks, experts = shape.num_ranks, shape.num_logical_experts
    most = shape.slots_per_rank
    if shape.pool_slots_per_rank is not None:
        most = min(most, shape.pool_slots_per_rank // shape.num_layers)
    per_rank = most
    if problem.replica_budget is not None:
        wanted = experts + problem.replica_budget
        if words := undivided(wanted, "slots", ranks, "ranks", least=experts):
            raise InvalidInput(f"{experts} experts + {problem.replica_budget} redundant = {words}")
        per_rank = wanted // ranks
        if per_rank > most:
            raise InfeasiblePlan(
                f"a replica budget of {problem.replica_budget} needs {per_rank} slots per rank"
                f" and layer, there are {most}",
                Reason.MEMORY_EXCEEDED,
            )
    if per_rank * ranks < experts:
        raise InfeasiblePlan(
            f"{per_rank} slots per rank and layer x {ranks} ranks = {per_rank * ranks}"
            f" cannot hold {experts} experts",
            Reason.EXPERT_WITHOUT_REPLICA,
        )
    return per_rank
