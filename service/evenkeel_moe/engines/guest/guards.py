"""Checks of the engine's version and parts, made before a plugin changes anything.

If a part is missing or takes other arguments than in the versions the plugin was written for, the
whole plugin is refused with a message that names the difference. The engine then runs without it.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from evenkeel_moe.errors import InvalidInput, Reason


class Unsupported(InvalidInput):
    """The plugin does not support this engine."""

    default_reason = Reason.UNSUPPORTED


_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+[a-zA-Z0-9.]+)?")
"""A final release: its numbers, then a post-release and a local build, which keep its code."""


def check_version(engine: str, found: str, known: Sequence[str]) -> None:
    """Refuse every version that was not tested.

    Post-releases and local builds of a tested version pass, for example 0.33.0.post1 and
    0.33.0+cu130; release candidates and development versions do not.

    Raises:
        Unsupported: another version; the message names both.
    """
    release = _RELEASE.fullmatch(found)
    if release is None or release[1] not in known:
        raise Unsupported(f"{engine} is {found}; this plugin supports {', '.join(known)}")


def check_signatures(owner: Any, expected: Mapping[str, str]) -> None:
    """Compare the parameters of named callables with the expected ones.

    Args:
        owner: module or class.
        expected: name -> parameter names in order, separated by spaces.

    Raises:
        Unsupported: a callable is missing or takes other parameters.
    """
    where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
    for name, parameters in expected.items():
        part = inspect.getattr_static(owner, name, None)
        if isinstance(part, classmethod | staticmethod):
            part = part.__func__
        if not callable(part):
            raise Unsupported(f"{where}.{name} is missing")
        found, wanted = list(inspect.signature(part).parameters), parameters.split()
        if found != wanted:
            raise Unsupported(
                f"{where}.{name} takes ({', '.join(found)}), not ({', '.join(wanted)})"
            )


def check_fields(owner: Any, wanted: Sequence[str]) -> None:
    """Check that a dataclass has the fields that the plugin reads.

    Raises:
        Unsupported: not a dataclass, or a field is missing.
    """
    have = {item.name for item in fields(owner)} if is_dataclass(owner) else set()
    missing = [name for name in wanted if name not in have]
    if missing:
        raise Unsupported(f"{owner.__qualname__} has no {', '.join(missing)}")
