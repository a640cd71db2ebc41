"""Sending a task to its model: one attempt, what its failure means, and the retries inside one reservation."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar, get_args

import httpx2
import openai
from openai import AsyncOpenAI
from pydantic import BaseModel
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential_jitter

from router.call import Call
from router.clock import Clock
from router.errors import BudgetRouterError, PolicyError
from router.estimate import with_output_limit
from router.policy import Model, Retries
from router.task import Kind
from router.usage import Usage, usage_of

__all__ = ["LONGEST_RETRY_AFTER", "Answer", "BadAnswer", "Sender", "attempts", "request_of", "retry_after_of", "transient"]

T = TypeVar("T")

LONGEST_RETRY_AFTER = 60.0
"""Seconds that a provider may make a task without a deadline wait; asked for more, the error stands. The SDK's own bound."""

# The status codes that the OpenAI SDK itself takes for transient, besides 500 and above.
_TRANSIENT = frozenset({408, 409, 429})


class BadAnswer(BudgetRouterError):
    """Say that a model answered with something that is no reply; `usage` is what it says was billed, if it does."""

    def __init__(self, why: str, usage: Usage | None) -> None:
        super().__init__(f"the model's answer could not be read: {why}")
        self.usage = usage


class Answer:
    """A whole reply and its usage."""

    __slots__ = ("reply", "usage")

    def __init__(self, reply: BaseModel, usage: Usage | None) -> None:
        self.reply = reply
        self.usage = usage


class Sender:
    """One model and its client, with the client's own retries off."""

    def __init__(self, model: Model) -> None:
        if not isinstance(model.client, AsyncOpenAI):
            raise PolicyError(f"model {model.name!r} has no client to call: write Model({model.name!r}, client=AsyncOpenAI())")
        self.model = model
        self.name = model.name
        # Each hidden retry may be billed; ours are the only ones.
        self._client: AsyncOpenAI = model.client.with_options(max_retries=0)
        # Looked up once: the SDK builds a wrapper of every method each time it is asked for one.
        self._whole = {kind: self._resource(kind).with_raw_response.create for kind in get_args(Kind)}

    async def whole(self, kind: Kind, request: Mapping[str, Any], *, timeout: float | None) -> Answer:
        """Ask for a whole reply. Raises what the SDK raises, and `BadAnswer`."""
        raw = await self._whole[kind](**self._options(request, timeout))
        try:
            reply = raw.parse()
        except Exception as error:
            raise BadAnswer(type(error).__name__, _usage_in(raw.http_response)) from error
        if not isinstance(reply, BaseModel):
            raise BadAnswer("it is not JSON", _usage_in(raw.http_response))
        return Answer(reply, usage_of(reply))

    async def stream(self, kind: Kind, request: Mapping[str, Any], *, timeout: float | None) -> openai.AsyncStream[Any]:
        """Open a stream. Raises what the SDK raises, and `BadAnswer`."""
        options = self._options(request, timeout)
        if kind == "chat":
            # Without it a provider sends no usage at all.
            options["stream_options"] = {**(request.get("stream_options") or {}), "include_usage": True}
        stream: openai.AsyncStream[Any] = await self._resource(kind).create(stream=True, **options)
        sent_as = stream.response.headers.get("content-type", "")
        if sent_as.startswith(("application/json", "text/html")):
            # A gateway that knows no streams answers as a whole; billed it is all the same.
            await stream.response.aread()
            await stream.close()
            raise BadAnswer(f"it is no stream but {sent_as}", _usage_in(stream.response))
        return stream

    def _options(self, request: Mapping[str, Any], timeout: float | None) -> dict[str, Any]:
        """Return the arguments of a call. A `timeout` of the task's own can only make ours shorter."""
        options = {"model": self.name, "timeout": timeout, **request}
        own = request.get("timeout")
        if isinstance(own, int | float) and timeout is not None:
            options["timeout"] = min(own, timeout)
        return options

    def _resource(self, kind: Kind) -> Any:
        if kind == "chat":
            return self._client.chat.completions
        return self._client.responses if kind == "response" else self._client.embeddings


def request_of(call: Call) -> dict[str, Any]:
    """Return the request as it is sent: the task's own, with the output limit that was reserved."""
    # Some clients' calls have an option `max_retries`; only the router retries.
    request = {key: value for key, value in call.task.request.items() if key != "max_retries"}
    limit = call.estimate.output_limit
    if call.task.kind == "embedding" or limit is None:
        return request
    return with_output_limit(call.task.kind, request, limit)


def transient(error: BaseException) -> bool:
    """Say whether trying again may help: time-outs, broken connections, 408, 409, 429, 500 and above, garbled answers.

    Never a cancellation, and never an account that is out of credit (402, or `insufficient_quota` with 429).
    """
    if isinstance(error, openai.APIStatusError):
        if _code_of(error) == "insufficient_quota" or error.response.headers.get("x-should-retry") == "false":
            return False
        return error.status_code in _TRANSIENT or error.status_code >= 500
    # The SDK lets a connection that breaks within an error's body through as it is.
    return isinstance(error, openai.APIConnectionError | BadAnswer | TimeoutError | httpx2.TransportError)


def unanswered(error: BaseException) -> bool:
    """Say whether the request may have reached the model and been billed although nothing says so.

    An answer of 500 and above, or 408, may come from something between us and a model that did its work; 503 and 529 say that
    the request was turned away.
    """
    if isinstance(error, BadAnswer):
        return error.usage is None
    if isinstance(error, openai.APIConnectionError):
        # Without a connection nothing was sent.
        return not isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
    if isinstance(error, openai.APIStatusError):
        return error.status_code == 408 or (error.status_code >= 500 and error.status_code not in {503, 529})
    return isinstance(error, TimeoutError | asyncio.CancelledError | httpx2.TransportError)


def retry_after_of(error: BaseException, *, now: int) -> float | None:
    """Return how many seconds the provider asks to wait: `Retry-After` in seconds or as a date. `now` is in ms.

    None when it does not say, or says nothing sensible.
    """
    if not isinstance(error, openai.APIStatusError):
        return None
    headers = error.response.headers
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * unit
        except ValueError:
            try:
                date = parsedate_to_datetime(value)
                seconds = date.replace(tzinfo=date.tzinfo or UTC).timestamp() - now / 1000
            except (ValueError, OverflowError):
                continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None


async def attempts(
    call: Call,
    send: Callable[[float | None], Awaitable[T]],
    *,
    retries: Retries,
    clock: Clock,
    deadline: float | None,
    make_room: Callable[[], Awaitable[bool]],
) -> T:
    """Send until it is answered, inside the call's one reservation, and bill each attempt that says what it cost.

    `send` takes the time limit of one attempt in seconds. `deadline` is by the monotonic clock. Before each attempt after the
    first, `make_room` extends the reservation; when it cannot, or no time is left for the wait, the last error stands.
    """
    backoff = wait_exponential_jitter(multiplier=retries.base, max=retries.cap, jitter=retries.base)

    def wait(state: RetryCallState) -> float:
        asked = retry_after_of(_error_of(state), now=clock.now())
        return backoff(state) if asked is None else asked

    async def stop(state: RetryCallState) -> bool:
        if state.attempt_number >= retries.attempts:
            return True
        if deadline is None and state.upcoming_sleep > LONGEST_RETRY_AFTER:
            return True
        if deadline is not None and clock.monotonic() + state.upcoming_sleep >= deadline:
            return True
        return not await make_room()

    async def once() -> T:
        limits = [retries.per_attempt, None if deadline is None else max(0.0, deadline - clock.monotonic())]
        timeout = min((limit for limit in limits if limit is not None), default=None)
        if timeout == 0:
            raise TimeoutError("the time of the task was over before it could be sent")
        call.attempts += 1
        try:
            async with asyncio.timeout(timeout):
                return await send(timeout)
        except BaseException as error:
            usage = error.usage if isinstance(error, BadAnswer) else _usage_in_error(error)
            if usage is not None:
                call.bill(usage, "provider")
            elif unanswered(error):
                call.unanswered()
            raise

    # One object per call: a shared one mixes the counters of concurrent tasks.
    retrying = AsyncRetrying(
        sleep=clock.sleep,
        retry=retry_if_exception(transient),
        wait=wait,
        stop=stop,  # type: ignore[arg-type]  # AsyncRetrying awaits it; its annotation has not caught up
        reraise=True,
    )
    return await retrying(once)


def _error_of(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    return error if error is not None else TimeoutError()


def _code_of(error: openai.APIStatusError) -> str | None:
    if error.code is not None:
        return error.code
    body = error.body
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    if not isinstance(inner, Mapping):
        return None
    return next((str(inner[key]) for key in ("code", "type") if inner.get(key)), None)


def _usage_in(response: httpx2.Response) -> Usage | None:
    """Read the usage of an answer that could not be parsed as a whole."""
    try:
        body = json.loads(response.content)
    except (ValueError, RecursionError):
        return None
    return usage_of(body) if isinstance(body, Mapping) else None


def _usage_in_error(error: BaseException) -> Usage | None:
    """Read the usage of an error answer that was billed all the same."""
    if not isinstance(error, openai.APIStatusError):
        return None
    return _usage_in(error.response)
