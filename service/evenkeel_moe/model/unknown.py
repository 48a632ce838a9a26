"""The type of a figure that may be unknown."""

from typing import Annotated, Any


class _NullInJson:
    """Says in the API's document that a number may be null: that is how JSON shows NaN."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "null"}]}


NanIfUnknown = Annotated[float, _NullInJson()]
"""A figure that is NaN while it is unknown; null in JSON."""
