"""A storm: processes full of tasks on one store, a provider that fails in every way, and SIGKILL at random.

    python -m benchmarks.storm [--seconds N] [--store sqlite redis] [--rate N] [--seed N] [--json]

Per store there are two storms: leases that end and attempts without an answer are given back in one, charged in the other. All
tasks go through `Router` to one local provider, a real HTTP server whose own account is the truth; the store is looked at all
the while. What must come out, to the nano-dollar:

- `over`: no bucket ever has more spent and held than its line. Only a settle that comes after its lease has ended may do that,
  by as much as it is; such settles are counted.
- `lost`: whatever the provider billed for a task is spent in the task's own bucket, or covered by a hold that its lease has
  ended (its process was killed), or was shown as unconfirmed by the router; and each cap's sums are the sums of the tasks.
- `double`: nothing is spent that the provider did not bill, nor that the router did not record. What a lease's end charged is
  spent and lost alike, and is taken off before; what was charged for attempts without an answer was shown as unconfirmed.
- `hung`: every caller had its answer, every process ended when it was told to, and nothing is held once the leases are over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.report import Row, number_above_0, show
from benchmarks.storm_plan import CHEAP, ESTIMATE, USERS, Ask, Storm, replies, store_of
from benchmarks.storm_worker import work
from router.caps import Cap
from router.charges import Slot, slots_of
from router.testing import Entry, LocalProvider
from stores import Balance, BudgetStore
from tests import redis_server
from tests.support import PRICES

LAST = 120.0
"""Seconds that a process may take to end, far more than all its time limits together."""


@dataclass
class Found:
    """What one storm showed. The first four must be 0."""

    over: int = 0
    lost: int = 0
    double: int = 0
    hung: int = 0
    unexpected: list[str] = field(default_factory=list)
    """Errors that no fault explains, and what broke an equation."""
    kills: int = 0
    samples: int = 0
    exact: int = 0
    bounded: int = 0
    ended: int = 0
    late: int = 0
    served: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    thrown: Counter[str] = field(default_factory=Counter)
    full: int = 0
    """How full a bucket was found at most, in percent of its line."""

    def explain(self, what: Literal["over", "lost", "double", "hung"], why: str) -> None:
        """Count something that must not be, and say what it was."""
        setattr(self, what, getattr(self, what) + 1)
        if len(self.unexpected) < 20:
            self.unexpected.append(f"{what}: {why}")


@dataclass
class Facts:
    """What the processes knew of their tasks, from their logs."""

    begun: list[str] = field(default_factory=list)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    hung: list[str] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def served(self) -> int:
        """How many tasks were served to their end."""
        return sum(record["outcome"] == "served" for record in self.records.values())

    @classmethod
    def read(cls, logs: Iterable[Path]) -> Facts:
        """Read every line that was written whole."""
        facts = cls()
        for path in logs:
            for line in path.read_text().split("\n")[:-1]:
                mark, text = line[:1], line[2:]
                match mark:
                    case "+":
                        facts.begun.append(text)
                    case "=":
                        record = json.loads(text)
                        facts.records[record["task"]] = record
                    case "!":
                        facts.seen.add(text)
                    case "?":
                        facts.hung.append(text)
                    case "~":
                        facts.late.append(int(text))
                    case _:
                        facts.errors.append(text)
        return facts


class Processes:
    """The processes of a storm; one that is killed comes again."""

    def __init__(self, storm: Storm, base_url: str, folder: Path) -> None:
        self._storm = storm
        self._base_url = base_url
        self._folder = folder
        # Forked from one that has imported everything: half of a short storm would be imports.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.storm_preload"])
        self._running: list[tuple[Any, Connection]] = []
        self._started = 0

    @property
    def logs(self) -> list[Path]:
        """What they have written."""
        return sorted(self._folder.glob("*.log"))

    async def start(self) -> None:
        """Start them all, and let them begin together."""
        self._running = [self._new() for _ in range(self._storm.processes)]
        async with asyncio.timeout(LAST):
            for _, link in self._running:
                while not link.poll():  # noqa: ASYNC110 (another process has no event of ours)
                    await asyncio.sleep(0.01)
        for _, link in self._running:
            link.send("go")

    async def kill(self, draw: random.Random) -> None:
        """Kill one, and start another in its place."""
        number = draw.randrange(len(self._running))
        process, link = self._running[number]
        process.kill()
        await _gone([process], LAST)
        link.close()
        self._running[number] = self._new()
        self._running[number][1].send("go")

    async def end(self) -> tuple[int, int]:
        """Kill one in four for good and let the others end; return how many were killed, and how many did not end well."""
        killed, left = self._running[::4], [each for index, each in enumerate(self._running) if index % 4]
        for process, _ in killed:
            process.kill()
        for _, link in left:
            with suppress(OSError):
                link.send("stop")
        await _gone([process for process, _ in self._running], LAST)
        return len(killed), sum(process.exitcode != 0 for process, _ in left)

    async def kill_all(self) -> None:
        """Leave none behind."""
        for process, link in self._running:
            process.kill()
            process.join()
            process.close()
            link.close()

    def _new(self) -> tuple[Any, Connection]:
        self._started += 1
        name = f"p{self._started}"
        ours, theirs = self._context.Pipe()
        path = self._folder / f"{name}.log"
        process = self._context.Process(target=work, args=(self._storm, self._base_url, name, path, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours


async def _gone(processes: Sequence[Any], seconds: float) -> None:
    """Wait until processes have ended, so long at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while any(process.is_alive() for process in processes):  # noqa: ASYNC110 (as above)
                await asyncio.sleep(0.01)


class Watch:
    """Looks at every bucket that can be full, again and again, and remembers them all."""

    def __init__(self, storm: Storm, store: BudgetStore) -> None:
        self._caps = [cap for cap in storm.policy(None).caps if not cap.soft]
        self._store = store
        self.slots: dict[str, Slot] = {}
        self.over: list[tuple[int, str]] = []
        self.full = 0.0
        self.samples = 0

    async def look(self) -> None:
        """Look once."""
        now = time.time_ns() // 1_000_000
        for user in range(USERS):
            for slot in slots_of(self._caps, {"user": f"u{user}"}, now=now, tree=None, admit_at=None):
                self.slots[slot.bucket.key] = slot
        # Windows that are over may still be settled in.
        slots = list(self.slots.values())[-60:]
        for slot, balance in zip(slots, await self._store.balances([slot.bucket for slot in slots]), strict=True):
            used = balance.held + balance.spent
            self.full = max(self.full, used / slot.line)
            if used > slot.line:
                self.over.append((used - slot.line, f"{slot.bucket.name} has {used} of {slot.line}"))
        self.samples += 1

    async def go_on(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(0.02)


async def storm_of(storm: Storm, progress: Callable[[str], None] = lambda _: None) -> Found:
    """Let a storm pass, and do the sums."""
    found = Found()
    draw = random.Random(storm.seed)
    with tempfile.TemporaryDirectory() as folder, LocalProvider(prices=PRICES, reply=replies()) as provider:
        processes = Processes(storm, provider.base_url, Path(folder))
        store = store_of(storm.store)
        watch = Watch(storm, store)
        try:
            await processes.start()
            progress(f"{storm.processes} processes of {storm.callers} callers")
            looking = asyncio.create_task(watch.go_on())
            began = time.monotonic()
            for part in (*sorted(draw.uniform(0.1, 0.9) for _ in range(storm.kills)), 1.0):
                await asyncio.sleep(max(0, began + part * storm.seconds - time.monotonic()))
                await enough(processes, part * storm.least, found)
                if part < 1:
                    await processes.kill(draw)
                    found.kills += 1
            progress("ending")
            killed, late = await processes.end()
            found.kills += killed
            for _ in range(late):
                found.explain("hung", "a process did not end, or failed")
            progress("waiting for leases")
            await provider.wait_for(lambda p: all(e.finished or e.hung_up or _is_cut(e) for e in p.requests), timeout=LAST)
            await leases_over(storm, store, found)
            looking.cancel()
            await asyncio.wait((looking,))
            if not looking.cancelled() and (error := looking.exception()) is not None:
                raise error
            await watch.look()
            progress("doing the sums")
            facts = Facts.read(processes.logs)
            await do_the_sums(storm, store, watch, facts, provider.requests, found)
        finally:
            await processes.kill_all()
            await store.aclose()
    return found


async def enough(processes: Processes, least: float, found: Found) -> None:
    """Wait until so many tasks were served."""
    if least:
        until = time.monotonic() + LAST
        while Facts.read(processes.logs).served < least:
            if time.monotonic() > until:
                found.explain("hung", f"less than {least:g} tasks were served")
                return
            await asyncio.sleep(0.1)


def _is_cut(entry: Entry) -> bool:
    return Ask.read(str(entry.body["user"])).kind in ("stream cut", "cut, then an answer")


async def leases_over(storm: Storm, store: BudgetStore, found: Found) -> None:
    """Wait until the leases of the killed are over; what is still held then hangs."""
    until = time.monotonic() + 2 * storm.lease + 5
    while held := [hold for hold in await store.holds(limit=100_000) if hold.state == "held"]:
        if time.monotonic() > until:
            for hold in held:
                found.explain("hung", f"{hold} is held after its lease")
            return
        await asyncio.sleep(0.1)


async def do_the_sums(
    storm: Storm, store: BudgetStore, watch: Watch, facts: Facts, entries: Sequence[Entry], found: Found
) -> None:
    """Compare the store, the provider and what the processes knew, task by task and cap by cap."""
    bills: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        bills[str(entry.body["user"])].append(entry)
    (per_task,) = [cap for cap in storm.policy(None).caps if cap.soft]
    balances = await balances_of(store, per_task, facts.begun)
    for key in facts.begun:
        one_task(storm, key, balances[key], bills[key], facts, found)
    for key in bills.keys() - balances.keys():
        found.explain("lost", f"{key} was billed and never begun")

    # Each reservation was over all caps or none, so all of them add up to the same.
    totals = {name: sum(getattr(balance, name) for balance in balances.values()) for name in ("held", "spent", "lost")}
    slots = list(watch.slots.values())
    of_caps: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for slot, balance in zip(slots, await store.balances([slot.bucket for slot in slots]), strict=True):
        of_caps[slot.cap.name].update(held=balance.held, spent=balance.spent, lost=balance.lost)
    for name, sums in of_caps.items():
        for what, total in totals.items():
            if sums[what] != total:
                kind: Literal["lost", "double"] = "lost" if sums[what] < total else "double"
                found.explain(kind, f"cap {name} has {sums[what]} {what}, its tasks {total}")

    debt = sum(facts.late)
    for by, what in watch.over:
        if by > debt:
            found.explain("over", what)
    for key in facts.hung:
        found.explain("hung", f"{key} had no answer")
    found.unexpected += facts.errors
    found.samples, found.full, found.late = watch.samples, round(100 * watch.full), len(facts.late)
    for key, attempts in bills.items():
        found.thrown[Ask.read(key).kind] += bool(attempts)
    for record in facts.records.values():
        if record["served"]:
            found.served += 1
        else:
            found.refused[": ".join((record["reason"], *(note[:80] for note in record["notes"])))] += 1


async def balances_of(store: BudgetStore, per_task: Cap, keys: Sequence[str]) -> dict[str, Balance]:
    """Return what the store says of each task."""
    buckets = [slots_of([per_task], {"task": key}, now=0, tree=None, admit_at=None)[0].bucket for key in keys]
    answers: list[Balance] = []
    for start in range(0, len(buckets), 500):
        answers += await store.balances(buckets[start : start + 500])
    return dict(zip(keys, answers, strict=True))


def one_task(storm: Storm, key: str, balance: Balance, entries: Sequence[Entry], facts: Facts, found: Found) -> None:
    """Compare one task's bucket with the provider's bill and the router's record."""
    billed = sum(entry.cost or 0 for entry in entries)
    record = facts.records.get(key)
    settled = balance.spent - (balance.lost if storm.on_lease_end == "charge" else 0)
    told = f"{key}: settled {settled}, lost {balance.lost}, billed {billed}, recorded {record}"
    if settled < 0:
        found.explain("lost", told)
    charges = storm.on_lease_end == "charge"
    if balance.lost:
        # Its process was killed. Its hold covers the attempt that was under way. Those before it, never answered, are
        # in the hold too when they are charged; else they were given back, as was the strong model's part of it at a fallback.
        found.ended += 1
        if settled > 0:
            found.explain("double", told)
        model = "strong-model" if balance.lost > CHEAP else "cheap-model"
        under_way = [entry.cost or 0 for entry in entries if entry.model == model][-1:]
        if (billed if charges else sum(under_way)) > balance.lost:
            found.explain("lost", told)
        return
    if record is None or not record["served"]:
        # Killed after its settle and before its record, or never admitted.
        unsure = ESTIMATE * len(entries) if record is None else 0
    else:
        if settled != record["actual"]:
            found.explain("double" if settled > record["actual"] else "lost", told)
        exact = not record["unconfirmed"] or (key in facts.seen and len(entries) == 1)
        unsure = 0 if exact else record["unconfirmed"]
        found.exact += exact
        found.bounded += not exact
    if settled > billed + (unsure if charges else 0):
        found.explain("double", told)
    if billed > settled + unsure:
        found.explain("lost", told)


def rows_of(names: Sequence[str], storms: Sequence[Found]) -> list[Row]:
    """Return what must be 0, per storm, and then what there was, in all of them."""
    rows = []
    for name, found in zip(names, storms, strict=True):
        for what in ("over", "lost", "double", "hung"):
            value = getattr(found, what)
            rows.append(Row(f"{name}: {what}", value, "", bar="= 0", holds=value == 0))
        value = len(found.unexpected)
        rows.append(Row(f"{name}: errors without a fault", value, "", bar="= 0", holds=value == 0))
    sums: list[tuple[str, Callable[[Found], int], str]] = [
        ("tasks served", lambda f: f.served, "tasks"),
        *((f"tasks refused: {why}", lambda f, why=why: f.refused[why], "tasks") for why in _keys(f.refused for f in storms)),
        ("processes killed", lambda f: f.kills, "kills"),
        *((f"thrown: {kind}", lambda f, kind=kind: f.thrown[kind], "tasks") for kind in _keys(f.thrown for f in storms)),
        ("equal to the bill to the unit", lambda f: f.exact, "tasks"),
        ("within what was unconfirmed", lambda f: f.bounded, "tasks"),
        ("ended by their lease", lambda f: f.ended, "tasks"),
        ("settled after their lease", lambda f: f.late, "tasks"),
        ("looks at the balances", lambda f: f.samples, "looks"),
    ]
    rows += [Row(name, sum(map(of, storms)), unit) for name, of, unit in sums]
    rows.append(Row("the fullest bucket", min((found.full for found in storms), default=0), "% of its line"))
    return rows


def _keys(counters: Iterable[Counter[str]]) -> list[str]:
    return sorted({key for counter in counters for key in counter})


def main() -> int:
    """Let the storms pass and print what is left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=number_above_0, default=40, help="how long each storm lasts (default: 40)")
    parser.add_argument("--store", nargs="+", choices=("sqlite", "redis"), default=("sqlite", "redis"))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=500, help="callers in each process (default: 500)")
    parser.add_argument("--rate", type=float, default=120, help="tasks a second, of all processes together (default: 120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # A connection for every caller, at the provider's end.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 20_000) if most > 0 else 20_000, most))
    names, storms = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(redis_server.running()).url if "redis" in args.store else ""
        for number, (kind, end) in enumerate((kind, end) for kind in args.store for end in ("release", "charge")):
            name = f"{kind}, {end}"
            place = f"sqlite:{folder / f'{end}.sqlite'}" if kind == "sqlite" else f"{url}#{end}"
            storm = Storm(
                store=place,
                on_lease_end=end,  # type: ignore[arg-type]
                seconds=args.seconds,
                processes=args.processes,
                callers=args.tasks,
                kills=max(3, round(args.seconds / 3)),
                # Most callers wait most of the time: two cores shall bear the load, with their provider.
                pace=max(1.0, args.processes * args.tasks / args.rate),
                seed=args.seed + number,
            )
            found = asyncio.run(storm_of(storm, lambda step, name=name: print(f"{name}: {step}", file=sys.stderr)))  # type: ignore[misc]
            names.append(name)
            storms.append(found)
            for why in found.unexpected:
                print(f"{name}: {why}", file=sys.stderr)
    return show("A storm", rows_of(names, storms), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
