"""Checks of the engine's version and parts, made before a plugin changes anything.

If a part is missing or takes other arguments than in the versions the plugin was written for, the
whole plugin is refused with a message that names the difference. The engine then runs without it.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from evenkeel_moe.errors import InvalidInput, Reason


class Unsupported(InvalidInput):
    """The plugin does not support this engine."""

    default_reason = Reason.UNSUPPORTED


OR = " | "
"""Separates the parameters that a callable has in different versions of an engine."""
Parts = Mapping[str, Mapping[str, Mapping[str, str]]]
"""Module -> class, or empty for the module -> its functions -> their parameters."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A part of an engine that a plugin wraps, replaces or reads."""

    name: str
    difference: str = ""
    """The difference from the versions the plugin was written for; empty if there is none."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The parts of the installed engine that a plugin found, and those that it did not find."""

    engine: str
    version: str
    known: tuple[str, ...]
    """The versions that were tested."""
    hooks: tuple[Hook, ...]

    @property
    def is_known(self) -> bool:
        """True if the version, or a build of the same code, was tested."""
        return _is_known(self.version, self.known)

    @property
    def differences(self) -> tuple[Hook, ...]:
        """The hooks that differ."""
        return tuple(hook for hook in self.hooks if hook.difference)


_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+[a-zA-Z0-9.]+)?")
"""A final release: its numbers, then a post-release and a local build, which keep its code."""


def check_version(engine: str, found: str, known: Sequence[str]) -> None:
    """Refuse every version that was not tested.

    Post-releases and local builds of a tested version pass, for example 0.33.0.post1 and
    0.33.0+cu130; release candidates and development versions do not.

    Raises:
        Unsupported: another version; the message names both.
    """
    if not _is_known(found, known):
        raise Unsupported(f"{engine} is {found}; this plugin supports {', '.join(known)}")


def _is_known(found: str, known: Sequence[str]) -> bool:
    release = _RELEASE.fullmatch(found)
    return release is not None and release[1] in known


def compare_signatures(owner: Any, expected: Mapping[str, str]) -> Iterator[Hook]:
    """Compare the parameters of named callables with the expected ones.

    Args:
        owner: module or class.
        expected: name -> parameter names in order, separated by spaces; versions that differ are
            separated by `OR`.
    """
    where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
    for name, parameters in expected.items():
        hook = f"{where}.{name}"
        part = inspect.getattr_static(owner, name, None)
        if isinstance(part, classmethod | staticmethod):
            part = part.__func__
        if not callable(part):
            yield Hook(hook, f"{hook} is missing")
            continue
        found = list(inspect.signature(part).parameters)
        wanted = [each.split() for each in parameters.split(OR)]
        if found in wanted:
            yield Hook(hook)
            continue
        either = " or ".join(f"({', '.join(each)})" for each in wanted)
        yield Hook(hook, f"{hook} takes ({', '.join(found)}), not {either}")


def compare_parts(parts: Parts) -> Iterator[Hook]:
    """Compare all functions of a table; see `compare_signatures`.

    Raises:
        ImportError, AttributeError: a module or a class is missing.
    """
    for module, owners in parts.items():
        loaded = importlib.import_module(module)
        for owner, wanted in owners.items():
            yield from compare_signatures(getattr(loaded, owner) if owner else loaded, wanted)


def report_of(
    engine: str,
    title: str,
    version_module: str,
    known: Sequence[str],
    compare: Callable[[str], Iterator[Hook]],
) -> EngineReport | None:
    """Compare an installed engine, and change nothing of it; None if there is none.

    Args:
        engine: the engine's package.
        title: its name in messages.
        version_module: the module whose `__version__` is its version.
        known: the versions that were tested.
        compare: version -> all parts.
    """
    if importlib.util.find_spec(engine) is None:
        return None
    version = "of unknown version"
    try:
        version = str(importlib.import_module(version_module).__version__)
        hooks = tuple(compare(version))
    except (ImportError, AttributeError) as error:
        hooks = (Hook("import", f"a part of {title} cannot be read: {error!s:.300}"),)
    return EngineReport(engine, version, tuple(known), hooks)


def refuse_differences(hooks: Iterator[Hook]) -> None:
    """Raise Unsupported for the first hook that differs."""
    for hook in hooks:
        if hook.difference:
            raise Unsupported(hook.difference)


def compare_fields(owner: Any, wanted: Sequence[str]) -> Hook:
    """Check that a dataclass has the fields that the plugin reads."""
    have = {item.name for item in fields(owner)} if is_dataclass(owner) else set()
    missing = [name for name in wanted if name not in have]
    name = str(owner.__qualname__)
    return Hook(name, f"{name} has no {', '.join(missing)}" if missing else "")
