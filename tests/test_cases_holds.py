"""Cases from the field: holds that stay, counters that drift."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from router import Cap, Retries, Task, TaskClass
from router.testing import LocalProvider, Reply
from stores import Bucket, BudgetStore, Charge, SQLiteStore, StoreUnavailable, new_id
from tests.redis_server import free_port
from tests.support import (
    CENT,
    PRICES,
    START,
    STRONG,
    Bench,
    TestClock,
    Wire,
    bench,
    chat,
    eventually,
    loses_the_first,
    to_the_limit,
    to_the_limit_when_let,
    workers,
    worth,
)

pytestmark = pytest.mark.anyio

HUNDRED = Cap(usd=1, per="hour", admit_at=1, name="all")
LEASE = 60_000


when_let = pytest.mark.parametrize("provider", [to_the_limit_when_let], indirect=True)


# The doors by which a call is left. Each is given a router with nothing held, and leaves by its own.


@dataclass
class Door:
    """One way to leave, with what the provider and the policy have to be for it."""

    leave: Callable[[Bench, Wire, LocalProvider], Awaitable[None]]
    reply: Any = to_the_limit
    policy: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.leave.__name__


async def served(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    assert (await b.router.run(worth(10))).served


async def error_of_the_provider(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    with pytest.raises(openai.BadRequestError):
        await b.router.run(worth(10))


async def time_out(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    with pytest.raises((openai.APITimeoutError, TimeoutError)):
        await b.router.run(worth(10))
    assert len(provider.requests) == 1


async def cancelled(b: Bench, running: asyncio.Future[Any]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def cancelled_while_it_is_reserved(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    on_its_way = asyncio.Event()

    async def there(name: str) -> None:
        if name == "reserve":
            on_its_way.set()

    wire.there = there
    running = asyncio.ensure_future(b.router.run(worth(10)))
    await on_its_way.wait()
    await cancelled(b, running)
    assert provider.requests == []


async def cancelled_before_the_call(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    held = asyncio.Event()

    async def back(name: str) -> None:
        if name == "reserve":
            held.set()

    wire.back = back
    running = asyncio.ensure_future(b.router.run(worth(10)))
    await held.wait()
    await cancelled(b, running)
    assert provider.requests == []


async def cancelled_in_the_call(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    running = asyncio.ensure_future(b.router.run(worth(10)))
    await provider.wait_for(lambda p: len(p.requests) == 1)
    assert (await b.sums())[0] == 10 * CENT
    await cancelled(b, running)


class Callback(Exception):
    """What a user's own code raises."""


async def rule_that_raises(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    with pytest.raises(Callback):
        await b.router.run(worth(10))


def raising_rule(task: Task) -> Any:
    raise Callback


async def code_around_an_admission_that_raises(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    with pytest.raises(Callback):
        async with b.router.admit(worth(10)):
            raise Callback


async def reader_that_raises(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    async def read() -> None:
        async with await b.router.stream(chat(output=50)) as stream:
            async for _ in stream:
                raise Callback

    with pytest.raises(Callback):
        await read()


async def log_handler_that_raises(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise Callback

    handler, logger = Raising(logging.INFO), logging.getLogger("budget_router")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        assert (await b.router.run(worth(10))).served
        assert (await b.router.run(worth(100))).served is False
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


async def generator_that_is_closed(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    stream = await b.router.stream(chat(output=50))
    chunks: Any = aiter(stream)
    await anext(chunks)
    assert (await b.sums())[0] > 0
    await chunks.aclose()
    # The stream itself is not dropped, so that it was the generator's end that counted.
    assert stream.decision.outcome == "left"


async def stream_that_is_never_read(b: Bench, wire: Wire, provider: LocalProvider) -> None:
    stream = await b.router.stream(chat(output=50))
    await stream.aclose()


DOORS = [
    Door(served),
    Door(error_of_the_provider, reply=Reply(status=400)),
    Door(time_out, reply=Reply(stall="before_first_byte"), policy={"retries": Retries(attempts=1, per_attempt=0.2)}),
    Door(cancelled_while_it_is_reserved),
    Door(cancelled_before_the_call),
    Door(cancelled_in_the_call, reply=to_the_limit_when_let),
    Door(rule_that_raises, policy={"rule": raising_rule}),
    Door(code_around_an_admission_that_raises),
    Door(reader_that_raises),
    Door(log_handler_that_raises),
    Door(generator_that_is_closed),
    Door(stream_that_is_never_read),
]


@pytest.mark.parametrize("door", DOORS, ids=str)
async def test_by_whichever_door_a_call_is_left_nothing_stays_held(store: BudgetStore, clock: TestClock, door: Door) -> None:
    """H1."""
    cap = Cap(usd=1, per="hour", admit_at=1, alert_at=(0.01,), name="all")
    wire = Wire(store)
    with LocalProvider(prices=PRICES, reply=door.reply) as provider:
        async with bench(provider, cap, store=wire, clock=clock, **door.policy) as b:
            await door.leave(b, wire, provider)

            async def none_is_held() -> bool:
                return (await b.sums())[0] == 0 and (await b.router.status()).open == 0

            await eventually(none_is_held)
            # No lease has ended: what was held was given back, or settled.
            assert clock.wall == START
            assert [hold.id for hold in await store.holds()] == []


@pytest.mark.parametrize("on_unanswered", ["release", "charge"])
async def test_ten_calls_that_cannot_connect_give_back_what_they_held(
    store: BudgetStore, clock: TestClock, on_unanswered: str
) -> None:
    """H2. Nothing was sent, so that none of them counts as unanswered."""
    port = free_port()
    async with bench(f"http://127.0.0.1:{port}/v1", HUNDRED, store=store, clock=clock, on_unanswered=on_unanswered) as b:
        answers = await asyncio.gather(*(b.router.run(worth(10)) for _ in range(10)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [openai.APIConnectionError] * 10
        assert await b.sums() == (0, 0)
        assert (await b.router.status()).unconfirmed == 0
        with LocalProvider(prices=PRICES, reply=to_the_limit, port=port):
            eleventh = await b.router.run(worth(10))
        assert eleventh.served
        assert await b.sums() == (0, 10 * CENT)


async def test_a_settle_whose_reply_was_lost_counts_once_when_it_is_sent_again(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """H3."""
    wire = Wire(store)
    wire.back = loses_the_first("settle")
    async with bench(provider, HUNDRED, store=wire, clock=clock) as b:
        assert (await b.router.run(worth(10))).served
        await drained(b)
        first, again = wire.ids("settle")
        assert first == again
        assert await b.sums() == (0, 10 * CENT)


async def drained(b: Bench) -> None:
    """Let the time pass that the backlog takes."""

    async def empty() -> bool:
        await b.clock.advance(1)
        return (await b.router.status()).backlog == 0

    await eventually(empty)


async def test_a_reserve_whose_reply_was_lost_holds_once_and_has_the_same_verdict(store: BudgetStore) -> None:
    """H4."""
    strong, cheap = (Bucket(name, starts=START, ends=START + 3_600_000) for name in ("strong", "cheap"))
    options = [[Charge(strong, 101, 100, 100)], [Charge(cheap, 40, 100, 100)]]
    wire, id = Wire(store), new_id(now=START)

    async def back(name: str) -> None:
        raise StoreUnavailable("test", "the reply was lost")

    wire.back = back
    with pytest.raises(StoreUnavailable):
        await wire.reserve(id, options, lease=LEASE)
    verdicts = [await store.reserve(id, options, lease=LEASE) for _ in range(2)]
    assert [(verdict.state, verdict.option) for verdict in verdicts] == [("held", 1)] * 2
    assert [[(b.bucket, b.held, b.spent) for b in verdict.balances] for verdict in verdicts] == [[(cheap, 40, 0)]] * 2
    assert [balance.held for balance in await store.balances([strong, cheap])] == [0, 40]


async def test_a_router_whose_reserve_had_no_reply_refuses_and_leaves_no_hold(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """H4, for a caller: the router does not know what it holds, and so closes the id."""
    wire = Wire(store)
    wire.back = loses_the_first("reserve")
    async with bench(provider, HUNDRED, store=wire, clock=clock) as b:
        refused = (await b.router.run(worth(60))).decision
        assert (refused.served, refused.reason) == (False, "store_unavailable")

        async def given_back() -> bool:
            return await store.holds() == ()

        await eventually(given_back)
        assert wire.ids("settle") == wire.ids("reserve")
        assert (await b.router.run(worth(60))).served
        assert await b.sums() == (0, 60 * CENT)


@when_let
@pytest.mark.parametrize("classes", [[], [TaskClass("short", output_limit=500)]])
async def test_a_request_without_a_limit_holds_the_default_limit_and_not_what_is_left(
    provider: LocalProvider, store: BudgetStore, clock: TestClock, classes: list[TaskClass]
) -> None:
    """H5."""
    limit = classes[0].output_limit if classes else 4096
    assert limit is not None
    one = STRONG.bound(input_tokens=9, output_tokens=limit)
    async with bench(provider, Cap(usd=2000, per="hour", name="all"), store=store, clock=clock, classes=classes) as b:
        running = {asyncio.ensure_future(b.router.run(chat("hello", output=None))) for _ in range(2)}
        await provider.wait_for(lambda p: len(p.requests) == 2)
        assert await b.sums() == (2 * one, 0)
        assert [entry.output_limit for entry in provider.requests] == [limit] * 2
        provider.advance(2)
        await asyncio.wait(running)


@pytest.mark.parametrize("applied", [False, True])
async def test_a_settle_while_the_store_is_away_is_not_waited_for_and_counts_once(
    provider: LocalProvider, store: BudgetStore, clock: TestClock, applied: bool
) -> None:
    """H6, the store away for three seconds; what it was sent meanwhile had been applied, or had not."""
    wire = Wire(store)

    async def away(name: str) -> None:
        if name == "settle" and clock.elapsed < 3:
            raise StoreUnavailable("test", "it is away")

    if applied:
        wire.back = away
    else:
        wire.there = away
    async with bench(provider, HUNDRED, store=wire, clock=clock) as b:
        results = [await b.router.run(worth(10)) for _ in range(3)]
        assert [(result.served, result.decision.actual) for result in results] == [(True, 10 * CENT)] * 3
        status = await b.router.status()
        assert (clock.elapsed, status.backlog) == (0, 3)
        while clock.elapsed < 2.9:
            await b.clock.advance(0.1)
            assert (await b.router.status()).backlog == 3
            assert sum(await b.sums()) == 30 * CENT  # held still, or spent already; never both
        await drained(b)
        assert await b.sums() == (0, 30 * CENT)


async def test_a_settle_that_hangs_does_not_keep_its_caller(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """H6, a store that is away without saying so."""
    wire, is_back = Wire(store), asyncio.Event()

    async def there(name: str) -> None:
        if name == "settle":
            await is_back.wait()

    wire.there = there
    async with bench(provider, HUNDRED, store=wire, clock=clock, settle_timeout=0.01) as b:
        try:
            async with asyncio.timeout(10):
                result = await b.router.run(worth(10))
            assert (result.served, result.decision.actual) == (True, 10 * CENT)
            assert await b.sums() == (10 * CENT, 0)
        finally:
            is_back.set()

        async def settled() -> bool:
            return await b.sums() == (0, 10 * CENT)

        await eventually(settled)
        assert len(wire.ids("settle")) == 1


async def test_what_a_killed_process_held_is_back_after_its_lease_and_settles_late_once(tmp_path: Path) -> None:
    """H7."""
    path, clock = tmp_path / "budget.sqlite", TestClock()
    with LocalProvider(prices=PRICES, reply=to_the_limit) as provider:
        async with SQLiteStore(path, clock=clock) as store, bench(provider, HUNDRED, store=store, clock=clock) as b:
            async with workers(1, path, usd=1, per="hour", admit_at=1, name="all") as (worker,):
                assert await worker.admit(60, now=START) == [True]
                await worker.kill()
            (hold,) = await store.holds()
            bucket = hold.charges[0].bucket
            await b.at(hold.lease_ends - 1)
            assert (await b.router.run(worth(60))).decision.kind == "busy"
            assert await b.sums() == (60 * CENT, 0)
            await b.at(hold.lease_ends)
            assert (await b.router.run(worth(60))).served
            (balance,) = await store.balances([bucket])
            assert (balance.held, balance.spent, balance.lost) == (0, 60 * CENT, 60 * CENT)
            actual = [Charge(bucket, 25 * CENT)]
            late = [await store.settle(hold.id, actual) for _ in range(2)]
            assert [(settlement.counted, settlement.late) for settlement in late] == [(True, True), (False, False)]
            (balance,) = await store.balances([bucket])
            assert (balance.held, balance.spent, balance.lost) == (0, 85 * CENT, 0)


async def test_a_reserve_that_arrives_after_its_release_takes_nothing(store: BudgetStore) -> None:
    """H14."""
    bucket, id = Bucket("run"), new_id(now=START)
    wire, arrives = Wire(store), asyncio.Event()

    async def there(name: str) -> None:
        if name == "reserve":
            await arrives.wait()

    wire.there = there
    delayed = asyncio.ensure_future(wire.reserve(id, [[Charge(bucket, 40, 100, 100)]], lease=LEASE))
    await wire.release(id)
    arrives.set()
    verdict = await delayed
    assert (verdict.state, verdict.option) == ("gone", None)
    assert await store.holds() == ()
    (balance,) = await store.balances([bucket])
    assert (balance.held, balance.spent) == (0, 0)


async def test_an_extend_that_was_overtaken_by_a_later_one_changes_nothing(store: BudgetStore) -> None:
    """H15."""
    bucket, id = Bucket("run"), new_id(now=START)
    wire, arrives = Wire(store), asyncio.Event()
    await store.reserve(id, [[Charge(bucket, 5, 100, 100)]], lease=LEASE)

    async def there(name: str) -> None:
        if name == "extend" and len(wire.ids("extend")) == 1:
            await arrives.wait()

    wire.there = there
    to_ten = asyncio.ensure_future(wire.extend(id, 1, [Charge(bucket, 10, 100, 100)]))
    await asyncio.sleep(0)
    to_twenty = await wire.extend(id, 2, [Charge(bucket, 20, 100, 100)])
    arrives.set()
    assert [(to_twenty.state, held(to_twenty)), ((await to_ten).state, held(await to_ten))] == [("held", [20])] * 2
    (balance,) = await store.balances([bucket])
    assert balance.held == 20
    await store.settle(id, [Charge(bucket, 12)])
    (balance,) = await store.balances([bucket])
    assert (balance.held, balance.spent) == (0, 12)


def held(verdict: Any) -> list[int]:
    return [balance.held for balance in verdict.balances]
