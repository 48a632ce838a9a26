"""What a plugin checks before it changes anything: the engine's version and the form of every part it uses.

Nothing is patched on a guess. A part that is missing, or takes other arguments than the version this was written
for, refuses the whole plugin with the difference in words; the engine then serves without it.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from evenkeel_moe.errors import InvalidInput, Reason

__all__ = ["Unsupported", "check_fields", "check_signatures", "check_version"]


class Unsupported(InvalidInput):
    """The engine is not one this plugin knows."""

    default_reason = Reason.UNSUPPORTED


def check_version(engine: str, found: str, known: Sequence[str]) -> None:
    """Refuse every version but those read and tested.

    Raises:
        Unsupported: another version; names both.
    """
    if found not in known:
        raise Unsupported(f"{engine} is {found}; this plugin knows {', '.join(known)}")


def check_signatures(owner: Any, expected: Mapping[str, Sequence[str]]) -> None:
    """Hold the named callables of a module or class against the parameters they must take.

    Args:
        owner: module or class.
        expected: name -> parameter names in order.

    Raises:
        Unsupported: one is missing or takes other parameters.
    """
    where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
    for name, wanted in expected.items():
        part = inspect.getattr_static(owner, name, None)
        if isinstance(part, classmethod | staticmethod):
            part = part.__func__
        if not callable(part):
            raise Unsupported(f"{where}.{name} is not there")
        found = list(inspect.signature(part).parameters)
        if found != list(wanted):
            raise Unsupported(
                f"{where}.{name} takes ({', '.join(found)}), not ({', '.join(wanted)})"
            )


def check_fields(owner: Any, wanted: Sequence[str]) -> None:
    """Hold a dataclass against the fields that are read.

    Raises:
        Unsupported: no dataclass, or a field is missing.
    """
    have = {item.name for item in fields(owner)} if is_dataclass(owner) else set()
    missing = [name for name in wanted if name not in have]
    if missing:
        raise Unsupported(f"{owner.__qualname__} has no {', '.join(missing)}")
