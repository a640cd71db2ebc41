"""What is SQLite's own: the file and what may happen to it, several processes, the writing thread."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

import stores
from stores import Balance, Bucket, Charge, StoreRolledBack, StoreUnavailable, _ops, new_id
from stores._ops import Op
from stores._sqlite_file import APPLICATION_ID, BooksFile
from stores._sqlite_rows import MOST_ENDED
from stores._turns import Turns
from stores.base import RETENTION, RETENTION_WINDOWLESS
from stores.conformance import HOUR, START, ManualClock, charge, hour, sums
from stores.sqlite import SQLiteStore

pytestmark = pytest.mark.anyio

LEASE = 60_000
RUN = Bucket("run")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "budget.db"


@asynccontextmanager
async def opened(
    path: Path | str, *, timeout: float = 5.0, clock: Callable[[], int] | None = None
) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(path, timeout=timeout, clock=ManualClock() if clock is None else clock)
    try:
        yield store
    finally:
        await store.aclose()


async def hold(store: SQLiteStore, *charges: Charge) -> str:
    id = new_id(now=START)
    assert (await store.reserve(id, [charges], lease=LEASE)).state == "held"
    return id


async def spend(store: SQLiteStore, amount: int) -> None:
    await store.settle(await hold(store, charge(RUN, amount)), [charge(RUN, amount)])


async def balance(store: SQLiteStore, bucket: Bucket = RUN) -> Balance:
    return (await store.balances([bucket]))[0]


@contextmanager
def another_program(path: Path) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        yield db
    finally:
        db.close()


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with another_program(path) as db:
        return db.execute(query).fetchall()


def copy(path: Path, to: Path) -> None:
    """Copy a database in use, WAL and all, as SQLite's own backup does."""
    with another_program(path) as source, another_program(to) as target:
        source.backup(target)


def content(path: Path) -> bytes:
    return path.read_bytes()


def overwrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def delete(path: str) -> None:
    Path(path).unlink()


def wal_size(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


@contextmanager
def turn_of_another(path: Path) -> Iterator[None]:
    """Have the turn at `path`, as a process does that was stopped in it."""
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def transaction_of_another(path: Path) -> Iterator[None]:
    with another_program(path) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def start(script: str, *args: object) -> subprocess.Popen[str]:
    root = str(Path(stores.__file__).parents[1])
    command = [sys.executable, "-W", "error", "-c", script, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root})


def output(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return out


# Several processes.

RESERVE_50 = """
import asyncio, sys
from stores import Bucket, Charge, new_id
from stores.sqlite import SQLiteStore

async def main():
    store = SQLiteStore(sys.argv[1])
    options = [[Charge(Bucket("run"), 7, 500, 500)]]
    asked = (store.reserve(new_id(), options, lease=60_000) for _ in range(50))
    verdicts = await asyncio.gather(*asked)
    print(sum(v.held for v in verdicts), {v.state for v in verdicts} <= {"held", "refused"})
    await store.aclose()

asyncio.run(main())
"""


async def test_of_four_processes_exactly_as_many_reserves_are_held_as_fit(path: Path) -> None:
    workers = [start(RESERVE_50, path) for _ in range(4)]
    answers = [output(worker).split() for worker in workers]
    assert sum(int(held) for held, _ in answers) == 500 // 7
    assert {states for _, states in answers} == {"True"}
    assert rows(path, "SELECT held, spent FROM account") == [(500 // 7 * 7, 0)]


STORM = """
import asyncio, itertools, sys
from stores import Bucket, Charge, new_id
from stores.sqlite import SQLiteStore

async def main():
    store = SQLiteStore(sys.argv[1])
    buckets = [Bucket("run"), Bucket("all")]
    async def one():
        for amount in itertools.cycle(range(1, 9)):
            id = new_id()
            await store.reserve(id, [[Charge(b, 9) for b in buckets]], lease=60_000)
            await store.settle(id, [Charge(b, amount) for b in buckets])
            print(id, amount, flush=True)
    await asyncio.gather(*(one() for _ in range(20)))

asyncio.run(main())
"""


async def test_a_process_killed_in_a_storm_loses_nothing_that_was_acknowledged(path: Path) -> None:
    acknowledged: list[tuple[str, int]] = []
    for lines in (30, 200):
        workers = [start(STORM, path) for _ in range(2)]
        for worker in workers:
            assert worker.stdout is not None
            heard = [worker.stdout.readline() for _ in range(lines)]
            worker.send_signal(signal.SIGKILL)
            heard += worker.communicate()[0].splitlines(keepends=True)
            complete = [line.split() for line in heard if line.endswith("\n")]
            acknowledged += [(id, int(amount)) for id, amount in complete]
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    held = rows(path, "SELECT count(*) FROM entry WHERE state = 'held'")[0][0]
    accounts = rows(path, "SELECT key, held, spent FROM account ORDER BY key")
    assert isinstance(held, int)
    assert [(key, amount) for key, amount, _ in accounts] == [(":all", 9 * held), (":run", 9 * held)]
    spent = accounts[0][2]
    assert accounts[1][2] == spent
    assert isinstance(spent, int)
    assert spent >= sum(amount for _, amount in acknowledged)
    async with opened(path, clock=lambda: 0) as store:
        again = await asyncio.gather(*(store.settle(id, [Charge(RUN, amount)]) for id, amount in acknowledged))
        assert {settled.counted for settled in again} == {False}


async def test_two_stores_that_take_the_same_buckets_in_opposite_order_never_wait_for_each_other(path: Path) -> None:
    buckets = [hour("a"), hour("b"), RUN]
    async with opened(path) as one, opened(path) as two:

        async def pair(store: SQLiteStore, order: Sequence[Bucket]) -> None:
            charges = [charge(bucket, 3, 10_000) for bucket in order]
            await store.settle(await hold(store, *charges), charges)

        for _ in range(10):
            pairs = [(pair(one, buckets), pair(two, buckets[::-1])) for _ in range(50)]
            await asyncio.gather(*(call for both in pairs for call in both))
        assert [sums(b) for b in await one.balances(buckets)] == [(0, 3000)] * 3


async def test_the_latest_time_that_any_process_wrote_is_the_time_of_all(path: Path) -> None:
    clock = ManualClock()
    async with opened(path, clock=clock) as behind, opened(path, clock=ManualClock(START + HOUR)) as ahead:
        assert (await behind.check()).now == START
        assert (await ahead.check()).now == START + HOUR
        assert (await behind.check()).now == START + HOUR


# The file is kept.

ODD = ["", "a}b{c:d\n", "\ud800", "\0", "x\0y", '"', "\\u0000", "é", "x" * 10_000]


async def test_what_was_written_is_there_when_the_file_is_opened_again(path: Path) -> None:
    async with opened(path) as store:
        ids = [await hold(store, Charge(hour(odd), n, 85, 100), Charge(Bucket(odd), n)) for n, odd in enumerate(ODD)]
        await store.settle(ids[0], [Charge(hour(ODD[0]), 5)])
        await store.extend(ids[1], 3, [Charge(Bucket(ODD[1]), 7)])
        holds = await store.holds()
        balances = await store.balances([hour(odd) for odd in ODD])
        first = await store.check()
    async with opened(path) as store:
        assert await store.holds() == holds
        assert await store.balances([hour(odd) for odd in ODD]) == balances
        assert (await store.settle(ids[0], [])).counted is False
        assert (await store.extend(ids[1], 3, [])).balances[0].held == 7
        second = await store.check()
    assert (second.epoch, second.writes, second.rolled_back) == (first.epoch, first.writes + 1, False)


async def test_a_burst_is_one_commit_and_a_refusal_is_none(path: Path) -> None:
    async with opened(path) as store:
        before = (await store.check()).writes
        await asyncio.gather(*(hold(store, charge(RUN, 1)) for _ in range(100)))
        refused = await store.reserve(new_id(now=START), [[charge(RUN, 1)]], lease=LEASE)
        await store.balances([RUN])
        assert refused.state == "refused"
        assert (await store.check()).writes == before + 2


async def test_holds_lists_what_was_reserved_in_the_same_commit(path: Path) -> None:
    async with opened(path) as store:
        await store.check()
        id, listed = await asyncio.gather(hold(store, charge(RUN, 1)), store.holds())
        assert [h.id for h in listed] == [id]
    async with opened(path) as store:
        assert sums(await balance(store)) == (1, 0)
        assert (await store.check()).writes == 3


async def test_all_leases_that_ended_make_room_however_many(path: Path) -> None:
    clock, many = ManualClock(), 2 * MOST_ENDED + 100
    async with opened(path, clock=clock) as store:
        await asyncio.gather(*(hold(store, charge(RUN, 1, many)) for _ in range(many)))
        clock.advance(LEASE)
        await hold(store, charge(RUN, many, many))
        assert (await balance(store))[1:4] == (many, 0, many)


async def test_a_refusal_knows_the_first_end_of_a_lease_that_it_had_no_reason_to_load(path: Path) -> None:
    clock = ManualClock()
    async with opened(path, clock=clock) as store:
        await hold(store, charge(RUN, 50))
        clock.advance(LEASE // 2)
        await hold(store, charge(RUN, 50))
    async with opened(path, clock=clock) as store:
        refused = await store.reserve(new_id(now=START), [[charge(RUN, 1)]], lease=LEASE)
        assert refused.misfits[0][0].balance.lease_ends == START + LEASE


async def test_what_is_past_its_retention_is_absent_at_once_and_deleted_by_and_by(path: Path) -> None:
    clock = ManualClock()
    async with opened(path, clock=clock) as store:
        id = await hold(store, charge(hour(), 1), charge(RUN, 1))
        await store.settle(id, [charge(hour(), 1), charge(RUN, 1)])
        await hold(store, charge(Bucket("kept"), 2))
        await store.renew([h.id for h in await store.holds()], lease=RETENTION_WINDOWLESS)
        clock.advance(HOUR + RETENTION)
        assert [sums(b) for b in await store.balances([hour(), RUN])] == [(0, 1), (0, 1)]
        clock.advance(1)
        assert [sums(b) for b in await store.balances([hour(), RUN])] == [(0, 0), (0, 1)]
        clock.now = START + RETENTION_WINDOWLESS - 1
        assert sums(await balance(store)) == (0, 1)
        await store.check()
        assert rows(path, "SELECT state FROM entry") == [("held",)]
        assert rows(path, "SELECT key FROM account ORDER BY key") == [(":kept",), (":run",)]
        clock.advance(2)
        assert sums(await balance(store)) == (0, 0)
        await store.check()
        assert rows(path, "SELECT key, held, lost FROM account ORDER BY key") == [(":kept", 0, 2)]


def test_the_wal_does_not_grow_with_the_number_of_commits(path: Path) -> None:
    file = BooksFile(str(path), uri=None, clock=ManualClock())
    sizes = []
    for _ in range(3):
        for _ in range(300):
            file.carry_out([_ops.Check("")], lambda: False)
        sizes.append(wal_size(path))
    file.close(lambda: False)
    assert sizes == [sizes[0]] * 3


async def test_a_lock_of_another_program_is_waited_for_and_the_sums_are_exact(path: Path) -> None:
    async with opened(path) as store:
        await spend(store, 5)
        with transaction_of_another(path):
            calls = [asyncio.ensure_future(spend(store, 1)) for _ in range(20)]
            done, _ = await asyncio.wait(calls, timeout=0.3)
            assert done == set()
        await asyncio.gather(*calls)
        assert sums(await balance(store)) == (0, 25)


async def test_a_backup_under_way_stops_nobody_and_is_sound(path: Path, tmp_path: Path) -> None:
    async with opened(path) as store:
        await asyncio.gather(*(hold(store, charge(Bucket(f"{n}"), 1)) for n in range(100)))
        with another_program(path) as source, another_program(tmp_path / "copy.db") as target:
            source.execute("BEGIN")
            source.execute("SELECT * FROM meta").fetchall()
            for _ in range(150):  # past a checkpoint
                await spend(store, 0)
            await spend(store, 7)
            source.backup(target)
            source.execute("COMMIT")
        assert sums(await balance(store)) == (0, 7)
    assert rows(tmp_path / "copy.db", "PRAGMA integrity_check") == [("ok",)]
    assert rows(tmp_path / "copy.db", "SELECT sum(held), sum(spent) FROM account") == [(100, 0)]


@pytest.mark.parametrize("locked", [transaction_of_another, turn_of_another])
async def test_a_lock_past_the_time_limit_is_an_answer_and_the_next_call_tries_anew(
    path: Path, locked: Callable[[Path], AbstractContextManager[None]]
) -> None:
    async with opened(path, timeout=0.3) as store:
        await store.check()
        with locked(path):
            answers = await asyncio.gather(*(hold(store, charge(RUN, 1)) for _ in range(200)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        await spend(store, 5)
        assert sums(await balance(store)) == (0, 5)
        assert await store.holds() == ()


@pytest.mark.parametrize(
    ("locked", "why"),
    [(transaction_of_another, "another program kept it locked"), (turn_of_another, "other processes had .*lock for the whole")],
)
def test_the_thread_gives_up_at_its_time_limit_and_says_why(
    path: Path, locked: Callable[[Path], AbstractContextManager[None]], why: str
) -> None:
    file = BooksFile(str(path), uri=None, clock=ManualClock())
    with locked(path), pytest.raises(StoreUnavailable, match=why):
        file.carry_out([_ops.Check("")], lambda: True)
    assert file.carry_out([_ops.Check("")], lambda: True)
    file.close(lambda: True)


async def test_a_caller_cancelled_while_the_file_is_locked_leaves_no_hold(path: Path) -> None:
    async with opened(path) as store:
        await store.check()
        with transaction_of_another(path):
            calls = [asyncio.ensure_future(hold(store, charge(RUN, 1))) for _ in range(150)]
            await asyncio.wait(calls, timeout=0.05)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        assert await store.holds() == ()
        assert sums(await balance(store)) == (0, 0)


async def test_a_caller_cancelled_while_the_store_is_closing_hears_of_nothing_else(path: Path) -> None:
    async with opened(path) as store:
        await store.check()
        with transaction_of_another(path):
            call = asyncio.ensure_future(hold(store, charge(RUN, 1)))
            await asyncio.wait([call], timeout=0.05)
            closing = asyncio.ensure_future(store.aclose())
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
        await closing


async def test_of_a_batch_that_begins_too_late_the_settles_are_written_and_the_reserves_are_not(path: Path) -> None:
    file = BooksFile(str(path), uri=None, clock=ManualClock())
    reserved, settled = new_id(now=START), new_id(now=START)
    ops: list[Op] = [
        _ops.Reserve(reserved, ((charge(RUN, 10),),), LEASE, "release"),
        _ops.Settle(settled, (charge(RUN, 7),)),
    ]
    refused, counted = file.carry_out(ops, lambda: True)
    assert isinstance(refused, StoreUnavailable)
    assert counted == stores.Settlement(True, True, (Balance(RUN, 0, 7),))
    file.close(lambda: True)
    assert rows(path, "SELECT id, state FROM entry") == [(settled, "closed")]


# The file cannot be used.


class SmallFile(BooksFile):
    """A file that may not grow."""

    most = 0

    def _open(self) -> sqlite3.Connection:
        db = super()._open()
        (now,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {max(now, self.most)}")
        return db


async def test_a_full_file_writes_nothing_by_halves_and_works_again_when_there_is_room(path: Path) -> None:
    async with opened(path) as store:
        small = store._file = SmallFile(str(path), uri=None, clock=ManualClock())
        await spend(store, 5)
        with pytest.raises(StoreUnavailable, match="no space left"):
            await hold(store, *(charge(Bucket("x" * 5000 + str(n)), 1) for n in range(40)))
        assert rows(path, "SELECT key, held, spent FROM account") == [(":run", 0, 5)]
        assert rows(path, "SELECT state FROM entry") == [("closed",)]
        small.most = 10_000
        await hold(store, *(charge(Bucket("x" * 5000 + str(n)), 1) for n in range(40)))
        assert sums(await balance(store)) == (0, 5)


def test_a_commit_is_on_the_disk_when_it_is_acknowledged_and_checkpoints_are_ours(path: Path) -> None:
    db = BooksFile(str(path), uri=None, clock=ManualClock())._open()
    told = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "wal_autocheckpoint")]
    db.close()
    assert told == ["wal", 2, 0]


class NoCheckpoints(BooksFile):
    """A file whose checkpoints fail."""

    failed = 0

    def _open(self) -> sqlite3.Connection:
        def allow(_: int, what: str | None, *__: str | None) -> int:
            self.failed += what == "wal_checkpoint"
            return sqlite3.SQLITE_DENY if what == "wal_checkpoint" else sqlite3.SQLITE_OK

        db = super()._open()
        db.set_authorizer(allow)
        return db


async def test_a_checkpoint_that_fails_is_nobodys_failure(path: Path) -> None:
    async with opened(path) as store:
        file = store._file = NoCheckpoints(str(path), uri=None, clock=ManualClock())
        for _ in range(150):
            await spend(store, 0)
        assert file.failed == 300 // 128
        await spend(store, 7)
        assert sums(await balance(store)) == (0, 7)


async def test_a_disk_that_takes_no_more_is_an_answer_and_not_a_roll_back(path: Path) -> None:
    async with opened(path) as store:
        await spend(store, 5)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (wal_size(path), hard))
        try:
            answers = await asyncio.gather(*(spend(store, 1) for _ in range(50)), return_exceptions=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        await spend(store, 2)
        assert sums(await balance(store)) == (0, 7)
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


async def test_a_file_that_may_only_be_read_shows_its_balances_and_takes_nothing(path: Path) -> None:
    async with opened(path) as store:
        await spend(store, 5)
    before = content(path)
    async with opened(f"file:{path}?mode=ro") as store:
        for call in (store.check(), hold(store, charge(RUN, 1))):
            with pytest.raises(StoreUnavailable, match="it cannot be written"):
                await call
        assert sums(await balance(store)) == (0, 5)
    assert content(path) == before


async def test_what_is_no_database_is_refused_and_left_as_it_is(path: Path) -> None:
    overwrite(path, b"something else entirely\n" * 100)
    async with opened(path) as store:
        with pytest.raises(StoreUnavailable, match="not a SQLite database"):
            await store.check()
    assert content(path) == b"something else entirely\n" * 100


@pytest.mark.parametrize("mode", ["delete", "wal"])
async def test_the_database_of_another_program_is_refused_and_left_as_it_is(path: Path, mode: str) -> None:
    with another_program(path) as db:
        db.execute(f"PRAGMA journal_mode = {mode}")
        db.execute("CREATE TABLE account (key TEXT)")
    before = content(path)
    async with opened(path) as store:
        with pytest.raises(StoreUnavailable, match="belongs to another program"):
            await store.check()
    assert content(path) == before


async def test_a_file_of_a_newer_release_is_refused_with_what_to_do(path: Path) -> None:
    async with opened(path) as store:
        await store.check()
    with another_program(path) as db:
        db.execute("PRAGMA user_version = 2")
    async with opened(path) as store:
        with pytest.raises(StoreUnavailable, match=r"a newer release wrote it \(format 2, this one knows 1\); upgrade"):
            await store.check()


async def test_a_damaged_file_is_an_answer(path: Path) -> None:
    async with opened(path) as store:
        await asyncio.gather(*(hold(store, charge(Bucket(f"{n}"), 1)) for n in range(200)))
    damaged = bytearray(content(path))
    damaged[4096:] = b"\xff" * (len(damaged) - 4096)
    overwrite(path, bytes(damaged))
    async with opened(path) as store:
        with pytest.raises(StoreUnavailable, match="it is damaged"):
            await store.check()


async def test_a_directory_that_is_not_there_is_an_answer(tmp_path: Path) -> None:
    async with opened(tmp_path / "none" / "budget.db") as store:
        with pytest.raises(StoreUnavailable, match="No such file or directory"):
            await store.check()
        (tmp_path / "none").mkdir()
        assert (await store.check()).rolled_back is False
    async with opened(tmp_path) as store:
        with pytest.raises(StoreUnavailable, match="cannot be opened"):
            await store.check()


@pytest.mark.parametrize("path", [":memory:", "", "file::memory:", "file:x?mode=memory", "file:"])
async def test_a_path_that_is_no_file_is_refused_when_the_store_is_built(path: str) -> None:
    with pytest.raises(ValueError, match=r"needs a file.*MemoryStore\(\)"):
        SQLiteStore(path)


def test_the_path_is_resolved_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    link = path.parent / "link.db"
    link.symlink_to(path)
    store = SQLiteStore("link.db")
    monkeypatch.chdir("/")
    assert repr(store) == f"<SQLiteStore {path}>"

    async def use() -> None:
        await store.check()
        await store.aclose()

    asyncio.run(use())
    assert path.exists()


# The file is not what it was.


@pytest.mark.parametrize("gone", [[""], ["", ".next"], ["", "-wal", "-shm", ".next", ".lock"]])
async def test_a_file_deleted_under_us_is_noticed_and_settles_still_count(path: Path, gone: list[str]) -> None:
    async with opened(path) as store, opened(path) as other:
        id = await hold(store, charge(RUN, 10))
        await spend(store, 50)
        await other.check()
        for suffix in gone:
            delete(f"{path}{suffix}")
        with pytest.raises(StoreRolledBack, match=r"accept\(\)"):
            await hold(store, charge(RUN, 1))
        with pytest.raises(StoreRolledBack):
            await hold(other, charge(RUN, 1))
        settled = await store.settle(id, [charge(RUN, 10)])
        assert (settled.counted, settled.late) == (True, True)
        assert (await store.check()).rolled_back is True
        await store.accept()
        assert (await store.check()).rolled_back is False
        for each in (store, other):
            await spend(each, 1)
        assert sums(await balance(other)) == (0, 12)


async def test_a_file_replaced_by_an_older_copy_is_noticed_and_its_wal_is_not_played_into_it(path: Path) -> None:
    older = path.with_name("older.db")
    async with opened(path) as store:
        await spend(store, 40)
        kept = await hold(store, charge(RUN, 2))
        copy(path, older)
        await asyncio.gather(*(hold(store, charge(Bucket(f"{n}"), 1)) for n in range(100)))
        await spend(store, 50)
        older.replace(path)
        assert sums(await balance(store)) == (2, 40)
        async with opened(path) as newcomer:
            for each in (store, newcomer):
                with pytest.raises(StoreRolledBack):
                    await hold(each, charge(RUN, 1))
            assert await store.renew([kept], lease=LEASE) == {kept}
            assert (await store.extend(kept, 1, [charge(RUN, 3)])).state == "held"
            await store.settle(new_id(now=START), [charge(RUN, 50)])
            assert (await newcomer.check()).rolled_back is True
            await newcomer.accept()
            await spend(store, 1)
            await spend(newcomer, 1)
            assert sums(await balance(store)) == (3, 92)
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


async def test_who_came_back_to_a_file_that_others_wrote_past_what_it_saw_notices_too(path: Path) -> None:
    older = path.with_name("older.db")
    async with opened(path) as idle, opened(path) as first:
        await first.check()
        copy(path, older)
        await spend(idle, 50)
        await first.aclose()
        older.replace(path)
        async with opened(path) as newcomer:
            for _ in range(5):
                await spend(newcomer, 1)
            with pytest.raises(StoreRolledBack):
                await hold(idle, charge(RUN, 1))
            with pytest.raises(StoreRolledBack):
                await hold(newcomer, charge(RUN, 1))


async def test_an_acceptance_before_anyone_noticed_is_enough(path: Path) -> None:
    older = path.with_name("older.db")
    async with opened(path) as store:
        await store.check()
        copy(path, older)
        await spend(store, 50)
        older.replace(path)
        async with opened(path) as operator:
            await operator.accept()
        await spend(store, 1)


@pytest.mark.parametrize("notice", [False, True])
async def test_a_roll_back_behind_an_acceptance_is_noticed_and_can_be_accepted(path: Path, notice: bool) -> None:
    older = path.with_name("older.db")
    async with opened(path) as store, opened(path) as other:
        await store.check()
        copy(path, older)
        await store.accept()
        await other.check()
        older.replace(path)
        if notice:
            with pytest.raises(StoreRolledBack):
                await hold(store, charge(RUN, 1))
        await store.accept()
        await spend(store, 1)
        await spend(other, 1)


@pytest.mark.parametrize("writes", [5, 50])
async def test_who_only_looked_notices_too(path: Path, tmp_path: Path, writes: int) -> None:
    older = tmp_path / "older.db"
    async with opened(path) as store, opened(path) as reader:
        for _ in range(10):
            await store.check()
        assert await balance(reader) == Balance(RUN)
        async with opened(older) as another:
            for _ in range(writes):
                await another.check()
        older.replace(path)
        with pytest.raises(StoreRolledBack):
            await hold(reader, charge(RUN, 1))


async def test_who_wrote_little_and_looked_later_notices_by_what_it_saw(path: Path) -> None:
    older = path.with_name("older.db")
    async with opened(path) as store, opened(path) as reader:
        await reader.check()
        copy(path, older)
        await spend(store, 50)
        assert sums(await balance(reader)) == (0, 50)
        older.replace(path)
        with pytest.raises(StoreRolledBack):
            await hold(reader, charge(RUN, 1))


async def test_a_client_whose_mark_was_forgotten_after_a_week_takes_that_for_no_roll_back(path: Path) -> None:
    clock = ManualClock()
    async with opened(path, clock=clock) as idle, opened(path, clock=clock) as busy:
        await idle.check()
        clock.advance(8 * 24 * HOUR)
        for _ in range(256):
            await busy.check()
        assert rows(path, "SELECT count(*) FROM client") == [(1,)]
        assert (await idle.check()).rolled_back is False


def killed_in_a_storm(path: Path) -> list[str]:
    """Leave a WAL behind, as a killed process does; return ids that it had settled."""
    worker = start(STORM, path)
    assert worker.stdout is not None
    heard = [worker.stdout.readline() for _ in range(50)]
    worker.kill()
    worker.communicate()
    assert wal_size(path) > 0
    return [line.split()[0] for line in heard]


async def test_a_wal_that_a_killed_process_left_is_not_played_into_another_file(path: Path) -> None:
    older = path.with_name("older.db")
    async with opened(path) as store:
        await spend(store, 40)
    copy(path, older)
    killed_in_a_storm(path)
    older.replace(path)
    async with opened(path) as store:
        assert sums(await balance(store)) == (0, 40)
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


async def test_a_directory_copied_with_the_wal_of_a_killed_process_has_all_that_was_acknowledged(path: Path) -> None:
    settled = killed_in_a_storm(path)
    elsewhere = shutil.copytree(path.parent, path.parent / "elsewhere")
    async with opened(elsewhere / path.name, clock=lambda: 0) as store:
        again = await asyncio.gather(*(store.release(id) for id in settled))
        assert {settlement.counted for settlement in again} == {False}


# The thread, and the ends of a store.


async def test_closing_answers_what_is_under_way_and_leaves_no_thread_and_no_lock(path: Path) -> None:
    before = set(threading.enumerate())
    store = SQLiteStore(path, clock=ManualClock())
    calls = [asyncio.ensure_future(hold(store, charge(RUN, 1))) for _ in range(100)]
    await asyncio.sleep(0)
    await store.aclose()
    assert set(threading.enumerate()) == before
    await store.aclose()
    assert len({await call for call in calls}) == 100
    with pytest.raises(StoreUnavailable, match="it was closed"):
        await store.check()
    assert sorted(p.name for p in path.parent.iterdir()) == ["budget.db", "budget.db.lock", "budget.db.next"]
    assert rows(path, "PRAGMA application_id") == [(APPLICATION_ID,)]


async def test_a_thread_that_hangs_keeps_nobody_from_closing(path: Path) -> None:
    go_on = threading.Event()

    class Hanging(BooksFile):
        def close(self, late: Callable[[], bool]) -> None:
            go_on.wait()
            super().close(late)

    store = SQLiteStore(path, timeout=0.3)
    store._file = Hanging(str(path), uri=None, clock=ManualClock())
    await store.check()
    thread = store._thread
    assert thread is not None
    await store.aclose()
    assert thread.is_alive()
    go_on.set()
    thread.join()


def test_a_store_that_is_dropped_ends_its_thread(path: Path) -> None:
    before = set(threading.enumerate())
    store = SQLiteStore(path)
    asyncio.run(store.check())
    (thread,) = set(threading.enumerate()) - before
    del store
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_calls_that_their_loop_abandoned_do_not_keep_a_store_from_closing(path: Path) -> None:
    store = SQLiteStore(path)

    async def abandon() -> None:
        calls = [asyncio.ensure_future(store.check()) for _ in range(250)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)

    asyncio.run(abandon())
    asyncio.run(store.aclose())


FORGETFUL = """
import asyncio, sys
from stores.sqlite import SQLiteStore

store = SQLiteStore(sys.argv[1])
print((asyncio.run(store.check())).rolled_back)
"""


async def test_a_program_that_forgets_to_close_still_exits(path: Path) -> None:
    assert output(start(FORGETFUL, path)) == "False\n"


FORK = """
import asyncio, os, sys
from stores import StoreUnavailable
from stores.sqlite import SQLiteStore

used, unused = SQLiteStore(sys.argv[1], timeout=60), SQLiteStore(sys.argv[1])

async def child():
    try:
        await used.check()
    except StoreUnavailable as error:
        print(error)
    await used.aclose()
    print((await unused.check()).rolled_back, flush=True)

async def begin():
    global calls
    calls = [asyncio.ensure_future(used.check()) for _ in range(100)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)

async def parent():
    await asyncio.gather(*calls, used.check())

with asyncio.Runner() as runner:
    runner.run(begin())
    if process := os.fork():
        os.waitpid(process, 0)
        runner.run(parent())
        runner.run(used.aclose())
    else:
        asyncio.run(child())
        os._exit(0)
"""


async def test_a_store_in_use_is_refused_in_a_forked_child_and_goes_on_in_the_parent(path: Path) -> None:
    assert output(start(FORK, path)).splitlines() == [
        "the sqlite store is unavailable: it belongs to another event loop; make one store per loop",
        "False",
    ]


# Turns.


def waiting(path: Path) -> None:
    """Return when somebody is next to take a turn at `path`."""
    with Path(f"{path}.next").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            fcntl.flock(file, fcntl.LOCK_UN)


def open_files(path: Path) -> list[str]:
    """Return the lock files of `path` that this process has open."""
    names = []
    for file in Path("/dev/fd").iterdir():
        with suppress(OSError):  # the one that lists them is closed by now
            names.append(str(file.readlink()))
    return sorted(name for name in names if name.startswith(f"{path}."))


def test_nobody_has_two_turns_in_a_row_while_another_waits(path: Path) -> None:
    turns, order = Turns(str(path)), list[str]()

    def other() -> None:
        with Turns(str(path)).turn(lambda: False):
            order.append("other")

    thread = threading.Thread(target=other)
    with turns.turn(lambda: False):
        thread.start()
        waiting(path)
        order.append("first")
    with turns.turn(lambda: False):
        order.append("second")
    thread.join()
    assert order == ["first", "other", "second"]


FORK_IN_A_TURN = """
import os, sys
from stores._turns import Turns

turns, (ended, end) = Turns(sys.argv[1]), os.pipe()
with turns.turn(lambda: False):
    child = os.fork()
    if not child:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
asked = 0

def late():
    global asked
    asked += 1
    return asked > 1000

with turns.turn(late):
    print("again")
os.close(end)
os.waitpid(child, 0)
"""


def test_a_child_that_is_forked_in_a_turn_does_not_keep_it(path: Path) -> None:
    assert output(start(FORK_IN_A_TURN, path)) == "again\n"


def test_the_file_is_closed_in_a_turn(path: Path) -> None:
    wal, used, close = Path(f"{path}-wal"), threading.Event(), threading.Event()

    def other() -> None:
        file = BooksFile(str(path), uri=None, clock=ManualClock())
        file.carry_out([_ops.Check("")], lambda: False)
        used.set()
        close.wait()
        file.close(lambda: False)

    thread = threading.Thread(target=other)
    thread.start()
    used.wait()
    with Turns(str(path)).turn(lambda: False):
        close.set()
        waiting(path)
        assert wal.exists()
    thread.join()
    assert not wal.exists()


def test_the_file_is_closed_though_no_turn_comes(path: Path) -> None:
    file = BooksFile(str(path), uri=None, clock=ManualClock())
    file.carry_out([_ops.Check("")], lambda: False)
    with turn_of_another(path):
        file.close(lambda: True)
    assert not Path(f"{path}-wal").exists()


def test_a_turn_is_had_by_the_file_of_that_name_though_it_was_deleted_meanwhile(path: Path) -> None:
    found = list[bool]()

    def other() -> None:
        with Turns(str(path)).turn(lambda: False):
            found.append(Path(f"{path}.lock").exists())

    thread = threading.Thread(target=other)
    with Turns(str(path)).turn(lambda: False):
        thread.start()
        waiting(path)
        Path(f"{path}.lock").unlink()
    thread.join()
    assert found == [True]
    assert open_files(path) == []


@pytest.mark.parametrize("taken", ["lock", "next"])
def test_a_turn_that_does_not_come_leaves_no_file_open(path: Path, taken: str) -> None:
    with Path(f"{path}.{taken}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailable, match=taken), Turns(str(path)).turn(lambda: True):
            pytest.fail("it had a turn that another has")
        assert open_files(path) == [f"{path}.{taken}"]
    with Turns(str(path)).turn(lambda: True):
        assert open_files(path) == [f"{path}.lock"]
    assert open_files(path) == []


def test_a_turn_that_ends_in_an_error_is_over(path: Path) -> None:
    with pytest.raises(KeyError), Turns(str(path)).turn(lambda: True):
        raise KeyError
    with Turns(str(path)).turn(lambda: True):
        assert open_files(path) == [f"{path}.lock"]


async def test_it_takes_this_machines_time_in_milliseconds_unless_told_another(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", lambda: START * 1_000_000 + 999_999)
    async with SQLiteStore(path) as store:
        assert (await store.check()).now == START


async def test_the_file_is_readable_by_a_person(path: Path) -> None:
    async with opened(path) as store:
        id = await hold(store, Charge(hour("a"), 5, 85, 100))
    assert rows(path, "SELECT key, starts, ends, held FROM account") == [(f":a@{START}", START, START + HOUR, 5)]
    ((found, state, charges),) = rows(path, "SELECT id, state, charges FROM entry")
    assert (found, state) == (id, "held")
    assert json.loads(str(charges)) == ["", [[f"a@{START}", START, START + HOUR, 5, 85, 100]]]
