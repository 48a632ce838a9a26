"""Bearer tokens and their roles: every path needs one except the two health probes, whether or not a route exists."""

import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from evenkeel_moe.api.problems import problem_response
from evenkeel_moe.errors import InvalidInput

__all__ = [
    "OPEN_PATHS",
    "BearerAuth",
    "Role",
    "RoleGate",
    "Token",
    "TokenSet",
    "Tokens",
    "needed_role",
]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Compared whole: no prefix of another path is ever let through."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Role(StrEnum):
    """What a token may do; each role may all that the ones before it may."""

    READ = "read"
    """Look at everything, change nothing."""
    OPERATE = "operate"
    """Plan, approve, cancel, roll back, freeze, set the policy."""
    ADMIN = "admin"
    """Delete and reset, and move the limits that bound every plan."""

    def covers(self, needed: "Role") -> bool:
        """Whether it may do what `needed` may."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


def needed_role(method: str) -> Role:
    """The least role for a method; what is no known reading or deleting is a change."""
    if method in _READING:
        return Role.READ
    return Role.ADMIN if method == "DELETE" else Role.OPERATE


@dataclass(frozen=True, slots=True)
class Token:
    """One accepted token. Only its hash is kept, so that no dump or repr shows the secret."""

    name: str
    """Written into the story of what was done with it."""
    role: Role
    sha256: bytes


class Tokens(Protocol):
    """Who may call."""

    def find(self, secret: str) -> Token | None:
        """The token with this secret; None when there is none."""
        ...


@dataclass(frozen=True, slots=True)
class TokenSet:
    """All accepted tokens; several at once, so that they can be rotated."""

    tokens: tuple[Token, ...]

    @classmethod
    def parse(cls, text: str) -> "TokenSet":
        """Read a token file: one token a line, blank lines and `#` comments skipped.

        A line is `TOKEN`, `NAME TOKEN` or `NAME ROLE TOKEN` with role `read`, `operate` or `admin`; a token
        without a name belongs to `operator`, one without a role may operate.

        Raises:
            InvalidInput: a line of another form, a token under 16 characters, or no token at all.
        """
        tokens: list[Token] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split("#", 1)[0].split()
            if words:
                tokens.append(_parse_line(number, words))
        if not tokens:
            raise InvalidInput("the token file holds no token, so nobody could use the API")
        return cls(tuple(tokens))

    def find(self, secret: str) -> Token | None:
        """The token with this secret; takes the same time wherever it stands, or if it is none."""
        digest = hashlib.sha256(secret.encode()).digest()
        found: Token | None = None
        for token in self.tokens:
            if hmac.compare_digest(token.sha256, digest):
                found = token
        return found


def _parse_line(number: int, words: list[str]) -> Token:
    name, role, secret = "operator", Role.OPERATE, words[-1]
    if len(words) > 3:
        raise InvalidInput(
            f"token file line {number} has {len(words)} words, at most NAME ROLE TOKEN"
        )
    if len(words) > 1:
        name = words[0]
    if len(words) == 3:
        if words[1] not in set(Role):
            raise InvalidInput(
                f"token file line {number}: role {words[1]} is none of {', '.join(Role)}"
            )
        role = Role(words[1])
    if len(secret) < 16:
        raise InvalidInput(
            f"token file line {number}: the token has {len(secret)} characters, needs 16"
        )
    return Token(name, role, hashlib.sha256(secret.encode()).digest())


class BearerAuth:
    """ASGI middleware in front of routing: an unknown path answers 401 before it answers 404."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through with its token in `request.state`, or answer 401."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            await self._app(scope, receive, send)
            return
        scheme, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        token = self._tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            refusal = problem_response(
                "unauthorized",
                "send a known token as `Authorization: Bearer TOKEN`",
                scope["path"],
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["token"] = token
        await self._app(scope, receive, send)


class RoleGate:
    """ASGI middleware behind `BearerAuth`: 403 where the token's role is too low for the method."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through or answer 403."""
        token: Token | None = scope.get("state", {}).get("token")
        if token is not None and not token.role.covers(needed := needed_role(scope["method"])):
            refusal = problem_response(
                "forbidden",
                f"{scope['method']} needs role {needed}, token {token.name} has {token.role}",
                scope["path"],
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)
