"""Interrupts from outside: Ctrl-C, a closing that is cancelled at each of its awaits, a Redis that loads its data."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router import Cap, Router
from router.testing import LocalProvider, Reply
from stores import Bucket, BudgetStore, Charge, MemoryStore, SQLiteStore, StoreUnavailable, new_id
from stores.redis import RedisStore
from tests import redis_server
from tests.redis_server import Server
from tests.support import (
    CENT,
    PRICES,
    TestClock,
    Wire,
    bench,
    chat,
    eventually,
    local_client,
    policy_of,
    settle_down,
    to_the_limit_when_let,
    worth,
)
from tests.test_cancellation import MOST_AWAITS, cancelled_at
from tests.test_cases_outages import locked

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

ROOT = Path(__file__).parent.parent
ALL = Bucket("all|")
CAP = Cap(usd=1, per=None, admit_at=1, name="all")


# Ctrl-C.

INTERRUPTED = """
import asyncio, sys
from router import Cap, Router, Task
from stores import SQLiteStore
from tests.support import chat, local_client, policy_of

PROMPT = "word " * 300
CAP = Cap(usd=1, per=None, admit_at=1, name="all")
STREAMED = {"chat": chat(PROMPT), "response": Task.response(input=PROMPT, max_output_tokens=100)}

async def read(router, kind, four_came):
    seen = 0
    async for chunk in await router.stream(STREAMED[kind]):
        seen += chunk.type.endswith(".delta") if kind == "response" else bool(chunk.choices)
        if seen == 4:
            four_came.set()

async def call(router, four_came):
    await four_came.wait()
    await router.run(chat())

def router_of(url, store):
    return Router(policy_of(local_client(url), CAP, lease=60, settle_timeout=1), store)

async def in_blocks(path, url, kind):
    async with SQLiteStore(path, timeout=1) as store, router_of(url, store) as router:
        four_came = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(read(router, kind, four_came))
            group.create_task(call(router, four_came))

async def bare(path, url, kind):
    router, four_came = router_of(url, SQLiteStore(path, timeout=1)), asyncio.Event()
    kept = [asyncio.ensure_future(read(router, kind, four_came)), asyncio.ensure_future(call(router, four_came))]
    await asyncio.Event().wait()

asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
"""


async def started(provider: LocalProvider, *arguments: str) -> asyncio.subprocess.Process:
    """Start a process, and wait until it has read four tokens of a stream and waits for the answer to a call."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", INTERRUPTED, *arguments),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    await provider.wait_for(lambda p: len(p.requests) == 1, timeout=30)
    provider.advance(4)
    await provider.wait_for(lambda p: len(p.requests) == 2, timeout=30)
    return process


async def ended(process: asyncio.subprocess.Process) -> str:
    """Wait until a process has ended by KeyboardInterrupt, and return what it said."""
    async with asyncio.timeout(30):
        _, said = await process.communicate()
    assert process.returncode == -signal.SIGINT
    assert "\nKeyboardInterrupt\n" in said.decode()
    return said.decode()


@pytest.mark.parametrize("kind", ["chat", "response"])
@pytest.mark.parametrize("program", ["in_blocks", "bare"])
async def test_an_interrupted_program_settles_its_stream_and_holds_nothing(tmp_path: Path, program: str, kind: str) -> None:
    path = tmp_path / "budget.sqlite"
    with LocalProvider(prices=PRICES, reply=Reply(tokens=50, gate=True)) as provider:
        process = await started(provider, program, str(path), provider.base_url, kind)
        process.send_signal(signal.SIGINT)
        said = await ended(process)
        assert "was never retrieved" not in said
        assert "was destroyed" not in said
        await provider.wait_for(lambda p: all(entry.hung_up for entry in p.requests), timeout=30)
        streamed, called = provider.requests
        assert (streamed.generated, called.cost) == (4, None)
        async with SQLiteStore(path) as store:
            assert await store.holds() == ()
            (balance,) = await store.balances([ALL])
            assert (balance.held, balance.lost) == (0, 0)
            # Within 2 %: no usage comes to a stream that is left.
            assert abs(balance.spent - provider.spent()) * 100 <= provider.spent() * 2
            assert balance.spent > 4 * 10_000


async def test_what_an_interrupted_program_cannot_settle_is_held_until_its_lease_and_no_longer(tmp_path: Path) -> None:
    """The file is locked for as long as the program lives, and a second Ctrl-C ends its waiting."""
    path = tmp_path / "budget.sqlite"
    with LocalProvider(prices=PRICES, reply=Reply(tokens=50, gate=True)) as provider:
        process = await started(provider, "in_blocks", str(path), provider.base_url, "chat")
        with locked(path):
            process.send_signal(signal.SIGINT)
            await provider.wait_for(lambda p: all(entry.hung_up for entry in p.requests), timeout=30)
            process.send_signal(signal.SIGINT)
            await ended(process)
        async with SQLiteStore(path) as store:
            holds = await store.holds()
            assert [hold.state for hold in holds] == ["held", "held"]
            amounts = [hold.charges[0].amount for hold in holds]
            assert sum(amounts) > 2 * 100 * 10_000
            (balance,) = await store.balances([ALL])
            assert (balance.held, balance.spent) == (sum(amounts), 0)
        ends = max(hold.lease_ends for hold in holds)
        async with SQLiteStore(path, clock=lambda: ends) as store:
            (balance,) = await store.balances([ALL])
            assert (balance.held, balance.lost) == (0, sum(amounts))


# Closing, cancelled at each of its awaits.


class Made:
    """Makes stores of one kind, one after another, and says what they left behind."""

    def __init__(self, kind: str, folder: Path, server: Server | None) -> None:
        self.kind = kind
        self._folder = folder
        self._server = server

    def store(self) -> BudgetStore:
        if self.kind == "memory":
            return MemoryStore()
        if self.kind == "sqlite":
            return SQLiteStore(self._folder / "budget.sqlite")
        assert self._server is not None
        return RedisStore(self._server.url, namespace=self._folder.name)

    def left(self) -> tuple[list[str], int]:
        """Return the threads that a store has, and how many connections the server has besides the one that asks."""
        threads = [thread.name for thread in threading.enumerate() if "SQLiteStore" in thread.name]
        if self._server is None:
            return threads, 0
        with self._server.client() as client:
            return threads, len(client.client_list()) - 1


@pytest.fixture(params=["memory", "sqlite", "redis"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    if request.param != "redis":
        yield Made(request.param, tmp_path, None)
        return
    with redis_server.running() as server:
        yield Made(request.param, tmp_path, server)


async def alone(before: set[asyncio.Task[Any]]) -> bool:
    """Say whether no task is left but those that were there before."""
    return asyncio.all_tasks() <= {*before, asyncio.current_task()}


async def test_closing_a_store_that_is_cancelled_at_any_await_leaves_nothing_and_loses_nothing(made: Made) -> None:
    spent = 0
    for at in range(1, MOST_AWAITS):
        before = asyncio.all_tasks()
        store = made.store()
        held = [new_id() for _ in range(3)]
        for id in held:
            await store.reserve(id, [[Charge(ALL, 5)]], lease=60_000)
        under_way = [asyncio.ensure_future(store.settle(id, [Charge(ALL, 3)])) for id in held]
        await asyncio.sleep(0)
        came = await cancelled_at(store.aclose(), at)
        settled = await asyncio.gather(*under_way)
        assert [settlement.counted for settlement in settled] == [True] * 3, f"await {at}"
        spent += 9
        await eventually(lambda before=before: alone(before))  # type: ignore[misc]

        async def let_go() -> bool:
            return made.left() == ([], 0)

        await eventually(let_go)
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.check()
        await store.aclose()
        if made.kind != "memory":  # what memory knows ends with it
            other = made.store()
            (balance,) = await other.balances([ALL])
            assert (balance.held, balance.spent) == (0, spent), f"await {at}"
            await other.aclose()
        if not came:
            break
    else:
        pytest.fail("it never came to its end")
    assert at > (made.kind != "memory")


async def test_closing_a_router_that_is_cancelled_at_any_await_leaves_nothing_and_loses_nothing(made: Made) -> None:
    """One settle waits in the backlog and a stream is being read; in real time, so that what waits goes on meanwhile."""
    store = made.store()
    spent = 0
    with LocalProvider(prices=PRICES, reply=Reply(tokens=50, gate=True)) as provider:
        async with local_client(provider.base_url) as client:
            for at in range(1, MOST_AWAITS):
                before = asyncio.all_tasks()
                wire: Any = Wire(store)
                router = Router(policy_of(client, CAP, lease=0.6), wire)
                await router.__aenter__()
                async with router.admit(chat()) as admission:
                    admission.settle_usd("0.0002")
                    wire.there = away
                assert (await router.status()).backlog == 1
                stream = await router.stream(chat())
                reading = asyncio.ensure_future(anext(stream))
                await settle_down()
                wire.there = Wire(store).there
                came = await cancelled_at(router.aclose(), at)
                with pytest.raises(StopAsyncIteration):
                    await reading
                await eventually(lambda before=before: alone(before))  # type: ignore[misc]
                await provider.wait_for(lambda p: p.requests[-1].hung_up)
                assert stream.decision.outcome == "left"
                spent += 200_000 + (stream.decision.actual or 0)
                (balance,) = await store.balances([ALL])
                assert (balance.held, balance.spent, balance.lost) == (0, spent, 0), f"await {at}"
                assert (await router.run(chat())).decision.reason == "closed"
                await router.aclose()
                if not came:
                    break
            else:
                pytest.fail("it never came to its end")
    assert at > 2
    await store.aclose()

    async def let_go() -> bool:
        return made.left() == ([], 0)

    await eventually(let_go)


async def away(name: str) -> None:
    if name == "settle":
        raise StoreUnavailable("test", "it is away")


# A Redis that loads its data.


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.apt)])
def slow_to_load(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with enough data that its loading can be held up between two keys."""
    program = redis_server.programs().get(request.param)
    if program is None:
        pytest.skip(f"there is no {request.param}-server")
    with redis_server.running("--rdbcompression", "no", program=program) as server:
        draw = random.Random(7)
        with server.client() as client:
            pipeline = client.pipeline()
            for number in range(2000):
                pipeline.set(f"key {number}", draw.randbytes(1100))
            pipeline.execute()
        yield server


async def test_a_redis_that_still_loads_is_an_answer_and_settles_arrive_when_it_is_ready(
    slow_to_load: Server, clock: TestClock
) -> None:
    server = slow_to_load
    with LocalProvider(prices=PRICES, reply=to_the_limit_when_let) as provider:
        async with (
            RedisStore(server.url, clock=clock) as store,
            bench(provider, Cap(usd=1, per="hour", admit_at=1, name="all"), store=store, clock=clock) as b,
        ):
            running = asyncio.ensure_future(b.router.run(worth(5)))
            await provider.wait_for(lambda p: len(p.requests) == 1)
            assert await b.sums() == (5 * CENT, 0)
            with server.client() as client:
                client.save()
            server.kill()
            # 20 ms for each key, between which it answers: 40 s if nobody hurries it.
            server.options += ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
            starting = asyncio.ensure_future(asyncio.to_thread(server.start))

            async def loads() -> bool:
                return "still loading its data" in (await b.router.status()).store

            await eventually(loads)
            provider.advance()
            result = await running
            assert (result.served, result.decision.actual) == (True, 5 * CENT)
            refused = (await b.router.run(worth(1))).decision
            assert (refused.reason, refused.retry_after) == ("store_unavailable", 5.0)
            assert refused.notes == ("the redis store is unavailable: it is still loading its data",)
            for call in calls(store):
                with pytest.raises(StoreUnavailable, match="still loading its data"):
                    await call()
            assert (await b.router.status()).backlog == 1
            assert not starting.done()
            with server.client() as client:
                client.config_set("key-load-delay", "0")
            await starting

            async def arrived() -> bool:
                await clock.advance(1)
                return await b.sums() == (0, 5 * CENT)

            await eventually(arrived)
            assert (await b.router.status()).backlog == 0
            assert len(await store.holds()) == 0


def calls(store: BudgetStore) -> list[Callable[[], Awaitable[Any]]]:
    """Return one call of each of a store's methods."""
    id = new_id()
    return [
        lambda: store.reserve(id, [[Charge(ALL, 1)]], lease=1000),
        lambda: store.extend(id, 1, [Charge(ALL, 1)]),
        lambda: store.settle(id, [Charge(ALL, 1)]),
        lambda: store.renew([id], lease=1000),
        lambda: store.balances([ALL]),
        store.holds,
        lambda: store.credit(id, []),
        store.check,
        store.accept,
    ]
