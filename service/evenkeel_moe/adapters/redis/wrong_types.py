"""Sets keys aside that hold a value of another Redis type than ours, or too many names.

Every command on a key of another type fails with WRONGTYPE, for ever. A record like that cannot be
read: it is renamed, counted and named in the log, and the command runs again without it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from evenkeel_moe.adapters.redis.unpacking import UnreadableRecord

T = TypeVar("T")
ASIDE = ":unreadable"
"""Appended to the name of a key that was set aside; the newest one stays."""
ASIDE_MS = 30 * 86_400_000
"""Age at which a key that was set aside is dropped."""
_TYPES = {
    b"hash": (
        *("lease", "written", "epochs", "documents"),
        *("plans", "plan_maps", "plan_story", "plans_open"),
    ),
    b"string": ("term", "probe", "window_total", "window_source"),
    b"zset": ("plan_order", "seen", "window_chunks"),
    b"list": ("replaced_epochs",),
    b"stream": ("decisions", "window"),
}
_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names}


def type_of(key: str) -> bytes | None:
    """Return the Redis type that a key of ours has; None for others, and those set aside."""
    if key.endswith(ASIDE):
        return None
    name = key.rpartition("}:")[2] if "}:" in key else key.rpartition(":")[2]
    return _TYPE_OF.get(name.partition(":")[0])


class WrongTypes:
    """Runs commands, and repeats one that met a key of a wrong type.

    Args:
        client: of the store; its user needs `+type` and `+rename` to set a key aside.
        unreadable: told of each key that was set aside.
    """

    def __init__(self, client: Any, unreadable: UnreadableRecord) -> None:
        self._client = client
        self._unreadable = unreadable

    async def run(self, keys: Sequence[str], command: Callable[[], Awaitable[T]]) -> T:
        """Run a command that uses these keys.

        Raises:
            RedisError: it failed, or a key cannot be set aside.
        """
        try:
            return await command()
        except ResponseError as error:
            if "WRONGTYPE" not in str(error) or not await self._set_aside(keys):
                raise
        return await command()

    async def _set_aside(self, keys: Sequence[str]) -> bool:
        found = False
        for key in keys:
            expected, kind = type_of(key), await self._client.type(key)
            if expected is None or kind in (expected, b"none"):
                continue
            found = True
            await self.set_aside(key, f"it is a {kind.decode()} and not a {expected.decode()}")
        return found

    async def set_aside(self, key: str, why: str) -> None:
        """Rename a key that cannot be used, so that work goes on without what it holds.

        Raises:
            RedisError: it cannot be renamed.
        """
        await self._client.rename(key, key + ASIDE)
        await self._client.pexpire(key + ASIDE, ASIDE_MS)
        self._unreadable("key", key, f"{why}; kept as {key}{ASIDE}")
