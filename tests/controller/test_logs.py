"""All logs are one JSON object per line; the level can change while the process runs."""

import json
import logging

import pytest
import structlog

from evenkeel_moe.controller.logs import (
    LEVELS,
    LogLimit,
    configure_logs,
    log_level,
    set_log_level,
)
from evenkeel_moe.errors import InvalidInput

_ours = structlog.get_logger("ours")


@pytest.fixture
def rows(capsys):
    """Return a function that reads the rows on standard output; restore both logs afterwards."""
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    yield lambda: [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    root.handlers, root.level = handlers, level
    structlog.configure(**before)


def test_both_logs_are_one_object_a_line_with_time_level_and_trace(rows):
    configure_logs("info")
    with structlog.contextvars.bound_contextvars(trace_id="t"):
        _ours.info("something", deployment="demo", plan_id="p", epoch=3)
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("a.library").exception("it %s", "broke")
    logging.getLogger("a.library").error("elsewhere", extra={"trace_id": "other"})
    logging.getLogger("a.library").info("nobody wants to know")
    ours, theirs, elsewhere = rows()
    assert elsewhere["trace_id"] == "other"
    assert ours == {
        "event": "something", "deployment": "demo", "plan_id": "p", "epoch": 3, "trace_id": "t",
        "level": "info", "ts": ours["ts"],
    }  # fmt: skip
    assert ours["ts"].endswith("Z")
    assert (theirs["event"], theirs["logger"], theirs["level"]) == (
        "it broke",
        "a.library",
        "error",
    )
    assert theirs["trace_id"] == "t"
    assert "two\nlines" in theirs["exception"]


def test_the_level_changes_at_once_for_loggers_that_exist(rows):
    for level in LEVELS:
        configure_logs(level)
        assert log_level() == level
    configure_logs("info")
    _ours.debug("before")
    set_log_level("debug", "alice")
    _ours.debug("while")
    set_log_level("error", "alice")
    _ours.warning("after")
    with pytest.raises(InvalidInput, match="debug, info, warning, error"):
        set_log_level("loud", "alice")
    assert log_level() == "error"
    said = rows()
    assert [row["event"] for row in said] == ["log_level_changed", "while", "log_level_changed"]
    assert [(row["before"], row["now"], row["by"]) for row in said if "by" in row] == [
        ("info", "debug", "alice"),
        ("debug", "error", "alice"),
    ]


def test_what_peers_cause_is_logged_once_a_second_for_each_cause():
    now = [10.0]
    limit = LogLimit(lambda: now[0])

    def written(event, **fields):
        try:
            return limit(None, "warning", {"event": event, **fields})
        except structlog.DropEvent:
            return None

    assert written("rank_refused", reason="a") and written("rank_refused", reason="b")
    assert [written("rank_refused", reason="a") for _ in range(1000)] == [None] * 1000
    assert all(written("serving") for _ in range(3)), "nobody outside causes it"
    now[0] += 1.0
    assert written("rank_refused", reason="a") == {
        "event": "rank_refused",
        "reason": "a",
        "left_out": 1000,
    }
    assert "left_out" not in written("rank_refused", reason="b")
    for event in (
        "rank_trouble",
        "rank_stopped",
        "request_failed_by_defect",
        "Exception in ASGI application\n",
        "No supported WebSocket library detected. Please use another one.",
    ):
        assert written(event) and not written(event)


def test_a_flood_of_bad_requests_is_one_line(rows):
    configure_logs("info")
    for _ in range(100):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    assert len(rows()) <= 3
