"""`evenkeel plan`: make, look at, approve, cancel and roll back plans."""

import json
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from evenkeel_moe.cli import tables
from evenkeel_moe.cli.client import ApiClient, CliError, Exit
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
    show,
)

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Make, look at, approve, cancel and roll back plans.")

PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="Plan id.")]
IdOption = Annotated[
    str | None,
    typer.Option(
        "--id",
        help="Id of the plan; repeating the command with it changes nothing.",
        show_default="a new one",
    ),
]


@app.command()
def create(
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only plan; `plan approve` starts this very plan later."),
    ] = False,
    start: Annotated[
        bool, typer.Option("--start", help="Start at once, also in propose mode.")
    ] = False,
    plan_id: IdOption = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="eplb, eplb-global, eplb-hierarchical, craft, gem, libra or keel.",
            show_default="the deployment's",
        ),
    ] = None,
    max_moves: Annotated[
        int | None, typer.Option(min=0, help="Most copies between ranks.", show_default="no bound")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=0, help="Most bytes between ranks.", show_default="no bound")
    ] = None,
    max_layers: Annotated[
        int | None,
        typer.Option(min=0, help="Most layers that may change.", show_default="no bound"),
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(
            help="Window to plan on: prefill, decode or mixed; repeat for several.",
            show_default="all, weighed by tokens",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with physical_to_logical, (layers x slots), to move to instead of planning; num_ranks in it"
            " must be the deployment's.",
            show_default="plan by the policy",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a plan by hand."""
    wanted = None if target is None else _read_target(target)
    body: dict[str, Any] = {
        "plan_id": plan_id or _new_id("manual"),
        "policy": policy,
        "limits": {"max_moves": max_moves, "max_bytes": max_bytes, "max_layers": max_layers},
        "phases": phase or [],
        "dry_run": dry_run,
        "approve": start,
        "target": None
        if wanted is None
        else {"physical_to_logical": wanted["physical_to_logical"]},
    }
    with connect(url, token, token_file, data_dir) as client:
        name = client.deployment(deployment)
        if wanted is not None and "num_ranks" in wanted:
            _check_ranks(client, name, wanted["num_ranks"], str(target))
        answer = _post_plan(client, f"deployments/{name}/plans", body)
    show(answer, as_json, tables.plan_view(answer))


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:12]}"


def _post_plan(client: ApiClient, path: str, body: dict[str, Any]) -> Any:
    """Ask for a plan by its id, which is told where nobody knows whether the plan runs: a second one might undo it."""
    try:
        return client.post(path, body)
    except CliError as error:
        if error.code is not Exit.UNAVAILABLE:
            raise
        words = f"{error}; it may have been taken: repeat the command with --id {body['plan_id']}"
        raise CliError(words, error.code) from error


def _check_ranks(client: ApiClient, deployment: str, ranks: Any, path: str) -> None:
    """Refuse a target made for other ranks: with as many slots its rows fit, and are another placement."""
    status = client.get(f"deployments/{deployment}")
    shape = status["shape"]
    if shape is not None and ranks != shape["num_ranks"]:
        # While another replica leads or ranks are missing, the shape may be one rank's word, and of another group.
        proven = status["generation"] and status["state"] != "follower"
        raise CliError(
            f"{path} is for {ranks} ranks, {deployment} has {shape['num_ranks']} ranks x {shape['slots_per_rank']} slots",
            Exit.REFUSED if proven else Exit.UNAVAILABLE,
        )


def _read_target(path: Path) -> dict[str, Any]:
    """The file's JSON object; it has physical_to_logical."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {**document, "physical_to_logical": document["physical_to_logical"]}
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}", Exit.USAGE) from error
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise CliError(
            f"{path} is not a JSON object with physical_to_logical", Exit.USAGE
        ) from error


@app.command("list")
def list_plans(
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """List plans, newest first."""
    with connect(url, token, token_file, data_dir) as client:
        rows = client.every(f"deployments/{client.deployment(deployment)}/plans")
    show(rows, as_json, tables.plans_table(rows))


@app.command("show")
def show_plan(
    plan: PlanArgument,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one plan and the figures it rests on."""
    with connect(url, token, token_file, data_dir) as client:
        answer = client.get(f"deployments/{client.deployment(deployment)}/plans/{plan}")
    show(answer, as_json, tables.plan_view(answer))


@app.command()
def story(
    plan: PlanArgument,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what happened to a plan and why, in order."""
    with connect(url, token, token_file, data_dir) as client:
        answer = client.get(f"deployments/{client.deployment(deployment)}/plans/{plan}/story")
    show(answer, as_json, tables.story_table(answer["rows"]))


@app.command()
def approve(
    plan: PlanArgument,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a proposed plan; refused as stale_base when the placement has changed since."""
    with connect(url, token, token_file, data_dir) as client:
        answer = client.post(f"deployments/{client.deployment(deployment)}/plans/{plan}/approve")
    show(answer, as_json, tables.plan_view(answer))


@app.command()
def cancel(
    plan: PlanArgument,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a plan; a wave whose votes are in still commits, later ones never start."""
    with connect(url, token, token_file, data_dir) as client:
        answer = client.post(f"deployments/{client.deployment(deployment)}/plans/{plan}/cancel")
    show(answer, as_json, tables.plan_view(answer))


@app.command()
def rollback(
    to_epoch: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Epoch whose placement to return to.",
            show_default="the one before the last plan",
        ),
    ] = None,
    plan_id: IdOption = None,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    deployment: DeploymentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Return to an earlier placement; automatic plans then wait for `evenkeel resume`."""
    body = {"plan_id": plan_id or _new_id("rollback"), "to_epoch": to_epoch}
    with connect(url, token, token_file, data_dir) as client:
        answer = _post_plan(client, f"deployments/{client.deployment(deployment)}/rollback", body)
    show(answer, as_json, tables.plan_view(answer))
