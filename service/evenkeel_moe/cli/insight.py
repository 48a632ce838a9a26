"""Commands that explain a deployment: recommendation, load, requests."""

from typing import Annotated, Any

import typer

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli import insight_tables, tables
from evenkeel_moe.cli.client import ApiClient
from evenkeel_moe.cli.heat import heat_map
from evenkeel_moe.cli.options import DeploymentClientOptions, LimitOption
from evenkeel_moe.cli.watch import ShowOptions

COMPUTED_WITHIN_S = 180.0
"""The first recommendation waits until a process of its own has loaded the planner's kernels."""


def recommend(
    max_age: Annotated[float | None, typer.Option(min=0, max=86400)] = None,
    tokens_per_sequence: Annotated[int | None, typer.Option(min=1)] = None,
    *,
    connection: DeploymentClientOptions,
    shown: ShowOptions,
) -> None:
    """Say whether a plan would pay now.

    It also tells what other policies and more replicas would gain. Nothing is moved, started or
    stored.

    Args:
        max_age: Largest age of the answer in seconds; 0 asks for a new one. Default: one cycle.
        tokens_per_sequence: Tokens that a sequence holds in the KV cache, to count the batch in
            sequences. Default: count in tokens.
    """
    connection.show(
        *(shown, "/recommendation", insight_tables.recommendation_view),
        timeout_s=COMPUTED_WITHIN_S,
        max_age_s=max_age,
        tokens_per_sequence=tokens_per_sequence,
    )


def decisions(
    limit: LimitOption = 20, *, connection: DeploymentClientOptions, shown: ShowOptions
) -> None:
    """Show why the controller planned or did not, newest first.

    A decision to change nothing is shown too.
    """
    with connection.client() as client:
        path = connection.path(client)
        shown.run(
            lambda: client.get(f"{path}/decisions", page_size=limit)["items"],
            lambda rows: (
                tables.decisions_table(rows)
                if rows
                else tables.no_decision(client.get(path), client.get(f"{path}/policy"))
            ),
        )


def audit(
    limit: LimitOption = 20, *, connection: DeploymentClientOptions, shown: ShowOptions
) -> None:
    """Show who asked for which change, newest first."""
    with connection.client() as client:
        path = connection.path(client, "/audit")
        shown.run(lambda: client.get(path, page_size=limit)["items"], insight_tables.audit_table)


def heatmap(
    experts: bool = False,
    phase: str | None = None,
    *,
    connection: DeploymentClientOptions,
    shown: ShowOptions,
) -> None:
    """Draw the load of each rank in each layer.

    It is a multiple of the layer's mean.

    Args:
        experts: Layers x experts instead of layers x ranks.
        phase: Window to show: prefill, decode or mixed. Default: all phases together.
    """
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
