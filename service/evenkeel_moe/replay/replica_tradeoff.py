"""Weighs replicas against the KV cache on a trace, for `evenkeel replay compare` and `plan`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory, ReplicaTradeoff, kv_tradeoff
from evenkeel_moe.planning.decision.replica_levels import LevelInputs, LevelPart, compare_levels
from evenkeel_moe.planning.decision.verdict import held_out_steps
from evenkeel_moe.replay.options import KvOptions
from evenkeel_moe.replay.walk import Setup, replan_steps


def kv_memory(asked: KvOptions) -> KvMemory | None:
    """Return the KV cache that the options tell; None if they tell nothing.

    Raises:
        InvalidInput: only some of the options that belong together are given.
    """
    each, free = asked.kv_bytes_per_token, asked.kv_free_bytes
    if (each is None) != (free is None):
        raise InvalidInput("kv_bytes_per_token and kv_free_bytes need each other")
    if each is None or free is None:
        for option, value in (
            ("tokens_per_sequence", asked.tokens_per_sequence),
            ("moe_share", asked.moe_share),
        ):
            if value is not None:
                raise InvalidInput(f"{option} needs kv_bytes_per_token and kv_free_bytes")
        return None
    return KvMemory(each, free)


def weigh_on_walk(setup: Setup, asked: KvOptions) -> ReplicaTradeoff:
    """Weigh numbers of replicas over the replans of a walk.

    Replicas are placed on each window and scored on the steps that follow it.
    """
    window, horizon = setup.window_steps, setup.horizon_steps
    steps = replan_steps(len(setup.load), window, horizon).tolist()
    return _tradeoff(setup, asked, [(step - window, step, step + horizon) for step in steps])


def weigh_on_window(setup: Setup, asked: KvOptions) -> ReplicaTradeoff | None:
    """Weigh numbers of replicas on the last window of a trace.

    Replicas are placed on its older steps and scored on as many newest ones as a controller would
    hold out.

    Returns:
        None if the options tell no KV cache.

    Raises:
        InvalidInput: the window is too short to hold out any step.
    """
    if kv_memory(asked) is None:
        return None
    held_out = held_out_steps(setup.window_steps, int(GateSettings().min_held_out_steps))
    if held_out == 0:
        raise InvalidInput(
            f"a window of {setup.window_steps} steps is too short to score replicas on later steps"
        )
    last = len(setup.load)
    return _tradeoff(setup, asked, [(last - setup.window_steps, last - held_out, last)])


def _tradeoff(
    setup: Setup, asked: KvOptions, parts: Sequence[tuple[int, int, int]]
) -> ReplicaTradeoff:
    """Weigh replicas placed on the steps first..cut-1 and scored on cut..last-1 of each part."""
    load = setup.load
    levels = LevelInputs(
        setup.shape,
        setup.topology,
        setup.objective.cost,
        tuple(
            LevelPart(load[first:cut], load[cut:last], setup.split(cut, last))
            for first, cut, last in parts
        ),
    )
    return kv_tradeoff(
        compare_levels(levels), kv_memory(asked), asked.tokens_per_sequence, asked.moe_share
    )


def tradeoff_fields(tradeoff: ReplicaTradeoff | None) -> dict[str, Any]:
    """Return the comparison as a field of an answer in JSON; none if it was not asked for."""
    return {} if tradeoff is None else {"replica_tradeoff": asdict(tradeoff)}
