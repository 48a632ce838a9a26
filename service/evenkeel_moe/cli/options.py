"""Options that several commands share."""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from evenkeel_moe.cli.client import ApiClient, read_token
from evenkeel_moe.cli.exits import CliError
from evenkeel_moe.cli.watch import ShowOptions
from evenkeel_moe.errors import EvenkeelError

YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask for confirmation; for scripts.")
]
LimitOption = Annotated[
    int, typer.Option("--limit", "-n", min=1, max=1000, help="Number of newest rows to show.")
]


_COMPLETED_WITHIN_S = 1.0
"""A shell waits for the answer at every press of the tab key."""


def deployment_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of deployments that begin with what was typed."""
    return _matching(ctx, "deployments", "deployment", incomplete)


def plan_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of plans that begin with what was typed, the newest first."""
    names = deployment_names(ctx, "")
    chosen = ctx.params.get("deployment") or (names[0] if len(names) == 1 else None)
    return _matching(ctx, f"deployments/{chosen}/plans", "plan_id", incomplete) if chosen else []


def _matching(ctx: typer.Context, path: str, key: str, incomplete: str) -> list[str]:
    """Return names that the controller lists; in doubt there is nothing to complete."""
    given = {field.name: ctx.params.get(field.name) for field in fields(ClientOptions)}
    found: list[str] = []
    with suppress(EvenkeelError, CliError, KeyError, TypeError, OSError):
        with ClientOptions(**given).client(_COMPLETED_WITHIN_S) as client:
            found = [str(row[key]) for row in client.get(path)["items"]]
    return [name for name in found if name.startswith(incomplete)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextsFile:
    """The option that says where the file of contexts is.

    Args:
        contexts: File of contexts.
    """

    contexts: Annotated[Path | None, typer.Option(envvar="EVENKEEL_CONTEXTS", hidden=True)] = None

    @property
    def file(self) -> Path:
        """The path of the file; by default one in the user's folder of settings."""
        return self.contexts or Path(typer.get_app_dir("evenkeel")) / "contexts.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions(ContextsFile):
    """The options that say which controller to call.

    Args:
        context: Context with the values of the options below. Default: the one in use.
        address: REST address of a controller. Default: the context's, else http://127.0.0.1:8080.
        token_file: File with a token, in the controller's format. Default: the context's, else
            `tokens` in the data folder.
        token: The token itself; other users can read command lines.
        data_dir: Data folder of a controller on this machine, which has a token.
        ca_file: File of the CA (PEM) of the controller's certificate.
    """

    context: Annotated[str | None, typer.Option(envvar="EVENKEEL_CONTEXT", show_envvar=False)] = (
        None
    )
    address: Annotated[str | None, typer.Option(envvar="EVENKEEL_ADDRESS", show_envvar=False)] = (
        None
    )
    token_file: Annotated[
        Path | None, typer.Option(envvar="EVENKEEL_TOKEN_FILE", show_envvar=False)
    ] = None
    token: Annotated[str | None, typer.Option(envvar="EVENKEEL_TOKEN", hidden=True)] = None
    data_dir: Annotated[Path | None, typer.Option(envvar="EVENKEEL_DATA_DIR", hidden=True)] = None
    ca_file: Annotated[Path | None, typer.Option(envvar="EVENKEEL_CA_FILE", hidden=True)] = None

    def client(self, timeout_s: float = 30.0) -> ApiClient:
        """Return a client; options and variables win over the context, one value at a time."""
        context = self.chosen()
        token_file = self.token_file
        if token_file is None and self.data_dir is None:
            token_file = context.token_file
        local_file = (self.data_dir or Path("evenkeel-data")) / "tokens"
        token = read_token(self.token, token_file, local_file)
        path = token_file or local_file
        if self.token is not None:
            words = "the token is unknown there, or has expired"
        elif token is not None:
            words = (
                f"the token of {path} is unknown there, or has expired; --token-file names another"
            )
        else:
            lacks = "holds no token" if path.exists() else "does not exist"
            words = f"it needs a token, and {path} {lacks}; use --token-file or --data-dir"
        address = self.address or context.address or "http://127.0.0.1:8080"
        return ApiClient(address, token, timeout_s, self.ca_file or context.ca_file, words)

    def chosen(self) -> Any:
        """Return the context."""
        # Imported here because other commands should not wait for it.
        from evenkeel_moe.cli.contexts import chosen_context

        return chosen_context(self.file, self.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentClientOptions(ClientOptions):
    """The options that say which deployment of which controller a command is about.

    Args:
        deployment: Deployment id. Default: the context's, else the only one there is.
    """

    deployment: Annotated[
        str | None,
        typer.Option(
            "--deployment",
            "-d",
            envvar="EVENKEEL_DEPLOYMENT",
            show_envvar=False,
            autocompletion=deployment_names,
        ),
    ] = None

    def found(self, client: ApiClient) -> str:
        """Return the id of the deployment.

        Raises:
            CliError: no deployment is named, and there is not exactly one.
        """
        named = self.deployment
        return client.deployment(self.chosen().deployment if named is None else named)

    def path(self, client: ApiClient, rest: str = "") -> str:
        """Return the REST path of the deployment, followed by `rest`."""
        return f"deployments/{self.found(client)}{rest}"

    def show(
        self, shown: ShowOptions, rest: str, render: Callable[[Any], RenderableType], **asked: Any
    ) -> None:
        """Show the answer at a path of the deployment; `asked` goes to `ApiClient.get`."""
        with self.client() as client:
            path = self.path(client, rest)
            shown.run(lambda: client.get(path, **asked), render)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRange:
    """The options that say which token counts to measure, and for how long.

    Args:
        tile: Tokens in one tile of the engine's kernel.
        dense_tokens: Token count up to which every tile is measured.
        max_tokens: Most tokens that a rank gets in one layer.
        budget_s: Seconds for one device.
    """

    tile: Annotated[int, typer.Option(min=1)] = 64
    dense_tokens: Annotated[int, typer.Option(min=1)] = 2048
    max_tokens: Annotated[int, typer.Option(min=1)] = 16384
    budget_s: Annotated[float, typer.Option(min=1)] = 120.0


def nested_fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of pairs; the key `a.b` names field b of the object a.

    Raises:
        CliError: a part of a key is empty, or a key is given twice, or as a value and an object.
    """
    fields: dict[str, Any] = {}
    for key, value in pairs:
        *above, name = key.split(".")
        into = fields
        for part in above:
            into = into.setdefault(part, {})
            if not isinstance(into, dict):
                raise CliError(f"{key}: {part} has a value already")
        if not all((*above, name)):
            raise CliError(f"{key} is no name of a field: a part of it is empty")
        if name in into:
            raise CliError(f"{key} is given twice")
        into[name] = value
    return fields


def parse_value(text: str) -> tuple[str, Any]:
    """Split `KEY=VALUE`; VALUE is read as JSON if it is JSON, otherwise it is text.

    Raises:
        CliError: the text has no key or no `=`.
    """
    key, separator, value = text.partition("=")
    if not separator:
        raise CliError(f"{text} has no value; write {text}=VALUE")
    if not key:
        raise CliError(f"{text} names no field; write KEY=VALUE")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value
