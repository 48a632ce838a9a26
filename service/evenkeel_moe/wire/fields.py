"""Message codecs for both directions, built from the fields of the model's dataclasses.

The type of a field says how it is coded and checked, unless the message's codec gives another rule.
Encoding trusts our own values. Decoding checks every field, because a remote party sent it: a value
that cannot be right raises PeerViolation with the numbers.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any, Generic, NewType, TypeVar, get_args, get_type_hints

from google.protobuf.message import Message

from evenkeel_moe.errors import EvenkeelError, PeerViolation, Reason
from evenkeel_moe.model.texts import printable_line

_MAX_TEXT = 4096
_MAX_INT = (1 << 63) - 1
_NUMBERS_AT_ONCE = 1 << 14
"""Numbers that are copied in one call of protobuf, some hundred microseconds: it holds the
interpreter's lock, so the event loop stands still meanwhile."""

ModelT = TypeVar("ModelT")
MessageT = TypeVar("MessageT", bound=Message)


@dataclasses.dataclass(frozen=True, slots=True)
class FieldCodec:
    """The codec of one field."""

    read: Callable[[Any, str], Any]
    """Takes the message received and the field's name. Returns the checked value for the model."""
    write: Callable[[Any], Any] | None = None
    """Takes the model's value and returns the value to send; None if both are the same."""


# --- checks ---------------------------------------------------------------------------------


def check_text(what: str, value: str, most: int = _MAX_TEXT, *, empty: bool = True) -> str:
    """Return the text. Refuse control characters, too long ones, and empty ones if not `empty`."""
    _check_length(what, value, most)
    if not value and not empty:
        raise PeerViolation(f"{what} is empty")
    if printable_line(value) != value:
        raise PeerViolation(f"{what} {value[:80]!a} has control characters or stacked marks")
    return value


def _check_length(what: str, value: str, most: int) -> None:
    if len(value) > most:
        raise PeerViolation(f"{what} has {len(value)} characters, at most {most} are allowed")


def check_count(what: str, value: int, most: int = _MAX_INT, *, least: int = 0) -> int:
    """Return the number. Refuse one above `most`: the wire reaches 2**64, our stores do not."""
    if not least <= value <= most:
        raise PeerViolation(f"{what} is {value}, {least} to {most} are allowed")
    return value


def check_seconds(
    what: str,
    value: float,
    *,
    least: float = 0.0,
    most: float = math.inf,
    above_zero: bool = False,
) -> float:
    """Return the duration. Refuse one that is not finite or outside its bounds."""
    if not math.isfinite(value):
        raise PeerViolation(f"{what} is {value}", Reason.NOT_FINITE)
    if value < least or (above_zero and value == 0):
        bound = "above 0" if above_zero else f"at least {least:g}"
        raise PeerViolation(f"{what} is {value}, must be {bound}")
    if value > most:
        raise PeerViolation(f"{what} is {value}, at most {most:g} is allowed")
    return value


# --- fields ---------------------------------------------------------------------------------


def _checked(check: Callable[..., Any], **bounds: Any) -> FieldCodec:
    """A field whose value passes a check above."""
    return FieldCodec(lambda message, name: check(name, getattr(message, name), **bounds))


def text(most: int = _MAX_TEXT, *, empty: bool = True) -> FieldCodec:
    """A name of at most `most` characters, without control characters."""
    return _checked(check_text, most=most, empty=empty)


def words(most: int = _MAX_TEXT) -> FieldCodec:
    """A text for people. A longer one is shortened when sent.

    Control characters are replaced when it is read: a refusal would lose what went wrong.
    """

    def read(message: Message, name: str) -> str:
        value: str = getattr(message, name)
        _check_length(name, value, most)
        return printable_line(value)

    return FieldCodec(read, lambda value: value[:most])


def count(most: int = _MAX_INT, *, least: int = 0) -> FieldCodec:
    """A number from `least` to `most`."""
    return _checked(check_count, most=most, least=least)


def seconds(**bounds: float) -> FieldCodec:
    """A finite duration within the bounds of `check_seconds`; without any, not negative."""
    return _checked(check_seconds, **bounds)


def enum(members: type[Enum], numbers: Any, prefix: str) -> FieldCodec:
    """An enum whose names on the wire are those of its members behind `prefix`.

    None is sent as 0. A number without a member is refused when it is read.

    Args:
        members: the enum of the model.
        numbers: the generated enum of protobuf; it must have the same names.
        prefix: of its names.
    """
    known = {member: numbers.Value(f"{prefix}_{member.name}") for member in members}
    values = {number: member for member, number in known.items()}
    assert len(values) + 1 == len(numbers.keys()), members

    def read(message: Message, name: str) -> Any:
        number = getattr(message, name)
        if number not in values:
            raise PeerViolation(f"{name} {number} is unknown")
        return values[number]

    return FieldCodec(read, lambda member: 0 if member is None else known[member])


def nested(decode: Callable[[Any], Any], encode: Callable[[Any], Any]) -> FieldCodec:
    """A message inside the message."""
    return FieldCodec(lambda message, name: decode(getattr(message, name)), encode)


def read_reason(message: Message, name: str) -> Reason:
    """Return the Reason that a field names."""
    value: str = getattr(message, name)
    try:
        return Reason(value)
    except ValueError:
        raise PeerViolation(f"{name} {value[:80]!r} is not a known reason") from None


def read_numbers(message: Message, name: str) -> tuple[int, ...]:
    """Return the numbers of a repeated field, which may be millions."""
    numbers: Sequence[int] = getattr(message, name)
    starts = range(0, len(numbers), _NUMBERS_AT_ONCE)
    # A generator, so that other threads get their turn between two parts.
    parts = (numbers[start : start + _NUMBERS_AT_ONCE] for start in starts)
    return tuple(chain.from_iterable(parts))


def optional(field: FieldCodec) -> FieldCodec:
    """A field that is not set when the model has None."""
    write = field.write
    return FieldCodec(
        lambda message, name: field.read(message, name) if message.HasField(name) else None,
        None if write is None else lambda value: None if value is None else write(value),
    )


_CODEC_OF_TYPE: dict[Any, FieldCodec] = {
    bool: FieldCodec(getattr),
    int: count(),
    float: seconds(),
    str: text(),
    tuple[int, ...]: FieldCodec(read_numbers),
    tuple[int, ...] | None: FieldCodec(
        lambda message, name: read_numbers(message, name) or None, lambda values: values or ()
    ),
    Reason: FieldCodec(read_reason),
    Reason | None: FieldCodec(
        lambda message, name: read_reason(message, name) if getattr(message, name) else None,
        lambda reason: reason or "",
    ),
}
"""The codec of a field by its type. Every float of the protocol is finite and not
negative."""


def _codec_of_type(hint: Any, codecs: Mapping[Any, FieldCodec]) -> FieldCodec:
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    if hint not in codecs and type(None) in get_args(hint):
        (of,) = (one for one in get_args(hint) if one is not type(None))
        return optional(_codec_of_type(of, codecs))
    return codecs[hint]


# --- messages -------------------------------------------------------------------------------


class MessageCodec(Generic[ModelT, MessageT]):
    """The codec of one message.

    Args:
        model: dataclass of the model; its fields have the names they have in protobuf.
        message: generated protobuf class.
        check: refuses what no single field shows; called with the decoded value.
        invalid: reason to refuse values that `model` does not take; None gives the model's reason.
        types: codecs of fields of types that are messages themselves.
        fields: codecs of the fields that their type alone does not describe.
    """

    def __init__(
        self,
        model: type[ModelT],
        message: type[MessageT],
        /,
        *,
        check: Callable[[ModelT], None] | None = None,
        invalid: Reason | None = None,
        types: Mapping[Any, FieldCodec] | None = None,
        **fields: FieldCodec,
    ) -> None:
        hints = get_type_hints(model)
        assert fields.keys() <= hints.keys() <= set(message.DESCRIPTOR.fields_by_name), model
        by_type = {**_CODEC_OF_TYPE, **(types or {})}
        codecs = {
            name: fields.get(name) or _codec_of_type(hint, by_type) for name, hint in hints.items()
        }
        self.model = model
        self._message = message
        self._check = check
        self._invalid = invalid
        self._reads = tuple((name, codec.read) for name, codec in codecs.items())
        self._writes = tuple((name, codec.write) for name, codec in codecs.items())

    def encode(self, value: ModelT) -> MessageT:
        """Return the message for a value."""
        return self._message(
            **{
                name: getattr(value, name) if write is None else write(getattr(value, name))
                for name, write in self._writes
            }
        )

    def decode(self, message: MessageT) -> ModelT:
        """Return the value in a message.

        Raises:
            PeerViolation: a field, or the value as a whole, cannot be right.
        """
        values = {name: read(message, name) for name, read in self._reads}
        try:
            value = self.model(**values)
        except EvenkeelError as error:
            raise PeerViolation(str(error), self._invalid or error.reason) from None
        if self._check is not None:
            self._check(value)
        return value
