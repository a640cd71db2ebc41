"""A wire that fails at every point of the protocol: nothing counts twice, nothing is lost, and every caller has an answer."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio import Redis

from stores import Balance, Bucket, BudgetStore, Charge, Health, Hold, InvalidCharge, MemoryStore, StoreUnavailable, new_id
from stores.redis import RedisStore, _connect
from tests.proxy import POINTS, WAYS, Fault, Point, Proxy, Way
from tests.redis_server import Server, running

pytestmark = pytest.mark.anyio

START = 1_785_542_400_000  # 2026-08-01T00:00Z
LEASE = 60_000
HOUR = Bucket("hour", starts=START - 1_800_000, ends=START + 1_800_000)
RUN = Bucket("run")
SHORT, LONG = 0.1, 20.0
"""The time limits of a call in seconds: where a fault lets it run out, and where nothing should."""

numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as found:
        yield found


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    async with Proxy(server.port).open() as opened:
        yield opened


def charge(amount: int, bucket: Bucket = RUN, line: int | None = 1000) -> Charge:
    return Charge(bucket, amount, line, line)


def both(amount: int) -> list[Charge]:
    return [charge(amount), charge(amount // 2, HOUR)]


def limit(store: RedisStore, seconds: float) -> None:
    """Change the time limit of a store's calls from now on."""
    store._batcher._timeout = seconds


async def answered(call: Callable[[], Awaitable[Any]]) -> Any:
    """Make a call again and again, as its contract allows, until it is answered."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0)


# One call under one fault.


@dataclass
class Ground:
    """What a call is made on: two ids of its own, and the time."""

    now: int = START
    id: str = field(default_factory=lambda: new_id(now=START))
    other: str = field(default_factory=lambda: new_id(now=START))


Step = Callable[[BudgetStore, Ground], Awaitable[Any]]


async def nothing(store: BudgetStore, ground: Ground) -> None:
    """Need nothing before the call."""


async def reserved(store: BudgetStore, ground: Ground) -> None:
    await store.reserve(ground.id, [both(60)], lease=LEASE)


async def expired(store: BudgetStore, ground: Ground) -> None:
    await reserved(store, ground)
    ground.now = START + LEASE


async def settled(store: BudgetStore, ground: Ground) -> None:
    await reserved(store, ground)
    await store.settle(ground.id, both(40))


CALLS: dict[str, tuple[Step, Step]] = {
    "reserve": (nothing, lambda store, g: store.reserve(g.id, [[charge(2000)], both(60)], lease=LEASE)),
    "extend": (reserved, lambda store, g: store.extend(g.id, 1, both(90))),
    "settle": (reserved, lambda store, g: store.settle(g.id, both(40))),
    "settle, late": (expired, lambda store, g: store.settle(g.id, both(40))),
    "settle, absent": (nothing, lambda store, g: store.settle(g.id, both(40))),
    "release": (reserved, lambda store, g: store.release(g.id)),
    "renew": (reserved, lambda store, g: store.renew([g.id, g.other], lease=2 * LEASE)),
    "renew, expired": (expired, lambda store, g: store.renew([g.id], lease=LEASE)),
    "credit": (settled, lambda store, g: store.credit(g.other, both(20))),
    "balances": (settled, lambda store, g: store.balances([RUN, HOUR])),
    "holds": (reserved, lambda store, g: store.holds()),
    "check": (reserved, lambda store, g: store.check()),
    "accept": (reserved, lambda store, g: store.accept()),
}
"""What was done before, and the call."""

FAULTS = {
    **{f"{way} {point}": (Fault(point, way),) for point in POINTS for way in WAYS},
    # The store itself sends once more when a connection breaks; so that its caller hears of it, it breaks twice.
    **{f"{way} {point}, twice": (Fault(point, way),) * 2 for point in POINTS for way in WAYS if way in ("close", "reset")},
}

KINDS: dict[str, Callable[[Proxy], Any]] = {
    "the store's own client": lambda proxy: proxy.url,
    "a default client": lambda proxy: Redis(port=proxy.port),
}


def plain(answer: object) -> object:
    """Leave out what no two stores share."""
    return answer.rolled_back if isinstance(answer, Health) else answer


async def books(store: BudgetStore) -> tuple[tuple[Balance, ...], tuple[Hold, ...]]:
    """Read all that a store knows about the ground."""
    return await store.balances([RUN, HOUR]), await store.holds()


@asynccontextmanager
async def wired(server: Server, kind: str, ground: Ground) -> AsyncIterator[tuple[RedisStore, Proxy]]:
    """Open a store of its own namespace over a proxy of its own."""
    async with Proxy(server.port).open() as proxy:
        client = KINDS[kind](proxy)
        store = RedisStore(client, namespace=f"wire{next(numbers)}", timeout=LONG, clock=lambda: ground.now)
        try:
            yield store, proxy
        finally:
            await store.aclose()
            if not isinstance(client, str):
                await client.aclose()


async def expected_of(ground: Ground, before: Step, call: Step) -> tuple[list[object], object]:
    """Have a store in memory do the same; return the answers to the call and to its repetition, and the books."""
    model = MemoryStore(clock=lambda: ground.now)
    await before(model, ground)
    answers = [plain(await call(model, ground)) for _ in range(2)]
    return answers, await books(model)


async def in_order(store: RedisStore) -> None:
    """Find each of several answers at the right one of as many callers, whatever the connections went through."""

    async def caller(number: int) -> None:
        id, bucket = new_id(now=START), Bucket(f"after {number}")
        verdict = await store.reserve(id, [[charge(number, bucket)]], lease=LEASE)
        assert verdict.balances[0][:2] == (bucket, number)
        settlement = await store.settle(id, [charge(2 * number, bucket)])
        assert settlement.balances[0][:3] == (bucket, 0, 2 * number)

    await asyncio.gather(*map(caller, range(1, 4)))


async def one_cell(server: Server, kind: str, call_name: str, faults: tuple[Fault, ...]) -> None:
    before, call = CALLS[call_name]
    ground = Ground()
    expected, expected_books = await expected_of(ground, before, call)
    ground.now = START
    async with wired(server, kind, ground) as (store, proxy), asyncio.timeout(60):
        await store.check()
        await before(store, ground)
        proxy.arm(*faults)
        limit(store, SHORT)
        try:
            first = plain(await call(store, ground))
        except StoreUnavailable:
            pass
        else:
            assert first in expected
            # Who was never answered on the wire was not answered out of thin air.
            assert faults[0].way in ("delay", "close", "reset")
        assert proxy.met >= 1
        proxy.heal()
        limit(store, LONG)
        assert plain(await call(store, ground)) in expected
        await proxy.let_go()  # what was held back arrives only now, after its own repetition
        await in_order(store)
        assert await books(store) == expected_books
        assert not (await store.check()).rolled_back


@pytest.mark.parametrize("kind", KINDS)
async def test_wherever_the_wire_fails_a_call_that_is_repeated_counts_once(
    server: Server, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call x a point of the protocol x what happens there; then the same call again, and the books of a store in memory."""
    cells = list(itertools.product(CALLS, FAULTS))
    room = asyncio.Semaphore(12)  # most of a cell is waiting

    async def cell(call_name: str, fault: str) -> None:
        async with room:
            try:
                await one_cell(server, kind, call_name, FAULTS[fault])
            except BaseException as error:
                error.add_note(f"{call_name}, {fault}")
                raise

    async with asyncio.TaskGroup() as group:
        for names in cells:
            group.create_task(cell(*names))
    assert len(cells) == len(CALLS) * (len(POINTS) * len(WAYS) + len(POINTS) * 2)
    with capsys.disabled():
        print(f" [{len(cells)} cells of {kind}] ", end="")


# Commands that overtake each other, because the connection of the first is held back and its caller went on without it.

OVERTAKING: dict[str, Step] = {
    "reserve": lambda store, g: store.reserve(g.id, [both(60)], lease=LEASE),
    "extend to 90": lambda store, g: store.extend(g.id, 1, both(90)),
    "extend to 30": lambda store, g: store.extend(g.id, 2, both(30)),
    "settle": lambda store, g: store.settle(g.id, both(40)),
    "release": lambda store, g: store.release(g.id),
    "renew": lambda store, g: store.renew([g.id], lease=2 * LEASE),
    "credit": lambda store, g: store.credit(g.other, both(20)),
    "credit of the same id": lambda store, g: store.credit(g.id, both(20)),
}

HELD_BACK: tuple[Point, ...] = ("before the request", "in the request")


async def one_overtaking(server: Server, point: Point, before: Step, first: Step, second: Step) -> None:
    ground = Ground()
    model = MemoryStore(clock=lambda: ground.now)
    async with wired(server, "the store's own client", ground) as (store, proxy), asyncio.timeout(60):
        for each in (store, model):
            await each.settle(new_id(now=START), both(50))
            await before(each, ground)
        proxy.arm(Fault(point, "hold"))
        limit(store, SHORT)
        with pytest.raises(StoreUnavailable):
            await first(store, ground)
        limit(store, LONG)
        assert await outcome(second, store, ground) == await outcome(second, model, ground)
        await proxy.let_go()
        await outcome(first, model, ground)
        assert await books(store) == await books(model)
        # The caller of the first asks again, not knowing.
        assert await outcome(first, store, ground) == await outcome(first, model, ground)
        assert await books(store) == await books(model)
        await in_order(store)


async def outcome(step: Step, store: BudgetStore, ground: Ground) -> object:
    """Return the answer to a call, or the sentence that refuses it."""
    try:
        return await step(store, ground)
    except InvalidCharge as error:
        return str(error)


async def test_whoever_is_overtaken_on_the_wire_changes_what_the_rules_say_in_the_order_of_arrival(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """H14, H15: a call that is held back x one that overtakes it x whether the id was held; a store in memory is the model."""
    cells = list(itertools.product(HELD_BACK, (nothing, reserved), OVERTAKING, OVERTAKING))
    room = asyncio.Semaphore(12)

    async def cell(point: Point, before: Step, first: str, second: str) -> None:
        async with room:
            try:
                await one_overtaking(server, point, before, OVERTAKING[first], OVERTAKING[second])
            except BaseException as error:
                error.add_note(f"{first} held back {point}, overtaken by {second}, {before.__name__}")
                raise

    async with asyncio.TaskGroup() as group:
        for names in cells:
            group.create_task(cell(*names))
    with capsys.disabled():
        print(f" [{len(cells)} overtakings] ", end="")


# Many callers on a bad wire.


@dataclass
class Told:
    """What one of many callers was told: how far it came, and what it will have been charged."""

    id: str
    bucket: Bucket
    held: int
    actual: int
    reserved: bool = False
    settles: bool = True


async def one_of_many(store: RedisStore, told: Told) -> None:
    """Reserve and settle, as far as the wire lets it; raises what the store raises."""
    verdict = await store.reserve(told.id, [[charge(told.held, told.bucket, None), charge(told.held, HOUR, None)]], lease=LEASE)
    assert verdict.held
    assert verdict.balances[0][:2] == (told.bucket, told.held)
    told.reserved = True
    if told.actual % 3 == 0:
        told.settles = False
        await store.release(told.id)
        return
    settlement = await store.settle(told.id, [charge(told.actual, told.bucket), charge(told.actual, HOUR)])
    assert settlement.balances[0][:3] == (told.bucket, 0, told.actual)


async def finish(store: RedisStore, told: Told) -> None:
    """Repeat by its id what may or may not have been done: who settles, settles, whatever became of its reserve."""
    if told.reserved and told.settles:
        await store.settle(told.id, [charge(told.actual, told.bucket), charge(told.actual, HOUR)])
    else:
        told.settles = False
        await store.release(told.id)


def many(count: int, draw: random.Random) -> list[Told]:
    buckets = [Bucket(f"of {next(numbers)}") for _ in range(count)]
    return [Told(new_id(now=START), bucket, draw.randrange(1, 99), draw.randrange(1, 99)) for bucket in buckets]


async def exact(store: RedisStore, all_told: list[Told]) -> None:
    """Find every caller's own sum, and the sum of all, to the unit."""
    actuals = [told.actual if told.settles else 0 for told in all_told]
    found = await store.balances([told.bucket for told in all_told])
    assert [(b.held, b.spent, b.lost) for b in found] == [(0, actual, 0) for actual in actuals]
    (hour,) = await store.balances([HOUR])
    assert (hour.held, hour.spent, hour.lost) == (0, sum(actuals), 0)
    assert await store.holds() == ()
    assert not (await store.check()).rolled_back


def faults_at_random(count: int, draw: random.Random, *ways: Way) -> list[Fault]:
    return [Fault(draw.choice(POINTS), draw.choice(ways)) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
async def test_many_callers_on_a_wire_that_fails_at_random_are_counted_once_each(server: Server, kind: str, seed: int) -> None:
    draw = random.Random(seed)
    ground = Ground()
    async with wired(server, kind, ground) as (store, proxy), asyncio.timeout(60):
        await store.check()
        all_told = many(300, draw)
        limit(store, SHORT)
        proxy.dribble = draw
        proxy.arm(*faults_at_random(8, draw, "delay", "close", "reset", "swallow", "hold"))
        # In waves, so that there are batches enough to meet the faults.
        failed = 0
        for start in range(0, 300, 30):
            answers = await asyncio.gather(
                *(one_of_many(store, told) for told in all_told[start : start + 30]), return_exceptions=True
            )
            assert [each for each in answers if each is not None and not isinstance(each, StoreUnavailable)] == []
            failed += sum(each is not None for each in answers)
        assert failed > 0
        assert proxy.met == 8
        proxy.heal()
        proxy.dribble = None
        limit(store, LONG)
        await asyncio.gather(*(finish(store, told) for told in all_told))
        await proxy.let_go()
        await exact(store, all_told)


@pytest.mark.parametrize("kind", KINDS)
async def test_in_a_partition_every_caller_has_an_answer_and_afterwards_each_is_counted_once(server: Server, kind: str) -> None:
    draw = random.Random(11)
    ground = Ground()
    async with wired(server, kind, ground) as (store, proxy), asyncio.timeout(60):
        await store.check()
        all_told = many(2000, draw)
        proxy.arm(*([Fault("before the reply", "delay")] * 8), Fault("before the reply", "partition"))
        limit(store, 1)
        answers = await asyncio.gather(*(one_of_many(store, told) for told in all_told), return_exceptions=True)
        unavailable = [each for each in answers if isinstance(each, StoreUnavailable)]
        assert [each for each in answers if each is not None and not isinstance(each, StoreUnavailable)] == []
        assert len(unavailable) > 1000
        # The wire is still dead: a newcomer is told so too, and so is who only reads.
        limit(store, SHORT)
        for call in (store.check, lambda: store.balances([HOUR]), store.holds):
            with pytest.raises(StoreUnavailable):
                await call()
        proxy.heal()
        limit(store, LONG)
        await gone_by(store)
        await asyncio.gather(*(finish(store, told) for told in all_told))
        await exact(store, all_told)


# Callers that go away, and clients whose connections run out.

CLIENTS: dict[str, Callable[[int], Redis]] = {
    "the store's own": lambda port: _connect(f"redis://127.0.0.1:{port}"),
    "default": lambda port: Redis(port=port),
    "protocol 3": lambda port: Redis(port=port, protocol=3),
    "one connection": lambda port: Redis(port=port, single_connection_client=True),
    "blocking pool": lambda port: Redis.from_pool(redis.asyncio.BlockingConnectionPool(port=port, max_connections=2)),
}


async def gone_by(store: RedisStore) -> None:
    """Return when nothing is on its way any more that had a shorter limit: a batch has the time of its oldest item."""
    while True:
        with suppress(StoreUnavailable):
            await store.check()
            return


@pytest.mark.parametrize("kind", CLIENTS)
async def test_callers_and_batches_that_are_cancelled_anywhere_leave_no_connection_in_a_broken_state(
    proxy: Proxy, kind: str
) -> None:
    """A caller's own cancellation never reaches a connection; the end of a batch's time does, at any point of the protocol."""
    draw = random.Random(5)
    namespace = f"wire{next(numbers)}"
    client = CLIENTS[kind](proxy.port)
    store = RedisStore(client, namespace=namespace, timeout=LONG, clock=lambda: START)
    async with asyncio.timeout(90):
        await store.check()
        proxy.dribble = draw
        all_told = many(300, draw)
        ends: set[str] = set()

        async def impatient(told: Told) -> None:
            caller = asyncio.ensure_future(one_of_many(store, told))
            asyncio.get_running_loop().call_later(draw.random() * 0.02, caller.cancel)
            try:
                await caller
                ends.add("answered")
            except asyncio.CancelledError:
                ends.add("cancelled")
            except StoreUnavailable:
                ends.add("unavailable")

        for start in range(0, 300, 10):
            limit(store, draw.choice((0.002, 0.005, 0.01, LONG)))
            await asyncio.gather(*map(impatient, all_told[start : start + 10]))
        assert ends >= {"cancelled", "unavailable"}
        limit(store, LONG)
        proxy.dribble = None
        await gone_by(store)
        after = many(1000, draw)
        await asyncio.gather(*(one_of_many(store, told) for told in after))
        for told in all_told:
            assert (await store.reserve(told.id, [[charge(told.held, told.bucket)]], lease=LEASE)).state in ("held", "gone")
        await asyncio.gather(*(finish(store, told) for told in all_told))
        await exact(store, after + all_told)
    await store.aclose()
    await client.aclose()


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_caller_that_goes_away_on_a_slow_wire_leaves_no_hold_that_it_does_not_know_of(proxy: Proxy, kind: str) -> None:
    draw = random.Random(8)
    client = CLIENTS[kind](proxy.port)
    store = RedisStore(client, namespace=f"wire{next(numbers)}", timeout=LONG, clock=lambda: START)
    async with asyncio.timeout(60):
        await store.check()
        proxy.dribble = draw
        all_told = many(300, draw)
        cancelled = 0
        for start in range(0, 300, 10):
            callers = [asyncio.ensure_future(one_of_many(store, told)) for told in all_told[start : start + 10]]
            for caller in callers:
                asyncio.get_running_loop().call_later(draw.random() * 0.01, caller.cancel)
            await asyncio.wait(callers)
            cancelled += sum(caller.cancelled() for caller in callers)
        assert cancelled > 30
        proxy.dribble = None
        known = {told.id for told in all_told if told.reserved}
        assert {hold.id for hold in await store.holds()} <= known
        await asyncio.gather(*(finish(store, told) for told in all_told if told.reserved))
        for told in all_told:
            told.settles = told.settles and told.reserved
        await exact(store, all_told)
    await store.aclose()
    await client.aclose()


async def take(pool: Any) -> Any:
    """Take a connection out of a pool, as another part of the application does."""
    return await pool.get_connection()


async def test_an_exhausted_pool_is_an_answer_and_the_store_works_when_a_connection_is_free(server: Server) -> None:
    pool = redis.asyncio.ConnectionPool(port=server.port, max_connections=2)
    async with Redis.from_pool(pool) as client:
        store = RedisStore(client, namespace=f"wire{next(numbers)}", clock=lambda: START)
        all_told = many(500, random.Random(3))
        taken: list[Any] = [await take(pool) for _ in range(2)]
        answers = await asyncio.gather(*(one_of_many(store, told) for told in all_told), return_exceptions=True)
        assert {type(each) for each in answers} == {StoreUnavailable}
        assert {str(each).partition(";")[0] for each in answers} == {
            "the redis store is unavailable: the client has no connection left"
        }
        await pool.release(taken.pop())
        # With one connection for two batches, every other one is refused: all of it is answered, and repeated by id.
        await asyncio.gather(*(one_of_many(store, told) for told in all_told), return_exceptions=True)
        await pool.release(taken.pop())
        await asyncio.gather(*(finish(store, told) for told in all_told))
        await exact(store, all_told)
        await store.aclose()


async def test_a_pool_that_waits_for_a_connection_is_waited_for_within_the_stores_own_limit(server: Server) -> None:
    pool = redis.asyncio.BlockingConnectionPool(port=server.port, max_connections=1, timeout=None)
    async with Redis.from_pool(pool) as client:
        store = RedisStore(client, namespace=f"wire{next(numbers)}", timeout=LONG, clock=lambda: START)
        all_told = many(500, random.Random(4))
        taken = await take(pool)
        limit(store, SHORT)
        answers = await asyncio.gather(*(one_of_many(store, told) for told in all_told), return_exceptions=True)
        assert all(isinstance(each, StoreUnavailable) for each in answers)
        limit(store, LONG)
        await pool.release(taken)
        await gone_by(store)
        await asyncio.gather(*(finish(store, told) for told in all_told))
        more = many(500, random.Random(6))
        await asyncio.gather(*(one_of_many(store, told) for told in more))
        await exact(store, all_told + more)
        await store.aclose()
