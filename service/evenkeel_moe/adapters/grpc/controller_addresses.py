"""Chooses the controller that a rank tries next: its own addresses in turn, or a redirect."""

import hashlib
from collections.abc import Sequence

from evenkeel_moe.adapters.addresses import is_host_port

_MAX_REDIRECTS = 4
"""Redirects in a row; a leader is reached by one, or by two after it has changed."""


def order_of(deployment: str, addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses in the order in which the ranks of a deployment try them.

    Each address is hashed with the deployment. Where one is missing, the order of the others is
    the same, so a deployment moves only if its replica is gone.
    """

    def place(address: str) -> bytes:
        return hashlib.blake2b(f"{deployment} {address}".encode(), digest_size=8).digest()

    return tuple(sorted(addresses, key=place))


class ControllerAddresses:
    """The addresses of the replicas, the redirect to follow, and the address that failed last.

    Args:
        addresses: `host:port` of the replicas, at least one.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._order = tuple(addresses)
        self._tried = 0
        """Number of own addresses tried, from the deployment's first on."""
        self._redirect = ""
        self._redirects = 0
        """Redirects followed since an own address was tried."""
        self._unreachable = ""

    def sort(self, deployment: str) -> None:
        """Put the addresses in the order of a deployment."""
        self._order = order_of(deployment, self._order)

    def next(self) -> str:
        """Return the address to try now."""
        redirect, self._redirect = self._redirect, ""
        if redirect:
            self._redirects += 1
            return redirect
        self._redirects = 0
        self._tried += 1
        return self._order[(self._tried - 1) % len(self._order)]

    def restart(self) -> None:
        """Begin again with the deployment's first address."""
        self._tried = 0

    def failed(self, address: str) -> None:
        """Note that the stream to an address failed."""
        self._unreachable = address

    def redirect(self, answering: str, leader: str) -> bool:
        """Note where the controller at `answering` says the leader is.

        It is not followed if it is the answering controller, if it is no `host:port`, or after some
        redirects in a row: then the rank goes on with its own addresses.

        Returns:
            True if the leader can be tried at once. A leader that died holds its lease for seconds,
            and meanwhile all its ranks would come to the other replicas again and again.
        """
        follow = leader != answering and self._redirects < _MAX_REDIRECTS and is_host_port(leader)
        self._redirect = leader if follow else ""
        return follow and leader != self._unreachable
