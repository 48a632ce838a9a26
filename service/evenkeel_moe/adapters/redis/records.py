"""Gives the stores on Redis their keys and timed calls, and skips records that cannot be read."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from evenkeel_moe.adapters.redis.client import Client, Timed, timed_call
from evenkeel_moe.adapters.redis.encoding import Unreadable, UnreadableRecord
from evenkeel_moe.model.ids import DeploymentId

_S = TypeVar("_S")
_T = TypeVar("_T")


class RedisRecords:
    """Records of deployments in a store.

    Args:
        client: returned by `adapters.redis.client.connect`.
        prefix: first part of every key.
        unreadable: told of each record that is skipped because it cannot be read.
        timed: told how long each call took.
    """

    def __init__(
        self, client: Client, prefix: str, unreadable: UnreadableRecord, timed: Timed | None
    ) -> None:
        self._client: Any = client  # The clients share their commands but no typed base.
        self._prefix = prefix
        self._unreadable = unreadable
        self._call = partial(timed_call, timed)

    def _key(self, deployment: DeploymentId, name: str) -> str:
        """Return a key of a deployment; the hash tag keeps all of them together in a Cluster."""
        return f"{self._prefix}:{{{deployment}}}:{name}"

    async def _readable(
        self, kind: str, rows: Sequence[tuple[str, _S]], unpack: Callable[[_S], _T]
    ) -> list[_T]:
        """Return what can be read of stored rows; the others are told as unreadable.

        They are unpacked in a thread, so that leases are renewed meanwhile: a large plan takes
        milliseconds.

        Args:
            kind: of the records.
            rows: the place of each row, and what is stored there.
            unpack: raises Unreadable.
        """
        found = await asyncio.to_thread(lambda: [_or_fault(unpack, row) for _, row in rows])
        for (where, _), one in zip(rows, found, strict=True):
            if isinstance(one, Unreadable):
                self._unreadable(kind, where, str(one))
        return [one for one in found if not isinstance(one, Unreadable)]


def _or_fault(unpack: Callable[[_S], _T], stored: _S) -> _T | Unreadable:
    try:
        return unpack(stored)
    except Unreadable as error:
        return error


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds, at least one."""
    return max(1, round(seconds * 1000))
