"""Reads errors of a rank's calls: their words, and the wait that an overloaded server asks for."""

import grpc


def asked_to_wait(error: BaseException) -> float | None:
    """Return the wait that an overloaded server asks for [s]; None if it asks for none.

    This is twice the hint, because the caller may wait for only half of it.
    """
    if (
        not isinstance(error, grpc.aio.AioRpcError)
        or error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED
    ):
        return None
    hints = [
        value for name, value in error.trailing_metadata() or () if name == "grpc-retry-pushback-ms"
    ]
    text = str(hints[0]) if hints else ""
    return 2 * min(int(text), 60_000) / 1000 if text.isdecimal() else None


def brief(error: BaseException) -> str:
    """Return the error in one line, with the status of the call."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return repr(error)
