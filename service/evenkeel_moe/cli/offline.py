"""`evenkeel offline`: from a recording to the file that an engine starts with.

Heavy imports wait until the command runs, because `--help` must not load numpy.
"""

from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from evenkeel_moe.cli.console import print_json, print_parts, work_bars
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
from evenkeel_moe.cli.replay_options import (
    AcceptOption,
    ConfigOption,
    PlacementFileOptions,
    PolicyOption,
    RanksOption,
    RecordingArgument,
    SlotsOption,
)
from evenkeel_moe.cli.watch import OutputOptions
from evenkeel_moe.errors import InvalidInput

_START = {
    "neutral": "vLLM with the plugin: EVENKEEL_RANK__MODE=place EVENKEEL_RANK__RECORD=FOLDER"
    " EVENKEEL_RANK__PLACEMENT={file} vllm serve MODEL --enable-expert-parallel --enable-eplb"
    " --eplb-config '{{\"num_redundant_experts\": {redundant}}}'",
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


def offline(
    recording: RecordingArgument,
    file: PlacementFileOptions,
    ranks: RanksOption = None,
    slots: SlotsOption = None,
    policy: PolicyOption = None,
    only_if_it_pays: bool = False,
    accept: AcceptOption = None,
    config: ConfigOption = None,
    *,
    shown: OutputOptions,
) -> None:
    """Plan on a recording, and write the file an engine starts with.

    Nothing runs beside the engine. The newest steps of the recording are kept apart: the plan is
    made without them, and they decide whether it pays.

    Args:
        only_if_it_pays: Write nothing, and exit with 1, if it does not surely pay.
    """
    from evenkeel_moe.formats import PlacementFormat
    from evenkeel_moe.replay.from_options import replay_policies, replay_setup
    from evenkeel_moe.replay.offline import engine_start, plan_offline
    from evenkeel_moe.replay.options import OfflineOptions, read_options

    options = read_options(
        OfflineOptions, config, ranks=ranks, slots=slots, policy=policy, accept=accept
    )
    format_ = PlacementFormat.parse(file.format_name)
    _check(file, format_, options, recording)
    trace = read_recorded(recording, options)
    check_rows(format_, trace)
    options = _of_format(options, format_, trace)
    setup = replay_setup(trace, options, window_steps=trace.num_steps, horizon_steps=1)
    start = engine_start(format_, setup.shape)
    if options.compare_with is not None:
        start = read_current(options.compare_with, options.ranks, trace)
    trace = with_origin(trace, setup, [options.policy], options)
    with work_bars() as (on_work, _):
        on_work(f"{options.policy}: planning", 0)
        plan = plan_offline(
            options.policy,
            setup,
            start,
            held_out=options.held_out,
            policies=replay_policies([options.policy], options),
            one_row=format_ is PlacementFormat.VLLM_RANKS,
            findings=trace.findings,
        )
    if written := plan.verdict.call == "recommend" or not only_if_it_pays:
        _write(file, options, plan, trace, setup)
    if shown.as_json:
        facts = {"policy": options.policy, "trace": trace.name}
        where = {"file": str(file.out) if written else None, "format": file.format_name}
        start_words = _start(file, setup) if written else None
        print_json(where | {"start": start_words} | facts | plan.as_dict())
    else:
        _print(file, options, format_, plan, trace, setup, written)
    if not written:
        raise typer.Exit(1)


def _of_format(options: Any, format_: Any, trace: Any) -> Any:
    """Return the options with what the format of the file leaves no choice about."""
    changes: dict[str, Any] = {}
    if format_ == "vllm-ranks" and options.slots is None:
        changes["slots"] = trace.num_experts
    if not format_.holds_empty_slots:
        changes["fill_slots"] = True
    return options.model_copy(update=changes)


def _check(file: PlacementFileOptions, format_: Any, options: Any, recording: Path) -> None:
    """Refuse options that do not fit each other, before the work."""
    check_writable(file.out, options.replica_probabilities, read=recording)
    if options.replica_probabilities is not None and format_ != "sglang":
        raise InvalidInput(f"replica_probabilities belongs to -f sglang, not to -f {format_}")
    if options.pooled:
        raise InvalidInput("engines start with equal slots in every layer: leave pooled out")


def _start(file: PlacementFileOptions, setup: Any) -> str:
    """Return how the reader of the file starts with it."""
    redundant = setup.shape.num_slots - setup.shape.num_logical_experts
    return _START[file.format_name].format(file=file.out, redundant=redundant)


def _write(file: PlacementFileOptions, options: Any, plan: Any, trace: Any, setup: Any) -> None:
    """Write the placement, and the probabilities if asked for."""
    from evenkeel_moe.formats.placement_writing import write_replica_probabilities
    from evenkeel_moe.replay.offline import replica_mass

    info = {
        "trace": trace.name,
        "planned_on_steps": plan.planned_on,
        "call": str(plan.verdict.call),
        "cost_model": setup.objective.cost.basis.words,
    }
    placement, hidden = write_rows(file, options, trace, plan.placement, info)
    if options.replica_probabilities is not None:
        mass = replica_mass(setup.load[: plan.planned_on], plan.placement)
        write_replica_probabilities(
            options.replica_probabilities, placement, mass, num_hidden_layers=hidden
        )


def _print(
    file: PlacementFileOptions,
    options: Any,
    format_: Any,
    plan: Any,
    trace: Any,
    setup: Any,
    written: bool,
) -> None:
    """Print what was planned, the verdict in words, and how the engine starts with the file."""
    from evenkeel_moe.planning.problem.survival import coverage

    shape, steps = setup.shape, len(setup.load)
    about = (
        f": {steps} steps, {shape.num_layers} MoE layers, {shape.num_logical_experts} experts in"
        f" {shape.num_slots} slots on {shape.num_ranks} ranks"
    )
    lines = [f"Planned by {options.policy} on the first {plan.planned_on} steps."]
    if plan.verdict.steps:
        before, after = f"{plan.balancedness_before:.3f}", f"{plan.balancedness_after:.3f}"
        lines.append(
            f"Balancedness on the later steps: {before} without the file, {after} with it."
        )
    if plan.survival:
        lost = coverage(plan.placement, setup.topology, options.survive)
        lines.append(f"{lost.words.capitalize()}.")
    fewest = -(-shape.num_logical_experts // shape.num_ranks) * shape.num_ranks
    if shape.num_slots > fewest and not (plan.placement.logcnt > 1).any():
        lines.append(
            f"The plan has no replica: run again with --slots {fewest} for a file that leaves the"
            f" memory of the other {shape.num_slots - fewest} free."
        )
    lines += [*doubt_lines(plan.findings), plan.words]
    lines.append(f"Cost model: {plan.verdict.cost_model.words}.")
    if not written:
        lines.append("Nothing was written.")
    else:
        use = "To use it all the same, start" if plan.verdict.call == "not_now" else "Start"
        lines.append(f"Wrote {file.out}.{first_row(format_, trace)} {use} {_start(file, setup)}")
        if options.replica_probabilities is not None:
            lines.append(f"Wrote {options.replica_probabilities}.")
    print_parts(Text.assemble((trace.name, "bold"), about), *map(Text, lines))
