"""Retries and fallbacks over HTTP: one reservation, one settle, and every attempt that was billed is in it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from email.utils import formatdate
from typing import Any, Literal

import httpx2
import openai
import pytest

from router import Cap, Decision, Model, Retries, Router, Task, TaskClass
from router.calls import BadAnswer, retry_after_of, transient, unanswered
from router.testing import Entry, LocalProvider, Rates, Reply, sequence
from stores import BudgetStore, MemoryStore, StoreUnavailable
from tests.support import START, STRONG, TestClock, chat, client_of, policy_of, settle_down

pytestmark = pytest.mark.anyio

PRICES = {"strong-model": Rates(input="2", output="10"), "cheap-model": Rates(input="0.20", output="1")}
ESTIMATE = STRONG.bound(input_tokens=9, output_tokens=100)  # of chat() on the strong model
SHORT = 0.3  # seconds that an attempt may stall: a real socket needs real time

Entrance = Literal["run", "stream"]
ENTRANCES: tuple[Entrance, ...] = ("run", "stream")


class Bench:
    """A router over a store that counts how often it is asked."""

    def __init__(self, router: Router, store: Counting, clock: TestClock) -> None:
        self.router = router
        self.store = store
        self.clock = clock

    async def sums(self, cap: str = "all") -> tuple[int, int]:
        """Return held and spent of a cap."""
        (bucket,) = [bucket for bucket in (await self.router.status()).buckets if bucket.cap == cap]
        return bucket.held, bucket.spent

    async def send(self, entrance: Entrance, task: Task) -> Decision:
        """Send a task, read its answer to the end, and return the decision."""
        if entrance == "run":
            return (await self.router.run(task)).decision
        stream = await self.router.stream(task)
        async for _chunk in stream:
            pass
        return stream.decision

    async def retry_waits(self) -> list[float]:
        """Return the waits between attempts that were begun so far; the renewing of leases sleeps in another way."""
        await settle_down()
        return [seconds for seconds in self.clock.slept if seconds != LEASE / 3]


LEASE = 6_000.0


class Counting:
    """A store that says what it was asked for, in front of a real one."""

    def __init__(self, inner: BudgetStore) -> None:
        self.inner = inner
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def call(*args: Any, **more: Any) -> Any:
            self.asked.append(name)
            return method(*args, **more)

        return call


@asynccontextmanager
async def bench(url: str, *caps: Cap, real_time: bool = False, **more: Any) -> AsyncIterator[Bench]:
    """Open a router; afterwards nothing is held, and each id was reserved and settled once."""
    clock = TestClock()
    inner = MemoryStore(clock=clock)
    store: Any = Counting(inner)
    more.setdefault("retries", Retries(attempts=3, per_attempt=5, base=0, cap=0))
    caps = caps or (Cap(usd=1, per="hour", admit_at=1, name="all"),)
    async with client_of(url) as client:
        policy = policy_of(client, *caps, lease=LEASE, **more)
        async with Router(policy, store, clock=None if real_time else clock) as router:
            yield Bench(router, store, clock)
        assert await inner.holds() == ()


def provider_of(*replies: Reply) -> LocalProvider:
    return LocalProvider(prices=PRICES, reply=sequence(*replies))


Canned = tuple[int, dict[str, str], bytes]


@asynccontextmanager
async def answering(*answers: Canned) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve these answers, one to each request in turn; the list grows by the head of each request."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        await reader.readexactly(size)
        status, headers, body = answers[len(heads)]
        heads.append(head)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {status} So\r\n{lines}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", heads


JSON = {"content-type": "application/json"}


def body(prompt: int, output: int, **more: Any) -> bytes:
    """Write a chat completion with its usage."""
    whole = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "strong-model",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }
    return json.dumps({**whole, **more}).encode()


def whole(prompt: int, output: int) -> Canned:
    """Answer as a whole: what a gateway without streams does to who asks for one, and what it bills."""
    return 200, JSON, body(prompt, output)


def streamed(prompt: int, output: int) -> Canned:
    """Answer as a stream, with its usage at the end."""
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "strong-model"}
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    parts: list[dict[str, Any]] = [
        {**chunk, "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]},
        {**chunk, "choices": [], "usage": usage},
    ]
    events = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
    return 200, {"content-type": "text/event-stream"}, events.encode()


def cost(prompt: int, output: int) -> int:
    """Return what the strong model bills, in nano-dollars."""
    return prompt * 2000 + output * 10_000


# T1: an attempt that nobody answers.


UNANSWERED: dict[str, Reply] = {
    "stalls before its first byte": Reply(stall="before_first_byte"),
    "stalls in the request": Reply(stall="before_request_read"),
    "cut after the request": Reply(cut="after_request_read"),
    "cut before the first byte": Reply(cut="before_first_byte"),
    "500": Reply(status=500),
    "502 in HTML": Reply(status=502, body="html"),
    "408": Reply(status=408),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("on_unanswered", ["release", "charge"])
@pytest.mark.parametrize("fault", UNANSWERED)
@pytest.mark.parametrize("billed", [False, True])
async def test_an_attempt_without_an_answer_then_one_with(
    entrance: Entrance, on_unanswered: str, fault: str, billed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """T1, T9: one reservation, one settle, one record; the first attempt is shown as unconfirmed, or charged as well."""
    caplog.set_level(logging.INFO, logger="budget_router")
    retries = Retries(attempts=3, per_attempt=SHORT, base=0, cap=0)
    with provider_of(replace(UNANSWERED[fault], billed=billed), Reply()) as provider:
        async with bench(provider.base_url, on_unanswered=on_unanswered, retries=retries) as b:
            decision = await b.send(entrance, chat())
            assert (decision.attempts, decision.unconfirmed) == (2, ESTIMATE)
            if fault.startswith("stalls"):
                await provider.wait_for(lambda p: p.requests[0].hung_up)
            answered = provider.requests[1].cost
            assert answered is not None
            charged = ESTIMATE if on_unanswered == "charge" else 0
            assert await b.sums() == (0, answered + charged)
            assert decision.actual == answered + charged
            if on_unanswered == "charge":
                assert answered + charged >= provider.spent()
            else:
                # What is not in the books is what is shown as unconfirmed.
                assert answered + decision.unconfirmed >= provider.spent()
            assert (await b.router.status()).unconfirmed * 10**9 == ESTIMATE
            assert [b.store.asked.count(name) for name in ("reserve", "settle")] == [1, 1]
    records = [record for record in caplog.records if hasattr(record, "budget_router")]
    assert [record.budget_router["attempts"] for record in records] == [2]


@pytest.mark.parametrize("on_unanswered", ["release", "charge"])
async def test_attempts_that_nobody_ever_answers_give_back_or_charge_each_of_them(on_unanswered: str) -> None:
    """T1: the budget of what was never answered goes back whole, or every attempt is charged and the cap still holds."""
    retries = Retries(attempts=3, per_attempt=SHORT, base=0, cap=0)
    with provider_of(Reply(stall="before_first_byte", billed=True)) as provider:
        async with bench(provider.base_url, on_unanswered=on_unanswered, retries=retries) as b:
            with pytest.raises(TimeoutError):
                await b.router.run(chat())
            await provider.wait_for(lambda p: len(p.requests) == 3 and all(e.hung_up for e in p.requests))
            held, spent = await b.sums()
            assert (held, spent) == (0, 3 * ESTIMATE if on_unanswered == "charge" else 0)
            assert (await b.router.status()).unconfirmed * 10**9 == 3 * ESTIMATE
            if on_unanswered == "charge":
                assert spent >= provider.spent() > 0


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("on_unanswered", ["release", "charge"])
async def test_what_was_never_sent_or_was_turned_away_is_not_unconfirmed(entrance: Entrance, on_unanswered: str) -> None:
    """H2, T1: 429 and 503 turn a request away, and where nobody listens nothing was sent."""
    with provider_of(Reply(status=429), Reply(status=503), Reply()) as provider:
        async with bench(provider.base_url, on_unanswered=on_unanswered) as b:
            decision = await b.send(entrance, chat())
            assert (decision.attempts, decision.unconfirmed) == (3, 0)
            assert await b.sums() == (0, provider.spent())
    async with bench(provider.base_url, on_unanswered=on_unanswered) as b:
        with pytest.raises(openai.APIConnectionError):
            await b.send(entrance, chat())
        assert await b.sums() == (0, 0)
        assert (await b.router.status()).unconfirmed == 0


# T2: attempts that are billed and fail all the same.


@pytest.mark.parametrize("fails", ["cannot be parsed", "an error with usage"])
async def test_usage_of_attempts_that_came_to_nothing_is_added_up_and_settled_once(fails: str) -> None:
    """T2: two attempts came back with usage and failed, the third answered: the sum of the three."""
    caps = [
        Cap(usd=1, per="hour", admit_at=1, name="all"),
        Cap(requests=5, per="hour", name="calls"),
        Cap(tokens=10_000, per="day", name="tokens"),
    ]
    status = 200 if fails == "cannot be parsed" else 500
    answers = [(status, JSON, body(8, 90)), (status, JSON, body(8, 80)), streamed(8, 7)]
    async with answering(*answers) as (url, heads), bench(url, *caps) as b:
        decision = await b.send("stream", chat())
        assert len(heads) == decision.attempts == 3
        assert await b.sums() == (0, cost(24, 177))
        assert await b.sums("calls") == (0, 1)
        assert await b.sums("tokens") == (0, 24 + 177)
        assert (decision.actual, decision.unconfirmed, decision.usage_source) == (cost(24, 177), 0, "provider")
        assert [b.store.asked.count(name) for name in ("reserve", "settle")] == [1, 1]


async def test_the_usage_of_a_result_is_that_of_all_of_its_attempts() -> None:
    """T2: a whole reply after two errors that were billed."""
    answers = [(500, JSON, body(8, 90)), (500, JSON, body(8, 80)), whole(8, 7)]
    async with answering(*answers) as (url, _), bench(url) as b:
        result = await b.router.run(chat())
        assert result.usage is not None
        assert (result.usage.input_tokens, result.usage.output_tokens) == (24, 177)
        assert result.decision.actual == cost(24, 177)


async def test_usage_of_attempts_that_all_failed_is_settled_with_the_error() -> None:
    """T2: all three came back with usage and could not be parsed: the sum of the three."""
    answers = [whole(8, output) for output in (90, 80, 70)]
    async with answering(*answers) as (url, _), bench(url) as b:
        with pytest.raises(BadAnswer):
            await b.router.stream(chat())
        assert await b.sums() == (0, cost(24, 240))
        status = await b.router.status()
        assert (status.failed, int(status.unconfirmed)) == (1, 0)
        assert int(status.spent * 10**9) == cost(24, 240)


# T3: an attempt that does not fit beside those that were billed.


@pytest.mark.parametrize(("room", "attempts"), [(1, 1), (1.95, 1), (2.1, 2), (3.1, 3)])
async def test_a_second_attempt_is_held_for_or_the_retrying_ends(room: float, attempts: int) -> None:
    """T3: every attempt is billed near its estimate; as many are made as the cap has room for, and it is never passed."""
    limit = round(room * ESTIMATE)
    cap = Cap(usd=f"{limit / 10**9:.9f}", per="hour", admit_at=1, name="all")
    answers = [whole(8, 100)] * 3
    async with answering(*answers) as (url, heads), bench(url, cap) as b:
        with pytest.raises(BadAnswer):
            await b.router.stream(chat())
        assert len(heads) == attempts
        assert await b.sums() == (0, attempts * cost(8, 100))
        assert attempts * cost(8, 100) <= limit


async def test_attempts_that_were_billed_nothing_ask_the_store_for_no_more() -> None:
    """T3: what is held covers the next attempt already."""
    with provider_of(Reply(status=503), Reply(status=503), Reply()) as provider:
        async with bench(provider.base_url) as b:
            assert (await b.send("run", chat())).attempts == 3
            assert [b.store.asked.count(name) for name in ("reserve", "extend", "settle")] == [1, 0, 1]


async def test_each_attempt_that_was_billed_is_held_for_by_a_step_of_its_own() -> None:
    """T3: before the third attempt two are billed and one more is held."""
    answers = [(500, JSON, body(8, 90)), (500, JSON, body(8, 80)), whole(8, 7)]
    held: list[int] = []
    async with answering(*answers) as (url, heads), bench(url) as b:

        async def extend(id: str, step: int, charges: Any) -> Any:
            verdict = await b.store.inner.extend(id, step, charges)
            held.append((await b.sums())[0])
            return verdict

        b.store.extend = extend  # type: ignore[attr-defined]
        await b.send("run", chat())
        assert len(heads) == 3
        assert held == [cost(8, 90) + ESTIMATE, cost(16, 170) + ESTIMATE]


async def test_where_the_store_is_away_when_the_next_attempt_needs_room_the_models_error_stands() -> None:
    """T3: a store that is down is no fault of the model, and no attempt is made that nobody holds for."""
    async with answering((500, JSON, body(8, 90)), whole(8, 7)) as (url, heads), bench(url) as b:

        async def extend(*_: Any) -> Any:
            raise StoreUnavailable("test", "it is down")

        b.store.extend = extend  # type: ignore[attr-defined]
        with pytest.raises(openai.InternalServerError):
            await b.router.run(chat())
        assert len(heads) == 1
        assert await b.sums() == (0, cost(8, 90))


@pytest.mark.parametrize(("room", "attempts"), [(1, 1), (1.9, 1), (2, 2), (3, 3)])
async def test_in_an_outage_the_next_attempt_needs_room_in_the_allowance(room: float, attempts: int) -> None:
    """T3: every attempt is billed near its estimate; the process counts them by itself, and asks no store."""
    outage = TaskClass("chat", when_store_down="open", allowance_usd=f"{round(room * ESTIMATE) / 10**9:.9f}")
    answers = [(500, JSON, body(8, 100))] * 3
    async with answering(*answers) as (url, heads), bench(url, classes=[outage]) as b:

        async def reserve(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("test", "it is down")

        b.store.reserve = reserve  # type: ignore[attr-defined]
        with pytest.raises(openai.InternalServerError):
            await b.router.run(chat())
        assert len(heads) == attempts
        assert "extend" not in b.store.asked
        assert await b.sums() == (0, attempts * cost(8, 100))


@pytest.mark.parametrize(("room", "attempts"), [(1.9, 1), (2, 2), (3, 3)])
async def test_attempts_that_may_have_been_billed_need_room_when_they_are_charged(room: float, attempts: int) -> None:
    """T3, T1: with "charge" the provider's own bill stays under the cap, whatever it did with what it never answered."""
    limit = round(room * ESTIMATE)
    cap = Cap(usd=f"{limit / 10**9:.9f}", per="hour", admit_at=1, name="all")
    with provider_of(Reply(status=500, billed=True)) as provider:
        async with bench(provider.base_url, cap, on_unanswered="charge") as b:
            with pytest.raises(openai.InternalServerError):
                await b.router.run(chat())
            assert len(provider.requests) == attempts
            held, spent = await b.sums()
            assert (held, spent) == (0, attempts * ESTIMATE)
            assert provider.spent() <= spent <= limit


async def test_the_next_attempt_may_take_what_lies_between_the_line_and_the_limit() -> None:
    """T3: `admit_at` keeps new tasks out; a call that is running is extended up to the limit."""
    limit = round(2.1 * ESTIMATE)
    cap = Cap(usd=f"{limit / 10**9:.9f}", per="hour", admit_at=0.5, name="all")
    answers = [whole(8, 100), streamed(8, 7)]
    async with answering(*answers) as (url, _), bench(url, cap) as b:
        decision = await b.send("stream", chat())
        assert (decision.attempts, decision.actual) == (2, cost(16, 107))
        assert (await b.router.run(chat())).served is False


async def test_while_the_next_attempt_runs_its_hold_is_beside_what_was_billed() -> None:
    """T3: what is held at each moment bounds what the provider can have billed by then."""
    with provider_of(Reply(status=500, billed=True), Reply(gate=True)) as provider:
        async with bench(provider.base_url, on_unanswered="charge") as b:
            running = asyncio.ensure_future(b.router.run(chat()))
            await provider.wait_for(lambda p: len(p.requests) == 2)
            assert await b.sums() == (2 * ESTIMATE, 0)
            provider.advance(1)
            decision = (await running).decision
            assert decision.actual == ESTIMATE + (provider.requests[1].cost or 0)
            assert await b.sums() == (0, decision.actual)


# T4: the fallback.


def _strong_fails(entry: Entry) -> Reply:
    return Reply(status=500, billed=True) if entry.model == "strong-model" else Reply()


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("on_unanswered", ["release", "charge"])
async def test_a_fallback_is_priced_as_cheap_and_what_strong_took_stays_on_strong(
    entrance: Entrance, on_unanswered: str
) -> None:
    """T4: the decision says both; each cap counts the tiers that it counts."""
    caps = [
        Cap(usd=1, per="hour", admit_at=1, name="all"),
        Cap(usd=1, per="hour", tiers={"strong"}, admit_at=1, name="strong"),
        Cap(usd=1, per="hour", tiers={"cheap"}, admit_at=1, name="cheap"),
    ]
    with LocalProvider(prices=PRICES, reply=_strong_fails) as provider:
        async with bench(provider.base_url, *caps, on_model_error="cheap", on_unanswered=on_unanswered) as b:
            decision = await b.send(entrance, chat())
            assert (decision.wanted, decision.tier, decision.model) == ("strong", "cheap", "cheap-model")
            assert (decision.reason, decision.error, decision.attempts) == ("fallback", "InternalServerError", 4)
            assert decision.downgraded
            cheap = provider.spent(model="cheap-model")
            strong = 3 * ESTIMATE if on_unanswered == "charge" else 0
            assert await b.sums("cheap") == (0, cheap)
            assert await b.sums("strong") == (0, strong)
            assert await b.sums() == (0, cheap + strong)
            assert (decision.actual, decision.unconfirmed) == (cheap + strong, 3 * ESTIMATE)
            if on_unanswered == "charge":
                assert cheap + strong >= provider.spent()
            status = await b.router.status()
            assert (status.served, status.downgraded, status.failed) == ({"cheap": 1}, {"default": 1}, 0)


@pytest.mark.parametrize("status", [400, 401, 402, 413])
async def test_a_fallback_follows_an_error_that_is_not_retried(status: int) -> None:
    """T4, T7: strong fails for good at its first attempt."""

    def answer(entry: Entry) -> Reply:
        return Reply(status=status) if entry.model == "strong-model" else Reply()

    with LocalProvider(prices=PRICES, reply=answer) as provider:
        async with bench(provider.base_url, on_model_error="cheap") as b:
            decision = await b.send("run", chat())
            assert (decision.reason, decision.attempts) == ("fallback", 2)
            assert await b.sums() == (0, provider.spent())


async def test_when_cheap_fails_as_well_its_error_stands_and_nothing_is_held() -> None:
    """T4, H1."""
    with provider_of(Reply(status=503)) as provider:
        async with bench(provider.base_url, on_model_error="cheap") as b:
            with pytest.raises(openai.InternalServerError):
                await b.router.run(chat())
            assert [entry.model for entry in provider.requests] == ["strong-model"] * 3 + ["cheap-model"] * 3
            assert await b.sums() == (0, 0)
            assert (await b.router.status()).failed == 1


async def test_a_task_that_wanted_cheap_has_nothing_to_fall_back_to() -> None:
    """T4: cheap is not tried a second time in the place of strong."""
    with provider_of(Reply(status=503)) as provider:
        async with bench(provider.base_url, rule="cheap", on_model_error="cheap") as b:
            with pytest.raises(openai.InternalServerError):
                await b.router.run(chat())
            assert [entry.model for entry in provider.requests] == ["cheap-model"] * 3


# T5: a refusal is no fault.


@pytest.mark.parametrize("entrance", ENTRANCES)
async def test_a_budget_refusal_is_never_retried(entrance: Entrance) -> None:
    """T5: one reserve, no wait, no request; a class that downgrades does so in that same reserve."""
    strong_only = Cap(usd="0.0001", per="hour", tiers={"strong"}, admit_at=1, name="all")
    with provider_of(Reply()) as provider:
        async with bench(provider.base_url, strong_only, retries=Retries(attempts=5, base=1, cap=9)) as b:
            refused: Any = await (b.router.run(chat()) if entrance == "run" else b.router.stream(chat()))
            assert (refused.served, refused.decision.reason) == (False, "cap")
            assert (b.store.asked, await b.retry_waits(), provider.requests) == (["reserve"], [], [])
        classes = [TaskClass("default", when_expired="downgrade")]
        async with bench(provider.base_url, strong_only, classes=classes) as b:
            decision = await b.send(entrance, chat())
            assert (decision.tier, decision.reason) == ("cheap", "downgrade")
            assert b.store.asked.count("reserve") == 1
            assert await b.retry_waits() == []


# T6: Retry-After.


def date_in(seconds: float) -> str:
    """Write a date that lies so far from the test's now as a header does."""
    return formatdate(START / 1000 + seconds, usegmt=True)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("retry_after", [7, "7", "7.0", date_in(7)])
@pytest.mark.parametrize("status", [429, 503])
async def test_what_the_provider_asks_to_wait_is_waited(entrance: Entrance, retry_after: Any, status: int) -> None:
    """T6: in seconds or as a date; not a moment less, and no back-off of ours on top."""
    with provider_of(Reply(status=status, retry_after=retry_after), Reply()) as provider:
        async with bench(provider.base_url, retries=Retries(attempts=3, base=1, cap=2)) as b:
            running = asyncio.ensure_future(b.send(entrance, chat()))
            await a_wait(b, provider)
            assert await b.retry_waits() == [7.0]
            await b.clock.advance(6.9)
            assert len(provider.requests) == 1
            await b.clock.advance(0.2)
            assert (await running).attempts == 2
            assert await b.sums() == (0, provider.spent())


async def a_wait(b: Bench, provider: LocalProvider, requests: int = 1) -> None:
    """Wait until the router waits after its n-th attempt."""
    await provider.wait_for(lambda p: len(p.requests) == requests and p.requests[-1].finished)
    async with asyncio.timeout(5):
        while len(await b.retry_waits()) < requests:
            await asyncio.sleep(0.001)  # the answer is in the socket


@pytest.mark.parametrize("deadline", [None, 60, 5])
@pytest.mark.parametrize("retry_after", [100_000, "1e300", date_in(90), date_in(10**8), "Fri, 31 Dec 9999 23:59:59 GMT"])
async def test_a_wait_beyond_the_deadline_is_not_begun(retry_after: Any, deadline: float | None) -> None:
    """T6: it ends with the provider's error at once, and the budget goes back."""
    with provider_of(Reply(status=429, retry_after=retry_after), Reply()) as provider:
        async with bench(provider.base_url) as b:
            with pytest.raises(openai.RateLimitError):
                await b.router.run(chat(deadline=deadline))
            assert await b.retry_waits() == []
            assert len(provider.requests) == 1
            assert await b.sums() == (0, 0)


@pytest.mark.parametrize(
    "retry_after", ["-5", "soon", "", "nan", "inf", "-inf", date_in(-100), "Mon, 99 Foo 2026 99:99:99 GMT"]
)
async def test_a_retry_after_that_makes_no_sense_leaves_the_back_off(retry_after: str) -> None:
    """T6: absurd values are as good as none."""
    with provider_of(Reply(status=429, retry_after=retry_after), Reply()) as provider:
        async with bench(provider.base_url, retries=Retries(attempts=3, base=1, cap=2)) as b:
            running = asyncio.ensure_future(b.send("run", chat()))
            await a_wait(b, provider)
            (wait,) = await b.retry_waits()
            assert 1 <= wait <= 2
            await b.clock.advance(2)
            assert (await running).attempts == 2


async def test_milliseconds_are_understood_and_a_provider_may_forbid_the_retry() -> None:
    """T6, T7: the headers that OpenAI's own client knows."""
    answers: list[Canned] = [(429, {"retry-after-ms": "2500", "retry-after": "7"}, b"{}"), (200, JSON, body(8, 7))]
    async with answering(*answers) as (url, heads), bench(url) as b:
        running = asyncio.ensure_future(b.send("run", chat()))
        async with asyncio.timeout(5):
            while not await b.retry_waits():
                await asyncio.sleep(0.001)
        assert await b.retry_waits() == [2.5]
        await b.clock.advance(2.5)
        assert (await running).attempts == 2
    async with answering((503, {"x-should-retry": "false"}, b"{}")) as (url, heads), bench(url) as b:
        with pytest.raises(openai.InternalServerError):
            await b.send("run", chat())
        assert len(heads) == 1


# Limits of time.


async def test_the_back_off_doubles_up_to_its_cap() -> None:
    """T6: where the provider says nothing."""
    with provider_of(Reply(status=503)) as provider:
        async with bench(provider.base_url, retries=Retries(attempts=5, base=1, cap=5)) as b:
            running = asyncio.ensure_future(b.send("run", chat()))
            for attempt in range(1, 5):
                await a_wait(b, provider, attempt)
                await b.clock.advance(5)
            with pytest.raises(openai.InternalServerError):
                await running
            waits = await b.retry_waits()
            least = [1, 2, 4, 5]
            assert all(low <= wait <= min(low + 1, 5) for low, wait in zip(least, waits, strict=True))


@pytest.mark.parametrize(
    ("total", "deadline", "attempts"),
    # Waits of 10 s each: the smaller of the two limits says how many there may be.
    [(25, None, 3), (25, 12, 2), (12, 25, 2), (None, 25, 3), (None, 10, 1), (100, 100, 5), (10, None, 1)],
)
async def test_the_total_limit_and_the_tasks_deadline_end_the_retrying(
    total: float | None, deadline: float | None, attempts: int
) -> None:
    """T6: the task's deadline wins over the policy's limit where it is shorter."""
    with provider_of(Reply(status=503, retry_after=10)) as provider:
        async with bench(provider.base_url, retries=Retries(attempts=5, total=total, base=0, cap=0)) as b:
            running = asyncio.ensure_future(b.send("run", chat(deadline=deadline)))
            for attempt in range(1, attempts):
                await a_wait(b, provider, attempt)
                await b.clock.advance(10)
            with pytest.raises(openai.InternalServerError):
                await running
            assert len(provider.requests) == attempts
            assert await b.sums() == (0, 0)


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    ("limits", "deadline", "attempts"),
    [
        ({"per_attempt": SHORT}, None, 3),
        ({"per_attempt": 60, "total": SHORT}, None, 1),
        ({"per_attempt": 60}, SHORT, 1),
        ({"per_attempt": 60, "total": 60}, SHORT, 1),
        ({"per_attempt": SHORT, "total": 2.5 * SHORT}, None, 3),
        ({"per_attempt": SHORT}, 1.5 * SHORT, 2),
    ],
)
async def test_an_attempt_that_stalls_is_ended_by_the_first_limit(
    entrance: Entrance, limits: dict[str, float], deadline: float | None, attempts: int
) -> None:
    """T1, H1: per attempt, in all, or the task's deadline. (In real time: the provider stalls on a real socket.)"""
    with provider_of(Reply(stall="before_first_byte")) as provider:
        retries = Retries(attempts=3, base=0, cap=0, **limits)
        cap = Cap(usd=1, per=None, admit_at=1, name="all")
        async with bench(provider.base_url, cap, real_time=True, retries=retries) as b:
            with pytest.raises(TimeoutError):
                await b.send(entrance, chat(deadline=deadline))
            await provider.wait_for(lambda p: all(entry.hung_up for entry in p.requests))
            assert len(provider.requests) == attempts
            assert await b.sums() == (0, 0)
            assert (await b.router.status()).unconfirmed * 10**9 == attempts * ESTIMATE


# T7: what is not transient.


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize(
    "reply",
    [
        *(Reply(status=status) for status in (400, 401, 402, 403, 404, 413, 422)),
        Reply(status=429, code="insufficient_quota"),
        Reply(status=429, code="insufficient_quota", retry_after=1),
    ],
    ids=lambda reply: f"{reply.status} {reply.code or ''}",
)
async def test_what_trying_again_cannot_help_is_not_tried_again(entrance: Entrance, reply: Reply) -> None:
    """T7."""
    with provider_of(reply, Reply()) as provider:
        async with bench(provider.base_url, on_unanswered="charge") as b:
            with pytest.raises(openai.APIStatusError):
                await b.send(entrance, chat())
            assert len(provider.requests) == 1
            assert await b.sums() == (0, 0)
            assert await b.retry_waits() == []
            assert (await b.router.status()).unconfirmed == 0


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
async def test_what_trying_again_may_help_is_tried_again(entrance: Entrance, status: int) -> None:
    """T1, T9."""
    with provider_of(Reply(status=status), Reply()) as provider:
        async with bench(provider.base_url) as b:
            decision = await b.send(entrance, chat())
            assert (decision.attempts, decision.outcome) == (2, "served")
            assert await b.sums() == (0, provider.spent())


# T8: nobody else retries.


def answered(status: int, body: object = None, **headers: str) -> openai.APIStatusError:
    """Make the error that the SDK raises for an answer."""
    request = httpx2.Request("POST", "http://127.0.0.1/v1/chat/completions")
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return openai.APIStatusError("no", response=httpx2.Response(status, headers=names, request=request), body=body)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry_after": "Sat, 01 Aug 2026 00:00:07 GMT"}, 7),
        ({"retry_after": "Sat, 01 Aug 2026 00:00:07 -0000"}, 7),
        ({"retry_after": "Sat, 01 Aug 2026 02:00:07 +0200"}, 7),
        ({"retry_after_ms": "soon", "retry_after": "3"}, 3),
        ({"retry_after_ms": "-1", "retry_after": "3"}, 3),
        ({"retry_after_ms": "250", "retry_after": "3"}, 0.25),
        ({"retry_after": "soon"}, None),
        ({}, None),
    ],
)
def test_a_wait_is_read_in_milliseconds_in_seconds_or_as_a_date(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_of(answered(429, **headers), now=START) == seconds


@pytest.mark.parametrize(
    "body",
    [
        {"code": "insufficient_quota"},
        {"type": "insufficient_quota", "code": None},
        {"error": {"code": "insufficient_quota"}},
        {"error": {"type": "insufficient_quota"}},
    ],
)
def test_an_account_without_credit_is_seen_wherever_it_is_written(body: object) -> None:
    assert transient(answered(429, body)) is False


@pytest.mark.parametrize("body", [None, "insufficient_quota", {"error": "insufficient_quota"}, {"code": "rate_limit"}, {}])
def test_other_answers_of_too_many_requests_may_be_tried_again(body: object) -> None:
    assert transient(answered(429, body)) is True


def test_which_answers_may_hide_that_a_model_did_its_work() -> None:
    statuses = (400, 401, 404, 408, 409, 429, 500, 502, 503, 504, 528, 529, 530)
    assert [status for status in statuses if unanswered(answered(status))] == [408, 500, 502, 504, 528, 530]


@pytest.mark.parametrize("kind", ["chat", "response", "embedding"])
@pytest.mark.parametrize("entrance", ENTRANCES)
async def test_the_provider_sees_the_routers_attempts_alone(kind: str, entrance: Entrance) -> None:
    """T8: the client's `max_retries` is 5, and the request asks for 5 too."""
    if (kind, entrance) == ("embedding", "stream"):
        return  # an embedding has no stream
    with provider_of(Reply(status=503)) as provider:
        async with client_of(provider.base_url) as client:
            assert client.max_retries == 5
            model = Model("strong-model", client=client, price=STRONG, encoding="o200k_base")
            async with bench(provider.base_url, embedding=model) as b:
                task = {
                    "chat": chat(max_retries=5),
                    "response": Task.response(input="hello", max_output_tokens=100, max_retries=5),
                    "embedding": Task.embedding(input="hello", max_retries=5),
                }[kind]
                with pytest.raises(openai.InternalServerError):
                    await b.send(entrance, task)
                assert len(provider.requests) == 3
                assert {entry.headers["x-stainless-retry-count"] for entry in provider.requests} == {"0"}
                assert [entry.body.get("max_retries") for entry in provider.requests] == [None] * 3
                assert client.max_retries == 5


async def test_tasks_that_retry_at_the_same_time_do_not_share_their_count() -> None:
    """T9: twenty tasks, each of which fails twice, all at once."""
    seen: dict[str, int] = {}

    def answer(entry: Entry) -> Reply:
        prompt = str(entry.body["messages"])
        seen[prompt] = seen.get(prompt, 0) + 1
        return Reply(status=503) if seen[prompt] < 3 else Reply()

    with LocalProvider(prices=PRICES, reply=answer) as provider:
        async with bench(provider.base_url) as b:
            results = await asyncio.gather(*(b.router.run(chat(f"number {number}")) for number in range(20)))
            assert {result.decision.attempts for result in results} == {3}
            assert len(provider.requests) == 60
            assert await b.sums() == (0, provider.spent())
            assert (await b.router.status()).served == {"strong": 20}
