"""Bearer tokens and their roles.

Every path needs a token, except the two health probes, the console's files and the runbooks.
"""

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol

from evenkeel_moe.errors import InvalidInput

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Open to GET and HEAD. Compared with the whole path, never as a prefix."""

_ADMIN_PATHS = frozenset({"/v1/log-level"})
"""Changes that need role admin whatever their method: an operator must not silence the log."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Role(StrEnum):
    """The permissions of a token. Each role includes the roles before it."""

    READ = "read"
    """Read everything, change nothing."""
    OPERATE = "operate"
    """Plan, approve, cancel, roll back, freeze and set the policy."""
    ADMIN = "admin"
    """Delete and reset, set the log level, and change the limits of every plan."""

    def covers(self, needed: "Role") -> bool:
        """Return True if this role includes `needed`."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


def needed_role(method: str, path: str) -> Role:
    """Return the lowest role for a request. An unknown method counts as a change."""
    if method in _READING:
        return Role.READ
    return Role.ADMIN if method == "DELETE" or path in _ADMIN_PATHS else Role.OPERATE


@dataclass(frozen=True, slots=True)
class Token:
    """One accepted token. It has only the hash, so that no dump or repr shows the secret."""

    name: str
    """Recorded in the story of every plan it changes."""
    role: Role
    sha256: bytes
    until: float | None = None
    """Unix time from which on the token is refused; None has no end."""


class Tokens(Protocol):
    """The accepted tokens."""

    def find(self, secret: str) -> Token | None:
        """Return the token with this secret; None if there is none, or if it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class TokenSet:
    """The tokens of a token file. Several can be valid at once, so that they can be rotated."""

    tokens: tuple[Token, ...]

    @classmethod
    def parse(cls, text: str) -> "TokenSet":
        """Read a token file: one token a line; blank lines and `#` comments are skipped.

        A line is `TOKEN`, `NAME TOKEN` or `NAME ROLE TOKEN`, with role `read`, `operate` or
        `admin`. The default name is `operator`, the default role `operate`. Before the token,
        `until=MOMENT` is its end in ISO 8601, in UTC if it names no zone.

        Raises:
            InvalidInput: a line of another form, a token under 16 characters, or no token at all.
        """
        tokens: list[Token] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split("#", 1)[0].split()
            if words:
                tokens.append(_parse_line(number, words))
        if not tokens:
            raise InvalidInput("the token file has no tokens, so the API could not be used")
        return cls(tuple(tokens))

    def find(self, secret: str) -> Token | None:
        """Return the token with this secret, in the same time whether or not there is one.

        The caller checks `until`.
        """
        digest = hashlib.sha256(secret.encode()).digest()
        found: Token | None = None
        for token in self.tokens:
            if hmac.compare_digest(token.sha256, digest):
                found = token
        return found


def _parse_line(number: int, words: list[str]) -> Token:
    name, role, until = "operator", Role.OPERATE, None
    secret = words[-1]
    if len(words) > 1 and words[-2].startswith("until="):
        until = _moment(number, words[-2].removeprefix("until="))
        words = [*words[:-2], secret]
    if len(words) > 3:
        raise InvalidInput(
            f"token file line {number} has {len(words)} words, at most NAME ROLE until=MOMENT TOKEN"
        )
    if len(words) > 1:
        name = words[0]
    if len(words) == 3:
        if words[1] not in set(Role):
            raise InvalidInput(
                f"token file line {number}: role {words[1]} is not one of {', '.join(Role)}"
            )
        role = Role(words[1])
    if len(secret) < 16:
        raise InvalidInput(
            f"token file line {number}: the token has {len(secret)} characters, needs 16"
        )
    return Token(name, role, hashlib.sha256(secret.encode()).digest(), until)


def _moment(number: int, text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(
            f"token file line {number}: until={text:.40} is no moment such as 2026-12-31T12:00"
        ) from error
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
