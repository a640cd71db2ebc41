"""Cases from the field: stores that are away, that come back older or empty, that are locked, that take no settles."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from router import Cap, Decision, RoutedStream, Task, TaskClass
from router.task import Kind
from router.testing import Entry, LocalProvider, Reply
from stores import Bucket, BudgetStore, Charge, MemoryStore, SQLiteStore, StoreUnavailable, new_id
from stores.redis import RedisStore
from tests import redis_server
from tests.redis_server import Server
from tests.support import CENT, FIFTEEN, Bench, TestClock, Wire, bench, chat, eventually, settle_down, worth

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
KINDS: tuple[Kind, ...] = ("chat", "response")
HUNDRED = Cap(usd=1, per="hour", admit_at=1, name="all")


def costs_what_it_holds(entry: Entry, *, gate: bool = False) -> Reply:
    """Bill all that was held, most of it for the prompt: to read thousands of chunks takes long."""
    limit = entry.output_limit or 0
    return Reply(prompt_tokens=15 + 5 * (limit - 10), tokens=10, gate=gate)


def five_cents_when_let(entry: Entry) -> Reply:
    """Answer so; where it is five cents, once the provider is told to advance."""
    return costs_what_it_holds(entry, gate=entry.output_limit == 4997)


billed_whole = pytest.mark.parametrize("provider", [costs_what_it_holds], indirect=True)
when_let = pytest.mark.parametrize("provider", [five_cents_when_let], indirect=True)


def worth_of(kind: Kind, cents: int) -> Task:
    """Return a task that holds so many cents."""
    return worth(cents) if kind == "chat" else Task.response(input=f"{FIFTEEN} eight", max_output_tokens=1000 * cents - 3)


async def run(b: Bench, task: Task) -> Decision:
    return (await b.router.run(task)).decision


async def stream(b: Bench, task: Task) -> Decision:
    opened: RoutedStream = await b.router.stream(task)
    if opened.served:
        async for _ in opened:
            pass
    return opened.decision


async def admit(b: Bench, task: Task) -> Decision:
    async with b.router.admit(task) as admission:
        if admission.served:
            admission.settle_usd("0.05")
    return admission.decision


Entrance = Callable[[Bench, Task], Awaitable[Decision]]
entrances = pytest.mark.parametrize("entrance", [run, stream, admit])


async def drained(b: Bench) -> None:
    """Let the time pass that the backlog takes."""

    async def empty() -> bool:
        await b.clock.advance(1)
        return (await b.router.status()).backlog == 0

    await eventually(empty)


# The store is away.


@billed_whole
@entrances
@pytest.mark.parametrize("kind", KINDS)
async def test_a_store_that_is_away_is_a_refusal_and_no_provider_is_asked(
    provider: LocalProvider, store: BudgetStore, clock: TestClock, entrance: Entrance, kind: Kind
) -> None:
    """O1."""
    wire = Wire(store)

    async def away(name: str) -> None:
        if name == "reserve":
            raise StoreUnavailable("test", "it is away")

    wire.there = away
    classes = [TaskClass("default", when_store_down="closed")]
    async with bench(provider, HUNDRED, store=wire, clock=clock, classes=classes) as b:
        refused = await entrance(b, worth_of(kind, 5))
        assert (refused.served, refused.reason, refused.retry_after) == (False, "store_unavailable", 5.0)
        assert refused.notes == ("the test store is unavailable: it is away",)
        assert (await b.router.status()).outages == {"refused": 1}
        assert provider.requests == []
        wire.there = Wire(store).there
        assert (await entrance(b, worth_of(kind, 5))).served
        await drained(b)  # the refused one's release goes first
        assert await b.sums() == (0, 5 * CENT)


# A Redis that comes back older, or empty, while calls run.


@pytest.fixture
def frail() -> Iterator[Server]:
    """A server for one test, which may kill it."""
    with redis_server.running() as server:
        yield server


@asynccontextmanager
async def two_of_one_budget(frail: Server, provider: LocalProvider, clock: TestClock) -> AsyncIterator[tuple[Bench, Bench]]:
    """Open two routers, each with a store of its own on one server, as two processes have."""
    async with (
        RedisStore(frail.url, clock=clock) as one,
        RedisStore(frail.url, clock=clock) as other,
        bench(provider, HUNDRED, store=one, clock=clock) as a,
        bench(provider, HUNDRED, store=other, clock=clock) as b,
    ):
        yield a, b


async def restarted(frail: Server, provider: LocalProvider, running: list[asyncio.Task[Decision]], answered: str) -> None:
    """Kill the server and start it again; the provider answers what is running while it is away, or afterwards."""
    frail.kill()
    if answered == "while it is away":
        await let_go(provider)
        await asyncio.wait(running)
    await asyncio.to_thread(frail.start)
    if answered == "afterwards":
        await let_go(provider)


async def let_go(provider: LocalProvider) -> None:
    provider.advance(1000)
    await provider.wait_for(lambda p: all(entry.finished for entry in p.requests))


async def under_way(provider: LocalProvider, *calls: Awaitable[Decision]) -> list[asyncio.Task[Decision]]:
    """Begin calls and wait until the provider has their requests."""
    before = len(provider.requests)
    running = [asyncio.ensure_future(call) for call in calls]
    await provider.wait_for(lambda p: len(p.requests) == before + len(calls))
    return running


async def bucket_of(b: Bench) -> Bucket:
    (hold, *_) = await b.store.holds()
    return hold.charges[0].bucket


async def refuses_as_rolled_back(b: Bench, provider: LocalProvider) -> None:
    asked = len(provider.requests)
    for entrance in (run, stream, admit):
        refused = await entrance(b, worth(1))
        assert (refused.served, refused.reason, refused.retry_after is not None) == (False, "store_rolled_back", True)
        assert "call accept()" in refused.notes[0]
    assert len(provider.requests) == asked
    assert "rolled back" in (await b.router.status()).store


@when_let
@pytest.mark.parametrize("answered", ["while it is away", "afterwards"])
@pytest.mark.parametrize("operator", ["accepts", "corrects"])
async def test_a_redis_that_came_back_older_admits_nothing_until_an_operator_says_so(
    frail: Server, provider: LocalProvider, clock: TestClock, answered: str, operator: str
) -> None:
    """O2: 90 of 100 spent and it comes back with 40; two calls of 5 are under way."""
    async with two_of_one_budget(frail, provider, clock) as (a, b):
        assert (await run(a, worth(40))).served
        with frail.client() as client:
            client.save()
        assert (await run(b, worth(50))).served
        assert await a.sums() == await b.sums() == (0, 90 * CENT)
        running = await under_way(provider, run(a, worth(5)), stream(b, worth_of("response", 5)))
        assert await a.sums() == (10 * CENT, 90 * CENT)
        bucket = await bucket_of(a)
        await restarted(frail, provider, running, answered)
        decisions = await asyncio.gather(*running)
        assert [(d.served, d.outcome, d.actual) for d in decisions] == [(True, "served", 5 * CENT)] * 2
        for each in (a, b):
            await drained(each)
        assert await a.sums() == await b.sums() == (0, 50 * CENT)
        await refuses_as_rolled_back(a, provider)
        await refuses_as_rolled_back(b, provider)
        await clock.advance(1800)  # no time heals it
        await refuses_as_rolled_back(a, provider)
        if operator == "corrects":
            await a.store.settle(new_id(now=clock.now()), [Charge(bucket, 50 * CENT)])
        await b.store.accept()
        room = 0 if operator == "corrects" else 50
        for each in (a, b):
            assert (await run(each, worth(room + 1))).kind == "spent"
        if room:
            assert (await run(a, worth(room))).served
        assert await b.sums() == (0, 100 * CENT)
        assert (await b.router.status()).store == "ok"


@when_let
@pytest.mark.parametrize("answered", ["while it is away", "afterwards"])
async def test_a_redis_that_came_back_empty_counts_what_was_under_way_and_admits_nothing(
    frail: Server, provider: LocalProvider, clock: TestClock, answered: str
) -> None:
    """O3."""
    async with two_of_one_budget(frail, provider, clock) as (a, b):
        assert (await run(a, worth(40))).served
        calls = [entrance(each, worth_of(kind, 5)) for each in (a, b) for entrance in (run, stream) for kind in KINDS]
        running = await under_way(provider, *calls)
        assert await a.sums() == await b.sums() == (40 * CENT, 40 * CENT)
        await restarted(frail, provider, running, answered)
        decisions = await asyncio.gather(*running)
        assert [(d.served, d.outcome, d.actual) for d in decisions] == [(True, "served", 5 * CENT)] * 8
        for each in (a, b):
            await drained(each)
        assert await a.sums() == await b.sums() == (0, 40 * CENT)
        for each in (a, b):
            await refuses_as_rolled_back(each, provider)
        await b.store.accept()
        assert (await run(a, worth(60))).served
        assert (await run(b, worth(1))).kind == "spent"
        assert await b.sums() == (0, 100 * CENT)


# A SQLite file that somebody else has locked.


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file as a backup does, from another connection."""
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        other.close()


async def waits_for_the_lock(path: Path) -> None:
    """Return when the store's thread has taken its turn at the file, in which it waits for the lock."""

    async def taken() -> bool:
        turn = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(turn)
        return False

    await eventually(taken)


@when_let
async def test_a_locked_file_is_waited_for_and_the_sums_are_exact(
    provider: LocalProvider, clock: TestClock, tmp_path: Path
) -> None:
    """O4, the lock gone within the store's bound."""
    path = tmp_path / "budget.sqlite"
    async with (
        SQLiteStore(path, clock=clock, timeout=60) as store,
        bench(provider, HUNDRED, store=store, clock=clock, settle_timeout=60) as b,
    ):
        before = await under_way(provider, *(entrance(b, worth(5)) for entrance in (run, stream)))
        with locked(path):
            await let_go(provider)  # their settles meet the lock
            await waits_for_the_lock(path)
            meanwhile = [asyncio.ensure_future(run(b, worth(3))) for _ in range(40)]
            await settle_down()
            assert not any(call.done() for call in (*before, *meanwhile))
        decisions = await asyncio.gather(*before, *meanwhile)
        assert Counter((d.served, d.actual) for d in decisions) == {
            (True, 5 * CENT): 2,
            (True, 3 * CENT): 30,
            (False, None): 10,
        }
        assert {d.reason for d in decisions if not d.served} == {"cap"}
        assert await b.sums() == (0, 100 * CENT)
        assert (await b.router.status()).backlog == 0


@when_let
async def test_a_file_that_stays_locked_past_the_bound_is_an_answer_and_no_settle_is_lost(
    provider: LocalProvider, clock: TestClock, tmp_path: Path
) -> None:
    """O4, the lock still there when the store's bound is over."""
    path = tmp_path / "budget.sqlite"
    async with (
        SQLiteStore(path, clock=clock, timeout=0.3) as store,
        bench(provider, HUNDRED, store=store, clock=clock) as b,
    ):
        before = await under_way(provider, *(entrance(b, worth(5)) for entrance in (run, stream)))
        with locked(path):
            await let_go(provider)
            decisions = await asyncio.gather(*before)
            assert [(d.served, d.actual) for d in decisions] == [(True, 5 * CENT)] * 2
            refused = await asyncio.gather(*(run(b, worth(3)) for _ in range(40)))
            assert {(d.served, d.reason) for d in refused} == {(False, "store_unavailable")}
            status = await b.router.status()
            assert (status.backlog, "unavailable" in status.store) == (2, True)
        await drained(b)
        assert await b.sums() == (0, 10 * CENT)
        assert (await run(b, worth(90))).served
        assert await b.sums() == (0, 100 * CENT)


# Two processes.


OPPOSITE = """
import asyncio, sys
from router import Cap, Router
from stores import SQLiteStore
from stores.redis import RedisStore
from tests.support import policy_of, worth

ORDERS = {"forward": ("user", "team", "org"), "backward": ("org", "team", "user")}

async def main(place, namespace, order):
    store = RedisStore(place, namespace=namespace, timeout=30) if namespace else SQLiteStore(place, timeout=30)
    caps = [Cap(usd=15, per=None, scope=label, admit_at=1, name=label) for label in ORDERS[order]]
    labels = {"user": "u", "team": "t", "org": "o"}
    async with store, Router(policy_of(None, *caps), store) as router:

        async def one():
            async with router.admit(worth(1, labels=labels)) as admission:
                if admission.served:
                    admission.settle_usd("0.01")
            assert admission.served or admission.decision.reason == "cap", admission.decision
            return admission.served

        print("ready", flush=True)
        sys.stdin.readline()
        admitted = 0
        for _ in range(20):
            admitted += sum(await asyncio.gather(*(one() for _ in range(50))))
        status = await router.status()
        print(admitted, *(name for name in (bucket.cap for bucket in status.buckets)), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_two_processes_that_take_the_same_scopes_in_opposite_order_never_wait_for_each_other(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """O5: 1,000 reserves each, over three scopes; 1,500 of them fit."""
    path = str(tmp_path / "budget.sqlite")
    place, namespace = (path, "") if kind == "sqlite" else (request.getfixturevalue("redis_url"), tmp_path.name)
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", OPPOSITE, place, namespace, order),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=pipe,
            stdout=pipe,
        )
        for order in ("forward", "backward")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        async with asyncio.timeout(60):
            said = [out.decode().split() for out, _ in await asyncio.gather(*(p.communicate(b"go\n") for p in processes))]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert [names for _, *names in said] == [["user", "team", "org"], ["org", "team", "user"]]
    assert sum(int(admitted) for admitted, *_ in said) == 1500
    async with RedisStore(place, namespace=namespace) if kind == "redis" else SQLiteStore(path) as store:
        assert await store.holds() == ()
        buckets = [Bucket(f"{label}|{value}|") for label, value in (("user", "u"), ("team", "t"), ("org", "o"))]
        balances = await store.balances(buckets)
        assert [(balance.held, balance.spent) for balance in balances] == [(0, 1500 * CENT)] * 3


# A store that is away for long, or that takes reserves and no settles.


async def test_what_is_kept_while_the_store_is_away_does_not_grow_with_the_calls(
    provider: LocalProvider, clock: TestClock
) -> None:
    """O6, after the bounds are reached; `test_leases` has 100,000 calls at once, and each class's answer."""
    wire = Wire(MemoryStore(clock=clock))

    async def away(name: str) -> None:
        wire.asked.clear()
        raise StoreUnavailable("test", "it is away")

    wire.there = away
    async with bench(provider, HUNDRED, store=wire, clock=clock, max_open=200) as b:
        task = chat()
        reasons: Counter[str] = Counter()

        async def thousand() -> int:
            """Make a thousand calls, and return how many objects there are afterwards."""
            for result in await asyncio.gather(*(b.router.run(task) for _ in range(1000))):
                reasons[result.decision.reason] += 1
                assert result.decision.retry_after is not None
            gc.collect()
            return len(gc.get_objects())

        kept = [await thousand() for _ in range(14)]
        # Each of the first ten thousand leaves an id to be released, should its reserve have been applied after all.
        assert kept[-1] - kept[10] < 1000
        assert sum(reasons.values()) == 14_000
        assert set(reasons) <= {"store_unavailable", "full"}
        wire.there = Wire(wire.inner).there
        await drained(b)
        assert (await run(b, worth(5))).served


@billed_whole
@entrances
@pytest.mark.parametrize("kind", KINDS)
async def test_a_store_that_reserves_and_never_settles_is_visible_at_once_and_soon_refused(
    provider: LocalProvider, store: BudgetStore, clock: TestClock, entrance: Entrance, kind: Kind
) -> None:
    """O7."""
    wire = Wire(store)

    async def takes_no_settle(name: str) -> None:
        if name == "settle":
            raise StoreUnavailable("test", "it takes no settle")

    wire.there = takes_no_settle
    async with bench(provider, HUNDRED, store=wire, clock=clock, max_open=6) as b:
        backlog = []
        for _ in range(6):
            decision = await entrance(b, worth_of(kind, 5))
            assert (decision.served, decision.actual) == (True, 5 * CENT)
            backlog.append((await b.router.status()).backlog)
        assert backlog == [1, 2, 3, 4, 5, 6]
        for _ in range(3):
            refused = await entrance(b, worth_of(kind, 5))
            assert (refused.served, refused.reason, refused.retry_after) == (False, "full", 1.0)
        ids = wire.ids("reserve")
        assert len(ids) == 6
        assert await b.sums() == (30 * CENT, 0)  # none of it can be spent twice meanwhile
        wire.there = Wire(store).there
        wire.asked.clear()
        await drained(b)
        assert wire.ids("settle") == ids
        assert await b.sums() == (0, 30 * CENT)
        assert (await entrance(b, worth_of(kind, 5))).served
