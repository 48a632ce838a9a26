"""Compares the configuration and the expert weights of all ranks before the first step (R1, R4)."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.agent.config import AgentConfig
from evenkeel_moe.agent.ports import ExpertWeights
from evenkeel_moe.agent.together import gather, together
from evenkeel_moe.errors import InvalidInput, PeerViolation, Reason
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import hash_of

_TWO_KINDS = 2


def agree_on_start(
    group: Communicator, config: AgentConfig, placement: Placement, epoch: int, probes: bool
) -> None:
    """Check the start of this rank, and compare it with that of the others; collective.

    Compared are generation, deployment, placement, epoch, weights version, shape and whether
    experts are probed.

    Raises:
        InvalidInput: rank, group, placement, epoch and shape do not fit each other.
        PeerViolation: the ranks disagree on one of the facts.
        Unavailable: another rank was refused, or not all ranks came.
    """
    together(group, "start", lambda: _check_start(group, config, placement, epoch))
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


def _check_start(
    group: Communicator, config: AgentConfig, placement: Placement, epoch: int
) -> None:
    rank, shape = config.identity.rank, config.shape
    if rank != group.rank:
        raise InvalidInput(f"this rank is {rank}, and number {group.rank} of its communicator")
    if group.size != shape.num_ranks:
        raise InvalidInput(f"the group has {group.size} ranks, its shape {shape.num_ranks}")
    if epoch < 0:
        raise InvalidInput(f"epoch is {epoch}, must be at least 0")
    placement.check_sizes(shape)


def find_differences(group: Communicator, facts: Mapping[str, str]) -> list[str]:
    """Return the names of the facts that are not equal on all ranks, in order; collective.

    Args:
        group: a communicator on which nothing else is in flight.
        facts: name -> value; the same names on every rank.

    Raises:
        Unavailable: not all ranks came before the communicator's deadline.
    """
    theirs = gather(group, torch.tensor([hash_of(text) for text in facts.values()]))
    return [name for name, column in zip(facts, theirs.T, strict=True) if len(column.unique()) > 1]


def agree_on_checksums(
    group: Communicator, rank: int, placement: Placement, weights: ExpertWeights
) -> tuple[int, ...]:
    """Hash every expert this rank holds and gather the table of all ranks; collective.

    Returns:
        Unsigned 64-bit checksums, layer-major (L * E).

    Raises:
        PeerViolation: CHECKSUM_MISMATCH, on all ranks, if two replicas of an expert differ or no
            rank holds it: such a group may serve but must not copy.
        Unavailable: another rank failed, or not all ranks came.
    """
    table, held = together(
        group, "read their experts", lambda: _checksums_held(rank, placement, weights)
    )
    tables = gather(group, torch.from_numpy(table.view(np.int64))).numpy().view(np.uint64)
    holders = gather(group, torch.from_numpy(held)).numpy()
    first = holders.argmax(axis=0)
    agreed = np.take_along_axis(tables, first[None], axis=0)[0]
    wrong = np.argwhere(((tables != agreed) & (holders > 0)) | (holders == _TWO_KINDS))
    if len(wrong):
        other, layer, expert = wrong[0].tolist()
        raise PeerViolation(
            f"replicas of {len({(n, e) for _, n, e in wrong.tolist()})} experts differ in their"
            f" bytes, first: layer {layer} expert {expert} on rank {other}",
            Reason.CHECKSUM_MISMATCH,
        )
    missing = np.argwhere(~holders.any(axis=0))
    if len(missing):
        layer, expert = missing[0].tolist()
        raise PeerViolation(
            f"no rank holds {len(missing)} experts, first: layer {layer} expert {expert}",
            Reason.CHECKSUM_MISMATCH,
        )
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
