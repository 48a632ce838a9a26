"""Bearer tokens: every path needs one except the two health probes, whether or not a route exists."""

import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from evenkeel.api.problems import problem_response
from evenkeel.errors import InvalidInput

__all__ = ["OPEN_PATHS", "BearerAuth", "Role", "Token", "TokenSet"]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Compared whole: no prefix of another path is ever let through."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Role(StrEnum):
    """What a token may do."""

    READ = "read"
    """Look at everything, change nothing."""
    OPERATE = "operate"
    """Everything."""


@dataclass(frozen=True, slots=True)
class Token:
    """One accepted token. Only its hash is kept, so that no dump or repr shows the secret."""

    name: str
    """Written into the story of what was done with it."""
    role: Role
    sha256: bytes


@dataclass(frozen=True, slots=True)
class TokenSet:
    """All accepted tokens; several at once, so that they can be rotated."""

    tokens: tuple[Token, ...]

    @classmethod
    def parse(cls, text: str) -> "TokenSet":
        """Read a token file: one token a line, blank lines and `#` comments skipped.

        A line is `TOKEN`, `NAME TOKEN` or `NAME ROLE TOKEN` with role `read` or `operate`; a token
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
        raise InvalidInput(f"token file line {number} has {len(words)} words, at most NAME ROLE TOKEN")
    if len(words) > 1:
        name = words[0]
    if len(words) == 3:
        if words[1] not in set(Role):
            raise InvalidInput(f"token file line {number}: role {words[1]} is neither read nor operate")
        role = Role(words[1])
    if len(secret) < 16:
        raise InvalidInput(f"token file line {number}: the token has {len(secret)} characters, needs 16")
    return Token(name, role, hashlib.sha256(secret.encode()).digest())


class BearerAuth:
    """ASGI middleware in front of routing: an unknown path answers 401 before it answers 404."""

    def __init__(self, app: ASGIApp, tokens: TokenSet) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through with its token in `request.state`, or answer 401 or 403."""
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
        if token.role is Role.READ and scope.get("method") not in _READING:
            refusal = problem_response("forbidden", f"token {token.name} may read only", scope["path"])
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["token"] = token
        await self._app(scope, receive, send)
