"""`evenkeel plan`: propose, show, approve, cancel and roll back plans."""

import json
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli import plan_tables, plan_words
from evenkeel_moe.cli.client import ApiClient, checked_id
from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.console import confirm, require_terminal, say
from evenkeel_moe.cli.exits import CliError, Exit, NotSent
from evenkeel_moe.cli.options import (
    DeploymentClientOptions,
    YesOption,
    nested_fields,
    parse_value,
    plan_ids,
)
from evenkeel_moe.cli.watch import OutputOptions, ShowOptions

app = CommandGroup(help="Propose, show, approve, cancel and undo plans.")

PlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN", help="Plan id.", autocompletion=plan_ids)
]
IdOption = Annotated[
    str | None,
    typer.Option(
        "--id",
        help="Id of the plan. Repeating the command with the same id changes nothing.",
        show_default="a new one",
    ),
]
_DIGEST_DIGITS = 32
_LEAST_DIGITS = 6
"""Digits of a digest that must be given; fewer could name another placement by mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanArguments:
    """The options that say what to plan.

    Args:
        dry_run: Show the plan, and keep nothing.
        start: Start the plan at once.
        policy: For example keel, eplb or craft; an unknown name lists all. Default: the
            deployment's.
        max_moves: Most copies between ranks. Default: no limit.
        max_bytes: Most bytes between ranks. Default: no limit.
        max_layers: Most layers that may change. Default: no limit.
        option: Option of a policy for this plan alone, for example craft.rule=knee. Repeat for
            several. Default: the deployment's.
        replica_budget: Redundant slots per layer to fill, on average over the layers. Default: the
            deployment's.
        phase: Window to plan on: prefill, decode or mixed. Repeat for several. Default: all,
            weighted by tokens.
        target: JSON file with physical_to_logical (layers x slots): move to this placement instead
            of planning one. If the file has num_ranks, it must be the deployment's. Default: plan
            with the policy.
    """

    dry_run: bool = False
    start: bool = False
    plan_id: IdOption = None
    policy: str | None = None
    max_moves: Annotated[int | None, typer.Option(min=0)] = None
    max_bytes: Annotated[int | None, typer.Option(min=0)] = None
    max_layers: Annotated[int | None, typer.Option(min=0)] = None
    option: Annotated[list[str] | None, typer.Option(metavar="POLICY.NAME=VALUE")] = None
    replica_budget: Annotated[int | None, typer.Option(min=0)] = None
    phase: list[str] | None = None
    target: Path | None = None

    def body(self, target: dict[str, Any] | None) -> dict[str, Any]:
        """Return the body of the REST request; `target` is the content of the target file."""
        limits = {name: getattr(self, name) for name in ("max_moves", "max_bytes", "max_layers")}
        return _given(
            plan_id=self.plan_id or _new_id("manual"),
            policy=self.policy,
            limits=_given(**limits) or None,
            policy_options=nested_fields(map(parse_value, self.option or [])) or None,
            replica_budget=self.replica_budget,
            phases=self.phase or None,
            dry_run=self.dry_run or None,
            approve=self.start or None,
            target=target and {"physical_to_logical": target["physical_to_logical"]},
        )


def _given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None: the audit record tells what a request names."""
    return {name: value for name, value in fields.items() if value is not None}


@app.command()
def create(
    request: PlanArguments,
    yes: YesOption = False,
    *,
    connection: DeploymentClientOptions,
    shown: OutputOptions,
) -> None:
    """Propose a plan: it waits for `evenkeel plan approve`."""
    if request.dry_run and request.start:
        raise CliError("--dry-run keeps nothing, --start starts it: give one of them")
    target = None if request.target is None else _read_target(request.target)
    body = request.body(target)
    with connection.client() as client:
        name = connection.found(client)
        path = f"deployments/{name}"
        if target is not None and "num_ranks" in target:
            _check_ranks(client.get(path), target["num_ranks"], str(request.target))
        if request.start and not yes:
            require_terminal(f"The plan starts at once: ranks of {name} copy experts.")
            answer = _post_plan(client, f"{path}/plans", _given(**body | {"approve": None}))
            if answer["phase"] == "proposed":
                answer = _start_or_cancel(client, answer)
            shown.show(answer, lambda: plan_words.approved(answer))
            return
        answer = _post_plan(client, f"{path}/plans", body)
        words = {"phase_text": "dry run", "text": "Nothing was kept."} if request.dry_run else {}
        shown.show(answer, lambda: _view(answer | words))
        if not shown.as_json:
            refused = None
            with suppress(CliError):  # The plan is made, whatever becomes of this question.
                refused = client.get(path).get("start_refused_text")
            say(f"\n{plan_words.created(answer, request.dry_run, refused)}")


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
                client.change("POST", f"{_path(plan)}/cancel")
                say(f"plan {plan['plan_id']} is cancelled; it has moved nothing", err=True)
        raise


def _start(client: ApiClient, plan: dict[str, Any]) -> Any:
    """Show a plan, and start this very plan if the operator agrees."""
    confirm(plan_words.start_question(plan), False, _view(plan))
    tag = f'"{plan["target"]["digest"]}"'
    return client.change("POST", f"{_path(plan)}/approve", if_match=tag)


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
        return client.change("POST", path, body)
    except CliError as error:
        if error.code is not Exit.UNAVAILABLE or body.get("dry_run"):
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
        raise CliError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise CliError(f"{path} is not a JSON object with physical_to_logical") from error


@app.command("list")
def list_plans(
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, max=1000)] = None,
    *,
    connection: DeploymentClientOptions,
    shown: ShowOptions,
) -> None:
    """List plans, newest first.

    Args:
        limit: Number of newest plans. Default: all.
    """
    with connection.client() as client:
        path = connection.path(client, "/plans")
        shown.run(lambda: client.every(path, limit), plan_tables.plans_table)


@app.command("show")
def show_plan(plan: PlanArgument, connection: DeploymentClientOptions, shown: ShowOptions) -> None:
    """Show one plan and the figures behind it."""
    connection.show(shown, f"/plans/{checked_id(plan, 'plan')}", _view)


@app.command()
def story(plan: PlanArgument, connection: DeploymentClientOptions, shown: ShowOptions) -> None:
    """Show what happened to a plan and why, in order."""
    path = f"/plans/{checked_id(plan, 'plan')}/story"
    connection.show(shown, path, lambda answer: plan_tables.story_table(answer["rows"]))


@app.command()
def approve(
    plan: PlanArgument,
    yes: YesOption = False,
    *,
    connection: DeploymentClientOptions,
    shown: OutputOptions,
) -> None:
    """Start a plan that waits for approval.

    The answer is stale_base if the placement has changed since the plan was made, and
    weights_version_changed if the weights have.
    """
    checked_id(plan, "plan")
    with connection.client() as client:
        path = connection.path(client, f"/plans/{plan}")
        found = None if yes else client.get(path)
        if found is None or found["phase"] != "proposed":  # The controller says what is wrong.
            answer = client.change("POST", f"{path}/approve")
        else:
            answer = _start(client, found)
    shown.show(answer, lambda: plan_words.approved(answer))


@app.command()
def cancel(plan: PlanArgument, connection: DeploymentClientOptions, shown: OutputOptions) -> None:
    """Stop a plan, or reject one that waits for approval.

    A wave for which all ranks have voted is still carried out. Later waves do not start.
    """
    checked_id(plan, "plan")
    with connection.client() as client:
        answer = client.change("POST", connection.path(client, f"/plans/{plan}/cancel"))
    shown.show(answer, lambda: plan_words.cancelled(answer))


@app.command()
def rollback(
    to_epoch: Annotated[int | None, typer.Option(min=0)] = None,
    to_placement: str | None = None,
    plan_id: IdOption = None,
    yes: YesOption = False,
    *,
    connection: DeploymentClientOptions,
    shown: OutputOptions,
) -> None:
    """Return to an earlier placement.

    Automatic plans then wait for `evenkeel resume`.

    Args:
        to_epoch: Epoch (version) of the placement to return to. Default: the one before the last
            plan.
        to_placement: Placement to return to, as `evenkeel placement list` names it, or its first 6
            digits or more.
    """
    if to_epoch is not None and to_placement is not None:
        raise CliError("name an epoch or a placement to return to, not both")
    with connection.client() as client:
        name = connection.found(client)
        path = f"deployments/{name}/rollback"
        if to_placement is not None:
            to_placement = _whole_digest(client, name, to_placement)
        if not yes:
            preview = client.get(path, to_epoch=to_epoch, to_placement=to_placement)
            confirm(plan_words.rollback_question(preview, name, to_placement), False)
            # The epoch that was shown is requested, also if another plan ends meanwhile.
            to_epoch = None if to_placement else int(preview["to_epoch"])
        new_id = plan_id or _new_id("rollback")
        body = _given(plan_id=new_id, to_epoch=to_epoch, to_placement=to_placement)
        answer = _post_plan(client, path, body)
    shown.show(answer, lambda: plan_words.rolled_back(answer))


def _whole_digest(client: ApiClient, name: str, text: str) -> str:
    """Return the digest of the recorded placement that begins with a text.

    A whole digest is returned unchanged, recorded or not.

    Raises:
        CliError: the text is no beginning of a digest, or of none or several recorded placements.
    """
    given, digits = text.lower(), _DIGEST_DIGITS
    listed = f"`evenkeel placement list -d {name}` lists them"
    if re.fullmatch(rf"[0-9a-f]{{{_LEAST_DIGITS},{digits}}}", given) is None:
        raise CliError(
            f"{text} is not a placement: give its {digits} digits of 0-9 and a-f, or its first"
            f" {_LEAST_DIGITS} or more; {listed}"
        )
    if len(given) == digits:
        return given
    rows = client.get(f"deployments/{name}/epochs")["items"]
    found = list(dict.fromkeys(row["digest"] for row in rows if row["digest"].startswith(given)))
    if not found:
        raise CliError(f"no recorded placement begins with {given}; {listed}", Exit.REFUSED)
    if len(found) > 1:
        raise CliError(
            f"{len(found)} recorded placements begin with {given}, give more digits:"
            f" {', '.join(found)}"
        )
    return str(found[0])
