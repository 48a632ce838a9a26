"""W3C Trace Context: which trace a call belongs to.

Source: W3C Recommendation Trace Context (level 1), header `traceparent`: version, trace id, parent id, flags in hex.
"""

import re
import secrets

__all__ = ["read_trace_id", "trace_id_or_new"]

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-[0-9a-f]{2}(?P<more>-.*)?"
)


def read_trace_id(traceparent: str | None) -> str | None:
    """The trace id, 32 hex digits; None where there is none or the header cannot be used."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    if not int(found["trace"], 16) or not int(found["parent"], 16):
        return None
    return found["trace"]


def trace_id_or_new(traceparent: str | None) -> str:
    """The caller's trace id, or one made up for a caller that gave none."""
    return read_trace_id(traceparent) or secrets.token_hex(16)
