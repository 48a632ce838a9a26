"""Commands that show deployments and change how they are operated."""

import re
from typing import Annotated, Any

import typer

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli import insight_tables, tables
from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.console import confirm, say
from evenkeel_moe.cli.exits import CliError
from evenkeel_moe.cli.options import (
    ClientOptions,
    DeploymentClientOptions,
    YesOption,
    deployment_names,
    nested_fields,
    parse_value,
)
from evenkeel_moe.cli.units import moment
from evenkeel_moe.cli.watch import OutputOptions, ShowOptions
from evenkeel_moe.model.quantities import duration_text

deployment_app = CommandGroup(help="Look after one deployment.")
policy_app = CommandGroup(help="Show or change how experts are balanced.")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_PAUSE_S = 7 * 86400
_RESUMED = {
    "auto": "automatic plans may start again",
    "propose": "in mode propose each plan waits for approval",
    "observe": "in mode observe the controller starts and proposes none",
}
"""Mode -> what follows when plans may start again."""


def status(
    name: Annotated[
        str | None, typer.Argument(metavar="DEPLOYMENT", autocompletion=deployment_names)
    ] = None,
    *,
    connection: ClientOptions,
    shown: ShowOptions,
) -> None:
    """Show all deployments, or one with its ranks.

    Args:
        name: Deployment id. Default: list all deployments.
    """
    with connection.client() as client:
        if name is None:
            shown.run(lambda: client.every("deployments"), tables.deployments_table)
            return
        client.deployment(name)
        shown.run(
            lambda: client.get(f"deployments/{name}"),
            lambda row: tables.deployment_view(row, SystemClock().unix()),
        )


@policy_app.command("get")
def get_policy(connection: DeploymentClientOptions, shown: OutputOptions) -> None:
    """Show mode, policy, cost model, limits and gates, with their revision.

    A gate is a check that a plan must pass.
    """
    with connection.client() as client:
        document, tag = client.get_tagged(connection.path(client, "/policy"))
    answer = {"revision": tag.strip('"'), **document}
    shown.show(answer, lambda: tables.document_table(answer))


@policy_app.command("set")
def set_policy(
    fields: Annotated[list[str], typer.Argument(metavar="KEY=VALUE")],
    revision: str | None = None,
    yes: YesOption = False,
    *,
    connection: DeploymentClientOptions,
    shown: OutputOptions,
) -> None:
    """Change mode, policy, cost model, limits or gates.

    It prints the fields that have changed. The mode says who starts plans.

    observe: operators alone; with observe_lock, nobody.

    propose: operators, who approve what the controller proposes.

    auto: the controller.

    Args:
        fields: Fields to change; VALUE is JSON or text. A.B=VALUE changes field B of A.
        revision: Change this revision of the document or none. Default: the present one.
    """
    changes = nested_fields(parse_value(text) for text in fields)
    with connection.client() as client:
        path = connection.path(client, "/policy")
        before, tag = client.get_tagged(path)
        if changes.get("mode") == "auto":
            name = connection.found(client)
            confirm(f"In mode auto the controller moves experts of {name} without asking.", yes)
        wanted = tag if revision is None else f'"{revision}"'
        document = client.change("PATCH", path, changes, if_match=wanted)
    shown.show(document, lambda: tables.changes_view(before, document))


def pause(
    time: Annotated[str, typer.Option("--for", metavar="TIME")] = "7d",
    *,
    connection: DeploymentClientOptions,
) -> None:
    """Start no new plan for a while; a running one goes on.

    For example before a reload of weights. A pause ends by itself, or by `evenkeel resume`. To
    return to an earlier placement is possible meanwhile.

    Args:
        time: Seconds, or a number with s, m, h or d, at most 7d.
    """
    seconds = parse_seconds(time)
    with connection.client() as client:
        name = connection.found(client)
        client.change("POST", f"deployments/{name}/freeze", {"seconds": seconds})
    until = moment(SystemClock().unix() + seconds)
    say(
        f"{name}: no new plan starts for {duration_text(seconds)}, until {until} UTC; a plan that"
        f" runs goes on. `evenkeel resume -d {name}` ends it earlier."
    )


def parse_seconds(text: str) -> float:
    """Return the seconds in a text such as `90`, `15m` or `2h`.

    Raises:
        CliError: it is no time, zero, or more than 7 days.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h|d)?", text)
    seconds = 0.0 if found is None else float(found[1]) * _SECONDS[found[2] or ""]
    if not seconds:
        raise CliError(f"{text!r} is not a duration: give seconds, or for example 15m or 2h")
    if seconds > _LONGEST_PAUSE_S:
        raise CliError(f"{text} is more than 7d")
    return seconds


def resume(connection: DeploymentClientOptions) -> None:
    """Let plans start again, after a pause or while they are held.

    Automatic plans are held after a rollback, and when plans did not deliver their gain.
    """
    with connection.client() as client:
        name = connection.found(client)
        before = client.get(f"deployments/{name}")
        client.change("POST", f"deployments/{name}/resume")
    say(f"{name}: {_resumed(before)}")


def _resumed(before: dict[str, Any]) -> str:
    """Return what a resume changed, by the state before it."""
    until = before["frozen_until_unix"]
    paused = until is not None and until > SystemClock().unix()
    ended = ["they were paused"] * paused
    ended += [f"they were held ({before['held_because']})"] * before["held"]
    ended += ["a retirement of ranks was under way"] * (before["resize"] is not None)
    if not ended:
        return f"plans were neither paused nor held; the mode is {before['mode']}"
    return f"{_RESUMED[before['mode']]}; {' and '.join(ended)}"


@deployment_app.command()
def forget(
    name: Annotated[str, typer.Argument(metavar="DEPLOYMENT", autocompletion=deployment_names)],
    yes: YesOption = False,
    *,
    connection: ClientOptions,
) -> None:
    """Remove a deployment whose ranks are gone, with its metrics.

    Its plans and placements stay stored, and ranks that come back are accepted. Needs role admin.

    Args:
        name: Deployment id.
    """
    with connection.client() as client:
        client.deployment(name)
        confirm(f"{name} leaves the list and the metrics, and its windows are deleted.", yes)
        client.change("DELETE", f"deployments/{name}")
    say(f"{name}: removed; its plans and placements stay stored")


@deployment_app.command()
def quarantine(
    clear: bool = False,
    yes: YesOption = False,
    *,
    connection: DeploymentClientOptions,
    shown: ShowOptions,
) -> None:
    """Show which parts of the ranks' reports were rejected, by reason.

    Args:
        clear: Reset the counts first. Needs role admin.
    """
    with connection.client() as client:
        path = connection.path(client, "/quarantine")
        if clear:
            confirm("The counts and samples of rejected reports are deleted.", yes)
            client.change("DELETE", path)
        shown.run(lambda: client.get(path), insight_tables.quarantine_view)
