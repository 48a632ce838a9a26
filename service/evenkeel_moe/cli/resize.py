"""`evenkeel resize`: takes ranks out of a group."""

import time
from typing import Annotated, Any

import typer
from rich.text import Text

from evenkeel_moe.cli.client import ApiClient
from evenkeel_moe.cli.console import confirm
from evenkeel_moe.cli.exits import CliError, Exit
from evenkeel_moe.cli.operate import parse_seconds
from evenkeel_moe.cli.options import DeploymentClientOptions, YesOption
from evenkeel_moe.cli.watch import OutputOptions

_ASK_EVERY_S = 0.5


def resize(
    to_ranks: Annotated[int | None, typer.Option(min=1)] = None,
    retire: Annotated[list[int] | None, typer.Option(min=0)] = None,
    whole_nodes: bool = False,
    wait: Annotated[str | None, typer.Option(metavar="TIME")] = None,
    yes: YesOption = False,
    *,
    connection: DeploymentClientOptions,
    shown: OutputOptions,
) -> None:
    """Move experts off ranks that retire.

    Afterwards no expert lives on those ranks alone.
    Until the group has formed again without them, no other plan starts. `evenkeel resume` ends
    that before. Without --to-ranks and --retire it says how far a resize is. `evenkeel capacity`
    says what other numbers of ranks would bring.

    Args:
        to_ranks: Ranks that stay; those retire on which the fewest experts live alone.
        retire: Rank to retire, instead of --to-ranks. Repeat for more.
        whole_nodes: Only all ranks of a node retire.
        wait: Wait at most so long until the ranks may leave: seconds, or a number with s, m or h.
    """
    body = {"to_ranks": to_ranks, "retire": retire, "whole_nodes": whole_nodes or None}
    asked = {field: value for field, value in body.items() if value}
    seconds = 0.0 if wait is None else parse_seconds(wait)
    with connection.client() as client:
        name = connection.found(client)
        if asked:
            confirm(
                f"Experts of {name} move, and no other plan starts until it has its new size.", yes
            )
            client.change("POST", f"deployments/{name}/resize", asked)
        found = _state(client, name)
        until = time.monotonic() + seconds
        while found is not None and not found["ready"] and time.monotonic() < until:
            time.sleep(_ASK_EVERY_S)
            found = _state(client, name)
    words = "No rank retires." if found is None else found["words"]
    if wait is not None and found is not None and not found["ready"]:
        raise CliError(f"{name}: {words}", Exit.REFUSED)
    shown.show(found, lambda: Text(f"{name}: {words}"))


def _state(client: ApiClient, name: str) -> dict[str, Any] | None:
    """Return how far a resize is; None if no rank retires."""
    found: dict[str, Any] | None = client.get(f"deployments/{name}")["resize"]
    return found
