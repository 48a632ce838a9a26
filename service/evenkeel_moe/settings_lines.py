"""Finds the line of a setting in a settings file, for messages about wrong settings."""

import re
from collections.abc import Sequence

import yaml

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=")


class SettingLines:
    """The lines of the settings in a file.

    Args:
        text: content of the file.
        suffix: `.toml`, or one of YAML.
    """

    def __init__(self, text: str, suffix: str) -> None:
        self._lines = _toml_lines(text) if suffix == ".toml" else _yaml_lines(text)

    def of(self, path: Sequence[str], *, exact: bool = False) -> int | None:
        """Return the line, counted from 1, of a setting or of the section that contains it.

        Args:
            path: section and names below it.
            exact: True to find only the setting itself, not a section that contains it.

        Returns:
            None if it is not in the file.
        """
        wanted = tuple(path)
        for length in range(len(wanted), len(wanted) - 1 if exact else 0, -1):
            if wanted[:length] in self._lines:
                return self._lines[wanted[:length]]
        return None


def _yaml_lines(text: str) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return found
    waiting: list[tuple[tuple[str, ...], yaml.Node | None]] = [((), node)]
    seen: set[int] = set()
    while waiting:
        path, node = waiting.pop()
        # An alias may lead back to a node above it.
        if not isinstance(node, yaml.MappingNode) or id(node) in seen:
            continue
        seen.add(id(node))
        for key, value in node.value:
            below = (*path, str(key.value))
            found.setdefault(below, key.start_mark.line + 1)
            waiting.append((below, value))
    return found


def _toml_lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the lines of headers and keys; keys inside inline tables count as their table."""
    found: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header is not None:
            section = path = _parts(header[1])
        elif key is not None:
            path = section + _parts(key[1])
        else:
            continue
        found.setdefault(path[:1], number)
        found.setdefault(path, number)
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip(" \"'") for part in dotted.split("."))
