"""`evenkeel replay`: compare policies on a recorded trace, plan a placement, describe a trace.

Heavy imports wait until a command runs, because `--help` must not load numpy.
"""

import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli.console import print_json, print_parts, say, stdout_console, work_bars
from evenkeel_moe.cli.help import CommandApp
from evenkeel_moe.cli.options import JsonOption, PlacementFileOptions, with_option_groups
from evenkeel_moe.cli.units import moment
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.replay.options import (
    CostOptions,
    FleetOptions,
    KvOptions,
    PlanningOptions,
    ReadingOptions,
    TraceOption,
)

app = CommandApp(
    no_args_is_help=True, help="Try policies on recorded traffic, without a running fleet."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedOptions:
    """The options that say which policies to compare, and on which steps."""

    policies: Annotated[
        str | None,
        typer.Option(
            "--policies", "-p", help="Names, separated by commas.", show_default="all policies"
        ),
    ] = None
    window: Annotated[int, typer.Option(help="Number of steps on which a policy plans.", min=1)] = (
        100
    )
    horizon: Annotated[
        int, typer.Option(help="Steps on which a plan is scored before the next replan.", min=1)
    ] = 50
    verdict: Annotated[
        bool,
        typer.Option(
            "--verdict",
            help="Also compare every policy as POLICY+verdict: its plans are adopted only if"
            " held-out steps show that they pay.",
        ),
    ] = False
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines/--no-baselines",
            help="Also compare initial (never plans), once (plans once) and ewma (EPLB on a"
            " weighted mean of the past).",
        ),
    ] = True

    def names(self) -> list[str]:
        """Return the names of the policies, without the baselines."""
        from evenkeel_moe.planning.policies.registry import POLICIES
        from evenkeel_moe.replay.planners import VERDICT

        names = list(POLICIES)
        if self.policies is not None:
            names = [name.strip() for name in self.policies.split(",") if name.strip()]
        if self.verdict:
            names += [f"{name}{VERDICT}" for name in names if not name.endswith(VERDICT)]
        return names


@app.command("compare")
@with_option_groups
def compare_command(
    trace: TraceOption,
    compared: ComparedOptions,
    fleet: FleetOptions,
    planning: PlanningOptions,
    cost: CostOptions,
    kv: KvOptions,
    reading: ReadingOptions,
    save_plans: Annotated[
        Path | None,
        typer.Option(help="Write every plan to this npz file, for scoring with other tools."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a self-contained HTML page with charts to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare policies on a trace: plan on past steps, score the plan on later ones, and repeat.

    Copies and bytes are those of all replans except the first, which starts from the initial
    placement. The trace must be long enough for at least 4 replans.
    """
    from evenkeel_moe.replay.compare import compare, write_plans
    from evenkeel_moe.replay.from_options import replay_policies, replay_setup
    from evenkeel_moe.replay.planners import choose_planners
    from evenkeel_moe.replay.replica_tradeoff import kv_memory, weigh_on_walk

    check_writable(save_plans, html)
    weigh_replicas = kv_memory(kv) is not None or html is not None
    if html is not None:
        _check_matplotlib()
    recorded = read_recorded(trace, reading)
    setup = replay_setup(
        recorded,
        fleet,
        planning,
        cost,
        window_steps=compared.window,
        horizon_steps=compared.horizon,
    )
    names = compared.names()
    policies = replay_policies(names, planning, fleet.bytes_per_expert)
    planners = choose_planners(names, baselines=compared.baselines, policies=policies)
    _tell_start(planners, recorded)
    recorded = with_origin(recorded, setup, planners, reading)
    with work_bars() as (on_work, on_replan):
        tradeoff = weigh_on_walk(setup, kv) if weigh_replicas else None
        comparison = compare(
            recorded, setup, planners, tradeoff, on_work=on_work, on_replan=on_replan
        )
    # Printed before any file is written: a full disk must not lose the results.
    _print_comparison(comparison, as_json)
    if save_plans is not None:
        write_plans(save_plans, comparison)
    if html is not None:
        _write_page(html, comparison)


def _tell_start(planners: Iterable[str], recorded: Any) -> None:
    """Say on stderr what begins; in a pipe it is all that is said until the end."""
    say(
        f"comparing {', '.join(planners)} on {recorded.num_steps} steps of {recorded.name}; this"
        " may take minutes, above all the first time, when kernels are compiled",
        err=True,
    )


def _write_page(path: Path, comparison: Any) -> None:
    from evenkeel_moe.formats.array_files import write_file
    from evenkeel_moe.replay.report import render_report

    words = ["evenkeel", *sys.argv[1:]]
    made_by = f"{shlex.join(words)}, {moment(SystemClock().unix())} UTC"
    write_file(path, render_report(comparison, made_by))


def _print_comparison(comparison: Any, as_json: bool) -> None:
    from evenkeel_moe.cli.replay_tables import comparison_parts

    if as_json:
        print_json(comparison.as_dict())
        return
    facts = ", ".join(f"{value} {name}" for name, value in comparison.facts().items())
    parts = comparison_parts(comparison, stdout_console().width)
    _print_answer(comparison.trace.findings, comparison.trace.name, f": {facts}", parts)


@app.command("plan")
@with_option_groups
def plan_command(
    trace: TraceOption,
    policy: Annotated[str, typer.Option("--policy", "-p", help="Name of a policy.")] = "keel",
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            help="Number of newest steps to plan on.",
            min=1,
            show_default="the whole trace",
        ),
    ] = None,
    current: Annotated[
        Path | None,
        typer.Option(help="File with the current placement, in any format, to keep copies few."),
    ] = None,
    *,
    output: PlacementFileOptions,
    fleet: FleetOptions,
    planning: PlanningOptions,
    cost: CostOptions,
    kv: KvOptions,
    reading: ReadingOptions,
    as_json: JsonOption = False,
) -> None:
    """Plan one placement on a trace and write it to a file for an engine."""
    from evenkeel_moe.cli.replay_tables import tradeoff_parts
    from evenkeel_moe.formats import PlacementFormat
    from evenkeel_moe.replay.from_options import replay_policies, replay_setup
    from evenkeel_moe.replay.offline import plan_newest
    from evenkeel_moe.replay.replica_tradeoff import tradeoff_fields, weigh_on_window

    check_writable(output.out)
    format_ = PlacementFormat.parse(output.format_name)
    check_rows(format_, recorded := read_recorded(trace, reading))
    steps = window or recorded.num_steps
    setup = replay_setup(recorded, fleet, planning, cost, window_steps=steps, horizon_steps=1)
    start = None if current is None else read_current(current, fleet.ranks, recorded)
    recorded = with_origin(recorded, setup, [policy], reading)
    tradeoff = weigh_on_window(setup, kv)
    with work_bars() as (on_work, _):
        on_work(f"{policy}: planning", 0)
        policies = replay_policies([policy], planning, fleet.bytes_per_expert)
        placement, numbers = plan_newest(policy, setup, start, policies)
    info = {
        "policy": policy,
        "trace": recorded.name,
        "planned_on_steps": steps,
        "cost_model": setup.objective.cost.basis.words,
        **numbers,
    }
    write_rows(output, recorded, placement, info)
    if as_json:
        findings = [asdict(each) for each in recorded.findings]
        where = {"file": str(output.out), "format": str(format_), "findings": findings}
        print_json(where | info | tradeoff_fields(tradeoff))
        return
    about = f" ({format_}): {_plan_line(info, numbers)}.{first_row(format_, recorded)}"
    _print_answer(recorded.findings, str(output.out), about, tradeoff_parts(tradeoff))


_NAMES = {
    "replicas": "extra replicas",
    "time_over_fluid": "predicted MoE time / that of a perfect split of the tokens",
}
"""Words for the figures of one plan whose names do not say what they are."""


def _plan_line(info: dict[str, Any], numbers: dict[str, float]) -> str:
    """Return what a plan was made on, its figures and their cost model."""
    shown = ", ".join(f"{_NAMES.get(name, name)} {value:.4g}" for name, value in numbers.items())
    return (
        f"{info['policy']} on {info['planned_on_steps']} steps of {info['trace']}; {shown};"
        f" cost model: {info['cost_model']}"
    )


@app.command("inspect")
@with_option_groups
def inspect_command(
    trace: TraceOption,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Also show the balancedness on this many ranks, without replicas.", min=1
        ),
    ] = None,
    window: Annotated[int, typer.Option(help="Number of steps per window for drift.", min=1)] = 100,
    *,
    reading: ReadingOptions,
    as_json: JsonOption = False,
) -> None:
    """Describe a trace: how uneven its expert loads are, and how they change.

    Skew is the largest / the mean load of the experts of a layer. Consistent experts have a high
    load in nearly all steps, temporal ones in few. The loads of a correlated pair rise in the same
    steps. Drift is the change of the loads over time.
    """
    from evenkeel_moe.cli.replay_tables import description_parts
    from evenkeel_moe.replay.describe import describe

    description = describe(read_recorded(trace, reading), num_ranks=ranks, window_steps=window)
    if as_json:
        print_json(asdict(description))
        return
    high = sum(layer.skew_class == "high" for layer in description.layers)
    top_k = f"top-{description.top_k}, " if description.top_k else ""
    unit = "tokens" if description.top_k else "routed tokens"
    about = (
        f": {description.num_steps} steps, {description.num_layers} MoE layers,"
        f" {description.num_experts} experts, {top_k}{description.tokens_per_step:.0f} {unit} per"
        f" step; {high} layers of high skew"
    )
    _print_answer(description.findings, description.name, about, description_parts(description))


def _print_answer(findings: Iterable[Any], name: str, about: str, parts: Iterable[Any]) -> None:
    """Print the doubts about a recording, a line that begins with a name in bold, and the rest."""
    doubts = map(Text, doubt_lines(findings))
    print_parts(*doubts, Text.assemble((name, "bold"), about), *parts)


def read_recorded(path: Path, reading: ReadingOptions) -> Any:
    """Return the trace in a file or folder, after printing its notes."""
    from evenkeel_moe.formats import read_trace

    trace = read_trace(
        path,
        first_moe_layer=reading.first_moe_layer,
        accept=reading.accept or (),
        start=reading.start,
    )
    print_notes(trace.findings)
    return trace


def read_current(path: Path, ranks: int, trace: Any) -> Any:
    """Return the placement in a file, which must fit the trace."""
    from evenkeel_moe.formats import read_placement

    return read_placement(
        path, num_ranks=ranks, num_logical_experts=trace.num_experts, layer_ids=trace.layer_ids
    ).placement


def with_origin(trace: Any, setup: Any, policies: Iterable[str], reading: ReadingOptions) -> Any:
    """Return the trace with what is assumed about the ranks that recorded it, and print that."""
    from evenkeel_moe.replay.compare import check_origin

    checked = check_origin(trace, setup, policies, reading.accept or ())
    print_notes(checked.findings[len(trace.findings) :])
    return checked


def check_rows(format_: Any, trace: Any) -> None:
    """Refuse a file with a row for each MoE layer if the recording lacks some of them."""
    from evenkeel_moe.model.finding import FindingCode, doubts

    missing = [each for each in doubts(trace.findings) if each.code is FindingCode.IDLE_LAYERS]
    if format_.counts_moe_layers and missing:
        raise InvalidInput(
            f"-f {format_} has a row for each MoE layer in order, and {missing[0].words} Rows after"
            " them would belong to other layers. If those layers are dense, give --accept"
            f" {FindingCode.IDLE_LAYERS}"
        )


def write_rows(
    output: PlacementFileOptions, trace: Any, placement: Any, info: dict[str, Any]
) -> tuple[Any, int | None]:
    """Write a placement of a trace's layers; return it with the number of hidden layers."""
    from evenkeel_moe.formats import PlacementFile, PlacementFormat, write_placement

    told = output.num_hidden_layers
    hidden = trace.num_hidden_layers if told is None else told
    file, format_ = PlacementFile(placement, trace.layer_ids, info), output.format_name
    write_placement(output.out, file, PlacementFormat.parse(format_), num_hidden_layers=hidden)
    return file, hidden


def first_row(format_: Any, trace: Any) -> str:
    """Return a sentence that says which layer row 0 of a file is, if that is not layer 0."""
    first = trace.layer_ids[0]
    return f" Its row 0 is hidden layer {first}." if format_.counts_moe_layers and first else ""


def print_notes(findings: Iterable[Any]) -> None:
    """Print the notes about a recording on stderr; doubts stand above the answer."""
    for finding in findings:
        if finding.severity == "note":
            say(f"note: {finding.words}", err=True)


def doubt_lines(findings: Iterable[Any]) -> list[str]:
    """Return one line for each doubt about a recording."""
    return [f"Doubt: {finding.words}" for finding in findings if finding.severity == "doubt"]


def _check_matplotlib() -> None:
    """Refuse --html at once, not after the work, where the library that draws is missing."""
    try:
        import evenkeel_moe.replay.charts  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "--html needs matplotlib: run `pip install 'evenkeel-moe[plots]'`"
        ) from error


def check_writable(*wanted: Path | None) -> None:
    """Refuse files that cannot be written before the work, not after it."""
    paths = [path for path in wanted if path is not None]
    for path in paths:
        try:
            if not path.parent.is_dir():
                raise InvalidInput(f"{path}: there is no folder {path.parent}")
            if path.is_dir():
                raise InvalidInput(f"{path} is a folder: name a file in it")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise InvalidInput(f"{path} cannot be written")
        except OSError as error:
            raise InvalidInput(f"{path} cannot be written: {error.strerror}") from error
    if len({path.resolve() for path in paths}) < len(paths):
        raise InvalidInput(f"{paths[0]} is named for two files: one would replace the other")
