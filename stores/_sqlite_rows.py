"""The books as rows: what one transaction needs of them is loaded into `Books`, and what changed is written back.

Every text is stored as printable ASCII, escaped as in JSON: SQLite's text functions stop at a NUL, and its driver takes no lone
surrogate, while a label may hold either.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple, TypeAlias

from stores import _ops
from stores._books import Account, Books, Entry, forget_at
from stores._ops import Op
from stores.base import RETENTION, RETENTION_WINDOWLESS, Bucket, Charge, Hold, born

SCHEMA = (
    """CREATE TABLE account (
        key TEXT PRIMARY KEY, starts INTEGER, ends INTEGER, held INTEGER NOT NULL, spent INTEGER NOT NULL,
        lost INTEGER NOT NULL, credited INTEGER NOT NULL, written INTEGER NOT NULL) WITHOUT ROWID""",
    # Two indexes to forget by. A bucket with a window never moves in its own, and is not in the other.
    "CREATE INDEX account_ends ON account (ends) WHERE ends IS NOT NULL",
    "CREATE INDEX account_written ON account (written) WHERE ends IS NULL",
    """CREATE TABLE entry (
        id TEXT PRIMARY KEY, state TEXT NOT NULL, charges TEXT, option INTEGER, step INTEGER, lease_ends INTEGER,
        on_lease_end TEXT, keep_until INTEGER) WITHOUT ROWID""",
    "CREATE INDEX entry_held ON entry (lease_ends) WHERE state = 'held'",
    "CREATE INDEX entry_expired ON entry (lease_ends) WHERE state = 'expired'",
    "CREATE INDEX entry_keep ON entry (keep_until) WHERE keep_until IS NOT NULL",
)

MOST_ENDED = 1000
"""How many leases one transaction ends at most; more are ended by further transactions, before anything else is done."""

MOST_FORGOTTEN = 200
"""How many rows of a kind one transaction forgets at most, or twice as many as it wrote: so the file stops growing."""

MakeBucket: TypeAlias = Callable[[str, str, int | None, int | None], Bucket]

_ENTRY = "id, state, charges, option, step, lease_ends, on_lease_end, keep_until"


class _Kept(NamedTuple):
    """How an entry was when it was loaded."""

    charges: tuple[Charge, ...]
    step: int
    lease_ends: int
    ended: int | None


class Rows:
    """The part of the books that one transaction touches. `bucket` makes a `Bucket` of name, tree and window."""

    def __init__(self, db: sqlite3.Connection, now: int, bucket: MakeBucket) -> None:
        self.books = Books()
        self.changed = False
        self._written = 0
        self._db = db
        self._now = now
        self._bucket = bucket
        self._accounts: dict[str, tuple[int, int, int, int]] = {}
        self._entries: dict[str, _Kept | None] = {}

    def load(self, ops: Sequence[Op]) -> bool:
        """Load what `ops` touch and the leases that have ended by now; say whether those are all that ended.

        If they are not, what `ops` touch is not loaded: end these, commit, and begin again.
        """
        db, now = self._db, self._now
        rows = db.execute(
            f"SELECT {_ENTRY} FROM entry WHERE state = 'held' AND lease_ends <= ? ORDER BY lease_ends LIMIT ?",  # noqa: S608
            (now, MOST_ENDED + 1),
        ).fetchall()
        all_ended = len(rows) <= MOST_ENDED
        ids: set[str] = set()
        buckets: dict[str, Bucket] = {}
        if all_ended:
            for op in ops:
                _touch(op, ids, buckets)
            if ids:
                # What is past its retention is absent, whether or not its row was deleted already.
                rows += db.execute(
                    f"SELECT {_ENTRY} FROM entry WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608
                    " AND (state = 'held' AND lease_ends > ? OR keep_until >= ?)",
                    (json.dumps(list(ids)), now, now),
                )
        (self.books.first_end_elsewhere,) = db.execute(
            "SELECT min(lease_ends) FROM entry WHERE state = 'held' AND lease_ends > ?", (now,)
        ).fetchone()
        for row in sorted(rows, key=lambda row: row[5] or 0):
            self._load_entry(row, buckets)
        if buckets:
            self._load_accounts(buckets)
        self.books.sweep(now)
        return all_ended

    def save(self) -> None:
        """Write back what changed since the last `load` or `save`; `changed` then says whether anything ever did."""
        accounts = []
        for key, account in self.books.accounts.items():
            sums = account.held, account.spent, account.lost, account.credited
            if self._accounts.get(key) != sums:
                self._accounts[key] = sums
                accounts.append((_text(key), account.bucket.starts, account.bucket.ends, *sums, account.written))
        entries = []
        for id, entry in self.books.entries.items():
            kept = None if entry is None else _Kept(entry.charges, entry.step, entry.lease_ends, entry.ended)
            if id not in self._entries or self._entries[id] != kept:
                self._entries[id] = kept
                entries.append(_entry_row(id, entry, self._now))
        if accounts:
            self._db.executemany(
                "INSERT INTO account VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET held = excluded.held,"
                " spent = excluded.spent, lost = excluded.lost, credited = excluded.credited, written = excluded.written",
                accounts,
            )
        if entries:
            self._db.executemany("REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?)", entries)
        self._written += max(len(accounts), len(entries))
        self.changed = self._written > 0

    def forget(self) -> None:
        """Delete some of the rows that are past their retention."""
        now, db, most = self._now, self._db, max(MOST_FORGOTTEN, 2 * self._written)
        db.execute("DELETE FROM entry WHERE id IN (SELECT id FROM entry WHERE keep_until < ? LIMIT ?)", (now, most))
        db.execute(
            "DELETE FROM account WHERE key IN (SELECT key FROM account WHERE ends < ?1 AND written < ?1 AND held = 0 LIMIT ?2)",
            (now - RETENTION, most),
        )
        db.execute(
            "DELETE FROM account WHERE key IN"
            " (SELECT key FROM account WHERE ends IS NULL AND written < ? AND held = 0 LIMIT ?)",
            (now - RETENTION_WINDOWLESS, most),
        )

    def holds(self, tree: str, limit: int) -> tuple[Hold, ...]:
        """Answer `BudgetStore.holds`; `tree` is as `safe_name` writes it."""
        self.save()  # what earlier calls of this transaction did is part of the answer
        rows = self._db.execute(
            "SELECT id, state, charges, lease_ends, on_lease_end FROM ("
            "  SELECT * FROM entry INDEXED BY entry_held WHERE state = 'held' UNION ALL"
            "  SELECT * FROM entry INDEXED BY entry_expired WHERE state = 'expired' AND keep_until >= ?1)"
            " WHERE id >= ?2 || ':' AND id < ?2 || ';' ORDER BY lease_ends, id LIMIT ?3",
            (self._now, tree, limit),
        )
        return tuple(
            Hold(id, state, self._charges(charges), lease_ends, on_lease_end)
            for id, state, charges, lease_ends, on_lease_end in rows
        )

    def _load_entry(self, row: tuple[Any, ...], buckets: dict[str, Bucket]) -> None:
        id, state, text, option, step, lease_ends, on_lease_end, keep_until = row
        if state == "closed":
            self._entries[id] = None
            self.books.restore(id, None)
            return
        charges = self._charges(text)
        # Loaded in the order in which they end, all of them stand in one queue: that of no length of lease.
        entry = Entry(charges, option, 0, lease_ends, on_lease_end)
        entry.step = step
        entry.ended = None if state == "held" else keep_until - RETENTION
        self._entries[id] = _Kept(charges, step, lease_ends, entry.ended)
        self.books.restore(id, entry)
        for charge in charges:
            buckets.setdefault(charge.bucket.key, charge.bucket)

    def _load_accounts(self, buckets: dict[str, Bucket]) -> None:
        keys = {_text(key): bucket for key, bucket in buckets.items()}
        rows = self._db.execute(
            "SELECT key, held, spent, lost, credited, written FROM account WHERE key IN (SELECT value FROM json_each(?))",
            (json.dumps(list(keys)),),
        )
        for key, held, spent, lost, credited, written in rows:
            bucket = keys[key]
            account = Account(bucket, written)
            account.held, account.spent, account.lost, account.credited = held, spent, lost, credited
            if held or forget_at(account) >= self._now:
                self._accounts[bucket.key] = held, spent, lost, credited
                self.books.accounts[bucket.key] = account

    def _charges(self, text: str) -> tuple[Charge, ...]:
        tree, charges = json.loads(text)
        return tuple(
            Charge(self._bucket(name, tree, starts, ends), amount, line, limit)
            for name, starts, ends, amount, line, limit in charges
        )


def _touch(op: Op, ids: set[str], buckets: dict[str, Bucket]) -> None:
    """Add what one operation needs to see."""
    if isinstance(op, _ops.Reserve):
        ids.add(op.id)
        for charges in op.options:
            for charge in charges:
                buckets[charge.bucket.key] = charge.bucket
    elif isinstance(op, _ops.Settle | _ops.Extend | _ops.Credit):
        ids.add(op.id)
        for charge in op.charges:
            buckets[charge.bucket.key] = charge.bucket
    elif isinstance(op, _ops.Renew):
        ids.update(op.ids)
    elif isinstance(op, _ops.Balances):
        for bucket in op.buckets:
            buckets[bucket.key] = bucket


def _entry_row(id: str, entry: Entry | None, now: int) -> tuple[str | int | None, ...]:
    if entry is None:
        # An id that a clock ahead of ours made is kept until it is too old to be taken for a new one.
        return id, "closed", None, None, None, None, None, max(now, born(id)) + RETENTION
    tree = entry.charges[0].bucket.tree if entry.charges else ""
    charges = json.dumps(
        [tree, [(c.bucket.name, c.bucket.starts, c.bucket.ends, c.amount, c.line, c.limit) for c in entry.charges]],
        separators=(",", ":"),
    )
    record = charges, entry.option, entry.step, entry.lease_ends, entry.on_lease_end
    if entry.ended is None:
        return id, "held", *record, None
    return id, "expired", *record, max(entry.ended, born(id)) + RETENTION


def _text(key: str) -> str:
    return encode_basestring_ascii(key)[1:-1]
