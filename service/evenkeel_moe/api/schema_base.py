"""Base classes and field types of request and response bodies."""

import ast
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_type_hints

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    computed_field,
    create_model,
    model_validator,
)

from evenkeel_moe.api.words.reasons import sentence
from evenkeel_moe.model.cost import CostBasis


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


B = TypeVar("B", bound=BaseModel)

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


def shows(
    value: type, *properties: str, without: str = "", nullable: bool = False
) -> Callable[[type[B]], type[B]]:
    """Add the fields of a dataclass, and some of its properties, to the body that shows it.

    A field that the body declares itself stays as it is. The docstrings are the descriptions.

    Args:
        value: the dataclass.
        properties: names of those that are shown too.
        without: names of the fields that are not shown.
        nullable: every field may be null.
    """
    types, texts = get_type_hints(value, include_extras=True), _docstrings(value)
    for name in properties:
        read = getattr(value, name).fget
        types[name], texts[name] = get_type_hints(read)["return"], read.__doc__
    hidden = set(without.split())
    names = [field.name for field in fields(value) if field.name not in hidden] + list(properties)

    def added(body: type[B]) -> type[B]:
        declared: dict[str, Any] = {
            name: (types[name] | None if nullable else types[name], Field(description=texts[name]))
            for name in names
            if name not in body.model_fields
        }
        return create_model(
            body.__name__,
            __base__=body,
            __doc__=body.__doc__,
            __module__=body.__module__,
            **declared,
        )

    return added


def _docstrings(value: type) -> defaultdict[str, str | None]:
    """Return the docstrings of the fields of a class, as JSON calls what they name."""
    declared = ast.parse(inspect.getsource(value)).body[0]
    assert isinstance(declared, ast.ClassDef)
    found: defaultdict[str, str | None] = defaultdict(lambda: None)
    found |= {
        field.target.id: re.sub(r"\bNone\b", _null, inspect.cleandoc(text.value.value))
        for field, text in pairwise(declared.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }
    return found


def _null(none: re.Match[str]) -> str:
    return "null" if none.start() else "Null"


def shown(body: type[B], *values: Any, **more: Any) -> B:
    """Return a body of the attributes of values, of later ones first, and of what is named."""
    found: dict[str, Any] = {}
    for name in body.model_fields.keys() - more.keys():
        owner = next((value for value in reversed(values) if hasattr(type(value), name)), None)
        if owner is not None:
            found[name] = getattr(owner, name)
    return body.model_validate(found | more)


@shows(CostBasis, "words")
class CostModelOut(ResponseBody):
    """The origin of a cost model's numbers."""
