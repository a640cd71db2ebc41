"""A store in one SQLite file, shared by all threads and processes of one machine.

It owns one writing thread and speaks to the standard library's `sqlite3` there. aiosqlite would pay a hop between threads for
each statement and has no way to run a whole transaction in one; a caller that is cancelled between two statements then leaves
half a transaction open, for the next user of the connection to commit. Here one batch is one job, one hop and one transaction.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from urllib.parse import parse_qs, quote, unquote, urlsplit

from stores._batched import BatchedStore
from stores._ops import Op, Outcome, Outcomes
from stores._sqlite_file import BooksFile
from stores.errors import StoreUnavailable

__all__ = ["SQLiteStore"]

_MOST_JOBS = 10  # batches whose callers were told that it is over, behind one that hangs


class SQLiteStore(BatchedStore):
    """Count in the file `path`, which is made when it is not there. Its directory must be there, and on a local disk.

    A commit survives a loss of power. `path` may be a `file:` URI, of which SQLite takes the parameters. Every call is answered
    within `timeout` seconds. `clock` returns milliseconds since the epoch (default: this machine's clock); the store's time is
    the latest that any process wrote. `accept` accepts the whole file, whatever tree is named. Beside the file lie `path`-wal,
    -shm, .lock and .next; copy a file in use with SQLite's own backup. Opens nothing before the first call. Raises `ValueError`
    for a path that is no file.
    """

    name = "sqlite"

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 5.0, clock: Callable[[], int] | None = None) -> None:
        super().__init__(timeout=timeout, batch=100, in_flight=1, waiting=100_000)
        # Resolved once: it must not move with the working directory, and its lock lies beside the real file.
        self._path, uri = _resolve(os.fspath(path))
        self._timeout = timeout
        self._file = BooksFile(self._path, uri=uri, clock=_wall_clock if clock is None else clock)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = 0

    def __repr__(self) -> str:
        return f"<SQLiteStore {self._path}>"

    async def _carry_out(self, ops: Sequence[Op]) -> Outcomes:
        if self._thread is None:
            # A daemon, and it knows nothing of the store: a program that forgets aclose still exits, and a store that is
            # dropped ends its thread.
            self._thread = threading.Thread(target=_work, args=(self._jobs, self._file), name=repr(self), daemon=True)
            self._thread.start()
            self._pid = os.getpid()
            weakref.finalize(self, self._jobs.put, None).atexit = False
        if self._jobs.qsize() >= _MOST_JOBS:
            raise StoreUnavailable("sqlite", f"{self._path}: its disk does not answer, and {_MOST_JOBS} batches wait for it")
        # The thread gives up a little before the batcher does, so that the caller hears why.
        job = _Job(ops, asyncio.get_running_loop().create_future(), time.monotonic() + 0.9 * self._timeout)
        self._jobs.put(job)
        return await job.future

    async def _close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():  # a forked child has no such thread, and the parent keeps the file
            return
        job = _Job(None, asyncio.get_running_loop().create_future(), time.monotonic() + self._timeout)
        self._jobs.put(job)
        # A thread that hangs in a system call cannot be stopped. It closes the file when that call is over.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                await job.future
            thread.join()


@dataclass(frozen=True, slots=True)
class _Job:
    """A batch for the thread, or None: close the file and end."""

    ops: Sequence[Op] | None
    future: asyncio.Future[Sequence[Outcome]]
    deadline: float  # of time.monotonic()

    def late(self) -> bool:
        """Say whether nobody waits for it any more."""
        return self.future.done() or time.monotonic() >= self.deadline

    def answer(self, outcomes: Sequence[Outcome] | Exception) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits
            self.future.get_loop().call_soon_threadsafe(self._answer, outcomes)

    def _answer(self, outcomes: Sequence[Outcome] | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcomes, Exception):
            self.future.set_exception(outcomes)
        else:
            self.future.set_result(outcomes)


def _work(jobs: SimpleQueue[_Job | None], file: BooksFile) -> None:
    """Be the writing thread."""
    while True:
        job = jobs.get()
        if job is None or job.ops is None:
            file.close(job.late if job is not None else lambda: True)
            if job is not None:
                job.answer(())
            return
        try:
            outcomes: Sequence[Outcome] | Exception = file.carry_out(job.ops, job.late)
        except Exception as error:  # noqa: BLE001 (it belongs to the callers, and the thread must go on)
            outcomes = error
        job.answer(outcomes)
        del job, outcomes  # or the last batch and its loop would live as long as the thread waits


def _resolve(path: str) -> tuple[str, str | None]:
    """Return the real path of the file, and the URI to open when the user gave one."""
    query = ""
    if uri := path.startswith("file:"):
        parts = urlsplit(path)
        path, query = unquote(parts.path), parts.query
    if not path or path == ":memory:" or "memory" in parse_qs(query).get("mode", ()):
        raise ValueError("a SQLiteStore needs a file, whose path you give; to count in memory, write MemoryStore()")
    real = os.path.realpath(path)
    return real, f"file:{quote(real)}?{query}" if uri else None


def _wall_clock() -> int:
    return time.time_ns() // 1_000_000
