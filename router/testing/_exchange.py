from __future__ import annotations

import asyncio
import gzip
import zlib
from collections import deque
from collections.abc import Callable

from router.testing._account import Account, Entry
from router.testing._http import Connection, Headers
from router.testing._plan import Plan
from router.testing._shapes import error, streamed, whole

_HTML = b"<!doctype html><title>%d</title><h1>This page is no answer</h1>"


class Gate:
    """Let as many through as were let go, in the order in which they came."""

    def __init__(self) -> None:
        self._free = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def open(self, count: int) -> None:
        """Let `count` more through, now or when they come."""
        self._free += count
        while self._free and self._waiting:
            if not (turn := self._waiting.popleft()).done():
                self._free -= 1
                turn.set_result(None)

    async def passed(self) -> None:
        """Wait to be let go."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn


class Exchange:
    """Answer one request as its plan says, and keep its entry true at every step.

    The books are written before the bytes that a client could see, and put right where those did not get out: whoever
    has read an answer finds it in the account.
    """

    def __init__(self, plan: Plan, connection: Connection, account: Account, gate: Gate, changed: Callable[[], None]):
        self._plan = plan
        self._reply = plan.reply
        self._entry: Entry = plan.entry
        self._connection = connection
        self._account = account
        self._gate = gate
        self._changed = changed
        self._started = False

    async def play(self) -> None:
        """Answer; return when the answer is out or cut. A client that hangs up cancels this."""
        reply, connection = self._reply, self._connection
        try:
            if reply.cut in {"before_request_read", "after_request_read"}:
                connection.reset()
                return
            if reply.stall == "before_request_read":
                await _for_ever()
            if reply.delay:
                await asyncio.sleep(reply.delay)
            if reply.stall == "before_first_byte":
                await _for_ever()
            if reply.cut == "before_first_byte":
                connection.reset()
                return
            good = reply.status == 200 and reply.body == "json"
            if good and self._entry.stream:
                await self._stream()
            else:
                await self._whole(good=good)
        finally:
            self._account.writing.discard(self._entry.id)
            if not self._entry.finished:
                self._bill_part()

    def _finish(self, *, good: bool) -> None:
        if good:
            self._account.bill(self._entry, self._plan.bill())
        else:
            self._bill_part()
        self._account.writing.discard(self._entry.id)
        self._entry.finished = True

    def _bill_part(self) -> None:
        entry, plan = self._entry, self._plan
        if self._started:
            self._account.bill(entry, plan.usage(entry.generated))
        elif self._reply.billed:
            entry.generated = plan.total
            self._account.bill(entry, plan.usage(plan.total))
        else:
            entry.generated = 0
            self._account.bill(entry, None)

    async def _whole(self, *, good: bool) -> None:
        reply, entry = self._reply, self._entry
        if reply.body == "html":
            kind, body = "text/html; charset=utf-8", _HTML % reply.status
        elif good:
            kind, body = "application/json", whole(self._plan)
        else:
            kind, body = "application/json", error(reply.status, f"scripted error {reply.status}", reply.code)
        if reply.compress:
            body = gzip.compress(body)
        if reply.gate:
            await self._gate.passed()
        entry.status = reply.status
        if reply.cut is not None or reply.stall is not None:
            # What is left of the points inside an answer falls in the middle of its body.
            await self._connection.start(reply.status, self._headers(kind))
            await self._connection.send_half(body)
            if reply.stall is not None:
                await _for_ever()
            self._connection.reset()
            return
        entry.generated = self._plan.total if good else 0
        self._finish(good=good)
        try:
            await self._connection.respond(reply.status, self._headers(kind), body)
        except (asyncio.CancelledError, ConnectionError):
            entry.finished = False
            raise
        self._changed()

    async def _stream(self) -> None:
        reply, entry, connection = self._reply, self._entry, self._connection
        opening, chunks, closing = streamed(self._plan)
        pack = _gzipped() if reply.compress else _plain
        stall, cut = _number(reply.stall), _number(reply.cut)
        end = len(chunks) - 1
        usage_at = next((index for index, chunk in enumerate(chunks) if chunk.usage), len(chunks))
        cut_whole = usage_at if reply.cut == "before_usage_chunk" else None
        entry.status, self._started = 200, True
        self._account.writing.add(entry.id)
        self._changed()
        await connection.start(200, self._headers("text/event-stream; charset=utf-8"))
        if opening:
            await connection.send(pack(opening, False))
        for index, chunk in enumerate(chunks):
            if stall == index:
                await _for_ever()
            if reply.chunk_delay:
                await asyncio.sleep(reply.chunk_delay)
            if reply.gate:
                await self._gate.passed()
            if cut_whole == index:
                break
            last = index == end and cut_whole is None and stall != len(chunks)
            data = pack(chunk.data + closing if last else chunk.data, last)
            if cut == index:
                await connection.send_half(data)
                break
            entry.generated += chunk.tokens
            if last:
                self._finish(good=True)
            try:
                await connection.send(data, last=last)
            except (asyncio.CancelledError, ConnectionError):
                entry.generated -= chunk.tokens
                entry.finished = False
                raise
            self._changed()
            # A turn of the loop, to see whether the client is still there.
            if not last:
                await asyncio.sleep(0)
        if stall == len(chunks):
            await _for_ever()
        if not entry.finished:
            connection.reset()

    def _headers(self, kind: str) -> Headers:
        reply = self._reply
        headers = [("content-type", kind), ("x-request-id", f"req_{self._entry.id}")]
        if reply.retry_after is not None:
            headers.append(("retry-after", str(reply.retry_after)))
        if reply.compress:
            headers.append(("content-encoding", "gzip"))
        if not reply.keep_alive:
            headers.append(("connection", "close"))
        return headers


def _number(point: str | None) -> int | None:
    return int(point.partition(":")[2]) if point is not None and ":" in point else None


def _plain(data: bytes, last: bool) -> bytes:
    return data


def _gzipped() -> Callable[[bytes, bool], bytes]:
    packer = zlib.compressobj(wbits=31)
    return lambda data, last: packer.compress(data) + packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()
