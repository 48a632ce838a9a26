"""`evenkeel engines`: what the plugins find of the engines that are installed here."""

import importlib
from typing import Annotated, Any

import typer

from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.console import say
from evenkeel_moe.cli.exits import CliError

app = CommandGroup(help="Check that the plugins fit the engines installed here.")
_ENGINES = ("vllm", "sglang")


@app.command()
def check(
    engine: Annotated[str | None, typer.Argument(metavar="ENGINE")] = None,
    flags: Annotated[list[str] | None, typer.Argument(metavar="FLAGS")] = None,
) -> None:
    """Check the parts of an engine that its plugin uses.

    Also checks the flags of a server, for which the engine need not be installed. It changes
    nothing.

    Exits with 0 if the plugin would start, and with 1 if a part differs, the version was not
    tested, or a flag excludes it in the mode of EVENKEEL_RANK__MODE, by default observe. With 2 if
    flags or the settings of a rank in the environment are wrong.

    Args:
        engine: vllm or sglang. Default: every engine that is installed here.
        flags: The flags of the server, after two dashes: also checks whether experts are balanced
            with them. Default: none.
    """
    if engine is not None and engine not in _ENGINES:
        raise CliError(f"unknown engine {engine!r}; known: {', '.join(_ENGINES)}")
    reports = [
        report
        for name in _ENGINES
        if engine in (None, name)
        and (report := importlib.import_module(f"evenkeel_moe.engines.{name}.hooks").report())
    ]
    if not reports and not flags:
        wanted = (engine,) if engine else _ENGINES
        verb = "is" if engine else "are"
        raise CliError(f"{' and '.join(wanted)} {verb} not installed here")
    for report in reports:
        _print(report)
    excluded = _print_flags(engine, flags) if engine and flags else False
    if excluded or any(report.differences or not report.is_known for report in reports):
        raise typer.Exit(1)


def _print_flags(engine: str, flags: list[str]) -> bool:
    """Print what flags mean for the balance of experts; return True if one excludes it."""
    from evenkeel_moe.engines.guest.settings import load_guest_settings
    from evenkeel_moe.engines.launch_flags import find_limits, read_flags

    places = load_guest_settings().places
    limits = list(find_limits(engine, read_flags(flags)))
    for words, only_place in limits:
        say(f"excluded {'in mode place ' if only_place else ''}{words}")
    if not limits:
        say(f"{engine}: no flag is known to exclude the balance of experts")
    return any(places or not only_place for _, only_place in limits)


def _print(report: Any) -> None:
    for hook in report.hooks:
        say(f"changed  {hook.difference}" if hook.difference else f"found    {hook.name}")
    known, name = ", ".join(report.known), f"{report.engine} {report.version}"
    changed = len(report.differences)
    if changed:
        verdict = f"{changed} of {len(report.hooks)} parts changed: the plugin refuses to start"
    elif report.is_known:
        verdict = f"all {len(report.hooks)} parts found, and the version was tested: it starts"
    else:
        verdict = (
            f"all {len(report.hooks)} parts found, but tested are {known}: the plugin refuses to"
            f" start. Test it in a clone: make test-engines ENGINES={report.engine}=="
            f"{report.version}"
        )
    say(f"{name}: {verdict}")
