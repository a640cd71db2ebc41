"""Windows: the stretches of time that a cap is counted over, named so that nothing needs a reset at a boundary.

Every instant is a whole number of milliseconds since 1970-01-01T00:00Z. The windows of a period tile the time: each
instant lies in exactly one, and each window ends where the next one starts, whatever the clocks of the zone do.

- A day, week or month starts the first time that the local clock has reached its midnight. Where the clock skips
  that midnight the window starts at the jump; where midnight comes twice it starts at the first; a day that is
  skipped whole has no window.
- An hour or minute starts whenever the local clock shows a full one. The two one o'clocks of an autumn night are two
  hours; next to a change by half an hour one window is 30 or 90 minutes long, and all others are 60.
- A number of seconds is counted from 1970-01-01T00:00Z, the same for every process and zone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal
from typing import Literal
from zoneinfo import ZoneInfo, available_timezones

from router import _checks
from router.errors import PolicyError

__all__ = ["Calendar", "Period", "Weekday", "Window"]

Calendar = Literal["minute", "hour", "day", "week", "month"]
Weekday = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]

_SECOND = 1_000
_MINUTE = 60 * _SECOND
_HOUR = 60 * _MINUTE
_DAY = 24 * _HOUR
_LENGTHS: dict[str, int] = {"minute": _MINUTE, "hour": _HOUR, "day": _DAY, "week": 7 * _DAY, "month": 30 * _DAY}
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Window:
    """Name one stretch of time of a period.

    Attributes:
        name: short text, unique among the windows of its period and the same in every process; "" for a run.
        starts: the first millisecond that belongs to it; None for a run.
        ends: the first millisecond that does not; None for a run.
    """

    name: str
    starts: int | None
    ends: int | None

    def covers(self, at: int) -> bool:
        """Say whether an instant lies in this window."""
        return (self.starts is None or self.starts <= at) and (self.ends is None or at < self.ends)


_RUN = Window("", None, None)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Period:
    """Cut time into windows.

    Args:
        per: "minute", "hour", "day", "week" or "month" by the calendar of the zone; a number of seconds, to the
            millisecond; or None for a run, which is one window without an end.
        timezone: the name of an IANA time zone.
        week_starts: the day whose midnight begins a week.

    Raises:
        PolicyError: one of them does not exist.
    """

    per: Calendar | int | float | None
    timezone: str
    week_starts: Weekday
    length: int | None
    """Nominal length in milliseconds, a month taken as 30 days; None for a run."""
    _zone: tzinfo = field(compare=False)
    _last: Window = field(compare=False)

    def __init__(self, per: Calendar | float | None, *, timezone: str = "UTC", week_starts: Weekday = "monday") -> None:
        _checks.word(week_starts, _WEEKDAYS, what="week_starts")
        put = object.__setattr__
        put(self, "per", per)
        put(self, "timezone", timezone)
        put(self, "week_starts", week_starts)
        put(self, "length", None if per is None else _length(per))
        put(self, "_zone", _zone(timezone))
        put(self, "_last", Window("", 0, 0) if per is not None else _RUN)

    @property
    def is_calendar(self) -> bool:
        """Say whether the windows follow a calendar, rather than a number of seconds or a run."""
        return isinstance(self.per, str)

    def at(self, instant: int) -> Window:
        """Return the window that an instant lies in."""
        last = self._last
        if last.covers(instant):
            return last
        found = self._find(instant)
        # One reference is replaced as a whole, so that threads at worst find the same window twice.
        object.__setattr__(self, "_last", found)
        return found

    def _find(self, instant: int) -> Window:
        match self.per:
            case "minute" | "hour":
                starts, ends = self._full_before(instant), self._full_after(instant)
                # Named in UTC: the local name of an hour that comes twice would name two windows.
                return Window(_utc_name(starts), starts, ends)
            case "day" | "week" | "month":
                return self._days(instant)
            case _:
                assert self.length is not None  # noqa: S101 - a run is covered by its only window
                number, _ = divmod(instant, self.length)
                return Window(f"{_seconds(self.length)}s:{number}", number * self.length, (number + 1) * self.length)

    def _days(self, instant: int) -> Window:
        day = self._first_day(self._wall(instant))
        starts, following = self._reached(day), self._next_day(day)
        # Past this loop only after a clock that went back over midnight: the later day has begun and stays begun.
        while (ends := self._reached(following)) <= instant:
            day, starts, following = following, ends, self._next_day(following)
        return Window(self._day_name(day), starts, ends)

    def _first_day(self, wall: datetime) -> datetime:
        midnight = wall.replace(hour=0, minute=0, second=0, microsecond=0)
        if self.per == "month":
            return midnight.replace(day=1)
        if self.per == "week":
            return midnight - timedelta(days=(midnight.weekday() - _WEEKDAYS.index(self.week_starts)) % 7)
        return midnight

    def _next_day(self, day: datetime) -> datetime:
        if self.per == "month":
            return (day + timedelta(days=31)).replace(day=1)
        return day + timedelta(days=7 if self.per == "week" else 1)

    def _day_name(self, day: datetime) -> str:
        date = day.date().isoformat()
        if self.per == "month":
            return date[:7]
        if self.per == "week":
            year, week, _ = day.isocalendar()
            # The numbers of ISO 8601 belong to weeks from Monday; any other week is named by its first day.
            return f"{year}-W{week:02}" if self.week_starts == "monday" else f"W{date}"
        return date

    def _reached(self, wall: datetime) -> int:
        """Return the first instant at which the local clock has reached a time, also one that it skips."""
        instant = _instant(wall.replace(tzinfo=self._zone))  # fold=0: the earlier of two
        skipped = (self._wall(instant) - wall) // _MILLISECOND
        if not skipped:
            return instant
        return _first(instant - skipped, instant, lambda at: self._wall(at) >= wall)

    def _full_before(self, instant: int) -> int:
        """Return the last instant, up to this one, at which the local clock showed a full hour (or minute)."""
        offset, unit = self._offset(instant), self._unit
        full = (instant + offset) // unit * unit - offset
        if self._offset(full) == offset:
            return full
        changed = _first(full, instant, lambda at: self._offset(at) == offset)
        return self._full_before(changed - 1)

    def _full_after(self, instant: int) -> int:
        """Return the first instant after this one at which the local clock shows a full hour (or minute)."""
        offset, unit = self._offset(instant), self._unit
        full = ((instant + offset) // unit + 1) * unit - offset
        if self._offset(full) == offset:
            return full
        changed = _first(instant, full, lambda at: self._offset(at) != offset)
        return changed if (changed + self._offset(changed)) % unit == 0 else self._full_after(changed)

    @property
    def _unit(self) -> int:
        return _MINUTE if self.per == "minute" else _HOUR

    def _wall(self, instant: int) -> datetime:
        return (_EPOCH + instant * _MILLISECOND).astimezone(self._zone).replace(tzinfo=None, fold=0)

    def _offset(self, instant: int) -> int:
        offset = (_EPOCH + instant * _MILLISECOND).astimezone(self._zone).utcoffset() or timedelta()
        return offset // _MILLISECOND

    def __str__(self) -> str:
        if isinstance(self.per, str):
            first = f"({self.week_starts})" if self.per == "week" and self.week_starts != "monday" else ""
            return f"{self.per}{first}@{self.timezone}"
        return "none" if self.length is None else f"{_seconds(self.length)}s"

    def __repr__(self) -> str:
        return f"<Period {self}>"


def _length(per: object) -> int:
    if isinstance(per, str) and per in _LENGTHS:
        return _LENGTHS[per]
    if isinstance(per, int | float) and not isinstance(per, bool):
        length = _checks.fraction(_checks.seconds(per, what="per"), what="per") * _SECOND
        if length.denominator == 1 and 1 <= length <= _checks.LARGEST:
            return int(length)
        raise PolicyError(f"per must be a number of seconds above 0, whole to the millisecond, not {per!r}")
    known, near = _checks.listed(_LENGTHS), _checks.hint(per, _LENGTHS)
    raise PolicyError(
        f"per must be {known}, a number of seconds, or None (in TOML 'none') for a run, not {_checks.shown(per)}{near}"
    )


def _zone(name: object) -> tzinfo:
    if name == "UTC":
        return UTC  # needs no time zone data
    try:
        if not isinstance(name, str):
            raise TypeError
        return ZoneInfo(name)
    # KeyError: unknown; ValueError: no relative path; OSError: a folder of zones, such as "Europe".
    except (TypeError, KeyError, ValueError, OSError):
        known = available_timezones()
    lacking = "" if known else "; this machine has no time zone data: install the package tzdata"
    raise PolicyError(
        f"timezone must be the name of an IANA time zone such as 'Europe/Berlin', "
        f"not {_checks.shown(name)}{_checks.hint(name, known)}{lacking}"
    )


def _first(before: int, after: int, holds: Callable[[int], bool]) -> int:
    """Return the first instant in (before, after] from which on something holds, as it does at `after`."""
    while after - before > 1:
        middle = (before + after) // 2
        before, after = (before, middle) if holds(middle) else (middle, after)
    return after


def _instant(local: datetime) -> int:
    return (local - _EPOCH) // _MILLISECOND


def _utc_name(instant: int) -> str:
    text = (_EPOCH + instant * _MILLISECOND).replace(tzinfo=None).isoformat(timespec="seconds")
    return f"{text.removesuffix(':00').removesuffix(':00')}Z"


def _seconds(length: int) -> str:
    return format((Decimal(length) / _SECOND).normalize(), "f")
