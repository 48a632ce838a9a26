"""`evenkeel replay`: compare policies on a recorded trace, plan a placement, describe a trace.

Heavy imports wait until a command runs, because `--help` must not load numpy.
"""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.console import print_json, print_parts, say, work_bars
from evenkeel_moe.cli.exits import needing
from evenkeel_moe.cli.replay_options import (
    AcceptOption,
    ConfigOption,
    FirstLayerOption,
    PlacementFileOptions,
    PolicyOption,
    RanksOption,
    RecordingArgument,
    SlotsOption,
    StartOption,
)
from evenkeel_moe.cli.units import moment
from evenkeel_moe.cli.watch import OutputOptions
from evenkeel_moe.errors import InvalidInput

app = CommandGroup(help="Try policies on recorded traffic.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedOptions:
    """The options of a comparison.

    Args:
        policies: Names, separated by commas. Default: all policies.
        window: Number of steps on which a policy plans. Default: 100.
        horizon: Steps on which a plan is scored before the next replan. Default: 50.
        out: File to write: *.html is a page with charts, *.npz holds every plan. Repeat for both.
            Default: none.
    """

    policies: Annotated[str | None, typer.Option("--policies", "-p")] = None
    ranks: RanksOption = None
    slots: SlotsOption = None
    window: int | None = None
    horizon: int | None = None
    accept: AcceptOption = None
    out: list[Path] | None = None
    config: ConfigOption = None


@app.command("compare")
def compare_command(
    recording: RecordingArgument, asked: ComparedOptions, shown: OutputOptions
) -> None:
    """Plan on past steps, score on later ones, and repeat.

    Copies and bytes are those of all replans except the first, which starts from the initial
    placement. The recording must be long enough for at least 4 replans.
    """
    from evenkeel_moe.replay.compare import compare, write_plans
    from evenkeel_moe.replay.from_options import replay_policies, replay_setup
    from evenkeel_moe.replay.options import CompareOptions, read_options
    from evenkeel_moe.replay.planners import choose_planners
    from evenkeel_moe.replay.replica_tradeoff import kv_memory, weigh_on_walk

    flags = asdict(asked)
    config, out = flags.pop("config"), flags.pop("out")
    options = read_options(CompareOptions, config, **flags)
    files = _by_suffix(out or ())
    check_writable(*files.values(), read=recording)
    if ".html" in files:  # At once, not after the work.
        with needing("plots", "a page with charts"):
            import evenkeel_moe.replay.charts  # noqa: F401
    weigh_replicas = kv_memory(options) is not None or ".html" in files
    trace = read_recorded(recording, options)
    setup = replay_setup(trace, options, window_steps=options.window, horizon_steps=options.horizon)
    names = _policy_names(options)
    known = replay_policies(names, options)
    planners = choose_planners(names, baselines=options.baselines, policies=known)
    _tell_start(planners, trace)
    trace = with_origin(trace, setup, planners, options)
    with work_bars() as (on_work, on_replan):
        tradeoff = weigh_on_walk(setup, options) if weigh_replicas else None
        comparison = compare(trace, setup, planners, tradeoff, on_work=on_work, on_replan=on_replan)
    # Printed before any file is written: a full disk must not lose the results.
    _print_comparison(comparison, shown.as_json)
    if plans := files.get(".npz"):
        write_plans(plans, comparison)
    if page := files.get(".html"):
        _write_page(page, comparison)


def _by_suffix(out: Sequence[Path]) -> dict[str, Path]:
    """Return the files to write by what they hold."""
    files = {path.suffix: path for path in out}
    for path in out:
        if path.suffix not in (".html", ".npz"):
            raise InvalidInput(f"--out {path}: a comparison is written as *.html or *.npz")
        if files[path.suffix] != path:
            raise InvalidInput(f"--out {path}: there is another {path.suffix} file")
    return files


def _policy_names(options: Any) -> list[str]:
    """Return the names of the policies to compare, without the baselines."""
    from evenkeel_moe.planning.policies.registry import POLICIES, added_policies
    from evenkeel_moe.replay.planners import VERDICT

    names = [*POLICIES, *added_policies()]
    if options.policies is not None:
        names = [name.strip() for name in options.policies.split(",") if name.strip()]
    if options.verdict:
        names += [f"{name}{VERDICT}" for name in names if not name.endswith(VERDICT)]
    return names


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
    parts = comparison_parts(comparison)
    _print_answer(comparison.trace.findings, comparison.trace.name, f": {facts}", parts)


@app.command("plan")
def plan_command(
    recording: RecordingArgument,
    file: PlacementFileOptions,
    policy: PolicyOption = None,
    ranks: RanksOption = None,
    slots: SlotsOption = None,
    current: Path | None = None,
    accept: AcceptOption = None,
    config: ConfigOption = None,
    *,
    shown: OutputOptions,
) -> None:
    """Plan one placement, and write it for an engine.

    Args:
        current: File with the present placement, in any format, to keep copies few.
    """
    from evenkeel_moe.cli.replay_tables import tradeoff_parts
    from evenkeel_moe.formats import PlacementFormat
    from evenkeel_moe.replay.from_options import replay_policies, replay_setup
    from evenkeel_moe.replay.offline import plan_newest
    from evenkeel_moe.replay.options import SinglePlanOptions, read_options
    from evenkeel_moe.replay.replica_tradeoff import tradeoff_fields, weigh_on_window

    fleet = {"ranks": ranks, "slots": slots, "current": current}
    options = read_options(SinglePlanOptions, config, policy=policy, accept=accept, **fleet)
    check_writable(file.out, read=recording)
    name, format_ = options.policy, PlacementFormat.parse(file.format_name)
    check_rows(format_, trace := read_recorded(recording, options))
    steps = options.window or trace.num_steps
    setup = replay_setup(trace, options, window_steps=steps, horizon_steps=1)
    present = options.current
    start = None if present is None else read_current(present, options.ranks, trace)
    trace = with_origin(trace, setup, [name], options)
    tradeoff = weigh_on_window(setup, options)
    with work_bars() as (on_work, _):
        on_work(f"{name}: planning", 0)
        known = replay_policies([name], options)
        placement, numbers = plan_newest(name, setup, start, known)
    info = {
        "policy": name,
        "trace": trace.name,
        "planned_on_steps": steps,
        "cost_model": setup.objective.cost.basis.words,
        **numbers,
    }
    write_rows(file, options, trace, placement, info)
    if shown.as_json:
        findings = [asdict(each) for each in trace.findings]
        where = {"file": str(file.out), "format": str(format_), "findings": findings}
        print_json(where | info | tradeoff_fields(tradeoff))
        return
    about = f" ({format_}): {_plan_line(info, numbers)}.{first_row(format_, trace)}"
    _print_answer(trace.findings, str(file.out), about, tradeoff_parts(tradeoff))


_NAMES = {
    "replicas": "extra replicas",
    "survive_lost": "experts lost with one failure",
    "survive_experts": "of",
    "survive_price": "for a share of MoE time of",
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
def inspect_command(
    recording: RecordingArgument,
    ranks: Annotated[int | None, typer.Option(min=1)] = None,
    window: Annotated[int, typer.Option(min=1)] = 100,
    accept: AcceptOption = None,
    first_moe_layer: FirstLayerOption = None,
    start: StartOption = None,
    *,
    shown: OutputOptions,
) -> None:
    """Describe how uneven expert loads are, and how they change.

    Skew is the largest / the mean load of the experts of a layer. Consistent experts have a high
    load in nearly all steps, temporal ones in few. The loads of a correlated pair rise in the same
    steps. Drift is the change of the loads over time.

    Args:
        ranks: Also show the balancedness on this many ranks, without replicas.
        window: Number of steps per window for drift.
    """
    from evenkeel_moe.cli.replay_tables import description_parts
    from evenkeel_moe.replay.describe import describe
    from evenkeel_moe.replay.options import ReadingOptions, read_options

    reading = read_options(
        ReadingOptions, None, accept=accept, first_moe_layer=first_moe_layer, start=start
    )
    description = describe(read_recorded(recording, reading), num_ranks=ranks, window_steps=window)
    if shown.as_json:
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


def read_recorded(path: Path, reading: Any) -> Any:
    """Return the trace in a file or folder, after printing its notes."""
    from evenkeel_moe.formats import read_trace

    trace = read_trace(
        path, first_moe_layer=reading.first_moe_layer, accept=reading.accept, start=reading.start
    )
    print_notes(trace.findings)
    return trace


def read_current(path: Path, ranks: int, trace: Any) -> Any:
    """Return the placement in a file, which must fit the trace."""
    from evenkeel_moe.formats import read_placement

    return read_placement(
        path, num_ranks=ranks, num_logical_experts=trace.num_experts, layer_ids=trace.layer_ids
    ).placement


def with_origin(trace: Any, setup: Any, policies: Iterable[str], reading: Any) -> Any:
    """Return the trace with what is assumed about the ranks that recorded it, and print that."""
    from evenkeel_moe.replay.compare import check_origin

    checked = check_origin(trace, setup, policies, reading.accept)
    print_notes(checked.findings[len(trace.findings) :])
    return checked


def check_rows(format_: Any, trace: Any) -> None:
    """Refuse a file with a row for each MoE layer if the recording lacks some of them."""
    from evenkeel_moe.model.finding import FindingCode, doubts

    idle = (FindingCode.IDLE_LAYERS, FindingCode.LEADING_IDLE_LAYERS)
    missing = [each for each in doubts(trace.findings) if each.code in idle]
    if format_.counts_moe_layers and missing:
        raise InvalidInput(
            f"-f {format_} has a row for each MoE layer in order, and {missing[0].words} Rows after"
            " them would belong to other layers. If those layers are dense, give --accept"
            f" {missing[0].code}"
        )


def write_rows(
    file: PlacementFileOptions, options: Any, trace: Any, placement: Any, info: dict[str, Any]
) -> tuple[Any, int | None]:
    """Write a placement of a trace's layers; return it with the number of hidden layers."""
    from evenkeel_moe.formats import PlacementFile, PlacementFormat, write_placement

    told = options.num_hidden_layers
    hidden = trace.num_hidden_layers if told is None else told
    content = PlacementFile(placement, trace.layer_ids, info)
    format_ = PlacementFormat.parse(file.format_name)
    write_placement(file.out, content, format_, num_hidden_layers=hidden)
    return content, hidden


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


def check_writable(*wanted: Path | None, read: Path | None = None) -> None:
    """Refuse files that cannot be written, or that replace the one to read, before the work."""
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
    named = [path.resolve() for path in (*paths, read) if path is not None]
    for path, file in zip(paths, named, strict=False):
        if named.count(file) > 1:
            raise InvalidInput(f"{path} is named for two files: one would replace the other")
