"""Certificates in files that may be replaced while a server runs."""

import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

_log = structlog.get_logger(__name__)
T = TypeVar("T")


class CertificateFiles(Generic[T]):
    """What is read from some files, and again after they have changed.

    If the files are unusable, for instance while a pair is being replaced, what was read before
    stays in use. That is logged once per state of the files.

    Args:
        files: the files; the first names all of them in the log.
        read: reads them; it raises OSError if they cannot be used.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        self._files, self._read = tuple(files), read
        self._lock = threading.Lock()
        self._seen: object = None
        """The state of the files when they were last read."""

    def first(self) -> T:
        """Read the files for the first time.

        Raises:
            OSError: a file cannot be read, or the key does not match the certificate.
        """
        self._seen = self._state()
        return self._read()

    def changed(self) -> T | None:
        """Read the files again if they have changed; None keeps what was read before.

        It may be called on any thread, for each handshake.
        """
        with self._lock:
            state = self._state()
            if state == self._seen:
                return None
            self._seen = state
            try:
                fresh = self._read()
            except OSError as error:
                _log.error("certificate_not_taken", error=str(error), file=str(self._files[0]))
                return None
            if self._state() != state:
                # The files were replaced during the read: the next handshake reads again.
                self._seen = None
                return None
            _log.info("certificate_changed", file=str(self._files[0]))
            return fresh

    def _state(self) -> object:
        return tuple(map(_state_of, self._files))


def _state_of(file: Path) -> object:
    try:
        stat = file.stat()
    except OSError as error:
        return error.errno
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def server_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """Return the context of a server with this certificate chain and private key (PEM).

    Raises:
        OSError: a file cannot be read, or the key does not match the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A key with a passphrase would ask for it on the terminal.
    context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
    return context


def _no_passphrase() -> str:
    raise OSError("the private key has a passphrase; keys must be stored without one")


def renewed_server_context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """Return a context whose handshakes use the newest usable certificate in the files.

    Open connections keep the certificate that they began with.

    Raises:
        OSError: a file cannot be read, or the key does not match the certificate.
    """
    files = CertificateFiles((cert_file, key_file), lambda: server_context(cert_file, key_file))
    outer = files.first()
    newest = outer

    def at_handshake(
        connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        nonlocal newest
        newest = files.changed() or newest
        if newest is not outer:
            connection.context = newest

    # OpenSSL calls it for every handshake, also if the client names no server.
    outer.sni_callback = at_handshake
    return outer
