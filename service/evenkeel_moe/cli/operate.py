"""Commands that show a deployment and change how it is operated."""

import re
from typing import Annotated, Any

import typer

from evenkeel_moe.adapters.clock import SystemClock
from evenkeel_moe.cli import tables
from evenkeel_moe.cli.client import CliError, Exit
from evenkeel_moe.cli.completion import deployment_names
from evenkeel_moe.cli.confirm import confirm
from evenkeel_moe.cli.console import say, show
from evenkeel_moe.cli.options import (
    ClientOptions,
    DeploymentClientOptions,
    JsonOption,
    LimitOption,
    NamedDeployment,
    YesOption,
    nested_fields,
    parse_value,
    with_option_groups,
)
from evenkeel_moe.cli.units import moment
from evenkeel_moe.cli.watch import ShowOptions
from evenkeel_moe.model.quantities import duration_text

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_FROZEN_S = 7 * 86400
_RESUMED = {
    "auto": "automatic plans may start again",
    "propose": "plans are no longer held; in mode propose each plan waits for approval",
    "observe": "plans are no longer held; in mode observe the controller starts and proposes none",
}
"""Mode -> what follows when plans are no longer held."""


def status(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Deployment id.",
            show_default="list all deployments",
            autocompletion=deployment_names,
        ),
    ] = None,
    *,
    connection: ClientOptions,
    shown: ShowOptions,
) -> None:
    """Show all deployments, or one deployment with its ranks."""
    with connection.client() as client:
        if name is None:
            shown.run(lambda: client.every("deployments"), tables.deployments_table)
            return
        client.deployment(name)
        shown.run(
            lambda: client.get(f"deployments/{name}"),
            lambda row: tables.deployment_view(row, SystemClock().unix()),
        )


def decisions(
    limit: LimitOption = 20,
    *,
    connection: NamedDeployment,
    shown: ShowOptions,
) -> None:
    """Show the decisions of the controller with their reasons, the newest first.

    A decision to change nothing is shown too."""
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


def policy(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] [KEY=VALUE]...",
            help="Deployment id, and fields to change; VALUE is JSON or text. A.B=VALUE changes"
            " field B of A.",
            show_default="show the document of the only deployment there is",
            autocompletion=deployment_names,
        ),
    ] = None,
    *,
    connection: DeploymentClientOptions,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show or change how a deployment is balanced: its mode, policy, cost model, limits and gates.

    A gate is a check that a plan must pass. After a change it prints the fields that have changed.

    The mode says who starts plans.

    observe: operators alone; with observe_lock, nobody.

    propose: operators, who approve what the controller proposes.

    auto: the controller.
    """
    changes = list(words or [])
    named = changes.pop(0) if changes and "=" not in changes[0] else None
    chosen = connection.of(named)
    fields = nested_fields(parse_value(text) for text in changes)
    with connection.client() as client:
        path = chosen.path(client, "/policy")
        before, tag = client.get_tagged(path)
        if fields.get("mode") == "auto":
            name = chosen.found(client)
            confirm(f"In mode auto the controller moves experts of {name} without asking.", yes)
        document = client.patch(path, fields, if_match=tag) if fields else before
    show(
        document,
        as_json,
        lambda: (
            tables.changes_view(before, document) if fields else tables.document_table(document)
        ),
    )


def freeze(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME] TIME",
            help="Deployment id, and the time during which no new plan may start: seconds, or a"
            " number with s, m, h or d, at most 7d. 0 ends a freeze.",
            autocompletion=deployment_names,
        ),
    ],
    *,
    connection: DeploymentClientOptions,
) -> None:
    """Stop new plans for a given time, for example before a reload of weights.

    The freeze ends by itself.
    """
    chosen, text = connection.named_in(words, "TIME")
    seconds = parse_seconds(text)
    with connection.client() as client:
        name = chosen.found(client)
        before = client.get(f"deployments/{name}")["frozen_until_unix"] if seconds == 0 else None
        client.post(f"deployments/{name}/freeze", {"seconds": seconds})
    if seconds == 0:
        ended = "the freeze has ended; plans may start again"
        say(f"{name}: {'there was no freeze' if before is None else ended}")
        return
    until = moment(SystemClock().unix() + seconds)
    say(
        f"{name}: no new plan starts for {duration_text(seconds)}, until {until} UTC; a plan that"
        f" runs goes on. `evenkeel freeze {name} 0` ends it earlier."
    )


def parse_seconds(text: str) -> float:
    """Return the seconds in a text such as `90`, `15m` or `2h`.

    Raises:
        CliError: it is no time, or more than 7 days.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h|d)?", text)
    if found is None:
        raise CliError(
            f"{text} is not a duration: give seconds, or for example 15m or 2h", Exit.USAGE
        )
    seconds = float(found[1]) * _SECONDS[found[2] or ""]
    if seconds > _MOST_FROZEN_S:
        raise CliError(f"{text} is more than 7d", Exit.USAGE)
    return seconds


def resume(connection: NamedDeployment) -> None:
    """Allow automatic plans again, after a rollback or gains that were not delivered."""
    with connection.client() as client:
        name = connection.found(client)
        before = client.get(f"deployments/{name}")
        client.post(f"deployments/{name}/resume")
    say(f"{name}: {_resumed(before)}{_still_frozen(name, before['frozen_until_unix'])}")


def _resumed(before: dict[str, Any]) -> str:
    """Return what a resume changed, by the state before it."""
    mode = before["mode"]
    if not before["held"]:
        return f"automatic plans were not held; the mode is {mode}"
    return f"{_RESUMED[mode]}; they were held ({before['held_because']})"


def _still_frozen(name: str, until: float | None) -> str:
    """Return a warning that a freeze goes on, which `resume` does not end; empty without one."""
    if until is None or until <= SystemClock().unix():
        return ""
    return f"; frozen until {moment(until)} UTC: end that with evenkeel freeze {name} 0"


def forget(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Deployment id.", autocompletion=deployment_names),
    ],
    *,
    connection: ClientOptions,
    yes: YesOption = False,
) -> None:
    """Remove a deployment whose ranks are gone, with its metrics and the recent loads.

    Its plans and epochs stay stored, and ranks that come back are accepted. Needs role admin.
    """
    with connection.client() as client:
        client.deployment(name)
        confirm(f"{name} leaves the list and the metrics, and its windows are deleted.", yes)
        client.delete(f"deployments/{name}")
    say(f"{name}: removed; its plans and epochs stay stored")


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (status, decisions, policy, freeze, resume, forget):
        app.command()(with_option_groups(command))
