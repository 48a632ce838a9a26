"""Describes what a setting may be, for messages about wrong values and for docs/settings.md."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from evenkeel_moe.settings import Settings

_BOUNDS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "below"),
)
_KINDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "object": "numbers by name",
    "null": "none",
}
THRESHOLD: Mapping[str, Any] = {"type": "number", "minimum": 0}
"""Schema of a threshold of the gates, which has its bounds in `GateSettings`."""


def form_of(schema: Mapping[str, Any]) -> str:
    """Return type and bounds of a value in words, by its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(form_of(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{name}`" for name in schema["enum"])
    kind = "path" if schema.get("format") == "path" else _KINDS[schema["type"]]
    bounds = [f"{words} {schema[key]:,}" for key, words in _BOUNDS if key in schema]
    return ", ".join((kind, *bounds))


def number_form(path: Sequence[str]) -> str | None:
    """Return type and bounds of the setting of this path in words; None if it is no number."""
    schema = _schema()
    found: Mapping[str, Any] = schema
    for name in path:
        reference = found.get("$ref", "").rsplit("/", 1)[-1]
        found = schema["$defs"].get(reference, found)
        if found.get("type") == "object" and "properties" not in found:
            found = THRESHOLD
        else:
            found = found.get("properties", {}).get(name, {})
    return form_of(found) if found.get("type") in ("integer", "number") else None


@cache
def _schema() -> dict[str, Any]:
    return TypeAdapter(Settings).json_schema()
