"""`evenkeel offline`: from a recording to the file that an engine starts with.

Heavy imports wait until the command runs, because `--help` must not load numpy.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from evenkeel_moe.cli.console import print_json, print_parts, work_bars
from evenkeel_moe.cli.options import JsonOption, PlacementFileOptions, with_option_groups
from evenkeel_moe.cli.replay import (
    check_rows,
    check_writable,
    doubt_lines,
    first_row,
    read_current,
    read_recorded,
    with_origin,
    write_rows,
)
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.replay.options import (
    CostOptions,
    FleetOptions,
    PlanningOptions,
    ReadingOptions,
)

_START = {
    "neutral": "vLLM with the plugin: EVENKEEL_RANK__PLACEMENT={file} vllm serve MODEL"
    " --enable-expert-parallel --enable-eplb --eplb-config"
    " '{{\"num_redundant_experts\": {redundant}}}'",
    "sglang": "SGLang: --init-expert-location {file} --ep-num-redundant-experts {redundant}",
    "trtllm": "TensorRT-LLM: moe_config: {{load_balancer: {file}}} in the options of the LLM API",
    "ascend": "vllm-ascend: --additional-config"
    " '{{\"eplb_config\": {{\"expert_map_path\": \"{file}\"}}}}'",
    "vllm": "vLLM with pull request 49572: --enable-eplb --eplb-config"
    " '{{\"num_redundant_experts\": {redundant}, \"initial_expert_map_path\": \"{file}\"}}'",
    "vllm-mapping": "vLLM with pull request 41141: --enable-eplb --eplb-config"
    " '{{\"num_redundant_experts\": {redundant}, \"initial_mapping_path\": \"{file}\"}}'",
    "vllm-ranks": "vLLM with pull request 34811: --expert-placement-strategy custom"
    " --expert-placement-file {file}",
}  # fmt: skip
"""The words that say, for each format, how an engine starts with the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineFile(PlacementFileOptions):
    """The options that describe the files to write."""

    replica_probabilities: Annotated[
        Path | None,
        typer.Option(
            help="Also write the share of tokens of each slot to this *.pt file, for builds of"
            " SGLang that draw replicas by it. Only with sglang; needs torch."
        ),
    ] = None
    only_if_it_pays: Annotated[
        bool,
        typer.Option(
            "--only-if-it-pays", help="Write nothing, and exit with 1, if it does not surely pay."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgingOptions:
    """The options that say what is planned, and what decides whether it pays."""

    policy: Annotated[str, typer.Option("--policy", "-p", help="Name of a policy.")] = "keel"
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Number of newest steps to judge on.",
            min=0,
            show_default="a sixth of the steps, at least 16",
        ),
    ] = None
    compare_with: Annotated[
        Path | None,
        typer.Option(
            help="File with the placement to compare with, in any format.",
            show_default="the one with which the engine starts",
        ),
    ] = None


@with_option_groups
def offline(
    recording: Annotated[
        Path,
        typer.Argument(
            metavar="RECORDING",
            help="What an engine recorded: *.npz, *.pt, *.jsonl or a folder; see docs/offline.md.",
        ),
    ],
    file: OfflineFile,
    fleet: FleetOptions,
    planning: PlanningOptions,
    cost: CostOptions,
    judging: JudgingOptions,
    reading: ReadingOptions,
    as_json: JsonOption = False,
) -> None:
    """Plan on a recording, judge the plan on later steps, and write the file an engine starts with.

    Nothing runs beside the engine. The newest steps of the recording are kept apart: the plan is
    made without them, and they decide whether it pays.
    """
    from evenkeel_moe.formats import PlacementFormat
    from evenkeel_moe.replay.from_options import replay_policies, replay_setup
    from evenkeel_moe.replay.offline import plan_offline

    format_ = PlacementFormat.parse(file.format_name)
    _check(file, format_, fleet)
    trace = read_recorded(recording, reading)
    check_rows(format_, trace)
    one_row = format_ is PlacementFormat.VLLM_RANKS
    if one_row and fleet.slots is None:
        fleet = replace(fleet, slots=trace.num_experts)
    planning = replace(planning, fill_slots=planning.fill_slots or not format_.holds_empty_slots)
    setup = replay_setup(
        trace, fleet, planning, cost, window_steps=trace.num_steps, horizon_steps=1
    )
    policy, start = judging.policy, _compared_with(judging, format_, trace, setup)
    trace = with_origin(trace, setup, [policy], reading)
    with work_bars() as (on_work, _):
        on_work(f"{policy}: planning", 0)
        policies = replay_policies([policy], planning, fleet.bytes_per_expert)
        plan = plan_offline(
            policy,
            setup,
            start,
            held_out=judging.held_out,
            policies=policies,
            one_row=one_row,
            findings=trace.findings,
        )
    if written := plan.verdict.call == "recommend" or not file.only_if_it_pays:
        _write(file, plan, trace, setup)
    if as_json:
        facts = {"policy": policy, "trace": trace.name}
        where = {"file": str(file.out) if written else None, "format": file.format_name}
        print_json(where | {"start": _start(file, setup)} | facts | plan.as_dict())
    else:
        _print(file, format_, plan, trace, setup, policy, written)
    if not written:
        raise typer.Exit(1)


def _compared_with(judging: JudgingOptions, format_: Any, trace: Any, setup: Any) -> Any:
    """Return the placement that the plan is compared with."""
    from evenkeel_moe.replay.offline import engine_start

    if judging.compare_with is None:
        return engine_start(format_, setup.shape)
    return read_current(judging.compare_with, setup.shape.num_ranks, trace)


def _check(file: OfflineFile, format_: Any, fleet: FleetOptions) -> None:
    """Refuse options that do not fit each other, before the work."""
    check_writable(file.out, file.replica_probabilities)
    if file.replica_probabilities is not None and format_ != "sglang":
        raise InvalidInput(f"--replica-probabilities belongs to -f sglang, not to -f {format_}")
    if fleet.pooled:
        raise InvalidInput("engines start with equal slots in every layer: leave --pooled out")


def _start(file: OfflineFile, setup: Any) -> str:
    """Return how the reader of the file starts with it."""
    redundant = setup.shape.num_slots - setup.shape.num_logical_experts
    return _START[file.format_name].format(file=file.out, redundant=redundant)


def _write(file: OfflineFile, plan: Any, trace: Any, setup: Any) -> None:
    """Write the placement, and the probabilities if asked for."""
    from evenkeel_moe.formats.replica_probabilities import write_replica_probabilities
    from evenkeel_moe.replay.offline import replica_mass

    info = {
        "trace": trace.name,
        "planned_on_steps": plan.planned_on,
        "call": str(plan.verdict.call),
        "cost_model": setup.objective.cost.basis.words,
    }
    placement, hidden = write_rows(file, trace, plan.placement, info)
    if file.replica_probabilities is not None:
        mass = replica_mass(setup.load[: plan.planned_on], plan.placement)
        write_replica_probabilities(
            file.replica_probabilities, placement, mass, num_hidden_layers=hidden
        )


def _print(
    file: OfflineFile,
    format_: Any,
    plan: Any,
    trace: Any,
    setup: Any,
    policy: str,
    written: bool,
) -> None:
    """Print what was planned, the verdict in words, and how the engine starts with the file."""
    shape, steps = setup.shape, len(setup.load)
    about = (
        f": {steps} steps, {shape.num_layers} MoE layers, {shape.num_logical_experts} experts in"
        f" {shape.num_slots} slots on {shape.num_ranks} ranks"
    )
    lines = [f"Planned by {policy} on the first {plan.planned_on} steps."]
    if plan.verdict.steps:
        before, after = f"{plan.balancedness_before:.3f}", f"{plan.balancedness_after:.3f}"
        lines.append(
            f"Balancedness on the later steps: {before} without the file, {after} with it."
        )
    lines += [*doubt_lines(plan.findings), plan.words]
    lines.append(f"Cost model: {plan.verdict.cost_model.words}.")
    if not written:
        lines.append("Nothing was written.")
    else:
        lines.append(f"Wrote {file.out}.{first_row(format_, trace)} Start {_start(file, setup)}")
        if file.replica_probabilities is not None:
            lines.append(f"Wrote {file.replica_probabilities}.")
    print_parts(Text.assemble((trace.name, "bold"), about), *map(Text, lines))
