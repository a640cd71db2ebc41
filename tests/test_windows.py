from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import PolicyError
from router.windows import Calendar, Period, Weekday, Window

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

# Zones for what their clocks do: half-hour and two-hour changes, midnights that are skipped or come twice, days that
# are skipped whole, offsets of odd seconds, changes at one minute past midnight.
ZONES = (
    "UTC",
    "Africa/Cairo",
    "Africa/Casablanca",
    "Africa/Monrovia",
    "America/Caracas",
    "America/Havana",
    "America/New_York",
    "America/Santiago",
    "America/Sao_Paulo",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Amman",
    "Asia/Beirut",
    "Asia/Gaza",
    "Asia/Kathmandu",
    "Asia/Pyongyang",
    "Asia/Tehran",
    "Asia/Tokyo",
    "Australia/Lord_Howe",
    "Europe/Amsterdam",
    "Europe/Berlin",
    "Europe/Dublin",
    "Pacific/Apia",
    "Pacific/Chatham",
    "Pacific/Kwajalein",
)
CALENDAR: tuple[Calendar, ...] = ("minute", "hour", "day", "week", "month")
WEEKDAYS: tuple[Weekday, ...] = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def ms(text: str) -> int:
    """Return the instant of an ISO time, in UTC unless it says otherwise."""
    time = datetime.fromisoformat(text)
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


def windows(period: Period, first: str, count: int) -> list[Window]:
    found = [period.at(ms(first))]
    while len(found) < count:
        ends = found[-1].ends
        assert ends is not None
        found.append(period.at(ends))
    return found


def lengths(period: Period, first: str, count: int) -> list[float]:
    """Return the lengths of successive windows, in minutes."""
    return [((window.ends or 0) - (window.starts or 0)) / MINUTE for window in windows(period, first, count)]


def test_a_month_begins_at_the_local_midnight_of_its_zone() -> None:
    period = Period("month", timezone="Asia/Tokyo")
    assert period.at(ms("2026-07-31T15:00") - 1).name == "2026-07"
    assert period.at(ms("2026-07-31T15:00")) == Window("2026-08", ms("2026-07-31T15:00"), ms("2026-08-31T15:00"))


@pytest.mark.parametrize(
    ("seconds", "length", "name"),
    [
        (48 * 3600, 172_800_000, "172800s:10325"),
        (90 * 60, 5_400_000, "5400s:10325"),
        (25 * 3600.0, 90_000_000, "90000s:10325"),
        (0.25, 250, "0.25s:10325"),
    ],
)
def test_a_window_of_seconds_is_as_long_as_it_says(seconds: float, length: int, name: str) -> None:
    window = Window(name, 10_325 * length, 10_326 * length)
    assert [Period(seconds).at(at) for at in (10_325 * length, 10_326 * length - 1)] == [window, window]


def test_windows_of_seconds_go_on_before_the_epoch() -> None:
    assert Period(60).at(-1) == Window("60s:-1", -60_000, 0)


def test_days_of_23_and_25_hours_are_one_window_each() -> None:
    period = Period("day", timezone="America/New_York")
    assert windows(period, "2026-03-08T05:00", 1) == [Window("2026-03-08", ms("2026-03-08T05:00"), ms("2026-03-09T04:00"))]
    assert lengths(period, "2026-03-07T12:00", 3) == [24 * 60, 23 * 60, 24 * 60]
    assert lengths(period, "2026-10-31T12:00", 3) == [24 * 60, 25 * 60, 24 * 60]


def test_weeks_run_from_monday_to_monday_by_default() -> None:
    window = Period("week").at(ms("2026-07-31T12:00"))
    assert window == Window("2026-W31", ms("2026-07-27T00:00"), ms("2026-08-03T00:00"))


def test_weeks_run_from_the_day_that_was_chosen_and_are_named_by_it() -> None:
    window = Period("week", week_starts="sunday").at(ms("2026-08-01T23:59"))
    assert window == Window("W2026-07-26", ms("2026-07-26T00:00"), ms("2026-08-02T00:00"))


@pytest.mark.parametrize(
    ("now", "name"),
    [
        ("2024-12-30T00:00", "2025-W01"),
        ("2027-01-03T23:59", "2026-W53"),
        ("2020-12-31T00:00", "2020-W53"),
    ],
)
def test_a_week_over_the_turn_of_a_year_has_one_name(now: str, name: str) -> None:
    assert Period("week").at(ms(now)).name == name


def test_leap_days_belong_to_their_month() -> None:
    assert Period("month").at(ms("2028-02-29T23:59:59.999")) == Window("2028-02", ms("2028-02-01"), ms("2028-03-01"))
    assert Period("day").at(ms("2028-02-29T12:00")) == Window("2028-02-29", ms("2028-02-29"), ms("2028-03-01"))
    assert lengths(Period("month"), "2027-02-01", 1) == [28 * 24 * 60]


def test_a_year_ends_at_its_last_millisecond() -> None:
    for per in CALENDAR:
        if per != "week":
            assert Period(per).at(ms("2026-12-31T23:59:59.999")).ends == ms("2027-01-01")


def test_the_two_one_oclocks_of_autumn_are_two_hours() -> None:
    found = windows(Period("hour", timezone="America/New_York"), "2026-11-01T04:30", 3)
    assert [window.name for window in found] == ["2026-11-01T04Z", "2026-11-01T05Z", "2026-11-01T06Z"]
    assert lengths(Period("hour", timezone="America/New_York"), "2026-11-01T04:30", 3) == [60, 60, 60]


def test_hours_begin_at_local_full_hours() -> None:
    window = Period("hour", timezone="Asia/Kathmandu").at(ms("2026-07-31T12:00+05:45"))
    assert window == Window("2026-07-31T06:15Z", ms("2026-07-31T06:15"), ms("2026-07-31T07:15"))


def test_a_change_by_half_an_hour_lengthens_one_hour() -> None:
    period = Period("hour", timezone="Australia/Lord_Howe")
    assert lengths(period, "2026-04-05T00:30+11:00", 4) == [60, 90, 60, 60]
    assert lengths(period, "2026-10-04T00:30+10:30", 4) == [60, 90, 60, 60]


def test_a_change_that_lands_on_a_full_hour_ends_the_hour_before_it() -> None:
    # At 23:30 the clocks of Pyongyang were put to midnight.
    assert lengths(Period("hour", timezone="Asia/Pyongyang"), "2018-05-04T22:30+08:30", 3) == [60, 30, 60]


def test_a_day_without_midnight_begins_where_the_clock_jumps() -> None:
    period = Period("day", timezone="America/Sao_Paulo")
    found = windows(period, "2018-11-03T12:00-03:00", 2)
    assert found[1] == Window("2018-11-04", ms("2018-11-04T01:00-02:00"), ms("2018-11-05T00:00-02:00"))
    assert lengths(Period("day", timezone="Asia/Beirut"), "2026-03-29T12:00", 1) == [23 * 60]


def test_a_jump_over_midnight_from_before_it_begins_the_day() -> None:
    # From 23:30 straight to 00:30: America/Toronto, 1919-03-30.
    found = windows(Period("day", timezone="America/Toronto"), "1919-03-30T12:00-05:00", 2)
    assert found[1].starts == ms("1919-03-30T23:30-05:00")
    assert [window.name for window in found] == ["1919-03-30", "1919-03-31"]


def test_a_midnight_that_comes_twice_begins_one_day_at_the_first() -> None:
    # At 00:01 the clocks went back to 23:01.
    period = Period("day", timezone="America/St_Johns")
    found = windows(period, "2010-11-06T12:00-02:30", 2)
    assert [window.name for window in found] == ["2010-11-06", "2010-11-07"]
    assert found[1].starts == ms("2010-11-07T00:00-02:30")
    assert period.at(ms("2010-11-06T23:30-03:30")) == found[1]
    assert lengths(period, "2010-11-06T12:00-02:30", 2) == [24 * 60, 25 * 60]


def test_the_second_midnight_of_a_day_does_not_begin_it_again() -> None:
    # At 01:00 the clocks of Havana go back to 00:00.
    second = Period("day", timezone="America/Havana").at(ms("2026-11-01T00:30-05:00"))
    assert second == Window("2026-11-01", ms("2026-11-01T00:00-04:00"), ms("2026-11-02T00:00-05:00"))


def test_minutes_are_sixty_seconds() -> None:
    window = Period("minute").at(ms("2026-07-31T12:34:56.789"))
    assert window == Window("2026-07-31T12:34Z", ms("2026-07-31T12:34"), ms("2026-07-31T12:35"))


def test_a_day_that_is_skipped_whole_has_no_window() -> None:
    found = windows(Period("day", timezone="Pacific/Apia"), "2011-12-29T12:00-10:00", 2)
    assert [window.name for window in found] == ["2011-12-29", "2011-12-31"]
    assert found[0].ends == ms("2011-12-30T10:00")


def test_a_run_is_one_window_without_an_end() -> None:
    period = Period(None)
    assert period.at(0) == period.at(ms("2999-01-01")) == Window("", None, None)
    assert period.length is None


@pytest.mark.parametrize("zone", ZONES)
@given(
    instant=st.integers(min_value=ms("1880-01-01"), max_value=ms("2100-01-01")),
    per=st.sampled_from(CALENDAR),
    week_starts=st.sampled_from(WEEKDAYS),
)
@settings(max_examples=60, deadline=None)
def test_windows_tile_the_time(zone: str, instant: int, per: Calendar, week_starts: Weekday) -> None:
    def fresh(at: int) -> tuple[str, int, int]:
        window = Period(per, timezone=zone, week_starts=week_starts).at(at)
        assert window.starts is not None
        assert window.ends is not None
        return window.name, window.starts, window.ends

    name, starts, ends = fresh(instant)
    assert starts <= instant < ends
    assert fresh(starts) == fresh(ends - 1) == (name, starts, ends)
    assert fresh(ends)[1] == ends
    assert fresh(starts - 1)[2] == starts
    assert name not in {fresh(ends)[0], fresh(starts - 1)[0]}


@pytest.mark.parametrize("zone", ZONES)
@given(changes=st.data())
@settings(max_examples=15, deadline=None)
def test_windows_tile_the_time_around_every_change_of_the_clocks(zone: str, changes: st.DataObject) -> None:
    year = changes.draw(st.integers(1900, 2037))
    per: Calendar = changes.draw(st.sampled_from(("hour", "day")))
    days = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(days=day) for day in range(366)]
    local = [day.astimezone(ZoneInfo(zone)) for day in days]
    changed = [late for early, late in pairwise(local) if early.utcoffset() != late.utcoffset()]
    for day in changed:
        at = ms(day.isoformat()) - 2 * DAY
        walked = Period(per, timezone=zone)
        while at < ms(day.isoformat()) + DAY:
            window = walked.at(at)
            assert window.ends is not None
            assert Period(per, timezone=zone).at(window.ends - 1) == window
            assert walked.at(window.ends).starts == window.ends
            at = window.ends


@given(instant=st.integers(min_value=ms("1880-01-01"), max_value=ms("2100-01-01")), zone=st.sampled_from(ZONES))
@settings(max_examples=200, deadline=None)
def test_a_day_starts_when_the_clock_first_shows_its_date(instant: int, zone: str) -> None:
    window = Period("day", timezone=zone).at(instant)
    assert window.starts is not None

    def date(at: int) -> str:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at)).astimezone(ZoneInfo(zone)).date().isoformat()

    assert date(window.starts - 1) < window.name <= date(window.starts)


def test_a_period_finds_the_same_windows_whatever_it_was_asked_before() -> None:
    period = Period("hour", timezone="Europe/Berlin")
    asked = [ms("2026-07-31T12:00"), ms("2026-07-31T11:59:59.999"), ms("2026-07-31T12:00"), ms("2020-01-01")]
    assert [period.at(at) for at in asked] == [Period("hour", timezone="Europe/Berlin").at(at) for at in asked]


def test_a_period_says_what_it_is() -> None:
    assert str(Period("hour")) == "hour@UTC"
    assert str(Period("week", timezone="Europe/Berlin", week_starts="sunday")) == "week(sunday)@Europe/Berlin"
    assert str(Period(5400)) == "5400s"
    assert str(Period(1.5)) == "1.5s"
    assert repr(Period(None)) == "<Period none>"


def test_nominal_lengths_are_in_milliseconds() -> None:
    assert [Period(per).length for per in CALENDAR] == [MINUTE, HOUR, DAY, 7 * DAY, 30 * DAY]
    assert Period(1.5).length == 1_500


def test_periods_are_equal_when_they_cut_alike() -> None:
    asked = Period("day")
    asked.at(0)
    assert asked == Period("day")
    assert asked != Period("day", timezone="Asia/Tokyo")


PER = "per must be 'minute', 'hour', 'day', 'week' or 'month', a number of seconds, or None (in TOML 'none') for a run, not "


@pytest.mark.parametrize(
    ("per", "sentence"),
    [
        ("hourly", PER + "'hourly'; did you mean 'hour'?"),
        ("HOUR", PER + "'HOUR'; did you mean 'hour'?"),
        ("3600", PER + "'3600'"),
        (True, PER + "True"),
        ([1], PER + "[1]"),
        (0, "per must be a number of seconds above 0, not 0"),
        (-60, "per must be a number of seconds above 0, not -60"),
        (float("nan"), "per must be a number of seconds above 0, not nan"),
        (float("inf"), "per must be a number of seconds above 0, not inf"),
        (0.0001, "per must be a number of seconds above 0, whole to the millisecond, not 0.0001"),
        (1e300, "per must be at most 2**52 seconds, not 1e+300"),
    ],
)
def test_a_window_that_does_not_exist_is_refused(per: Calendar, sentence: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        Period(per)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("zone", "end"),
    [
        ("Europe/Berln", "not 'Europe/Berln'; did you mean 'Europe/Berlin'?"),
        ("asia/tokyo", "not 'asia/tokyo'; did you mean 'Asia/Tokyo'?"),
        ("../../etc/passwd", "not '../../etc/passwd'"),
        ("", "not ''"),
        ("\0", "not '\\x00'"),
        (7, "not 7"),
    ],
)
def test_a_time_zone_that_does_not_exist_is_refused(zone: str, end: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        Period("day", timezone=zone)
    assert str(refusal.value) == f"timezone must be the name of an IANA time zone such as 'Europe/Berlin', {end}"


def test_a_folder_of_time_zones_is_refused() -> None:
    with pytest.raises(PolicyError, match="such as 'Europe/Berlin', not 'Europe'"):
        Period("day", timezone="Europe")


def test_without_time_zone_data_utc_works_and_other_zones_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: str) -> ZoneInfo:
        raise KeyError

    monkeypatch.setattr("router.windows.ZoneInfo", none)
    monkeypatch.setattr("router.windows.available_timezones", set)
    assert Period("day").at(0).name == "1970-01-01"
    with pytest.raises(PolicyError, match="install the package tzdata"):
        Period("day", timezone="Asia/Tokyo")


def test_a_weekday_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"week_starts must be 'monday', .*, not 'mondays'; did you mean 'monday'"):
        Period("week", week_starts="mondays")  # type: ignore[arg-type]
