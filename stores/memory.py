"""A store in this process: no await inside a state change, so that every call is atomic on its event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from asyncio import get_running_loop
from collections.abc import Callable, Collection, Sequence
from typing import Self

from stores._books import Books
from stores.base import Balance, Bucket, Charge, Health, Hold, LeaseEnd, Settlement, Verdict, safe_name
from stores.errors import StoreUnavailable

__all__ = ["MemoryStore"]


class MemoryStore:
    """Count in this process. What it knows ends with the process; nobody else sees it.

    `clock` returns milliseconds since the epoch (default: this machine's clock). It may jump back: the store's time stands
    still until the clock has caught up. After `aclose`, and in a second event loop while the first one is not closed, every
    method raises `StoreUnavailable`.
    """

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock if clock is not None else _wall_clock
        self._books = Books()
        self._time = 0
        self._epoch = secrets.token_hex(8)
        self._writes = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<MemoryStore buckets={len(self._books.accounts)} ids={len(self._books.entries)}>"

    def _now(self) -> int:
        if self._loop is not get_running_loop():
            self._belong(get_running_loop())
        if self._closed:
            raise StoreUnavailable("memory", "it was closed")
        self._writes += 1
        now = self._clock()
        if now < self._time:  # it jumped back
            return self._time
        self._time = now
        return now

    def _belong(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to one loop at a time. One in another thread would meet half a change; behind a fork it would count apart."""
        if self._loop is not None and not self._loop.is_closed():
            raise StoreUnavailable("memory", "it belongs to another event loop; make one store per loop")
        self._loop = loop

    async def reserve(
        self, id: str, options: Sequence[Sequence[Charge]], *, lease: int, on_lease_end: LeaseEnd = "release"
    ) -> Verdict:
        """See `BudgetStore.reserve`."""
        return self._books.reserve(self._now(), id, options, lease, on_lease_end)

    async def extend(self, id: str, step: int, charges: Sequence[Charge]) -> Verdict:
        """See `BudgetStore.extend`."""
        return self._books.extend(self._now(), id, step, charges)

    async def settle(self, id: str, charges: Sequence[Charge]) -> Settlement:
        """See `BudgetStore.settle`."""
        return self._books.settle(self._now(), id, charges)

    async def release(self, id: str) -> Settlement:
        """See `BudgetStore.release`."""
        return self._books.settle(self._now(), id, ())

    async def renew(self, ids: Collection[str], *, lease: int) -> frozenset[str]:
        """See `BudgetStore.renew`."""
        return self._books.renew(self._now(), ids, lease)

    async def balances(self, buckets: Sequence[Bucket]) -> tuple[Balance, ...]:
        """See `BudgetStore.balances`."""
        return self._books.balances(self._now(), buckets)

    async def holds(self, *, tree: str = "", limit: int = 1000) -> tuple[Hold, ...]:
        """See `BudgetStore.holds`."""
        return self._books.holds(self._now(), safe_name(tree), limit)

    async def credit(self, id: str, charges: Sequence[Charge]) -> Settlement:
        """See `BudgetStore.credit`."""
        return self._books.credit(self._now(), id, charges)

    async def check(self) -> Health:
        """See `BudgetStore.check`."""
        return Health("memory", self._now(), self._epoch, self._writes, False)

    async def accept(self, *, tree: str = "") -> None:
        """See `BudgetStore.accept`. Memory never rolls back: there is nothing to accept."""
        self._now()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Forget everything."""
        self._closed = True
        self._books = Books()


def _wall_clock() -> int:
    return time.time_ns() // 1_000_000
