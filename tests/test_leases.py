"""Leases that are renewed, that end too early or too late, clocks that jump, and settles that find their store away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from router import Cap, Router, TaskClass, Usage
from router.testing import LocalProvider, Rates, Reply
from stores import (
    Bucket,
    BudgetStore,
    Charge,
    Hold,
    InvalidCharge,
    MemoryStore,
    SQLiteStore,
    StoreUnavailable,
    new_id,
)
from stores.base import LeaseEnd
from stores.redis import RedisStore
from tests.support import STRONG, TestClock, chat, client_of, policy_of, settle_down

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

ROOT = Path(__file__).parent.parent
PRICES = {"strong-model": Rates(input="2", output="10"), "cheap-model": Rates(input="0.20", output="1")}
ESTIMATE = STRONG.bound(input_tokens=9, output_tokens=100)  # of chat() on the strong model
LEASE = 30.0
ENDS: tuple[LeaseEnd, ...] = ("release", "charge")
HOUR = 3600.0


@pytest.fixture
def provider() -> Iterator[LocalProvider]:
    """A provider that answers when it is told to."""
    with LocalProvider(prices=PRICES, reply=Reply(gate=True)) as running:
        yield running


class Staged:
    """A store, in front of a real one, whose calls fail, stop before they are applied, or lose their replies."""

    def __init__(self, inner: BudgetStore) -> None:
        self.inner = inner
        self.calls: list[tuple[str, Any]] = []
        self.fails: set[str] = set()
        self.loses: set[str] = set()
        self.stops: set[str] = set()
        self.stopped = asyncio.Event()
        self.goes_on = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        async def call(*args: Any, **more: Any) -> Any:
            self.calls.append((name, args[0] if args else None))
            if name in self.stops:
                self.stopped.set()
                await self.goes_on.wait()
            if name in self.fails:
                raise StoreUnavailable("memory", "it is down")
            answer = await method(*args, **more)
            if name in self.loses:
                raise StoreUnavailable("memory", "its reply was lost")
            return answer

        return call

    def asked(self, name: str) -> list[Any]:
        """Return the first argument of every call of that name."""
        return [first for called, first in self.calls if called == name]


class Bench:
    """A router and its clock, over a store that has a clock of its own."""

    def __init__(self, router: Router, store: Staged, clock: TestClock, store_clock: TestClock) -> None:
        self.router = router
        self.store = store
        self.clock = clock
        self.store_clock = store_clock

    async def sums(self, cap: str = "all") -> tuple[int, int, int]:
        """Return held, spent and lost of a cap, over all of its buckets."""
        found = [bucket for bucket in (await self.router.status()).buckets if bucket.cap == cap]
        return sum(b.held for b in found), sum(b.spent for b in found), sum(b.lost for b in found)

    async def holds(self) -> tuple[Hold, ...]:
        return await self.store.inner.holds()

    async def advance(self, seconds: float) -> None:
        """Let time pass, for the router and for the store."""
        if self.store_clock is not self.clock:
            self.store_clock.wall += round(seconds * 1000)
        await self.clock.advance(seconds)


@asynccontextmanager
async def bench(provider: LocalProvider, *caps: Cap, own_clock: bool = False, **more: Any) -> AsyncIterator[Bench]:
    """Open a router; afterwards nothing is held."""
    clock = TestClock()
    store_clock = TestClock() if own_clock else clock
    inner = MemoryStore(clock=store_clock)
    store: Any = Staged(inner)
    caps = caps or (Cap(usd=1, per="day", admit_at=1, name="all"),)
    async with client_of(provider.base_url) as client:
        policy = policy_of(client, *caps, **{"lease": LEASE, **more})
        async with Router(policy, store, clock=clock) as router:
            yield Bench(router, store, clock, store_clock)
        assert [hold for hold in await inner.holds() if hold.state == "held"] == []


async def asked(provider: LocalProvider, requests: int) -> None:
    await provider.wait_for(lambda p: len(p.requests) == requests)


# H8: renewed while the call lives.


async def run(router: Router, provider: LocalProvider, over: asyncio.Event) -> None:
    await router.run(chat())


async def stream(router: Router, provider: LocalProvider, over: asyncio.Event) -> None:
    async for _chunk in await router.stream(chat()):
        pass


async def admit(router: Router, provider: LocalProvider, over: asyncio.Event) -> None:
    async with router.admit(chat()) as admission:
        await over.wait()
        admission.settle(Usage(input_tokens=8, output_tokens=16))


@pytest.mark.parametrize("work", [run, stream, admit])
@pytest.mark.parametrize("on_lease_end", ENDS)
async def test_a_call_that_runs_longer_than_its_lease_keeps_its_hold(
    provider: LocalProvider, work: Callable[..., Any], on_lease_end: LeaseEnd
) -> None:
    """H8: twenty leases long; nobody else is given what it holds."""
    cap = Cap(usd=f"{1.5 * ESTIMATE / 10**9:.9f}", per="day", admit_at=1, name="all")
    async with bench(provider, cap, on_lease_end=on_lease_end) as b:
        over = asyncio.Event()
        running = asyncio.ensure_future(work(b.router, provider, over))
        if work is not admit:
            await asked(provider, 1)
        await settle_down()
        for _ in range(60):
            await b.advance(LEASE / 3)
            assert await b.sums() == (ESTIMATE, 0, 0)
        assert (await b.router.run(chat())).decision.kind == "busy"
        over.set()
        provider.advance(100)
        await running
        assert await b.sums() == (0, 8 * 2000 + 16 * 10_000, 0)


async def test_one_call_renews_all_that_a_process_holds(provider: LocalProvider) -> None:
    """H8: three times a lease, whatever is open, streams and admissions and settles in the backlog alike."""
    async with bench(provider) as b:
        b.store.fails = {"settle"}
        async with b.router.admit(chat()) as unsettled:
            unsettled.settle(Usage(input_tokens=8, output_tokens=16))
        b.store.calls.clear()
        over = asyncio.Event()
        work = [run(b.router, provider, over) for _ in range(10)] + [stream(b.router, provider, over) for _ in range(10)]
        running = [asyncio.ensure_future(each) for each in (*work, admit(b.router, provider, over))]
        await asked(provider, 20)
        ids = {hold.id for hold in await b.holds()}
        assert len(ids) == 22
        for _ in range(9):
            await b.advance(LEASE / 3)
        renewed = b.store.asked("renew")
        assert [set(each) for each in renewed] == [ids] * 9
        assert [hold.state for hold in await b.holds()] == ["held"] * 22
        b.store.fails = set()
        over.set()
        provider.advance(1000)
        await asyncio.gather(*running)
        await b.advance(5)
        assert await b.sums() == (0, provider.spent() + 2 * (8 * 2000 + 16 * 10_000), 0)


async def test_nothing_is_renewed_when_nothing_is_held(provider: LocalProvider) -> None:
    """H8: a router that is idle asks its store for nothing."""
    provider.advance(1)
    async with bench(provider) as b:
        await b.router.run(chat())
        b.store.calls.clear()
        for _ in range(10):
            await b.advance(LEASE)
        assert b.store.calls == []


# Leases that end all the same.


@pytest.mark.parametrize("on_lease_end", ENDS)
async def test_a_call_whose_renewals_fail_settles_late_and_counts_once(provider: LocalProvider, on_lease_end: LeaseEnd) -> None:
    """H7, H8: what the lease's end wrote, nothing or the estimate, is replaced by the actual."""
    async with bench(provider, on_lease_end=on_lease_end) as b:
        running = asyncio.ensure_future(b.router.run(chat()))
        await asked(provider, 1)
        b.store.fails = {"renew"}
        for _ in range(4):
            await b.advance(LEASE / 3)
        assert await b.sums() == (0, ESTIMATE if on_lease_end == "charge" else 0, ESTIMATE)
        provider.advance(1)
        assert (await running).decision.actual == provider.spent()
        assert await b.sums() == (0, provider.spent(), 0)


@pytest.mark.parametrize("on_lease_end", ENDS)
@pytest.mark.parametrize("fits", [True, False])
async def test_a_renewal_that_comes_late_takes_the_hold_again_where_it_fits(
    provider: LocalProvider, on_lease_end: LeaseEnd, fits: bool
) -> None:
    """H8: where somebody else was given the room meanwhile the call goes on, and its actual is a debt."""
    limit = 2 * ESTIMATE if fits else ESTIMATE + 1
    cap = Cap(usd=f"{limit / 10**9:.9f}", per="day", admit_at=1, name="all")
    async with bench(provider, cap, on_lease_end=on_lease_end) as b:
        running = asyncio.ensure_future(b.router.run(chat()))
        await asked(provider, 1)
        b.store.fails = {"renew"}
        for _ in range(4):
            await b.advance(LEASE / 3)
        other = asyncio.ensure_future(b.router.run(chat()))
        if on_lease_end == "release" or fits:
            await asked(provider, 2)
        else:
            # What may have been spent was counted: no room is given away.
            assert (await other).decision.kind == "spent"
        b.store.fails = set()
        await b.advance(LEASE / 3)
        states = Counter(hold.state for hold in await b.holds())
        if fits:
            assert states == {"held": 2}
        else:
            # Given away, or taken again from what its own end had counted.
            assert states == ({"held": 1, "expired": 1} if on_lease_end == "release" else {"held": 1})
        provider.advance(2)
        await asyncio.gather(running, other)
        assert await b.sums() == (0, provider.spent(), 0)
        assert provider.spent() == len(provider.requests) * (8 * 2000 + 16 * 10_000)


@pytest.mark.parametrize("on_lease_end", ENDS)
@pytest.mark.parametrize("replies", ["arrive", "are lost"])
@pytest.mark.parametrize("renewed", [False, True])
async def test_a_lease_that_ends_while_its_settle_is_on_its_way(
    provider: LocalProvider, on_lease_end: LeaseEnd, replies: str, renewed: bool
) -> None:
    """H3, H6, H7: the settle was sent in time, is applied after the end, and its reply may be lost on top."""
    provider.advance(1)
    async with bench(provider, on_lease_end=on_lease_end, settle_timeout=0.05) as b:
        b.store.stops, b.store.fails = {"settle"}, {"renew"}
        if replies == "are lost":
            b.store.loses = {"settle"}
        running = asyncio.ensure_future(b.router.run(chat()))
        await b.store.stopped.wait()
        # The caller has its answer although the settle hangs.
        assert (await running).decision.actual == provider.spent()
        for _ in range(4):
            await b.advance(LEASE / 3)
        assert await b.sums() == (0, ESTIMATE if on_lease_end == "charge" else 0, ESTIMATE)
        if renewed:
            b.store.fails = set()
            await b.advance(LEASE / 3)
            assert await b.sums() == (ESTIMATE, 0, 0)
        b.store.stops = set()
        b.store.goes_on.set()
        await settle_down()
        assert await b.sums() == (0, provider.spent(), 0)
        assert (await b.router.status()).backlog == (replies == "are lost")
        b.store.loses = set()
        for _ in range(3):
            await b.advance(2)
        status = await b.router.status()
        assert (status.backlog, status.open, status.too_late) == (0, 0, 0)
        assert await b.sums() == (0, provider.spent(), 0)
        assert (len(b.store.asked("settle")) > 1) == (replies == "are lost")


# A process that is stopped past its lease.

STOPPED = """
import asyncio, json, sys
from router import Cap, Router
from stores import SQLiteStore
from tests.support import chat, client_of, policy_of

async def main(path, url, on_lease_end, cap):
    store = SQLiteStore(path, timeout=20)
    async with client_of(url) as client:
        policy = policy_of(client, Cap(usd=cap, per=None, admit_at=1, name="all"), lease=1.5, on_lease_end=on_lease_end)
        async with Router(policy, store) as router:
            result = await router.run(chat())
            status = await router.status()
    await store.aclose()
    print(json.dumps({"actual": result.decision.actual, "attempts": result.decision.attempts, "backlog": status.backlog}))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("on_lease_end", ENDS)
async def test_a_process_that_is_stopped_past_its_lease_goes_on_and_settles_late(
    provider: LocalProvider, tmp_path: Path, on_lease_end: LeaseEnd
) -> None:
    """H7, H8: its room may be given away meanwhile (release) or not (charge); its actual counts once, as a debt if need be."""
    limit = ESTIMATE + 1000
    path = tmp_path / "budget.sqlite"
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STOPPED, str(path), provider.base_url, on_lease_end, f"{limit / 10**9:.9f}"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    await provider.wait_for(lambda p: len(p.requests) == 1, timeout=30)
    async with SQLiteStore(path, timeout=20) as store:
        (hold,) = await store.holds()
        ((bucket, amount),) = [(charge.bucket, charge.amount) for charge in hold.charges]
        assert amount == ESTIMATE
        while (await store.holds())[0].lease_ends == hold.lease_ends:
            await asyncio.sleep(0.01)  # until it has renewed: then it is not in the middle of a commit
        worker.send_signal(signal.SIGSTOP)
        while not (await store.balances([bucket]))[0].lost:
            await asyncio.sleep(0.05)  # the lease ends by the store's own clock
        (balance,) = await store.balances([bucket])
        assert (balance.held, balance.spent) == (0, amount if on_lease_end == "charge" else 0)
        other = new_id()
        verdict = await store.reserve(other, [[Charge(bucket, amount, limit, limit)]], lease=60_000)
        assert verdict.held == (on_lease_end == "release")
        provider.advance(1)
        worker.send_signal(signal.SIGCONT)
        out, _ = await worker.communicate()
        assert json.loads(out) == {"actual": provider.spent(), "attempts": 1, "backlog": 0}
        (balance,) = await store.balances([bucket])
        assert (balance.spent, balance.lost) == (provider.spent(), 0)
        await store.settle(other, [Charge(bucket, amount)] if verdict.held else [])
        (balance,) = await store.balances([bucket])
        total = provider.spent() + (amount if verdict.held else 0)
        assert (balance.held, balance.spent, balance.lost) == (0, total, 0)
        # A debt admits nothing more; without one what is left is there.
        after = await store.reserve(new_id(), [[Charge(bucket, 1, limit, limit)]], lease=60_000)
        assert after.held == (total < limit) == (on_lease_end == "charge")
        assert await store.settle(hold.id, [Charge(bucket, 1)]) == (False, False, ((await store.balances([bucket]))[0],))


# Clocks that jump.


@pytest.mark.parametrize("on_lease_end", ENDS)
@pytest.mark.parametrize("jump", [2 * HOUR, 5 * 24 * HOUR, -2 * HOUR, -5 * 24 * HOUR])
async def test_the_stores_clock_jumps_while_a_call_runs(provider: LocalProvider, on_lease_end: LeaseEnd, jump: float) -> None:
    """H7, W7: forward, every lease is over; back, the store's time stands still. The actual counts in either case."""
    async with bench(provider, Cap(usd=1, per=None, admit_at=1, name="all"), own_clock=True, on_lease_end=on_lease_end) as b:
        running = asyncio.ensure_future(b.router.run(chat()))
        await asked(provider, 1)
        b.store_clock.wall += round(jump * 1000)
        held, spent, lost = await b.sums()
        if jump < 0:
            assert (held, spent, lost) == (ESTIMATE, 0, 0)
        else:
            assert (held, spent, lost) == (0, ESTIMATE if on_lease_end == "charge" else 0, ESTIMATE)
        provider.advance(1)
        await running
        assert await b.sums() == (0, provider.spent(), 0)
        # And life goes on, in the windows of the store's time.
        provider.advance(1)
        assert (await b.router.run(chat())).served
        assert await b.sums() == (0, provider.spent(), 0)


@pytest.mark.parametrize("jump", [2 * HOUR, 30 * HOUR])
async def test_a_settle_after_a_jump_counts_in_its_own_window_or_is_too_late_visibly(
    provider: LocalProvider, jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    """H10, W7: the hour is long over; within its retention the actual counts there, after it the operator hears of it."""
    async with bench(provider, Cap(usd=1, per="hour", admit_at=1, name="all"), own_clock=True) as b:
        running = asyncio.ensure_future(b.router.run(chat()))
        await asked(provider, 1)
        b.store_clock.wall += round(jump * 1000)
        provider.advance(1)
        assert (await running).served
        status = await b.router.status()
        if jump == 2 * HOUR:
            assert await b.sums() == (0, provider.spent(), 0)
            assert status.too_late == 0
        else:
            assert (status.too_late, status.backlog, status.open) == (1, 0, 0)
            assert [record.levelname for record in caplog.records if "could not be counted" in record.message] == ["ERROR"]
        provider.advance(1)
        # The router has learnt the store's time by being told that its window is over.
        assert (await b.router.run(chat())).served
        windows = {bucket.window for bucket in (await b.router.status()).buckets}
        assert len(windows) == 2


@pytest.mark.parametrize("jump", [2 * HOUR, -2 * HOUR, 40 * 24 * HOUR, -40 * 24 * HOUR])
async def test_the_routers_wall_clock_jumps_while_calls_run(provider: LocalProvider, jump: float) -> None:
    """W7: leases are the store's affair and time limits go by the monotonic clock; the windows are corrected."""
    async with bench(provider, Cap(usd=1, per="hour", admit_at=1, name="all"), own_clock=True) as b:
        running = asyncio.ensure_future(b.router.run(chat(deadline=HOUR)))
        await asked(provider, 1)
        b.clock.wall += round(jump * 1000)
        await b.advance(LEASE / 3)
        assert [hold.state for hold in await b.holds()] == ["held"]
        other = asyncio.ensure_future(b.router.run(chat(deadline=HOUR)))
        await asked(provider, 2)
        assert len({hold.charges[0].bucket for hold in await b.holds()}) == 1
        provider.advance(2)
        await asyncio.gather(running, other)
        assert await b.sums() == (0, provider.spent(), 0)


# O6, O7: what waits is bounded, and seen.


@pytest.mark.parametrize("how", ["raises", "hangs", "raises, class open"])
async def test_a_hundred_thousand_calls_while_the_store_is_away_stay_within_the_bound(
    provider: LocalProvider, how: str
) -> None:
    """O6: what is kept is bounded by `max_open` and each caller has a clear answer."""
    bound, calls = 200, 100_000 if how == "hangs" else 5_000
    classes = [TaskClass("default", when_store_down="open", allowance_usd=1)] if "open" in how else []
    provider.advance(100_000)
    async with bench(provider, classes=classes, max_open=bound) as b:
        if how == "hangs":
            b.store.stops = {"reserve"}
        else:
            b.store.fails = {"reserve", "settle", "renew", "release"}
        answers: Counter[tuple[str, bool]] = Counter()
        task = chat()

        async def one() -> None:
            decision = (await b.router.run(task)).decision
            answers[decision.reason, decision.retry_after is not None] += 1

        hanging = bound if how == "hangs" else 0
        running: list[asyncio.Task[None]] = []
        most = 0
        for wave in range(1, calls // 1000 + 1):
            running = [each for each in running if not each.done()]
            running += [asyncio.ensure_future(one()) for _ in range(1000)]
            async with asyncio.timeout(20):
                while answers.total() < 1000 * wave - hanging:
                    await asyncio.sleep(0)
            settler = b.router._settler
            most = max(most, settler.open + settler.backlog + b.router._gate._reserving)
            assert len(settler._releases) <= 10_000
        assert most <= bound
        if how == "hangs":
            assert answers == {("full", True): calls - bound}
            b.store.fails = {"reserve"}
            b.store.goes_on.set()
            await asyncio.gather(*running)
            assert answers == {("full", True): calls - bound, ("store_unavailable", True): bound}
        elif how == "raises":
            assert answers == {("store_unavailable", True): calls}
        else:
            assert answers == {("store_open", False): bound, ("full", True): calls - bound}
            assert (await b.router.status()).backlog == bound
        b.store.stops, b.store.fails = set(), set()
        for _ in range(4):
            await b.advance(3)
        assert (await b.router.status()).backlog == 0
        assert await b.sums() == (0, provider.spent(), 0)


async def test_a_store_that_reserves_and_never_settles_is_seen_at_once_and_bounded(provider: LocalProvider) -> None:
    """O7: the backlog is a figure, what it cannot hold is refused, and it goes out in order when the store is back."""
    bound = 25
    provider.advance(1000)
    async with bench(provider, max_open=bound) as b:
        b.store.fails = {"settle"}
        for number in range(1, bound + 1):
            assert (await b.router.run(chat())).served
            status = await b.router.status()
            assert (status.backlog, status.open) == (number, 0)
        ids = b.store.asked("reserve")
        for _ in range(3):
            refused = (await b.router.run(chat())).decision
            assert (refused.served, refused.reason, refused.retry_after is not None) == (False, "full", True)
        assert len(b.store.asked("reserve")) == bound
        # Asked again and again, ever more slowly, and all of it is still held.
        tries = len(b.store.asked("settle"))
        for _ in range(60):
            await b.advance(1)
        assert tries < len(b.store.asked("settle")) <= tries + 40 * bound
        assert [hold.state for hold in await b.holds()] == ["held"] * bound
        b.store.fails = set()
        b.store.calls.clear()
        await b.advance(2)
        assert b.store.asked("settle") == ids
        assert (await b.router.status()).backlog == 0
        assert await b.sums() == (0, provider.spent(), 0)
        assert (await b.router.run(chat())).served


# H9 to H13, on every store.


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: TestClock) -> AsyncIterator[BudgetStore]:
    made: BudgetStore
    if request.param == "memory":
        made = MemoryStore(clock=clock)
    elif request.param == "sqlite":
        made = SQLiteStore(tmp_path / "budget.sqlite", clock=clock)
    else:
        made = RedisStore(request.getfixturevalue("redis_url"), namespace=tmp_path.name, clock=clock)
    yield made
    await made.aclose()


@asynccontextmanager
async def router_over(store: BudgetStore, provider: LocalProvider, clock: TestClock, *caps: Cap) -> AsyncIterator[Router]:
    async with client_of(provider.base_url) as client, Router(policy_of(client, *caps), store, clock=clock) as router:
        yield router


async def sums(router: Router) -> list[tuple[int, int]]:
    return [(bucket.held, bucket.spent) for bucket in (await router.status()).buckets]


async def test_an_actual_above_its_hold_is_counted_whole(store: BudgetStore, clock: TestClock) -> None:
    """H9: 95 of 100 held, 130 billed; nothing is clamped, and nothing more is admitted until the window is over."""
    reply = Reply(tokens=100, prompt_tokens=(130 - 95 + 9) * 500)
    with LocalProvider(prices=PRICES, reply=reply) as provider:
        limit = round(ESTIMATE * 100 / 95)
        cap = Cap(usd=f"{limit / 10**9:.9f}", per="hour", admit_at=1, name="all")
        async with router_over(store, provider, clock, cap) as router:
            result = await router.run(chat())
            assert result.decision.actual == provider.spent()
            assert provider.spent() > limit > ESTIMATE
            assert await sums(router) == [(0, provider.spent())]
            refused = (await router.run(chat(output=1))).decision
            assert refused.cap is not None
            assert (refused.kind, refused.cap.debt, refused.cap.remaining) == ("spent", provider.spent() - limit, 0)
            clock.wall += 3600 * 1000
            assert (await router.run(chat())).served


async def test_a_hold_that_spans_a_boundary_settles_where_it_was_admitted(
    store: BudgetStore, provider: LocalProvider, clock: TestClock
) -> None:
    """H10: nothing of it is taken off the next window."""
    async with router_over(store, provider, clock, Cap(usd=1, per="hour", admit_at=1, name="all")) as router:
        clock.wall += 3600 * 1000 - 1
        first = router.admit(chat())
        await first.__aenter__()
        clock.wall += 1
        async with router.admit(chat()) as second:
            second.settle_usd("0.000060")
        assert await sums(router) == [(ESTIMATE, 0), (0, 60_000)]
        first.settle_usd("0.000010")
        await first.__aexit__(None, None, None)
        assert await sums(router) == [(0, 10_000), (0, 60_000)]


async def test_wrong_settles_change_nothing(store: BudgetStore, provider: LocalProvider, clock: TestClock) -> None:
    """H11: negative, a float, a bucket that was not held; by the router's own face and by the store's."""
    async with router_over(store, provider, clock, Cap(usd=1, per="hour", admit_at=1, name="all")) as router:
        async with router.admit(chat()) as admission:
            wrong: Any
            for wrong in (-1, float("nan"), float("inf"), True, "much"):
                with pytest.raises((ValueError, TypeError)):
                    admission.settle_usd(wrong)
            for wrong in ({"input_tokens": -1, "output_tokens": 5}, 5, "usage", None, {}):
                with pytest.raises(ValueError, match="without usage"):
                    admission.settle(wrong)
            (hold,) = await store.holds()
            (charge,) = hold.charges
            for wrong in (-1, 1.5, True):
                with pytest.raises(InvalidCharge):
                    await store.settle(hold.id, [Charge(charge.bucket, wrong)])
            with pytest.raises(InvalidCharge):
                await store.settle(hold.id, [Charge(charge.bucket, 1), Charge(Bucket("another"), 1)])
            assert await sums(router) == [(ESTIMATE, 0)]
            assert await store.holds() == (hold,)
            admission.settle(Usage(input_tokens=1))
        assert await sums(router) == [(0, 2000)]


async def test_the_hold_that_is_released_is_the_one_that_was_named(
    store: BudgetStore, provider: LocalProvider, clock: TestClock
) -> None:
    """H12: two holds of different size, the older one first, then the other."""
    async with router_over(store, provider, clock, Cap(usd=1, per="hour", admit_at=1, name="all")) as router:
        async with router.admit(chat(output=50)) as older, router.admit(chat(output=100)) as younger:
            small, large = older.decision.estimate, younger.decision.estimate
            assert await sums(router) == [(small + large, 0)]
            older.release()
            await older.__aexit__(None, None, None)
            assert await sums(router) == [(large, 0)]
            assert [hold.charges[0].amount for hold in await store.holds()] == [large]
            younger.release()
        assert await sums(router) == [(0, 0)]


@pytest.mark.parametrize("kind", ["run", "stream", "admit"])
async def test_a_client_that_hung_up_while_its_reserve_was_on_the_wire_holds_nothing(
    provider: LocalProvider, kind: Literal["run", "stream", "admit"]
) -> None:
    """H13: the reserve was applied, its caller is gone; at the latest its lease ends it."""
    async with bench(provider) as b:
        b.store.stops = {"reserve"}

        async def work() -> None:
            if kind == "run":
                await b.router.run(chat())
            elif kind == "stream":
                await b.router.stream(chat())
            else:
                async with b.router.admit(chat()):
                    pass

        running = asyncio.ensure_future(work())
        await b.store.stopped.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        b.store.stops = set()
        await b.advance(LEASE)
        assert await b.holds() == ()
        assert provider.requests == []
        status = await b.router.status()
        assert (status.open, status.backlog) == (0, 0)
