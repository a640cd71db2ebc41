"""A store that is slow, or hangs: what waits for it is bounded, and past the bound the answer is an error at once."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from stores import Bucket, Charge, SQLiteStore, StoreUnavailable, new_id, sqlite
from stores._ops import Op, Outcome
from stores._sqlite_file import BooksFile, Late
from stores.batching import Batcher
from stores.conformance import ManualClock
from stores.redis import RedisStore
from tests.redis_server import running

pytestmark = pytest.mark.anyio

RUN = Bucket("run")


async def test_past_the_bound_a_call_is_refused_at_once_and_those_before_it_are_answered() -> None:
    gate = asyncio.Event()
    sent: list[int] = []

    async def send(items: Sequence[int]) -> Sequence[int]:
        await gate.wait()
        sent.extend(items)
        return items

    batcher: Batcher[int, int] = Batcher(send, store="slow", size=10, in_flight=1, timeout=60, limit=50)
    places = [batcher.put(0)]
    for _ in range(3):
        await asyncio.sleep(0)  # the first is on its way now
    places += [batcher.put(number) for number in range(1, 51)]
    for _ in range(1000):
        with pytest.raises(StoreUnavailable, match="50 calls wait for it already"):
            batcher.put(-1)
    assert batcher.waiting == 50
    gate.set()
    assert await asyncio.gather(*places) == list(range(51)) == sent
    assert await batcher.put(7) == 7
    await batcher.aclose()


async def test_places_whose_time_is_over_make_room() -> None:
    async def send(items: Sequence[int]) -> Sequence[int]:
        await asyncio.Event().wait()
        return items

    batcher: Batcher[int, int] = Batcher(send, store="slow", size=10, in_flight=1, timeout=0.01, limit=50)
    for _ in range(5):
        places = [batcher.put(number) for number in range(50)]
        answers = await asyncio.gather(*places, return_exceptions=True)
        assert {str(answer) for answer in answers} == {"the slow store is unavailable: it did not answer within 0.01 s"}
        assert batcher.waiting == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_redis_that_hangs_fills_no_memory(cancelled: bool) -> None:
    """Waves of callers, who wait until they are told or go away themselves; their releases wait in their place."""
    with running() as server:
        store = RedisStore(server.url)
        await store.check()
        store._batcher._limit, store._batcher._timeout = 500, 0.05
        server.pause()
        answers: Counter[str] = Counter()
        objects = []
        for _ in range(8):
            asked = [store.reserve(new_id(), [[Charge(RUN, 1)]], lease=60_000) for _ in range(1000)]
            calls = [asyncio.ensure_future(call) for call in asked]
            await asyncio.sleep(0)
            for call in calls if cancelled else ():
                call.cancel()
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                answers[type(answer).__name__] += 1
            assert store._batcher.waiting <= 500
            del asked, calls
            gc.collect()
            objects.append(len(gc.get_objects()))
        assert set(answers) <= {"StoreUnavailable", "CancelledError"}
        assert answers["CancelledError" if cancelled else "StoreUnavailable"] >= 1_000
        assert max(objects[4:]) - max(objects[:4]) < 2000
        server.resume()
        store._batcher._timeout = 30
        while store._batcher.waiting:
            await asyncio.sleep(0.001)
        await store.check()
        await store.aclose()


class Hanging(BooksFile):
    """A file on a disk that does not answer until it is let."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), uri=None, clock=ManualClock())
        self.let = threading.Event()
        self.carried = 0

    def carry_out(self, ops: Sequence[Op], late: Late) -> list[Outcome]:
        self.let.wait(30)
        self.carried += len(ops)
        return super().carry_out(ops, late)


async def test_a_disk_that_hangs_fills_no_memory_and_settles_that_were_taken_are_carried_out(tmp_path: Path) -> None:
    """Each batch is given up after its time; those behind it would wait for the thread, without an end."""
    store = SQLiteStore(tmp_path / "budget.sqlite", timeout=0.01)
    file = store._file = Hanging(tmp_path / "budget.sqlite")
    why: Counter[str] = Counter()
    for _ in range(30):
        ids = [new_id(now=0) for _ in range(10)]
        answers = await asyncio.gather(*(store.release(id) for id in ids), return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, StoreUnavailable)
            why[answer.why.rpartition(": ")[2]] += 1
    assert store._jobs.qsize() <= sqlite._MOST_JOBS
    assert why["its disk does not answer, and 10 batches wait for it"] >= 100
    file.let.set()
    store._batcher._timeout = store._timeout = 30
    while store._jobs.qsize():
        await asyncio.sleep(0.001)  # lets the thread have its turn
    settled = await store.settle(new_id(), [Charge(RUN, 5)])
    assert settled.balances[0].spent == 5
    assert 10 * sqlite._MOST_JOBS <= file.carried <= 10 * (sqlite._MOST_JOBS + 3)
    await store.aclose()
