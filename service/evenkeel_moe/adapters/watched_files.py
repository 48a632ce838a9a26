"""Files that may be replaced while the controller runs."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

_log = structlog.get_logger(__name__)
T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """Reads some files, and reads them again after they have changed.

    If the files are unusable, for instance while a pair is being replaced, what was read before
    stays in use. That is logged once per state of the files.

    Args:
        what: their content; the log says `{what}_changed` or `{what}_not_taken`.
        files: the files; the first names all of them in the log.
        read: reads them; it raises one of `unusable` if they cannot be used.
        unusable: errors that leave in use what was read before.
    """

    def __init__(
        self,
        what: str,
        files: Sequence[Path],
        read: Callable[[], T],
        unusable: tuple[type[Exception], ...] = (OSError,),
    ) -> None:
        self._what, self._files, self._read, self._unusable = what, tuple(files), read, unusable
        self._lock = threading.Lock()
        self._seen: object = None
        """The state of the files when they were last read."""

    def first(self) -> T:
        """Read the files for the first time.

        Raises:
            Exception: as `read` does.
        """
        self._seen = self._state()
        return self._read()

    def changed(self) -> T | None:
        """Read the files again if they have changed; None keeps what was read before.

        It may be called on any thread.
        """
        with self._lock:
            state = self._state()
            if state == self._seen:
                return None
            self._seen = state
            try:
                fresh = self._read()
            except self._unusable as error:
                file = str(self._files[0])
                _log.error(f"{self._what}_not_taken", error=str(error), file=file)
                return None
            if self._state() != state:
                # The files were replaced during the read: the next call reads again.
                self._seen = None
                return None
            _log.info(f"{self._what}_changed", file=str(self._files[0]))
            return fresh

    def _state(self) -> object:
        return tuple(map(_state_of, self._files))


def _state_of(file: Path) -> object:
    try:
        stat = file.stat()
    except OSError as error:
        return error.errno
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
