"""Clocks that disagree: what a skew, a step back, a change of the clocks and a leap day can do to a budget, and cannot."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis

from router import Cap, Router
from router.testing import LocalProvider
from stores import Bucket, BudgetStore, Charge, TooLate, new_id
from stores.base import AHEAD, RETENTION
from stores.conformance import HOUR, START, ManualClock
from tests.named import KINDS, name_of, named
from tests.support import CENT, TestClock, bench, client_of, policy_of, worth

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parent.parent / "docs" / "clocks.md"
MINUTE = 60_000
RUN = Bucket("run")


class Two:
    """Two processes' clients of one store, the clock of one of them a minute ahead of the other's."""

    def __init__(self, name: str) -> None:
        self.behind_clock, self.ahead_clock = ManualClock(), ManualClock(START + MINUTE)
        self.behind = named(name, clock=self.behind_clock)
        self.ahead = named(name, clock=self.ahead_clock)

    def advance(self, ms: int) -> None:
        self.behind_clock.advance(ms)
        self.ahead_clock.advance(ms)

    def id(self, store: BudgetStore) -> str:
        """Make an id as the process of that store does, by its own clock."""
        return new_id(now=(self.behind_clock if store is self.behind else self.ahead_clock).now)

    async def hold(self, store: BudgetStore, bucket: Bucket, amount: int, *, lease: int = 3 * MINUTE) -> str:
        id = self.id(store)
        verdict = await store.reserve(id, [[Charge(bucket, amount, 100, 100)]], lease=lease)
        return id if verdict.held else verdict.state

    async def sums(self, bucket: Bucket) -> list[tuple[int, int, int]]:
        """Return held, spent and lost as each of them sees it; they agree."""
        return [(await store.balances([bucket]))[0][1:4] for store in (self.ahead, self.behind)]


@pytest.fixture(params=["sqlite", "redis"])
async def two(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Two]:
    pair = Two(name_of(request.param, tmp_path, lambda: str(request.getfixturevalue("redis_url"))))
    yield pair
    await pair.behind.aclose()
    await pair.ahead.aclose()


def hour_of(instant: int) -> Bucket:
    start = instant // HOUR * HOUR
    return Bucket(f"hour@{start}", starts=start, ends=start + HOUR)


# A minute of skew.


async def test_around_the_turn_of_a_window_no_window_has_a_second_budget(two: Two) -> None:
    """Each takes what it can of the window that its own clock names, every ten seconds from three minutes before the turn."""
    turn = START + HOUR
    two.advance(HOUR - 3 * MINUTE)
    answers: dict[str, list[str]] = {"behind": [], "ahead": []}
    for _ in range(36):
        for who, store, clock in (("ahead", two.ahead, two.ahead_clock), ("behind", two.behind, two.behind_clock)):
            bucket = hour_of(clock.now)
            id = await two.hold(store, bucket, 9)
            if id.startswith(":"):
                await store.settle(id, [Charge(bucket, 9)])
            answers[who].append(id if not id.startswith(":") else "held")
        two.advance(10_000)
    assert await two.sums(hour_of(turn - 1)) == [(0, 99, 0)] * 2
    assert await two.sums(hour_of(turn)) == [(0, 99, 0)] * 2
    # By the store's time the old window is over as soon as the first clock says so; who is behind is told, and follows.
    assert answers["behind"][12:18] == ["stale"] * 6
    assert "stale" not in answers["ahead"]


async def test_a_window_may_be_used_a_minute_early_and_no_earlier_and_counts_as_that_window(two: Two) -> None:
    two.advance(HOUR - 2 * MINUTE)
    store, coming = two.behind, hour_of(START + HOUR)
    assert await two.hold(store, coming, 60) == "stale"
    two.advance(2 * MINUTE - AHEAD)
    id = await two.hold(store, coming, 60)
    await store.settle(id, [Charge(coming, 60)])
    two.advance(HOUR // 2)
    assert [await two.hold(each, coming, 60) for each in (two.behind, two.ahead)] == ["refused", "refused"]


async def test_a_lease_ends_early_by_no_more_than_the_skew_and_once(two: Two) -> None:
    first = await two.hold(two.behind, RUN, 10, lease=3 * MINUTE)
    await two.ahead.check()  # the store's time makes a leap of a minute, and all later leases are counted from there
    second = await two.hold(two.behind, RUN, 10, lease=3 * MINUTE)
    two.advance(2 * MINUTE - 1)
    assert await two.sums(RUN) == [(20, 0, 0)] * 2
    two.advance(1)
    assert await two.sums(RUN) == [(10, 0, 10)] * 2
    two.advance(MINUTE - 1)
    assert await two.sums(RUN) == [(10, 0, 10)] * 2
    two.advance(1)
    assert await two.sums(RUN) == [(0, 0, 20)] * 2
    # Whoever lives renews within a third of a lease, and has it again; whoever settles late is counted once.
    assert await two.behind.renew([first], lease=3 * MINUTE) == {first}
    for id in (first, second):
        for counted in (True, False):
            assert (await two.behind.settle(id, [Charge(RUN, 7)])).counted is counted
    assert await two.sums(RUN) == [(0, 14, 0)] * 2


@pytest.mark.parametrize("who", ["behind", "ahead"])
async def test_an_id_counts_once_until_it_is_too_late_whichever_clock_made_it(two: Two, who: str) -> None:
    store, other = (two.behind, two.ahead) if who == "behind" else (two.ahead, two.behind)
    id = await two.hold(store, RUN, 10)
    await store.settle(id, [Charge(RUN, 7)])
    counted = []
    for step in (RETENTION - 2 * MINUTE, MINUTE, MINUTE - 1, 1, 1, MINUTE, MINUTE):
        two.advance(step)
        for each in (store, other):
            try:
                counted.append((await each.settle(id, [Charge(RUN, 7)])).counted)
            except TooLate:
                counted.append(False)
    assert set(counted) == {False}
    assert await two.sums(RUN) == [(0, 7, 0)] * 2


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_routers_whose_clocks_differ_by_a_minute_share_each_hours_budget(
    request: pytest.FixtureRequest, tmp_path: Path, provider: LocalProvider, kind: str
) -> None:
    """A dollar an hour; both ask for ten cents every twenty seconds, from two minutes before the turn to two after it."""
    name = name_of(kind, tmp_path, lambda: str(request.getfixturevalue("redis_url")))
    turn = START + HOUR
    cap = Cap(usd=1, per="hour", admit_at=1, name="all")
    clocks = [TestClock(turn - 2 * MINUTE), TestClock(turn - MINUTE)]
    stores = [named(name, clock=clock) for clock in clocks]
    async with client_of(provider.base_url) as client:
        routers = [Router(policy_of(client, cap), store, clock=clock) for store, clock in zip(stores, clocks, strict=True)]
        served = 0
        for _ in range(12):
            for router in reversed(routers):  # who is ahead comes first
                served += (await router.run(worth(10))).served
            for clock in clocks:
                clock.wall += 20_000
        buckets = (await routers[0].status()).buckets
        for router in routers:
            await router.aclose()
    for store in stores:
        await store.aclose()
    assert {bucket.window: (bucket.held, bucket.spent) for bucket in buckets} == {
        "2026-08-01T00Z": (0, 60 * CENT),
        "2026-08-01T01Z": (0, 100 * CENT),
    }
    assert served * 10 * CENT == 160 * CENT == provider.spent()


# A clock that is set back, or ahead.


@asynccontextmanager
async def opened(request: pytest.FixtureRequest, folder: Path, kind: str, clock: ManualClock) -> AsyncIterator[BudgetStore]:
    store = named(name_of(kind, folder, lambda: str(request.getfixturevalue("redis_url"))), clock=clock)
    try:
        yield store
    finally:
        await store.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_clock_set_back_by_an_hour_ends_no_lease_early_and_gives_no_budget_twice(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """The store's time stands still until the clock has caught up: holds last longer by that, and windows too."""
    clock = ManualClock(START + HOUR)
    async with opened(request, tmp_path, kind, clock) as store:
        bucket = hour_of(clock.now)
        ids = [new_id(now=clock.now) for _ in range(2)]
        for id in ids:
            await store.reserve(id, [[Charge(bucket, 40, 100)]], lease=MINUTE)
        await store.settle(ids[0], [Charge(bucket, 40)])
        clock.advance(-HOUR)
        for _ in range(4):
            assert (await store.check()).now == START + HOUR
            assert (await store.balances([bucket]))[0][1:4] == (40, 40, 0)
            over = await store.reserve(new_id(now=clock.now), [[Charge(bucket, 21, 100)]], lease=MINUTE)
            assert over.state == "refused"
            before = hour_of(START)
            assert (await store.reserve(new_id(now=clock.now), [[Charge(before, 1, 100)]], lease=MINUTE)).state == "stale"
            assert (await store.settle(ids[0], [Charge(bucket, 40)])).counted is False
            clock.advance(HOUR // 4)
        clock.advance(MINUTE)
        assert (await store.balances([bucket]))[0][1:4] == (0, 40, 40)


def undo(kind: str, folder: Path, redis_url: Callable[[], str]) -> None:
    """Set the time of a store back by what the docs say to do."""
    statement = r"`(UPDATE meta .*?)`" if kind == "sqlite" else r"`(HDEL .*?)`"
    (found,) = re.findall(statement, DOCS.read_text("utf-8"))
    if kind == "sqlite":
        db = sqlite3.connect(folder / "budget.sqlite", isolation_level=None)
        assert db.execute(found).rowcount == 1
        db.close()
    else:
        with Redis.from_url(redis_url()) as client:
            assert client.execute_command(*found.replace("{budget:}", f"{{{folder.name}:}}").split()) == 1


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_a_clock_that_was_years_ahead_is_undone_as_the_docs_say(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    clock = ManualClock()
    bucket = hour_of(START)
    asked = [[Charge(bucket, 60, 100, 100)]]
    async with opened(request, tmp_path, kind, clock) as store:
        id = new_id(now=START)
        await store.reserve(id, asked, lease=MINUTE)
        await store.settle(id, asked[0])
        wrong = START + 20_000 * HOUR
        async with opened(request, tmp_path, kind, ManualClock(wrong)) as ahead:
            await ahead.check()
        states = [(await store.reserve(new_id(now=now), asked, lease=MINUTE)).state for now in (START, wrong)]
        assert states == ["gone", "stale"]
    undo(kind, tmp_path, lambda: str(request.getfixturevalue("redis_url")))
    async with opened(request, tmp_path, kind, clock) as store:
        health = await store.check()
        assert (health.now, health.rolled_back) == (START, False)
        # In a file the wrong clock has forgotten the window; in Redis the server's clock decides that.
        state = (await store.reserve(new_id(now=START), asked, lease=MINUTE)).state
        assert state == {"sqlite": "held", "redis": "refused"}[kind]


# The calendar; `test_windows` and `test_cases_windows` have the days on which the clocks change.


async def test_a_leap_day_is_a_day_of_its_own_in_a_month_of_29(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    day = 24 * HOUR
    leap = 1_835_395_200_000  # 2028-02-29T00:00Z
    clock.wall = leap - 1
    caps = Cap(usd=1, per="day", admit_at=1, name="day"), Cap(usd=3, per="month", admit_at=1, name="month")
    async with bench(provider, *caps, store=store, clock=clock) as b:
        for instant, served in ((leap - 1, True), (leap, True), (leap + day - 1, False), (leap + day, True)):
            await b.at(instant)
            assert (await b.router.run(worth(100))).served is served
        days = ["2028-02-28", "2028-02-29", "2028-03-01"]
        assert [await b.sums("day", window) for window in days] == [(0, 100 * CENT)] * 3
        assert [await b.sums("month", window) for window in ("2028-02", "2028-03")] == [(0, 200 * CENT), (0, 100 * CENT)]
