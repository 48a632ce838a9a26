"""Checks what an engine declares as the tensors of its experts, before any of them is copied."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.agent.ports import ExpertWeights
from evenkeel_moe.agent.together import gather, together
from evenkeel_moe.errors import InvalidInput, PeerViolation
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import hash_of


def agree_on_tensors(
    group: Communicator, rank: int, placement: Placement, weights: ExpertWeights, nbytes: int
) -> None:
    """Compare the tensors in this rank's filled slots with each other, and over all ranks.

    Collective. Gloo ends a process that gets more bytes than it made room for, so all ranks must
    declare the tensors of a layer alike.

    Args:
        group: of the ranks.
        rank: this rank.
        placement: the map in use.
        weights: of this rank.
        nbytes: size of an expert by the deployment's shape.

    Raises:
        InvalidInput: the tensors of a slot are not `nbytes` large, differ from those of another
            slot of the layer, or are copies.
        PeerViolation: the ranks disagree on the tensors of a layer.
        Unavailable: this was refused on another rank, or not all ranks came.
    """
    declared = together(
        group,
        "declare the tensors of their experts",
        lambda: _declared(rank, placement, weights, nbytes),
    )
    numbers = [hash_of(declared[n]) if n in declared else 0 for n in range(placement.num_layers)]
    for layer, column in enumerate(gather(group, torch.tensor(numbers)).T):
        if len(column[column != 0].unique()) > 1:
            mine = declared.get(layer, "none")
            raise PeerViolation(
                f"the ranks disagree on the tensors of an expert in layer {layer}; this rank has"
                f" {mine}"
            )


def check_size(tensors: Sequence[Tensor], nbytes: int) -> None:
    """Refuse tensors that are not a whole expert: the limits of waves are computed from its size.

    Raises:
        InvalidInput: they have another number of bytes.
    """
    declared = sum(tensor.nbytes for tensor in tensors)
    if declared == nbytes:
        return
    message = f"the tensors of an expert have {declared} bytes, and bytes_per_expert is {nbytes}"
    if nbytes > declared > 0 and nbytes % declared == 0:
        message += (
            f", {nbytes // declared} times as many: if tensor parallelism divides each expert over"
            f" {nbytes // declared} ranks, its experts cannot be moved"
        )
    raise InvalidInput(message)


def _declared(
    rank: int, placement: Placement, weights: ExpertWeights, nbytes: int
) -> dict[int, str]:
    """Return by layer the types and shapes of the tensors of an expert on this rank."""
    declared: dict[int, str] = {}
    by_rank = placement.phy2log.reshape(placement.num_layers, placement.num_ranks, -1)
    for layer, local in np.argwhere(by_rank[:, rank] != EMPTY).tolist():
        tensors = weights.tensors(layer, local)
        where = f"layer {layer} slot {local} of rank {rank}"
        try:
            check_size(tensors, nbytes)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
        found = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in tensors).replace("torch.", "")
        if declared.setdefault(layer, found) != found:
            raise InvalidInput(
                f"{where} has tensors {found}, and another slot of the layer {declared[layer]}"
            )
        for index, (one, again) in enumerate(
            zip(tensors, weights.tensors(layer, local), strict=True)
        ):
            if one.data_ptr() != again.data_ptr():
                raise InvalidInput(
                    f"{where}: tensor {index} is a copy. `tensors` must return the engine's own"
                    " memory, into which a swap writes"
                )
    return declared
