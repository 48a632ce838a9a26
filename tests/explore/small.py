"""The small deployment of the search: its shape, its placements, its plans and its deadlines.

Every rank holds the two experts of each layer in two slots. A wave swaps the two slots of one layer
on every rank, and each rank takes the bytes from the rank after it. So all ranks are alike, and a
rotation of the ranks leads from a state to an equal one. Plans leave the last layer to the engine.
"""

from functools import cache

import numpy as np

from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Plan, PlanKind, Transfer, Wave
from evenkeel_moe.model.policy import DeploymentPolicy, Mode
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol.timing import ControlTiming, WaveTiming
from tests.sim.planner import plan_by

DEPLOYMENT = DeploymentId("d")
NEVER_S = 1e9
"""The lease of a rank, and the time after which a rank without a leader drops a wave: they end by
events of their own, never by a clock."""
SOON_S, DEADLINE_S = 1.0, 1000.0
"""Time until an unanswered question is asked again; time until a deadline of a wave."""
HEARTBEAT_S = 2 * SOON_S
LATER_S = 2 * HEARTBEAT_S
"""Time until the leader asks all ranks, also at rest."""
TIMING = ControlTiming(
    heartbeat_s=HEARTBEAT_S,
    ask_again_s=SOON_S,
    rank_lease_s=NEVER_S,
    recovery_deadline_s=NEVER_S,
    cycle_deadline_s=NEVER_S,
    wave=WaveTiming(
        resend_s=SOON_S,
        resend_max_s=SOON_S,
        prepare_deadline_s=DEADLINE_S,
        commit_deadline_s=DEADLINE_S,
        commit_deadline_steps=0,
        stall_after_s=DEADLINE_S,
        stall_after_steps=0,
        idle_after_s=NEVER_S,
    ),
)
POLICY = DeploymentPolicy(mode=Mode.OBSERVE, cycle_s=3600.0)
"""No cycle is due within the times of the search: plans are made by hand."""

EXPERTS = SLOTS = 2


class RankNumber(int):
    """The number of a rank. Its type shows which integers a rotation of the ranks changes."""

    __slots__ = ()


def numbered(rank: int) -> EpRank:
    """Return the number of a rank for the machines."""
    return EpRank(RankNumber(rank))


@cache
def shape_of(ranks: int, layers: int) -> ModelShape:
    return ModelShape(layers, EXPERTS, ranks, SLOTS, top_k=1, bytes_per_expert=1)


@cache
def placement_of(ranks: int, flipped: tuple[bool, ...]) -> Placement:
    """Return the placement in which the slots of the given layers are swapped."""
    rows = [[1, 0] * ranks if swapped else [0, 1] * ranks for swapped in flipped]
    placement = Placement(np.array(rows, np.int32), ranks, EXPERTS)
    assert placement.digest  # Computed once, because the machines compare it often.
    return placement


def flips_of(placement: Placement) -> tuple[bool, ...]:
    """Return for each layer if its slots are swapped."""
    return tuple(bool(first) for first in placement.phy2log[:, 0].tolist())


def flip(placement: Placement, layer: int) -> Placement:
    """Return the placement after a wave that changes a layer."""
    flipped = list(flips_of(placement))
    flipped[layer] = not flipped[layer]
    return placement_of(placement.num_ranks, tuple(flipped))


def wave_of(index: int, layer: int, before: Placement) -> Wave:
    """Return the wave that swaps the slots of a layer; each rank copies from the next one."""
    rows = flip(before, layer).phy2log[[layer]]
    transfers = [
        Transfer(
            layer, int(rows[0, dst]), (dst // SLOTS + 1) % before.num_ranks * SLOTS + 1 - dst % 2,
            dst, 1,
        )
        for dst in range(before.num_slots)
    ]  # fmt: skip
    return Wave(index, (layer,), rows, tuple((transfer,) for transfer in transfers))


@cache
def plan_of(
    number: int,
    first_layer: int,
    base: Placement,
    generation: Generation,
    epoch: Epoch,
    version: int,
) -> Plan:
    """Return a plan that changes each layer from `first_layer` on but the last, one in a wave."""
    waves, placement = [], base
    for index, layer in enumerate(range(first_layer, base.num_layers - 1)):
        waves.append(wave_of(index, layer, placement))
        placement = flip(placement, layer)
    view = (generation, epoch, base, version)
    kind, plan_id = PlanKind.MANUAL, f"plan{number}"
    return plan_by(waves, view, placement, DEPLOYMENT, float(number), kind=kind, plan_id=plan_id)


@cache
def checksum(value: tuple | None) -> int:
    """Return a number that stands for the checksum of an expert's bytes."""
    if value is None or value[0] == "corrupt":
        return 0
    version, layer, expert = value
    return 1 + version * 1_000_003 + layer * 1009 + expert


def checksums_of(layers: int, version: int) -> tuple[int, ...]:
    """Return the checksums that every rank registers for a version of the weights."""
    return tuple(
        checksum((version, layer, expert)) for layer in range(layers) for expert in range(EXPERTS)
    )


def bytes_of(placement: Placement, version: int) -> tuple:
    """Return the symbols of the bytes that the slots of every rank must hold, by layer and slot."""
    return tuple(
        (version, layer, expert)
        for layer in range(placement.num_layers)
        for expert in placement.phy2log[layer, :SLOTS].tolist()
    )
