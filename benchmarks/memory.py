"""What is kept when a million tasks go through each store, over two hundred days: it follows retention and is then flat.

    python -m benchmarks.memory [--only memory sqlite redis] [--tasks N] [--json]

Time is simulated: the store's clock is moved, and on the server every time to live is shortened by as much. Each task charges a
bucket of its hour, one of its user's day and one of an agent run that it shares with nine others, which has no window. Nine of
ten are settled, and one is left until its lease ends. Each store has a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from benchmarks.report import Row, show
from stores import Bucket, BudgetStore, Charge, MemoryStore, SQLiteStore, new_id
from stores.base import RETENTION, RETENTION_WINDOWLESS
from stores.conformance import HOUR, ManualClock
from tests import redis_server

DAY = RETENTION
LEASE = 60_000
AT_ONCE = 100
DAYS = 200

AGE = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local left = redis.call('PTTL', key)
  if left >= 0 then
    if left <= tonumber(ARGV[2]) then redis.call('UNLINK', key) else redis.call('PEXPIRE', key, left - ARGV[2]) end
  end
end
"""
"""Lets so many milliseconds pass for the keys of a pattern, as far as the server is concerned."""


class Life:
    """Tasks in a store while days pass. `pass_by` lets that many milliseconds pass for whatever has a clock of its own."""

    def __init__(self, store: BudgetStore, clock: ManualClock, pass_by: Callable[[int], None] = lambda ms: None) -> None:
        self._store = store
        self._clock = clock
        self._pass_by = pass_by
        self._number = 0

    async def day(self, tasks: int) -> None:
        """Live a day, with so many tasks, a hundred at once."""
        bursts = [AT_ONCE] * (tasks // AT_ONCE) + [tasks % AT_ONCE] * (tasks % AT_ONCE > 0)
        for many in bursts:
            await asyncio.gather(*(self._task() for _ in range(many)))
            step = DAY // len(bursts)
            self._clock.advance(step)
            self._pass_by(step)

    async def _task(self) -> None:
        number, now = self._number, self._clock.now
        self._number += 1
        hour, day = now // HOUR * HOUR, now // DAY * DAY
        charges = [
            Charge(Bucket(f"hour@{hour}", starts=hour, ends=hour + HOUR), 5),
            Charge(Bucket(f"user {number % 50}@{day}", starts=day, ends=day + DAY), 5),
            Charge(Bucket(f"run {number // 10}"), 5),
        ]
        id = new_id(now=now)
        verdict = await self._store.reserve(id, [charges], lease=LEASE)
        if verdict.held and number % 10:
            await self._store.settle(id, charges)


def most_kept(tasks_a_day: int) -> tuple[int, int]:
    """Return how many ids and how many buckets retention keeps at most when so many tasks come each day."""
    # A day's ids, and those that came while a lease or a burst was under way.
    ids = tasks_a_day + tasks_a_day // 10 + 2 * AT_ONCE
    runs = tasks_a_day * (RETENTION_WINDOWLESS // DAY + 1) // 10
    return ids, runs + 2 * (24 + 50) + 50 + AT_ONCE


Opened = tuple[BudgetStore, Callable[[int], None], Callable[[], int]]


@contextmanager
def opened(kind: str, folder: Path, clock: ManualClock) -> Iterator[Opened]:
    """Open an empty store of a kind; give also what lets time pass for it, and what says how many bytes it keeps elsewhere."""
    if kind == "memory":
        yield MemoryStore(clock=clock), lambda ms: None, lambda: 0
    elif kind == "sqlite":
        path = folder / "budget.sqlite"
        store = SQLiteStore(path, clock=clock, timeout=60)
        yield store, lambda ms: None, lambda: sum(p.stat().st_size for p in folder.iterdir() if p.suffix != ".sqlite-shm")
    else:
        from stores.redis import RedisStore  # noqa: PLC0415 (an extra)

        with redis_server.running() as server, server.client() as client:
            age = aging(client, "*")
            yield RedisStore(server.url, clock=clock, timeout=60), age, lambda: int(client.info("memory")["used_memory"])


def aging(client: Redis, pattern: str) -> Callable[[int], None]:
    """Return what lets time pass for the keys of a pattern; a quarter of a day at once, for it looks at every key."""
    waited = 0

    def pass_by(ms: int) -> None:
        nonlocal waited
        waited += ms
        if waited >= DAY // 4:
            client.eval(AGE, 0, pattern, str(waited))
            waited = 0

    return pass_by


def resident() -> int:
    """Return the bytes of memory that this process has."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def measure(kind: str, tasks: int) -> list[Row]:
    """Send so many tasks through a store of that kind, and look at what is there every ten days."""
    clock = ManualClock()
    inside, outside = list[int](), list[int]()
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(kind, Path(folder), clock) as (store, pass_by, size),
    ):
        life = Life(store, clock, pass_by)
        for day in range(1, DAYS + 1):
            await life.day(tasks // DAYS)
            if day % 10 == 0:
                inside.append(resident())
                outside.append(size())
        await store.aclose()
    rows = [Row(f"{kind}: this process, after all of it", inside[-1] / 2**20, "MB"), flat(f"{kind}: this process", inside)]
    if any(outside):
        where = "file and WAL" if kind == "sqlite" else "server"
        rows += [Row(f"{kind}: {where}, after all of it", outside[-1] / 2**20, "MB"), flat(f"{kind}: {where}", outside)]
    return rows


def flat(name: str, sizes: list[int]) -> Row:
    """Hold the most of the last quarter against the most of the quarter before."""
    half = sizes[len(sizes) // 2 :]
    middle = len(half) // 2
    value = max(half[middle:]) / max(half[:middle])
    return Row(f"{name}: the last quarter against the one before", value, "×", bar="≤ 1.05", holds=value <= 1.05)


def main() -> int:
    """Measure each store in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=["memory", "sqlite", "redis"], default=["memory", "sqlite", "redis"])
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    title = f"{given.tasks} tasks over {DAYS} days"
    if len(given.only) == 1:
        return show(title, asyncio.run(measure(given.only[0], given.tasks)), as_json=given.json)
    rows: list[Row] = []
    for kind in given.only:
        command = [sys.executable, "-m", "benchmarks.memory", "--only", kind, "--tasks", str(given.tasks), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603 (ourselves)
        rows += [Row(**row) for row in json.loads(done.stdout)["rows"]]
    return show(title, rows, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
