"""Completes names in the shell by asking the controller; in doubt there is nothing to complete."""

import contextlib
from pathlib import Path

import typer

from evenkeel_moe.cli.client import ApiClient, CliError, read_token

_TIMEOUT_S = 1.0
"""A shell waits for the answer at every press of the tab key."""


def deployment_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of deployments that begin with what was typed."""
    return _matching(ctx, "deployments", "deployment", incomplete)


def plan_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return what may follow: a deployment, and then the ids of its plans, the newest first."""
    words = ctx.params.get("words") or ()
    names = deployment_names(ctx, "")
    named = ctx.params.get("deployment") or ctx.params.get("default_deployment")
    deployment = words[0] if words else named
    if deployment is None and len(names) > 1:
        return [name for name in names if name.startswith(incomplete)]
    chosen = deployment if deployment is not None else "".join(names)
    return _matching(ctx, f"deployments/{chosen}/plans", "plan_id", incomplete)


def _matching(ctx: typer.Context, path: str, key: str, incomplete: str) -> list[str]:
    given = ctx.params
    found: list[str] = []
    with contextlib.suppress(CliError, KeyError, TypeError, OSError):
        folder = Path(given.get("data_dir") or "evenkeel-data")
        token = read_token(given.get("token"), given.get("token_file"), folder / "tokens")
        url, ca_file = str(given["url"]), given.get("ca_file")
        with ApiClient(url, token, _TIMEOUT_S, ca_file) as client:
            found = [str(row[key]) for row in client.get(path)["items"]]
    return [name for name in found if name.startswith(incomplete)]
