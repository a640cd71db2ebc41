"""How many callers travel together: who is sent with whom, and that everybody is answered in time, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence

import pytest

from stores.batching import Batcher
from stores.errors import StoreUnavailable

pytestmark = pytest.mark.anyio


class Line:
    """Sends batches of numbers and answers each with its double, as soon as `gate` is open. 13 fails alone, 99 with all."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.under_way = 0
        self.most_under_way = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, items: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(items))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.gate.wait()
        finally:
            self.under_way -= 1
        if 99 in items:
            raise ValueError("all")
        return [KeyError("alone") if item == 13 else 2 * item for item in items]


def batcher(line: Line, *, size: int = 3, in_flight: int = 1, timeout: float = 5, limit: int = 10) -> Batcher[int, int]:
    return Batcher(line, store="test", size=size, in_flight=in_flight, timeout=timeout, limit=limit)


async def turns(count: int = 5) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


class Time:
    """The time of a loop, which moves when told."""

    def __init__(self, time: float) -> None:
        self.time = time


@pytest.fixture
async def now(monkeypatch: pytest.MonkeyPatch) -> Time:
    loop = asyncio.get_running_loop()
    clock = Time(loop.time())
    monkeypatch.setattr(loop, "time", lambda: clock.time)
    return clock


async def test_what_arrives_in_one_turn_travels_together_in_order_and_each_gets_its_own_answer() -> None:
    line = Line()
    many = batcher(line)
    assert await asyncio.gather(*map(many.put, range(7))) == [0, 2, 4, 6, 8, 10, 12]
    assert line.batches == [[0, 1, 2], [3, 4, 5], [6]]


async def test_one_caller_alone_waits_for_nobody() -> None:
    line = Line()
    many = batcher(line)
    for n in range(3):
        assert await many.put(n) == 2 * n
    assert line.batches == [[0], [1], [2]]


async def test_a_hundred_travel_together_and_one_batch_at_once_unless_said() -> None:
    line = Line()
    many = Batcher(line, store="test")
    assert await asyncio.gather(*map(many.put, range(100, 301))) == list(range(200, 602, 2))
    assert list(map(len, line.batches)) == [100, 100, 1]
    assert line.most_under_way == 1


@pytest.mark.parametrize(("in_flight", "sent"), [(1, [[0], [1, 2, 3], [4]]), (2, [[0], [1, 2, 3], [4]])])
async def test_what_arrives_while_a_batch_is_under_way_is_gathered_for_the_next(in_flight: int, sent: list[list[int]]) -> None:
    line = Line()
    line.gate.clear()
    many = batcher(line, in_flight=in_flight)
    first = many.put(0)
    await turns()
    others = [many.put(n) for n in range(1, 5)]
    assert many.waiting == 4
    await turns()
    assert line.batches == sent[:in_flight]
    assert many.waiting == sum(map(len, sent[in_flight:]))
    line.gate.set()
    assert await asyncio.gather(first, *others) == [0, 2, 4, 6, 8]
    assert line.batches == sent
    assert line.most_under_way == in_flight
    assert many.waiting == 0


async def test_an_item_fails_alone_and_what_the_sending_raises_fails_its_whole_batch_only() -> None:
    many = batcher(Line())
    answers = await asyncio.gather(*map(many.put, [1, 13, 2, 99, 3]), return_exceptions=True)
    assert [type(answer) for answer in answers] == [int, KeyError, int, ValueError, ValueError]
    assert await many.put(4) == 8


@pytest.mark.parametrize("answers", [[], [1], [1, 2, 3]])
async def test_a_sending_that_gives_another_number_of_answers_leaves_nobody_waiting(answers: list[int]) -> None:
    async def wrong(items: Sequence[int]) -> list[int]:
        return answers

    calls: Batcher[int, int] = Batcher(wrong, store="test")
    async with asyncio.timeout(5):
        heard = await asyncio.gather(calls.put(1), calls.put(2), return_exceptions=True)
    assert [str(error) for error in heard] == [f"the test store is unavailable: it gave {len(answers)} answers to 2 calls"] * 2


async def test_a_batch_that_is_not_answered_in_time_is_unavailable_and_the_next_one_is_sent() -> None:
    line = Line()
    line.gate.clear()
    many = batcher(line, timeout=0.01)
    for answer in await asyncio.gather(*map(many.put, range(3)), return_exceptions=True):
        assert str(answer) == "the test store is unavailable: it did not answer within 0.01 s"
    assert line.under_way == 0
    line.gate.set()
    assert await many.put(4) == 8


async def test_who_was_not_sent_in_time_is_told_and_is_not_sent_later() -> None:
    line = Line()
    many = batcher(line, in_flight=0, timeout=0.01)
    first = many.put(0)
    await asyncio.wait([first])
    second, gone = many.put(1), many.put(2)
    gone.cancel()
    third = many.put(3)
    for told in await asyncio.gather(first, second, third, return_exceptions=True):
        assert str(told) == "the test store is unavailable: it did not answer within 0.01 s"
    assert (many.waiting, line.batches) == (0, [])


async def test_each_is_told_when_its_own_time_is_over(now: Time) -> None:
    many = batcher(Line(), in_flight=0, timeout=10)
    futures = []
    for n in range(3):
        futures.append(many.put(n))
        now.time += 3
    told = []
    for _ in range(8):
        await turns()
        told.append(sum(future.done() for future in futures))
        now.time += 1
    assert told == [0, 1, 1, 1, 2, 2, 2, 3]
    assert {type(future.exception()) for future in futures} == {StoreUnavailable}


async def test_a_batch_has_the_time_of_its_oldest_item(now: Time) -> None:
    line = Line()
    line.gate.clear()
    many = batcher(line, timeout=10)
    under_way = many.put(0)
    await turns()
    old = many.put(1)
    now.time += 6
    young = many.put(2)
    line.gate.set()
    assert await under_way == 0
    line.gate.clear()
    now.time += 3
    await turns()
    assert (line.batches, old.done()) == ([[0], [1, 2]], False)
    now.time += 1
    await turns()
    assert isinstance(old.exception(), StoreUnavailable)
    assert isinstance(young.exception(), StoreUnavailable)


async def test_when_as_many_wait_as_may_the_next_is_told_at_once() -> None:
    line = Line()
    line.gate.clear()
    many = batcher(line, limit=2)
    under_way = many.put(0)
    await turns()
    waiting = [many.put(1), many.put(2)]
    with pytest.raises(StoreUnavailable, match="2 calls wait for it already"):
        many.put(3)
    line.gate.set()
    assert await asyncio.gather(under_way, *waiting) == [0, 2, 4]
    assert line.batches == [[0], [1, 2]]


async def test_a_caller_that_goes_away_takes_nobody_with_it() -> None:
    line = Line()
    line.gate.clear()
    many = batcher(line)
    futures = [many.put(n) for n in (1, 13, 2)]
    await turns()
    futures[0].cancel()
    line.gate.set()
    answers = await asyncio.gather(*futures, return_exceptions=True)
    assert [type(answer) for answer in answers] == [asyncio.CancelledError, KeyError, int]
    assert line.batches == [[1, 13, 2]]


async def test_nobody_has_to_hear_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    line = Line()
    many = batcher(line, timeout=0.01)
    many.put(13)
    await many.aclose()
    unsent = batcher(line, in_flight=0, timeout=0.01)
    unsent.put(1)
    while unsent.waiting:
        await asyncio.sleep(0)
    gc.collect()
    assert caplog.records == []  # asyncio logs an exception that nobody fetched


async def test_closing_answers_all_that_was_taken_and_takes_nothing_more() -> None:
    line = Line()
    line.gate.clear()
    many = batcher(line)
    before = asyncio.all_tasks()
    futures = [many.put(n) for n in range(5)]
    closing = asyncio.ensure_future(many.aclose())
    await turns()
    with pytest.raises(StoreUnavailable, match="it was closed"):
        many.put(5)
    assert not closing.done()
    line.gate.set()
    await closing
    assert [future.result() for future in futures] == [0, 2, 4, 6, 8]
    assert asyncio.all_tasks() == before
    await many.aclose()


async def test_closing_answers_what_arrived_in_the_same_turn() -> None:
    many = batcher(Line())
    futures = [many.put(n) for n in range(5)]
    await many.aclose()
    assert [future.done() for future in futures] == [True] * 5


async def test_a_closed_one_is_not_kept_by_its_loop() -> None:
    many = batcher(Line())
    kept = weakref.ref(many)
    assert await many.put(1) == 2
    await many.aclose()
    del many
    gc.collect()
    assert kept() is None


def test_it_belongs_to_the_loop_that_first_used_it() -> None:
    line = Line()
    many = batcher(line)

    async def put() -> int:
        return await many.put(1)

    assert asyncio.run(put()) == 2
    with pytest.raises(StoreUnavailable, match="another event loop"):
        asyncio.run(put())
    asyncio.run(many.aclose())
    assert line.batches == [[1]]


def test_a_loop_that_ends_cancels_who_still_waits_and_sends_nothing_more() -> None:
    line = Line()
    line.gate.clear()
    many = batcher(line)
    futures: list[asyncio.Future[int]] = []

    async def leave() -> None:
        futures.extend(many.put(n) for n in range(5))
        await turns()

    asyncio.run(leave())
    assert [future.cancelled() for future in futures] == [True, True, True, False, False]
    assert (line.batches, many.waiting) == ([[0, 1, 2]], 2)
    asyncio.run(many.aclose())
    assert many.waiting == 0
