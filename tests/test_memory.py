"""What is the memory store's own: it forgets what is past its retention, and ends when it is closed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stores import Bucket, Charge, MemoryStore, StoreUnavailable, new_id
from stores.base import RETENTION, RETENTION_WINDOWLESS
from stores.conformance import HOUR, START, ManualClock, charge, hour

pytestmark = pytest.mark.anyio


async def test_it_forgets_ids_after_a_day_and_buckets_a_day_after_their_window() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    for name in ("a", "b"):
        await store.settle(new_id(now=START), [charge(hour(name), 5)])
    expired = new_id(now=START)
    await store.reserve(expired, [[charge(hour("a"), 5)]], lease=1000)
    assert repr(store) == "<MemoryStore buckets=2 ids=3>"
    clock.advance(RETENTION)
    await store.check()
    await store.balances([])
    assert repr(store) == "<MemoryStore buckets=2 ids=3>"
    clock.advance(HOUR)
    await store.balances([])
    assert repr(store) == "<MemoryStore buckets=2 ids=1>"  # the lease was seen to end only now
    clock.advance(RETENTION + 1)
    await store.balances([])
    assert repr(store) == "<MemoryStore buckets=0 ids=0>"


async def test_it_forgets_a_bucket_without_a_window_a_month_after_its_last_write() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    bucket = Bucket("run")
    await store.settle(new_id(now=START), [Charge(bucket, 5)])
    clock.advance(RETENTION_WINDOWLESS - 1)
    await store.settle(new_id(now=clock.now), [Charge(bucket, 5)])
    clock.advance(RETENTION_WINDOWLESS)
    assert (await store.balances([bucket]))[0].spent == 10
    clock.advance(1)
    assert (await store.balances([bucket]))[0].spent == 0


async def test_it_takes_this_machines_time_in_milliseconds_unless_told_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: START * 1_000_000 + 999_999)
    assert (await MemoryStore().check()).now == START


async def test_a_closed_store_forgets_everything_and_is_unavailable() -> None:
    async with MemoryStore(clock=ManualClock()) as store:
        await store.settle(new_id(now=START), [charge(hour(), 5)])
    assert repr(store) == "<MemoryStore buckets=0 ids=0>"
    id = new_id(now=START)
    calls: tuple[Callable[[], Coroutine[Any, Any, Any]], ...] = (
        lambda: store.reserve(id, [[]], lease=1000),
        lambda: store.extend(id, 1, []),
        lambda: store.settle(id, []),
        lambda: store.release(id),
        lambda: store.renew([id], lease=1000),
        lambda: store.balances([]),
        store.holds,
        lambda: store.credit(id, []),
        store.check,
        store.accept,
    )
    for call in calls:
        with pytest.raises(StoreUnavailable, match="closed"):
            await call()
