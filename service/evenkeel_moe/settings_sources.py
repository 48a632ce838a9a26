"""Reads the controller's settings from environment and settings file, and checks them at start.

`EVENKEEL_SECTION__FIELD` overrides the file, and the file overrides the defaults. An unknown
variable or key is an error, and so are contradictory values. The secrets `EVENKEEL_REDIS__URL`,
`EVENKEEL_REDIS__PASSWORD` and `EVENKEEL_REDIS__SENTINEL_PASSWORD` can also come from a file that
the variable with `_FILE` appended names.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from pydantic import Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.planning.decision.gates import GateSettings
from evenkeel_moe.settings import Settings
from evenkeel_moe.settings_checks import contradictions
from evenkeel_moe.settings_forms import number_form
from evenkeel_moe.settings_lines import SettingLines
from evenkeel_moe.yaml_text import parse_yaml

_PREFIX = "EVENKEEL_"
_THRESHOLDS = ("planner", "thresholds")
_UNKNOWN = frozenset({"unexpected_keyword_argument", "extra_forbidden"})
"""Pydantic's types of the fault of a name that is no setting."""
_MAX_FILE_BYTES = 256 << 10
"""All settings with comments take a tenth of it."""
_MAX_VALUES = 10_000
"""Most sections, settings and items of lists in a settings file."""
_MAX_DOTS = 1000
"""Most dots in a line of TOML, whose reader takes the square of a key's parts in memory."""
_MAX_FAULTS = 100
"""Most wrong values and names that are listed."""
_SECRETS = ("redis__url", "redis__password", "redis__sentinel_password")


def load_settings(config: Path | None = None) -> Settings:
    """Read and check all settings.

    Args:
        config: YAML (.yaml, .yml) or TOML (.toml) file with sections as in `Settings`.

    Raises:
        InvalidInput: all faults found, one a line, with the arithmetic of contradictory values.
    """
    secrets, unread_secrets = _secret_files()
    file, text, unread_file = ({}, "", []) if config is None else _read_file(config)
    broken = _broken_variables()
    unread = [*unread_secrets, *unread_file]
    origins = _Origins(config, text)
    hidden = {name.lower() for name in broken}
    settings, found = _gathered(secrets, file, hidden)
    found += [_Fault(path, is_name=True) for path in _unknown_thresholds(file, hidden)]
    if found and all(fault.is_name for fault in found):
        # Without these names, the values can be compared with each other.
        paths = {fault.path for fault in found}
        hidden |= {name.lower() for name in os.environ if _is_below(name, paths)}
        settings, _ = _gathered(secrets, _without(file, paths), hidden)
    faults = [*_unknown_sections(), *(f"{name}: {words}" for name, words in broken.items())]
    faults += _lines(found[:_MAX_FAULTS], origins) + unread
    if len(found) > _MAX_FAULTS:
        faults.append(f"and {len(found) - _MAX_FAULTS} more")
    if settings is not None and not (unread or broken):
        faults += [f"{fault}{origins.named_in(fault)}" for fault in contradictions(settings)]
    if settings is None or faults:
        raise InvalidInput("settings:\n" + "\n".join(faults))
    return settings


def misspelt_variables() -> dict[str, str]:
    """Return variables such as EVENKEEL_PLANNER_COST, with the names that they should have.

    They name a section and a setting of it with one underscore, and so are ignored. The settings
    `port` are left out: for a Service `evenkeel-grpc`, Kubernetes sets EVENKEEL_GRPC_PORT in pods.
    """
    names = [
        f"{section}__{one.name}"
        for section, kind in get_type_hints(Settings).items()
        if is_dataclass(kind)
        for one in fields(kind)
        if one.name != "port"
    ]
    names += ["__".join((*_THRESHOLDS, one.name)) for one in fields(GateSettings)]
    names += [f"{secret}_file" for secret in _SECRETS]
    right = {name.replace("__", "_"): name for name in names}
    given = {name: name.removeprefix(_PREFIX).lower() for name in os.environ}
    return {
        name: f"{_PREFIX}{right[rest].upper()}"
        for name, rest in sorted(given.items())
        if name.startswith(_PREFIX) and rest in right
    }


class _Fault(NamedTuple):
    """One wrong setting."""

    path: tuple[str, ...]
    words: str = ""
    is_name: bool = False
    """True if there is no setting of this name; it has no other words."""


def _gathered(
    secrets: dict[str, Any], file: dict[str, Any], hidden: Set[str]
) -> tuple[Settings | None, list[_Fault]]:
    """Return the settings, or None and their faults; `hidden` are variables not to read."""
    try:
        gathered = _root_model(secrets, file, hidden)()
    except SettingsError as error:
        return None, [_Fault((), str(error))]
    except ValidationError as error:
        return None, [
            _Fault(tuple(map(str, one["loc"])), _words(one), one["type"] in _UNKNOWN)
            for one in error.errors(include_url=False, include_context=False)
        ]
    return Settings(**{f.name: getattr(gathered, f.name) for f in fields(Settings)}), []


def _root_model(
    secrets: dict[str, Any], file: dict[str, Any], unread: Set[str]
) -> type[BaseSettings]:
    """Return `Settings` as a model that reads variables, secret files and the settings file."""

    class Sources(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid"
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            assert isinstance(env_settings, EnvSettingsSource)
            hidden = {f"{_PREFIX}{secret}_FILE".lower() for secret in _SECRETS} | unread
            seen = env_settings.env_vars
            env_settings.env_vars = {
                name: seen[name] for name in seen if name.lower() not in hidden
            }
            return (
                env_settings,
                InitSettingsSource(settings_cls, secrets),
                InitSettingsSource(settings_cls, file),
            )

    sections: dict[str, Any] = {
        f.name: (f.type, Field(default_factory=f.default_factory))
        if f.default_factory is not MISSING
        else (f.type, f.default)
        for f in fields(Settings)
    }
    return create_model("Root", __base__=Sources, **sections)


def _unknown_sections() -> Iterator[str]:
    """Yield a fault for each variable of an unknown section, which would be ignored.

    Variables of the command line have no section.
    """
    known = {f.name for f in fields(Settings)}
    for name in os.environ:
        section, nested, _ = name.removeprefix(_PREFIX).lower().partition("__")
        if name.startswith(_PREFIX) and nested and section not in known:
            yield f"{name} names no section; there are {', '.join(sorted(known))}"


def _broken_variables() -> dict[str, str]:
    """Return the variables of whole sections and mappings that are no JSON object, with words.

    Pydantic names only the section in its error, and reads no further variable.
    """
    found: dict[str, str] = {}
    for name, value in os.environ.items():
        path = tuple(name.removeprefix(_PREFIX).lower().split("__"))
        if name.startswith(_PREFIX) and (path == _THRESHOLDS or _is_section(path)):
            try:
                is_object = isinstance(json.loads(value), dict)
            except (ValueError, RecursionError):
                is_object = False
            if not is_object:
                found[name] = "must be a JSON object"
    return found


def _is_section(path: tuple[str, ...]) -> bool:
    return len(path) == 1 and is_dataclass(get_type_hints(Settings).get(path[0]))


def _secret_files() -> tuple[dict[str, Any], list[str]]:
    """Return the values of the `_FILE` variables, nested as sections, and the faults of others."""
    found: dict[str, Any] = {}
    faults: list[str] = []
    for secret in _SECRETS:
        name = f"{_PREFIX}{secret.upper()}_FILE"
        path = os.environ.get(name)
        if path is None:
            continue
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            faults.append(f"{name}: cannot read {path}: {error.strerror}")
            continue
        except UnicodeError:
            # Not the text of the error, which would show a byte of the secret.
            faults.append(f"{name}: {path} is not UTF-8 text")
            continue
        section, _, key = secret.partition("__")
        found.setdefault(section, {})[key] = text
    return found, faults


def _read_file(path: Path) -> tuple[dict[str, Any], str, list[str]]:
    """Return the content of the settings file and its text, or the fault of an unreadable one."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise InvalidInput(f"settings file {path} is longer than {_MAX_FILE_BYTES:,} bytes")
        text = data.decode("utf-8").replace("\r\n", "\n")
        return _parsed(path, text), text, []
    except InvalidInput as error:
        fault = str(error)
    except OSError as error:
        fault = f"cannot read settings file {path}: {error.strerror}"
    except RecursionError:
        fault = f"settings file {path}: nested too deeply"
    except ValueError as error:
        # Not UTF-8, or not TOML.
        fault = f"settings file {path}: {error}"
    return {}, "", [fault]


def _parsed(path: Path, text: str) -> dict[str, Any]:
    if path.suffix == ".toml":
        for number, line in enumerate(text.splitlines(), 1):
            if line.count(".") > _MAX_DOTS:
                raise InvalidInput(f"{path}:{number}: more than {_MAX_DOTS:,} dots")
        content = tomllib.loads(text)
    elif path.suffix in (".yaml", ".yml"):
        content = parse_yaml(text, f"{path}:")
    else:
        raise InvalidInput(f"settings file {path} must end in .toml, .yaml or .yml")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidInput(f"settings file {path} must hold sections, not {type(content).__name__}")
    if (values := _count(content)) > _MAX_VALUES:
        raise InvalidInput(f"settings file {path} has {values:,} values, more than {_MAX_VALUES:,}")
    return content


def _count(content: dict[str, Any]) -> int:
    """Return the number of keys and items in a settings file."""
    waiting: list[Any] = [content]
    count = 0
    while waiting:
        held = waiting.pop()
        if isinstance(held, dict | list):
            count += len(held)
            waiting.extend(held.values() if isinstance(held, dict) else held)
    return count


def _without(content: dict[str, Any], paths: Set[tuple[str, ...]]) -> dict[str, Any]:
    """Return the content of a file without the settings of these paths."""
    return {
        key: _without(value, {path[1:] for path in paths if path[:1] == (str(key),)})
        if isinstance(value, dict)
        else value
        for key, value in content.items()
        if (str(key),) not in paths
    }


def _is_below(variable: str, paths: Set[tuple[str, ...]]) -> bool:
    """Return True if a variable sets a setting of one of these paths, or one below it."""
    names = [_PREFIX + "__".join(path).upper() for path in paths]
    return any(f"{variable.upper()}__".startswith(f"{name}__") for name in names)


class _Origins:
    """Says where the values of settings come from.

    Args:
        config: the settings file; None if there is none.
        text: its content; empty if it cannot be read.
    """

    def __init__(self, config: Path | None, text: str) -> None:
        self._config = config
        self._lines = SettingLines(text, "" if config is None else config.suffix)
        self._variables = {name.upper(): name for name in os.environ}

    def of(self, path: tuple[str, ...], *, exact: bool = False) -> str | None:
        """Return the variable, or the file and line, that set a value; None is the default."""
        for length in range(len(path), 0, -1):
            name = _PREFIX + "__".join(path[:length]).upper()
            for variable in (name, f"{name}_FILE"):
                if variable in self._variables and self._sets(variable, path[length:]):
                    return self._variables[variable]
        if self._config is None:
            return None
        line = self._lines.of(path, exact=exact)
        return None if line is None else f"{self._config}:{line}"

    def _sets(self, variable: str, rest: tuple[str, ...]) -> bool:
        """Return True if a variable sets a value itself, or is JSON that contains it."""
        if not rest:
            return True
        try:
            content = json.loads(os.environ[self._variables[variable]])
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and rest[0] in content

    def named_in(self, fault: str) -> str:
        """Return where the settings that a message names were set, in brackets; empty if not."""
        names = dict.fromkeys(re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", fault))
        known = {name: self.of(tuple(name.split(".")), exact=True) for name in names}
        shown = [f"{name} is set by {origin}" for name, origin in known.items() if origin]
        return f" ({'; '.join(shown)})" if shown else ""


def _lines(found: Sequence[_Fault], origins: _Origins) -> list[str]:
    """Return one line for each fault; only of numbers with the value, because it may be a secret.

    Variables come first, then the file from its top.
    """
    lines = []
    for path, words, is_name in found:
        variable = _PREFIX + "__".join(path).upper()
        origin = origins.of(tuple(part.lower() for part in path)) or origins.of(path)
        # A variable names its setting; a file does not.
        where = variable if origin in (None, variable) else f"{origin}: {'.'.join(path)}"
        number = re.search(r":(\d+)$", origin or "")
        lines.append(
            (int(number[1]) if number else 0, f"{where}: {_unknown(path) if is_name else words}")
        )
    return [line for _, line in sorted(lines, key=lambda each: each[0])]


def _words(fault: Mapping[str, Any]) -> str:
    """Return what is wrong with the value of one setting."""
    form = number_form([str(part).lower() for part in fault["loc"]])
    if form is None:
        return str(fault["msg"])
    try:
        return f"must be a {form}; it is {fault['input']!s:.40}"
    except ValueError:  # TOML reads longer whole numbers than Python shows
        return f"must be a {form}; it has thousands of digits"


def _unknown_thresholds(file: Mapping[str, Any], hidden: Set[str]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of thresholds that do not exist. To Pydantic they are keys of a mapping."""
    planner = file.get("planner")
    thresholds = planner.get("thresholds") if isinstance(planner, dict) else None
    names = [str(name) for name in thresholds] if isinstance(thresholds, dict) else []
    prefix = _PREFIX + "__".join((*_THRESHOLDS, "")).upper()
    names += [
        name.upper().removeprefix(prefix).lower()
        for name in os.environ
        if name.upper().startswith(prefix) and name.lower() not in hidden
    ]
    known = {one.name for one in fields(GateSettings)}
    yield from ((*_THRESHOLDS, name) for name in dict.fromkeys(names) if name not in known)


def _unknown(path: tuple[str | int, ...]) -> str:
    """Return the words about a name that is no setting, with the most similar one that is."""
    *above, name = (str(part) for part in path)
    section: Any = GateSettings if tuple(above) == _THRESHOLDS else Settings
    for part in above if section is Settings else ():
        section = get_type_hints(section).get(part) if is_dataclass(section) else None
    names = [one.name for one in fields(section)] if is_dataclass(section) else []
    similar = get_close_matches(name.lower(), names, 1)
    return "there is no such setting" + (f"; do you mean {similar[0]}?" if similar else "")
