"""Cases from the field: streams, each with Chat Completions and with Responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router import Cap, RoutedStream, Task
from router.task import Kind
from router.testing import LocalProvider, Reply
from stores import BudgetStore
from tests.support import PRICES, Bench, TestClock, Wire, bench, chat, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("kind", ["chat", "response"])]

PROMPT = "word " * 300
PLENTY = Cap(usd=100, per="hour", admit_at=1, name="all")
TOKEN = 10_000  # nano-dollars of one that is generated


def task_of(kind: Kind, **more: Any) -> Task:
    if kind == "chat":
        return chat(PROMPT, **more)
    return Task.response(input=PROMPT, max_output_tokens=100, **more)


def generates(kind: Kind, chunk: Any) -> bool:
    """Say whether a chunk brings a token that the provider generated."""
    if kind == "response":
        return bool(chunk.type.endswith(".delta"))
    return bool(chunk.choices and chunk.choices[0].finish_reason is None)


def input_of(provider: LocalProvider) -> int:
    """Return what the provider bills for the prompt alone, in nano-dollars."""
    return provider.requests[0].prompt_tokens * 2000


def near(expected: int, spent: int) -> bool:
    """Say whether a sum is within 2 %."""
    return abs(spent - expected) * 100 <= expected * 2


@asynccontextmanager
async def streaming(
    reply: Reply, store: BudgetStore, clock: TestClock, **more: Any
) -> AsyncIterator[tuple[Bench, LocalProvider]]:
    """Open a router on a provider that answers so."""
    with LocalProvider(prices=PRICES, reply=reply) as provider:
        async with bench(provider, PLENTY, store=store, clock=clock, **more) as b:
            yield b, provider


async def at_rest(b: Bench, provider: LocalProvider) -> None:
    """Wait until the provider writes nothing more and the router has settled."""
    await provider.wait_for(lambda p: p.open_streams == 0)

    async def settled() -> bool:
        return (await b.router.status()).open == 0 and (await b.sums())[0] == 0

    await eventually(settled)


async def read(stream: RoutedStream) -> list[Any]:
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("asked", ["observed", "reserved"])
async def test_a_reader_that_leaves_after_four_of_ten_pays_the_input_and_those_four(
    store: BudgetStore, clock: TestClock, kind: Kind, asked: str
) -> None:
    """S1. The whole hold only when the policy asks for it."""
    reply = Reply(tokens=10, gate=True)
    async with streaming(reply, store, clock, hidden_reasoning=asked) as (b, provider):
        stream = await b.router.stream(task_of(kind))
        provider.advance(4)
        seen = 0
        async for chunk in stream:
            seen += generates(kind, chunk)
            if seen == 4:
                break
        await at_rest(b, provider)
        (entry,) = provider.requests
        assert (entry.generated, entry.hung_up, entry.finished) == (4, True, False)
        decision = stream.decision
        held, spent = await b.sums()
        assert (held, decision.actual) == (0, spent)
        if asked == "reserved":
            assert (spent, decision.usage_source) == (decision.estimate, "estimate")
        else:
            assert near(provider.spent(), spent)
            assert near(input_of(provider) + 4 * TOKEN, spent)
            assert decision.usage_source == "counted"
            assert spent < decision.estimate - 90 * TOKEN


@pytest.mark.parametrize("left", ["opened", "asked", "held"])
async def test_a_reader_that_leaves_before_the_first_chunk_pays_the_input_if_it_was_sent(
    store: BudgetStore, clock: TestClock, kind: Kind, left: str
) -> None:
    """S2: once the stream stands; while the provider has said nothing, when nobody knows; and before anything was sent."""
    reply = Reply(tokens=10, gate=True, stall="before_first_byte" if left == "asked" else None)
    wire, held = Wire(store), asyncio.Event()

    async def back(name: str) -> None:
        if name == "reserve":
            held.set()

    wire.back = back
    async with streaming(reply, wire, clock) as (b, provider):
        opening = asyncio.ensure_future(b.router.stream(task_of(kind)))
        if left == "opened":
            stream = await opening
            assert (await b.sums())[0] > 0
            await stream.aclose()
            await at_rest(b, provider)
            assert near(input_of(provider), (await b.sums())[1])
            assert near(provider.spent(), (await b.sums())[1])
            assert stream.decision.usage_source == "counted"
            assert provider.requests[0].hung_up
            return
        estimate = 0
        if left == "asked":
            await provider.wait_for(lambda p: len(p.requests) == 1)
            estimate = (await b.sums())[0]
        else:
            await held.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await at_rest(b, provider)
        assert (await b.sums(), provider.spent()) == ((0, 0), 0)
        assert len(provider.requests) == (left == "asked")
        # Cancelled while the connection was being made, it is unconfirmed too: nobody can say what came of it.
        assert (await b.router.status()).unconfirmed * 10**9 >= estimate


async def test_a_usage_of_zero_and_zero_costs_nothing_and_is_no_estimate(
    store: BudgetStore, clock: TestClock, kind: Kind
) -> None:
    """S3."""
    async with streaming(Reply(tokens=10, usage="zero"), store, clock) as (b, provider):
        stream = await b.router.stream(task_of(kind))
        assert sum(generates(kind, chunk) for chunk in await read(stream)) == 10
        assert (stream.decision.actual, stream.decision.usage_source) == (0, "provider")
        assert stream.usage is not None
        assert (stream.usage.tokens, stream.usage.odd) == (0, False)
        assert await b.sums() == (0, 0) == (0, provider.spent())


async def test_without_any_usage_the_tokens_are_counted_and_marked_so(store: BudgetStore, clock: TestClock, kind: Kind) -> None:
    """S4."""
    async with streaming(Reply(tokens=90, usage="missing"), store, clock) as (b, provider):
        stream = await b.router.stream(task_of(kind))
        await read(stream)
        held, spent = await b.sums()
        assert near(provider.spent(), spent)
        assert near(input_of(provider) + 90 * TOKEN, spent)
        assert (held, stream.decision.actual) == (0, spent)
        assert stream.decision.usage_source == "counted"
        assert "the provider sent no usage: tokens were counted" in stream.decision.notes
        assert stream.usage is not None
        assert stream.usage.output_tokens == 90


async def test_the_last_usage_counts_and_not_the_placeholder_before_it(
    store: BudgetStore, clock: TestClock, kind: Kind
) -> None:
    """S6."""
    async with streaming(Reply(tokens=90, usage="placeholder_first"), store, clock) as (b, provider):
        more = {"stream_options": {"include_usage": True}} if kind == "chat" else {}
        stream = await b.router.stream(task_of(kind, **more))
        said = [output for chunk in await read(stream) if (output := usage_in(kind, chunk)) is not None]
        assert list(dict.fromkeys(said)) == [1, 90]
        assert stream.usage is not None
        assert (stream.usage.output_tokens, stream.decision.usage_source) == (90, "provider")
        assert await b.sums() == (0, provider.spent()) == (0, input_of(provider) + 90 * TOKEN)


async def test_of_usages_that_grow_with_every_chunk_the_last_counts_and_not_their_sum(
    store: BudgetStore, clock: TestClock, kind: Kind
) -> None:
    """S7."""
    async with streaming(Reply(tokens=10, usage="cumulated"), store, clock) as (b, provider):
        stream = await b.router.stream(task_of(kind))
        said = [output for chunk in await read(stream) if (output := usage_in(kind, chunk)) is not None]
        assert said[-1] == 10
        assert kind == "response" or said[:10] == [*range(1, 11)]
        assert stream.usage is not None
        assert (stream.usage.output_tokens, stream.decision.usage_source) == (10, "provider")
        assert await b.sums() == (0, provider.spent()) == (0, input_of(provider) + 10 * TOKEN)


def usage_in(kind: Kind, chunk: Any) -> int | None:
    """Return the output tokens that a chunk says were used, as its reader sees it."""
    if kind == "chat":
        return None if chunk.usage is None else int(chunk.usage.completion_tokens)
    usage = getattr(getattr(chunk, "response", None), "usage", None)
    return None if usage is None else int(usage.output_tokens)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_is_asked_for_and_shown_only_to_a_caller_who_asked(
    store: BudgetStore, clock: TestClock, kind: Kind, options: dict[str, bool] | None
) -> None:
    """S10. A response brings its usage unasked, in its last event."""
    if kind == "response" and options is not None:
        return  # there is no such option
    wants = bool(options and options["include_usage"])
    more = {} if options is None else {"stream_options": options}
    async with streaming(Reply(tokens=10), store, clock) as (b, provider):
        chunks = await read(await b.router.stream(task_of(kind, **more)))
        if kind == "chat":
            assert provider.requests[0].body["stream_options"] == {"include_usage": True}
            assert [len(chunk.choices) for chunk in chunks] == [1] * 11 + [0] * wants
        else:
            assert "stream_options" not in provider.requests[0].body
        assert await b.sums() == (0, provider.spent())


TOOLS = (("get_the_weather", '{"city": "Paris", "unit": "celsius", "days": 5}'), ("stop", "{}"))


@pytest.mark.parametrize("usage", ["true", "missing"])
async def test_calls_of_tools_count_like_text(store: BudgetStore, clock: TestClock, kind: Kind, usage: Any) -> None:
    """S11."""
    async with streaming(Reply(tool_calls=TOOLS, usage=usage), store, clock) as (b, provider):
        stream = await b.router.stream(task_of(kind))
        chunks = await read(stream)
        if kind == "chat":
            assert not any(choice.delta.content for chunk in chunks for choice in chunk.choices)
        else:
            assert not any("output_text" in chunk.type for chunk in chunks)
        (entry,) = provider.requests
        assert entry.generated > 20
        assert stream.usage is not None
        assert stream.usage.output_tokens == entry.generated
        assert stream.decision.usage_source == ("provider" if usage == "true" else "counted")
        assert near(provider.spent(), (await b.sums())[1])


@pytest.mark.parametrize("how", ["from another task", "twice", "never iterated"])
async def test_a_stream_is_settled_once_however_it_is_closed(
    store: BudgetStore, clock: TestClock, kind: Kind, how: str
) -> None:
    """S12."""
    wire = Wire(store)
    async with streaming(Reply(tokens=10, gate=True), wire, clock) as (b, provider):
        stream = await b.router.stream(task_of(kind))
        four_came = asyncio.Event()

        async def on_and_on() -> int:
            seen = 0
            async for chunk in stream:
                seen += generates(kind, chunk)
                if seen == 4:
                    four_came.set()
            return seen

        if how == "never iterated":
            await stream.aclose()
        else:
            provider.advance(4)
            reading = asyncio.ensure_future(on_and_on())
            await four_came.wait()
            if how == "twice":
                await asyncio.gather(stream.aclose(), stream.aclose())
            await stream.aclose()
            assert await reading == 4  # its loop simply ends
        await at_rest(b, provider)
        assert wire.ids("settle") == wire.ids("reserve")
        held, spent = await b.sums()
        assert (held, stream.decision.actual) == (0, spent)
        assert near(provider.spent(), spent)
        assert near(input_of(provider) + (0 if how == "never iterated" else 4 * TOKEN), spent)
        assert stream.decision.outcome == "left"
