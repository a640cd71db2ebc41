"""Batchers for a store of several servers: one that hangs holds up its own calls only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stores.batching import Answer, Batcher, Item


class Lanes(Batcher[Item, Answer]):
    """Send each item with those of the same server. `make` makes a batcher; `server_of` names the server of an item."""

    def __init__(self, make: Callable[[], Batcher[Item, Answer]], server_of: Callable[[Item], str]) -> None:
        self._make = make
        self._server_of = server_of
        self._lanes = {"": make()}  # as many as there are servers

    @property
    def waiting(self) -> int:
        """How many items are not sent yet."""
        return sum(lane.waiting for lane in self._lanes.values())

    def put(self, item: Item) -> asyncio.Future[Answer]:
        """Queue an item on the lane of its server; see `Batcher.put`."""
        server = self._server_of(item)
        lane = self._lanes.get(server)
        if lane is None:
            lane = self._lanes[server] = self._make()
        return lane.put(item)

    async def aclose(self) -> None:
        """Take nothing more, and wait until all that was taken is answered; see `Batcher.aclose`."""
        server_of, self._server_of = self._server_of, lambda _: ""  # no new lane from here on
        try:
            await asyncio.gather(*(lane.aclose() for lane in self._lanes.values()))
        except BaseException:
            self._server_of = server_of
            raise
