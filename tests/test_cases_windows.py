"""Cases from the field: windows."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from router import Cap, Router
from router.testing import LocalProvider
from stores import BudgetStore, SQLiteStore
from tests.support import (
    CENT,
    Bench,
    TestClock,
    bench,
    to_the_limit_when_let,
    workers,
    worth,
)

pytestmark = pytest.mark.anyio

HOUR = 3600
DAY = 24 * HOUR


def instant(text: str) -> int:
    """Return a time in UTC as milliseconds since the epoch."""
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


when_let = pytest.mark.parametrize("provider", [to_the_limit_when_let], indirect=True)


def cap_of(**more: Any) -> Cap:
    """Return a cap of one dollar that every window of these cases has."""
    return Cap(usd=1, admit_at=1, name="all", **more)


async def fill(b: Bench) -> None:
    """Spend all of a dollar in the present window."""
    assert (await b.router.run(worth(100))).served


async def wait_of(b: Bench) -> float:
    """Ask for a cent that is not there, and return in how many seconds to ask again."""
    decision = (await b.router.run(worth(1))).decision
    assert (decision.served, decision.kind) == (False, "spent")
    assert decision.retry_after is not None
    return decision.retry_after


async def test_a_month_in_tokyo_begins_at_its_own_midnight(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """W1."""
    clock.wall = instant("2026-07-31T14:59:59.999")
    async with bench(provider, cap_of(per="month", timezone="Asia/Tokyo"), store=store, clock=clock) as b:
        await fill(b)
        assert await wait_of(b) == 0.001
        await b.at(instant("2026-07-31T15:00"))
        await fill(b)
        assert await b.sums(window="2026-07") == await b.sums(window="2026-08") == (0, 100 * CENT)


@when_let
async def test_settles_on_the_boundary_count_in_the_windows_of_their_admission(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """W2."""
    boundary = instant("2026-08-01T01:00")
    async with bench(provider, cap_of(per="hour"), store=store, clock=clock) as b:
        await b.at(boundary - 1)
        running = [asyncio.ensure_future(b.router.run(worth(2))) for _ in range(3)]
        await provider.wait_for(lambda p: len(p.requests) == 3)
        await b.at(boundary)
        running += [asyncio.ensure_future(b.router.run(worth(2))) for _ in range(2)]
        await provider.wait_for(lambda p: len(p.requests) == 5)
        assert (await b.sums(window="2026-08-01T00Z"), await b.sums(window="2026-08-01T01Z")) == ((6 * CENT, 0), (4 * CENT, 0))
        provider.advance(5)
        assert [result.served for result in await asyncio.gather(*running)] == [True] * 5
        assert (await b.sums(window="2026-08-01T00Z"), await b.sums(window="2026-08-01T01Z")) == ((0, 6 * CENT), (0, 4 * CENT))
        assert provider.spent() == 10 * CENT


async def test_the_first_call_after_the_turn_is_admitted_in_every_process(provider: LocalProvider, tmp_path: Path) -> None:
    """W3."""
    path, clock = tmp_path / "budget.sqlite", TestClock()
    cap, user = {"usd": 1, "per": "day", "scope": "user", "admit_at": 1, "name": "all"}, {"user": "alice"}
    last, first = instant("2026-08-01T23:59:59.999"), instant("2026-08-02T00:00")
    async with (
        SQLiteStore(path, clock=clock, timeout=30) as store,
        bench(provider, Cap(**cap), store=store, clock=clock) as b,  # type: ignore[arg-type]
        workers(2, path, **cap) as processes,
    ):
        await b.at(last)
        assert (await b.router.run(worth(100, labels=user))).served
        for process in processes:
            assert await process.admit(30, now=last, labels=user) == [False]
        await b.at(first)
        for process in processes:
            assert await process.admit(30, now=first, labels=user) == [True]
        assert (await b.router.run(worth(30, labels=user))).served
        assert await b.sums(window="2026-08-02") == (60 * CENT, 30 * CENT)
        # The processes are killed with what they hold.
        await b.clock.advance(60)
        assert await b.sums(window="2026-08-02") == (0, 30 * CENT)


@pytest.mark.parametrize("length", [48 * HOUR, 90 * 60, 25 * HOUR], ids=["48h", "90min", "25h"])
async def test_a_window_of_seconds_is_as_long_as_it_says(
    provider: LocalProvider, store: BudgetStore, clock: TestClock, length: int
) -> None:
    """W4."""
    async with bench(provider, cap_of(per=length), store=store, clock=clock) as b:
        await fill(b)
        left = await wait_of(b)
        assert 0 < left <= length
        await b.clock.advance(left)
        await fill(b)
        assert await wait_of(b) == length
        await b.clock.advance(length - 0.001)
        assert await wait_of(b) == 0.001
        await b.clock.advance(0.001)
        await fill(b)
        # The first window may be forgotten by now; the one that has just ended is not.
        assert [(bucket.held, bucket.spent) for bucket in (await b.router.status()).buckets][-2:] == [(0, 100 * CENT)] * 2


@pytest.mark.parametrize(
    ("day", "begins", "hours"), [("2026-03-08", "2026-03-08T05:00", 23), ("2026-11-01", "2026-11-01T04:00", 25)]
)
async def test_a_day_on_which_the_clocks_change_is_one_bucket_of_its_length(
    provider: LocalProvider, store: BudgetStore, clock: TestClock, day: str, begins: str, hours: int
) -> None:
    """W5."""
    midnight = instant(begins)
    clock.wall = midnight - 1
    async with bench(provider, cap_of(per="day", timezone="America/New_York"), store=store, clock=clock) as b:
        await fill(b)
        await b.at(midnight)
        await fill(b)
        for hour in range(hours):
            await b.at(midnight + hour * HOUR * 1000)
            assert await wait_of(b) == (hours - hour) * HOUR
        await b.at(midnight + hours * HOUR * 1000 - 1000)
        assert await wait_of(b) == 1
        await b.at(midnight + hours * HOUR * 1000)
        await fill(b)
        assert await b.sums(window=day) == (0, 100 * CENT)
        assert len((await b.router.status()).buckets) == 3


@pytest.mark.parametrize(("per", "days"), [("month", 30), (365 * DAY, 200)], ids=["month", "year"])
async def test_a_counter_that_nobody_touches_lasts_as_long_as_its_window(
    provider: LocalProvider, store: BudgetStore, clock: TestClock, per: Any, days: int
) -> None:
    """W6."""
    async with bench(provider, cap_of(per=per, scope="user"), store=store, clock=clock) as b:
        clock.wall = instant("2026-08-01T00:00") if per == "month" else 57 * 365 * DAY * 1000
        for user in ("quiet", "lively"):
            assert (await b.router.run(worth(60, labels={"user": user}))).served
        for _ in range(days):
            # Others go on, so that whatever is cleared away in passing is cleared away.
            await b.clock.advance(DAY)
            assert (await b.router.run(worth(60, labels={"user": "lively"}))).served is False
        assert (await b.router.run(worth(60, labels={"user": "quiet"}))).served is False
        async with Router(b.router.policy, store, clock=clock) as fresh:
            assert (await fresh.run(worth(41, labels={"user": "quiet"}))).served is False
            assert (await fresh.run(worth(40, labels={"user": "quiet"}))).served


async def test_a_clock_that_steps_back_within_its_window_gives_no_second_budget(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """W7."""
    clock.wall = last = instant("2026-08-01T23:59:59.999")
    async with bench(provider, cap_of(per="day"), store=store, clock=clock) as b:
        await fill(b)
        clock.wall = last - 5000
        # The store's time does not run back, and what the window has left is said by it.
        assert await wait_of(b) == 0.001
        await b.at(last + 1)
        await fill(b)
        assert await b.sums(window="2026-08-01") == await b.sums(window="2026-08-02") == (0, 100 * CENT)


async def test_a_clock_that_steps_back_into_a_window_that_is_over_gives_no_second_budget(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """W7, across the boundary."""
    clock.wall = last = instant("2026-08-01T23:59:59.999")
    async with bench(provider, cap_of(per="day"), store=store, clock=clock) as b:
        assert (await b.router.run(worth(60))).served
        await b.at(last + 1)
        assert (await b.router.run(worth(60))).served
        clock.wall = last + 1 - 5000
        assert (await b.router.run(worth(40))).served
        assert await wait_of(b) == DAY
        assert await b.sums(window="2026-08-01") == (0, 60 * CENT)
        assert await b.sums(window="2026-08-02") == (0, 100 * CENT)


@pytest.mark.parametrize(
    ("more", "turns"),
    [
        ({}, "2026-08-03T00:00"),  # the first of August 2026 is a Saturday
        ({"week_starts": "sunday"}, "2026-08-02T00:00"),
        ({"week_starts": "wednesday"}, "2026-08-05T00:00"),
    ],
    ids=["monday", "sunday", "wednesday"],
)
async def test_a_week_runs_from_monday_unless_the_policy_says_another_day(
    provider: LocalProvider, store: BudgetStore, clock: TestClock, more: dict[str, Any], turns: str
) -> None:
    """W8."""
    async with bench(provider, cap_of(per="week", **more), store=store, clock=clock) as b:
        await fill(b)
        await b.at(instant(turns) - 1)
        assert await wait_of(b) == 0.001
        await b.at(instant(turns))
        await fill(b)
        assert await wait_of(b) == 7 * DAY
        assert [bucket.spent for bucket in (await b.router.status()).buckets] == [100 * CENT] * 2
