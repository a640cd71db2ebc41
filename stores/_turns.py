"""Turns at a file, among the threads and processes of one machine: one at a time, nobody twice while another waits.

The lock is the kernel's (`flock`), so that it ends with the process that has it, however that process ends. It is asked for and
never waited for in the kernel, because a wait there has no time limit. Windows has no `flock`: there everybody goes at once,
and SQLite's own lock keeps the order, without fairness.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stores.errors import StoreUnavailable

if sys.platform != "win32":
    import fcntl

_PAUSE = 0.001
"""The mean pause between two attempts, in seconds: about half a commit, so that a turn is rarely wasted."""


class Turns:
    """Take turns at `path`, by means of two files beside it, `path`.lock and `path`.next.

    Who has `.lock` has the turn. Who has `.next` is the next to take it: whoever just had a turn finds `.next` taken as long
    as another waits, and so cannot come twice in a row. What is in the files does not matter here; we never delete them.
    """

    def __init__(self, path: str) -> None:
        self._lock = path + ".lock"
        self._next = path + ".next"

    @contextmanager
    def turn(self, late: Callable[[], bool]) -> Iterator[None]:
        """Have the turn inside the block. Raises `StoreUnavailable` when it did not come before `late`, and `OSError`."""
        if sys.platform == "win32":
            yield
            return
        # Opened anew each time: a descriptor that lives on would be inherited by a fork.
        following = _take(self._next, late)
        try:
            lock = _take(self._lock, late)
        finally:
            _give(following)
        try:
            yield
        finally:
            _give(lock)


def _take(path: str, late: Callable[[], bool]) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while not _locked(file):
                if late():
                    raise StoreUnavailable("sqlite", f"other processes had {path} for the whole time limit")
                time.sleep(random.uniform(0, 2 * _PAUSE))  # noqa: S311 (at random, so that no two keep step)
            if os.fstat(file).st_nlink:
                return file
        except BaseException:
            os.close(file)
            raise
        # Somebody deleted the file while we waited: others lock the new one of that name.
        os.close(file)


def _give(file: int) -> None:
    # Said, and not left to the close: a child that was forked meanwhile has the descriptor too, and would keep the lock.
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
