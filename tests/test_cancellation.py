"""Operations that are cancelled at each of their awaits, one after the other: nothing stays held, no spend is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from router import Cap, Retries, Router
from router.testing import LocalProvider, Rates, Reply
from stores import Bucket, BudgetStore, Charge, MemoryStore, SQLiteStore, new_id
from stores.redis import RedisStore
from tests.support import chat, client_of, policy_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

PRICES = {"strong-model": Rates(input="2", output="10"), "cheap-model": Rates(input="0.20", output="1")}
MOST_AWAITS = 400


class Steps:
    """Run a coroutine and cancel its task at its n-th suspension; afterwards `made` says how many there were."""

    def __init__(self, work: Coroutine[Any, Any, Any], cancel_at: int, *, again: bool = False) -> None:
        self._work = work
        self._cancel_at = cancel_at
        self._again = again
        self.made = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        step: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731 (replaced below)
        while True:
            try:
                waits_for = step()
            except StopIteration as done:
                return done.value
            self.made += 1
            if self.made == self._cancel_at or (self._again and self.made == self._cancel_at + 1):
                loop.call_soon(task.cancel)
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 (handed on to the work)
                thrown = error
                step = lambda: self._work.throw(thrown)  # noqa: E731, B023 (used before the next turn)
            else:
                step = lambda: self._work.send(None)  # noqa: E731


async def cancelled_at(work: Coroutine[Any, Any, Any], at: int, *, again: bool = False) -> bool:
    """Run `work`, cancelled at its `at`-th await; say whether it came so far."""
    steps = Steps(work, at, again=again)

    async def drive() -> Any:
        return await steps

    task = asyncio.create_task(drive())
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()
    return steps.made >= at


@pytest.fixture
def provider() -> Iterator[LocalProvider]:
    with LocalProvider(prices=PRICES, reply=Reply(tokens=5)) as running:
        yield running


@pytest.fixture(params=["memory", "sqlite", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BudgetStore]:
    if request.param == "memory":
        return MemoryStore
    if request.param == "sqlite":
        return lambda: SQLiteStore(tmp_path / "budget.sqlite")
    url = request.getfixturevalue("redis_url")
    return lambda: RedisStore(url, namespace=tmp_path.name)


@asynccontextmanager
async def opened(provider: LocalProvider, store: BudgetStore, **more: Any) -> AsyncIterator[Router]:
    async with client_of(provider.base_url) as client:
        more.setdefault("retries", Retries(attempts=1, per_attempt=10))
        policy = policy_of(client, Cap(usd=100, per=None, admit_at=1, name="all"), **more)
        async with Router(policy, store) as router:
            yield router


async def at_rest(router: Router) -> None:
    """Wait until every settle that is on its way has arrived."""
    async with asyncio.timeout(20):
        while not router._settler.idle:
            await asyncio.sleep(0.001)


async def sums(router: Router) -> tuple[int, int]:
    (bucket,) = (await router.status()).buckets
    return bucket.held, bucket.spent


class Seen:
    """How many tokens a reader was given."""

    tokens = 0


async def run(router: Router, seen: Seen) -> None:
    await router.run(chat())


async def read_a_stream(router: Router, seen: Seen) -> None:
    async for chunk in await router.stream(chat("word " * 50)):
        seen.tokens += bool(chunk.choices and chunk.choices[0].delta.content)


async def in_a_block(router: Router, seen: Seen) -> None:
    async with await router.stream(chat("word " * 50)) as stream:
        async for chunk in stream:
            seen.tokens += bool(chunk.choices and chunk.choices[0].delta.content)


async def admit(router: Router, seen: Seen) -> None:
    async with router.admit(chat()) as admission:
        client = router.policy.strong.client
        assert client is not None
        admission.settle(await client.chat.completions.create(**admission.request))


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("work", [run, read_a_stream, in_a_block, admit])
async def test_a_call_cancelled_at_any_await_leaves_no_hold_and_loses_no_spend(
    provider: LocalProvider, make_store: Callable[[], BudgetStore], work: Callable[[Router, Seen], Any], again: bool
) -> None:
    """P5, H13: the books and what is shown as unconfirmed are never below the provider's own account."""
    store = make_store()
    async with opened(provider, store) as router:
        await work(router, Seen())
        await at_rest(router)
        tasks = asyncio.all_tasks()
        came = 0
        for at in range(1, MOST_AWAITS):
            billed, arrived, (_, before) = provider.spent(), len(provider.requests), await sums(router)
            unsure = (await router.status()).unconfirmed
            seen = Seen()
            if not await cancelled_at(work(router, seen), at, again=again):
                break
            came += 1
            await at_rest(router)
            await provider.wait_for(lambda p: p.open_streams == 0 and all(e.finished or e.hung_up for e in p.requests))
            held, spent = await sums(router)
            assert held == 0, f"await {at}"
            known = spent - before + int(((await router.status()).unconfirmed - unsure) * 10**9)
            bill = provider.spent() - billed
            if len(provider.requests) > arrived + 1:
                continue  # one that was cancelled before it had arrived has arrived now: its bill is not this one's
            if work is run:
                assert known >= bill, f"await {at}"
            elif work is not admit and bill:  # there the call is the caller's own, and a cancelled one is released
                # The provider runs ahead of its reader by what lies in the sockets; what came by is counted.
                assert known >= 50 * 2000 + seen.tokens * 10_000, f"await {at}"
        else:
            pytest.fail("it never came to its end")
        assert came > 5
        async with asyncio.timeout(5):
            while not asyncio.all_tasks() <= tasks | {asyncio.current_task()}:
                await asyncio.sleep(0.001)
    await store.aclose()


async def reserve(store: BudgetStore, id: str, charges: list[Charge]) -> None:
    await store.reserve(id, [charges], lease=60_000)


async def extend(store: BudgetStore, id: str, charges: list[Charge]) -> None:
    await store.reserve(id, [charges], lease=60_000)
    await store.extend(id, 1, [Charge(c.bucket, c.amount + 1, 1000, 1000) for c in charges])


async def settle(store: BudgetStore, id: str, charges: list[Charge]) -> None:
    await store.reserve(id, [charges], lease=60_000)
    await store.settle(id, charges)


async def renew(store: BudgetStore, id: str, charges: list[Charge]) -> None:
    await store.reserve(id, [charges], lease=60_000)
    await store.renew([id], lease=60_000)


async def others(store: BudgetStore, id: str, charges: list[Charge]) -> None:
    await store.balances([charge.bucket for charge in charges])
    await store.holds()
    await store.check()
    await store.credit(id, [])


@pytest.mark.parametrize("work", [reserve, extend, settle, renew, others])
async def test_a_store_call_cancelled_at_any_await_leaves_the_store_whole(
    make_store: Callable[[], BudgetStore], work: Callable[[BudgetStore, str, list[Charge]], Awaitable[None]]
) -> None:
    store = make_store()
    bucket = Bucket("run")
    counted = 0
    for at in range(1, MOST_AWAITS):
        id = new_id()
        came = await cancelled_at(work(store, id, [Charge(bucket, 7, 1000, 1000)]), at)  # type: ignore[arg-type]
        (balance,) = await store.balances([bucket])
        if balance.held:
            # Only a reserve that was granted before the cancellation may hold, and its owner knows the id.
            assert came is False or work is not reserve
            await store.release(id)
            (balance,) = await store.balances([bucket])
        assert balance.held == 0
        counted += 7 if balance.spent > counted else 0
        assert balance.spent == counted
        if not came:
            break
    else:
        pytest.fail("it never came to its end")
    await store.aclose()


@pytest.mark.parametrize("at", [0, 1, 2, 3])
async def test_aclose_of_a_router_may_be_cancelled_and_called_again(provider: LocalProvider, at: int) -> None:
    store = MemoryStore()
    async with opened(provider, store) as router:
        await router.run(chat())
        await cancelled_at(router.aclose(), at)
        await router.aclose()
        assert await store.holds() == ()


async def test_a_level_cancelled_scope_still_settles(provider: LocalProvider) -> None:
    """anyio cancels again at every await inside the scope; the settle is not in it."""
    store = MemoryStore()
    async with opened(provider, store) as router:
        stream = None
        with anyio.move_on_after(5) as scope:
            async with await router.stream(chat("word " * 50)) as stream:
                async for _ in stream:
                    scope.cancel()
        assert stream is not None
        assert stream.decision.outcome in ("cancelled", "served")
        await at_rest(router)
        held, spent = await sums(router)
        await provider.wait_for(lambda p: p.open_streams == 0)
        assert held == 0
        assert spent > 0


async def test_a_sibling_that_fails_in_a_task_group_leaves_no_hold(provider: LocalProvider) -> None:
    async with opened(provider, MemoryStore()) as router:

        async def fail() -> None:
            await asyncio.sleep(0)
            raise KeyError

        with pytest.raises(ExceptionGroup):  # noqa: PT012
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(run(router, Seen()))
                    group.create_task(read_a_stream(router, Seen()))
                group.create_task(fail())
        await at_rest(router)
        assert (await sums(router))[0] == 0


async def test_a_timeout_of_the_caller_leaves_no_hold(provider: LocalProvider) -> None:
    with LocalProvider(prices=PRICES, reply=Reply(stall="before_first_byte")) as stalled:
        async with opened(stalled, MemoryStore()) as router:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await router.run(chat())
            await at_rest(router)
            assert (await sums(router)) == (0, 0)
            assert (await router.status()).unconfirmed > 0
