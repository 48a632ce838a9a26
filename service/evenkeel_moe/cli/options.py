"""Options that several commands share.

A command takes such options as one argument, a dataclass whose fields are options.
`with_option_groups` turns the fields into options of the command; an option without words of its
own has the docstring of its field.
"""

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from evenkeel_moe.cli.client import ApiClient, CliError, Exit, checked_id, read_token
from evenkeel_moe.cli.completion import deployment_names

JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask for confirmation; for scripts.")
]
LimitOption = Annotated[
    int, typer.Option("--limit", "-n", min=1, max=1000, help="Number of newest rows to show.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementFileOptions:
    """The options that describe a placement file to write."""

    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")]
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="neutral (vLLM with the plugin), sglang, trtllm, ascend, vllm, vllm-mapping or"
            " vllm-ranks.",
        ),
    ] = "neutral"
    num_hidden_layers: Annotated[
        int | None,
        typer.Option(
            help="Number of rows of an sglang file.",
            min=1,
            show_default="as in the recording, else up to the last MoE layer",
        ),
    ] = None


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each argument of a command that is a dataclass by options, one for each field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(
                parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            )
            continue
        group = groups[parameter.name]
        field_hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            hint, default = field_hints[field.name], field.default
            if get_origin(hint) is not Annotated:
                hint = Annotated[hint, typer.Option()]
            option = hint.__metadata__[0]
            option.help = option.help or _field_words(group).get(field.name)
            parameters.append(
                inspect.Parameter(
                    field.name,
                    parameter.KEYWORD_ONLY,
                    default=parameter.empty if default is MISSING else default,
                    annotation=hint,
                )
            )

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


@cache
def _field_words(group: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass, each as one line."""
    words: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[group.__module__])).body:
        if isinstance(node, ast.ClassDef) and node.name == group.__name__:
            for field, after in pairwise(node.body):
                match field, after:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        words[name] = " ".join(text.split())
    return words


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """The options that say which controller to call."""

    url: Annotated[
        str, typer.Option(envvar="EVENKEEL_URL", help="REST address of a controller.")
    ] = "http://127.0.0.1:8080"
    token: Annotated[
        str | None,
        typer.Option(
            envvar="EVENKEEL_TOKEN",
            help="Bearer token. Prefer --token-file: other users can read command lines.",
            show_default="none",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="EVENKEEL_TOKEN_FILE",
            help="File with a token, in the controller's format.",
            show_default="`tokens` in the data folder",
        ),
    ] = None
    data_dir: Annotated[
        Path,
        typer.Option(
            envvar="EVENKEEL_DATA_DIR",
            help="Data folder of a controller on this machine, from which to read its token.",
        ),
    ] = Path("evenkeel-data")
    ca_file: Annotated[
        Path | None,
        typer.Option(
            envvar="EVENKEEL_CA_FILE",
            help="File of the CA (PEM) that signed the controller's certificate.",
            show_default="the public CAs",
        ),
    ] = None

    def client(self) -> ApiClient:
        """Return a client with the given token, or with that of a controller on this machine."""
        local_file = self.data_dir / "tokens"
        token = read_token(self.token, self.token_file, local_file)
        path = self.token_file or local_file
        if self.token is not None:
            words = "the token is unknown there, or has expired"
        elif token is not None:
            words = (
                f"the token of {path} is unknown there, or has expired; --token-file names another"
            )
        else:
            lacks = "holds no token" if path.exists() else "does not exist"
            words = f"it needs a token, and {path} {lacks}; use --token-file or --data-dir"
        return ApiClient(self.url, token, ca_file=self.ca_file, token_words=words)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentClientOptions(ClientOptions):
    """The options that say which deployment of which controller a command is about.

    Commands whose other arguments leave no place for a NAME of its own find it with `named_in`.
    """

    deployment: Annotated[
        str | None,
        typer.Option(
            "--deployment",
            "-d",
            help="The same as NAME.",
            show_default="the only one there is",
            autocompletion=deployment_names,
        ),
    ] = None
    default_deployment: Annotated[
        str | None,
        typer.Option(
            envvar="EVENKEEL_DEPLOYMENT", help="Deployment if none is named.", hidden=True
        ),
    ] = None

    def path(self, client: ApiClient, rest: str = "") -> str:
        """Return the REST path of the deployment, followed by `rest`."""
        return f"deployments/{self.found(client)}{rest}"

    def found(self, client: ApiClient) -> str:
        """Return the id of the deployment.

        Raises:
            CliError: no deployment is named, and there is not exactly one.
        """
        chosen = self.deployment
        return client.deployment(self.default_deployment or None if chosen is None else chosen)

    def of(self, name: str | None) -> "DeploymentClientOptions":
        """Return the options for the deployment of this name; None keeps them.

        Raises:
            CliError: another deployment is named with -d.
        """
        if name is not None and self.deployment not in (None, name):
            raise CliError(
                f"two deployments are named: {name} and, with -d, {self.deployment}", Exit.USAGE
            )
        return self if name is None else replace(self, deployment=name)

    def named_in(self, words: Sequence[str], last: str) -> tuple["DeploymentClientOptions", str]:
        """Split the arguments `[NAME] LAST`; return the options for NAME, and LAST.

        Raises:
            CliError: there are no arguments or more than two, or a plan id is none.
        """
        if not 1 <= len(words) <= 2:
            raise CliError(
                f"expected [NAME] {last}, got {len(words)} arguments; see --help", Exit.USAGE
            )
        found = checked_id(words[-1], "plan") if last == "PLAN" else words[-1]
        return self.of(words[0] if len(words) == 2 else None), found


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedDeployment(DeploymentClientOptions):
    """The same, for commands whose only argument is the deployment."""

    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Deployment id.",
            show_default="EVENKEEL_DEPLOYMENT, or the only one there is",
            autocompletion=deployment_names,
        ),
    ] = None

    def found(self, client: ApiClient) -> str:
        """Return the id of the deployment."""
        return DeploymentClientOptions.found(self.of(self.name), client)


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
                raise CliError(f"{key}: {part} has a value already", Exit.USAGE)
        if not all((*above, name)):
            raise CliError(f"{key} is no name of a field: a part of it is empty", Exit.USAGE)
        if name in into:
            raise CliError(f"{key} is given twice", Exit.USAGE)
        into[name] = value
    return fields


def parse_value(text: str) -> tuple[str, Any]:
    """Split `KEY=VALUE`; VALUE is read as JSON if it is JSON, otherwise it is text.

    Raises:
        CliError: the text has no key or no `=`.
    """
    key, separator, value = text.partition("=")
    if not separator:
        raise CliError(f"{text} has no value; write {text}=VALUE", Exit.USAGE)
    if not key:
        raise CliError(f"{text} names no field; write KEY=VALUE", Exit.USAGE)
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value
