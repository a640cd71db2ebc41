"""What several test modules share: a clock that moves when told, and policies with the prices of the field's cases."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from router import Cap, Model, Policy, Price, Retries, Router, Task
from router.testing import Entry, LocalProvider, Rates, Reply
from stores import BudgetStore, MemoryStore, SQLiteStore, StoreUnavailable

if TYPE_CHECKING:
    import pytest

START = 1_785_542_400_000  # 2026-08-01T00:00Z
CENT = 10_000_000  # nano-dollars

STRONG = Price.per_million(input="2", output="10")
CHEAP = Price.per_million(input="0.20", output="1")


class TestClock:
    """A `router.clock.Clock` whose sleepers wake when it is advanced past their time."""

    __test__ = False

    def __init__(self, now: int = START) -> None:
        self.wall = now
        self.elapsed = 0.0
        self.slept: list[float] = []
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def __call__(self) -> int:
        """Serve as the clock of a store too."""
        return self.wall

    def now(self) -> int:
        return self.wall

    def monotonic(self) -> float:
        return self.elapsed

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if seconds <= 0:
            return
        wake = asyncio.Event()
        self._sleepers.append((self.elapsed + seconds, wake))
        await wake.wait()

    @property
    def sleeping(self) -> int:
        """How many sleep now."""
        return len(self._sleepers)

    async def advance(self, seconds: float) -> None:
        """Move on, wake whose time has come, and let them run until nothing more happens by itself."""
        await settle_down()
        self.wall += round(seconds * 1000)
        self.elapsed += seconds
        due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self.elapsed]
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] > self.elapsed]
        for _, wake in due:
            wake.set()
        await settle_down()


async def settle_down(turns: int = 20) -> None:
    """Let the tasks that can run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


def client_of(base_url: str) -> AsyncOpenAI:
    """Return a client for a local provider; its own retries are on, as users leave them."""
    return AsyncOpenAI(base_url=base_url, api_key="sk-test-key-never-logged", max_retries=5)


def policy_of(client: AsyncOpenAI | None, *caps: Cap, **more: Any) -> Policy:
    """Return a policy with the prices of the field's cases."""
    more.setdefault("strong", Model("strong-model", client=client, price=STRONG, encoding="o200k_base"))
    more.setdefault("cheap", Model("cheap-model", client=client, price=CHEAP, encoding="o200k_base"))
    return Policy(caps=caps, **more)


def chat(text: str = "hello", *, output: int | None = 100, labels: Mapping[str, str] | None = None, **more: Any) -> Task:
    """Return a small chat task."""
    request: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if output is not None:
        request["max_completion_tokens"] = output
    return Task.chat(labels=labels, **request, **more)


# What the handed cases share.

STORES = ("memory", "sqlite", "redis")
"""The stores that a case is held against when it holds for any."""

PRICES = {"strong-model": Rates(input="2", output="10"), "cheap-model": Rates(input="0.20", output="1")}

FIFTEEN = "one two three four five six seven"
"""A prompt that is estimated at 15 tokens, which cost 0.003 cents on strong: together with an odd limit, whole cents."""


def worth(cents: int, *, labels: Mapping[str, str] | None = None, **more: Any) -> Task:
    """Return a chat task that holds exactly so many cents on strong, and a tenth of that on cheap."""
    return chat(FIFTEEN, output=1000 * cents - 3, labels=labels, **more)


def to_the_limit(entry: Entry) -> Reply:
    """Answer a task of `worth` with all that it may generate, so that its actual is its estimate."""
    return Reply(prompt_tokens=15, tokens=entry.output_limit)


def to_the_limit_when_let(entry: Entry) -> Reply:
    """Answer so, but only once the provider is told to advance."""
    return Reply(prompt_tokens=15, tokens=entry.output_limit, gate=True)


@asynccontextmanager
async def opened_store(request: pytest.FixtureRequest, clock: TestClock) -> AsyncIterator[BudgetStore]:
    """Open the store that the parameter of a fixture names, empty and of its own, and close it afterwards."""
    folder: Path = request.getfixturevalue("tmp_path")
    store: BudgetStore
    if request.param == "memory":
        store = MemoryStore(clock=clock)
    elif request.param == "sqlite":
        store = SQLiteStore(folder / "budget.sqlite", clock=clock)
    else:
        from stores.redis import RedisStore

        store = RedisStore(request.getfixturevalue("redis_url"), namespace=folder.name, clock=clock)
    try:
        yield store
    finally:
        await store.aclose()


class Bench:
    """A router, its store and its clock, and the sums that a test asks about."""

    def __init__(self, router: Router, store: BudgetStore, clock: TestClock, client: AsyncOpenAI) -> None:
        self.router = router
        self.store = store
        self.clock = clock
        self.client = client

    async def sums(self, cap: str = "all", window: str | None = None) -> tuple[int, int]:
        """Return held and spent of a cap, in all of its buckets or in those of one window."""
        found = [b for b in (await self.router.status()).buckets if b.cap == cap and window in (None, b.window)]
        return sum(b.held for b in found), sum(b.spent for b in found)

    async def at(self, instant: int) -> None:
        """Set the time, in milliseconds since the epoch; it may lie before the present one."""
        if instant > self.clock.wall:
            await self.clock.advance((instant - self.clock.wall) / 1000)
        self.clock.wall = instant

    async def spend(self, usd: int | str | float, task: Task | None = None) -> None:
        """Have an admission settled at so many dollars."""
        async with self.router.admit(worth(1) if task is None else task) as admission:
            admission.settle_usd(usd)


def local_client(base_url: str) -> AsyncOpenAI:
    """Return a client as `client_of` does, without the certificates that only https needs and that take 40 ms to load."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    http = DefaultAsyncHttpxClient(verify=context)
    return AsyncOpenAI(base_url=base_url, api_key="sk-test-key-never-logged", max_retries=5, http_client=http)


@asynccontextmanager
async def bench(
    provider: LocalProvider | str, *caps: Cap, store: BudgetStore, clock: TestClock, **more: Any
) -> AsyncIterator[Bench]:
    """Open a router on a provider (or on its address); afterwards nothing may be held."""
    base_url = provider if isinstance(provider, str) else provider.base_url
    more.setdefault("retries", Retries(attempts=1, per_attempt=30))
    async with local_client(base_url) as client:
        own = {key: more.pop(key) for key in ("deferral", "hooks") if key in more}
        async with Router(policy_of(client, *caps, **more), store, clock=clock, **own) as router:
            yield Bench(router, store, clock, client)
        assert [hold for hold in await store.holds() if hold.state == "held"] == []


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition holds that other threads and tasks work at. Raises TimeoutError after ten seconds."""
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.001)  # lets other threads have their turn


class Wire:
    """A store at the other end of a wire: what is asked is written down, and either way may fail or be held up.

    `there` is awaited before a call is carried out and `back` after it, each with the name of the method.
    """

    def __init__(self, inner: BudgetStore) -> None:
        self.inner = inner
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.there: Callable[[str], Awaitable[None]] = _pass
        self.back: Callable[[str], Awaitable[None]] = _pass

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        async def call(*args: Any, **more: Any) -> Any:
            self.asked.append((name, args))
            await self.there(name)
            answer = await method(*args, **more)
            await self.back(name)
            return answer

        return call

    def ids(self, name: str) -> list[str]:
        """Return the ids that a method was asked about, in their order."""
        return [args[0] for method, args in self.asked if method == name]


async def _pass(_: str) -> None:
    """Let everything through."""


def loses_the_first(name: str) -> Callable[[str], Awaitable[None]]:
    """Make a way on which the first call of a method, or its reply, is lost."""
    lost: list[str] = []

    async def way(method: str) -> None:
        if method == name and not lost:
            lost.append(method)
            raise StoreUnavailable("test", "the reply was lost")

    return way


class Worker:
    """A process of its own that holds budget on a SQLite file; see `tests.cases_worker`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def admit(self, cents: int, *, now: int, tasks: int = 1, labels: Mapping[str, str] | None = None) -> list[bool]:
        """Have so many tasks admitted at once, and return which of them were."""
        assert self._process.stdin is not None
        line = json.dumps({"now": now, "tasks": tasks, "cents": cents, "labels": dict(labels or {})})
        self._process.stdin.write(line.encode() + b"\n")
        answer: list[bool] = json.loads(await self._line())
        return answer

    async def kill(self) -> None:
        """Kill it as `kill -9` does."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            return await self._process.stdout.readline()


@asynccontextmanager
async def workers(number: int, path: Path, **cap: Any) -> AsyncIterator[list[Worker]]:
    """Start processes that share a cap in one file, wait until they are ready, and kill those that are left."""
    root = Path(__file__).parent.parent
    started: list[Worker] = []
    try:
        for _ in range(number):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.cases_worker", str(path), json.dumps(cap)),
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            started.append(Worker(process))
        for worker in started:
            assert await worker._line() == b"ready\n"
        yield started
    finally:
        for worker in started:
            await worker.kill()
