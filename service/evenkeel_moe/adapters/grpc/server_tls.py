"""TLS of the rank link: certificates that may be replaced, and the ranks that they name."""

import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from evenkeel_moe.adapters.certificate_files import server_context
from evenkeel_moe.adapters.watched_files import WatchedFiles
from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.ids import DEPLOYMENT_ID
from evenkeel_moe.protocol.messages import RankIdentity

_SCHEME = "evenkeel:"
_GRANT = re.compile(
    rf"evenkeel://(?P<deployment>{DEPLOYMENT_ID})(?:/ranks/(?P<first>\d{{1,6}})(?:-(?P<last>\d{{1,6}}))?)?"
)


@dataclass(frozen=True, slots=True)
class Grant:
    """Ranks of a deployment that a certificate may represent."""

    deployment: str
    first: int = 0
    last: int | None = None
    """The last rank, inclusive; None: every rank from `first` on."""

    def covers(self, deployment: str, rank: int) -> bool:
        """Return True if the rank is one of them."""
        last = rank if self.last is None else self.last
        return deployment == self.deployment and self.first <= rank <= last


def read_grants(names: Iterable[str]) -> tuple[Grant, ...] | None:
    """Return the ranks that a certificate's subject alternative names grant.

    `evenkeel://DEPLOYMENT/ranks/0-7` grants ranks 0 to 7, `/ranks/3` one rank, and
    `evenkeel://DEPLOYMENT` all of them. Names of other schemes are ignored. A name of this scheme
    in another form grants nothing, but the certificate still counts as one that names its ranks: a
    typing error must not grant every rank.

    Returns:
        None when no name has this scheme.
    """
    ours = [name for name in names if name.startswith(_SCHEME)]
    if not ours:
        return None
    grants = []
    for found in filter(None, map(_GRANT.fullmatch, ours)):
        deployment, first, last = found.group("deployment", "first", "last")
        ranks = () if first is None else (int(first), int(last or first))
        grants.append(Grant(deployment, *ranks))
    return tuple(grants)


def check_identity(
    auth: Mapping[Any, Sequence[bytes]], identity: RankIdentity, *, required: bool
) -> bool:
    """Compare a rank's Hello with the certificate of its connection.

    Args:
        auth: gRPC's authentication context of the call; empty without TLS.
        identity: the identity in the Hello.
        required: refuse a certificate that names no ranks.

    Returns:
        True if the certificate names the rank, False if it names none.

    Raises:
        PeerViolation: IDENTITY_REFUSED; the message contains the names of the certificate.
    """
    names = [value.decode("utf-8", "replace") for value in auth.get("peer_uri", ())]
    grants = read_grants(names)
    if grants is None:
        if required:
            raise PeerViolation(
                f"the certificate of rank {identity.rank} of {identity.deployment} names no ranks;"
                f" it needs a URI such as evenkeel://{identity.deployment}/ranks/{identity.rank}",
                Reason.IDENTITY_REFUSED,
            )
        return False
    if not any(grant.covers(identity.deployment, identity.rank) for grant in grants):
        named = ", ".join(name for name in names if name.startswith(_SCHEME))
        raise PeerViolation(
            f"a certificate for {named} cannot speak as rank {identity.rank} of"
            f" {identity.deployment}",
            Reason.IDENTITY_REFUSED,
        )
    return True


def renewed_credentials(
    cert_file: Path, key_file: Path, client_ca_file: Path | None
) -> grpc.ServerCredentials:
    """Return the credentials of a server; each handshake reads the files again if they changed.

    Open streams keep their certificate; `client_authorities` tells when they must not. If the files
    are unusable, for instance while a pair is being replaced, the current certificate stays in use.
    That is logged once per state of the files.

    Raises:
        OSError: a file cannot be read, or the key does not match the certificate.
    """

    def read() -> Any:
        # gRPC accepts the key of another certificate silently, and then fails every handshake.
        context = server_context(cert_file, key_file)
        ca = None
        if client_ca_file is not None:
            context.load_verify_locations(client_ca_file)
            ca = client_ca_file.read_bytes()
        pair = (key_file.read_bytes(), cert_file.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], ca)

    named = [file for file in (cert_file, key_file, client_ca_file) if file is not None]
    files = WatchedFiles("certificate", named, read)
    # gRPC's threads call it at every handshake; None, which its stubs lack, changes nothing.
    changed: Any = files.changed
    return grpc.dynamic_ssl_server_credentials(
        files.first(), changed, require_client_authentication=client_ca_file is not None
    )


def client_authorities(file: Path) -> WatchedFiles[frozenset[bytes]]:
    """Return the CAs that clients may have their certificates from, as their file (PEM) has them.

    `first` raises OSError if the file cannot be read, or holds no certificate.
    """

    def read() -> frozenset[bytes]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_verify_locations(file)
        return frozenset(context.get_ca_certs(binary_form=True))

    return WatchedFiles("certificate", [file], read)
