"""Certificates in files that may be replaced while a server runs."""

import ssl
from pathlib import Path

from evenkeel_moe.adapters.watched_files import WatchedFiles


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
    files = WatchedFiles(
        "certificate", (cert_file, key_file), lambda: server_context(cert_file, key_file)
    )
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
