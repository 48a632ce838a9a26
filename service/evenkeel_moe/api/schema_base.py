"""Base classes and field types of request and response bodies."""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, computed_field, model_validator

from evenkeel_moe.api.words.reasons import sentence


def plain(value: Any) -> Any:
    """Return the JSON form of a value: numpy scalars become numbers, and NaN and infinity null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("Input should be text")
    return value


PLAIN = BeforeValidator(plain)
"""Applies `plain` to a field."""
Number = Annotated[float | None, PLAIN]
"""Null if the number is not finite."""
JsonObject = Annotated[dict[str, Any], PLAIN]
WORD = BeforeValidator(_word)
"""Marks a field that is an enumeration: it refuses all but text before the look-up, which makes a
call for each level of nesting of a list."""
TextOrNull = Annotated[str | None, BeforeValidator(lambda text: text or None)]
"""Null if the text is empty."""


_MOST_UNKNOWN = 16
"""Unknown fields of an object that are named one by one."""


class RequestBody(BaseModel):
    """A request body. An unknown field is an error.

    A list of it stops at its first wrong element: a large body of wrong types would otherwise make
    an error for each.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def refuse_many_unknown_fields(cls, value: Any) -> Any:
        """Refuse an object with far more fields than there are, before each is an error."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + _MOST_UNKNOWN:
            raise ValueError(f"{len(value)} fields, known are {', '.join(cls.model_fields)}")
        return value


def _without_defaults(schema: dict[str, Any]) -> None:
    for one in schema["properties"].values():
        one.pop("default", None)


class ChangeBody(RequestBody):
    """A request body of changes: what it does not name stays as it is.

    Its schema has no defaults, which a generated client might send.
    """

    model_config = ConfigDict(json_schema_extra=_without_defaults)


class ResponseBody(BaseModel):
    """A response body."""

    model_config = ConfigDict(from_attributes=True, use_attribute_docstrings=True)


class ReasonedBody(ResponseBody):
    """A response body with a reason of the closed list."""

    reason: str

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reason_text(self) -> str:
        """The reason as a sentence."""
        return sentence(self.reason)


class CostModelOut(ResponseBody):
    """The origin of a cost model's numbers."""

    source: str
    """tokens, derived, profiled or measured."""
    detail: str
    """A device, a file, the age of a profile, or the reason that nothing better is known."""
    unit: str
    """The unit of predicted times: s or tokens."""
    fit_error: Number
    """Mean error of a fit as a share of the time; null where nothing was fitted."""
    words: str
    """The origin as a phrase."""
