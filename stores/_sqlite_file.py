"""The SQLite file: opened, looked after, and changed one transaction at a time, by one thread.

All writing and checkpointing is done inside a turn (`_turns`): processes are served in fairness, and no checkpoint meets a
commit. Before SQLite 3.51.3 the two could race when the WAL began anew, and damage the file.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from stores import _ops
from stores._ops import Op, Outcome
from stores._sqlite_rows import SCHEMA, MakeBucket, Rows
from stores._turns import Turns
from stores.base import Bucket, Health, tree_key
from stores.errors import StoreError, StoreRolledBack, StoreUnavailable

Late: TypeAlias = Callable[[], bool]

APPLICATION_ID = 0x62756467  # "budg": tells our files from other programs'

CLIENT_KEPT = 7 * 24 * 60 * 60 * 1000
"""How long a client's last write is kept, in milliseconds. Who comes back later notices less of a roll-back."""

_CHECKPOINT_EVERY = 128  # transactions of all processes together: a WAL of some megabytes
_FORGET_CLIENTS_EVERY = 256
_BUSY = 0.05  # seconds; SQLite's own wait for a lock, after which we look whether we are late

_STEPS: tuple[tuple[str, ...], ...] = (
    (
        f"PRAGMA application_id = {APPLICATION_ID}",
        """CREATE TABLE meta (
            epoch TEXT NOT NULL, writes INTEGER NOT NULL, accepted INTEGER NOT NULL, suspect INTEGER NOT NULL,
            time INTEGER NOT NULL)""",
        "INSERT INTO meta VALUES (lower(hex(randomblob(8))), 0, 0, 0, 0)",
        "CREATE TABLE client (id TEXT PRIMARY KEY, writes INTEGER NOT NULL, at INTEGER NOT NULL) WITHOUT ROWID",
        *SCHEMA,
    ),
)
"""What makes each format of the tables from the one before, the first from an empty file. `PRAGMA user_version` is how many
steps a file has behind it. To change the tables, add a step: one that was released is never touched again."""

_WHY = {
    sqlite3.SQLITE_BUSY: "another program kept it locked for the whole time limit",
    sqlite3.SQLITE_READONLY: "it cannot be written",
    sqlite3.SQLITE_FULL: "there is no space left for it",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite database; give the store a file of its own",
    sqlite3.SQLITE_CORRUPT: "it is damaged; put back a sound copy of it",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened or made there",
}


@dataclass(slots=True)
class _Meta:
    """The one row that says what the file is, within one transaction."""

    epoch: str
    writes: int
    accepted: int
    suspect: bool
    time: int
    mine: int  # the number of this client's last write, and when it was; 0 when the file has none
    mine_at: int
    known: int  # the last time that somebody accepted the file, by what it or this client knows
    changed: bool = False


class _Seen(NamedTuple):
    """What the file was when it last answered this client."""

    epoch: str
    writes: int
    accepted: int  # the latest that this client ever saw: who accepts goes beyond it, whatever the clock says
    mine: int
    mine_at: int


class BooksFile:
    """The books in the file `path`. Made in any thread; used in one.

    `uri` is what SQLite opens when it is not the path itself. `clock` returns milliseconds since the epoch.
    """

    def __init__(self, path: str, *, uri: str | None, clock: Callable[[], int]) -> None:
        self._path = path
        self._uri = uri
        self._clock = clock
        self._turns = Turns(path)
        self._pair = Path(path + ".next")  # where file and WAL lay when they were opened last
        self._db: sqlite3.Connection | None = None
        self._place: str | None = None  # of the file that is open
        self._client = secrets.token_hex(8)
        self._seen: _Seen | None = None
        self._time = 0
        # A few buckets are named by most charges.
        self._bucket: MakeBucket = lru_cache(maxsize=1024)(Bucket)

    def carry_out(self, ops: Sequence[Op], late: Late) -> list[Outcome]:
        """Carry out `ops` in one transaction. Raises `StoreUnavailable`; then nothing of them was written, or all of it.

        `late` says whether their callers were told that it is over. What has begun by then is finished all the same.
        """
        outcomes = None
        while outcomes is None:
            try:
                with self._turns.turn(late):
                    outcomes = self._transaction(ops, late)
            except (sqlite3.Error, OSError, OverflowError) as error:
                raise StoreUnavailable("sqlite", self._why(error)) from error
        return outcomes

    def close(self, late: Late) -> None:
        """Close the file. The last connection to it checkpoints, which wants a turn."""
        with suppress(StoreUnavailable, OSError), self._turns.turn(late):
            self._drop()
        self._drop()

    def _transaction(self, ops: Sequence[Op], late: Late) -> list[Outcome] | None:
        """Do one transaction, inside a turn; None when it had only leases to end, and more of them than it may end at once."""
        try:
            db = self._begin(late)
            meta = self._read_meta(db)
            rows = Rows(db, meta.time, self._bucket)
            outcomes: list[Outcome] | None = None
            if rows.load(ops):
                # A reserve whose caller was told that it failed would be a hold that nobody knows of.
                gone = late()
                outcomes = [_not_begun() if gone and isinstance(op, _ops.Reserve) else _run(op, rows, meta) for op in ops]
            rows.save()
            if rows.changed or meta.changed:
                self._write_meta(db, rows, meta)
            db.execute("COMMIT")
        except BaseException:
            # Closing rolls back, and a connection that failed is not used again.
            self._drop()
            raise
        self._believe(meta)
        if meta.changed and meta.writes % _CHECKPOINT_EVERY == 0:
            try:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            except sqlite3.Error:  # what was committed stands; the next checkpoint has another try
                self._drop()
        return outcomes

    # The state of the file.

    def _read_meta(self, db: sqlite3.Connection) -> _Meta:
        self._version(db)  # a newer release may have changed the tables since this one opened the file
        row = db.execute(
            "SELECT epoch, meta.writes, accepted, suspect, time, ifnull(client.writes, 0), ifnull(at, 0)"
            " FROM meta LEFT JOIN client ON client.id = ?",
            (self._client,),
        ).fetchone()
        if row is None:
            raise StoreUnavailable("sqlite", f"{self._path}: its table 'meta' is empty; put back a sound copy of the file")
        epoch, writes, accepted, suspect, last, mine, mine_at = row
        self._time = max(last, self._time, self._clock())
        known = accepted if self._seen is None else max(accepted, self._seen.accepted)
        meta = _Meta(epoch, writes, accepted, bool(suspect), self._time, mine, mine_at, known)
        if not meta.suspect and self._is_older(meta):
            meta.suspect = meta.changed = True
        return meta

    def _is_older(self, meta: _Meta) -> bool:
        """Say whether the file lacks something that this client saw in it, and nobody accepted that."""
        seen = self._seen
        if seen is None or meta.accepted > seen.accepted:
            return False
        if meta.epoch != seen.epoch or meta.writes < seen.writes:
            return True
        # Others may have written past what this client saw; its own mark is then older than it must be.
        return seen.mine_at + CLIENT_KEPT >= meta.time and meta.mine < seen.mine

    def _write_meta(self, db: sqlite3.Connection, rows: Rows, meta: _Meta) -> None:
        meta.changed = True
        meta.writes += 1
        meta.mine, meta.mine_at = meta.writes, meta.time
        db.execute(
            "UPDATE meta SET epoch = ?, writes = ?, accepted = ?, suspect = ?, time = ?",
            (meta.epoch, meta.writes, meta.accepted, meta.suspect, meta.time),
        )
        db.execute("REPLACE INTO client VALUES (?, ?, ?)", (self._client, meta.mine, meta.mine_at))
        rows.forget()
        if meta.writes % _FORGET_CLIENTS_EVERY == 0:
            db.execute("DELETE FROM client WHERE at < ?", (meta.time - CLIENT_KEPT,))

    def _believe(self, meta: _Meta) -> None:
        """Remember what a commit acknowledged, and never what may have failed."""
        self._seen = _Seen(meta.epoch, meta.writes, meta.known, meta.mine, meta.mine_at)

    # The connection.

    def _begin(self, late: Late) -> sqlite3.Connection:
        while True:
            try:
                db = self._connection()
                db.execute("BEGIN IMMEDIATE")
                return db
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or late():
                    raise
                time.sleep(_BUSY / 10)  # some kinds of busy are told at once

    def _connection(self) -> sqlite3.Connection:
        if self._db is not None and _place(self._path) != self._place:
            self._drop()  # it was deleted or replaced
        if self._db is None:
            self._delete_stale_wal()
            self._db = self._open()
            self._place = _place(self._path)
            self._pair.write_text(f"{self._place} {_place(self._path + '-wal')}")
        return self._db

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._uri or self._path, timeout=_BUSY, isolation_level=None, uri=self._uri is not None)
        try:
            self._make_ours(db)
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreUnavailable("sqlite", f"{self._path}: its file system has no WAL; put it on a local disk")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.execute("SELECT count(*) FROM meta").fetchone()  # opens the WAL
        except BaseException:
            db.close()
            raise
        return db

    def _make_ours(self, db: sqlite3.Connection) -> None:
        """Bring an empty file, or one of an older release, to our format; refuse one that is not ours before it is changed."""
        (application,) = db.execute("PRAGMA application_id").fetchone()
        version = self._version(db) if application == APPLICATION_ID else 0
        if version == len(_STEPS):
            return
        if application != APPLICATION_ID:
            found = db.execute("SELECT count(*) FROM sqlite_master").fetchone() + db.execute("PRAGMA user_version").fetchone()
            if application or any(found):
                raise StoreUnavailable(
                    "sqlite", f"{self._path}: it belongs to another program; give the store a file of its own"
                )
        db.execute("BEGIN IMMEDIATE")
        for step in _STEPS[version:]:
            for statement in step:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(_STEPS)}")
        db.execute("COMMIT")

    def _version(self, db: sqlite3.Connection) -> int:
        """Return the format of a file of ours. Raises `StoreUnavailable` for one that this release does not know."""
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > len(_STEPS):
            raise StoreUnavailable(
                "sqlite", f"{self._path}: a newer release wrote it (format {version}, this one knows {len(_STEPS)}); upgrade"
            )
        return int(version)

    def _delete_stale_wal(self) -> None:
        """Delete a WAL whose file was deleted or replaced: SQLite would play it into the file that is there now.

        It is stale when it is the one that was noted at the last opening and the file is not: when both are others, the
        whole directory was copied.
        """
        self._pair.touch()
        noted = self._pair.read_text().split()
        place, wal = _place(self._path), _place(self._path + "-wal")
        if place is None or (len(noted) == 2 and noted[0] != place and noted[1] == wal):
            for suffix in ("-wal", "-shm"):
                Path(self._path + suffix).unlink(missing_ok=True)

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def _why(self, error: Exception) -> str:
        why = _WHY.get(_code(error))
        return f"{self._path}: {error}" if why is None else f"{self._path}: {why} ({error})"


def _run(op: Op, rows: Rows, meta: _Meta) -> Outcome:
    """Carry out one operation; what it is refused for is its own outcome, and changed nothing."""
    books, now = rows.books, meta.time
    try:
        match op:
            case _ops.Reserve():
                if meta.suspect:
                    return StoreRolledBack("sqlite", _tree(op))
                return books.reserve(now, op.id, op.options, op.lease, op.on_lease_end)
            case _ops.Settle():
                return books.settle(now, op.id, op.charges)
            case _ops.Extend():
                return books.extend(now, op.id, op.step, op.charges)
            case _ops.Renew():
                return books.renew(now, op.ids, op.lease)
            case _ops.Balances():
                return books.balances(now, op.buckets)
            case _ops.Holds():
                return rows.holds(op.tree, op.limit)
            case _ops.Credit():
                return books.credit(now, op.id, op.charges)
            case _ops.Check():
                meta.changed = True  # the proof that it can be written is to write it
                return Health("sqlite", now, meta.epoch, meta.writes + 1, meta.suspect)
            case _ops.Accept():
                meta.accepted = meta.known = max(now, meta.known + 1)
                meta.epoch, meta.suspect, meta.changed = secrets.token_hex(8), False, True
                return None
    except StoreError as error:
        return error


def _tree(op: _ops.Reserve) -> str:
    for charges in op.options:
        for charge in charges:
            return charge.bucket.tree
    return tree_key(op.id)


def _not_begun() -> StoreUnavailable:
    return StoreUnavailable("sqlite", "the time limit was over before its turn came")


def _code(error: Exception) -> int:
    """Return SQLite's primary result code, or 0."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _place(path: str) -> str | None:
    """Return where a file lies, as device and inode, or None when there is none."""
    try:
        found = Path(path).stat()
    except FileNotFoundError:
        return None
    return f"{found.st_dev}:{found.st_ino}"
