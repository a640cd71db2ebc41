"""A stream by itself, over a source that stops and fails where it is told: however it is left, one settle and one close."""

from __future__ import annotations

import asyncio
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from router import Cap, Refused, RoutedStream, Router
from router.call import Call
from stores import MemoryStore
from tests.support import chat, policy_of, settle_down
from tests.test_settling import Bench, bench, errors

pytestmark = pytest.mark.anyio


def text(words: str = "word", *, last: bool = False) -> Any:
    """Make a chunk with text; `last` gives it a finish reason."""
    choice = SimpleNamespace(index=0, delta=SimpleNamespace(content=words), finish_reason="stop" if last else None)
    return SimpleNamespace(choices=[choice], usage=None)


def usage() -> Any:
    """Make the chunk that says what was billed."""
    return SimpleNamespace(choices=[], usage={"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10})


class Source:
    """A provider's stream: its items are chunks to give, errors to raise, and events to wait for."""

    def __init__(self, *items: Any) -> None:
        self.items = list(items)
        self.closes = 0
        self.closed: asyncio.Event | None = None
        self.fails: Exception | None = None

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> Any:
        while self.items:
            item = self.items.pop(0)
            if isinstance(item, asyncio.Event):
                await item.wait()
                continue
            if isinstance(item, BaseException):
                raise item
            return item
        raise StopAsyncIteration

    async def close(self) -> None:
        self.closes += 1
        if self.closed is not None:
            await self.closed.wait()
        if self.fails is not None:
            raise self.fails


async def opened(b: Bench, source: Source, **more: Any) -> tuple[RoutedStream, Call]:
    """Open a stream on a source."""
    call = await b.call()
    given: Any = source
    return RoutedStream(call.decision, call=call, source=given, settler=b.settler, clock=b.clock, **more), call


async def test_a_stream_says_what_was_decided_and_what_came_of_it() -> None:
    async with bench() as b:
        stream, call = await opened(b, Source(text(), text(last=True), usage()))
        assert (stream.served, stream.usage, stream.decision.outcome) == (True, None, "open")
        assert repr(stream) == f"<RoutedStream {call.report()}>"

        async def count(counted: Call) -> None:
            assert counted.tally.end is not None
            counted.bill(counted.tally.end, "provider")

        b.told.counts = count
        # The usage was not asked for: it is not shown.
        assert len([chunk async for chunk in stream]) == 2
        assert stream.usage is not None
        assert (stream.usage.tokens, stream.decision.outcome) == (10, "served")
        assert stream.decision.actual == call.spent() > 0


async def test_only_a_chunk_with_nothing_but_usage_is_kept_from_its_reader() -> None:
    first = SimpleNamespace(choices=[], usage=None)  # as some send, about the prompt
    beside = text()
    beside.usage = {"prompt_tokens": 8, "completion_tokens": 1}  # as some send with every chunk
    odd = SimpleNamespace(usage={"prompt_tokens": 8, "completion_tokens": 1})
    last = text(last=True)
    async with bench() as b:
        stream, call = await opened(b, Source(first, beside, usage(), odd, last))
        assert [chunk async for chunk in stream] == [first, beside, odd, last]
        assert call.outcome == "served"


async def test_a_refused_stream_has_a_decision_and_nothing_to_read() -> None:
    policy = policy_of(None, Cap(usd=0, per="day", name="all"))
    async with Router(policy, MemoryStore()) as router, await router.stream(chat()) as stream:
        assert (stream.served, stream.usage, stream.decision.reason) == (False, None, "cap")
        with pytest.raises(Refused) as refused:
            aiter(stream)
        assert refused.value.decision is stream.decision
        with pytest.raises(Refused):
            await anext(stream)
        await stream.aclose()


async def test_a_settler_that_closes_hangs_up() -> None:
    async with bench() as b:
        source = Source(text(), asyncio.Event())
        stream, call = await opened(b, source)
        await anext(stream)
        async with asyncio.timeout(10):
            await b.settler.aclose()
        assert (call.outcome, source.closes) == ("left", 1)


async def test_a_loop_that_is_left_by_break_closes_the_stream() -> None:
    async with bench() as b:
        source = Source(text(), text())
        stream, call = await opened(b, source)
        async for _chunk in stream:
            break
        await settle_down()
        assert (call.outcome, source.closes) == ("left", 1)
        assert b.store.ids("settle") == [call.id]


async def test_a_stream_whose_time_is_over_fails() -> None:
    async with bench() as b:
        source = Source(text(), asyncio.Event())
        stream, call = await opened(b, source)
        call.ends = 100.0
        await anext(stream)
        await b.clock.advance(100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await anext(stream)
        # Cancelled, if it were by the limit of this test.
        assert (call.outcome, source.closes) == ("failed", 1)


async def test_a_stream_that_may_not_go_on_is_cut_after_its_chunk() -> None:
    async def overrun(_: Call) -> bool:
        return False

    async with bench() as b:
        source = Source(*[text("word " * 100) for _ in range(3)])
        stream, call = await opened(b, source, overrun=overrun)
        assert len([chunk async for chunk in stream]) == 1
        assert (call.outcome, source.closes, len(source.items)) == ("cut", 1, 2)
        assert "the stream was cut" in str(stream.decision.notes)


async def test_a_stream_that_is_left_in_every_way_at_once_is_settled_and_closed_once() -> None:
    async with bench() as b:
        source = Source(text(), text())
        stream, call = await opened(b, source)
        async with stream:
            await anext(stream)
            await asyncio.gather(stream.aclose(), stream.aclose())
        await stream.aclose()
        await b.settler.aclose()
        del stream
        await settle_down()
        assert (call.outcome, source.closes) == ("left", 1)
        assert b.store.ids("settle") == [call.id]


async def test_a_stream_that_was_closed_gives_nothing_more_although_its_source_would() -> None:
    async with bench() as b:
        source = Source(*[text() for _ in range(5)])
        stream, call = await opened(b, source)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert (call.tally.deltas, len(source.items)) == (1, 4)


async def test_a_connection_that_is_slow_to_close_holds_up_no_settle() -> None:
    async with bench() as b:
        source = Source(text(), text())
        source.closed = asyncio.Event()
        stream, call = await opened(b, source)
        await anext(stream)
        leaving = asyncio.ensure_future(stream.aclose())
        await settle_down()
        assert (leaving.done(), b.store.ids("settle"), await b.holds()) == (False, [call.id], ())
        source.closed.set()
        await leaving


async def test_a_connection_that_cannot_be_closed_politely_is_nobodys_error(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as b:
        source = Source(text(), text())
        source.fails = OSError("broken pipe")
        stream, call = await opened(b, source)
        async with stream:
            await anext(stream)
        assert (call.outcome, source.closes, errors(caplog)) == ("left", 1, [])


async def test_the_iterator_inside_of_the_sdks_stream_is_closed_with_it() -> None:
    ended: list[str] = []

    async def inside() -> Any:
        try:
            while True:
                yield text()
        finally:
            ended.append("in our loop")

    async with bench() as b:
        iterator = inside()
        source = Source(text())
        source._iterator = iterator  # type: ignore[attr-defined]
        await anext(iterator)
        stream, _ = await opened(b, source)
        await stream.aclose()
        assert ended == ["in our loop"]


# Errors and cancellations that come while it is read.


@pytest.mark.parametrize("error", [OSError("reset"), asyncio.CancelledError(), KeyboardInterrupt()], ids=repr)
async def test_an_error_while_it_is_read_settles_it_although_its_reader_does_nothing_more(error: BaseException) -> None:
    async with bench() as b:
        source = Source(text(), error)
        stream, call = await opened(b, source)
        await anext(stream)
        with pytest.raises(type(error)):
            await anext(stream)
        assert call.outcome == ("cancelled" if isinstance(error, asyncio.CancelledError) else "failed")
        assert (source.closes, b.store.ids("settle")) == (1, [call.id])


@pytest.mark.parametrize("error", [LookupError("a vocabulary"), asyncio.CancelledError()], ids=repr)
async def test_an_error_while_it_is_looked_at_settles_it_although_its_reader_does_nothing_more(error: BaseException) -> None:
    async def overrun(_: Call) -> bool:
        raise error

    async with bench() as b:
        source = Source(text("word " * 200), text())
        stream, call = await opened(b, source, overrun=overrun)
        with pytest.raises(type(error)):
            await anext(stream)
        assert call.outcome == ("cancelled" if isinstance(error, asyncio.CancelledError) else "failed")
        assert (source.closes, b.store.ids("settle")) == (1, [call.id])


async def test_a_reader_that_is_cancelled_after_its_stream_was_closed_elsewhere_is_cancelled() -> None:
    async with bench() as b:
        source = Source(text(), asyncio.Event())
        stream, call = await opened(b, source)
        await anext(stream)
        reader = asyncio.ensure_future(anext(stream))
        await settle_down()
        await stream.aclose()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert call.outcome == "left"


async def test_an_error_after_its_stream_was_closed_elsewhere_is_the_end_for_its_reader() -> None:
    async with bench() as b:
        goes_on = asyncio.Event()
        stream, call = await opened(b, Source(goes_on, OSError("closed")))

        async def read() -> str:
            try:
                await anext(stream)
            except StopAsyncIteration:
                return "its end"
            return "a chunk"

        reader = asyncio.ensure_future(read())
        await settle_down()
        await stream.aclose()
        goes_on.set()
        assert await reader == "its end"
        assert call.outcome == "left"


async def test_a_stream_is_looked_at_again_only_when_a_quarter_more_has_come() -> None:
    looked: list[int] = []

    async def overrun(call: Call) -> bool:
        looked.append(call.tally.deltas)
        return True

    async with bench() as b:
        stream, _ = await opened(b, Source(*[text("w") for _ in range(400)]), overrun=overrun)
        async for _chunk in stream:
            pass
        # Its limit is 100.
        assert looked == [101, 143, 195, 260, 342]


async def test_few_chunks_with_much_text_are_looked_at_too() -> None:
    looked: list[int] = []

    async def overrun(call: Call) -> bool:
        looked.append(call.tally.chars)
        return True

    async with bench() as b:
        stream, _ = await opened(b, Source(*[text("w" * 150) for _ in range(5)]), overrun=overrun)
        async for _chunk in stream:
            pass
        # Three characters a token: above 300, then above three times (150 * 5 // 4 + 16).
        assert looked == [450, 750]


async def test_a_stream_that_nobody_looks_at_goes_on_past_its_limit() -> None:
    async with bench() as b:
        stream, call = await opened(b, Source(*[text("word " * 50) for _ in range(40)]))
        assert len([chunk async for chunk in stream]) == 40
        assert call.outcome == "served"


# Left at the finish reason.


async def test_left_at_its_finish_reason_it_is_read_up_to_its_usage_and_closed() -> None:
    async with bench() as b:
        source = Source(text(last=True), text(""), usage(), text("more"))
        stream, call = await opened(b, source)
        await anext(stream)
        await stream.aclose()
        assert call.tally.end is not None
        assert (call.outcome, source.closes, len(source.items)) == ("served", 1, 1)


async def test_a_source_that_fails_or_ends_before_its_usage_is_counted_by_what_came(caplog: pytest.LogCaptureFixture) -> None:
    for rest in ([OSError("reset")], []):
        async with bench() as b:
            source = Source(text(last=True), *rest)
            stream, call = await opened(b, source)
            await anext(stream)
            await stream.aclose()
            # By whoever counts, and not at the estimate, which is for a counting that failed.
            assert (call.outcome, call.usage_source, source.closes) == ("served", "none", 1)
            assert errors(caplog) == []


async def test_left_after_its_usage_nothing_more_is_read() -> None:
    async with bench() as b:
        source = Source(text(last=True), usage(), text("more"))
        stream, call = await opened(b, source)
        await anext(stream)
        call.tally.add("chat", await anext(source))  # as a reader who asked for the usage had it
        await stream.aclose()
        assert (call.outcome, source.closes, len(source.items)) == ("served", 1, 1)


async def test_an_error_at_the_finish_reason_stays_an_error() -> None:
    async with bench() as b:
        stream, call = await opened(b, Source(text(last=True), usage()))
        with pytest.raises(LookupError):  # noqa: PT012
            async with stream:
                await anext(stream)
                raise LookupError
        assert call.outcome == "failed"
        assert call.tally.end is not None


# Dropped.


async def test_a_stream_that_is_dropped_just_before_its_router_closes_is_closed_once() -> None:
    async with bench() as b:
        source = Source(text(), text())
        stream, call = await opened(b, source)
        await anext(stream)
        del stream
        await b.settler.aclose()
        await settle_down()
        assert (call.outcome, source.closes) == ("left", 1)


async def test_a_stream_that_is_dropped_in_another_thread_is_settled_in_its_loop_at_once() -> None:
    async with bench() as b:
        settled = asyncio.Event()

        async def count(_: Call) -> None:
            settled.set()

        b.told.counts = count
        stream, call = await opened(b, Source(text()))
        kept = [stream]
        del stream
        thread = threading.Timer(0.02, kept.clear)
        thread.start()
        async with asyncio.timeout(5):
            await settled.wait()
        thread.join()
        assert call.outcome == "left"


def test_a_stream_that_is_dropped_after_its_loop_has_ended_is_left_to_its_lease() -> None:
    kept: list[RoutedStream] = []
    calls: list[Call] = []

    async def open_one() -> None:
        stream, call = await opened(Bench(), Source(text()))
        kept.append(stream)
        calls.append(call)

    asyncio.run(open_one())
    kept.clear()
    gc.collect()
    assert calls[0].outcome == "open"
