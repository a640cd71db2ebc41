"""What waiting in line costs, and what it gives over an hour of real traffic, in simulated time.

    python -m benchmarks.waiting [--trace FILE] [--picture FILE] [--blocks N] [--json]

`--trace` is a recorded trace (time, prompt tokens, output tokens), such as AzureLLMInferenceTrace_code.csv of
Azure/AzurePublicDataset; its first hour is replayed against a cap that holds about half of it, three ways: in lines by class,
first come first served, and refusing at once. `--picture` draws how a full queue drains when the window turns, with the pace
and without it. The bars mean nothing with `--blocks 1`.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.report import Row, show, whole_above_0
from router import Cap, Model, Policy, Price, Router, Task, TaskClass, Usage
from router.charges import Slot
from router.waiting import Line, Lines, Need, Waiter
from stores import Balance, Bucket, MemoryStore
from tests.support import START, TestClock, settle_down

WAITS = TaskClass("waits", max_wait="window", when_expired="drop")
FULL = 10**12


# What a place costs.


def need(number: int) -> Need:
    """Return what a waiter needs of one of many lines, all full."""
    cap = Cap(tokens=FULL, per=None, scope="user", name="all")
    bucket = Bucket(f"all|{number}")
    return Need(("", "all", (str(number),)), Slot(cap, bucket, FULL, FULL, {"user": str(number)}, ""), 1)


async def places(waiters: int, lines: int) -> float:
    """Let so many wait in so many lines, give room for one after the other, and return µs for each of them."""
    queue = Lines(jitter=lambda: 0.0)
    needs = [need(number) for number in range(lines)]
    standing: list[list[Waiter]] = [[] for _ in needs]
    full = {each.key: Balance(each.slot.bucket, FULL) for each in needs}
    gc.collect()
    start = time.perf_counter()
    for number in range(waiters):
        each = needs[number % lines]
        waiter = Waiter(WAITS, (each,), since=0.0, deadline=1e9 + number, size=100)
        queue.enter(waiter, {each.key: full[each.key]}, 0, 0.0)
        standing[number % lines].append(waiter)
    for rank in range(waiters // lines):
        for number, each in enumerate(needs):
            queue.saw((Balance(each.slot.bucket, FULL - 1),), 0, 0.0)
            waiter = standing[number][rank]
            if not waiter.future.done():
                raise RuntimeError("the oldest was not woken")
            queue.leave(waiter, 0, 0.0)
            queue.saw((Balance(each.slot.bucket, FULL),), 0, 0.0)
    return (time.perf_counter() - start) / waiters * 1e6


async def memory(waiters: int) -> float:
    """Return the bytes that one place takes."""
    queue, each = Lines(jitter=lambda: 0.0), need(0)
    full = {each.key: Balance(each.slot.bucket, FULL)}
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(waiters):
        queue.enter(Waiter(WAITS, (each,), since=0.0, deadline=1e9 + number, size=100), full, 0, 0.0)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / waiters


# Routers in simulated time.


class Counting(MemoryStore):
    """Counts what it is asked to reserve."""

    asked = 0

    async def reserve(self, *args: Any, **more: Any) -> Any:
        """See `BudgetStore.reserve`."""
        self.asked += 1
        return await super().reserve(*args, **more)


def policy(*caps: Cap, classes: tuple[TaskClass, ...]) -> Policy:
    """Return a policy whose models are never called."""
    free = Price.per_million(input="0", output="0")
    models = {tier: Model(f"{tier}-model", price=free, encoding="o200k_base") for tier in ("strong", "cheap")}
    return Policy(
        strong=models["strong"],
        cheap=models["cheap"],
        caps=caps,
        classes=classes,
        default_class=classes[0].name,
        max_waiting=10**6,
    )


def work(tokens: int, task_class: str) -> Task:
    """Return a task that holds about so many tokens."""
    return Task.chat(
        messages=[{"role": "user", "content": "hello"}], max_completion_tokens=max(1, tokens), task_class=task_class
    )


async def store_calls(routers: int, waiters: int) -> float:
    """Let waiters of several routers come out one by one, and return how often the store was asked for each."""
    clock = TestClock()
    store = Counting(clock=clock)
    cap = Cap(tokens=1000, per=None, name="all")
    opened = [Router(policy(cap, classes=(WAITS,)), store, clock=clock) for _ in range(routers)]
    done, gate = 0, asyncio.Semaphore(0)

    async def one(router: Router) -> None:
        nonlocal done
        async with router.admit(work(900, "waits")) as admission:
            await gate.acquire()
            admission.release()
        done += 1

    for router in opened:
        await router.__aenter__()
        await asyncio.sleep(0.2)  # its vocabulary is there: nobody counts in a thread from here on
    tasks = [asyncio.create_task(one(opened[number % routers])) for number in range(waiters + 1)]
    await settle_down(200)
    before = store.asked
    while done <= waiters:
        gate.release()
        await settle_down(10)
        await clock.advance(1)
    await asyncio.gather(*tasks)
    for router in opened:
        await router.aclose()
    return (store.asked - before) / waiters


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the trace: when it came, in seconds, and the tokens that it took."""

    at: float
    tokens: int


def recorded(path: Path) -> list[Arrival]:
    """Read the first hour of a trace."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file))[1:]
    except OSError as error:
        raise SystemExit(f"benchmarks.waiting: --trace {path} cannot be read: {error.strerror}") from None
    times = [datetime.fromisoformat(row[0][:26]) for row in rows]
    seconds = [(moment - times[0]).total_seconds() for moment in times]
    return [Arrival(at, int(row[1]) + int(row[2])) for at, row in zip(seconds, rows, strict=True) if at < 3600]


def drawn() -> list[Arrival]:
    """Draw an hour of requests that come in bursts, when there is no trace."""
    draw, now, found = random.Random(1), 0.0, list[Arrival]()
    while now < 3600:
        now += draw.expovariate(0.1)
        found += (
            Arrival(now, min(8000, round(draw.lognormvariate(7, 1.3))) + 1) for _ in range(1 + int(draw.expovariate(0.05)))
        )
    return [arrival for arrival in found if arrival.at < 3600]


CLASSES = (
    TaskClass("chat", priority=0, max_wait=5, when_expired="retry_later"),
    TaskClass("job", priority=5, max_wait=300, when_expired="retry_later"),
    TaskClass("batch", priority=9, max_wait="window", ages_after=600, admit_at=0.8, when_expired="retry_later"),
)


def ways() -> dict[str, tuple[TaskClass, ...]]:
    """Return the classes of each way to deal with what does not fit."""
    again: Any = "retry_later"
    return {
        "in lines by class": CLASSES,
        "first come first served": tuple(TaskClass(c.name, max_wait=c.max_wait, when_expired=again) for c in CLASSES),
        "refused at once": tuple(TaskClass(c.name) for c in CLASSES),
    }


async def hour(arrivals: list[Arrival], classes: tuple[TaskClass, ...]) -> tuple[dict[str, list[float]], dict[str, int], float]:
    """Replay an hour, second by second. Return the waits and the misses per class, and the part of the cap that was used."""
    clock, draw = TestClock(), random.Random(2)
    store = MemoryStore(clock=clock)
    limit = sum(arrival.tokens for arrival in arrivals) // 2 // 12
    router = Router(policy(Cap(tokens=limit, per=300, name="all"), classes=classes), store, clock=clock)
    waits: dict[str, list[float]] = {each.name: [] for each in classes}
    misses = dict.fromkeys(waits, 0)

    async def one(arrival: Arrival, task_class: str) -> None:
        async with router.admit(work(arrival.tokens, task_class)) as admission:
            if not admission.served:
                misses[task_class] += 1
                return
            waits[task_class].append(admission.decision.waited)
            await clock.sleep(1 + arrival.tokens / 2000)
            admission.settle(Usage(input_tokens=0, output_tokens=round(arrival.tokens * draw.uniform(0.6, 1))))

    tasks = []
    async with router:
        await asyncio.sleep(0.2)
        coming = iter(sorted(arrivals, key=lambda arrival: arrival.at))
        arrival = next(coming, None)
        while clock.elapsed < 3600:
            while arrival is not None and arrival.at <= clock.elapsed:
                task_class = draw.choices([each.name for each in classes], weights=(2, 3, 5))[0]
                tasks.append(asyncio.create_task(one(arrival, task_class)))
                arrival = next(coming, None)
            await clock.advance(1)
        for _ in range(20):
            await clock.advance(1)
        windows = [bucket for bucket in store._books.accounts.values() if (bucket.bucket.starts or 0) < START + 3_600_000]
        spent = sum(window.spent for window in windows if not window.bucket.name.startswith("drain|"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return waits, misses, spent / (12 * limit)


async def traffic(arrivals: list[Arrival]) -> list[Row]:
    """Compare the three ways."""
    rows = []
    for way, classes in ways().items():
        waits, misses, used = await hour(arrivals, classes)
        for name, found in waits.items():
            percent = quantiles(found, n=100, method="inclusive") if len(found) > 1 else [0.0] * 99
            all_of_it = len(found) + misses[name]
            rows.append(Row(f"{way}, {name}: waits p50", percent[49], "s"))
            rows.append(Row(f"{way}, {name}: waits p95", percent[94], "s"))
            rows.append(Row(f"{way}, {name}: without its turn in time", 100 * misses[name] / max(1, all_of_it), "%"))
        rows.append(Row(f"{way}: used of the cap", 100 * used, "%"))
    return rows


# The picture.


@contextmanager
def without_pace() -> Iterator[None]:
    """Let everything out of the lines at once."""
    kept: tuple[Any, Any] = Line.in_pace, Lines.paces
    Line.in_pace = lambda *_: True  # type: ignore[method-assign]
    Lines.paces = lambda *_: {}  # type: ignore[method-assign]
    try:
        yield
    finally:
        Line.in_pace, Lines.paces = kept  # type: ignore[method-assign]


async def drains() -> list[int]:
    """Let a full queue drain over three windows, and return how many tasks came out in each half minute."""
    clock = TestClock()
    patient = TaskClass("waits", max_wait=3600, when_expired="drop")
    router = Router(policy(Cap(tokens=40_000, per=600, name="all"), classes=(patient,)), MemoryStore(clock=clock), clock=clock)
    out: list[float] = []

    async def one() -> None:
        async with router.admit(work(1000, "waits")) as admission:
            if admission.served:
                out.append(clock.elapsed)
                admission.settle(Usage(input_tokens=0, output_tokens=1000))

    async with router:
        await asyncio.sleep(0.2)
        tasks = [asyncio.create_task(one()) for _ in range(160)]
        while clock.elapsed < 1800:
            await clock.advance(1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [sum(30 * step <= at < 30 * (step + 1) for at in out) for step in range(60)]


async def picture(path: Path) -> None:
    """Draw both."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (only who draws needs it)

    level = await drains()
    with without_pace():
        sawtooth = await drains()
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    minutes = [step / 2 for step in range(len(level))]
    axes.step(minutes, sawtooth, where="post", label="without the pace")
    axes.step(minutes, level, where="post", label="with the pace")
    axes.set(xlabel="minutes; the window turns every ten", ylabel="tasks let out in half a minute", title="A full queue drains")
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


async def main(trace: Path | None, drawing: Path | None, blocks: int, as_json: bool) -> int:
    """Measure, replay, and show."""
    one = [await places(10_000, 1) for _ in range(blocks)]
    many = [await places(10_000, 1_000) for _ in range(blocks)]
    large = [await places(100_000, 1) for _ in range(blocks)]
    rows = [
        Row.plain("10,000 in one line: enqueue and wake, for each", one, "µs"),
        Row.plain("10,000 in 1,000 lines: enqueue and wake, for each", many, "µs"),
        Row.at_most(
            "100,000 in one line, against 10,000: for each", [b / a for a, b in zip(one, large, strict=True)], "×", 1.5
        ),
        Row.at_most("a place in line", [await memory(10_000)], "bytes", 2000),
        Row.at_most("store calls for each that comes out, one process", [await store_calls(1, 500)], "calls", 1.1),
        Row.at_most("store calls for each that comes out, four processes", [await store_calls(4, 200)], "calls", 4),
    ]
    arrivals = drawn() if trace is None else recorded(trace)
    rows += await traffic(arrivals)
    if drawing is not None:
        await picture(drawing)
    return show(f"Waiting; {len(arrivals):,} tasks in an hour", rows, as_json=as_json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a recorded trace; without one, an hour is drawn")
    parser.add_argument("--picture", type=Path, help="write a picture of the drain here (.svg or .png; needs matplotlib)")
    parser.add_argument("--blocks", type=whole_above_0, default=7, help="how often each measure of a place runs (default: 7)")
    parser.add_argument("--json", action="store_true", help="print one object")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.trace, arguments.picture, arguments.blocks, arguments.json)))
