"""Formats network addresses, and says which settings choose them."""

import re

_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")


def host_port(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address gets brackets (RFC 3986, section 3.2.2).

    Without brackets the port could not be distinguished.
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host_port(address: str) -> bool:
    """Return True if a text is `host:port`, with brackets around an IPv6 address."""
    return _HOST_PORT.fullmatch(address) is not None


def host_of(peer: str) -> str:
    """Return gRPC's name of a peer without its port."""
    return peer.rpartition(":")[0]


def chosen_by(section: str) -> str:
    """Return the words that end the error about an address that cannot be used."""
    variable = f"EVENKEEL_{section.upper()}__"
    return (
        f"; {section}.host and {section}.port choose another address"
        f" ({variable}HOST, {variable}PORT)"
    )
