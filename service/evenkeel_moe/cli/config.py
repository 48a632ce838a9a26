"""`evenkeel config`: check and print the settings with which a controller would start."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from evenkeel_moe.cli.command_group import CommandGroup
from evenkeel_moe.cli.console import say

app = CommandGroup(help="Check and print the controller's settings.")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="EVENKEEL_CONFIG",
        help="Settings file, .toml or .yaml. Environment variables EVENKEEL_SECTION__FIELD override"
        " it.",
        show_default="environment variables and defaults only",
    ),
]


def read_settings(config: Path | None, profile: str | None = None) -> Any:
    """Return the settings; name variables on stderr that are ignored for want of an underscore."""
    from evenkeel_moe.settings_sources import load_settings, misspelt_variables

    settings = load_settings(config, profile)
    for name, right in misspelt_variables().items():
        say(f"warning: {name} is ignored; the setting is {right}, with two underscores", err=True)
    return settings


@app.command()
def check(config: ConfigOption = None) -> None:
    """Check every setting and report what is wrong.

    Exits with 2 if anything is wrong.
    """
    read_settings(config)
    source = "environment variables and defaults" if config is None else f"{config} and variables"
    say(f"all settings are valid ({source})")


@app.command("print")
def print_settings(config: ConfigOption = None) -> None:
    """Print the value of every setting as JSON, without secrets.

    Thresholds that nobody set have their defaults. docs/settings.md explains every setting.
    """
    from evenkeel_moe.planning.decision.gates import GateSettings

    settings = read_settings(config)
    document = settings.model_dump(mode="json")
    gates = GateSettings.from_thresholds(settings.planner.thresholds)
    document["planner"]["thresholds"] = dataclasses.asdict(gates)
    say(json.dumps(redacted(document), indent=2))


def redacted(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with *** in place of passwords, also of those inside URLs."""
    return {key: _redacted(key, value) for key, value in document.items()}


def _redacted(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return redacted(value)
    if "password" in key and value:
        return "***"
    if key == "url" and isinstance(value, str):
        # Greedy up to the last @, because a password may contain @.
        return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"://.*@", "://***@", value))
    return value
