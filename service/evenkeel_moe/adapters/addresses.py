"""Formats network addresses, and says which settings choose them."""


def host_port(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address gets brackets (RFC 3986, section 3.2.2).

    Without brackets the port could not be distinguished.
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def chosen_by(section: str) -> str:
    """Return the words that end the error about an address that cannot be used."""
    variable = f"EVENKEEL_{section.upper()}__"
    return (
        f"; {section}.host and {section}.port choose another address"
        f" ({variable}HOST, {variable}PORT)"
    )
