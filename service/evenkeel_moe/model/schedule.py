"""The times at which plans may start: weekly windows and blackouts, in UTC."""

import re
from dataclasses import dataclass

from evenkeel_moe.errors import InvalidInput

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = 1440
_WEEK = 7 * _DAY
_EPOCH_WEEKDAY = 3
"""1970-01-01 was a Thursday."""
_MOST_SPANS = 64
_SPAN = re.compile(
    rf"(?P<day>daily|{'|'.join(_DAYS)}) (?P<h>\d\d):(?P<m>\d\d)"
    rf" - (?:(?P<end_day>{'|'.join(_DAYS)}) )?(?P<end_h>\d\d):(?P<end_m>\d\d)"
)


@dataclass(frozen=True, slots=True)
class WeeklySpan:
    """A weekly span, in minutes since Monday 00:00 UTC. It may cross the end of the week."""

    start: int
    length: int
    """Above 0, at most a week. The minute at `start + length` is outside."""

    def covers(self, minute: float) -> bool:
        """Return True if a minute of the week is inside."""
        return (minute - self.start) % _WEEK < self.length


def _read_span(text: str) -> tuple[WeeklySpan, ...]:
    """Read `sat 22:00 - sun 04:00`, `sat 22:00 - 04:00` or `daily 01:00 - 03:00`."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise InvalidInput(
            f"{text!r} is not a weekly span;"
            " write `sat 22:00 - sun 04:00` or `daily 01:00 - 03:00`, in UTC"
        )
    start, end = (_minute(text, found[f"{which}h"], found[f"{which}m"]) for which in ("", "end_"))
    if found["day"] == "daily" and found["end_day"] is not None:
        raise InvalidInput(f"{text!r}: a daily span ends at a time, not on a day")
    if found["end_day"] is None:
        length = (end - start) % _DAY or (_DAY if end == start + _DAY else 0)
    else:
        days = _DAYS.index(found["end_day"]) - _DAYS.index(found["day"])
        length = (days * _DAY + end - start) % _WEEK
    if length == 0:
        raise InvalidInput(f"{text!r} ends where it begins")
    days_meant = range(7) if found["day"] == "daily" else (_DAYS.index(found["day"]),)
    return tuple(WeeklySpan(day * _DAY + start, length) for day in days_meant)


def _minute(text: str, hours: str, minutes: str) -> int:
    minute = int(hours) * 60 + int(minutes)
    if minute > _DAY or int(minutes) > 59:
        raise InvalidInput(f"{text!r}: {hours}:{minutes} is not a time of day")
    return minute


@dataclass(frozen=True)
class Schedule:
    """Weekly times at which plans may start. They are in UTC, where every day has 24 hours.

    Raises:
        InvalidInput: a span is not valid, there are more than 64, or the schedule is never open.
    """

    windows: tuple[str, ...] = ()
    """Spans in which the schedule is open; without any it is always open."""
    blackouts: tuple[str, ...] = ()
    """Spans in which the schedule is closed, even inside windows."""

    def __post_init__(self) -> None:
        for name, spans in (("windows", self.windows), ("blackouts", self.blackouts)):
            if len(spans) > _MOST_SPANS:
                raise InvalidInput(f"schedule.{name} has {len(spans)} spans, at most {_MOST_SPANS}")
        parsed = tuple(
            tuple(span for text in spans for span in _read_span(text))
            for spans in (self.windows, self.blackouts)
        )
        object.__setattr__(self, "_parsed", parsed)
        if self.opens_at(0.0) is None:
            raise InvalidInput(
                "schedule leaves no minute of the week open; use observe mode to start no plans"
            )

    def is_open(self, unix: float) -> bool:
        """Return True if a plan may start at this time, in Unix seconds."""
        return self._open((unix / 60 + _EPOCH_WEEKDAY * _DAY) % _WEEK)

    def opens_at(self, unix: float) -> float | None:
        """Return the first open time from `unix` on, in Unix seconds; None if it is never open."""
        if self.is_open(unix):
            return unix
        minute = (unix / 60 + _EPOCH_WEEKDAY * _DAY) % _WEEK
        windows, blackouts = self._spans()
        # It can only open at the start of a window or at the end of a blackout.
        turns = {span.start for span in windows} | {span.start + span.length for span in blackouts}
        waits = [(turn - minute) % _WEEK for turn in turns if self._open(turn % _WEEK)]
        return unix + 60 * min(waits) if waits else None

    def _open(self, minute: float) -> bool:
        windows, blackouts = self._spans()
        inside = not windows or any(span.covers(minute) for span in windows)
        return inside and not any(span.covers(minute) for span in blackouts)

    def _spans(self) -> tuple[tuple[WeeklySpan, ...], tuple[WeeklySpan, ...]]:
        spans: tuple[tuple[WeeklySpan, ...], tuple[WeeklySpan, ...]] = self.__dict__["_parsed"]
        return spans
