"""The command line. A command imports heavy libraries when it runs, so that `--help` is quick."""

import sys

import typer

from evenkeel_moe import __version__
from evenkeel_moe.cli import (
    config,
    context,
    engines,
    insight,
    operate,
    placement,
    plan,
    record,
    replay,
    run,
)
from evenkeel_moe.cli.capacity import capacity
from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.console import say
from evenkeel_moe.cli.exits import CliError
from evenkeel_moe.cli.offline import offline
from evenkeel_moe.cli.profile import profile
from evenkeel_moe.cli.resize import resize
from evenkeel_moe.errors import EvenkeelError, Reason

__all__ = ["app", "main"]

_EPILOG = (
    "Words: a deployment is one EP group, the ranks (GPU processes) that serve one model together."
    " The experts of the model are spread over them: the placement says where. A policy is an"
    " algorithm that plans a better placement."
    " A plan moves experts between ranks in waves, each of which changes whole layers on the same"
    " step of all ranks. The epoch is the version of the placement, which each wave raises by 1."
    " Balancedness is the mean load of the ranks / the largest; 1 is a perfect split.\n\n"
    "Exit codes: 0 success; 1 refused by the controller, or a check of the demo failed;"
    " 2 wrong usage or settings; 3 no controller at the address, or temporarily unavailable;"
    " 4 no valid token; 130 interrupted.\n\n"
    "Commands that call a controller also take --token, --data-dir (of a controller on this"
    " machine, which has a token) and --ca-file (of its certificate). Instead of these options they"
    " read EVENKEEL_ADDRESS, EVENKEEL_DEPLOYMENT, EVENKEEL_TOKEN_FILE, EVENKEEL_TOKEN,"
    " EVENKEEL_DATA_DIR, EVENKEEL_CA_FILE and EVENKEEL_CONTEXT, and then the context: see `evenkeel"
    " context set --help`."
)

# Plain text: any terminal shows it, and 80 columns cut no name of an option.
app = CommandGroup(
    name="evenkeel",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Balance the experts of an MoE model across the GPUs that serve it.",
    epilog=_EPILOG,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"evenkeel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and exit.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    del version


app.command()(operate.status)
app.command()(insight.recommend)
app.command()(capacity)
app.command()(resize)
app.add_typer(plan.app, name="plan")
app.add_typer(operate.policy_app, name="policy")
app.command()(operate.pause)
app.command()(operate.resume)
app.command()(insight.decisions)
app.command()(insight.heatmap)
app.command()(insight.audit)
app.add_typer(placement.app, name="placement")
app.add_typer(operate.deployment_app, name="deployment")
app.add_typer(context.app, name="context")
app.command()(offline)
app.add_typer(replay.app, name="replay")
app.add_typer(record.app, name="record")
app.command()(profile)
app.command()(run.demo)
app.add_typer(run.fleet_app, name="fleet")
app.command(hidden=True)(run.rank)
app.command()(run.serve)
app.add_typer(config.app, name="config")
app.add_typer(engines.app, name="engines")


def main() -> None:
    """Entry point of the `evenkeel` command."""
    try:
        app(prog_name="evenkeel")
    except CliError as error:
        say(f"evenkeel: {error}", err=True)
        sys.exit(error.code)
    except EvenkeelError as error:
        # Raised before the command changes anything: wrong settings or options.
        reason = "" if error.reason is Reason.INVALID_INPUT else f" ({error.reason})"
        say(f"evenkeel: {error}{reason}", err=True)
        sys.exit(2)
