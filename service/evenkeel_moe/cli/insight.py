"""Commands that explain a deployment: recommendation, load, rejected reports, requests."""

from typing import Annotated, Any

import typer

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli import insight_tables
from evenkeel_moe.cli.client import ApiClient
from evenkeel_moe.cli.confirm import confirm
from evenkeel_moe.cli.heat import heat_map
from evenkeel_moe.cli.options import (
    LimitOption,
    NamedDeployment,
    YesOption,
    with_option_groups,
)
from evenkeel_moe.cli.watch import ShowOptions

_COMPUTED_WITHIN_S = 180.0
"""The first recommendation waits until a process of its own has loaded the planner's kernels."""


def recommend(
    max_age: Annotated[
        float | None,
        typer.Option(
            "--max-age",
            min=0,
            max=86400,
            help="Largest age of the answer in seconds; 0 asks for a new one.",
            show_default="one cycle",
        ),
    ] = None,
    tokens_per_sequence: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that a sequence holds in the KV cache, to count the batch in sequences.",
            show_default="count in tokens",
        ),
    ] = None,
    *,
    connection: NamedDeployment,
    shown: ShowOptions,
) -> None:
    """Say whether a plan would pay now, and what other policies and more replicas would gain.

    Nothing is moved, started or stored.
    """
    with connection.client() as client:
        path = connection.path(client, "/recommendation")
        shown.run(
            lambda: client.get(
                path,
                timeout_s=_COMPUTED_WITHIN_S,
                max_age_s=max_age,
                tokens_per_sequence=tokens_per_sequence,
            ),
            insight_tables.recommendation_view,
        )


def audit(
    limit: LimitOption = 20,
    *,
    connection: NamedDeployment,
    shown: ShowOptions,
) -> None:
    """Show who asked for which change, with the outcome, newest first."""
    with connection.client() as client:
        path = connection.path(client, "/audit")
        shown.run(
            lambda: client.get(path, page_size=limit)["items"],
            insight_tables.audit_table,
        )


def epochs(*, connection: NamedDeployment, shown: ShowOptions) -> None:
    """List the recorded placements, to which a rollback can lead."""
    with connection.client() as client:
        path = connection.path(client, "/epochs")
        shown.run(lambda: client.get(path)["items"], insight_tables.epochs_table)


def quarantine(
    clear: Annotated[
        bool, typer.Option("--clear", help="Reset the counts first. Needs role admin.")
    ] = False,
    *,
    connection: NamedDeployment,
    yes: YesOption = False,
    shown: ShowOptions,
) -> None:
    """Show which parts of the ranks' reports were rejected, by reason, with the newest few."""
    with connection.client() as client:
        path = connection.path(client, "/quarantine")
        if clear:
            confirm("The counts and samples of rejected reports are deleted.", yes)
            client.delete(path)
        shown.run(lambda: client.get(path), insight_tables.quarantine_view)


def heatmap(
    experts: Annotated[
        bool, typer.Option("--experts", help="Layers x experts instead of layers x ranks.")
    ] = False,
    phase: Annotated[
        str | None,
        typer.Option(
            help="Window to show: prefill, decode or mixed.", show_default="all phases together"
        ),
    ] = None,
    *,
    connection: NamedDeployment,
    shown: ShowOptions,
) -> None:
    """Draw the load of each rank in each layer as a multiple of the layer's mean."""
    with connection.client() as client:
        path = connection.path(client, "/heatmap")
        shown.run(
            lambda: _all_layers(client, path, phase),
            lambda answer: heat_map(answer, experts, SystemClock().unix()),
        )


def _all_layers(client: ApiClient, path: str, phase: str | None) -> dict[str, Any]:
    """Return one answer with the rows of all layers; a large model needs several requests."""
    whole: dict[str, Any] = client.get(path, phase=phase)
    while whole["next_layer"] is not None:
        more = client.get(path, phase=phase, first_layer=whole["next_layer"])
        for key in ("tokens_per_layer", "experts", "ranks"):
            # Between two requests the window or the placement may become unknown.
            known = whole[key] is not None and more[key] is not None
            whole[key] = whole[key] + more[key] if known else None
        after = more["next_layer"]
        whole["next_layer"] = after if after is None or after > whole["next_layer"] else None
    return whole


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (recommend, heatmap, epochs, quarantine, audit):
        app.command()(with_option_groups(command))
