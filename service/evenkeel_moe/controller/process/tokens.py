"""Reads the token file, and reads it again when it changes while the controller runs."""

import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog

from evenkeel_moe.adapters.private_files import read_own, write_private
from evenkeel_moe.adapters.watched_files import WatchedFiles
from evenkeel_moe.api.auth import Token, TokenSet
from evenkeel_moe.errors import InvalidInput

FIRST_TOKEN_LASTS = timedelta(days=30)
"""Long enough for a trial. After that the operators need a token file of their own."""

_log = structlog.get_logger(__name__)


def write_first_token(path: Path, unix: float) -> bool:
    """Write a file with one new token of role admin, unless there is a file that is not empty.

    The token ends by itself, so that nobody forgets to replace it.

    Returns:
        True if the file was written. It appears whole or not at all: an empty one, as a full disk
        may leave it, would block every later start.

    Raises:
        InvalidInput: the file there is another user's, or every user can write it.
        OSError, UnicodeError: the file cannot be read or written.
    """
    if os.path.lexists(path) and read_own(path):
        return False
    until = datetime.fromtimestamp(unix, UTC) + FIRST_TOKEN_LASTS
    ends = until.isoformat(timespec="seconds")
    write_private(path, f"admin admin until={ends} {secrets.token_urlsafe(32)}\n")
    return True


class TokenFile:
    """`api.auth.Tokens` from a file, so that tokens can be changed without a restart.

    If a changed file cannot be used, the tokens stay as they were and one error is logged.

    Args:
        path: the file.
        unix: tells the time, because tokens may end.
        own: the file is in the data folder, where other users may write, so only one of this user
            or of root is read. A file that the operator named may be a link.

    Raises:
        InvalidInput: at the first reading the file cannot be read, or holds no tokens.
    """

    def __init__(self, path: Path, unix: Callable[[], float], *, own: bool = False) -> None:
        self._path = path
        self._unix = unix
        self._own = own
        self._ended: set[bytes] = set()
        unusable = (OSError, UnicodeError, InvalidInput)
        self._file = WatchedFiles("tokens", [path], self._read, unusable)
        try:
            self._tokens = self._file.first()
        except (OSError, UnicodeError) as error:
            raise InvalidInput(f"cannot read the token file {path}: {error}") from error

    def find(self, secret: str) -> Token | None:
        """Return the token with this secret, as the file is now; None if there is none.

        A token that has ended is none; the log names it once.
        """
        self._tokens = self._file.changed() or self._tokens
        token = self._tokens.find(secret)
        if token is None or token.until is None or self._unix() < token.until:
            return token
        if token.sha256 not in self._ended:
            self._ended.add(token.sha256)
            _log.warning("token_ended", name=token.name, file=str(self._path))
        return None

    def _read(self) -> TokenSet:
        path = self._path
        return TokenSet.parse(read_own(path) if self._own else path.read_text(encoding="utf-8"))
