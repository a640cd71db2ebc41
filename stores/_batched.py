"""The contract's methods for a store that carries out operations in batches."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Self, cast

from stores import _ops
from stores._books import check_lease, check_limit, check_options
from stores._ops import Op, Outcome, Outcomes
from stores.base import Balance, Bucket, Charge, Health, Hold, LeaseEnd, Settlement, Verdict, safe_name, tree_key
from stores.batching import Batcher
from stores.errors import InvalidCharge, StoreUnavailable


class BatchedStore(ABC):
    """Check what is asked, hand it to the batcher, and send a release after a reserve whose caller went away."""

    name: str

    def __init__(self, *, timeout: float, batch: int, in_flight: int, waiting: int) -> None:
        self._batcher: Batcher[Op, Outcome] = Batcher(
            self._carry_out, store=self.name, size=batch, in_flight=in_flight, timeout=timeout, limit=waiting
        )
        self._closing: asyncio.Task[None] | None = None

    @abstractmethod
    async def _carry_out(self, ops: Sequence[Op]) -> Outcomes:
        """Carry out `ops` in their order, each one whole or not at all; an exception in the answer is that op's own."""

    @abstractmethod
    async def _close(self) -> None:
        """Let go of every connection and thread."""

    async def reserve(
        self, id: str, options: Sequence[Sequence[Charge]], *, lease: int, on_lease_end: LeaseEnd = "release"
    ) -> Verdict:
        """See `BudgetStore.reserve`."""
        check_lease(lease, on_lease_end)
        check_options(id, options)
        op = _ops.Reserve(id, tuple(tuple(charges) for charges in options), lease, on_lease_end)
        try:
            return cast(Verdict, await self._batcher.put(op))
        except asyncio.CancelledError:
            # Whether it was applied is unknown; a release closes the id whichever of the two arrives first.
            self._send_after(_ops.Settle(id, ()))
            raise

    async def extend(self, id: str, step: int, charges: Sequence[Charge]) -> Verdict:
        """See `BudgetStore.extend`."""
        if type(step) is not int or not 0 < step <= 2**52:
            raise InvalidCharge(f"the step of an extend must be a whole number from 1 to 2**52, not {step!r}")
        check_options(id, (charges,))
        return cast(Verdict, await self._batcher.put(_ops.Extend(id, step, tuple(charges))))

    async def settle(self, id: str, charges: Sequence[Charge]) -> Settlement:
        """See `BudgetStore.settle`."""
        check_options(id, (charges,))
        return cast(Settlement, await self._batcher.put(_ops.Settle(id, tuple(charges))))

    async def release(self, id: str) -> Settlement:
        """See `BudgetStore.release`."""
        return await self.settle(id, ())

    async def renew(self, ids: Collection[str], *, lease: int) -> frozenset[str]:
        """See `BudgetStore.renew`."""
        check_lease(lease)
        trees: defaultdict[str, list[str]] = defaultdict(list)
        for id in ids:
            trees[tree_key(id)].append(id)
        futures = [
            self._batcher.put(_ops.Renew(tuple(part[start : start + 100]), lease))
            for part in trees.values()
            for start in range(0, len(part), 100)
        ]
        answers = await asyncio.gather(*futures)
        return frozenset[str]().union(*cast(list[frozenset[str]], answers))

    async def balances(self, buckets: Sequence[Bucket]) -> tuple[Balance, ...]:
        """See `BudgetStore.balances`."""
        trees: defaultdict[str, list[Bucket]] = defaultdict(list)
        for bucket in buckets:
            trees[bucket.tree].append(bucket)
        answers = await asyncio.gather(*(self._batcher.put(_ops.Balances(tuple(part))) for part in trees.values()))
        found = {balance.bucket.key: balance for part in cast(list[tuple[Balance, ...]], answers) for balance in part}
        return tuple(found[bucket.key] for bucket in buckets)

    async def holds(self, *, tree: str = "", limit: int = 1000) -> tuple[Hold, ...]:
        """See `BudgetStore.holds`."""
        check_limit(limit)
        return cast(tuple[Hold, ...], await self._batcher.put(_ops.Holds(safe_name(tree), limit)))

    async def credit(self, id: str, charges: Sequence[Charge]) -> Settlement:
        """See `BudgetStore.credit`."""
        check_options(id, (charges,))
        return cast(Settlement, await self._batcher.put(_ops.Credit(id, tuple(charges))))

    async def check(self) -> Health:
        """See `BudgetStore.check`."""
        return cast(Health, await self._batcher.put(_ops.Check("")))

    async def accept(self, *, tree: str = "") -> None:
        """See `BudgetStore.accept`."""
        await self._batcher.put(_ops.Accept(safe_name(tree)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """See `BudgetStore.aclose`."""
        # In a task of its own: a caller that is cancelled meanwhile leaves no thread and no connection behind.
        loop, closing = asyncio.get_running_loop(), self._closing
        if closing is None or closing.cancelled() or closing.get_loop() is not loop:
            closing = self._closing = loop.create_task(self._end(), name=f"{self.name} store closing")
        await asyncio.shield(closing)

    async def _end(self) -> None:
        await self._batcher.aclose()
        await self._close()

    def _send_after(self, op: Op) -> None:
        with contextlib.suppress(StoreUnavailable):  # full or closed: the lease ends the hold
            self._batcher.put(op)
