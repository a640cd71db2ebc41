"""What a store keeps while tasks come and go: as much as retention says, and no more however many they were."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from benchmarks.memory import DAY, Life, aging, most_kept
from stores import Bucket, BudgetStore, Charge, MemoryStore, SQLiteStore, new_id
from stores.conformance import HOUR, START, ManualClock
from tests.named import KINDS, name_of, named

pytestmark = pytest.mark.anyio


def kept_by(store: BudgetStore, folder: Path, server: Redis | None) -> dict[str, int]:
    """Return how much there is of everything, where the books are."""
    if isinstance(store, MemoryStore):
        books = store._books
        return {
            "ids": len(books.entries),
            "buckets": len(books.accounts),
            "ends": len(books._ended),
            "dues": len(books._due),
            "leases": sum(map(len, books._leases.values())) + len(books._leases),
        }
    if isinstance(store, SQLiteStore):
        db = sqlite3.connect(folder / "budget.sqlite")
        found = {
            "ids": db.execute("SELECT count(*) FROM entry").fetchone()[0],
            "buckets": db.execute("SELECT count(*) FROM account").fetchone()[0],
            "pages": db.execute("PRAGMA page_count").fetchone()[0],
            "clients": db.execute("SELECT count(*) FROM client").fetchone()[0],
        }
        db.close()
        return found
    assert server is not None
    keys = [str(key) for key in server.scan_iter(f"{{{folder.name}:*", count=10_000)]
    zsets = [f"{{{folder.name}:}}:{name}" for name in ("l", "x")]
    return {
        "ids": sum(":i:" in key for key in keys),
        "buckets": sum(":b:" in key for key in keys),
        "others": sum(":i:" not in key and ":b:" not in key for key in keys),
        "leases": sum(int(server.zcard(key)) for key in zsets),
    }


@pytest.mark.parametrize(("kind", "a_day"), list(zip(KINDS, (200, 100, 100), strict=True)))
async def test_what_is_kept_follows_retention_and_is_then_flat(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, a_day: int
) -> None:
    """Many thousand tasks in a hundred days: ids are kept for one, buckets without a window for thirty."""
    clock = ManualClock()
    server = Redis.from_url(request.getfixturevalue("redis_url"), decode_responses=True) if kind == "redis" else None
    pass_by: Callable[[int], None] = aging(server, f"{{{tmp_path.name}:*") if server else lambda ms: None
    store = named(name_of(kind, tmp_path, lambda: str(request.getfixturevalue("redis_url"))), timeout=60, clock=clock)
    life = Life(store, clock, pass_by)
    sizes, objects = list[dict[str, int]](), list[int]()
    for day in range(1, 101):
        await life.day(a_day)
        if day % 10 == 0:
            sizes.append(kept_by(store, tmp_path, server))
            gc.collect()
            objects.append(len(gc.get_objects()))
    await store.aclose()
    if server:
        server.close()
    ids, buckets = most_kept(a_day)
    for size in sizes[4:]:
        assert a_day // 10 <= size["ids"] <= ids
        assert 30 * a_day // 10 <= size["buckets"] <= buckets
    for what in sizes[0]:
        earlier, later = ([size[what] for size in part] for part in (sizes[4:7], sizes[7:]))
        assert max(later) <= 1.02 * max(earlier) + 2, what
    assert objects[-1] - objects[4] < 1000


async def test_a_file_does_not_grow_when_every_task_has_many_buckets_of_its_own(tmp_path: Path) -> None:
    """One commit makes a thousand buckets, and must forget as many."""
    clock = ManualClock()
    async with SQLiteStore(tmp_path / "budget.sqlite", clock=clock) as store:
        await store.check()
        sizes = []
        for day in range(12):
            hour = START + day * DAY
            asked = []
            for task in range(100):
                buckets = [Bucket(f"{day} {task} {n}", starts=hour, ends=hour + HOUR) for n in range(10)]
                asked.append(store.settle(new_id(now=hour), [Charge(bucket, 1) for bucket in buckets]))
            await asyncio.gather(*asked)
            sizes.append(kept_by(store, tmp_path, None)["buckets"])
            clock.advance(DAY)
        assert max(sizes) <= 3000
