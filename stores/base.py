"""What a budget store is: the values that go in and come out, and the contract that every store keeps.

A store counts integers in buckets. It knows nothing about models, money or HTTP.
Instants are integer milliseconds since the epoch (UTC) and durations are integer milliseconds, everywhere in `stores`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable
from urllib.parse import quote

from stores.errors import InvalidCharge

__all__ = [
    "AHEAD",
    "MAX_AMOUNT",
    "RETENTION",
    "RETENTION_WINDOWLESS",
    "Balance",
    "Bucket",
    "BudgetStore",
    "Charge",
    "Health",
    "Hold",
    "LeaseEnd",
    "Misfit",
    "Settlement",
    "Verdict",
    "born",
    "new_id",
    "safe_name",
    "tree_key",
]

MAX_AMOUNT = 2**52
"""The largest amount, line or limit. Lua counts in doubles, which are exact up to 2**53; one bit is left for a sum."""

RETENTION = 24 * 60 * 60 * 1000
"""How long closed and expired ids are kept, and a bucket after its window's end, in milliseconds."""

RETENTION_WINDOWLESS = 30 * RETENTION
"""How long a bucket without a window is kept after its last write, in milliseconds."""

AHEAD = 60_000
"""How far ahead of the store's clock a charge's window may start, in milliseconds."""

LeaseEnd = Literal["release", "charge"]
"""What the end of a lease does with the amounts held: give them back, or count them as spent."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Name the thing that is counted: one cap, one scope value, one window, within one budget tree.

    `name` and `tree` may be any strings. `starts` and `ends` bound the window, in milliseconds since the epoch; both are
    None for a bucket without a window. The window belongs into the name: two buckets are the same when `tree` and `name`
    are, whatever their bounds. Raises `InvalidCharge` for bounds that make no window.
    """

    name: str
    tree: str = ""
    starts: int | None = None
    ends: int | None = None
    key: str = field(init=False, repr=False, compare=False)
    """The tree and the name as one string; no two different pairs share it."""

    def __post_init__(self) -> None:
        if (self.starts is None) != (self.ends is None):
            raise InvalidCharge(f"bucket {self.name!r}: give both 'starts' and 'ends', or neither")
        if self.starts is not None and self.ends is not None and not 0 <= self.starts < self.ends <= MAX_AMOUNT:
            raise InvalidCharge(f"bucket {self.name!r}: the window {self.starts}…{self.ends} ms is empty or out of range")
        object.__setattr__(self, "key", f"{safe_name(self.tree)}:{self.name}")


@dataclass(frozen=True, slots=True)
class Charge:
    """An amount against one bucket, with the line and the limit that it is held to.

    `line` is where the bucket stops admitting; `limit` is how far a reservation may be extended. None means that nothing
    is refused (a soft cap); it never means 0. Raises `InvalidCharge` for an amount, line or limit that is not an integer
    from 0 to 2**52, or a line above the limit.
    """

    bucket: Bucket
    amount: int
    line: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if type(self.amount) is not int or not 0 <= self.amount <= MAX_AMOUNT:
            raise InvalidCharge(f"bucket {self.bucket.name!r}: {_integer('amount', self.amount)}")
        for what, value in (("line", self.line), ("limit", self.limit)):
            if value is not None and (type(value) is not int or not 0 <= value <= MAX_AMOUNT):
                raise InvalidCharge(f"bucket {self.bucket.name!r}: {_integer(what, value)}")
        if self.line is not None and self.limit is not None and self.line > self.limit:
            raise InvalidCharge(f"bucket {self.bucket.name!r}: the line {self.line} is above the limit {self.limit}")


class Balance(NamedTuple):
    """What a bucket holds at one moment. (A named tuple: it is built on the hot path of every call.)

    `held` is reserved and not settled yet. `spent` is settled, less what was credited; it may pass the limit (a debt).
    `lost` is what leases ended and nobody settled since. `credited` is the sum of all credits. `lease_ends` is a moment
    no later than the first end of a lease on this bucket, or None when nothing is held; a grant does not work it out.
    """

    bucket: Bucket
    held: int = 0
    spent: int = 0
    lost: int = 0
    credited: int = 0
    lease_ends: int | None = None


class Misfit(NamedTuple):
    """A charge that did not fit, and the balance that it met."""

    charge: Charge
    balance: Balance

    @property
    def kind(self) -> Literal["busy", "spent", "never"]:
        """Say what would make it fit: holds that settle (busy), the next window (spent), or nothing (never)."""
        line = self.charge.line
        if line is None or self.charge.amount > line:
            return "never"
        return "busy" if self.balance.spent + self.charge.amount <= line else "spent"


class Verdict(NamedTuple):
    """The answer to `reserve` and `extend`.

    `state`: "held" (granted, or held already), "refused" (nothing changed), "gone" (the id is closed or expired, or an
    extend met an absent one: nothing taken) or "stale" (a charge's window has ended or lies too far ahead by the store's
    clock: nothing taken). `option` is the index of the option that is held, else None. `balances` are those of the held
    option's buckets, in its order. `misfits` has, per option, every charge that does not fit. `now` is the store's time.
    """

    state: Literal["held", "refused", "gone", "stale"]
    option: int | None
    balances: tuple[Balance, ...]
    misfits: tuple[tuple[Misfit, ...], ...]
    now: int

    @property
    def held(self) -> bool:
        """Whether the id holds what was asked."""
        return self.state == "held"


class Settlement(NamedTuple):
    """The answer to `settle`, `release` and `credit`.

    `counted` is False when the id was closed before: nothing changed. `late` is True when the lease had ended or the
    store knew nothing of the id. `balances` are those of the charges carried, in their order.
    """

    counted: bool
    late: bool
    balances: tuple[Balance, ...]


class Hold(NamedTuple):
    """A reservation that is not closed, as `holds()` lists it."""

    id: str
    state: Literal["held", "expired"]
    charges: tuple[Charge, ...]
    lease_ends: int
    on_lease_end: LeaseEnd


class Health(NamedTuple):
    """What `check()` found: the store's name, its time, its epoch, and whether it rolled back."""

    store: str
    now: int
    epoch: str
    writes: int
    rolled_back: bool

    def __str__(self) -> str:
        state = "rolled back: reserves are refused until accept()" if self.rolled_back else "ok"
        return f"{self.store}: {state} (epoch {self.epoch}, {self.writes} writes)"


def new_id(tree: str = "", *, now: int | None = None) -> str:
    """Make a reservation id: it names its tree and the moment of its making, and is never made twice.

    `now` is in milliseconds since the epoch (default: this machine's clock). The moment lets a store tell an id that it
    never saw from one that it has forgotten.
    """
    moment = time.time_ns() // 1_000_000 if now is None else now
    return f"{safe_name(tree)}:{moment:012x}{secrets.token_hex(10)}"


def tree_key(id: str) -> str:
    """Return the tree that an id names, as `safe_name` writes it. Raises `InvalidCharge` for an id not made by `new_id`."""
    check_id(id)
    return id[:-33]


def check_id(id: str) -> None:
    """Refuse an id that `new_id` did not make. Raises `InvalidCharge`."""
    if _ID(id) is None:
        raise InvalidCharge(f"id {id[:80]!r} was not made by stores.new_id(); write new_id(tree) for each reservation")


def born(id: str) -> int:
    """Return when an id was made, in milliseconds since the epoch. `id` must be one that `new_id` made."""
    return int(id[-32:-20], 16)


def safe_name(text: str) -> str:
    """Write any string as short printable ASCII without braces, colons or white space; different strings stay different."""
    quoted = quote(text, safe="/@+,[]", errors="surrogatepass")
    if len(quoted) <= 200:
        return quoted
    # "=" is quoted above, so that no label can spell another's digest.
    return "sha256=" + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


# What safe_name writes, a colon, 32 hex digits: no id can carry a brace, a NUL or a lone surrogate into a store.
_ID = re.compile(r"[!-9;-z|~]{0,200}+:[0-9a-f]{32}+").fullmatch


def _integer(what: str, value: object) -> str:
    return f"{what} must be a whole number from 0 to 2**52, not {value!r} of type {type(value).__name__}"


@runtime_checkable
class BudgetStore(Protocol):
    """Counts charges in buckets, atomically, over several buckets at once.

    **An id has states**: absent, held, expired, closed. Every method may be repeated with its id: the repetition changes
    nothing more. A caller that is cancelled at any await leaves no hold: where the store cannot know whether a reserve
    was applied, it sends a release after it.

    **Time** is the store's own and never runs backwards. Leases end by it, before any other effect of the same call.

    Every method raises `StoreUnavailable` within a bounded time when the store is down, slow, full or read-only, and the
    effect of that call is then unknown (repeat it with the same id); `reserve` raises `StoreRolledBack` when the store
    came back empty or older than this client saw it. Wrong values raise `InvalidCharge` and change nothing.
    """

    async def reserve(
        self,
        id: str,
        options: Sequence[Sequence[Charge]],
        *,
        lease: int,
        on_lease_end: LeaseEnd = "release",
    ) -> Verdict:
        """Hold the first of `options` that fits in all of its buckets, or hold nothing.

        A charge fits when its amount is 0, its line is None, or `held + spent + amount <= line`. Absent → held, for `lease`
        milliseconds; held → the same answer again; expired or closed → "gone". A refusal leaves no record. A charge of an
        option that is reached whose window has ended, or starts more than a minute ahead, makes the answer "stale".
        A bucket stands at most once in an option, and every bucket lies in the tree that the id names.
        """
        ...

    async def extend(self, id: str, step: int, charges: Sequence[Charge]) -> Verdict:
        """Replace what the id holds by `charges`; only growth is checked, against each charge's limit.

        `step` orders the extends of one id: one that is not above the last changes nothing and answers "held". Buckets that
        are not in `charges` are given back. Refused → nothing changed. Absent, expired or closed → "gone".
        """
        ...

    async def settle(self, id: str, charges: Sequence[Charge]) -> Settlement:
        """Close the id from any state and count `charges` as spent, once, whatever lines and limits say.

        From held: the hold ends and the charges count; a bucket that the hold does not have is `InvalidCharge`. From expired:
        what the lease's end wrote is replaced. From absent: the charges count, and a reserve that arrives later finds the id
        closed. Closed → nothing changes. Raises `TooLate`, counting nothing, when the id or a bucket is past its retention.
        """
        ...

    async def release(self, id: str) -> Settlement:
        """Close the id with nothing spent: `settle(id, ())`."""
        ...

    async def renew(self, ids: Collection[str], *, lease: int) -> frozenset[str]:
        """Let the leases of `ids` end `lease` milliseconds from now; return the ids that are held afterwards.

        An expired id is taken again when it fits within its limits, undoing its lease's end. Absent and closed ids, and
        expired ones that do not fit, are not in the answer; nothing about them changes.
        """
        ...

    async def balances(self, buckets: Sequence[Bucket]) -> tuple[Balance, ...]:
        """Return the balances of `buckets`, in their order; zeros for one that was never written."""
        ...

    async def holds(self, *, tree: str = "", limit: int = 1000) -> tuple[Hold, ...]:
        """List at most `limit` (0 to 1,000,000) ids of a tree that are held or expired, those whose lease ends first first."""
        ...

    async def credit(self, id: str, charges: Sequence[Charge]) -> Settlement:
        """Take `charges` off what their buckets have spent, once for this id, which is then closed.

        Raises `InvalidCharge`, changing nothing, when a bucket has spent less than its charge, or the id is one that holds.
        """
        ...

    async def check(self) -> Health:
        """Reach the store and say how it is. Raises `StoreUnavailable` when it cannot be used."""
        ...

    async def accept(self, *, tree: str = "") -> None:
        """Accept the balances that a tree of a rolled-back store has now: every client may reserve again."""
        ...

    async def aclose(self) -> None:
        """Send what is on its way, within the store's time limit, and let go of every connection and thread."""
        ...
