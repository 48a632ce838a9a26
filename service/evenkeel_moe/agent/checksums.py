"""Compares the configuration and the expert weights of all ranks before the first step (R1, R4)."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.ports import ExpertWeights
from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.placement import EMPTY, Placement

_TWO_KINDS = 2
_log = structlog.get_logger(__name__)


def agree_on_start(
    group: Communicator, config: AgentConfig, placement: Placement, epoch: int, probes: bool
) -> None:
    """Compare generation, deployment, placement, epoch, weights version, shape and whether experts
    are probed; collective.

    Raises:
        PeerViolation: the ranks disagree on one of them.
    """
    facts = {
        "generation": config.identity.generation,
        "deployment": config.identity.deployment,
        "placement": placement.digest,
        "epoch": str(epoch),
        "weights version": str(config.weights_version),
        "shape": repr(config.shape),
        "probe": str(probes),
    }
    differences = find_differences(group, facts)
    if differences:
        name = differences[0]
        raise PeerViolation(
            f"the ranks of the group disagree on their {name}; this rank has {facts[name]}"
        )


def find_differences(group: Communicator, facts: Mapping[str, str]) -> list[str]:
    """Return the names of the facts that are not equal on all ranks, in order; collective.

    Args:
        group: a communicator on which nothing else is in flight.
        facts: name -> value; the same names on every rank.

    Raises:
        RuntimeError: not all ranks came before the communicator's deadline.
    """
    mine = torch.tensor([_number(text) for text in facts.values()])
    theirs = group.all_gather(mine)
    return [name for name, column in zip(facts, theirs.T, strict=True) if len(column.unique()) > 1]


def agree_on_checksums(
    group: Communicator, rank: int, placement: Placement, weights: ExpertWeights
) -> tuple[int, ...] | None:
    """Hash every expert this rank holds and gather the table of all ranks; collective.

    Returns:
        Unsigned 64-bit checksums, layer-major (L * E). None when two replicas of an expert differ
        or no rank holds it: such a group may serve but must not copy.
    """

    table, held = _checksums_held(rank, placement, weights)
    tables = group.all_gather(torch.from_numpy(table.view(np.int64))).numpy().view(np.uint64)
    holders = group.all_gather(torch.from_numpy(held)).numpy()
    first = holders.argmax(axis=0)
    agreed = np.take_along_axis(tables, first[None], axis=0)[0]
    wrong = ((tables != agreed) & (holders > 0)) | (holders == _TWO_KINDS)
    if wrong.any() or not holders.any(axis=0).all():
        where = np.argwhere(wrong)
        _log.error(
            "replicas_differ",
            reason=Reason.CHECKSUM_MISMATCH,
            compared="checksum",
            first=dict(zip(("rank", "layer", "expert"), where[0].tolist(), strict=True))
            if len(where)
            else None,
        )
        return None
    return tuple(agreed.ravel().tolist())


def checksums_digest(checksums: Sequence[int]) -> str:
    """Return 32 hex digits over the table; equal digests mean equal weights on every rank."""
    return hashlib.blake2b(np.array(checksums, np.uint64).tobytes(), digest_size=16).hexdigest()


def _checksums_held(
    rank: int, placement: Placement, weights: ExpertWeights
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Return two (L, E) tables: the checksum of each expert that this rank holds, and the kind.

    The kind is 0 where the rank does not hold the expert, 1 where it does, and _TWO_KINDS where its
    copies differ.
    """
    layers, experts = placement.num_layers, placement.num_logical_experts
    table, held = np.zeros((layers, experts), np.uint64), np.zeros((layers, experts), np.uint8)
    mine = placement.phy2log.reshape(layers, placement.num_ranks, placement.slots_per_rank)[:, rank]
    for layer, local in np.argwhere(mine != EMPTY).tolist():
        expert = int(mine[layer, local])
        value = checksum(weights.tensors(layer, local))
        differs = held[layer, expert] and table[layer, expert] != value
        table[layer, expert] = value
        held[layer, expert] = _TWO_KINDS if differs else max(1, held[layer, expert])
    return table, held


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
