"""Decides who is which rank, and with which experts, after the number of ranks has changed.

Pure: no process, no file. `former` is (M,): the rank that each rank of the new group had in the old
one; None for a process that joins.
"""

from collections.abc import Collection, Sequence

import numpy as np

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.errors import InfeasiblePlan, InvalidInput, Reason
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.schedule.survivors import Former, rows_that_stay, surviving_placement


def former_ranks(num_ranks: int, wanted: int, retire: Collection[int] = ()) -> Former:
    """Return the former rank of each rank of a group of another size.

    Ranks that stay keep their order and become 0, 1, ...; processes that join come after them.

    Args:
        num_ranks: R, ranks of the old group.
        wanted: M, ranks of the new group.
        retire: ranks that leave; by default the highest ones, as many as are too many.

    Raises:
        InvalidInput: nothing would change, no rank would stay, a rank does not exist, or more
            ranks would stay than are wanted.
    """
    if wanted < 1:
        raise InvalidInput(f"a group of {wanted} ranks is asked for, must be at least 1")
    strangers = sorted({rank for rank in retire if not 0 <= rank < num_ranks})
    if strangers:
        raise InvalidInput(f"ranks {strangers} do not exist: the group has 0..{num_ranks - 1}")
    if wanted == num_ranks and not retire:
        raise InvalidInput(f"the group has {num_ranks} ranks already, and none is to retire")
    leaving = set(retire) or set(range(wanted, num_ranks))
    staying = [rank for rank in range(num_ranks) if rank not in leaving]
    if not staying:
        raise InvalidInput(f"all {num_ranks} ranks would retire: no rank would keep the experts")
    if len(staying) > wanted:
        raise InvalidInput(
            f"{len(leaving)} of {num_ranks} ranks retire, so {len(staying)} stay:"
            f" more than the {wanted} that are asked for"
        )
    return (*staying, *[None] * (wanted - len(staying)))


def leaving_ranks(num_ranks: int, former: Former) -> tuple[int, ...]:
    """Return the ranks of the old group that are not in the new one."""
    return tuple(sorted(set(range(num_ranks)) - set(former)))


def resized_placement(placement: Placement, former: Former) -> Placement:
    """Return the placement of the new group: the rows of those who stay, and empty slots.

    Raises:
        InfeasiblePlan: an expert lives on leaving ranks alone.
        ShapeMismatch: the new group has fewer slots than experts.
    """
    found = rows_that_stay(placement, former)
    lost = np.argwhere(found.logcnt == 0)
    if len(lost):
        layer, expert = lost[0].tolist()
        leaving = ", ".join(map(str, leaving_ranks(placement.num_ranks, former)))
        raise InfeasiblePlan(
            f"{len(lost)} experts live on the retiring ranks {leaving} alone, first: layer {layer}"
            f" expert {expert}; move them to ranks that stay first",
            Reason.EXPERT_WITHOUT_REPLICA,
        )
    return found


def resized_nodes(nodes: Sequence[int], former: Former) -> tuple[int, ...]:
    """Return the node of each rank: who joins comes to the node with the fewest ranks.

    Args:
        nodes: (R,) of the old group; empty for one node.
        former: see above.
    """
    if not nodes:
        return ()
    found = [nodes[before] for before in former if before is not None]
    while len(found) < len(former):
        found.append(min(sorted(set(nodes)), key=found.count))
    return tuple(found)


def resized_config(
    config: RankConfig, placement: Placement, wanted: int, retire: Collection[int] = ()
) -> RankConfig:
    """Return the configuration of the group that follows one of another size.

    Args:
        config: of the old group.
        placement: in force there.
        wanted: ranks of the new group.
        retire: see `former_ranks`.

    Raises:
        InvalidInput: the request is not possible for this group.
        InfeasiblePlan: an expert lives on leaving ranks alone.
    """
    former = former_ranks(config.num_ranks, wanted, retire)
    following = _following(config, former)
    resized_placement(placement, former)
    return following


def survivors_config(config: RankConfig, placement: Placement, dead: Collection[int]) -> RankConfig:
    """Return the configuration of the group of those who are left after deaths.

    Args:
        config: of the group before.
        placement: in force there.
        dead: its ranks that died.

    Raises:
        InvalidInput: nobody is left, or this group can have no other size.
        InfeasiblePlan: those who are left have no room for all experts.
        ShapeMismatch: they have fewer slots than experts.
    """
    former = former_ranks(config.num_ranks, config.num_ranks - len(dead), dead)
    following = _following(config, former).replace(dead=tuple(sorted(dead)))
    surviving_placement(placement, former, following.shape)
    return following


def _following(config: RankConfig, former: Former) -> RankConfig:
    nodes = resized_nodes(config.nodes, former)
    return config.replace(num_ranks=len(former), nodes=nodes, former=former, dead=())
