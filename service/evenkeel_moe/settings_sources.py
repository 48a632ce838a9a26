"""Reads the controller's settings from environment and settings file, and checks them at start.

`EVENKEEL_SECTION__FIELD` overrides the file, and the file overrides the defaults. An unknown
variable or key is an error, and so are contradictory values. The secrets `EVENKEEL_REDIS__URL`,
`EVENKEEL_REDIS__PASSWORD` and `EVENKEEL_REDIS__SENTINEL_PASSWORD` can also come from a file that
the variable with `_FILE` appended names.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.texts import refused
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.settings import Settings
from evenkeel_moe.yaml_text import parse_yaml

_PREFIX = "EVENKEEL_"
_MAX_FILE_BYTES = 256 << 10
"""All settings with comments take a tenth of it."""
_MAX_VALUES = 10_000
"""Most sections, settings and items of lists in a settings file."""
_MAX_DOTS = 1000
"""Most dots in a line of TOML, whose reader takes the square of a key's parts in memory."""
_MAX_FAULTS = 100
"""Most faults that are listed."""
_SECRETS = ("redis__url", "redis__password", "redis__sentinel_password")


class _Variables(Settings, BaseSettings):
    """`Settings` as variables of the environment."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )


def load_settings(config: Path | None = None, profile: str | None = None) -> Settings:
    """Read and check all settings.

    Args:
        config: YAML (.yaml, .yml) or TOML (.toml) file with sections as in `Settings`.
        profile: overrides the setting `profile`.

    Raises:
        InvalidInput: all wrong names and values, one a line; or all contradictions between values.
    """
    text = "" if config is None else _read(config)
    content = {} if config is None else _parsed(config, text)
    variables = _variables()
    source = EnvSettingsSource(_Variables)
    source.env_vars = variables
    faults = []
    try:
        given = _merged(content, source())
        settings = Settings.model_validate(
            given if profile is None else given | {"profile": profile}
        )
    except SettingsError as error:
        raise InvalidInput(f"settings: {error}, which must be a JSON object") from None
    except RecursionError:
        raise InvalidInput("settings: the JSON of a variable is nested too deeply") from None
    except ValidationError as error:
        lines = {} if config is None or config.suffix == ".toml" else dict(_yaml_lines(text))
        for fault in error.errors(include_url=False, include_context=False):
            path = tuple(map(str, fault["loc"]))
            where = ".".join(path)
            variable = _set_by(path, variables)
            if variable is not None:
                where = variable
            elif path in lines:
                where = f"{config}:{lines[path]}: {where}"
            faults.append(f"{where}: {_words(path, fault)}")
    else:
        faults += settings.contradictions()
    faults = [*_unknown_sections(), *faults]
    if faults:
        more = [f"and {len(faults) - _MAX_FAULTS} more"] if len(faults) > _MAX_FAULTS else []
        raise InvalidInput("\n".join(("settings:", *faults[:_MAX_FAULTS], *more)))
    return settings


def misspelt_variables() -> dict[str, str]:
    """Return variables such as EVENKEEL_PLANNER_COST, with the names that they should have.

    They name a section and a setting of it with one underscore, and so are ignored. The settings
    `port` are left out: for a Service `evenkeel-grpc`, Kubernetes sets EVENKEEL_GRPC_PORT in pods.
    """
    names = [
        f"{section}__{one.name}"
        for section, kind in Settings.sections().items()
        for one in fields(kind)
        if one.name != "port"
    ]
    names += [f"planner__thresholds__{one.name}" for one in fields(GateSettings)]
    names += [f"{secret}_file" for secret in _SECRETS]
    right = {name.replace("__", "_"): name for name in names}
    given = {name: name.removeprefix(_PREFIX).lower() for name in sorted(os.environ)}
    return {
        name: f"{_PREFIX}{right[rest].upper()}"
        for name, rest in given.items()
        if name.startswith(_PREFIX) and rest in right
    }


def _variables() -> dict[str, str | None]:
    """Return the variables by name in lower case, those of secret files with what these hold."""
    found: dict[str, str | None] = {name.lower(): value for name, value in os.environ.items()}
    for secret in _SECRETS:
        name = f"{_PREFIX}{secret.upper()}_FILE"
        path = found.pop(name.lower(), None)
        if path is not None:
            try:
                text = Path(path).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise InvalidInput(f"{name}: cannot read {path}: {error.strerror}") from None
            except UnicodeError:
                # Not the text of the error, which would show a byte of the secret.
                raise InvalidInput(f"{name}: {path} is not UTF-8 text") from None
            found.setdefault(f"{_PREFIX}{secret}".lower(), text)
    return found


def _set_by(path: tuple[str, ...], variables: Mapping[str, str | None]) -> str | None:
    """Return the variable that sets a value, with its place if it is in the JSON of a section."""
    source = EnvSettingsSource(_Variables)
    for depth in range(len(path), 0, -1):
        name = (_PREFIX + "__".join(path[:depth])).upper()
        if name.lower() in variables:
            source.env_vars = {name.lower(): variables[name.lower()]}
            try:
                reduce(getitem, path, source())
            except (KeyError, TypeError):  # It sets other values of the section.
                continue
            return name if depth == len(path) else f"{name}: {'.'.join(path)}"
    return None


def _unknown_sections() -> Iterator[str]:
    """Yield a fault for each variable of an unknown section, which would be ignored.

    Variables of the command line have no section.
    """
    known = Settings.model_fields
    for name in os.environ:
        section, nested, _ = name.removeprefix(_PREFIX).lower().partition("__")
        if name.startswith(_PREFIX) and nested and section not in known:
            yield f"{name} names no section; there are {', '.join(sorted(known))}"


def _words(path: tuple[str, ...], fault: Mapping[str, Any]) -> str:
    """Return what is wrong with a setting. The values of section `redis` may be secrets."""
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return "there is no such setting"
    return refused(fault["msg"], None if path[0] == "redis" else fault["input"])


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of both, with those of `above` where both have one."""
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            merged[name] = _merged(below[name], above[name])
    return merged


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise InvalidInput(f"settings file {path} is longer than {_MAX_FILE_BYTES:,} bytes")
        return data.decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise InvalidInput(f"cannot read settings file {path}: {error.strerror}") from None
    except UnicodeError as error:
        raise InvalidInput(f"settings file {path}: {error}") from None


def _parsed(path: Path, text: str) -> dict[str, Any]:
    """Return the sections of a settings file, in bounded time and memory."""
    try:
        if path.suffix == ".toml":
            for number, line in enumerate(text.splitlines(), 1):
                if line.count(".") > _MAX_DOTS:
                    raise InvalidInput(f"{path}:{number}: more than {_MAX_DOTS:,} dots")
            content = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            content = parse_yaml(text, f"{path}:")
        else:
            raise InvalidInput(f"settings file {path} must end in .toml, .yaml or .yml")
        values = _count(content)
    except RecursionError:
        raise InvalidInput(f"settings file {path}: nested too deeply") from None
    except ValueError as error:
        raise InvalidInput(f"settings file {path}: {error}") from None
    if values > _MAX_VALUES:
        raise InvalidInput(f"settings file {path} has {values:,} values, more than {_MAX_VALUES:,}")
    if not isinstance(content, dict | None):
        raise InvalidInput(f"settings file {path} must hold sections, not {type(content).__name__}")
    return content or {}


def _count(value: Any) -> int:
    """Return the number of keys and items below a value."""
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(below) + sum(map(_count, below))


def _yaml_lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield path and line, counted from 1, of each key of a text that `parse_yaml` took."""
    top = yaml.compose(text, Loader=yaml.SafeLoader)
    waiting: list[tuple[tuple[str, ...], yaml.Node | None]] = [((), top)]
    for path, node in waiting:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield (*path, str(key.value)), key.start_mark.line + 1
                waiting.append(((*path, str(key.value)), value))
