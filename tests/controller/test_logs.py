"""All logs are one JSON object per line; the level can change while the process runs."""

import json
import logging

import pytest
import structlog

from evenkeel_moe.controller.logs import LEVELS, configure_logs, log_level, set_log_level
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
