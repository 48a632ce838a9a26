"""JSON that people read: what fits in a line is in one line."""

import json
from typing import Any

__all__ = ["json_text"]

_WIDTH = 100


def json_text(value: Any) -> str:
    """Return a document with sorted keys, as the text of a file."""
    return _text(value, "", 0) + "\n"


def _text(value: Any, indent: str, taken: int) -> str:
    """Return a value; `taken` characters of its first line are used already."""
    flat = json.dumps(value, sort_keys=True)
    if len(indent) + taken + len(flat) < _WIDTH or not value or not isinstance(value, dict | list):
        return flat
    inner = indent + " "
    if isinstance(value, list):
        lines = [inner + _text(item, inner, 0) for item in value]
    else:
        names = [(json.dumps(name) + ": ", value[name]) for name in sorted(value)]
        lines = [inner + name + _text(item, inner, len(name)) for name, item in names]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n" + ",\n".join(lines) + f"\n{indent}{closing}"
