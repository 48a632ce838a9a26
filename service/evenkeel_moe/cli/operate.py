"""Commands that show a deployment and change how it is operated."""

from typing import Annotated

import typer

from evenkeel_moe.cli import tables
from evenkeel_moe.cli.console import show
from evenkeel_moe.cli.options import (
    ClientOptions,
    DeploymentClientOptions,
    JsonOption,
    nested_fields,
    parse_value,
    with_option_groups,
)


def status(
    deployment: Annotated[
        str | None, typer.Argument(help="Deployment id.", show_default="list all deployments")
    ] = None,
    *,
    connection: ClientOptions,
    as_json: JsonOption = False,
) -> None:
    """Show all deployments, or one deployment with its ranks."""
    with connection.client() as client:
        if deployment is None:
            rows = client.every("deployments")
            show(rows, as_json, tables.deployments_table(rows))
        else:
            row = client.get(f"deployments/{deployment}")
            show(row, as_json, tables.deployment_view(row))


def decisions(
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="Number of newest rows to show.")
    ] = 20,
    *,
    connection: DeploymentClientOptions,
    as_json: JsonOption = False,
) -> None:
    """Show what each cycle decided and why, newest first, including cycles that did nothing."""
    with connection.client() as client:
        rows = client.get(connection.path(client, "/decisions"), page_size=limit)["items"]
    show(rows, as_json, tables.decisions_table(rows))


def policy(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Fields to change; VALUE is JSON or text. A.B=VALUE changes field B of A.",
            show_default="show the document",
        ),
    ] = None,
    *,
    connection: DeploymentClientOptions,
    as_json: JsonOption = False,
) -> None:
    """Show or change the policy document: mode, policy and its options, cost, limits and gates."""
    fields = nested_fields(parse_value(text) for text in changes or [])
    with connection.client() as client:
        path = connection.path(client, "/policy")
        document = client.patch(path, fields) if fields else client.get(path)
    show(document, as_json, tables.document_table(document))


def freeze(
    seconds: Annotated[
        float,
        typer.Argument(
            min=0,
            max=7 * 86400,
            help="Seconds during which no new plan may start; 0 ends a freeze.",
        ),
    ],
    *,
    connection: DeploymentClientOptions,
) -> None:
    """Allow no new plans for some time, for a reload or a resize. The freeze ends by itself."""
    with connection.client() as client:
        client.post(connection.path(client, "/freeze"), {"seconds": seconds})


def resume(connection: DeploymentClientOptions) -> None:
    """Let automatic plans run again that a rollback or undelivered gains stopped."""
    with connection.client() as client:
        client.post(connection.path(client, "/resume"))


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (status, decisions, policy, freeze, resume):
        app.command()(with_option_groups(command))
