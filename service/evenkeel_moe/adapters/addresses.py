"""Formats network addresses."""


def host_port(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address gets brackets (RFC 3986, section 3.2.2).

    Without brackets the port could not be distinguished.
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
