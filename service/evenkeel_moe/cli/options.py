"""Options that several commands share, and what they open."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from evenkeel_moe.cli.client import ApiClient, CliError, Exit, read_token

__all__ = [
    "DataDirOption",
    "DeploymentOption",
    "JsonOption",
    "TokenFileOption",
    "TokenOption",
    "UrlOption",
    "connect",
    "plain_console",
    "show",
]

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_DATA_DIR = Path("evenkeel-data")

UrlOption = Annotated[
    str,
    typer.Option(
        "--url", envvar="EVENKEEL_URL", help="REST address of a controller.", show_default=True
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="EVENKEEL_TOKEN",
        help="Bearer token; prefer the file, other users can read command lines.",
        show_default="none",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="EVENKEEL_TOKEN_FILE",
        help="File with a token, in the controller's format.",
        show_default="`tokens` in the data folder",
    ),
]
DataDirOption = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        envvar="EVENKEEL_DATA_DIR",
        help="Data folder of a controller on this machine, for its token.",
    ),
]
DeploymentOption = Annotated[
    str | None,
    typer.Option(
        "--deployment",
        "-d",
        envvar="EVENKEEL_DEPLOYMENT",
        help="Deployment id.",
        show_default="the only one there is",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the controller's answer as JSON.")]


def connect(url: str, token: str | None, token_file: Path | None, data_dir: Path) -> ApiClient:
    """A client with the token the options name, or the one a local controller keeps in its data folder."""
    return ApiClient(url, read_token(token, token_file, data_dir / "tokens"))


def show(answer: Any, as_json: bool, table: RenderableType) -> None:
    """Print an answer for people, or as it came."""
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        console = plain_console()
        # In a pipe or a file a table is as wide as it needs to be.
        (console if console.is_terminal else plain_console(width=200)).print(table)


def plain_console(*, width: int | None = None, force_terminal: bool | None = None) -> Console:
    """A console that prints text as it came: words of a rank, such as `[/lib/pair.cc:553]`, may look like markup."""
    return Console(width=width, force_terminal=force_terminal, markup=False, emoji=False)


def parse_value(text: str) -> tuple[str, Any]:
    """`KEY=VALUE` with VALUE as JSON where it is JSON, else as text.

    Raises:
        CliError: no `=` in it.
    """
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise CliError(f"{text} is not KEY=VALUE", Exit.USAGE)
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value
