from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, TypeAlias, cast

import h11

Headers: TypeAlias = list[tuple[str, str]]


_REASONS = {status.value: status.phrase for status in HTTPStatus}


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Connection(asyncio.Protocol):
    """Serve one HTTP/1.1 connection, a request at a time.

    `handle` answers a request through `respond`, or `start` and `send`. It is cancelled when the client hangs up (half
    a hang-up counts as one), so that no wait inside it outlives its reader; what it writes is handed to the kernel
    before the write returns.
    """

    def __init__(self, handle: Callable[[Request, Connection], Awaitable[None]], all_: set[Connection]) -> None:
        self._handle = handle
        self._all = all_
        self._http = h11.Connection(h11.SERVER)
        self._head: h11.Request | None = None
        self._body: list[bytes] = []
        self._room: asyncio.Future[None] | None = None
        self._closing = False
        self.answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)
        self.hang_up()

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        self._read()

    def _read(self) -> None:
        try:
            # A request that is sent ahead of the answer to the last one leaves h11 PAUSED until that is written.
            while (event := self._http.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
                if isinstance(event, h11.Request):
                    self._head, self._body = event, []
                    if self._http.they_are_waiting_for_100_continue:
                        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                elif isinstance(event, h11.Data):
                    self._body.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    self.answering = asyncio.get_running_loop().create_task(self._answer())
                else:
                    return
        except h11.RemoteProtocolError:
            self.reset()

    async def _answer(self) -> None:
        head = self._head
        assert head is not None  # noqa: S101 (a body follows its head)
        headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        body, self._body = b"".join(self._body), []
        path = head.target.decode("latin-1").partition("?")[0]
        await self._handle(Request(head.method.decode(), path, headers, body), self)
        self.answering = None
        if self._transport.is_closing():
            return
        if self._closing or headers.get("connection", "").lower() == "close" or head.http_version != b"1.1":
            self._transport.close()
            return
        # h11 reads requests only: having it write as well would make an answer twice as dear.
        ahead, _ = self._http.trailing_data
        self._http = h11.Connection(h11.SERVER)
        if ahead:
            self.data_received(ahead)

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Write a whole answer."""
        self._closing = ("connection", "close") in headers
        await self._write(_head(status, [*headers, ("content-length", str(len(body)))]) + body)

    async def start(self, status: int, headers: Headers) -> None:
        """Write the head of an answer that is sent piece by piece, in step with its reader, in chunked frames."""
        self._closing = ("connection", "close") in headers
        # A small buffer in the kernel keeps the writer close behind a reader that is slow.
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await self._write(_head(status, [*headers, ("transfer-encoding", "chunked")]))

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Write the next piece."""
        await self._write(_framed(data) + (_framed(b"") if last else b""))

    async def send_half(self, data: bytes) -> None:
        """Write the first half of a piece, cut in the middle of its frame."""
        frame = _framed(data)
        await self._write(frame[: len(frame) // 2])

    def reset(self) -> None:
        """Close the socket hard: the client sees a reset after what was written."""
        linger = struct.pack("ii", 1, 0)
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._transport.abort()

    def abort(self) -> None:
        """Drop the connection and what is being answered on it."""
        self._transport.abort()
        self.hang_up()

    def hang_up(self) -> None:
        """Stop answering."""
        if self.answering is not None:
            self.answering.cancel()

    async def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
        if self._room is not None:
            await self._room
        if self._transport.is_closing():
            raise ConnectionResetError("the client has hung up")


def _head(status: int, headers: Headers) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} {_REASONS.get(status, 'Scripted')}\r\n{lines}\r\n".encode("latin-1")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
