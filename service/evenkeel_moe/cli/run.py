"""Commands that start something: a controller, a rank, the demonstration."""

from pathlib import Path
from typing import Annotated

import typer

from evenkeel_moe.cli.client import CliError, Exit
from evenkeel_moe.cli.config import ConfigOption
from evenkeel_moe.cli.options import plain_console

__all__ = ["add_commands"]


def serve(config: ConfigOption = None) -> None:
    """Run a controller until SIGTERM: gRPC for ranks, REST for operators, metrics for Prometheus."""
    try:
        from evenkeel_moe.controller.process.serve import run as run_controller
    except ModuleNotFoundError as error:
        raise CliError(
            f"serve needs `pip install 'evenkeel-moe[controller]'`: {error}", Exit.USAGE
        ) from error
    from evenkeel_moe.settings_sources import load_settings

    run_controller(load_settings(config))


def rank(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="JSON file with a RankConfig.")],
    number: Annotated[
        int | None,
        typer.Option(
            "--rank", "-r", min=0, help="EP rank of this process.", show_default="the one in CONFIG"
        ),
    ] = None,
) -> None:
    """Run one rank of the reference engine; ends with its ExitCode (0 when its final check passed)."""
    from evenkeel_moe.engines.reference.config import RankConfig

    try:
        rank_config = RankConfig.from_json(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"cannot read {config}: {error.strerror}", Exit.USAGE) from error
    except ValueError as error:
        raise CliError(f"{config} is no JSON: {error}", Exit.USAGE) from error
    if number is not None:
        rank_config = rank_config.replace(rank=number)
    if rank_config.rank < 0:
        raise CliError("name the rank of this process with --rank", Exit.USAGE)
    try:
        from evenkeel_moe.engines.reference.rank import run_rank  # loads torch
    except ModuleNotFoundError as error:
        raise CliError(
            f"a rank needs `pip install 'evenkeel-moe[rank]'`: {error}", Exit.USAGE
        ) from error
    raise typer.Exit(run_rank(rank_config))


def fleet(
    controller: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port of a controller replica; repeat for several.",
            show_default="127.0.0.1:50051",
        ),
    ] = None,
    deployment: Annotated[str, typer.Option(help="Id the ranks register under.")] = "reference",
    ranks: Annotated[int, typer.Option(min=2, max=64, help="EP ranks, one process each.")] = 4,
    steps: Annotated[int, typer.Option(min=0, help="Steps to serve; 0 serves until Ctrl-C.")] = 0,
    step_s: Annotated[
        float, typer.Option(min=0, max=5, help="Least duration of a step in seconds.")
    ] = 0.05,
    run_folder: Annotated[
        Path, typer.Option(help="Folder of logs, lines and saved placements; made if missing.")
    ] = Path("evenkeel-ranks"),
) -> None:
    """Run all ranks of the reference engine, and start the group again when one dies.

    A small real MoE engine to try a controller on; ends with 0 if no rank found anything wrong.
    """
    from evenkeel_moe.engines.reference.config import RankConfig
    from evenkeel_moe.engines.reference.supervisor import run_fleet

    config = RankConfig(
        run_folder=str(run_folder),
        num_ranks=ranks,
        deployment=deployment,
        controllers=tuple(controller or ["127.0.0.1:50051"]),
        steps=steps,
        min_step_s=step_s,
    )
    report = run_fleet(config)
    for problem in report.problems:
        typer.echo(f"found {problem}", err=True)
    raise typer.Exit(0 if report.ok else 1)


def demo(
    ranks: Annotated[int, typer.Option(min=2, max=64, help="EP ranks, one process each.")] = 4,
    nodes: Annotated[
        int, typer.Option(min=1, help="Nodes the ranks are said to be on, in blocks.")
    ] = 1,
    steps: Annotated[
        int, typer.Option(min=200, help="Steps to serve, half on prose, half on code.")
    ] = 600,
    step_s: Annotated[
        float,
        typer.Option(
            min=0, max=5, help="Least duration of a step in seconds, so that there is time to look."
        ),
    ] = 0.08,
    redis_url: Annotated[
        str,
        typer.Option(help="Store of the controller.", show_default="a Valkey server of its own"),
    ] = "",
    policy: Annotated[str, typer.Option(help="keel, eplb, craft, gem or libra.")] = "keel",
    dispatch: Annotated[
        str,
        typer.Option(help="How ranks choose replicas: even, nearest, lplb, waterfill or libra."),
    ] = "even",
    mode: Annotated[
        str,
        typer.Option(
            help="auto, propose (the demo approves, as you would) or observe (nothing moves)."
        ),
    ] = "auto",
    fault: Annotated[
        str | None,
        typer.Option(
            help="Break something after the first plan, to see it found: byte, map or epoch.",
            show_default="nothing is broken",
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=10, help="Give up after this many seconds.")
    ] = 170.0,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Empty folder for the logs and records of the run.", show_default="thrown away"
        ),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Print lines instead of the live view, as without a terminal."
        ),
    ] = False,
) -> None:
    """Watch a real engine lose and regain its balance, and check that not one bit went wrong.

    Starts a controller and the ranks of a small MoE engine on this machine; the text it serves
    changes from prose to code half way. Exits 0 only if balancedness rose after the first plan and after the
    first on the new text and fell after no other, the controller answered the change by itself, every slot
    holds its expert's original weights, and every output equals that of the same model that never migrated.
    """
    from evenkeel_moe.engines.demo.options import DemoOptions
    from evenkeel_moe.engines.demo.run import run_demo
    from evenkeel_moe.engines.reference.config import DispatchRule, Fault

    if fault is not None and fault not in set(Fault):
        raise CliError(f"fault {fault} is not byte, map or epoch", Exit.USAGE)
    if dispatch not in set(DispatchRule):
        raise CliError(f"dispatch {dispatch} is not one of {', '.join(DispatchRule)}", Exit.USAGE)
    options = DemoOptions(
        ranks=ranks,
        nodes=nodes,
        steps=steps,
        step_s=step_s,
        redis_url=redis_url,
        policy=policy,
        dispatch=DispatchRule(dispatch),
        mode=mode,
        fault=None if fault is None else Fault(fault),
        folder=folder,
        timeout_s=timeout_s,
    )
    raise typer.Exit(run_demo(options, plain_console(force_terminal=False if plain else None)))


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (serve, demo, fleet, rank):
        app.command()(command)
