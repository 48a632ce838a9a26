"""Reads the trace that a call belongs to from its W3C `traceparent` header.

Source: W3C Recommendation Trace Context (level 1): version, trace id, parent id and flags, in hex.
"""

import re
import secrets

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-[0-9a-f]{2}(?P<more>-.*)?"
)


def read_trace_id(traceparent: str | None) -> str | None:
    """Return the trace id, 32 hex digits; None without a usable header."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    if not int(found["trace"], 16) or not int(found["parent"], 16):
        return None
    return found["trace"]


def trace_id_or_new(traceparent: str | None) -> str:
    """Return the caller's trace id, or a new one if the caller gave none."""
    return read_trace_id(traceparent) or secrets.token_hex(16)
