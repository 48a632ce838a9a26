"""Commands that look at a deployment and change how it is run."""

from typing import Annotated

import typer

from evenkeel_moe.cli import tables
from evenkeel_moe.cli.options import (
    DEFAULT_DATA_DIR,
    DEFAULT_URL,
    DataDirOption,
    DeploymentOption,
    JsonOption,
    TokenFileOption,
    TokenOption,
    UrlOption,
    connect,
    parse_value,
    show,
)

__all__ = ["add_commands"]


def status(
    deployment: Annotated[
        str | None, typer.Argument(help="Deployment id.", show_default="list them all")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show deployments, or one of them with its ranks."""
    with connect(url, token, token_file, data_dir) as client:
        if deployment is None:
            rows = client.every("deployments")
            show(rows, as_json, tables.deployments_table(rows))
        else:
            row = client.get(f"deployments/{deployment}")
            show(row, as_json, tables.deployment_view(row))


def decisions(
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="Newest rows to show.")
    ] = 20,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what each cycle decided and why, newest first, also when it did nothing."""
    with connect(url, token, token_file, data_dir) as client:
        name = client.deployment(deployment)
        rows = client.get(f"deployments/{name}/decisions", page_size=limit)["items"]
    show(rows, as_json, tables.decisions_table(rows))


def policy(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Fields to change; VALUE is JSON or text.",
            show_default="show it",
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show or change the policy document: mode, policy, limits, gates."""
    fields = dict(parse_value(text) for text in changes or [])
    with connect(url, token, token_file, data_dir) as client:
        path = f"deployments/{client.deployment(deployment)}/policy"
        document = client.patch(path, fields) if fields else client.get(path)
    show(document, as_json, tables.document_table(document))


def freeze(
    seconds: Annotated[
        float,
        typer.Argument(
            min=0, max=7 * 86400, help="Seconds in which no new plan may start; 0 thaws."
        ),
    ],
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
) -> None:
    """Start no new plan for a while, for a reload or a resize; it ends by itself."""
    with connect(url, token, token_file, data_dir) as client:
        client.post(f"deployments/{client.deployment(deployment)}/freeze", {"seconds": seconds})


def resume(
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
) -> None:
    """Let automatic plans run again after a rollback."""
    with connect(url, token, token_file, data_dir) as client:
        client.post(f"deployments/{client.deployment(deployment)}/resume")


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (status, decisions, policy, freeze, resume):
        app.command()(command)
