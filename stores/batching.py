"""Many callers, one round trip or one commit.

While a batch is under way, what arrives is gathered and sent as the next one. One caller alone waits for nobody.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from stores.errors import StoreUnavailable

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Place(Generic[Item, Answer]):
    item: Item
    future: asyncio.Future[Answer]
    deadline: float


class Batcher(Generic[Item, Answer]):
    """Send items in batches; each caller gets its own answer.

    `send` takes a list of items and returns one answer per item, an exception standing for an item that failed alone; what it
    raises fails the whole batch. At most `size` items travel together, at most `in_flight` batches at once. An item is
    answered within `timeout` seconds, else with `StoreUnavailable`; so is one that arrives when `limit` items wait. A batch
    is never cancelled with one of its callers. Built without a running loop; belongs to the loop that first uses it.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Exception]]],
        *,
        store: str,
        size: int = 100,
        in_flight: int = 1,
        timeout: float = 5.0,
        limit: int = 100_000,
    ) -> None:
        self._send = send
        self._store = store
        self._size = size
        self._in_flight = in_flight
        self._timeout = timeout
        self._limit = limit
        self._places: deque[_Place[Item, Answer]] = deque()
        self._batches: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._starting: asyncio.Task[None] | None = None  # takes with it what arrives before it starts
        self._overdue: set[asyncio.Task[None]] = set()
        self._name = f"{store} store batch"
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many items are not sent yet."""
        return len(self._places)

    def put(self, item: Item) -> asyncio.Future[Answer]:
        """Queue an item and return the future of its answer; never waits. Raises `StoreUnavailable` if it cannot."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise StoreUnavailable(self._store, "it belongs to another event loop; make one store per loop")
            self._loop, self._pid = loop, os.getpid()
        if self._closed:
            raise StoreUnavailable(self._store, "it was closed")
        if len(self._places) >= self._limit:
            raise StoreUnavailable(self._store, f"{self._limit} calls wait for it already")
        future: asyncio.Future[Answer] = loop.create_future()
        self._places.append(_Place(item, future, loop.time() + self._timeout))
        if self._watch is None:
            self._watch = loop.call_later(self._timeout, self._give_up)
        self._start()
        return future

    async def aclose(self) -> None:
        """Take nothing more, and wait until all that was taken is answered.

        Raises `StoreUnavailable` while the loop that it belongs to runs in another thread: only there can they be answered.
        """
        loop = self._loop
        if loop is not None and loop is not asyncio.get_running_loop():
            if loop.is_running() and self._pid == os.getpid():
                raise StoreUnavailable(self._store, "it belongs to an event loop that runs in another thread; close it there")
            self._closed = True
            # That loop is closed, and its callers with it; or it stands still; or a fork left it behind.
            while self._places:
                future = self._places.popleft().future
                if not (future.done() or loop.is_closed()):
                    future.set_exception(StoreUnavailable(self._store, "it was closed"))
                    future.exception()
            return
        self._closed = True
        while self._batches:
            await asyncio.wait(self._batches)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _start(self) -> None:
        """See that what waits is taken on the next turn of the loop, so that what arrives in the same turn travels together."""
        if self._places and self._starting is None and len(self._batches) < self._in_flight:
            task = asyncio.get_running_loop().create_task(self._carry(), name=self._name)
            self._starting = task
            self._batches.add(task)
            task.add_done_callback(self._carried)

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._batches.discard(task)
        if self._starting is task:  # cancelled before it began
            self._starting = None
        overdue = task in self._overdue
        self._overdue.discard(task)
        if overdue or not task.cancelled():  # else the loop is being torn down, and a new task would outlive it
            self._start()

    async def _carry(self) -> None:
        self._starting = None
        batch = [self._places.popleft() for _ in range(min(self._size, len(self._places)))]
        self._start()
        if not batch:  # its callers were told meanwhile that their time is over
            return
        answers: Sequence[Answer | Exception]
        # By hand, since asyncio.timeout would be a tenth of what one caller alone pays for the whole call.
        task = cast(asyncio.Task[None], asyncio.current_task())
        limit = asyncio.get_running_loop().call_at(batch[0].deadline, self._end, task)
        try:
            answers = await self._send([place.item for place in batch])
            if len(answers) != len(batch):
                raise StoreUnavailable(self._store, f"it gave {len(answers)} answers to {len(batch)} calls")
        except Exception as error:  # noqa: BLE001 (it belongs to the callers, who all wait for this batch)
            answers = [error] * len(batch)
        except BaseException:
            if task not in self._overdue or task.uncancel():
                # The loop is being torn down: whoever still waits must not wait for ever.
                for place in batch:
                    place.future.cancel()
                raise
            answers = [self._late() for _ in batch]
        finally:
            limit.cancel()
        for place, answer in zip(batch, answers, strict=True):
            if place.future.done():
                continue
            if isinstance(answer, Exception):
                place.future.set_exception(answer)
                place.future.exception()  # a caller that went away has nobody to fetch it
            else:
                place.future.set_result(answer)

    def _end(self, task: asyncio.Task[None]) -> None:
        """End a batch whose time is over."""
        self._overdue.add(task)
        task.cancel()

    def _give_up(self) -> None:
        """Answer those whose time is over before they were sent; then watch the next."""
        self._watch = None
        loop = asyncio.get_running_loop()
        while self._places and self._places[0].deadline <= loop.time():
            place = self._places.popleft()
            if not place.future.done():
                place.future.set_exception(self._late())
                place.future.exception()
        if self._places:
            self._watch = loop.call_at(self._places[0].deadline, self._give_up)

    def _late(self) -> StoreUnavailable:
        return StoreUnavailable(self._store, f"it did not answer within {self._timeout:g} s")
