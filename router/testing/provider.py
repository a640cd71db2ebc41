from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from router.testing._account import Account, Entry, Rates
from router.testing._exchange import Exchange, Gate
from router.testing._http import Connection, Request
from router.testing._plan import output_limit, plan
from router.testing._reply import Reply
from router.testing._shapes import encode, error
from router.testing._text import Tokenizer, o200k

_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/embeddings")
_SECRET_HEADERS = ("authorization", "proxy-authorization", "api-key", "x-api-key", "cookie")
_STEER = "x-local-provider-output"
_GOOD = Reply()


class LocalProvider:
    """Serve Chat Completions, Responses and Embeddings as OpenAI does, on 127.0.0.1, and keep an account of it.

    It runs in a thread of its own while its context (sync or async) is open; clients may be in any thread, loop or
    process. `prices` says what a model costs, `reply` how a request is answered (one `Reply` for all, or a function
    that is called in the provider's thread for each), `port` where to listen (0: a free one). The header
    `x-local-provider-output: 211` asks for that many output tokens.

    What is billed: a whole answer at what its usage says, a stream that was left or cut at its input and what was
    generated until then, anything else (errors, no first byte, half a body) at nothing, unless `Reply(billed=True)`.

    Leaving the context raises RuntimeError when `reply` or the provider itself failed on a request.
    """

    def __init__(
        self,
        *,
        prices: Mapping[str, Rates] | None = None,
        reply: Reply | Callable[[Entry], Reply] | None = None,
        port: int = 0,
    ) -> None:
        self._account = Account(prices or {})
        self._reply = reply
        self._port = port
        self._gate = Gate()
        self._tokenizer = Tokenizer()
        self._numbers = 0
        self._connections: set[Connection] = set()
        self._watchers: set[Callable[[], object]] = set()
        self._failure: Exception | None = None
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stopped: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def base_url(self) -> str:
        """The address for `AsyncOpenAI(base_url=…)`; there once the provider listens."""
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def requests(self) -> list[Entry]:
        """Every request as it arrived, in that order."""
        return self._account.entries()

    @property
    def open_streams(self) -> int:
        """How many streams are being written now."""
        return len(self._account.writing)

    def spent(self, *, model: str | None = None) -> int:
        """Return what was billed, in all or for one model, in nano-dollars.

        Each bill is rounded up to a whole one. Raises LookupError when a model without a price was billed.
        """
        return self._account.spent(model)

    def advance(self, n: int = 1) -> None:
        """Let go the next `n` gated chunks or answers, in order of their arrival; safe from any thread."""
        self._loop.call_soon_threadsafe(self._gate.open, n)

    async def wait_for(self, condition: Callable[[Self], object], timeout: float = 5) -> None:
        """Wait until `condition(provider)` holds; it is looked at after every change. Works in any loop.

        Raises TimeoutError after `timeout` seconds.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop that waited may be closed by now
                loop.call_soon_threadsafe(changed.set)

        self._watchers.add(wake)
        try:
            async with asyncio.timeout(timeout):
                while not condition(self):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            raise TimeoutError(f"the condition did not hold within {timeout} s: {self!r} {self.requests!r}") from None
        finally:
            self._watchers.discard(wake)

    def __repr__(self) -> str:
        return f"<LocalProvider {self.base_url}: {len(self.requests)} requests, {self.open_streams} open streams>"

    def __enter__(self) -> Self:
        self._start()
        self._ready.result()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()
        self._stopped.result()
        self._end(exc)

    async def __aenter__(self) -> Self:
        self._start()
        await asyncio.shield(asyncio.wrap_future(self._ready))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()
        await asyncio.shield(asyncio.wrap_future(self._stopped))
        self._end(exc)

    def _start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port), backlog=4096)
        self._port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(listener,), name="local-provider", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)

    def _end(self, exc: BaseException | None) -> None:
        self._thread.join()
        if self._failure is None:
            return
        message = f"the local provider failed on a request: {self._failure!r}"
        if exc is None:
            raise RuntimeError(message) from self._failure
        exc.add_note(message)

    def _run(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._serve(listener))
        except Exception as failure:
            if self._ready.done():
                raise
            self._ready.set_exception(failure)
        finally:
            self._stopped.set_result(None)

    async def _serve(self, listener: socket.socket) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        o200k()  # loaded here, so that the first request is not the one that waits for it
        server = await self._loop.create_server(
            lambda: Connection(self._handle, self._connections), sock=listener, backlog=4096
        )
        self._ready.set_result(None)
        await self._stopping.wait()
        server.close()
        answering = [each.answering for each in self._connections if each.answering is not None]
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*answering, return_exceptions=True)

    async def _handle(self, request: Request, connection: Connection) -> None:
        if (request.method, request.path) == ("GET", "/account"):
            body = encode(self._account.report()).encode()
            await connection.respond(200, [("content-type", "application/json")], body)
            return
        if request.method != "POST" or request.path not in _PATHS:
            message = f"no such address: {request.method} {request.path}"
            await connection.respond(404, [("content-type", "application/json")], error(404, message))
            return
        entry = self._enter(request)
        try:
            await self._answer(entry, connection)
        except (asyncio.CancelledError, ConnectionError):
            entry.hung_up = not self._stopping.is_set()
        except Exception as failure:  # noqa: BLE001 (whatever a script raises is raised again where it is seen)
            self._failure = self._failure or failure
            connection.reset()
        finally:
            self._changed()

    def _enter(self, request: Request) -> Entry:
        try:
            body = json.loads(request.body)
        except ValueError:
            body = None
        known: dict[str, Any] = body if isinstance(body, dict) else {}
        for name in _SECRET_HEADERS:
            request.headers.pop(name, None)
        self._numbers += 1
        entry = Entry(
            id=self._numbers,
            path=request.path,
            model=str(known.get("model", "")),
            stream=known.get("stream") is True,
            headers=request.headers,
            body=known,
            opened_at=time.monotonic(),
            output_limit=output_limit(known),
        )
        self._account.add(entry)
        return entry

    async def _answer(self, entry: Entry, connection: Connection) -> None:
        steered = entry.headers.get(_STEER)
        if not entry.model or (steered is not None and not steered.isdecimal()):
            wrong = "the body is no JSON object that names a model" if not entry.model else f"{_STEER} is no number"
            entry.status, entry.finished = 400, True
            await connection.respond(400, [("content-type", "application/json")], error(400, wrong))
            return
        entry.prompt_tokens = self._tokenizer.prompt(entry.path, entry.body)
        self._changed()
        reply = self._reply if isinstance(self._reply, Reply) else self._reply(entry) if self._reply else _GOOD
        if reply.prompt_tokens is not None:
            entry.prompt_tokens = reply.prompt_tokens
        entry.cached_tokens = min(reply.cached_tokens, entry.prompt_tokens)
        answer = plan(entry, reply, self._tokenizer, None if steered is None else int(steered))
        await Exchange(answer, connection, self._account, self._gate, self._changed).play()

    def _changed(self) -> None:
        for wake in tuple(self._watchers):
            wake()
