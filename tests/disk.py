"""A disk that SQLite writes to under watch: every write and every sync is written down, and one of them may fail.

`Disk` is a SQLite VFS: the operating system's own, with a word put in before three of its methods. What was written down tells
what is left after a loss of power at any moment: what was synced by then, and of the rest whatever the chance of it is.

    python -m tests.disk FILE CALLERS PAIRS

is one of several processes on one file: it reserves and settles, says in one line of JSON what it asked and was told and when,
pickles what it wrote, and ends without closing anything.
"""

from __future__ import annotations

import _sqlite3
import asyncio
import ctypes
import json
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stores import Bucket, Charge, SQLiteStore, _sqlite_file, new_id

OK, FULL, IOERR_FSYNC = 0, 13, 10 | 4 << 8
SECTOR = 512
_KINDS = {0x100: "", 0x80000: "-wal"}  # SQLITE_OPEN_MAIN_DB, SQLITE_OPEN_WAL

_POINTER, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_Open = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER)
_Write = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER, _INT, _INT64)
_Truncate = ctypes.CFUNCTYPE(_INT, _POINTER, _INT64)
_Sync = ctypes.CFUNCTYPE(_INT, _POINTER, _INT)


class _Methods(ctypes.Structure):
    """`sqlite3_io_methods`: those that are not named here are carried along."""

    _fields_ = (
        ("version", _INT),
        ("close_read", _POINTER * 2),
        ("write", _Write),
        ("truncate", _Truncate),
        ("sync", _Sync),
        ("others", _POINTER * 13),
    )


class _File(ctypes.Structure):
    _fields_ = (("methods", ctypes.POINTER(_Methods)),)


class _VFS(ctypes.Structure):
    """`sqlite3_vfs`, version 3."""

    _fields_ = (
        ("version", _INT),
        ("size_of_file", _INT),
        ("longest_path", _INT),
        ("next", _POINTER),
        ("name", ctypes.c_char_p),
        ("data", _POINTER),
        ("open", _Open),
        ("others", _POINTER * 15),
    )


class Event(NamedTuple):
    """A write (its place and its bytes), a truncation (to its place) or a sync, when it was over, of a file by its suffix.

    A sync has the moment at which it began: it covers nothing that was written later.
    """

    at: int  # nanoseconds of the machine's monotonic clock, which all of its processes share
    what: Literal["write", "truncate", "sync"]
    file: str
    place: int = 0
    data: bytes = b""


class Disk:
    """Watch what SQLite writes through `file:…?vfs=NAME`, in this process.

    `fail` is asked before each write and sync, and may answer with a result code of SQLite's instead of 0.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[Event] = []
        self.fail: Callable[[str, str], int] = lambda what, file: OK
        self._library = ctypes.CDLL(_sqlite3.__file__)  # through it, the library that this Python's sqlite3 uses
        self._library.sqlite3_vfs_find.restype = ctypes.POINTER(_VFS)
        self._real: _VFS = self._library.sqlite3_vfs_find(None).contents
        self._vfs = _VFS.from_buffer_copy(self._real)
        self._vfs.next, self._vfs.name, self._vfs.open = None, name.encode(), _Open(self._open)
        self._methods: dict[str, _Methods] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Be there for SQLite inside the block."""
        self._library.sqlite3_vfs_register(ctypes.byref(self._vfs), 0)
        try:
            yield
        finally:
            self._library.sqlite3_vfs_unregister(ctypes.byref(self._vfs))

    def keep(self, path: str) -> None:
        """Pickle the events."""
        Path(path).write_bytes(pickle.dumps(self.events))

    def _open(self, vfs: int, path: int, file: int, flags: int, out: int) -> int:
        result = int(self._real.open(ctypes.addressof(self._real), path, file, flags, out))
        kind = next((suffix for flag, suffix in _KINDS.items() if flags & flag), None)
        opened = _File.from_address(file)
        if result == OK and kind is not None:
            if kind not in self._methods:
                self._methods[kind] = self._watching(kind, opened.methods.contents)
            opened.methods = ctypes.pointer(self._methods[kind])
        return result

    def _watching(self, kind: str, real: _Methods) -> _Methods:
        def write(file: int, data: int, size: int, place: int) -> int:
            result = self.fail("write", kind) or int(real.write(file, data, size, place))
            if result == OK:
                self.events.append(Event(time.monotonic_ns(), "write", kind, place, ctypes.string_at(data, size)))
            return result

        def truncate(file: int, size: int) -> int:
            result = int(real.truncate(file, size))
            self.events.append(Event(time.monotonic_ns(), "truncate", kind, size))
            return result

        def sync(file: int, flags: int) -> int:
            began = time.monotonic_ns()
            result = self.fail("sync", kind) or int(real.sync(file, flags))
            if result == OK:
                self.events.append(Event(began, "sync", kind))
            return result

        ours = _Methods.from_buffer_copy(real)
        ours.write, ours.truncate, ours.sync = _Write(write), _Truncate(truncate), _Sync(sync)
        return ours


def after_power_loss(before: bytes, events: Sequence[Event], draw: random.Random) -> dict[str, bytes]:
    """Return what file and WAL may be after `events`, the last of which the loss of power ended, by their suffixes.

    What was written after a file's last sync is there, is not there, or is there in part, sector by sector.
    """
    left = {"": bytearray(before), "-wal": bytearray()}
    for kind, content in left.items():
        of_kind = [event for event in events if event.file == kind]
        synced = max((n for n, event in enumerate(of_kind) if event.what == "sync"), default=-1)
        for n, event in enumerate(of_kind):
            lost = draw.choice((0, 0.5, 1)) if n > synced else 0
            if event.what == "truncate" and draw.random() >= lost:
                del content[event.place :]
            for offset in range(0, len(event.data), SECTOR):
                if draw.random() < lost:
                    continue
                sector = event.data[offset : offset + SECTOR]
                place = event.place + offset
                content.extend(bytes(max(0, place + len(sector) - len(content))))
                content[place : place + len(sector)] = sector
    return {kind: bytes(content) for kind, content in left.items()}


async def main(path: str, callers: int, pairs: int) -> None:
    """Reserve and settle over two buckets, and say so."""
    # So often that in a short storm the WAL begins anew many times.
    _sqlite_file._CHECKPOINT_EVERY = 16
    disk = Disk("watched")
    buckets = Bucket("run"), Bucket("all")
    meant: dict[str, int] = {}
    told: list[tuple[int, str]] = []
    with disk.watched():
        store = SQLiteStore(f"file:{path}?vfs=watched", timeout=60)

        async def one(caller: int) -> None:
            for n in range(pairs):
                id, meant_by_it = new_id(), 1 + (caller + n) % 7
                meant[id] = meant_by_it
                await store.reserve(id, [[Charge(b, 9) for b in buckets]], lease=600_000)
                await store.settle(id, [Charge(b, meant_by_it) for b in buckets])
                told.append((time.monotonic_ns(), id))

        await asyncio.gather(*map(one, range(callers)))
        report: dict[str, Any] = {"meant": meant, "told": told}
        print(json.dumps(report), flush=True)
        disk.keep(f"{path}.{os.getpid()}.events")
        os._exit(0)  # whoever closes the file last deletes the WAL


if __name__ == "__main__":
    from tests.disk import main  # so that what is pickled is known by the name that it has elsewhere

    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
