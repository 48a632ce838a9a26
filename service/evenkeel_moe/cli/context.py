"""`evenkeel context`: name controllers, and choose the one that commands call."""

from pathlib import Path
from typing import Annotated

import typer

from evenkeel_moe.cli.client import checked_id
from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.console import Listing, TableColumn, say
from evenkeel_moe.cli.options import ContextsFile
from evenkeel_moe.cli.watch import OutputOptions

app = CommandGroup(help="Name controllers, and choose the one to call.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]


@app.command("set")
def set_context(
    name: NameArgument,
    address: str | None = None,
    token_file: Annotated[str | None, typer.Option(metavar="<path>")] = None,
    ca_file: Annotated[str | None, typer.Option(metavar="<path>")] = None,
    deployment: Annotated[str | None, typer.Option("--deployment", "-d")] = None,
    *,
    where: ContextsFile,
) -> None:
    """Add a context or change it.

    The first one is in use at once. A context is the address of a controller with the path of a
    token file, the path of a CA file, and a deployment.

    The file is ~/.config/evenkeel/contexts.json, or what EVENKEEL_CONTEXTS names. Options and
    environment variables of a command win over it. An empty text removes a value.

    Args:
        address: REST address of a controller. Default: as it was.
        token_file: File with its token. Default: as it was.
        ca_file: File of the CA of its certificate. Default: as it was.
        deployment: Deployment if none is named. Default: as it was.
    """
    from evenkeel_moe.cli.contexts import Context, read_contexts, write_contexts

    checked_id(name, "context")
    given = {
        "address": address,
        "token_file": token_file and Path(token_file).absolute(),
        "ca_file": ca_file and Path(ca_file).absolute(),
        "deployment": deployment,
    }
    known = read_contexts(where.file)
    before = known.contexts.get(name, Context())
    changes = {key: value or None for key, value in given.items() if value is not None}
    changed = {**known.contexts, name: before.model_copy(update=changes)}
    write_contexts(
        where.file, known.model_copy(update={"contexts": changed, "current": known.current or name})
    )
    say(f"{name}: kept in {where.file}")


@app.command("use")
def use_context(name: NameArgument, where: ContextsFile) -> None:
    """Use a context for the commands that follow."""
    from evenkeel_moe.cli.contexts import named_context, read_contexts, write_contexts

    known = read_contexts(where.file)
    named_context(where.file, known, name)
    write_contexts(where.file, known.model_copy(update={"current": name}))
    say(f"{name}: in use")


@app.command("list")
def list_contexts(where: ContextsFile, shown: OutputOptions) -> None:
    """List the contexts."""
    from evenkeel_moe.cli.contexts import read_contexts

    known = read_contexts(where.file)
    columns = (
        TableColumn("CURRENT", lambda row: "*" if row[0] == known.current else ""),
        TableColumn("NAME", 0),
        TableColumn("ADDRESS", lambda row: row[1].address),
        TableColumn("DEPLOYMENT", lambda row: row[1].deployment),
        TableColumn("TOKEN FILE", lambda row: row[1].token_file, wide=True),
        TableColumn("CA FILE", lambda row: row[1].ca_file, wide=True),
    )
    rows = known.contexts.items()
    shown.show(
        known.model_dump(mode="json"),
        lambda: Listing(columns, rows) if rows else "no context yet: evenkeel context set NAME",
    )
