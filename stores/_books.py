"""The rules of the contract over plain dicts: what `memory` runs as it is, and `sqlite` inside each transaction.

Nothing here awaits, does I/O or reads a clock, so that each method is one atomic step. `now` is the store's time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush

from stores.base import (
    AHEAD,
    RETENTION,
    RETENTION_WINDOWLESS,
    Balance,
    Bucket,
    Charge,
    Hold,
    LeaseEnd,
    Misfit,
    Settlement,
    Verdict,
    born,
    check_id,
    tree_key,
)
from stores.errors import InvalidCharge, TooLate

Charges = Sequence[Charge]

HOUR = 60 * 60 * 1000

_new = tuple.__new__
"""Makes a named tuple in a third of the time that its own constructor takes; what this module does is on every call's path."""


class Account:
    """The sums of one bucket."""

    __slots__ = ("bucket", "credited", "held", "lost", "spent", "written")

    def __init__(self, bucket: Bucket, written: int) -> None:
        self.bucket = bucket
        self.held = self.spent = self.lost = self.credited = 0
        self.written = written


class Entry:
    """One id that is held or expired. A closed id has None in its place."""

    __slots__ = ("charges", "ended", "lease", "lease_ends", "on_lease_end", "option", "step")

    def __init__(self, charges: tuple[Charge, ...], option: int, lease: int, lease_ends: int, on_lease_end: LeaseEnd) -> None:
        self.charges = charges
        self.option = option
        self.step = 0
        self.lease = lease
        self.lease_ends = lease_ends
        self.on_lease_end: LeaseEnd = on_lease_end
        self.ended: int | None = None  # when the lease ended; None while held


class Books:
    """Accounts by bucket key, entries by id, and the order in which leases end and records are forgotten."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.entries: dict[str, Entry | None] = {}
        # Per length of lease the ids in the order of its end: time does not run back, so the newest goes last.
        self._leases: dict[int, OrderedDict[str, Entry]] = {}
        self._next_end: int | None = None  # no lease ends before this; may be too early
        self.first_end_elsewhere: int | None = None  # of leases that are not here: `sqlite` loads what it needs
        self._ended: deque[tuple[int, str]] = deque()  # closed and expired ids, oldest first
        self._due: list[tuple[int, str]] = []  # when to look whether an account can be forgotten
        self._wake = 0  # before this moment there is nothing for a sweep to do
        self._young = ""  # an id whose moment is not below this is not too old, until then

    # What the contract's methods do.

    def reserve(self, now: int, id: str, options: Sequence[Charges], lease: int, on_lease_end: LeaseEnd) -> Verdict:
        check_lease(lease, on_lease_end)
        check_options(id, options)
        if now >= self._wake:
            self.sweep(now)
        entries = self.entries
        if id in entries:
            known = entries[id]
            if known is None or known.ended is not None:
                return Verdict("gone", None, (), (), now)
            return Verdict("held", known.option, self._balances(known.charges), (), now)
        if id[-32:-20] < self._young and now - born(id) > RETENTION:
            return Verdict("gone", None, (), (), now)
        accounts = self.accounts
        misfits: tuple[tuple[Misfit, ...], ...] = ()
        for index, charges in enumerate(options):
            fits = True
            for charge in charges:
                bucket = charge.bucket
                ends = bucket.ends
                if ends is not None and (ends <= now or bucket.starts > now + AHEAD):  # type: ignore[operator]
                    return Verdict("stale", None, (), (), now)
                line = charge.line
                if line is not None:
                    account = accounts.get(bucket.key)
                    used = account.held + account.spent if account is not None else 0
                    if used + charge.amount > line and charge.amount:
                        fits = False
            if fits:
                entries[id] = entry = Entry(tuple(charges), index, lease, now + lease, on_lease_end)
                self._start_lease(id, entry)
                balances = []
                for charge in charges:
                    account = accounts.get(charge.bucket.key) or self._account(charge.bucket, now)
                    if account.written < now:  # noqa: PLR1730 (max() is dear on the hot path)
                        account.written = now
                    account.held += charge.amount
                    sums = account.bucket, account.held, account.spent, account.lost, account.credited, None
                    balances.append(_new(Balance, sums))
                return _new(Verdict, ("held", index, tuple(balances), (), now))
            misfits += (self._misfits(charges, (), of="line"),)
        return Verdict("refused", None, (), misfits, now)

    def extend(self, now: int, id: str, step: int, charges: Charges) -> Verdict:
        if type(step) is not int or not 0 < step <= 2**52:
            raise InvalidCharge(f"the step of an extend must be a whole number from 1 to 2**52, not {step!r}")
        check_options(id, (charges,))
        self.sweep(now)
        entry = self.entries.get(id)
        if entry is None or entry.ended is not None:
            return Verdict("gone", None, (), (), now)
        if step > entry.step:
            misfits = self._misfits(charges, entry.charges, of="limit")
            if misfits:
                return Verdict("refused", None, (), (misfits,), now)
            entry.step = step
            self._take(entry.charges, -1, now)
            entry.charges = tuple(charges)
            self._take(entry.charges, 1, now)
        return Verdict("held", entry.option, self._balances(entry.charges), (), now)

    def settle(self, now: int, id: str, charges: Charges) -> Settlement:
        if now >= self._wake:
            self.sweep(now)
        entries = self.entries
        known = entries.get(id)
        if known is None or known.ended is not None or len(known.charges) != len(charges):
            return self._settle(now, id, charges)
        for had, charge in zip(known.charges, charges):  # noqa: B905 (their lengths are the same, and this is the hot path)
            if had.bucket is not charge.bucket and had.bucket.key != charge.bucket.key:
                return self._settle(now, id, charges)
        # Nearly every settle: the same buckets in the same order, which were checked when they were reserved.
        self._stop_lease(id, known)
        accounts = self.accounts
        balances = []
        for had, charge in zip(known.charges, charges):  # noqa: B905
            account = accounts.get(had.bucket.key) or self._account(had.bucket, now)
            if account.written < now:  # noqa: PLR1730
                account.written = now
            account.held -= had.amount
            account.spent += charge.amount
            lease_ends = self._next_end if account.held else None
            sums = account.bucket, account.held, account.spent, account.lost, account.credited, lease_ends
            balances.append(_new(Balance, sums))
        self._close(id, now)
        return _new(Settlement, (True, False, tuple(balances)))

    def _settle(self, now: int, id: str, charges: Charges) -> Settlement:
        check_options(id, (charges,))
        known = self.entries.get(id)
        if known is None and id in self.entries:
            return Settlement(False, False, self._balances(charges))
        late = known is None or known.ended is not None
        if late and charges:
            if known is None and now - born(id) > RETENTION:
                raise TooLate(id, "the store keeps ids for 24 hours")
            for charge in charges:
                if charge.bucket.ends is not None and charge.bucket.ends + RETENTION <= now:
                    raise TooLate(id, f"the window of {charge.bucket.name!r} ended more than 24 hours ago")
        if known is not None:
            has = {charge.bucket.key for charge in known.charges}
            for charge in charges:
                if charge.bucket.key not in has:
                    raise InvalidCharge(f"settle of {id}: what it reserved has no bucket {charge.bucket.name!r}")
            if late:
                self._undo_end(known, now)
            else:
                self._take(known.charges, -1, now)
                self._stop_lease(id, known)
        for charge in charges:
            self._account(charge.bucket, now).spent += charge.amount
        self._close(id, now)
        return Settlement(True, late, self._balances(charges))

    def renew(self, now: int, ids: Collection[str], lease: int) -> frozenset[str]:
        check_lease(lease)
        for id in ids:
            tree_key(id)
        self.sweep(now)
        held = set()
        for id in ids:
            entry = self.entries.get(id)
            if entry is None:
                continue
            if entry.ended is None:
                self._stop_lease(id, entry)
            else:
                charged = entry.charges if entry.on_lease_end == "charge" else ()
                # What the lease's end counted as spent is what is taken again: that fits by itself.
                if self._misfits(entry.charges, charged, of="limit"):
                    continue
                self._undo_end(entry, now)
                self._take(entry.charges, 1, now)
                entry.ended = None
            entry.lease, entry.lease_ends = lease, now + lease
            self._start_lease(id, entry)
            held.add(id)
        return frozenset(held)

    def balances(self, now: int, buckets: Iterable[Bucket]) -> tuple[Balance, ...]:
        self.sweep(now)
        return tuple(self._balance(bucket) for bucket in buckets)

    def holds(self, now: int, tree: str, limit: int) -> tuple[Hold, ...]:
        check_limit(limit)
        self.sweep(now)
        found = [
            Hold(id, "held" if entry.ended is None else "expired", entry.charges, entry.lease_ends, entry.on_lease_end)
            for id, entry in self.entries.items()
            if entry is not None and tree_key(id) == tree
        ]
        return tuple(sorted(found, key=lambda hold: (hold.lease_ends, hold.id))[:limit])

    def credit(self, now: int, id: str, charges: Charges) -> Settlement:
        check_options(id, (charges,))
        self.sweep(now)
        if id in self.entries:
            if self.entries[id] is not None:
                raise InvalidCharge(f"credit {id}: that id is a reservation; write new_id(tree) for each credit")
            return Settlement(False, False, self._balances(charges))
        if now - born(id) > RETENTION:
            raise TooLate(id, "the store keeps ids for 24 hours")
        for charge in charges:
            account = self.accounts.get(charge.bucket.key)
            if charge.amount > (account.spent if account is not None else 0):
                raise InvalidCharge(
                    f"credit {id}: bucket {charge.bucket.name!r} has spent {account.spent if account is not None else 0}, "
                    f"which is less than {charge.amount}"
                )
        for charge in charges:
            account = self._account(charge.bucket, now)
            account.spent -= charge.amount
            account.credited += charge.amount
        self._close(id, now)
        return Settlement(True, False, self._balances(charges))

    # Leases and forgetting.

    def sweep(self, now: int) -> None:
        """End every lease whose time has come, and forget what is past its retention."""
        if now < self._wake:
            return
        if self._next_end is not None and self._next_end <= now:
            for queue in self._leases.values():
                while queue:
                    id, entry = next(iter(queue.items()))
                    if entry.lease_ends > now:
                        break
                    del queue[id]
                    self._end_lease(id, entry, now)
            self._leases = {lease: queue for lease, queue in self._leases.items() if queue}
            self._next_end = self.first_end()
        if self._ended and self._ended[0][0] + RETENTION < now:
            self._forget_ids(now)
        if self._due and self._due[0][0] < now:
            self._forget_accounts(now)
        self._young = f"{max(now + HOUR - RETENTION, 0):012x}"
        # Whatever happens until then is due later than in an hour, but for leases, whose start sets this too.
        self._wake = now + HOUR
        if self._ended:
            self._wake = min(self._wake, self._ended[0][0] + RETENTION + 1)
        if self._due:
            self._wake = min(self._wake, self._due[0][0] + 1)
        if self._next_end is not None:
            self._wake = min(self._wake, self._next_end)

    def first_end(self) -> int | None:
        """Return when the first lease ends, or None when nothing is held."""
        ends = [next(iter(queue.values())).lease_ends for queue in self._leases.values() if queue]
        if self.first_end_elsewhere is not None:
            ends.append(self.first_end_elsewhere)
        return min(ends, default=None)

    def restore(self, id: str, entry: Entry | None) -> None:
        """Put back a record that was kept elsewhere. Of one length of lease, call it in the order in which leases end."""
        self.entries[id] = entry
        if entry is not None and entry.ended is None:
            self._start_lease(id, entry)

    def _start_lease(self, id: str, entry: Entry) -> None:
        queue = self._leases.get(entry.lease)
        if queue is None:
            queue = self._leases[entry.lease] = OrderedDict()
        queue[id] = entry
        if self._next_end is None or entry.lease_ends < self._next_end:
            self._next_end = entry.lease_ends
            self._wake = min(self._wake, entry.lease_ends)

    def _stop_lease(self, id: str, entry: Entry) -> None:
        self._leases[entry.lease].pop(id, None)

    def _end_lease(self, id: str, entry: Entry, now: int) -> None:
        entry.ended = now
        self._take(entry.charges, -1, now)
        # An id that a clock ahead of ours made is known until it is old by its own moment, and may undo this until then.
        known = max(now, born(id))
        for charge in entry.charges:
            account = self._account(charge.bucket, known)
            account.lost += charge.amount
            if entry.on_lease_end == "charge":
                account.spent += charge.amount
        self._ended.append((now, id))

    def _undo_end(self, entry: Entry, now: int) -> None:
        for charge in entry.charges:
            account = self._account(charge.bucket, now)
            account.lost -= charge.amount
            if entry.on_lease_end == "charge":
                account.spent -= charge.amount

    def _close(self, id: str, now: int) -> None:
        self.entries[id] = None
        self._ended.append((now, id))

    def _forget_ids(self, now: int) -> None:
        while self._ended and self._ended[0][0] + RETENTION < now:
            ended, id = self._ended.popleft()
            if now - born(id) <= RETENTION:  # made by a clock ahead of ours: forgotten now, it could count twice
                self._ended.append((now, id))
                continue
            entry = self.entries.get(id)
            # An expired id may have been renewed, or closed later: then a younger record stands behind this one.
            if entry is None or (entry.ended is not None and entry.ended <= ended):
                self.entries.pop(id, None)

    def _forget_accounts(self, now: int) -> None:
        while self._due and self._due[0][0] < now:
            _, key = heappop(self._due)
            account = self.accounts[key]
            due = forget_at(account)
            if account.held:
                heappush(self._due, (now + RETENTION, key))
            elif due >= now:
                heappush(self._due, (due, key))
            else:
                del self.accounts[key]

    # Sums.

    def _account(self, bucket: Bucket, now: int) -> Account:
        account = self.accounts.get(bucket.key)
        if account is None:
            account = self.accounts[bucket.key] = Account(bucket, now)
            heappush(self._due, (forget_at(account), bucket.key))
        account.written = max(account.written, now)
        return account

    def _take(self, charges: Charges, sign: int, now: int) -> None:
        for charge in charges:
            self._account(charge.bucket, now).held += sign * charge.amount

    def _misfits(self, charges: Charges, had: Charges, *, of: str) -> tuple[Misfit, ...]:
        before = {charge.bucket.key: charge.amount for charge in had}
        found = []
        for charge in charges:
            bound = charge.line if of == "line" else charge.limit
            growth = charge.amount - before.get(charge.bucket.key, 0)
            if bound is None or growth <= 0:
                continue
            account = self.accounts.get(charge.bucket.key)
            if (account.held + account.spent if account is not None else 0) + growth > bound:
                found.append(Misfit(charge, self._balance(charge.bucket)))
        return tuple(found)

    def _balances(self, charges: Charges) -> tuple[Balance, ...]:
        return tuple(self._balance(charge.bucket) for charge in charges)

    def _balance(self, bucket: Bucket) -> Balance:
        account = self.accounts.get(bucket.key)
        if account is None:
            return Balance(bucket)
        lease_ends = self.first_end() if account.held else None
        return Balance(bucket, account.held, account.spent, account.lost, account.credited, lease_ends)


def check_options(id: str, options: Sequence[Charges]) -> None:
    """Refuse options that no store can hold. Raises `InvalidCharge`; nothing was changed by then."""
    check_id(id)
    if not options:
        raise InvalidCharge(f"reserve of {id}: give at least one option; one without charges is an empty sequence")
    tree = id[:-32]  # with the colon, which safe_name never writes
    for charges in options:
        if len(charges) > 1:
            one, other = charges[0], charges[-1]
            if one.bucket.key == other.bucket.key or (len(charges) > 2 and len({c.bucket.key for c in charges}) < len(charges)):
                raise InvalidCharge(f"{id}: a bucket stands twice among its charges; add the amounts up")
        for charge in charges:
            if not charge.bucket.key.startswith(tree):
                raise InvalidCharge(f"{id}: bucket {charge.bucket.name!r} lies in another tree than the id names")


def check_lease(lease: int, on_lease_end: LeaseEnd = "release") -> None:
    """Refuse a lease that is no length of time, or an end that is none. Raises `InvalidCharge`."""
    if on_lease_end not in ("release", "charge"):
        raise InvalidCharge(f"on_lease_end must be 'release' or 'charge', not {on_lease_end!r}")
    if type(lease) is not int or not 0 < lease <= RETENTION_WINDOWLESS:
        raise InvalidCharge(f"a lease must be a whole number of milliseconds from 1 to 30 days, not {lease!r}")


def check_limit(limit: int) -> None:
    """Refuse a number of holds to list that is none. Raises `InvalidCharge`."""
    if type(limit) is not int or not 0 <= limit <= 1_000_000:
        raise InvalidCharge(f"the limit of a list of holds must be a whole number from 0 to 1,000,000, not {limit!r}")


def forget_at(account: Account) -> int:
    """Return until when an account is kept, unless it still holds something then."""
    if account.bucket.ends is not None:
        # A lease may end after the window did, and the id is kept from there: undoing that end must find what it wrote.
        return max(account.bucket.ends, account.written) + RETENTION
    return account.written + RETENTION_WINDOWLESS
