"""Compares numbers of ranks on a recording, for `evenkeel capacity`."""

from dataclasses import fields, replace

from evenkeel_moe.model.finding import Finding, doubts
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.decision.capacity import (
    Capacity,
    CapacityInputs,
    CapacityRequest,
    weigh_capacity,
)
from evenkeel_moe.replay.from_options import policy_options
from evenkeel_moe.replay.offline import check_fits, steps_to_plan_on
from evenkeel_moe.replay.options import CapacityOptions
from evenkeel_moe.replay.planners import cycle_inputs
from evenkeel_moe.replay.replica_tradeoff import kv_memory
from evenkeel_moe.replay.walk import Setup


def weigh_recording(
    setup: Setup,
    asked: CapacityOptions,
    current: Placement | None,
    findings: tuple[Finding, ...] = (),
) -> Capacity:
    """Plan every width on the older steps of a trace, and score it on the newest.

    Args:
        setup: trace and fleet; its window is not read.
        asked: the widths, and the KV cache of today's fleet.
        current: today's placement; None for `Placement.initial`, with a sentence about it.
        findings: of the recording; with a doubt among them its loads are not used.

    Raises:
        InvalidInput, ShapeMismatch: the options name widths or ranks that cannot be, or are of
            another policy, no step is left to plan on, or `current` is of another fleet.
        EvenkeelError: the policy failed.
    """
    if current is not None:
        check_fits("the current placement", current, setup.shape)
    cut, kv = steps_to_plan_on(len(setup.load), asked.held_out), kv_memory(asked)
    problem, present = setup.problem(0, cut, None), current or Placement.initial(setup.shape)
    group = cycle_inputs(problem, present, asked.policy)
    weighed = weigh_capacity(
        CapacityInputs(
            group=replace(group, policy_options=policy_options([asked.policy], asked)),
            planned_on=setup.load[:cut],
            scored_on=setup.load[cut:],
            asked=CapacityRequest(
                **{each.name: getattr(asked, each.name) for each in fields(CapacityRequest)}
            ),
            kv=kv,
            # The options name all the memory there is.
            free_bytes=None if kv is None else 0,
            unfit=tuple(each.words for each in doubts(findings)),
        )
    )
    if current is not None:
        return weighed
    start = "`current` names no placement, so today's is the planner's own start, not an engine's."
    return replace(weighed, words=(*weighed.words, start))
