"""The one place where calls are settled: at once when the store takes it, else from the backlog, in order.

A settle is carried by a task of the router's own, never by its caller's, so that no cancellation can stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Protocol

from router.call import Call
from router.clock import Clock
from router.decision import Outcome
from stores import Balance, BudgetStore, Charge, InvalidCharge, StoreUnavailable, TooLate

__all__ = ["Observer", "Settler"]

_log = logging.getLogger("budget_router")

_BATCH = 100
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


class Observer(Protocol):
    """Who is told how settling goes on."""

    async def count(self, call: Call) -> None:
        """Bill what the provider gave no usage for, before the call is settled."""
        ...

    def counted(self, call: Call) -> None:
        """Note that what a call spent is known now."""
        ...

    def concluded(self, call: Call, balances: tuple[Balance, ...]) -> None:
        """Note that a call was settled, or has gone into the backlog; then there are no balances."""
        ...

    def written(self, id: str) -> None:
        """Note that the store has taken the settle of an id."""
        ...


class Settler:
    """Own every open call until its settle is written.

    `lease` is in milliseconds; `patience`, how long a caller waits for its settle, in seconds.
    """

    def __init__(
        self,
        store: BudgetStore,
        clock: Clock,
        *,
        lease: int,
        patience: float,
        observer: Observer,
    ) -> None:
        self._store = store
        self._clock = clock
        self._lease = lease
        self._patience = patience
        self._observer = observer
        self._open: dict[str, Call] = {}
        self._backlog: OrderedDict[str, tuple[Charge, ...]] = OrderedDict()
        self._concluding: set[asyncio.Task[None]] = set()
        self._draining: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.too_late = 0
        self.lost_in_backlog = 0

    @property
    def open(self) -> int:
        """How many calls are admitted and not settled, the backlog left out."""
        return len(self._open)

    @property
    def backlog(self) -> int:
        """How many settles the store has not taken yet."""
        return len(self._backlog)

    def calls(self) -> tuple[Call, ...]:
        """Return the calls that are open now."""
        return tuple(self._open.values())

    def admit(self, call: Call) -> None:
        """Take over a call whose reservation is held, or whose admission this process counts by itself."""
        self._open[call.id] = call
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew(), name="budget-router leases")

    def finish(self, call: Call, outcome: Outcome, error: BaseException | None = None) -> asyncio.Task[None] | None:
        """Begin the one settle of a call, and return the task that carries it; None when it was finished before."""
        if not call.close(outcome, error):
            return None
        return self.spawn(self._conclude(call))

    async def wait(self, task: asyncio.Task[None] | None) -> None:
        """Wait for a settle, as long as callers may; the settle goes on when the wait ends, however it ends."""
        if task is not None and not task.done():
            await asyncio.wait((task,), timeout=self._patience)

    def forget(self, id: str) -> None:
        """Close an id whose reserve may or may not have been applied. Losing this costs a lease, no spend."""
        if len(self._backlog) < _BATCH * 100:
            self._queue(id, ())

    async def aclose(self) -> None:
        """Settle what is finished, within the callers' patience, and stop renewing. What is left, the leases end."""
        if self._renewing is not None:
            await _stop(self._renewing)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while self._concluding or self._backlog:
                    busy = {*self._concluding, *([self._draining] if self._draining is not None else [])}
                    await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
        if self._draining is not None:
            await _stop(self._draining)
        if self._backlog:
            self.lost_in_backlog = len(self._backlog)
            _log.error("budget-router: closed with %d settles that the store has not taken", len(self._backlog))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that no caller's cancellation may stop."""
        task = asyncio.get_running_loop().create_task(work, name="budget-router settle")
        self._concluding.add(task)
        task.add_done_callback(self._concluding.discard)
        return task

    async def _conclude(self, call: Call) -> None:
        try:
            await self._observer.count(call)
        finally:
            # Even when the counting failed or was cancelled, what is known is settled.
            charges = call.actual()
            self._open.pop(call.id, None)
            self._backlog[call.id] = charges
            self._observer.counted(call)
        balances: tuple[Balance, ...] = ()
        try:
            if self._draining is None:  # else the store is away, and this one goes out in its turn
                balances = await self._write(call.id, charges)
        except BaseException as error:
            self._drain_soon()
            if not isinstance(error, StoreUnavailable):
                raise
        finally:
            self._observer.concluded(call, balances)

    def _queue(self, id: str, charges: tuple[Charge, ...]) -> None:
        self._backlog[id] = charges
        self._drain_soon()

    def _drain_soon(self) -> None:
        if self._draining is None or self._draining.done():
            with contextlib.suppress(RuntimeError):  # the loop is closing: the leases end what is held
                self._draining = asyncio.get_running_loop().create_task(self._drain(), name="budget-router backlog")

    async def _write(self, id: str, charges: tuple[Charge, ...]) -> tuple[Balance, ...]:
        """Settle one id. Only a store that did not take it leaves it in the backlog."""
        balances: tuple[Balance, ...] = ()
        try:
            balances = (await self._store.settle(id, charges)).balances
        except (TooLate, InvalidCharge) as error:
            self.too_late += 1
            _log.error("budget-router: a settle could not be counted: %s", error)
        self._backlog.pop(id, None)
        self._observer.written(id)
        return balances

    async def _drain(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while self._backlog:
                first = list(self._backlog.items())[:_BATCH]
                # Begun in order within one turn of the loop: a store that gathers carries them out in that order.
                answers = await asyncio.gather(*(self._write(*item) for item in first), return_exceptions=True)
                failed = [answer for answer in answers if isinstance(answer, BaseException)]
                if not failed:
                    pause = _FIRST_PAUSE
                    continue
                for error in failed:
                    if not isinstance(error, StoreUnavailable):
                        _log.error("budget-router: a settle failed and is kept", exc_info=error)
                await self._clock.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        finally:
            self._draining = None

    async def _renew(self) -> None:
        while True:
            await self._clock.sleep(self._lease / 3000)
            ids = [*self._open, *self._backlog]
            if ids:
                try:
                    await self._store.renew(ids, lease=self._lease)
                except StoreUnavailable:
                    pass  # asked again a third of a lease later
                except Exception:  # noqa: BLE001 (a store of somebody else: logged, and asked again)
                    _log.exception("budget-router: renewing the leases failed")


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
