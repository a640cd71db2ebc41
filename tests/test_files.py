"""The SQLite file under what machines do: power that goes, disks that fill, releases that change, many that write at once."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from stores import Bucket, StoreUnavailable, _sqlite_file, new_id
from stores._sqlite_file import _STEPS
from stores.conformance import START, ManualClock, charge, sums
from stores.sqlite import SQLiteStore
from tests.disk import FULL, IOERR_FSYNC, OK, Disk, Event, after_power_loss

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
RUN, ALL = Bucket("run"), Bucket("all")
LEASE = 600_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "budget.db"


@asynccontextmanager
async def opened(path: Path | str, clock: Callable[[], int] | None = None) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(path, timeout=30, clock=clock)
    try:
        yield store
    finally:
        await store.aclose()


async def make(path: Path) -> None:
    async with opened(path, clock=lambda: 0) as store:
        await store.check()


@contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """Look into the file behind the store's back."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        yield db
    finally:
        db.close()


def content(path: Path) -> bytes:
    return path.read_bytes()


def wal_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def size(path: Path) -> int:
    return path.stat().st_size


def write(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write files, each under this path and its suffix, into an empty folder."""
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    for suffix, bytes_of in files.items():
        Path(f"{path}{suffix}").write_bytes(bytes_of)
    return path


def events_of(folder: Path) -> list[Event]:
    """Return what the processes of `tests.disk` wrote, in the order of time."""
    logs = list(folder.glob("*.events"))
    assert len(logs) == 2
    return sorted(event for log in logs for event in pickle.loads(log.read_bytes()))  # noqa: S301 (our own)


def start(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


# Power that goes.


async def closed_by(path: Path, meant: dict[str, int]) -> set[str]:
    """Open a file with the store, hold its sums against its records, and return the ids that are closed in it.

    Every reservation was over RUN and ALL; `meant` says what each id was to be settled at.
    """
    async with opened(path, clock=lambda: 0) as store:
        assert not (await store.check()).rolled_back
        run, all_of_it = await store.balances([RUN, ALL])
        assert run[1:] == all_of_it[1:]
        holds = await store.holds(limit=100_000)
        assert run.held == sum(hold.charges[0].amount for hold in holds)
        assert {hold.state for hold in holds} <= {"held"}
    with database(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        closed = {id for (id,) in db.execute("SELECT id FROM entry WHERE state = 'closed'")}
    assert run.spent == sum(meant[id] for id in closed)
    return closed


async def test_after_a_loss_of_power_at_any_moment_every_settle_that_was_acknowledged_is_there(
    path: Path, tmp_path: Path
) -> None:
    """Two processes write at once; what was not synced by then is lost, or there in part."""
    await make(path)
    before = content(path)
    workers = [start("-m", "tests.disk", path, 5, 40) for _ in range(2)]
    meant: dict[str, int] = {}
    told: list[tuple[int, str]] = []
    for worker in workers:
        report = json.loads(worker.communicate(timeout=60)[0])
        meant |= report["meant"]
        told += [(at, id) for at, id in report["told"]]
    events = events_of(tmp_path)
    checkpoints = [event for event in events if event.what == "sync" and event.file == ""]
    assert len(checkpoints) >= 5
    draw = random.Random(4)
    # In the moment of an answer, in the middle of whatever is written, and while a checkpoint is.
    moments = [at for at, _ in draw.sample(told, 25)]
    moments += [event.at for event in draw.sample(events, 25)]
    moments += [draw.choice([e for e in events if e.file == "" and e.at <= c.at]).at for c in checkpoints[:10]]
    found = []
    for moment in moments:
        left = after_power_loss(before, [e for e in events if e.at <= moment], draw)
        copy = write(tmp_path / "copy" / "budget.db", left)
        closed = await closed_by(copy, meant)
        missing = {id for at, id in told if at <= moment} - closed
        assert missing == set()
        found.append(len(closed))
    assert len(set(found)) > 20  # they were moments of all kinds


STORM = """
import asyncio, sys
from stores import Bucket, Charge, SQLiteStore, _sqlite_file, new_id

_sqlite_file._CHECKPOINT_EVERY = 16
buckets = Bucket("run"), Bucket("all")

async def one(store, amount):
    while True:
        id = new_id()
        print("meant", id, amount, flush=True)
        await store.reserve(id, [[Charge(b, 9) for b in buckets]], lease=600_000)
        await store.settle(id, [Charge(b, amount) for b in buckets])
        print("told", id, amount, flush=True)

async def main():
    store = SQLiteStore(sys.argv[1], timeout=60)
    await asyncio.gather(*(one(store, amount) for amount in range(1, 6)))

asyncio.run(main())
"""


class Stormy:
    """A process that writes to a file until it is killed, and that can be stopped in whatever it does."""

    def __init__(self, path: Path) -> None:
        self.process = start("-c", STORM, path)
        assert self.process.stdout is not None
        self._out = self.process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._text = ""

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def said(self) -> list[list[str]]:
        """Return all that it ever said, line by line."""
        while True:
            try:
                read = os.read(self._out, 1 << 16)
            except BlockingIOError:
                break
            assert read, "it ended"
            self._text += read.decode()
        return [line.split() for line in self._text.split("\n")[:-1]]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def storm(path: Path, processes: int) -> Iterator[list[Stormy]]:
    started = [Stormy(path) for _ in range(processes)]
    try:
        yield started
    finally:
        for process in started:
            process.end()


def ids_of(said: list[list[str]], word: str) -> dict[str, int]:
    return {line[1]: int(line[2]) for line in said if line[0] == word}


async def test_a_copy_of_file_and_wal_at_any_moment_of_a_storm_is_whole(path: Path, tmp_path: Path) -> None:
    """Two processes are stopped in the middle of what they do; the copy is made of what is there, without the -shm."""
    await make(path)
    draw = random.Random(5)
    copies: list[tuple[Path, dict[str, int], set[str]]] = []
    with storm(path, 2) as processes:
        lines = 0
        for n in range(15):
            while sum(len(process.said()) for process in processes) < lines + draw.randrange(40, 80):
                await asyncio.sleep(draw.uniform(0, 0.005))
            for process in processes:
                process.stop()
            said = [line for process in processes for line in process.said()]
            there = {"": content(path), "-wal": content(wal_of(path))}
            copy = write(tmp_path / f"copy{n}" / "budget.db", there)
            copies.append((copy, ids_of(said, "meant"), set(ids_of(said, "told"))))
            lines = len(said)
            for process in processes:
                process.go_on()
    assert len(copies[-1][2]) > 100
    for copy, meant, told in copies:
        closed = await closed_by(copy, meant)
        assert told - closed == set()


async def test_the_wal_stays_small_while_several_processes_write(path: Path) -> None:
    """A WAL file never shrinks while it is in use: its size is the most that it ever was."""
    await make(path)
    sizes = []
    with storm(path, 3) as processes:
        for least in (500, 1500, 3000):
            while sum(len(process.said()) for process in processes) < least:
                await asyncio.sleep(0.005)
            sizes.append(size(wal_of(path)))
    # Sixteen transactions of some ten pages each, and what a checkpoint that met a kill or a busy moment leaves for the next.
    assert sizes[0] > 0
    assert max(sizes) < 3 * 16 * 12 * 4120
    with database(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# A disk that fills, or fails.


async def test_a_write_or_a_sync_that_fails_at_any_place_of_a_commit_writes_nothing_by_halves(path: Path) -> None:
    await make(path)
    disk = Disk("failing")
    clock = ManualClock()
    fails: dict[str, int] = {"write": FULL, "sync": IOERR_FSYNC}
    left = [0]

    def fail(what: str, file: str) -> int:
        left[0] -= 1
        return fails[what] if left[0] == 0 else OK

    disk.fail = fail
    spent = failed = 0
    reasons: set[str] = set()
    with disk.watched():
        async with opened(f"file:{path}?vfs=failing", clock) as store:
            for place in range(1, 200):
                id = new_id(now=START)
                both = [charge(RUN, 7, None), charge(ALL, 7, None)]
                left[0] = place
                errors = 0
                try:
                    await store.reserve(id, [both], lease=LEASE)
                    await store.settle(id, [charge(RUN, 5), charge(ALL, 5)])
                except StoreUnavailable as error:
                    errors += 1
                    reasons.add(error.why.partition(": ")[2])
                run, all_of_it = await store.balances([RUN, ALL])
                assert run[1:5] == all_of_it[1:5]
                assert sums(run) in {(0, spent), (7, spent), (0, spent + 5)}
                assert (await store.reserve(id, [both], lease=LEASE)).state in {"held", "gone"}
                await store.settle(id, [charge(RUN, 5), charge(ALL, 5)])
                spent += 5
                assert [sums(b) for b in await store.balances([RUN, ALL])] == [(0, spent)] * 2
                failed += errors
                if left[0] > 0:
                    left[0] = 0
                    break
            else:
                pytest.fail("it never came to its end")
            assert not (await store.check()).rolled_back
    assert failed > 10
    assert reasons == {
        "there is no space left for it (database or disk is full)",
        "disk I/O error",
    }
    with database(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# Releases that change.

LATER = ("CREATE TABLE note AS SELECT key, spent FROM account", "UPDATE account SET credited = credited + 1")
"""A step that a later release might take, with the data that is there."""


def release(monkeypatch: pytest.MonkeyPatch, *steps: tuple[str, ...]) -> None:
    """Become the release that takes these steps after those of this one."""
    monkeypatch.setattr(_sqlite_file, "_STEPS", (*_STEPS, *steps))


async def used(path: Path) -> str:
    """Make a file with something in it; return an id that is held."""
    async with opened(path, ManualClock()) as store:
        held, settled = new_id(now=START), new_id(now=START)
        for id in (held, settled):
            await store.reserve(id, [[charge(RUN, 7), charge(ALL, 7)]], lease=LEASE)
        await store.settle(settled, [charge(RUN, 5), charge(ALL, 5)])
    return held


def format_of(path: Path) -> object:
    with database(path) as db:
        return db.execute("PRAGMA user_version").fetchone()[0]


async def test_a_file_of_an_older_release_is_brought_up_to_date_with_what_is_in_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await used(path)
    release(monkeypatch, LATER)
    stores = [SQLiteStore(path, clock=ManualClock()) for _ in range(4)]
    healths = await asyncio.gather(*(store.check() for store in stores))
    assert {health.rolled_back for health in healths} == {False}
    assert (await stores[0].settle(held, [charge(RUN, 2), charge(ALL, 2)])).late is False
    assert {balance[1:5] for store in stores for balance in await store.balances([RUN, ALL])} == {(0, 7, 0, 1)}
    for store in stores:
        await store.aclose()
    with database(path) as db:
        assert db.execute("SELECT key, spent FROM note ORDER BY key").fetchall() == [(":all", 5), (":run", 5)]
    assert format_of(path) == 2


async def test_a_step_that_fails_leaves_the_file_to_the_release_that_it_is_of(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await used(path)
    with monkeypatch.context() as newer:
        release(newer, LATER, ("DROP TABLE client", "UPDATE account SET none = 1"))
        async with opened(path, ManualClock()) as store:
            with pytest.raises(StoreUnavailable, match="no such column: none"):
                await store.check()
    assert format_of(path) == 1
    async with opened(path, ManualClock()) as store:
        assert (await store.settle(held, [charge(RUN, 2), charge(ALL, 2)])).late is False
        assert {balance[1:5] for balance in await store.balances([RUN, ALL])} == {(0, 7, 0, 0)}


async def test_who_has_a_file_open_that_a_newer_release_changes_stops_with_one_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await used(path)
    async with opened(path, ManualClock()) as older:
        await older.check()
        with monkeypatch.context() as newer:
            release(newer, LATER)
            async with opened(path, ManualClock()) as store:
                await store.check()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"a newer release wrote it \(format 2, this one knows 1\); upgrade"):
                await older.settle(held, [charge(RUN, 2), charge(ALL, 2)])
    with database(path) as db:
        assert db.execute("SELECT state FROM entry ORDER BY state").fetchall() == [("closed",), ("held",)]
