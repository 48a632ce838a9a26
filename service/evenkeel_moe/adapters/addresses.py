"""Addresses as text."""

__all__ = ["host_port"]


def host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets (RFC 3986, section 3.2.2): without them nobody can tell the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
