"""`evenkeel replay`: compare policies on a recorded trace, plan a placement, describe a trace.

Mounted by the command line; heavy imports wait until a command runs.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.replay.console import show, stdout_console, work_bars
from evenkeel_moe.replay.options import (
    BYTES_PER_EXPERT,
    BaselinesOption,
    BytesOption,
    CraftReplicasOption,
    CrossNodeOption,
    CurrentOption,
    DispatchOption,
    DuplicatesOption,
    EvaluationsOption,
    FirstMoeLayerOption,
    FormatOption,
    FreeBytesOption,
    GroupsOption,
    HorizonOption,
    HtmlOption,
    JsonOption,
    NewestOption,
    NodesOption,
    NumHiddenLayersOption,
    OutOption,
    PoliciesOption,
    PolicyOption,
    PooledOption,
    PriceOption,
    RanksOption,
    SavePlansOption,
    SeedOption,
    SlotsOption,
    SpeedsOption,
    TraceOption,
    VerdictOption,
    WindowOption,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from evenkeel_moe.formats import Trace
    from evenkeel_moe.planning.problem.placement_problem import Policy
    from evenkeel_moe.replay.compare import Fleet
    from evenkeel_moe.replay.walk import Setup

__all__ = ["app"]

app = typer.Typer(
    name="replay",
    no_args_is_help=True,
    help="Try policies on recorded traffic, without touching a fleet.",
)


@app.command("compare")
def compare_command(
    trace: TraceOption,
    ranks: RanksOption = 8,
    slots: SlotsOption = None,
    policies: PoliciesOption = None,
    window: WindowOption = 100,
    horizon: HorizonOption = 50,
    verdict: VerdictOption = False,
    baselines: BaselinesOption = True,
    nodes: NodesOption = 1,
    expert_groups: GroupsOption = 1,
    bytes_per_expert: BytesOption = BYTES_PER_EXPERT,
    rank_speeds: SpeedsOption = None,
    dispatch: DispatchOption = "even",
    copy_price: PriceOption = 0.0,
    cross_node_factor: CrossNodeOption = 1.0,
    pooled: PooledOption = False,
    max_evaluations: EvaluationsOption = None,
    seed: SeedOption = 0,
    allow_duplicates: DuplicatesOption = False,
    craft_replicas: CraftReplicasOption = None,
    free_bytes: FreeBytesOption = None,
    first_moe_layer: FirstMoeLayerOption = None,
    save_plans: SavePlansOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Walk policies over a trace: plan on the past window, score on the steps that follow, move on.

    Copies and bytes are of all replans but the first, which starts from the initial placement. At least 4
    replans must fit into the trace.
    """
    from evenkeel_moe.formats.writing import write_file
    from evenkeel_moe.replay.compare import Fleet, compare, origin_notes
    from evenkeel_moe.replay.compare import save_plans as write_plans
    from evenkeel_moe.replay.page import render_page
    from evenkeel_moe.replay.planners import choose_planners
    from evenkeel_moe.replay.tables import comparison_table

    _check_writable(save_plans, html)
    recorded = _read(trace, first_moe_layer)
    fleet = Fleet(
        ranks,
        _slots(slots, ranks, recorded),
        nodes,
        expert_groups,
        bytes_per_expert,
        pooled,
        _speeds(rank_speeds),
    )
    setup = _setup(
        recorded,
        fleet,
        window,
        horizon,
        dispatch,
        copy_price,
        cross_node_factor,
        max_evaluations,
        seed,
        allow_duplicates,
    )
    names = _names(policies)
    if verdict:
        names += [f"{name}+verdict" for name in names if not name.endswith("+verdict")]
    crafted = _policies(names, craft_replicas, free_bytes)
    planners = choose_planners(names, baselines=baselines, policies=crafted)
    _say(origin_notes(recorded, setup, planners))
    with work_bars() as (on_work, on_replan):
        comparison = compare(
            recorded,
            setup,
            planners,
            bytes_per_expert,
            budget=html is not None,
            on_work=on_work,
            on_replan=on_replan,
        )
    # Before any file: a full disk must not cost the figures.
    if as_json:
        typer.echo(json.dumps(comparison.as_dict(), indent=2, allow_nan=False))
    else:
        facts = ", ".join(f"{value} {name}" for name, value in comparison.facts().items())
        show(
            f"[bold]{escape(comparison.name)}[/bold]: {facts}",
            comparison_table(comparison.figures, stdout_console().width),
        )
    if save_plans is not None:
        write_plans(save_plans, comparison)
    if html is not None:
        write_file(html, render_page(comparison))


@app.command("plan")
def plan_command(
    trace: TraceOption,
    out: OutOption,
    policy: PolicyOption = "keel",
    format_: FormatOption = "neutral",
    ranks: RanksOption = 8,
    slots: SlotsOption = None,
    window: NewestOption = None,
    current: CurrentOption = None,
    num_hidden_layers: NumHiddenLayersOption = None,
    nodes: NodesOption = 1,
    expert_groups: GroupsOption = 1,
    bytes_per_expert: BytesOption = BYTES_PER_EXPERT,
    rank_speeds: SpeedsOption = None,
    dispatch: DispatchOption = "even",
    copy_price: PriceOption = 0.0,
    cross_node_factor: CrossNodeOption = 1.0,
    pooled: PooledOption = False,
    max_evaluations: EvaluationsOption = None,
    seed: SeedOption = 0,
    allow_duplicates: DuplicatesOption = False,
    craft_replicas: CraftReplicasOption = None,
    free_bytes: FreeBytesOption = None,
    first_moe_layer: FirstMoeLayerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan one placement on a trace and write it for an engine."""
    from evenkeel_moe.formats import PlacementFile, read_placement, write_placement
    from evenkeel_moe.replay.compare import Fleet, origin_notes
    from evenkeel_moe.replay.single import plan_once

    _check_writable(out)
    written_for = _format(format_)
    recorded = _read(trace, first_moe_layer)
    fleet = Fleet(
        ranks,
        _slots(slots, ranks, recorded),
        nodes,
        expert_groups,
        bytes_per_expert,
        pooled,
        _speeds(rank_speeds),
    )
    steps = recorded.num_steps if window is None else window
    if steps > recorded.num_steps:
        raise InvalidInput(f"--window {steps}: the trace has {recorded.num_steps} steps")
    setup = _setup(
        recorded,
        fleet,
        steps,
        1,
        dispatch,
        copy_price,
        cross_node_factor,
        max_evaluations,
        seed,
        allow_duplicates,
    )
    in_force = None
    if current is not None:
        in_force = read_placement(
            current,
            num_ranks=ranks,
            num_logical_experts=recorded.num_experts,
            layer_ids=recorded.layer_ids,
        ).placement
    policies = _policies([policy], craft_replicas, free_bytes)
    notes = origin_notes(recorded, setup, [policy])
    _say(notes)
    with work_bars() as (on_work, _):
        on_work(f"{policy}: planning", 0)
        placement, numbers = plan_once(policy, setup, in_force, policies)
    info = {"policy": policy, "trace": recorded.name, "planned_on_steps": steps, **numbers}
    file = PlacementFile(placement, recorded.layer_ids, info)
    write_placement(out, file, written_for, num_hidden_layers=num_hidden_layers)
    if as_json:
        answer = {
            "file": str(out),
            "format": str(written_for),
            **info,
            "notes": [*recorded.notes, *notes],
        }
        typer.echo(json.dumps(answer, indent=2, allow_nan=False))
        return
    shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    show(
        f"[bold]{escape(str(out))}[/bold] ({written_for}): {policy} on {steps} steps of {escape(recorded.name)}; {shown}"
    )


@app.command("inspect")
def inspect_command(
    trace: TraceOption,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", help="Also the balancedness on so many ranks, without replicas.", min=1
        ),
    ] = None,
    window: Annotated[
        int, typer.Option("--window", help="Steps per window for drift.", min=1)
    ] = 100,
    first_moe_layer: FirstMoeLayerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a trace: skew per layer, consistent and temporal experts, correlated pairs, drift."""
    from evenkeel_moe.replay.describe import describe
    from evenkeel_moe.replay.tables import description_tables

    description = describe(_read(trace, first_moe_layer), num_ranks=ranks, window_steps=window)
    if as_json:
        typer.echo(json.dumps(description.as_dict(), indent=2, allow_nan=False))
        return
    high = sum(layer.skew_class == "high" for layer in description.layers)
    top_k = f"top-{description.top_k}, " if description.top_k else ""
    show(
        f"[bold]{escape(description.name)}[/bold]: {description.num_steps} steps, {description.num_layers} MoE layers,"
        f" {description.num_experts} experts, {top_k}{description.tokens_per_step:.0f}"
        f" {'tokens' if description.top_k else 'routed tokens'} a step; {high} layers of high skew",
        *description_tables(description),
    )


def _read(path: Path, first_moe_layer: int | None) -> "Trace":
    from evenkeel_moe.formats import read_trace

    trace = read_trace(path, first_moe_layer=first_moe_layer)
    _say(trace.notes)
    return trace


def _say(notes: "Sequence[str]") -> None:
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _slots(slots: int | None, ranks: int, trace: "Trace") -> int:
    return slots if slots is not None else (-(-trace.num_experts // ranks) + 1) * ranks


def _names(policies: str | None) -> list[str]:
    if policies is None:
        from evenkeel_moe.planning.policies.registry import POLICIES

        return list(POLICIES)
    return [name.strip() for name in policies.split(",") if name.strip()]


def _policies(
    names: "Sequence[str]", replicas: str | None, free_bytes: int | None
) -> "Mapping[str, Policy]":
    """The policies, craft with the replicas asked for."""
    from evenkeel_moe.planning.policies.craft.policy import CraftOptions, ReplicaRule
    from evenkeel_moe.planning.policies.registry import POLICIES
    from evenkeel_moe.replay.planners import VERDICT, craft_within

    if replicas is None and free_bytes is None:
        return POLICIES
    if "craft" not in {name.removesuffix(VERDICT) for name in names}:
        raise InvalidInput(
            "--craft-replicas and --free-bytes are for craft, which is not among the policies"
        )
    if replicas in (None, "memory", "knee"):
        options = CraftOptions(rule=ReplicaRule(replicas or "memory"))
    else:
        try:
            options = CraftOptions(
                rule=ReplicaRule.MARGINAL_GAIN, min_marginal_gain=float(replicas)
            )
        except ValueError as error:
            raise InvalidInput(
                f"--craft-replicas {replicas} is neither memory, knee nor a number"
            ) from error
    return {**POLICIES, "craft": craft_within(options, free_bytes)}


def _speeds(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInput(f"--rank-speeds {text}: {error}") from error


def _format(name: str) -> Any:
    from evenkeel_moe.formats import PlacementFormat

    try:
        return PlacementFormat(name)
    except ValueError as error:
        known = ", ".join(PlacementFormat)
        raise InvalidInput(f"unknown placement format {name!r}; known: {known}") from error


def _setup(
    trace: "Trace",
    fleet: "Fleet",
    window: int,
    horizon: int,
    dispatch: str,
    copy_price: float,
    cross_node_factor: float,
    max_evaluations: int | None,
    seed: int,
    allow_duplicates: bool,
) -> "Setup":
    from evenkeel_moe.planning.problem.objective import DispatchModel, Objective
    from evenkeel_moe.replay.compare import load_of
    from evenkeel_moe.replay.walk import Setup

    try:
        model = DispatchModel(dispatch)
    except ValueError as error:
        known = ", ".join(DispatchModel)
        raise InvalidInput(f"unknown dispatch model {dispatch!r}; known: {known}") from error
    load, source = load_of(trace, fleet.ranks)
    return Setup(
        load=load,
        shape=fleet.shape(trace),
        topology=fleet.topology(),
        window_steps=window,
        horizon_steps=horizon,
        source=source,
        objective=Objective(
            costs=fleet.costs(),
            dispatch=model,
            cross_node_factor=cross_node_factor,
            allow_duplicates=allow_duplicates,
        ),
        copy_price=copy_price,
        max_evaluations=max_evaluations,
        seed=seed,
    )


def _check_writable(*wanted: Path | None) -> None:
    """Find out before the work, not after it."""
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
