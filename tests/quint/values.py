"""Quint's values in Python: they are immutable, so that they can be members of sets."""

import operator
import random
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, cast

Action = Callable[[], bool]


class Record(dict[Any, Any]):
    """A record or a map. It never changes after its creation."""

    _hash: int | None = None

    def __hash__(self) -> int:  # type: ignore[override]
        if self._hash is None:
            self._hash = hash(frozenset(self.items()))
        return self._hash

    def having(self, key: Any, value: Any) -> "Record":
        """Return a copy with one more or another entry."""
        copy = Record(self)
        copy[key] = value
        return copy


def set_key(mapping: Record, key: Any, value: Any) -> Record:
    """Return the map with another value of a key that it has."""
    if key not in mapping:
        raise KeyError(key)
    return mapping.having(key, value)


def record(*pairs: Any) -> Record:
    """Return the record of alternating names and values."""
    return Record(zip(pairs[::2], pairs[1::2], strict=True))


def fold(values: Iterable[Any], start: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return all values combined, from the start value on."""
    return reduce(combine, values, start)


def flatten(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    """Return the union of the sets."""
    return frozenset().union(*sets)


def match(variant: tuple[str, Any], *cases: Any) -> Any:
    """Return what the case of the variant's label says of its value."""
    label, value = variant
    for name, case in zip(cases[::2], cases[1::2], strict=True):
        if name in (label, "_"):
            return case(value)
    raise ValueError(f"no case for {label}")


OPERATORS: dict[str, Callable[..., Any]] = {
    "get": operator.getitem,
    "field": operator.getitem,
    "with": Record.having,
    "put": Record.having,
    "set": set_key,
    "keys": frozenset,
    "Rec": record,
    "Set": lambda *members: frozenset(members),
    "Tup": lambda *members: members,
    "Map": lambda *pairs: Record(pairs),
    "variant": lambda label, value: (label, value),
    "matchVariant": match,
    "contains": operator.contains,
    "union": operator.or_,
    "exclude": operator.sub,
    "size": len,
    "flatten": flatten,
    "fold": fold,
    "exists": lambda values, holds: any(map(holds, values)),
    "forall": lambda values, holds: all(map(holds, values)),
    "filter": lambda values, holds: frozenset(filter(holds, values)),
    "map": lambda values, image: frozenset(map(image, values)),
    "mapBy": lambda keys, value: Record((key, value(key)) for key in keys),
    "to": lambda first, last: frozenset(range(first, last + 1)),
    "eq": operator.eq,
    "neq": operator.ne,
    "not": operator.not_,
    "implies": operator.le,
    "iadd": operator.add,
    "isub": operator.sub,
    "imod": operator.mod,
    "iuminus": operator.neg,
    "igt": operator.gt,
    "igte": operator.ge,
    "ilt": operator.lt,
    "ilte": operator.le,
}
"""Quint's operators without `ite`, `and` and `or`, which Python evaluates as Quint does."""


class EmptyChoiceError(Exception):
    """A value was to be chosen from an empty set, so the action is disabled."""


class Walk:
    """One random run of a model: the state, and the choices of its actions."""

    def __init__(self, seed: int) -> None:
        self.state: Any = None
        self.next: Any = None
        self._random = random.Random(seed)

    def begin(self, seed: int, state: Any) -> None:
        """Begin another run at a state."""
        self.state = state
        self._random.seed(seed)

    def assign(self, value: Any) -> bool:
        """Set the state after this step."""
        self.next = value
        return True

    def one_of(self, values: frozenset[Any]) -> Any:
        """Return one of the values. Raises: EmptyChoiceError."""
        if not values:
            raise EmptyChoiceError
        return self._random.choice(sorted(values, key=repr))

    def any(self, *actions: Action) -> bool:
        """Carry out one of the enabled actions; return False if there is none."""
        for action in self._random.sample(actions, len(actions)):
            if enabled(action):
                return True
        return False

    def step(self, action: Action) -> bool:
        """Carry out the action and return True, or return False if it is disabled."""
        if not enabled(action):
            return False
        self.state = self.next
        return True


def enabled(action: Action) -> bool:
    """Carry out an action; return False if it is disabled."""
    try:
        return action()
    except EmptyChoiceError:
        return False


def from_itf(value: Any) -> Any:
    """Return a value that Quint wrote in the Informal Trace Format."""
    if isinstance(value, list):
        return tuple(from_itf(member) for member in value)
    if not isinstance(value, dict):
        return value
    if "#bigint" in value:
        return int(value["#bigint"])
    if "#set" in value:
        return frozenset(from_itf(member) for member in value["#set"])
    if "#tup" in value:
        return tuple(from_itf(member) for member in value["#tup"])
    if "#map" in value:
        return Record((from_itf(key), from_itf(image)) for key, image in value["#map"])
    fields = cast("dict[str, Any]", value)
    if set(fields) == {"tag", "value"}:
        return fields["tag"], from_itf(fields["value"])
    return Record((name, from_itf(member)) for name, member in fields.items())
