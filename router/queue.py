"""Who waits, and the one task that wakes them: what `waiting` decides, done in time.

The store is looked at once a second for all lines together, so that budget which another process gave back is seen; what
this process gives back is seen at once, and windows that turn and the pace of a line have moments of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from router.clock import Clock
from router.waiting import LOOK_EVERY, Line, LineKey, Lines, Need, Waiter, Wake
from stores import Balance, BudgetStore, StoreUnavailable

__all__ = ["LineStatus", "Queue", "WaitEvent"]

_log = logging.getLogger("budget_router")

_LOOKED_AT = 400
"""How many buckets one call of a look asks about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEvent:
    """What hooks are told: that a task has begun to wait, was admitted, or ended without (`expire`).

    `waited` is in seconds; `waiting` is how many wait now; `cap` is the cap that the task waits for.
    """

    what: Literal["enqueue", "admit", "expire"]
    task_id: str
    task_class: str
    cap: str
    waited: float
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineStatus:
    """The tasks of one class in one line.

    `oldest` is how long the first of them has waited, in seconds. `waits_for` says what the line waits for: "room" (holds
    that settle), "window" (the next one) or "pace" (its turn to be let out). `expected` is in how many seconds a task that
    comes now would be let out at the pace that the cap sustains, as far as that is known.
    """

    cap: str
    scope: dict[str, str]
    task_class: str
    depth: int
    oldest: float
    waits_for: Literal["room", "window", "pace"]
    expected: float | None

    def __str__(self) -> str:
        scope = ", ".join(f"{label}={value}" for label, value in self.scope.items())
        expected = "" if self.expected is None else f", about {self.expected:.0f} s for a newcomer"
        where = f"{self.cap}{f' ({scope})' if scope else ''}"
        return f"{self.depth} of {self.task_class} wait for {where}: {self.waits_for}, oldest {self.oldest:.0f} s{expected}"


class Queue:
    """Everybody who waits in one router. `now` returns the store's time in milliseconds, as far as it is known."""

    def __init__(
        self,
        store: BudgetStore,
        clock: Clock,
        *,
        now: Callable[[], int],
        hooks: Iterable[Callable[[WaitEvent], None]] = (),
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._clock = clock
        self._now = now
        self._hooks = tuple(hooks)
        self._lines = Lines(jitter=jitter)
        self._tending: asyncio.Task[None] | None = None
        self._asleep_until: float | None = None
        self._looking: asyncio.Task[None] | None = None
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def size(self) -> int:
        """How many bytes of requests wait, about."""
        return self._lines.size

    def line_ahead(self, needs: Iterable[Need], priority: int) -> Line | None:
        """Return a line in which somebody stands whom a newcomer with these needs may not overtake."""
        return self._lines.blocks(needs, priority, self._clock.monotonic()) if len(self._lines) else None

    def enter(self, waiter: Waiter, refused: Mapping[LineKey, Balance]) -> None:
        """Take a place, or take it again with the same age."""
        self._lines.enter(waiter, refused, self._now(), self._clock.monotonic())
        self._tend_soon()

    def leave(self, waiter: Waiter) -> None:
        """Give up the place at once."""
        self._lines.leave(waiter, self._now(), self._clock.monotonic())

    def saw(self, balances: Iterable[Balance]) -> None:
        """Learn how buckets stand, and wake those that fit now."""
        if len(self._lines):
            self._lines.saw(balances, self._now(), self._clock.monotonic())
            self._tend_soon()

    def paces(self, waiter: Waiter) -> dict[LineKey, int]:
        """Return, per line that a waiter stood in, what may have come out of it by now."""
        return self._lines.paces(waiter, self._now())

    def tell(self, waiter: Waiter, word: Wake) -> None:
        """Wake one, if it stands."""
        self._lines.tell(waiter, word)

    def pause(self, waiter: Waiter) -> None:
        """Let nobody try for a second who stands where a waiter stood."""
        self._lines.pause(waiter, self._now())

    def tell_all(self, word: Wake) -> None:
        """Wake everybody who stands: the policy was changed, or the router was closed."""
        self._lines.tell_all(word)

    def said(self, event: WaitEvent) -> None:
        """Tell the hooks. One that raises is logged, and stops nothing."""
        for hook in self._hooks:
            try:
                hook(event)
            except Exception:  # noqa: BLE001 (somebody's own code, between an admission and its call)
                with contextlib.suppress(Exception):
                    _log.exception("budget-router: a hook on waiting failed")

    async def aclose(self) -> None:
        """End every waiter with a decision, and the task that wakes them."""
        self._lines.tell_all("closed")
        tasks = [task for task in (self._tending, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def status(self) -> tuple[LineStatus, ...]:
        """Return depth and age per class and line."""
        now, time = self._now(), self._clock.monotonic()
        places: dict[tuple[Line, str], list[Waiter]] = {}
        wanted: dict[Line, Counter[float]] = {}
        for waiter in self._lines.waiters.values():
            for need in waiter.needs:
                line = waiter.stood.get(need.key)
                if line is not None:
                    places.setdefault((line, waiter.task_class.name), []).append(waiter)
                    wanted.setdefault(line, Counter())[waiter.rank(time)[0]] += need.amount
        found = []
        for (line, name), waiters in places.items():
            first = waiters[0]
            need = next(need for need in first.needs if need.key == line.key)
            ahead = sum(amount for rank, amount in wanted[line].items() if rank <= first.task_class.priority)
            found.append(
                LineStatus(
                    cap=line.slot.cap.name,
                    scope=dict(line.slot.scope),
                    task_class=name,
                    depth=len(waiters),
                    oldest=time - min(waiter.since for waiter in waiters),
                    waits_for=_waits_for(line, need, now),
                    expected=line.expected(need.slot.line, ahead, now),
                )
            )
        return tuple(found)

    # Waking.

    def _tend_soon(self) -> None:
        """See that somebody wakes in time for what is due next."""
        if self._tending is None or self._tending.done():
            self._tending = asyncio.get_running_loop().create_task(self._tend(), name="budget-router queue")
        elif self._asleep_until is not None:
            due = self._due()
            if due is not None and due < self._asleep_until:
                self._asleep_until = None
                self._tending.cancel()
                self._tending = asyncio.get_running_loop().create_task(self._tend(), name="budget-router queue")

    async def _tend(self) -> None:
        while (due := self._due()) is not None:
            self._asleep_until = due
            await self._clock.sleep(max(0.0, due - self._clock.monotonic()))
            self._asleep_until = None
            time = self._clock.monotonic()
            self._lines.advance(self._now(), time)
            if time >= self._looked + LOOK_EVERY and (self._looking is None or self._looking.done()):
                # Apart, so that a store that does not answer holds up nobody's deadline.
                self._looked = time
                self._looking = asyncio.get_running_loop().create_task(self._look(), name="budget-router look")

    def _due(self) -> float | None:
        """Return when somebody has to be woken or the store looked at; None while nobody waits."""
        if not len(self._lines):
            return None
        time = self._clock.monotonic()
        due = self._lines.due(self._now(), time)
        look = max(time, self._looked + LOOK_EVERY) if self._looking is None or self._looking.done() else time + LOOK_EVERY
        return look if due is None else min(due, look)

    async def _look(self) -> None:
        """Ask the store how the buckets stand for which somebody waits."""
        try:
            for buckets in self._lines.buckets(_LOOKED_AT):
                self.saw(await self._store.balances(buckets))
        except StoreUnavailable:
            pass  # looked at again a second later
        except Exception:  # noqa: BLE001 (a store of somebody else: logged, and looked at again)
            _log.exception("budget-router: looking at the buckets for which somebody waits failed")


def _waits_for(line: Line, need: Need, now: int) -> Literal["room", "window", "pace"]:
    if line.room_for(need):
        return "room" if line.in_pace(need, now) else "pace"
    return "room" if line.spent + need.amount <= need.slot.line else "window"
