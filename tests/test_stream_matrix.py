"""Every way to leave a stream, at every point, for every kind of usage: the books equal the provider's own account."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from router import Cap, Retries, RoutedStream, Router, Task, TaskClass
from router.task import Kind
from router.testing import Entry, LocalProvider, Rates, Reply
from router.testing._reply import UsageKind
from router.testing._text import Tokenizer
from stores import BudgetStore, MemoryStore, SQLiteStore
from tests.support import TestClock, chat, client_of, policy_of, settle_down
from tests.test_odd_answers import canned

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
PRICES = {"strong-model": Rates(input="2", output="10"), "cheap-model": Rates(input="0.20", output="1")}
PROMPT = "word " * 300
TOKENS = 10


Point = Literal[0, 1, 4, 10, "last"]
"""How many tokens are let go and read before the stream is left; "last" is every chunk that the reader is shown."""

KINDS: tuple[Kind, ...] = ("chat", "response")
USAGES: tuple[UsageKind, ...] = ("true", "missing", "zero", "cumulated", "placeholder_first")


class Script:
    """A provider whose next answer may be changed between two requests."""

    def __init__(self) -> None:
        self.reply = Reply()

    def __call__(self, _: Entry) -> Reply:
        return self.reply


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def provider(script: Script) -> Iterator[LocalProvider]:
    with LocalProvider(prices=PRICES, reply=script) as running:
        yield running


def task_of(kind: Kind, *, output: int = 100, **more: Any) -> Task:
    if kind == "chat":
        return chat(PROMPT, output=output, **more)
    return Task.response(input=PROMPT, max_output_tokens=output, **more)


def tokens_of(kind: Kind, chunk: Any) -> int:
    """Return how many tokens a chunk of the provider brings its reader."""
    if kind == "response":
        return int(chunk.type.endswith(".delta"))
    return sum(bool(choice.delta.content or choice.delta.refusal) for choice in chunk.choices)


def is_last(kind: Kind, chunk: Any) -> bool:
    """Say whether a chunk is the last that a reader is shown who did not ask for the usage."""
    if kind == "response":
        return bool(chunk.type in ("response.completed", "response.incomplete"))
    return bool(chunk.choices) and chunk.choices[0].finish_reason is not None


class Reader:
    """Reads one stream up to a point; `there` is set when it has come so far."""

    def __init__(self, stream: RoutedStream, kind: Kind, point: Point, *, steps: int) -> None:
        self.stream: RoutedStream | None = stream
        self.kind: Kind = kind
        self.point = point
        self.steps = steps
        """How many times the gate holds this stream in all."""
        self.let_go = steps if point == "last" else point
        self.seen = 0
        self.there = asyncio.Event()
        if point == 0:
            self.there.set()

    def came(self, chunk: Any) -> bool:
        """Count a chunk; say whether the reader has come to its point."""
        self.seen += tokens_of(self.kind, chunk)
        if is_last(self.kind, chunk) if self.point == "last" else self.seen == self.point:
            self.there.set()
        return self.there.is_set()

    async def up_to_the_point(self) -> None:
        assert self.stream is not None
        while not self.there.is_set():
            self.came(await anext(self.stream))

    async def on_and_on(self) -> None:
        """Read for as long as something comes."""
        assert self.stream is not None
        async for chunk in self.stream:
            self.came(chunk)


# The ways to leave. Each is given a reader whose chunks have been let go up to its point.


async def to_the_end(reader: Reader, provider: LocalProvider) -> None:
    await reader.up_to_the_point()
    provider.advance(reader.steps - reader.let_go)
    await reader.on_and_on()


async def by_break(reader: Reader, provider: LocalProvider) -> None:
    assert reader.stream is not None
    async for chunk in reader.stream:
        if reader.came(chunk):
            break


async def by_aclose(reader: Reader, provider: LocalProvider) -> None:
    await reader.up_to_the_point()
    assert reader.stream is not None
    await reader.stream.aclose()


async def by_aclose_twice(reader: Reader, provider: LocalProvider) -> None:
    await reader.up_to_the_point()
    stream = reader.stream
    assert stream is not None
    await asyncio.gather(stream.aclose(), stream.aclose())
    await stream.aclose()
    assert [chunk async for chunk in stream] == []


async def by_the_end_of_its_block(reader: Reader, provider: LocalProvider) -> None:
    assert reader.stream is not None
    async with reader.stream:
        await reader.up_to_the_point()


async def by_an_exception_in_its_block(reader: Reader, provider: LocalProvider) -> None:
    assert reader.stream is not None
    with pytest.raises(KeyError, match="the reader's own"):  # noqa: PT012 (the block is what raises)
        async with reader.stream:
            await reader.up_to_the_point()
            raise KeyError("the reader's own")


async def by_an_exception_in_its_loop(reader: Reader, provider: LocalProvider) -> None:
    assert reader.stream is not None
    with pytest.raises(KeyError, match="the reader's own"):  # noqa: PT012 (the loop is what raises)
        async for chunk in reader.stream:
            if reader.came(chunk):
                raise KeyError("the reader's own")


async def by_being_cancelled(reader: Reader, provider: LocalProvider) -> None:
    reading = asyncio.ensure_future(reader.on_and_on())
    await reader.there.wait()
    await settle_down()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def by_a_timeout(reader: Reader, provider: LocalProvider) -> None:
    limit = asyncio.timeout(None)

    async def read() -> None:
        async with limit:
            await reader.on_and_on()

    reading = asyncio.ensure_future(read())
    await reader.there.wait()
    await settle_down()
    limit.reschedule(asyncio.get_running_loop().time())
    with pytest.raises(TimeoutError):
        await reading


async def from_another_task(reader: Reader, provider: LocalProvider) -> None:
    reading = asyncio.ensure_future(reader.on_and_on())
    await reader.there.wait()
    await settle_down()
    assert reader.stream is not None
    await reader.stream.aclose()
    await reading  # its loop simply ends


async def by_being_dropped(reader: Reader, provider: LocalProvider) -> None:
    await reader.up_to_the_point()
    reader.stream = None


async def by_being_dropped_in_a_cycle(reader: Reader, provider: LocalProvider) -> None:
    await reader.up_to_the_point()
    cycle: list[Any] = [reader.stream]
    cycle.append(cycle)
    reader.stream = None
    del cycle
    gc.collect()


async def with_its_loop_kept(reader: Reader, provider: LocalProvider) -> None:
    """Close the iterator of the loop itself, as `contextlib.aclosing` and the end of an event loop do."""
    assert reader.stream is not None
    chunks: Any = aiter(reader.stream)
    while not reader.there.is_set():
        reader.came(await anext(chunks))
    await chunks.aclose()


Way = Callable[[Reader, LocalProvider], Awaitable[None]]
WAYS: dict[Way, tuple[Point, ...]] = {
    to_the_end: (0, 1, 4, 10, "last"),
    # A loop's body is not there before the first chunk.
    by_break: (1, 4, 10, "last"),
    by_an_exception_in_its_loop: (1, 4, 10, "last"),
    by_aclose: (0, 1, 4, 10, "last"),
    by_aclose_twice: (0, 1, 4, 10, "last"),
    by_the_end_of_its_block: (0, 1, 4, 10, "last"),
    by_an_exception_in_its_block: (0, 1, 4, 10, "last"),
    by_being_dropped: (0, 1, 4, 10, "last"),
    by_being_dropped_in_a_cycle: (0, 1, 4, 10, "last"),
    with_its_loop_kept: (1, 4, 10, "last"),
    # Who waits for the next chunk after the last finds the end instead.
    by_being_cancelled: (0, 1, 4, 10),
    by_a_timeout: (0, 1, 4, 10),
    from_another_task: (0, 1, 4, 10),
}


class Bench:
    """A router over a store in memory, whose one cap counts everything."""

    def __init__(self, router: Router, store: BudgetStore, provider: LocalProvider, clock: TestClock) -> None:
        self.router = router
        self.store = store
        self.provider = provider
        self.clock = clock
        self.tasks = asyncio.all_tasks()

    async def sums(self) -> tuple[int, int]:
        """Return held and spent."""
        (bucket,) = (await self.router.status()).buckets
        return bucket.held, bucket.spent

    async def at_rest(self) -> None:
        """Wait until the router has settled and no task but its renewing is left, and the provider writes nothing."""
        await self.provider.wait_for(lambda p: p.requests[-1].finished or p.requests[-1].hung_up)
        await self.provider.wait_for(lambda p: p.open_streams == 0)
        async with asyncio.timeout(5):
            while not self.router._settler.idle or self._tasks():
                await asyncio.sleep(0)

    def _tasks(self) -> list[str]:
        others = asyncio.all_tasks() - self.tasks - {asyncio.current_task()}
        return [task.get_name() for task in others if task.get_name() != "budget-router leases"]


@asynccontextmanager
async def bench(provider: LocalProvider, **more: Any) -> AsyncIterator[Bench]:
    clock = TestClock()
    store = MemoryStore(clock=clock)
    more.setdefault("caps", (Cap(usd=1000, per="hour", admit_at=1, name="all"),))
    caps = more.pop("caps")
    async with client_of(provider.base_url) as client:
        policy = policy_of(client, *caps, retries=Retries(attempts=1, per_attempt=10), **more)
        async with Router(policy, store, clock=clock) as router:
            assert router._preparing is not None
            await router._preparing
            yield Bench(router, store, provider, clock)
        assert [hold for hold in await store.holds() if hold.state == "held"] == []


def is_exact(way: Way, kind: Kind, point: Point, usage: UsageKind) -> bool:
    """Say whether the provider's usage came before the stream was left."""
    if usage == "missing":
        return False
    if way is to_the_end or point == "last":
        return True
    return usage == "cumulated" and kind == "chat" and point != 0


def close_to(expected: int, spent: int) -> bool:
    return abs(spent - expected) * 100 <= expected * 2


async def one_cell(b: Bench, script: Script, way: Way, kind: Kind, point: Point, usage: UsageKind) -> None:
    script.reply = Reply(tokens=TOKENS, gate=True, usage=usage)
    _, before = await b.sums()
    billed = b.provider.spent()
    # Its tokens, its finish and its usage.
    steps = TOKENS + 2 - (kind == "chat" and usage == "missing")
    reader = Reader(await b.router.stream(task_of(kind)), kind, point, steps=steps)
    call = next(iter(b.router._settler._open.values()))
    assert (await b.sums())[0] > 0
    b.provider.advance(reader.let_go)
    await way(reader, b.provider)
    await b.at_rest()
    entry = b.provider.requests[-1]
    held, spent = await b.sums()
    bill = b.provider.spent() - billed
    assert held == 0
    assert reader.seen == (TOKENS if point == "last" or way is to_the_end else point)
    assert entry.generated == reader.seen
    whole = way is to_the_end or point == "last"
    assert (entry.finished, entry.hung_up) == (whole, not whole)
    decision = call.report()
    assert decision.actual == spent - before
    if is_exact(way, kind, point, usage):
        assert spent - before == bill
        assert decision.usage_source == "provider"
    else:
        assert close_to(bill, spent - before)
        # A usage that came early may say all that there was by then.
        early = usage in ("cumulated", "placeholder_first") and point in (0, 1)
        assert decision.usage_source == "counted" or early
    assert decision.actual + decision.unconfirmed >= bill
    assert decision.attempts == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_however_a_stream_is_left_the_books_equal_the_providers(
    script: Script, provider: LocalProvider, kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    """S1 to S4, S6, S7, S10, S12, H1, H13: a way to leave x a point x what the provider says of the usage."""
    cells = 0
    gc.collect()
    gc.freeze()  # so that collecting one cycle does not mean looking through all of the test session
    async with bench(provider) as b:
        for way, points in WAYS.items():
            for point, usage in itertools.product(points, USAGES):
                try:
                    await one_cell(b, script, way, kind, point, usage)
                except BaseException as error:
                    error.add_note(f"{kind}, left {way.__name__} at {point}, usage {usage}")
                    raise
                cells += 1
        assert b.router._settler.backlog == 0
    gc.unfreeze()
    assert cells == len(USAGES) * sum(map(len, WAYS.values()))
    with capsys.disabled():
        print(f" [{cells} cells of {kind}] ", end="")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", [0, 1, 4, 10, "last"])
async def test_closing_the_router_settles_the_stream_that_is_open(
    script: Script, provider: LocalProvider, kind: Kind, point: Point
) -> None:
    """H1: the router ends before its stream; what the provider says after the text has ended is still waited for."""
    script.reply = Reply(tokens=TOKENS, gate=True)
    billed = provider.spent()
    async with bench(provider) as b:
        reader = Reader(await b.router.stream(task_of(kind)), kind, point, steps=TOKENS + 2)
        provider.advance(reader.let_go)
        await reader.up_to_the_point()
        await b.router.aclose()
        await b.at_rest()
        held, spent = await b.sums()
        assert held == 0
        assert spent == provider.spent() - billed if point == "last" else close_to(provider.spent() - billed, spent)
        assert provider.requests[-1].hung_up == (point != "last")
        assert reader.stream is not None
        assert reader.stream.decision.outcome == ("served" if point == "last" else "left")
        assert [chunk async for chunk in reader.stream] == []


@pytest.mark.parametrize("hidden", ["observed", "reserved"])
@pytest.mark.parametrize("fault", ["stalls", "cut"])
async def test_a_usage_that_does_not_follow_the_finish_reason_is_not_waited_for_long(
    script: Script, provider: LocalProvider, monkeypatch: pytest.MonkeyPatch, hidden: str, fault: str
) -> None:
    """S4: the reader leaves at the finish reason, and the provider never says what it bills."""
    monkeypatch.setattr("router.streams._LAST_WORDS", 0.05)
    stalls = {"stall": f"after_chunk:{TOKENS + 1}"} if fault == "stalls" else {"cut": "before_usage_chunk"}
    script.reply = Reply(tokens=TOKENS, **stalls)  # type: ignore[arg-type]
    async with bench(provider, hidden_reasoning=hidden) as b:
        async with await b.router.stream(task_of("chat")) as stream:
            async for chunk in stream:
                if is_last("chat", chunk):
                    break
        await provider.wait_for(lambda p: p.open_streams == 0)
        held, spent = await b.sums()
        assert held == 0
        assert stream.decision.outcome == "served"
        if hidden == "reserved":
            assert (spent, stream.decision.usage_source) == (stream.decision.estimate, "estimate")
        else:
            assert stream.decision.usage_source == "counted"
            assert close_to(provider.spent(), spent)


# The end of the event loop.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("how", "point"),
    # An iterator that was not begun is nothing that a loop knows of.
    [("a task reads", 0), *itertools.product(("a task reads", "an iterator stands"), (1, 4, 10))],
)
def test_a_loop_that_ends_with_a_stream_open_settles_it(
    script: Script, provider: LocalProvider, kind: Kind, how: str, point: Point
) -> None:
    """H1, H13: `asyncio.run` ends: it cancels what reads, and closes the iterators that were begun."""
    script.reply = Reply(tokens=TOKENS, gate=True)
    billed = provider.spent()
    store = MemoryStore()
    kept: list[Any] = []

    async def main() -> None:
        policy = policy_of(client_of(provider.base_url), Cap(usd=1000, per=None, admit_at=1, name="all"))
        router = Router(policy, store)
        reader = Reader(await router.stream(task_of(kind)), kind, point, steps=TOKENS + 2)
        provider.advance(reader.let_go)
        kept.extend((reader, router))
        if how == "a task reads":
            kept.append(asyncio.ensure_future(reader.on_and_on()))
            await reader.there.wait()
            await settle_down()
            return
        assert reader.stream is not None
        chunks = aiter(reader.stream)
        kept.append(chunks)
        while not reader.there.is_set():
            reader.came(await anext(chunks))

    async def look() -> tuple[int, int]:
        await provider.wait_for(lambda p: p.open_streams == 0)
        (balance,) = await store.balances([bucket])
        return balance.held, balance.spent

    asyncio.run(main())
    bucket = kept[0].stream._call.slots[0].bucket
    held, spent = asyncio.run(look())
    assert held == 0
    assert provider.requests[-1].hung_up
    assert close_to(provider.spent() - billed, spent)
    assert kept[0].stream.decision.outcome in ("cancelled", "left")


FORGOTTEN = """
import asyncio, sys
from router import Cap, Router, Task
from stores import SQLiteStore
from tests.support import chat, client_of, policy_of

kept = []

async def main(path, url, kind):
    store = SQLiteStore(path)
    policy = policy_of(client_of(url), Cap(usd=1000, per=None, admit_at=1, name="all"), lease=60, on_lease_end=sys.argv[3])
    router = Router(policy, store)
    stream = await router.stream(chat() if kind == "chat" else Task.response(input="hello", max_output_tokens=100))
    kept.append(stream)
    await store.aclose()

for kind in ("chat", "response"):
    asyncio.run(main(sys.argv[1], sys.argv[2], kind))
"""


@pytest.mark.parametrize("on_lease_end", ["release", "charge"])
async def test_a_stream_that_outlives_its_loop_unread_is_ended_by_its_lease(
    script: Script, provider: LocalProvider, tmp_path: Path, on_lease_end: str
) -> None:
    """H13: nobody is left who could settle it: the provider sees the hang-up, and the hold ends with its lease."""
    script.reply = Reply(tokens=TOKENS, gate=True)
    arrived = len(provider.requests)
    path = tmp_path / "budget.sqlite"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FORGOTTEN, str(path), provider.base_url, on_lease_end),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert (process.returncode, said) == (0, b"")
    await provider.wait_for(lambda p: p.open_streams == 0)
    assert [entry.hung_up for entry in provider.requests[arrived:]] == [True, True]
    async with SQLiteStore(path) as store:
        holds = await store.holds()
        assert [hold.state for hold in holds] == ["held", "held"]
        bucket, amount = holds[0].charges[0].bucket, sum(hold.charges[0].amount for hold in holds)
    ends = max(hold.lease_ends for hold in holds)
    async with SQLiteStore(path, clock=lambda: ends) as store:
        (balance,) = await store.balances([bucket])
        assert (balance.held, balance.lost) == (0, amount)
        assert balance.spent == (amount if on_lease_end == "charge" else 0)


# What is generated is not always text.

TOOLS = (("get_the_weather", '{"city": "Paris", "unit": "celsius", "days": 5}'), ("stop", "{}"))
SHAPES = {
    "tool calls": Reply(tool_calls=TOOLS, gate=True),
    "refusal": Reply(tokens=TOKENS, refusal=True, gate=True),
    "gzip": Reply(tokens=TOKENS, compress=True, gate=True),
    "three choices": Reply(tokens=TOKENS, gate=True),
}


def brings(kind: Kind, chunk: Any) -> bool:
    """Say whether a chunk is one that the gate held and that brings something generated."""
    if kind == "chat":
        return bool(chunk.choices and chunk.choices[0].finish_reason is None)
    call: bool = chunk.type == "response.output_item.added" and chunk.item.type == "function_call"
    return call or bool(chunk.type.endswith(".delta"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
async def test_whatever_is_generated_is_counted(script: Script, provider: LocalProvider, kind: Kind, shape: str) -> None:
    """S4, S11, P7: tool calls, refusals, several choices and compressed streams, left early or read to their end."""
    more: dict[str, Any] = {"n": 3} if shape == "three choices" and kind == "chat" else {}
    usages: tuple[UsageKind, ...] = ("true", "missing")
    async with bench(provider) as b:
        for steps, usage in itertools.product((0, 1, 4, 9, None), usages):
            script.reply = replace(SHAPES[shape], usage=usage, gate=steps is not None)
            billed, (_, before) = provider.spent(), await b.sums()
            stream = await b.router.stream(task_of(kind, **more))
            provider.advance(steps or 0)
            seen = 0
            while steps is None or seen < steps:
                try:
                    seen += brings(kind, await anext(stream))
                except StopAsyncIteration:
                    break
            await stream.aclose()
            await b.at_rest()
            held, spent = await b.sums()
            bill = provider.spent() - billed
            assert held == 0
            if steps is None and usage == "true":
                assert (spent - before, stream.decision.usage_source) == (bill, "provider")
            else:
                assert stream.decision.usage_source == "counted"
                assert close_to(bill, spent - before), f"{steps} steps: {spent - before} for {bill}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", ["observed", "reserved"])
async def test_reasoning_that_was_hidden_is_settled_as_the_policy_says(
    script: Script, provider: LocalProvider, kind: Kind, hidden: str
) -> None:
    """S9: priced once, as output, when the usage came; else what came by or what was reserved, and the decision says which."""
    async with bench(provider, hidden_reasoning=hidden) as b:
        usages: tuple[UsageKind, ...] = ("true", "missing")
        points: tuple[Any, ...] = (0, 1, 4, "finish", "end")
        for point, usage in itertools.product(points, usages):
            early = point in (0, 1, 4)
            script.reply = Reply(tokens=TOKENS, reasoning_tokens=40, usage=usage, gate=early)
            billed, (_, before) = provider.spent(), await b.sums()
            stream = await b.router.stream(task_of(kind))
            if early:
                provider.advance(point)
            seen = 0
            while seen != point:
                try:
                    chunk = await anext(stream)
                except StopAsyncIteration:
                    break
                seen += tokens_of(kind, chunk)
                if point == "finish" and is_last(kind, chunk):
                    break
            await stream.aclose()
            await b.at_rest()
            held, spent = await b.sums()
            bill, cost, decision = provider.spent() - billed, spent - before, stream.decision
            assert held == 0
            if usage == "true" and not early:
                assert (cost, decision.usage_source) == (bill, "provider")
                assert stream.usage is not None
                assert (stream.usage.output_tokens, stream.usage.reasoning_tokens) == (TOKENS + 40, 40)
            elif hidden == "reserved":
                assert (cost, decision.usage_source) == (decision.estimate, "estimate")
                assert "reserved was settled" in str(decision)
                assert cost >= bill
            else:
                assert decision.usage_source == "counted"
                assert close_to(bill - (40 * 10_000 if seen else 0), cost)
                assert "tokens were counted" in str(decision)


async def test_many_small_deltas_are_counted_by_the_tokens_of_their_text() -> None:
    """S8: 806 deltas of a character each, then left without usage: neither one token nor 806."""
    text = "The quick brown fox jumps over the lazy dog, and nobody is surprised. " * 12
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "strong-model"}
    deltas = [{**chunk, "choices": [{"index": 0, "delta": {"content": char}, "finish_reason": None}]} for char in text[:806]]
    body = "".join(f"data: {json.dumps(delta)}\n\n" for delta in deltas).encode()
    async with canned(body, "text/event-stream", length=len(body) + 100) as url, client_of(url) as client:
        policy = policy_of(client, Cap(usd=1000, per=None, admit_at=1, name="all"))
        async with Router(policy, MemoryStore()) as router:
            stream = await router.stream(task_of("chat", output=1000))
            for _ in range(806):
                await anext(stream)
            await stream.aclose()
            tokens = Tokenizer().count(text[:806])
            assert 100 < tokens < 250
            assert stream.usage is not None
            assert stream.usage.output_tokens == tokens
            assert stream.decision.usage_source == "counted"


@pytest.mark.parametrize("kind", KINDS)
async def test_the_same_prompt_costs_the_same_streamed_or_whole(script: Script, provider: LocalProvider, kind: Kind) -> None:
    """S5."""
    script.reply = Reply(tokens=TOKENS, cached_tokens=100, reasoning_tokens=7)
    async with bench(provider) as b:
        whole = await b.router.run(task_of(kind))
        stream = await b.router.stream(task_of(kind))
        async for _chunk in stream:
            pass
        assert stream.decision.actual == whole.decision.actual == provider.requests[-1].cost
        assert stream.usage == whole.usage


def generated(tokens: int, provider: LocalProvider) -> bool:
    return provider.requests[-1].generated == tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_overrun", ["extend", "cut"])
@pytest.mark.parametrize("room", [1000, 1.4])
async def test_a_provider_that_generates_past_its_limit_is_counted_and_never_held_past_the_cap(
    script: Script, provider: LocalProvider, kind: Kind, on_overrun: str, room: float
) -> None:
    """S13: read in step with the provider, so that both know how much was generated."""
    script.reply = Reply(tokens=150, overrun=True, gate=True)
    limit = 616_000 + round(50 * 10_000 * room)
    billed = provider.spent()
    cap = Cap(usd=f"{limit / 10**9:.9f}", per="hour", admit_at=1, name="all")
    classes = [TaskClass("default", on_overrun=on_overrun)]  # type: ignore[arg-type]
    async with bench(provider, caps=(cap,), classes=classes) as b:
        stream = await b.router.stream(task_of(kind, output=50))
        seen, ended = 0, False
        while not ended:
            provider.advance(1)
            try:
                while not brings(kind, await anext(stream)):
                    pass
                seen += 1
                await provider.wait_for(partial(generated, seen))
            except StopAsyncIteration:
                ended = True
            held, spent = await b.sums()
            if stream.decision.outcome == "open":
                assert 0 < held <= limit
            if seen == 150 and not ended:
                provider.advance(2)
                async for _chunk in stream:
                    pass
                ended = True
        await b.at_rest()
        held, spent = await b.sums()
        assert held == 0
        bill = provider.spent() - billed
        if on_overrun == "extend" and room == 1000:
            assert (stream.decision.outcome, seen, spent) == ("served", 150, bill)
            assert "more was held" in str(stream.decision)
            assert provider.requests[-1].finished
        else:
            assert (stream.decision.outcome, stream.decision.usage_source) == ("cut", "counted")
            assert 50 < seen < 100
            assert provider.requests[-1].hung_up
            assert close_to(bill, spent)
