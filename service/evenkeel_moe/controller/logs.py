"""Sets up the log: one JSON object per line on standard output.

The level can be changed while the controller runs.
"""

import logging
import sys
from typing import Any, Literal, get_args

import structlog

from evenkeel_moe.errors import InvalidInput

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
_NUMBERS: dict[Level, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_log = structlog.get_logger(__name__)


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
        processors=[*shared, render],
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
