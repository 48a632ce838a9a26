"""Reads until when certificates in files are valid, with the standard library alone."""

import ssl
from pathlib import Path

from evenkeel_moe.adapters.certificate_files import server_context

__all__ = ["ca_expiry", "certificate_expiry"]

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL: the end of an expired certificate is asked for too."""
_MOST_FLIGHTS = 10
"""A handshake takes three."""


def certificate_expiry(cert_file: Path, key_file: Path) -> float:
    """Return the end of a server's certificate [Unix s].

    `ssl` shows the fields of a certificate only to the other end of a handshake. So a client in
    this process, which trusts just this certificate, shakes hands with a server that uses it.

    Raises:
        OSError: a file cannot be read, or the certificate cannot be used by a server.
    """
    outer = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outer.check_hostname = False
    outer.load_verify_locations(cert_file)
    outer.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    outer.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = outer.wrap_bio(to_client, to_server)
    server = server_context(cert_file, key_file).wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_MOST_FLIGHTS):
        if all([_shakes(client), _shakes(server)]):
            found = client.getpeercert()
            assert found is not None  # The client verified it.
            return float(ssl.cert_time_to_seconds(str(found["notAfter"])))
    raise OSError(f"{cert_file}: the certificate cannot be used by a server")


def _shakes(end: ssl.SSLObject) -> bool:
    """Go on with the handshake; return True once it is done."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def ca_expiry(ca_file: Path) -> float:
    """Return the earliest end of the CAs in a file [Unix s].

    Raises:
        OSError: the file cannot be read, or contains no CA.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_verify_locations(ca_file)
    ends = [ssl.cert_time_to_seconds(str(one["notAfter"])) for one in context.get_ca_certs()]
    if not ends:
        raise OSError(f"{ca_file} contains no certificate of a CA")
    return float(min(ends))
