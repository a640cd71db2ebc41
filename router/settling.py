"""The one place where calls are settled: at once when the store takes it, else from the backlog, in order.

A settle is carried by a task of the router's own, never by its caller's, so that no cancellation can stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from router.call import Call
from router.clock import Clock
from router.decision import Outcome
from stores import Balance, BudgetStore, Charge, InvalidCharge, StoreUnavailable, TooLate

__all__ = ["Observer", "Settler"]

_log = logging.getLogger("budget_router")

_BATCH = 100
_MOST_RELEASES = 10_000
_LOOK = 0.01
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

    `patience` is how long a caller waits for its settle, in seconds. `lease`, in milliseconds, may be changed.
    """

    def __init__(self, store: BudgetStore, clock: Clock, *, lease: int, patience: float, observer: Observer) -> None:
        self._store = store
        self._clock = clock
        self._lease = lease
        self._patience = patience
        self._observer = observer
        self._open: dict[str, Call] = {}
        self._backlog: OrderedDict[str, tuple[Charge, ...]] = OrderedDict()
        self._releases: OrderedDict[str, tuple[Charge, ...]] = OrderedDict()
        self._working: set[asyncio.Task[None]] = set()
        self._draining: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.too_late = 0

    @property
    def open(self) -> int:
        """How many calls are admitted and not settled, the backlog left out."""
        return len(self._open)

    @property
    def backlog(self) -> int:
        """How many settles the store has not taken yet."""
        return len(self._backlog)

    @property
    def idle(self) -> bool:
        """Whether nothing is open and nothing is on its way."""
        return not (self._open or self._backlog or self._releases or self._working)

    def admit(self, call: Call) -> None:
        """Take over a call whose reservation is held, or whose admission this process counts by itself."""
        self._open[call.id] = call
        self._renew_soon()

    def withdraw(self, call: Call) -> None:
        """Give back what a call holds that came too late for its caller, as if it had not been admitted."""
        self._open.pop(call.id, None)
        if call.local:
            self._observer.written(call.id)
        else:
            self.forget(call.id)

    def change_lease(self, lease: int) -> None:
        """Renew for `lease` milliseconds from now on."""
        shorter, self._lease = lease < self._lease, lease
        if shorter and self._renewing is not None:
            # The present pause was for longer leases than those that begin now.
            self._renewing.cancel()
            self._renewing = None
            self._renew_soon(at_once=True)

    def finish(
        self,
        call: Call,
        outcome: Outcome,
        error: BaseException | None = None,
        *,
        first: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> asyncio.Task[None] | None:
        """Begin the one settle of a call, and return the task that carries it; None when it was finished before.

        `first` is awaited before the call is counted.
        """
        loop = asyncio.get_running_loop()  # before anything changes: without a loop nothing could carry it
        if not call.close(outcome, error):
            return None
        return self.spawn(self._conclude(call, first), loop)

    def spawn(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Task[None]:
        """Run work that no caller's cancellation may stop."""
        task = (loop or asyncio.get_running_loop()).create_task(work, name="budget-router settle")
        self._working.add(task)
        task.add_done_callback(self._worked)
        return task

    async def wait(self, task: asyncio.Task[None] | None) -> None:
        """Wait for a settle, as long as callers may; the settle goes on when the wait ends, however it ends."""
        if task is not None and not task.done():
            await asyncio.wait((task,), timeout=self._patience)

    def forget(self, id: str) -> None:
        """Close an id whose reserve may or may not have been applied. Losing this costs a lease, no spend."""
        if len(self._releases) < _MOST_RELEASES:
            self._releases[id] = ()
            self._drain_soon()

    async def aclose(self) -> None:
        """Close what is being streamed, wait within the callers' patience for what is open, and settle it.

        Calls that are open still settle when they end, if the loop lives that long; else their leases end.
        """
        for call in tuple(self._open.values()):
            if call.hang_up is not None and call.outcome == "open":
                call.hang_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while not self.idle:
                    self._drain_if_left()
                    tasks = {*self._working, *([self._draining] if self._draining is not None else [])}
                    # Without a task there are only open calls, whose ends nobody announces.
                    await (asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED) if tasks else asyncio.sleep(_LOOK))
        if not self._open and self._renewing is not None:
            await _stop(self._renewing)
        if self._draining is not None:
            await _stop(self._draining)
        if self._backlog or self._open:
            _log.error(
                "budget-router: closed with %d settles that the store has not taken and %d calls open: what they reserved ends "
                "with its lease, and what was served while the store was down is in no bucket",
                len(self._backlog),
                len(self._open),
            )

    async def _conclude(self, call: Call, first: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        balances: tuple[Balance, ...] = ()
        try:
            charges = await self._count(call, first)
            if self._draining is None:  # else the store is away, and this one goes out in its turn
                balances = await self._write(call.id, charges)
        except StoreUnavailable:
            self._drain_soon()
        finally:
            self._observer.concluded(call, balances)

    async def _count(self, call: Call, first: Callable[[], Coroutine[Any, Any, None]] | None) -> tuple[Charge, ...]:
        """Return what a call is settled at, and put it where the store will find it."""
        try:
            if first is not None:
                await first()
            await self._observer.count(call)
        except Exception:  # noqa: BLE001 (whatever it was, the call is settled)
            call.bill_estimate()
            with contextlib.suppress(Exception):  # somebody's log handler may raise: the settle goes on
                _log.exception("budget-router: counting a call failed; its estimate is settled")
        finally:
            # Even when the counting was cancelled, what is known is settled.
            charges = call.actual()
            self._open.pop(call.id, None)
            self._backlog[call.id] = charges
            self._observer.counted(call)
        return charges

    async def _write(self, id: str, charges: tuple[Charge, ...]) -> tuple[Balance, ...]:
        """Settle one id. Only a store that did not take it leaves it where it waits."""
        balances: tuple[Balance, ...] = ()
        wrong: Exception | None = None
        try:
            balances = (await self._store.settle(id, charges)).balances
        except (TooLate, InvalidCharge) as error:
            wrong = error
            self.too_late += 1
        self._backlog.pop(id, None)
        self._releases.pop(id, None)
        self._observer.written(id)
        if wrong is not None:
            _log.error("budget-router: a settle could not be counted: %s", wrong)
        return balances

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("budget-router: a settle failed and is kept", exc_info=task.exception())
        self._drain_if_left()

    def _drain_if_left(self) -> None:
        """Begin to drain when something waits that nobody carries."""
        if (self._backlog or self._releases) and not self._working:
            self._drain_soon()

    def _drain_soon(self) -> None:
        if self._draining is None or self._draining.done():
            with contextlib.suppress(RuntimeError):  # the loop is closing: the leases end what is held
                self._draining = asyncio.get_running_loop().create_task(self._drain(), name="budget-router backlog")

    async def _drain(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while waiting := [*self._backlog.items(), *self._releases.items()][:_BATCH]:
                # Begun in order within one turn of the loop: a store that gathers carries them out in that order.
                answers = await asyncio.gather(*(self._write(*item) for item in waiting), return_exceptions=True)
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

    def _renew_soon(self, *, at_once: bool = False) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.get_running_loop().create_task(self._renew(at_once), name="budget-router leases")

    async def _renew(self, at_once: bool) -> None:
        """Renew all that is held, three times a lease; end when there is nothing, so that a dropped router leaves no task."""
        while True:
            if not at_once:
                await self._clock.sleep(self._lease / 3000)
            at_once = False
            ids = [*self._open, *self._backlog]
            if not ids:
                return
            try:
                await self._store.renew(ids, lease=self._lease)
            except StoreUnavailable:
                pass  # asked again a third of a lease later
            except Exception:  # noqa: BLE001 (a store of somebody else: logged, and asked again)
                _log.exception("budget-router: renewing the leases failed")


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
