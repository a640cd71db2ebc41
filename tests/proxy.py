"""A line between a client and a Redis or Valkey server that fails where it is told, at any point of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, get_args

Point = Literal["before the request", "in the request", "after the request", "before the reply", "in the reply"]
"""Where on the way of one command: before a byte of it went to the server; when half of it did; when all did; when the server
has answered, of which the client has seen nothing; when the client has seen half of that."""

Way = Literal["delay", "close", "reset", "swallow", "hold", "partition"]
"""`delay` goes on a little later; `close` and `reset` end the connection, politely or not; `swallow` drops whatever comes on it
from there on; `hold` keeps it back until `Proxy.let_go`, while its client may be gone and others overtake it; `partition` drops
everything on every connection, those that are opened meanwhile too, until `Proxy.heal`."""

POINTS: tuple[Point, ...] = get_args(Point)
WAYS: tuple[Way, ...] = get_args(Way)

DELAY = 0.01
"""Seconds that a delayed command is late."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one command."""

    point: Point
    way: Way


class Proxy:
    """Serves on a port of its own and passes everything on to `server_port`, one command at a time per connection.

    Only commands that carry a script (EVAL, EVALSHA) meet faults: the next one meets the first fault that is armed, and so on.
    With `dribble` every command and reply is passed on in two parts at random moments.
    """

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.met = 0
        """How many faults were met."""
        self.dribble: random.Random | None = None
        self._server_port = server_port
        self._armed: deque[Fault] = deque()
        self._partitioned = False
        self._gate = asyncio.Event()
        self._held = 0
        self._answered = asyncio.Condition()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def held(self) -> int:
        """How many commands are kept back now."""
        return self._held

    def arm(self, *faults: Fault) -> None:
        """Let the next scripts meet these, one each."""
        self._armed.extend(faults)

    def heal(self) -> None:
        """Let everything through again. What was swallowed stays so, and what is held back is held back."""
        self._armed.clear()
        self._partitioned = False

    async def let_go(self) -> None:
        """Pass on what was held back, and return when the server has answered it, or never will."""
        self._gate.set()
        async with self._answered:
            await self._answered.wait_for(lambda: self._held == 0)
        self._gate.clear()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Proxy]:
        """Serve until the block ends."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1000)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        below, above = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            await _Connection(self, reader, writer, below, above).serve()
        except _End as end:
            if end.hard:
                for each in (writer, above):
                    _reset(each)
        except (OSError, asyncio.IncompleteReadError):
            pass  # one side is gone
        finally:
            for each in (writer, above):
                each.close()

    def _next(self, request: bytes) -> Fault | None:
        if self._armed and b"\r\nEVAL" in request[:40]:
            self.met += 1
            return self._armed.popleft()
        return None


class _Connection:
    """One client's connection and its own to the server."""

    def __init__(
        self,
        proxy: Proxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        below: asyncio.StreamReader,
        above: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._below = below
        self._above = above
        self._fault: Fault | None = None
        self._holding = False

    async def serve(self) -> None:
        """Pass commands and replies on, in turns, until one side is gone."""
        try:
            while request := await read_frame(self._reader):
                self._fault = self._proxy._next(request)
                await self._at("before the request")
                await self._pass(self._above, request, "in the request")
                await self._at("after the request")
                reply = await read_frame(self._below)
                await self._answered()
                if not reply:
                    return
                await self._at("before the reply")
                await self._pass(self._writer, reply, "in the reply")
                await self._answered()
        finally:
            await self._answered()

    async def _pass(self, to: asyncio.StreamWriter, data: bytes, middle: Point) -> None:
        draw = self._proxy.dribble
        half = len(data) // 2 if draw is None else draw.randrange(len(data) + 1)
        # A client that is gone hinders nothing on its way to the server.
        with contextlib.suppress(OSError):
            to.write(data[:half])
            await to.drain()
        if draw is not None:
            await asyncio.sleep(draw.random() * DELAY / 4)
        await self._at(middle)
        with contextlib.suppress(OSError):
            to.write(data[half:])
            await to.drain()

    async def _at(self, point: Point) -> None:
        """Be at a point: whatever is to happen here, happens."""
        proxy = self._proxy
        if proxy._partitioned:
            await self._swallow()
        if self._fault is None or self._fault.point != point:
            return
        match self._fault.way:
            case "delay":
                await asyncio.sleep(DELAY)
            case "close":
                raise _End(hard=False)
            case "reset":
                raise _End(hard=True)
            case "swallow":
                await self._swallow()
            case "partition":
                proxy._partitioned = True
                await self._swallow()
            case "hold":
                proxy._held += 1
                self._holding = True
                await proxy._gate.wait()

    async def _swallow(self) -> None:
        """Read on for ever, from the client as from a black hole, until it gives up."""
        while await self._reader.read(1 << 16):
            pass
        raise _End(hard=False)

    async def _answered(self) -> None:
        if self._holding:
            self._holding = False
            async with self._proxy._answered:
                self._proxy._held -= 1
                self._proxy._answered.notify_all()


class _End(Exception):
    """Ends a connection."""

    def __init__(self, *, hard: bool) -> None:
        super().__init__()
        self.hard = hard


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the other side gets a reset, and nothing that is still unsent."""
    link = writer.get_extra_info("socket")
    if link is not None and link.fileno() >= 0:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read one whole value of RESP 2 or 3, however deep, as its bytes; nothing at the end of the stream."""
    line = await reader.readline()
    if not line:
        return b""
    kind, rest = line[:1], line[1:-2]
    if kind in b"$=!" and rest != b"-1":
        return line + await reader.readexactly(int(rest) + 2)
    if kind in b"*~>%" and rest != b"-1":
        parts = [line]
        for _ in range(int(rest) * (2 if kind == b"%" else 1)):
            parts.append(await read_frame(reader))  # noqa: PERF401 (an await in a comprehension reads worse)
        return b"".join(parts)
    return line


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until a condition holds. Raises TimeoutError after ten seconds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)
