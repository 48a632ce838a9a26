"""Sets up the log: one JSON object per line on standard output.

The level can be changed while the controller runs.
"""

import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Literal, get_args

import structlog

from evenkeel_moe.errors import InvalidInput

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
_NUMBERS: dict[Level, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_CAUSED_BY_PEERS = (
    "body_refused",
    "connection_ended",
    "connection_evicted",
    "deployment_refused",
    "grpc_core",
    "hello_refused",
    "rank_refused",
    "rank_silent",
    "rank_stopped",
    "rank_too_fast",
    "rank_too_slow",
    "rank_trouble",
    "rank_violation",
    "request_failed_by_defect",
    "silent_streams_ended",
    "too_many_streams",
    "Exception in ASGI application\n",
    "Invalid HTTP request received.",
    "No supported WebSocket library detected.",
    "Unsupported upgrade request.",
)
"""Beginnings of lines that whoever reaches a port can cause as often as he likes."""
_log = structlog.get_logger(__name__)


class LogLimit:
    """A structlog processor that keeps one line a second for each cause that peers control.

    The next line of the same cause says how many were left out.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def __call__(
        self, _logger: object, _method: str, line: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Return the line, or drop it.

        Raises:
            structlog.DropEvent: another line of this cause was written less than a second ago.
        """
        event = str(line.get("event"))
        if not event.startswith(_CAUSED_BY_PEERS):
            return line
        cause, now = (event, str(line.get("reason", ""))), self._now()
        if now < self._next.get(cause, 0.0):
            self._left_out[cause] = self._left_out.get(cause, 0) + 1
            raise structlog.DropEvent
        self._next[cause] = now + 1.0
        if left_out := self._left_out.pop(cause, 0):
            line["left_out"] = left_out
        return line

    def keeps(self, record: logging.LogRecord) -> bool:
        """Filter the lines of libraries in the same way."""
        try:
            self(None, "", {"event": record.msg})
        except structlog.DropEvent:
            return False
        return True


_limit = LogLimit()


def configure_logs(level: Level) -> None:
    """Set up our own log and that of the standard library, which libraries write warnings to."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        # Without local variables: they hold placements, loads and perhaps secrets.
        structlog.processors.format_exc_info,
    ]
    render = structlog.processors.JSONRenderer(default=str)
    structlog.configure(
        processors=[_limit, *shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(_NUMBERS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                *shared,
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    handler.addFilter(_limit.keeps)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(logging.WARNING, _NUMBERS[level]))


def audit_line(**fields: Any) -> None:
    """Write a line `audit`, whatever the log level is: nobody may silence the record of changes."""
    every: Any = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(0))
    every.info("audit", **fields)


def log_level() -> Level:
    """Return the present log level."""
    number = structlog.get_logger().bind().get_effective_level()
    return next((level for level in LEVELS if number <= _NUMBERS[level]), LEVELS[-1])


def set_log_level(level: str, by: str) -> None:
    """Set the log level of this process until the next start.

    Raises:
        InvalidInput: there is no such level.
    """
    if level not in LEVELS:
        raise InvalidInput(f"log level {level!r} is none of {', '.join(LEVELS)}")
    before = log_level()
    words = {"before": before, "now": level, "by": by}
    quieter = _NUMBERS[level] > _NUMBERS[before]
    # Logged at the more verbose level: a reader must see why the log falls silent.
    if quieter:
        _log.warning("log_level_changed", **words)
    configure_logs(level)
    if not quieter:
        _log.warning("log_level_changed", **words)
