"""Commands that start something: a controller, a rank, a fleet of ranks, the demonstration."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from evenkeel_moe.cli.command_group import CommandGroup, with_options
from evenkeel_moe.cli.config import ConfigOption, read_settings
from evenkeel_moe.cli.console import SafeConsole, say, status_line
from evenkeel_moe.cli.exits import CliError, Exit, needing
from evenkeel_moe.errors import Unavailable


def serve(
    config: ConfigOption = None, profile: Literal["observe", "propose", "auto"] | None = None
) -> None:
    """Run a controller, with ports for ranks, operators and metrics.

    It runs until Ctrl-C or SIGTERM.

    Args:
        profile: observe: nothing moves weights. propose: plans wait for approval. auto: plans start
            by themselves. Default: the settings.
    """
    with needing("controller", "serve"):
        from evenkeel_moe.controller.process.serve import run as run_controller
    from evenkeel_moe.adapters.addresses import host_port

    settings = read_settings(config, profile)
    grpc, rest, metrics = (
        host_port(each.host, each.port) for each in (settings.grpc, settings.rest, settings.metrics)
    )
    say(
        f"starting a controller: gRPC on {grpc}, REST and console on {rest}, metrics on {metrics},"
        f" data in {settings.data_dir}, mode {settings.planner.mode}",
        err=True,
    )
    run_controller(settings)


def rank(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    number: Annotated[int | None, typer.Option("--rank", "-r", min=0)] = None,
) -> None:
    """Run one rank of the small MoE engine that `evenkeel fleet` runs.

    Exits with 0 if its final check passed.

    Args:
        config: JSON file with the settings of a rank.
        number: EP rank of this process. Default: the one in CONFIG.
    """
    from evenkeel_moe.engines.reference.config import RankConfig

    try:
        rank_config = RankConfig.from_json(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"cannot read {config}: {error.strerror}") from error
    except ValueError as error:
        raise CliError(f"{config} is not JSON: {error}") from error
    if number is not None:
        rank_config = rank_config.replace(rank=number)
    if rank_config.rank < 0:
        raise CliError("give the rank of this process with --rank")
    with needing("rank", "a rank"):
        from evenkeel_moe.engines.reference.rank import run_rank  # loads torch
    raise typer.Exit(run_rank(rank_config))


DispatchOption = Annotated[
    Literal[
        "even",
        "nearest",
        "lplb",
        "fewest",
        "waterfill",
        "waterfill-static",
        "waterfill-all-ranks",
        "libra",
        "libra-refined",
    ],
    typer.Option(
        metavar="RULE",
        help="How ranks choose replicas: even, nearest, lplb, fewest, waterfill, waterfill-static,"
        " waterfill-all-ranks, libra or libra-refined.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetKvCache:
    """The options of the KV cache that the ranks of `evenkeel fleet` have or tell of.

    Args:
        requests_per_s: Requests that arrive at each rank in a second, instead of endless text.
            Their KV cache is real: it has the memory that experts leave, and bounds the batch.
        kv_bytes_per_token: Simulated bytes of one token in the KV cache. Without requests the
            engine has none: its ranks tell of one, so that replicas can be weighed against it.
            Default: float32 keys and values of every layer.
        kv_free_bytes: Simulated bytes of the KV cache of one rank while no sequence runs. Default:
            8 MiB.
    """

    requests_per_s: Annotated[float, typer.Option(min=0)] = 0.0
    kv_bytes_per_token: Annotated[int | None, typer.Option(min=1)] = None
    kv_free_bytes: Annotated[int | None, typer.Option(min=0)] = None


fleet_app = CommandGroup(invoke_without_command=True, no_args_is_help=False)


@fleet_app.callback()
@with_options
def fleet(
    ctx: typer.Context,
    controller: list[str] | None = None,
    deployment: Annotated[str, typer.Option("--deployment", "-d")] = "reference",
    ranks: Annotated[int, typer.Option(min=2, max=64)] = 4,
    steps: Annotated[int, typer.Option(min=0)] = 0,
    step_s: Annotated[float, typer.Option(min=0, max=5)] = 0.05,
    dispatch: DispatchOption = "even",
    shrink: bool = False,
    out: Path = Path("evenkeel-ranks"),
    *,
    kv: FleetKvCache,
) -> None:
    """Run the ranks of a small MoE engine, to try a controller.

    The engine is real, and is called the reference engine. If a rank dies, all ranks start again,
    or with --shrink the others go on. Exits with 0 if no rank found an error. While it runs,
    `evenkeel fleet resize` changes the number of ranks.

    Args:
        controller: host:port of a controller replica. Repeat for several. Default: 127.0.0.1:50051.
        deployment: Deployment id of the ranks.
        ranks: EP ranks, one process each.
        steps: Steps to serve; 0 serves until Ctrl-C.
        step_s: Minimum duration of a step in seconds.
        shrink: After a rank has died, go on with the others alone.
        out: Folder for logs, records and saved placements; created if missing.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    from evenkeel_moe.engines.reference.config import DispatchRule, RankConfig
    from evenkeel_moe.engines.reference.fleet import run_fleet

    config = RankConfig(
        run_folder=str(out),
        num_ranks=ranks,
        deployment=deployment,
        controllers=tuple(controller or ["127.0.0.1:50051"]),
        steps=steps,
        min_step_s=step_s,
        dispatch=DispatchRule(dispatch),
        shrinks=shrink,
        requests_per_s=kv.requests_per_s,
    ).with_simulated_kv_cache(kv.kv_bytes_per_token, kv.kv_free_bytes)
    until = f"for {steps} steps" if steps else "until Ctrl-C"
    starting = f"starting {ranks} ranks of {deployment} {until}"
    met = ", ".join(config.controllers)
    say(f"{starting}; controller {met}; logs are {out}/rank-*.log", err=True)
    with status_line() as show:
        report = run_fleet(config, lambda words: say(words, err=True), _progress(show, steps))
    for words in (*(f"found {problem}" for problem in report.problems), report.words):
        say(words, err=True)
    raise typer.Exit(0 if report.ok else 1)


def _refuse_options(ctx: typer.Context) -> None:
    """Refuse options that are given before a command, which would be ignored."""
    sources = ((name, ctx.get_parameter_source(name)) for name in ctx.params)
    given = [name for name, source in sources if source and source.name == "COMMANDLINE"]
    if given:
        option, command = f"--{given[0].replace('_', '-')}", ctx.invoked_subcommand
        raise CliError(f"{option} is given before {command}, not after it")


@fleet_app.command("resize")
def fleet_resize(
    ranks: Annotated[int, typer.Option(min=1, max=64)],
    retire: Annotated[list[int] | None, typer.Option(min=0)] = None,
    drain_s: Annotated[float, typer.Option(min=0, max=200)] = 30.0,
    timeout_s: Annotated[float, typer.Option(min=1)] = 300.0,
    out: Path = Path("evenkeel-ranks"),
) -> None:
    """Change the number of ranks of a running fleet.

    It goes on serving. The processes that stay keep their experts and requests; new ranks have
    empty slots, which the controller's next plan fills. Refused if an expert would lose its last
    replica. Exits with 0 once the new group serves.

    Args:
        ranks: EP ranks of the new group.
        retire: Rank that leaves; the others keep their order. Repeat for more. Default: the highest
            ones.
        drain_s: Seconds that ranks which leave may go on serving the requests they have.
        timeout_s: Longest wait for the fleet in seconds.
        out: Folder of the running fleet.
    """
    from evenkeel_moe.engines.reference.resize_request import ask_to_resize

    try:
        ok, words = ask_to_resize(out, ranks, retire or (), drain_s, timeout_s)
    except Unavailable as error:
        raise CliError(str(error), Exit.UNAVAILABLE) from error
    say(words, err=not ok)
    raise typer.Exit(0 if ok else 1)


def _progress(
    show: Callable[[str], None] | None, steps: int
) -> Callable[[int | None], None] | None:
    """Return a function that shows the newest step of a fleet, None before the first."""
    if show is None:
        return None
    of = f" of {steps}" if steps else ""
    starting = "ranks are starting: they load torch and connect to each other"
    return lambda step: show(starting if step is None else f"step {step:,}{of} served")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoArguments:
    """The options of `evenkeel demo`, under the names of `DemoOptions`.

    Args:
        ranks: EP ranks, one process each.
        nodes: Number of simulated nodes, each with consecutive ranks.
        steps: Steps to serve, the first half on prose, the second on code.
        step_s: Minimum duration of a step in seconds, so that the view can be followed.
        redis_url: Redis URL of the controller's store. Default: an embedded Valkey server.
        policy: For example keel or eplb; an unknown name lists all.
        mode: auto, propose (the demo approves in your place) or observe (nothing moves).
        fault: Inject a fault after the first plan, which the demo must find: byte, map or epoch.
            Default: no fault.
        slow: Slow one rank by 12 % in the second third; the text stays prose.
        told: With --slow: the rank is slow from the first step, and each rank sends a profile of
            its compute time instead of reporting the seconds of its steps.
        console: Serve until Ctrl-C and print the link of the web console; with --mode propose you
            approve.
        resize: Serve requests while the group grows to 6 ranks and shrinks to 3.
        timeout_s: Stop the demo after this many seconds.
        folder: Empty folder for the logs and records of the run. Default: a temporary folder.
    """

    ranks: Annotated[int, typer.Option(min=2, max=64)] = 4
    nodes: Annotated[int, typer.Option(min=1)] = 1
    steps: Annotated[int, typer.Option(min=200)] = 600
    step_s: Annotated[float, typer.Option(min=0, max=5)] = 0.08
    redis_url: str = ""
    policy: str = "keel"
    dispatch: DispatchOption = "even"
    mode: str = "auto"
    fault: str | None = None
    slow: bool = False
    told: bool = False
    console: bool = False
    resize: bool = False
    timeout_s: Annotated[float, typer.Option(min=10)] = 600.0
    folder: Annotated[Path | None, typer.Option("--out")] = None


def demo(arguments: DemoArguments, plain: bool = False) -> None:
    """Watch a real engine lose and regain its balance.

    The demo starts a controller and the ranks of a small MoE engine on this machine, and checks
    their weights and outputs. The text that
    the engine serves changes from prose to code half way. Exits with 0 only if all checks pass:
    balancedness rose after the first plan and after the first plan on the new text, and fell after
    no other plan; the controller reacted to the change without help; every slot holds the original
    weights of its expert; and every output equals that of the same model without migrations.

    With --slow, the text stays prose, the experts of rank 1 take 12 % longer in the second third,
    and other checks of balance apply: the controller finds the rank slow from the reported seconds
    and plans for it, and the measured MoE time falls by at least 80 % of what the plans promised.
    The same holds when the rank recovers and gets tokens back; there the error of the measurement
    counts, because the saving is only 2 to 3 %.

    Args:
        plain: Print lines instead of the live view, as without a terminal.
    """
    from evenkeel_moe.engines.demo.options import DemoOptions
    from evenkeel_moe.engines.demo.run import run_demo
    from evenkeel_moe.engines.reference.config import DispatchRule, Fault

    fault = arguments.fault
    if fault is not None and fault not in set(Fault):
        raise CliError(f"fault {fault} is not byte, map or epoch")
    values: dict[str, Any] = asdict(arguments)
    values |= {
        "dispatch": DispatchRule(arguments.dispatch),
        "fault": None if fault is None else Fault(fault),
    }
    console = SafeConsole(force_terminal=False if plain else None)
    raise typer.Exit(run_demo(DemoOptions(**values), console))
