"""JSON documents field by field, as `evenkeel policy set FIELD=VALUE` names them."""

import json
from collections.abc import Mapping
from typing import Any


def setting(value: Any) -> str:
    """Return the value of a field as `evenkeel policy set FIELD=VALUE` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def leaves(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a document and of the objects in it, in order of their names.

    An object without fields is one itself.
    """
    leaves: dict[str, Any] = {}
    for key, value in sorted(document.items()):
        if isinstance(value, Mapping) and value:
            leaves |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            leaves[key] = value
    return leaves
