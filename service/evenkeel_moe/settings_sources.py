"""Reads the controller's settings from environment and settings file, and checks them at start.

`EVENKEEL_SECTION__FIELD` overrides the file, and the file overrides the defaults. An unknown
variable or key is an error, and so are contradictory values. The secrets `EVENKEEL_REDIS__URL`,
`EVENKEEL_REDIS__PASSWORD` and `EVENKEEL_REDIS__SENTINEL_PASSWORD` can also come from a file that
the variable with `_FILE` appended names.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

import yaml
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
from evenkeel_moe.settings_lines import line_of

_PREFIX = "EVENKEEL_"
_THRESHOLDS = ("planner", "thresholds")
_UNKNOWN = frozenset({"unexpected_keyword_argument", "extra_forbidden"})
"""Pydantic's types of the fault of a name that is no setting."""
_SECRETS = ("redis__url", "redis__password", "redis__sentinel_password")


def load_settings(config: Path | None = None) -> Settings:
    """Read and check all settings.

    Args:
        config: YAML (.yaml, .yml) or TOML (.toml) file with sections as in `Settings`.

    Raises:
        InvalidInput: all faults found, one a line, with the arithmetic of contradictory values.
    """
    _refuse_unknown_variables()
    sources = _secret_files(), ({} if config is None else _read_file(config))
    origins = _Origins(config)
    try:
        gathered = _root_model(*sources)()
    except (ValidationError, SettingsError) as error:
        raise InvalidInput(f"settings:\n{_faults(error, origins, sources[1])}") from None
    settings = Settings(**{f.name: getattr(gathered, f.name) for f in fields(Settings)})
    faults = [f"{fault}{origins.named_in(fault)}" for fault in contradictions(settings)]
    if faults:
        raise InvalidInput("settings:\n" + "\n".join(faults))
    return settings


def _root_model(secrets: dict[str, Any], file: dict[str, Any]) -> type[BaseSettings]:
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
            hidden = {f"{_PREFIX}{secret}_FILE".lower() for secret in _SECRETS}
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


def _refuse_unknown_variables() -> None:
    """Refuse variables of unknown sections, which would be ignored.

    Variables of the command line have no section.
    """
    known = {f.name for f in fields(Settings)}
    for name in os.environ:
        section, nested, _ = name.removeprefix(_PREFIX).lower().partition("__")
        if name.startswith(_PREFIX) and nested and section not in known:
            raise InvalidInput(f"{name} names no section; there are {', '.join(sorted(known))}")


def _secret_files() -> dict[str, Any]:
    """Return the values of the `_FILE` variables, nested as sections."""
    found: dict[str, Any] = {}
    for secret in _SECRETS:
        name = f"{_PREFIX}{secret.upper()}_FILE"
        path = os.environ.get(name)
        if path is None:
            continue
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InvalidInput(f"{name}: cannot read {path}: {error.strerror}") from None
        except UnicodeError:
            # Not the text of the error, which would show a byte of the secret.
            raise InvalidInput(f"{name}: {path} is not UTF-8 text") from None
        section, _, key = secret.partition("__")
        found.setdefault(section, {})[key] = text
    return found


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            content = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            content = yaml.safe_load(text)
        else:
            raise InvalidInput(f"settings file {path} must end in .toml, .yaml or .yml")
    except OSError as error:
        raise InvalidInput(f"cannot read settings file {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        # Not the text of the error, which would show a line of the file, maybe with a secret.
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise InvalidInput(f"{path}{line}: {error.problem or error.context}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # ValueError: not UTF-8, not TOML, or an impossible date or number in YAML.
        raise InvalidInput(f"settings file {path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidInput(f"settings file {path} must hold sections, not {type(content).__name__}")
    return content


class _Origins:
    """Says where the values of settings come from.

    Args:
        config: the settings file; None if there is none.
    """

    def __init__(self, config: Path | None) -> None:
        self._config = config
        self._text = "" if config is None else config.read_text(encoding="utf-8")
        self._variables = {name.upper(): name for name in os.environ}

    def of(self, path: tuple[str, ...], *, exact: bool = False) -> str | None:
        """Return the variable, or the file and line, that set a value; None is the default."""
        for length in range(len(path), 0, -1):
            name = _PREFIX + "__".join(path[:length]).upper()
            for variable in (name, f"{name}_FILE"):
                if variable in self._variables and (length > 1 or len(path) == 1):
                    return self._variables[variable]
        if self._config is None:
            return None
        line = line_of(self._text, self._config.suffix, path, exact=exact)
        return None if line is None else f"{self._config}:{line}"

    def named_in(self, fault: str) -> str:
        """Return where the settings that a message names were set, in brackets; empty if not."""
        names = dict.fromkeys(re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", fault))
        known = {name: self.of(tuple(name.split(".")), exact=True) for name in names}
        shown = [f"{name} is set by {origin}" for name, origin in known.items() if origin]
        return f" ({'; '.join(shown)})" if shown else ""


def _faults(
    error: ValidationError | SettingsError, origins: _Origins, file: Mapping[str, Any]
) -> str:
    """Return one line for each fault; only of numbers with the value, because it may be a secret.

    Variables come first, then the file from its top.
    """
    if isinstance(error, SettingsError):
        return str(error)
    found = [
        (tuple(str(part) for part in fault["loc"]), _words(fault))
        for fault in error.errors(include_url=False, include_context=False)
    ]
    found += [(path, _unknown(path)) for path in _unknown_thresholds(file)]
    lines = []
    for path, words in found:
        variable = _PREFIX + "__".join(path).upper()
        origin = origins.of(tuple(part.lower() for part in path)) or origins.of(path)
        # A variable names its setting; a file does not.
        where = variable if origin in (None, variable) else f"{origin}: {'.'.join(path)}"
        number = re.search(r":(\d+)$", origin or "")
        lines.append((int(number[1]) if number else 0, f"{where}: {words}"))
    return "\n".join(line for _, line in sorted(lines, key=lambda each: each[0]))


def _words(fault: Mapping[str, Any]) -> str:
    """Return what is wrong with one setting."""
    if fault["type"] in _UNKNOWN:
        return _unknown(fault["loc"])
    form = number_form([str(part).lower() for part in fault["loc"]])
    if form is None:
        return str(fault["msg"])
    return f"must be a {form}; it is {fault['input']!s:.40}"


def _unknown_thresholds(file: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of thresholds that do not exist. To Pydantic they are keys of a mapping."""
    planner = file.get("planner")
    thresholds = planner.get("thresholds") if isinstance(planner, dict) else None
    names = [str(name) for name in thresholds] if isinstance(thresholds, dict) else []
    prefix = _PREFIX + "__".join((*_THRESHOLDS, "")).upper()
    names += [
        name.upper().removeprefix(prefix).lower()
        for name in os.environ
        if name.upper().startswith(prefix)
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
