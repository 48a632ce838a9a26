"""Connections to Redis or Valkey: URLs, credentials, and the conversion of errors."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, Sentinel
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)

from evenkeel_moe.errors import InvalidInput, Unavailable

Client = Redis | RedisCluster

_ERRORS = (RedisError, RedisClusterException)
"""The errors of redis-py; that of a Cluster without a node in reach is no RedisError."""

_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
_OPTIONS = (
    *("db", "username", "password", "client_name", "max_connections"),
    *("socket_timeout", "socket_connect_timeout", "socket_keepalive", "health_check_interval"),
    *(*_TLS_OPTIONS, "ssl_ca_path", "ssl_ca_data", "ssl_cert_reqs", "ssl_ciphers", "ssl_password"),
)
"""Options of a URL without Sentinels. redis-py takes any other too, and fails when it connects."""


@dataclass(frozen=True, slots=True)
class SentinelLogin:
    """Credentials for the Sentinels, which have other users than the store."""

    username: str = ""
    password: str = field(default="", repr=False)


class _WaitingSentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the primary that Sentinels name; a call waits for a free one."""


def connect(
    url: str,
    *,
    timeout_s: float,
    connections: int = 100,
    password: str | None = None,
    sentinel: SentinelLogin | None = None,
) -> Client:
    """Return a client of the store; it connects later.

    Args:
        url: one of these forms:
            `redis://`, `rediss://` (TLS; `?ssl_ca_certs=FILE` names the CA) or `unix://`, as in
            redis-py;
            `redis+sentinel://[user:password@]host:port[,host:port]/master-name[/db]` or
            `rediss+sentinel://...`, see `_sentinel`;
            `redis+cluster://host:port` or `rediss+cluster://host:port`.
        timeout_s: timeout of a connection attempt and of each answer.
        connections: how many there may be; while all are in use, further calls wait for one. A
            Cluster has no such limit, because its client would refuse calls instead.
        password: overrides the password in the URL.
        sentinel: overrides `sentinel_username` and `sentinel_password` in the URL.

    Raises:
        InvalidInput: the URL has another form. The message does not contain its password.
    """
    # One retry replaces a connection the server closed while idle; more would hide an outage.
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 1),
    }
    waiting: dict[str, Any] = {"max_connections": connections, "timeout": None}
    given = {} if password is None else {"password": password}
    scheme = url.partition("://")[0] if "://" in url else ""
    try:
        if scheme in ("redis", "rediss", "unix"):
            _check_options(url)
            # The address of a server that answers READONLY belongs to another primary: connect
            # again. The clients of Sentinel and Cluster do this themselves.
            options["retry_on_error"] = [ReadOnlyError]
            pool = BlockingConnectionPool.from_url(url, **waiting, **options)
            pool.connection_kwargs |= given  # redis-py would prefer the one in the URL.
            # It refuses the values of options now, not when it connects.
            pool.connection_class(**pool.connection_kwargs)
            return Redis.from_pool(pool)
        if scheme in ("redis+cluster", "rediss+cluster"):
            _check_options(url)
            options |= {"max_connections": sys.maxsize, "ssl": scheme == "rediss+cluster"}
            options |= parse_url(url.replace("+cluster", "", 1)) | given
            options.pop("connection_class", None)
            return RedisCluster(**options)
        if scheme in ("redis+sentinel", "rediss+sentinel"):
            return _sentinel(url, options | given, waiting, sentinel or SentinelLogin())
    except (TypeError, ValueError, *_ERRORS) as error:
        raise InvalidInput(f"{scheme}:// URL cannot be used: {error}") from None
    raise InvalidInput(
        f"store URL has scheme {scheme!r}; known are redis, rediss, unix, redis+sentinel,"
        " rediss+sentinel, redis+cluster, rediss+cluster"
    )


def _check_options(url: str) -> None:
    """Refuse options that are unknown or would have no effect, and a database that is no number.

    Raises:
        ValueError: says which.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    _require_known(query, _OPTIONS)
    if not parts.scheme.startswith("rediss") and any(name.startswith("ssl_") for name in query):
        raise ValueError(f"ssl_... without TLS: it needs {parts.scheme.replace('redis', 'rediss')}")
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not database.isdecimal():
        raise ValueError(f"database {database!r} is no number")


def _require_known(query: Mapping[str, str], known: Sequence[str]) -> None:
    if unknown := sorted(set(query) - set(known)):
        raise ValueError(f"unknown options {', '.join(unknown)}; known are {', '.join(known)}")


def _sentinel(
    url: str, options: dict[str, Any], waiting: dict[str, Any], login: SentinelLogin
) -> Redis:
    """Return a client that asks Sentinels for the address of the primary.

    The credentials before the hosts and the options `ssl_...` are for the store; options that begin
    with `sentinel_` are for the Sentinels. `rediss+sentinel` uses TLS for both, with the same files
    unless `sentinel_ssl_...` names others. `sentinel_ssl=true` or `false` sets TLS for the
    Sentinels alone.
    """
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    path = [piece for piece in parts.path.split("/") if piece]
    if not hosts or not 1 <= len(path) <= 2:
        raise ValueError("it must read redis+sentinel://host:port[,host:port]/master-name[/db]")
    nodes = []
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        nodes.append((name.strip("[]"), int(port)))
    query = _sentinel_query(parts.query)
    if credentials:
        user, _, password = credentials.partition(":")
        options = {
            "username": unquote(user) or None,
            "password": unquote(password) or None,
        } | options
    store_tls = parts.scheme == "rediss+sentinel"
    options |= _tls(query, "") if store_tls else {}
    theirs: dict[str, Any] = {
        "username": login.username or query.get("sentinel_username"),
        "password": login.password or query.get("sentinel_password"),
        # By default redis-py would retry a Sentinel for seconds before it asks the next.
        **{name: options[name] for name in ("socket_timeout", "socket_connect_timeout", "retry")},
        # Each connection to the store may ask one for the primary at the same time.
        "max_connections": waiting["max_connections"],
    }
    sentinel_tls = _true(query.get("sentinel_ssl", str(store_tls)))
    if sentinel_tls:
        theirs |= _tls(query, "") | _tls(query, "sentinel_")
    for tls, prefix, needed in (
        (store_tls or sentinel_tls, "ssl_", "rediss+sentinel"),
        (sentinel_tls, "sentinel_ssl_", "sentinel_ssl=true"),
    ):
        if not tls and any(name.startswith(prefix) for name in query):
            raise ValueError(f"{prefix}... without TLS: it needs {needed}")
    sentinels = Sentinel(nodes, sentinel_kwargs=theirs)  # type: ignore[no-untyped-call]
    options |= {"db": int(path[1]) if len(path) == 2 else 0, **waiting}
    master: Redis = sentinels.master_for(
        path[0], connection_pool_class=_WaitingSentinelPool, **options
    )
    return master


def _sentinel_query(query: str) -> dict[str, str]:
    """Return the URL's options; an unknown one is an error, because ignoring it may mean no TLS."""
    found = dict(parse_qsl(query, keep_blank_values=True))
    known = [prefix + name for prefix in ("", "sentinel_") for name in _TLS_OPTIONS]
    known += ["sentinel_ssl", "sentinel_username", "sentinel_password"]
    _require_known(found, known)
    return found


def _tls(query: dict[str, str], prefix: str) -> dict[str, Any]:
    """Return the TLS options of the store or of the Sentinels in the form of redis-py."""
    named: dict[str, Any] = {
        name: query[prefix + name] for name in _TLS_OPTIONS if prefix + name in query
    }
    if "ssl_check_hostname" in named:
        named["ssl_check_hostname"] = _true(named["ssl_check_hostname"])
    return {"ssl": True, **named}


def _true(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


async def disconnect(client: Client) -> None:
    """Close all connections of a client, including those to Sentinels."""
    await client.aclose()
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in getattr(manager, "sentinels", ()):
        await sentinel.aclose()


async def eviction_policies(client: Client) -> frozenset[str] | None:
    """Return `maxmemory-policy` of the server, or of every primary of a Cluster.

    Returns:
        None if the user has no right to ask, or the service hides the policy.

    Raises:
        Unavailable: no answer.
    """
    where = {"target_nodes": RedisCluster.PRIMARIES} if isinstance(client, RedisCluster) else {}
    with store_errors("reading maxmemory-policy"):
        try:
            answer: Any = await client.info("memory", **where)
        except NoPermissionError:
            return None
    infos = [answer] if "used_memory" in answer else answer.values()
    # Services that hide the policy answer without this field.
    found = [info.get("maxmemory_policy") for info in infos]
    return None if None in found else frozenset(map(str, found))


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn every failure of the store into Unavailable, and preserve cancellations.

    redis-py sends with `asyncio.wait_for`, which before Python 3.12 loses a cancellation that
    arrives together with the result. The task would then never end, nor would the process.

    Raises:
        Unavailable: the store failed.
        CancelledError: the task was cancelled meanwhile.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except (*_ERRORS, OSError, TimeoutError) as error:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise Unavailable(f"store: {what} failed: {type(error).__name__}: {error}") from error
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


Timed = Callable[[str, float], object]
"""Told the operation (`lease`, `read`, `write` or `ping`) and the seconds that a call took."""


@contextmanager
def timed_call(timed: Timed | None, operation: str, what: str) -> Iterator[None]:
    """Do as `store_errors`, and tell how long the call took, also if it failed."""
    began = time.monotonic()
    try:
        with store_errors(what):
            yield
    finally:
        if timed is not None:
            timed(operation, time.monotonic() - began)
