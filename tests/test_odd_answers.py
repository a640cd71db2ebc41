"""Requests and answers that are not what they should be: the books stay right, and nobody gets a traceback of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from router import Cap, Model, PolicyError, Retries, Router, Task, TaskClass, TaskError, Usage
from router.calls import BadAnswer
from router.charges import Amounts, charges_of, slots_of
from router.estimate import Estimator
from router.tally import Tally
from router.task import Kind
from router.testing import LocalProvider, Rates, Reply, sequence
from stores import MAX_AMOUNT, MemoryStore, SQLiteStore
from tests.support import STRONG, TestClock, chat, client_of, policy_of, settle_down

pytestmark = pytest.mark.anyio

PRICES = {"strong-model": Rates(input="2", output="10"), "cheap-model": Rates(input="0.20", output="1")}


@pytest.fixture
def provider(request: pytest.FixtureRequest) -> Iterator[LocalProvider]:
    reply = getattr(request, "param", None)
    with LocalProvider(prices=PRICES, reply=sequence(*reply) if isinstance(reply, tuple) else reply) as running:
        yield running


@asynccontextmanager
async def canned(body: bytes, content_type: str, *, length: int | None = None) -> AsyncIterator[str]:
    """Serve one and the same answer to every request."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        await reader.readexactly(size)
        told = len(body) if length is None else length
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {told}\r\n".encode())
        writer.write(b"connection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"


@asynccontextmanager
async def router_at(url: str, **more: Any) -> AsyncIterator[tuple[Router, TestClock]]:
    clock = TestClock()
    store = more.pop("store", None) or MemoryStore(clock=clock)
    more.setdefault("retries", Retries(attempts=2, per_attempt=5, base=0, cap=0))
    caps = more.pop("caps", None) or [Cap(usd=1000, per="hour", admit_at=1, name="all")]
    async with client_of(url) as client, Router(policy_of(client, *caps, **more), store, clock=clock) as router:
        yield router, clock
    if isinstance(store, MemoryStore):
        assert [hold for hold in await store.holds() if hold.state == "held"] == []
    await store.aclose()


async def sums(router: Router) -> tuple[int, int]:
    (bucket,) = (await router.status()).buckets
    return bucket.held, bucket.spent


def chat_body(**more: Any) -> bytes:
    whole = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "strong-model",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10},
    }
    return json.dumps({**whole, **more}).encode()


# What a request may not do.


@pytest.mark.parametrize("key", ["model", "stream"])
def test_what_the_router_decides_may_not_be_written_over_it(key: str) -> None:
    with pytest.raises(TaskError, match=f"leave {key} out"):
        Task.chat(messages=[], extra_body={key: "x"})


def test_a_response_in_the_background_and_odd_stream_options_are_refused() -> None:
    with pytest.raises(TaskError, match="background"):
        Task.response(input="x", background=True)
    with pytest.raises(TaskError, match="stream_options"):
        Task.chat(messages=[], stream_options=5)


def test_a_wrong_limit_is_not_quoted() -> None:
    from router.estimate import output_limit

    with pytest.raises(TaskError) as caught:
        output_limit("chat", {"max_tokens": "my secret prompt"})
    assert "secret" not in str(caught.value)


async def test_messages_that_grow_while_the_task_waits_are_not_sent(provider: LocalProvider) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "short"}]}]
    task = Task.chat(messages=messages, max_completion_tokens=10)
    messages[0]["content"].append({"type": "text", "text": "long " * 1000})  # type: ignore[attr-defined]
    messages.append({"role": "user", "content": "long " * 1000})
    async with router_at(provider.base_url) as (router, _):
        result = await router.run(task)
        assert provider.requests[0].prompt_tokens < 20
        assert (result.decision.actual or 0) <= result.decision.estimate


async def test_a_time_out_of_the_tasks_own_is_taken(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        assert (await router.run(chat(timeout=3))).served
        async for _chunk in await router.stream(chat(timeout=3)):
            pass
        assert (await sums(router)) == (0, provider.spent())


async def test_amounts_that_nobody_can_count_are_refused_and_no_error(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        huge: list[dict[str, Any]] = [{"max_completion_tokens": 10**15}, {"n": 10**14}]
        for more in huge:
            result = await router.run(Task.chat(messages=[{"role": "user", "content": "hi"}], **more))
            assert (result.served, result.decision.kind) == (False, "never")
        slots = slots_of(router.policy.caps, {}, now=0, tree=None, admit_at=None)
        assert charges_of(slots, {"strong": Amounts(usd=10**30)})[0].amount == MAX_AMOUNT


async def test_a_reported_usage_beyond_counting_is_a_debt(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        async with router.admit(chat()) as admission:
            admission.settle(Usage(input_tokens=10**14))
        assert (await sums(router)) == (0, MAX_AMOUNT)
        assert (await router.run(chat())).served is False


async def test_an_admission_may_be_settled_from_a_thread(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        async with router.admit(chat()) as admission:
            await asyncio.to_thread(admission.settle, Usage(input_tokens=5, output_tokens=5))
        assert admission.decision.usage_source == "reported"
        assert (await sums(router)) == (0, 5 * 2000 + 5 * 10_000)


async def test_an_admission_is_entered_once(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        admission = router.admit(chat())
        entered = await asyncio.gather(admission.__aenter__(), admission.__aenter__(), return_exceptions=True)
        assert [type(answer) for answer in entered].count(RuntimeError) == 1
        admission.release()
        await settle_down()
        assert (await sums(router)) == (0, 0)


# Whole replies.


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": 5},
        {"choices": None},
        {"choices": [None, 7]},
        {"choices": [{"message": {"tool_calls": 7}}]},
        {"model": {"not": "a name"}},
    ],
)
@pytest.mark.parametrize("price_as", ["policy", "served"])
async def test_an_odd_reply_is_settled_at_its_usage(odd: dict[str, Any], price_as: str) -> None:
    async with canned(chat_body(**odd), "application/json") as url, router_at(url, price_as=price_as) as (router, _):
        await router.run(chat())
        assert (await sums(router)) == (0, 8 * 2000 + 2 * 10_000)


@pytest.mark.parametrize("body", [b"[" * 200_000, b"{", b"", b"\xff\xfe"])
async def test_garbage_instead_of_json_is_a_bad_answer(body: bytes) -> None:
    async with canned(body, "application/json") as url, router_at(url) as (router, _):
        with pytest.raises(BadAnswer, match="could not be read"):
            await router.run(chat())
        assert (await sums(router)) == (0, 0)
        assert (await router.status()).unconfirmed > 0


async def test_html_instead_of_json_is_a_bad_answer() -> None:
    async with canned(b"<html>gateway</html>", "text/html") as url, router_at(url) as (router, _):
        with pytest.raises(BadAnswer, match="not JSON"):
            await router.run(chat())


@pytest.mark.parametrize("provider", [Reply(tokens=6, usage="negative")], indirect=True)
async def test_negative_usage_counts_as_none(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        result = await router.run(chat("word " * 300))
        async for _chunk in await router.stream(chat("word " * 300)):
            pass
        held, spent = await sums(router)
        assert result.decision.usage_source == "counted"
        assert held == 0
        assert provider.spent() <= spent <= provider.spent() * 1.02


@pytest.mark.parametrize("provider", [Reply(tokens=1, usage="missing")], indirect=True)
async def test_each_of_many_choices_is_counted_by_itself(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        for work in (router.run, router.stream):
            answer: Any = await work(chat("word " * 300, n=40))
            if work == router.stream:
                async for _chunk in answer:
                    pass
        held, spent = await sums(router)
        assert held == 0
        assert provider.spent() <= spent <= provider.spent() * 1.02


@pytest.mark.parametrize("provider", [Reply(tokens=3, usage="missing")], indirect=True)
async def test_without_usage_many_short_messages_are_counted_as_closely_as_one_long_one(provider: LocalProvider) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "ok"},
        {"role": "user", "content": [{"type": "text", "text": "ok"}]},
    ] * 50
    async with router_at(provider.base_url) as (router, _):
        await router.run(Task.chat(messages=messages, max_completion_tokens=10))
        held, spent = await sums(router)
        assert held == 0
        assert provider.spent() <= spent <= provider.spent() * 1.02


# Streams.


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8"])
async def test_a_stream_that_is_answered_as_a_whole_is_a_bad_answer_and_billed(content_type: str) -> None:
    async with canned(chat_body(), content_type) as url, router_at(url) as (router, _):
        with pytest.raises(BadAnswer, match="no stream"):
            await router.stream(chat())
        assert (await sums(router)) == (0, 2 * (8 * 2000 + 2 * 10_000))


@pytest.mark.parametrize("data", ["null", "5", '{"choices":5}', '{"choices":[5]}', "[]", '{"choices":[{"delta":5}]}'])
@pytest.mark.parametrize("kind", ["chat", "response"])
async def test_odd_chunks_never_leak_the_hold(data: str, kind: str) -> None:
    body = f"data: {data}\n\ndata: [DONE]\n\n".encode()
    task = chat("word") if kind == "chat" else Task.response(input="word", max_output_tokens=5)
    async with canned(body, "text/event-stream") as url, router_at(url) as (router, _):
        stream = await router.stream(task)
        seen = []
        try:
            while True:
                seen.append(await anext(stream))
        except (StopAsyncIteration, openai.OpenAIError, TypeError, AttributeError):
            pass  # what the SDK itself makes of such a chunk is its own affair
        assert stream.decision.outcome != "open"
        held, spent = await sums(router)
        assert held == 0
        assert spent > 0


@pytest.mark.parametrize("odd", [True, False])
async def test_what_could_not_be_read_is_noted(odd: bool) -> None:
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "strong-model"}
    parts = [{**chunk, "choices": 5 if odd else []}, {**chunk, "choices": [{"index": 0, "delta": {"content": "hi"}}]}]
    usage = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
    end = {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}
    body = "".join(f"data: {json.dumps(part)}\n\n" for part in (*parts, end)) + "data: [DONE]\n\n"
    async with canned(body.encode(), "text/event-stream") as url, router_at(url) as (router, _):
        stream = await router.stream(chat())
        async for _chunk in stream:
            pass
        assert stream.decision.notes == (("the provider sent something that could not be read",) if odd else ())
        assert (await sums(router)) == (0, 8 * 2000 + 10_000)


@pytest.mark.parametrize("provider", [Reply(tokens=3, usage="missing")], indirect=True)
@pytest.mark.parametrize(("vocabulary", "how"), [(True, ""), (False, ", as bytes")])
async def test_what_was_counted_without_usage_is_noted_and_how(provider: LocalProvider, vocabulary: bool, how: str) -> None:
    def none(name: str) -> Any:
        raise OSError(f"no {name} on this disk")

    estimator = Estimator() if vocabulary else Estimator(load=none)
    async with client_of(provider.base_url) as client:
        async with Router(policy_of(client), MemoryStore(), estimator=estimator) as router:
            decision = (await router.run(chat())).decision
        assert decision.notes == (f"the provider sent no usage: tokens were counted{how}",)
        assert decision.usage_source == "counted"


async def test_usage_without_a_finish_reason_counts_at_the_end() -> None:
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "strong-model"}
    delta = {**chunk, "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}
    usage = {**chunk, "choices": [], "usage": {"prompt_tokens": 800, "completion_tokens": 50, "total_tokens": 850}}
    body = "".join(f"data: {json.dumps(part)}\n\n" for part in (delta, usage)) + "data: [DONE]\n\n"
    async with canned(body.encode(), "text/event-stream") as url, router_at(url) as (router, _):
        async for _chunk in await router.stream(chat()):
            pass
        assert (await sums(router)) == (0, 800 * 2000 + 50 * 10_000)


@pytest.mark.parametrize("provider", [Reply(tokens=10, usage="cumulated", gate=True)], indirect=True)
async def test_cumulated_usage_of_a_stream_that_is_left_says_what_the_input_was(provider: LocalProvider) -> None:
    async with client_of(provider.base_url) as client:
        model = Model("strong-model", client=client, price=STRONG, encoding="o200k_base", context_window=400_000)
        image = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
        unseen = {"type": "file", "file": {"file_id": "file-1"}}
        task = Task.chat(messages=[{"role": "user", "content": [image, unseen]}], max_completion_tokens=100)
        async with router_at(provider.base_url, strong=model) as (router, _):
            stream = await router.stream(task)
            assert stream.decision.estimate > 400_000 * 2000
            provider.advance(4)
            for _ in range(4):
                await anext(stream)
            await stream.aclose()
            await provider.wait_for(lambda p: p.requests[0].hung_up)
            assert (await sums(router)) == (0, provider.spent())


@pytest.mark.parametrize("provider", [Reply(tokens=10, gate=True)], indirect=True)
async def test_a_stream_closed_from_another_task_simply_ends_for_its_reader(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        stream = await router.stream(chat())
        provider.advance(2)
        seen: list[Any] = []

        async def read() -> None:
            async for chunk in stream:
                seen.append(chunk)  # noqa: PERF401 (looked at while it grows)

        reader = asyncio.ensure_future(read())
        while len(seen) < 2:
            await asyncio.sleep(0)
        await stream.aclose()
        await reader
        assert len(seen) == 2
        assert (await sums(router))[0] == 0


@pytest.mark.parametrize("provider", [Reply(tokens=10, stall="after_chunk:2")], indirect=True)
async def test_a_deadline_ends_a_stream(provider: LocalProvider) -> None:
    async with client_of(provider.base_url) as client:
        store = MemoryStore()
        policy = policy_of(client, Cap(usd=1, per=None, admit_at=1, name="all"))
        async with Router(policy, store) as router:
            with pytest.raises(TimeoutError):
                async for _chunk in await router.stream(chat(deadline=0.5)):
                    pass
            held, spent = await sums(router)
            assert held == 0
            assert spent > 0


# Time and retries.


@pytest.mark.parametrize(
    "provider", [Reply(status=429, retry_after="1e300"), Reply(status=429, retry_after=100_000)], indirect=True
)
async def test_an_absurd_wait_is_not_waited(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, clock):
        with pytest.raises(openai.RateLimitError):
            await router.run(chat())
        assert max(clock.slept) <= 20  # the renewal of leases alone
        assert len(provider.requests) == 1


@pytest.mark.parametrize("provider", [Reply()], indirect=True)
async def test_without_time_nothing_is_sent_and_nothing_charged(provider: LocalProvider) -> None:
    async with router_at(provider.base_url, on_unanswered="charge", on_model_error="cheap") as (router, _):
        with pytest.raises(TimeoutError):
            await router.run(chat(deadline=0))
        assert provider.requests == []
        assert (await sums(router)) == (0, 0)
        assert (await router.status()).unconfirmed == 0


@pytest.mark.parametrize("status", [500, 502, 503, 529, 408, 429])
@pytest.mark.parametrize("on_unanswered", ["release", "charge"])
async def test_an_error_that_may_have_been_billed_is_unconfirmed(status: int, on_unanswered: str) -> None:
    with LocalProvider(prices=PRICES, reply=Reply(status=status, billed=True)) as provider:
        async with router_at(provider.base_url, on_unanswered=on_unanswered) as (router, _):
            with pytest.raises(openai.APIStatusError):
                await router.run(chat())
            unsure = status in (500, 502, 408)
            assert ((await router.status()).unconfirmed > 0) == unsure
            held, spent = await sums(router)
            assert held == 0
            if on_unanswered == "charge" and unsure:
                assert spent >= provider.spent() > 0
            else:
                assert spent == 0


# Bounds and ends.


async def test_max_open_bounds_what_reserves_at_the_same_moment(provider: LocalProvider, tmp_path: Any) -> None:
    store = SQLiteStore(tmp_path / "b.sqlite", clock=TestClock())
    async with router_at(provider.base_url, store=store, max_open=5) as (router, _):
        results = await asyncio.gather(*(router.run(chat()) for _ in range(50)))
        assert sum(result.served for result in results) == 5
        assert {result.decision.reason for result in results if not result.served} == {"full"}


async def test_a_shorter_lease_renews_what_is_open_in_time() -> None:
    with LocalProvider(prices=PRICES, reply=Reply(gate=True)) as provider:
        async with router_at(provider.base_url, lease=600) as (router, clock):
            running = [asyncio.ensure_future(router.run(chat()))]
            await provider.wait_for(lambda p: len(p.requests) == 1)
            router.policy = policy_of(router.policy.strong.client, *router.policy.caps, lease=6)
            running.append(asyncio.ensure_future(router.run(chat())))
            await provider.wait_for(lambda p: len(p.requests) == 2)
            for _ in range(8):
                await clock.advance(2)
            assert [hold.state for hold in await router._store.holds()] == ["held", "held"]
            provider.advance(2)
            await asyncio.gather(*running)


async def test_aclose_settles_the_streams_that_are_open(provider: LocalProvider) -> None:
    with LocalProvider(prices=PRICES, reply=Reply(tokens=50, gate=True)) as gated:
        async with router_at(gated.base_url) as (router, _):
            stream = await router.stream(chat("word " * 200))
            gated.advance(3)
            for _ in range(3):
                await anext(stream)
            await router.aclose()
            await router.aclose()
            assert stream.decision.outcome == "left"
            await gated.wait_for(lambda p: p.requests[0].hung_up)
            held, spent = await sums(router)
            assert held == 0
            assert gated.spent() <= spent <= gated.spent() * 1.02


async def test_a_reserve_that_is_answered_after_aclose_is_given_back(provider: LocalProvider, tmp_path: Any) -> None:
    store = SQLiteStore(tmp_path / "b.sqlite", clock=TestClock())
    async with router_at(provider.base_url, store=store) as (router, _):
        running = [asyncio.ensure_future(router.run(chat())) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await router.aclose()
        results = await asyncio.gather(*running)
        assert {r.decision.reason for r in results if not r.served} <= {"closed"}
        while (await store.holds()) != ():
            await asyncio.sleep(0)
        assert (await sums(router))[0] == 0


async def test_refusals_in_an_outage_do_not_fill_the_backlog(provider: LocalProvider) -> None:
    from stores import StoreUnavailable
    from tests.test_router import Faulty

    faulty: Any = Faulty(MemoryStore(clock=TestClock()))
    classes = [TaskClass("closed"), TaskClass("open", when_store_down="open", allowance_usd=1)]
    async with router_at(provider.base_url, store=faulty, max_open=5, classes=classes, default_class="closed") as (
        router,
        clock,
    ):
        faulty.fail = lambda _: StoreUnavailable("memory", "it is down")
        for _ in range(20):
            assert (await router.run(chat())).decision.reason == "store_unavailable"
        assert (await router.run(chat(task_class="open"))).decision.reason == "store_open"
        faulty.fail = lambda _: None
        await clock.advance(3)
        await clock.advance(3)
        assert (await router.status()).backlog == 0


async def test_a_router_that_is_dropped_leaves_no_task(provider: LocalProvider) -> None:
    async with client_of(provider.base_url) as client:
        clock = TestClock()
        router = Router(policy_of(client), MemoryStore(clock=clock), clock=clock)
        await router.run(chat())
        del router
        for _ in range(2):
            await clock.advance(60)
        assert [task for task in asyncio.all_tasks() if "budget-router" in task.get_name()] == []


def test_a_router_in_a_second_loop_is_one_clear_error(provider: LocalProvider) -> None:
    store = MemoryStore()

    async def once(router: Router | None = None) -> Router:
        async with client_of(provider.base_url) as client:
            router = Router(policy_of(client), store) if router is None else router
            await router.run(chat())
            return router

    router = asyncio.run(once())
    with pytest.raises(RuntimeError, match="one router per loop"):
        asyncio.run(once(router))
    with pytest.raises(RuntimeError, match="close it there"):
        asyncio.run(router.aclose())


async def test_status_says_what_is_wrong_with_the_store_before_any_bucket_was_used(provider: LocalProvider) -> None:
    from stores import RedisStore

    async with client_of(provider.base_url) as client:
        policy = policy_of(client, Cap(usd=1, per="day", scope="user"))
        store = RedisStore("redis://127.0.0.1:9")
        async with Router(policy, store) as router:
            status = await router.status()
            assert "the redis store is unavailable" in status.store
            assert status.buckets == ()
        await store.aclose()


async def test_status_says_that_the_store_rolled_back(provider: LocalProvider, tmp_path: Any) -> None:
    path = tmp_path / "b.sqlite"
    async with router_at(provider.base_url, store=SQLiteStore(path, clock=TestClock())) as (router, _):
        await router.run(chat())
        path.unlink()
        assert (await router.run(chat())).decision.reason == "store_rolled_back"
        assert "rolled back" in (await router.status()).store
        await router._store.accept()
        assert (await router.status()).store == "ok"
        assert (await router.run(chat())).served


@pytest.mark.parametrize("store", ["budget.sqlite", SQLiteStore, MemoryStore, None, 3])
def test_what_is_no_store_is_refused_when_the_router_is_built(store: Any) -> None:
    with pytest.raises(PolicyError, match="must be a store"):
        Router(policy_of(None), store)


def test_what_is_no_policy_and_no_client_of_ours_is_refused_when_the_router_is_built() -> None:
    with pytest.raises(PolicyError, match="must be a Policy"):
        Router(None, MemoryStore())  # type: ignore[arg-type]
    with openai.OpenAI(api_key="sk-x") as client:
        wrong = Model("strong-model", client=client, price=STRONG)  # type: ignore[arg-type]
        with pytest.raises(PolicyError, match=r"must be an openai\.AsyncOpenAI, not OpenAI"):
            Router(policy_of(None, strong=wrong), MemoryStore())


async def test_what_is_no_task_is_a_clear_error(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        odd: Any = "say hello"
        for entry in (router.run, router.stream):
            with pytest.raises(TaskError, match="takes a task"):
                await entry(odd)
        with pytest.raises(TaskError, match="takes a task"):
            await router.admit(odd).__aenter__()


async def test_what_was_released_was_not_served(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        async with router.admit(chat()) as admission:
            admission.release()
        status = await router.status()
        assert (status.served, status.failed) == ({}, 0)
        assert str(admission.decision).startswith("released: strong-model was admitted and not used")


@pytest.mark.parametrize("provider", [Reply(tokens=50, gate=True)], indirect=True)
async def test_what_a_stream_that_was_left_may_cost_beyond_what_came_by_is_unconfirmed(provider: LocalProvider) -> None:
    async with router_at(provider.base_url) as (router, _):
        provider.advance(5)
        async with await router.stream(chat()) as stream:
            for _ in range(5):
                await anext(stream)
        decision = stream.decision
        assert (decision.actual or 0) + decision.unconfirmed == decision.estimate
        provider.advance(100)
        async for _chunk in await router.stream(chat(output=5)):
            pass
        assert (await router.status()).unconfirmed * 10**9 == decision.unconfirmed


# The tally by itself.


def test_a_tally_never_raises() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    kinds: tuple[Kind, ...] = ("chat", "response")
    for kind in kinds:
        tally = Tally()
        odd: Any
        for odd in (
            None,
            5,
            [],
            {},
            Hostile(),
            SimpleNamespace(choices=5, type=7),
            SimpleNamespace(choices=[Hostile()], type="x.delta"),
        ):
            tally.add(kind, odd)
            tally.add_whole(kind, odd)
        assert tally.texts == ()


def test_a_label_that_breaks_lines_forges_no_record() -> None:
    from router.decision import CapState

    state = CapState(
        cap="c", unit="usd", scope={"user": "a\nERROR forged\x1b[0m" + "x" * 10_000}, window="w", ends=None,
        limit=1, line=1, spent=0, held=0, asked=2,
    )  # fmt: skip
    assert "\n" not in str(state)
    assert "\x1b" not in str(state)
    assert len(str(state)) < 250
