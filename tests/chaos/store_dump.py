"""Dumps of the store during a run, as raw keys, for the outside judge."""

import base64
import gzip
import json
import time
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.chaos.processes import DEPLOYMENT, StoreNode

__all__ = ["StoreDumps"]

_HASHES = ("lease", "documents", "plans", "plans_open", "epochs")


class StoreDumps:
    """Writes one JSON line for each dump to a gzip file.

    A dump maps each key of the deployment to its value: a hash as an object, all bytes in base64.
    """

    def __init__(self, path: Path) -> None:
        self._file = gzip.open(path, "wt", encoding="utf-8")

    async def add(self, node: StoreNode | None, *, final: bool = False) -> bool:
        """Dump a node, in one transaction and not through its proxy.

        Returns:
            False if there is no node or it does not answer.
        """
        if node is None:
            return False
        client = Redis(port=node.port, socket_timeout=2.0, socket_connect_timeout=1.0)
        try:
            async with client, client.pipeline(transaction=True) as pipe:
                for name in _HASHES:
                    pipe.hgetall(_key(name))
                pipe.get(_key("term"))
                *hashes, term = await pipe.execute()
        except (RedisError, OSError):  # closing may time out as well
            return False
        keys: dict[str, Any] = {
            _key(name): {field.decode(): _text(value) for field, value in found.items()}
            for name, found in zip(_HASHES, hashes, strict=True)
        }
        keys[_key("term")] = None if term is None else _text(term)
        line = {"unix": time.time(), "node": node.name, "final": final, "keys": keys}
        self._file.write(json.dumps(line) + "\n")
        return True

    def close(self) -> None:
        """End the file."""
        self._file.close()


def _key(name: str) -> str:
    return f"evenkeel:{{{DEPLOYMENT}}}:{name}"


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
