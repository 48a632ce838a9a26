"""`evenkeel plan`: create, show, approve, cancel and roll back plans."""

import json
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli import plan_answers, plan_questions, plan_tables
from evenkeel_moe.cli.client import ApiClient, CliError, Exit, NotSent
from evenkeel_moe.cli.completion import plan_ids
from evenkeel_moe.cli.confirm import confirm, require_terminal
from evenkeel_moe.cli.console import say, show, tell
from evenkeel_moe.cli.help import CommandApp
from evenkeel_moe.cli.options import (
    DeploymentClientOptions,
    JsonOption,
    NamedDeployment,
    YesOption,
    with_option_groups,
)
from evenkeel_moe.cli.rollback_target import confirm_placement, confirmed_epoch, whole_digest
from evenkeel_moe.cli.watch import ShowOptions

app = CommandApp(no_args_is_help=True, help="Create, show, approve, cancel and roll back plans.")

PlanArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME] PLAN", help="Deployment id and plan id.", autocompletion=plan_ids
    ),
]
IdOption = Annotated[
    str | None,
    typer.Option(
        "--id",
        help="Id of the plan. Repeating the command with the same id changes nothing.",
        show_default="a new one",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanArguments:
    """The options that say what to plan."""

    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Plan and move nothing. The plan waits as a proposal, and `plan approve`"
            " starts that very plan.",
        ),
    ] = False
    start: Annotated[bool, typer.Option("--start", help="Start at once, also in propose mode.")] = (
        False
    )
    plan_id: IdOption = None
    policy: Annotated[
        str | None,
        typer.Option(
            help="eplb, eplb-global, eplb-hierarchical, craft, gem, libra, metro or keel.",
            show_default="the deployment's",
        ),
    ] = None
    max_moves: Annotated[
        int | None,
        typer.Option(
            min=0, help="Maximum number of copies between ranks.", show_default="no limit"
        ),
    ] = None
    max_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of bytes between ranks.", show_default="no limit"),
    ] = None
    max_layers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Maximum number of layers that may change.", show_default="no limit"
        ),
    ] = None
    phase: Annotated[
        list[str] | None,
        typer.Option(
            help="Window to plan on: prefill, decode or mixed. Repeat for several.",
            show_default="all, weighted by tokens",
        ),
    ] = None
    target: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with physical_to_logical (layers x slots): move to this placement"
            " instead of planning one. If the file has num_ranks, it must be the deployment's.",
            show_default="plan with the policy",
        ),
    ] = None

    def body(self, target: dict[str, Any] | None) -> dict[str, Any]:
        """Return the body of the REST request; `target` is the content of the target file."""
        limits = {
            "max_moves": self.max_moves,
            "max_bytes": self.max_bytes,
            "max_layers": self.max_layers,
        }
        return _given(
            plan_id=self.plan_id or _new_id("manual"),
            policy=self.policy,
            limits=_given(**limits) or None,
            phases=self.phase or None,
            dry_run=self.dry_run or None,
            approve=self.start or None,
            target=target and {"physical_to_logical": target["physical_to_logical"]},
        )


def _given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None: the audit record tells what a request names."""
    return {name: value for name, value in fields.items() if value is not None}


@app.command()
@with_option_groups
def create(
    connection: NamedDeployment,
    request: PlanArguments,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Create a plan by hand.

    It starts at once with --start, and in mode auto. Else it waits for `evenkeel plan approve`.
    """
    target = None if request.target is None else _read_target(request.target)
    body = request.body(target)
    with connection.client() as client:
        name = connection.found(client)
        path = f"deployments/{name}"
        if target is not None and "num_ranks" in target:
            _check_ranks(client.get(path), target["num_ranks"], str(request.target))
        if not (yes or request.dry_run) and _starts_at_once(client, path, request):
            require_terminal(f"The plan starts at once: ranks of {name} copy experts.")
            shown_first = _given(**body | {"dry_run": True, "approve": None})
            answer = _post_plan(client, f"{path}/plans", shown_first)
            if answer["phase"] == "proposed":
                answer = _start_or_cancel(client, answer)
            tell(answer, as_json, plan_answers.approved(answer))
            return
        answer = _post_plan(client, f"{path}/plans", body)
        show(answer, as_json, lambda: _view(answer))
    if not as_json:
        say(f"\n{plan_answers.created(answer)}")


def _starts_at_once(client: ApiClient, path: str, request: PlanArguments) -> bool:
    """Return True if the controller would start the plan without another request."""
    if request.start or client.get(path)["mode"] != "auto":
        return request.start
    return not client.get(f"{path}/policy").get("separate_approval", False)


def _start_or_cancel(client: ApiClient, plan: dict[str, Any]) -> Any:
    """Start a plan that was made to be shown; cancel it if the operator or the controller refuses.

    What an operator did not want must not stay as a proposal.
    """
    try:
        return _start(client, plan)
    except (typer.Abort, KeyboardInterrupt, CliError) as error:
        # Without an answer it may have been started.
        if not (isinstance(error, CliError) and error.code is Exit.UNAVAILABLE):
            with suppress(CliError):  # It has ended already, or the error says what is wrong.
                client.post(f"{_path(plan)}/cancel")
                say(f"plan {plan['plan_id']} is cancelled; it has moved nothing", err=True)
        raise


def _start(client: ApiClient, plan: dict[str, Any]) -> Any:
    """Show a plan, and start this very plan if the operator agrees."""
    confirm(plan_questions.start(plan), False, _view(plan))
    return client.post(f"{_path(plan)}/approve", if_match=f'"{plan["target"]["digest"]}"')


def _path(plan: dict[str, Any]) -> str:
    return f"deployments/{plan['deployment']}/plans/{plan['plan_id']}"


def _view(plan: dict[str, Any]) -> RenderableType:
    return plan_tables.plan_view(plan, SystemClock().unix())


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:12]}"


def _post_plan(client: ApiClient, path: str, body: dict[str, Any]) -> Any:
    """Request a plan; if nobody knows whether it was accepted, the error names the id to repeat.

    A second plan with a new id might undo the first one.
    """
    try:
        return client.post(path, body)
    except CliError as error:
        if error.code is not Exit.UNAVAILABLE:
            raise
        if isinstance(error, NotSent):
            raise CliError(f"{error}; nothing was sent", error.code) from error
        named = ("to_epoch", "to_placement")
        to = "".join(f" --{key.replace('_', '-')} {body[key]}" for key in named if key in body)
        raise CliError(
            f"{error}; the plan may have been accepted: "
            f"repeat the command with --id {body['plan_id']}{to}",
            error.code,
        ) from error


def _check_ranks(status: dict[str, Any], ranks: Any, file: str) -> None:
    """Refuse a target for another number of ranks.

    If the slots per layer are the same, its rows fit, but mean another placement.
    """
    shape = status["shape"]
    if shape is not None and ranks != shape["num_ranks"]:
        # While another replica leads or ranks are missing, the shape may come from one rank only,
        # and may belong to another EP group.
        proven = status["generation"] and status["state"] != "follower"
        raise CliError(
            f"{file} is for {ranks} ranks, {status['deployment']} has {shape['num_ranks']} ranks"
            f" x {shape['slots_per_rank']} slots",
            Exit.REFUSED if proven else Exit.UNAVAILABLE,
        )


def _read_target(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, which has the key physical_to_logical."""
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
@with_option_groups
def list_plans(
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=1, max=1000, help="Number of newest plans.", show_default="all"
        ),
    ] = None,
    *,
    connection: NamedDeployment,
    shown: ShowOptions,
) -> None:
    """List plans, newest first."""
    with connection.client() as client:
        path = connection.path(client, "/plans")
        shown.run(lambda: client.every(path, limit), plan_tables.plans_table)


@app.command("show")
@with_option_groups
def show_plan(words: PlanArgument, connection: DeploymentClientOptions, shown: ShowOptions) -> None:
    """Show one plan and the figures behind it."""
    chosen, plan = connection.named_in(words, "PLAN")
    with connection.client() as client:
        name = chosen.found(client)
        shown.run(
            lambda: client.get(f"deployments/{name}/plans/{plan}"),
            _view,
        )


@app.command()
@with_option_groups
def story(words: PlanArgument, connection: DeploymentClientOptions, shown: ShowOptions) -> None:
    """Show what happened to a plan and why, in order."""
    chosen, plan = connection.named_in(words, "PLAN")
    with connection.client() as client:
        path = chosen.path(client, f"/plans/{plan}/story")
        shown.run(lambda: client.get(path), lambda answer: plan_tables.story_table(answer["rows"]))


@app.command()
@with_option_groups
def approve(
    words: PlanArgument,
    connection: DeploymentClientOptions,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a plan that waits for approval.

    The answer is stale_base if the placement has changed since the plan was made.
    """
    chosen, plan = connection.named_in(words, "PLAN")
    with connection.client() as client:
        name = chosen.found(client)
        path = f"deployments/{name}/plans/{plan}"
        found = None if yes else client.get(path)
        if found is None or found["phase"] != "proposed":  # The controller says what is wrong.
            answer = client.post(f"{path}/approve")
        else:
            answer = _start(client, found)
    tell(answer, as_json, plan_answers.approved(answer))


@app.command()
@with_option_groups
def cancel(
    words: PlanArgument, connection: DeploymentClientOptions, as_json: JsonOption = False
) -> None:
    """Stop a plan, or reject one that waits for approval.

    A wave for which all ranks have voted is still carried out. Later waves do not start.
    """
    chosen, plan = connection.named_in(words, "PLAN")
    with connection.client() as client:
        answer = client.post(chosen.path(client, f"/plans/{plan}/cancel"))
    tell(answer, as_json, plan_answers.cancelled(answer))


@app.command()
@with_option_groups
def rollback(
    to_epoch: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Epoch (version) of the placement to return to.",
            show_default="the one before the last plan",
        ),
    ] = None,
    to_placement: Annotated[
        str | None,
        typer.Option(
            help="Placement to return to, as `evenkeel epochs` names it, or its first 6 digits or"
            " more."
        ),
    ] = None,
    plan_id: IdOption = None,
    *,
    connection: NamedDeployment,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Return to an earlier placement.

    Automatic plans then wait for `evenkeel resume`.
    """
    if to_epoch is not None and to_placement is not None:
        raise CliError("name an epoch or a placement to return to, not both", Exit.USAGE)
    new_id = plan_id or _new_id("rollback")
    body = _given(plan_id=new_id, to_epoch=to_epoch, to_placement=to_placement)
    with connection.client() as client:
        name = connection.found(client)
        if to_placement is not None:
            to_placement = body["to_placement"] = whole_digest(client, name, to_placement)
        if not yes and to_placement is not None:
            confirm_placement(client, name, to_placement)
        elif not yes:
            body["to_epoch"] = confirmed_epoch(client, name, to_epoch)
        answer = _post_plan(client, f"deployments/{name}/rollback", body)
    tell(answer, as_json, plan_answers.rolled_back(answer))
