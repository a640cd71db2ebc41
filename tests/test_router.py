"""The router over a real provider and a store in memory: what a user sees."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from router import (
    Cap,
    Decision,
    MissingLabel,
    Model,
    Price,
    Refused,
    Result,
    Retries,
    RoutedStream,
    Router,
    Task,
    TaskClass,
    TaskError,
    Usage,
)
from router.estimate import Estimator
from router.testing import Entry, LocalProvider, Rates, Reply, sequence
from stores import BudgetStore, InvalidCharge, MemoryStore, SQLiteStore, StoreRolledBack, StoreUnavailable, TooLate
from stores.redis import RedisStore
from tests.support import CHEAP, STRONG, TestClock, Wire, chat, client_of, policy_of, settle_down

pytestmark = pytest.mark.anyio

PRICES = {
    "strong-model": Rates(input="2", output="10"),
    "cheap-model": Rates(input="0.20", output="1"),
    "embedder": Rates(input="0.02", output="0"),
}


@pytest.fixture
def provider(request: pytest.FixtureRequest) -> Iterator[LocalProvider]:
    """A provider that answers as the test's `reply` parameter says."""
    reply = getattr(request, "param", None)
    # A sequence counts the requests it has answered: each test needs its own.
    with LocalProvider(prices=PRICES, reply=sequence(*reply) if isinstance(reply, tuple) else reply) as running:
        yield running


class Bench:
    """A router, its store and its clock, and the sums that a test asks about."""

    def __init__(self, router: Router, store: BudgetStore, clock: TestClock) -> None:
        self.router = router
        self.store = store
        self.clock = clock

    async def sums(self, cap: str = "all") -> tuple[int, int]:
        """Return held and spent of a cap, over all of its buckets."""
        status = await self.router.status()
        found = [bucket for bucket in status.buckets if bucket.cap == cap]
        return sum(b.held for b in found), sum(b.spent for b in found)


@asynccontextmanager
async def bench(provider: LocalProvider, *caps: Cap, store: BudgetStore | None = None, **more: Any) -> AsyncIterator[Bench]:
    """Open a router on the provider; afterwards nothing may be held or left behind."""
    clock = TestClock()
    store = MemoryStore(clock=clock) if store is None else store
    more.setdefault("retries", Retries(attempts=3, per_attempt=5, base=0.0, cap=0.0))
    async with client_of(provider.base_url) as client:
        policy = policy_of(client, *(caps or (Cap(usd=1, per="hour", admit_at=1, name="all"),)), **more)
        async with Router(policy, store, clock=clock) as router:
            yield Bench(router, store, clock)
        holds = await store.holds() if not isinstance(store, Faulty) else ()
        assert [hold for hold in holds if hold.state == "held"] == []


class Faulty:
    """A store that fails when told, in front of a real one."""

    def __init__(self, inner: BudgetStore) -> None:
        self.inner = inner
        self.fail: Callable[[str], Exception | None] = lambda _: None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        async def call(*args: Any, **more: Any) -> Any:
            error = self.fail(name)
            if error is not None:
                raise error
            return await method(*args, **more)

        return call


# Tiers.


async def test_a_task_goes_to_strong_and_is_settled_at_what_the_provider_billed(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        result = await b.router.run(chat())
        assert result.served
        assert result.decision.tier == "strong"
        assert result.response.choices[0].message.content
        assert (await b.sums()) == (0, provider.spent())
        assert result.decision.actual == provider.spent()
        assert result.decision.usage_source == "provider"
        assert [entry.model for entry in provider.requests] == ["strong-model"]


async def test_a_prompt_over_the_envelope_goes_to_cheap_and_the_provider_sees_that_model(provider: LocalProvider) -> None:
    async with bench(provider, envelope=100) as b:
        small = await b.router.run(chat("word " * 60))
        large = await b.router.run(chat("word " * 90))
        assert (small.decision.reason, large.decision.reason) == ("rule", "envelope")
        assert [entry.model for entry in provider.requests] == ["strong-model", "cheap-model"]


async def test_a_rule_sends_a_task_to_cheap(provider: LocalProvider) -> None:
    async with bench(provider, rule="cheap") as b:
        result = await b.router.run(chat())
        assert (result.decision.wanted, result.decision.tier, result.decision.downgraded) == ("cheap", "cheap", False)


async def test_hour_and_month_hold_together_or_not_at_all(provider: LocalProvider) -> None:
    hour = Cap(usd=1, per="hour", admit_at=1, name="hour")
    month = Cap(usd="0.0001", per="month", admit_at=1, name="month")
    async with bench(provider, hour, month) as b:
        result = await b.router.run(chat())
        assert result.decision.cap is not None
        assert (result.served, result.decision.cap.cap, result.decision.kind) == (False, "month", "never")
        assert (await b.sums("hour")) == (await b.sums("month")) == (0, 0)
        assert provider.requests == []


async def test_strong_is_downgraded_in_the_same_call_without_a_sleep(provider: LocalProvider) -> None:
    cap = Cap(usd="0.0005", per="hour", tiers={"strong"}, admit_at=1, name="all")
    async with bench(provider, cap, classes=[TaskClass("chat", when_expired="downgrade", review_downgrades=True)]) as b:
        result = await b.router.run(chat())
        assert (result.decision.tier, result.decision.reason) == ("cheap", "downgrade")
        assert (result.decision.downgraded, result.decision.review) == (True, True)
        assert [s for s in b.clock.slept if s != 20] == []
        assert (await b.router.status()).downgraded == {"chat": 1}


async def test_an_embedding_is_metered_and_never_routed(provider: LocalProvider) -> None:
    async with client_of(provider.base_url) as client:
        embedder = Model("embedder", client=client, price=Price.per_million(input="0.02", output="0"), encoding="cl100k_base")
        async with bench(provider, embedding=embedder) as b:
            result = await b.router.run(Task.embedding(input="some text"))
            assert (result.decision.tier, result.decision.reason) == (None, "embedding")
            assert (await b.sums()) == (0, provider.spent())
            assert provider.spent() > 0


async def test_without_caps_everything_is_admitted_and_still_recorded(provider: LocalProvider) -> None:
    async with client_of(provider.base_url) as client, Router(policy_of(client), MemoryStore()) as router:
        result = await router.run(chat())
        assert result.decision.actual == provider.spent()
        assert (await router.status()).served == {"strong": 1}


# Refusals.


async def test_a_refusal_says_what_refused_and_when_to_try_again(provider: LocalProvider) -> None:
    async with bench(provider, Cap(usd="0.002", per="hour", admit_at=1, name="all", scope="user")) as b:
        labels = {"user": "alice"}
        first = await b.router.run(chat(labels=labels))
        again = await b.router.run(chat(output=190, labels=labels))
        assert first.served
        decision = again.decision
        assert decision.cap is not None
        assert (decision.reason, decision.kind, decision.retry_after) == ("cap", "spent", 3600.0)
        assert decision.cap.scope == {"user": "alice"}
        assert (decision.cap.limit, decision.cap.spent, decision.cap.held) == (2_000_000, provider.spent(), 0)
        assert decision.cap.asked > 1_900_000
        assert decision.cap.remaining == 2_000_000 - provider.spent()
        assert "alice" in str(decision)
        assert "retry in 3600 s" in str(decision)


async def test_touching_what_a_refusal_does_not_have_raises_refused(provider: LocalProvider) -> None:
    async with bench(provider, Cap(usd=0, per="hour", name="all")) as b:
        result = await b.router.run(chat())
        with pytest.raises(Refused, match="refused"):
            _ = result.response
        stream = await b.router.stream(chat())
        assert stream.served is False
        with pytest.raises(Refused):
            async for _ in stream:
                pass
        async with b.router.admit(chat()) as admission:
            assert admission.served is False
            with pytest.raises(Refused) as caught:
                _ = admission.model
            assert caught.value.decision is admission.decision
        assert provider.requests == []
        assert (await b.router.status()).refused == {"default": 3}


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
async def test_twenty_at_once_near_the_line_exactly_as_many_as_fit(
    provider: LocalProvider, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    clock = TestClock()
    store: Any = MemoryStore(clock=clock)
    if kind == "sqlite":
        store = SQLiteStore(tmp_path / "budget.sqlite", clock=clock)
    elif kind == "redis":
        store = RedisStore(request.getfixturevalue("redis_url"), namespace=tmp_path.name, clock=clock)
    one = STRONG.bound(input_tokens=9, output_tokens=100)
    cap = Cap(usd=f"{5 * one / 10**9:.9f}", per="hour", admit_at=1, name="all")
    async with store, bench(provider, cap, store=store) as b:
        first = (await b.router.run(chat(output=100))).decision
        assert first.estimate == one
        results = await asyncio.gather(*(b.router.run(chat(output=100)) for _ in range(20)))
        # What the first one spent is in the way of the fifth.
        assert sum(r.served for r in results) == 4
        refused = {(r.decision.reason, r.decision.kind, r.decision.retry_after) for r in results if not r.served}
        assert refused == {("cap", "busy", 1.0)}
        assert (await b.sums()) == (0, provider.spent())


async def test_no_label_reaches_anothers_bucket(provider: LocalProvider) -> None:
    odd = ["", "a", "A", "a}b{c:d\n", "a|b", "a%7Cb", "user=a", "\ud800", "\0", "x" * 10_000, "x" * 9_999 + "y", "sha256=00"]
    async with bench(provider, Cap(usd="0.0011", per="day", scope=("org", "user"), admit_at=1, name="all"), tree="org") as b:
        for org in odd:
            for user in odd[:6]:
                assert (await b.router.run(chat(labels={"org": org, "user": user}))).served
        (again,) = {(await b.router.run(chat(labels={"org": org, "user": "a"}))).served for org in odd}
        assert again is False
        status = await b.router.status()
        assert len(status.buckets) == len(odd) * 6
        assert {bucket.spent for bucket in status.buckets} == {provider.requests[0].cost}


async def test_a_missing_label_is_raised_and_nothing_is_reserved(provider: LocalProvider) -> None:
    async with bench(provider, Cap(usd=1, per="day", scope="user", name="all")) as b:
        with pytest.raises(MissingLabel, match="'user'"):
            await b.router.run(chat())
        assert await b.store.holds() == ()


async def test_an_output_limit_is_chosen_and_sent_when_the_request_names_none(provider: LocalProvider) -> None:
    async with bench(provider, classes=[TaskClass("chat", output_limit=50)]) as b:
        result = await b.router.run(chat(output=None))
        assert result.decision.output_limit == 50
        assert provider.requests[0].body["max_completion_tokens"] == 50


async def test_a_chosen_limit_shrinks_to_what_the_cap_has_room_for(provider: LocalProvider) -> None:
    cap = Cap(usd="0.001", per="hour", admit_at=1, name="all")
    async with bench(provider, cap, classes=[TaskClass("chat", output_limit=1000, least_output=20)]) as b:
        result = await b.router.run(chat(output=None))
        limit = result.decision.output_limit
        assert limit is not None
        assert 20 <= limit < 100
        assert provider.requests[0].body["max_completion_tokens"] == limit
        assert result.decision.estimate <= 1_000_000
        tight = await b.router.run(chat("word " * 400, output=None))
        assert tight.served is False


async def test_a_limit_that_the_request_names_never_shrinks(provider: LocalProvider) -> None:
    cap = Cap(usd="0.001", per="hour", admit_at=1, name="all")
    async with bench(provider, cap, classes=[TaskClass("chat", least_output=20)]) as b:
        assert (await b.router.run(chat(output=1000))).served is False


async def test_input_that_cannot_be_seen_holds_the_context_window_or_is_refused(provider: LocalProvider) -> None:
    async with client_of(provider.base_url) as client:
        model = Model("strong-model", client=client, price=STRONG, encoding="o200k_base", context_window=10_000)
        task = Task.response(input="more", previous_response_id="resp_1", max_output_tokens=10)
        async with bench(provider, strong=model, cheap=model) as b:
            held = await b.router.run(task)
            assert held.decision.estimate >= 10_000 * 2000
        async with bench(provider, strong=model, cheap=model, unseen_input="refuse") as b:
            refused = await b.router.run(task)
            assert (refused.served, refused.decision.reason) == (False, "unseen_input")


async def test_a_tokens_cap_counts_input_and_output_once_each(provider: LocalProvider) -> None:
    async with bench(provider, Cap(tokens=1000, per="day", name="all"), Cap(requests=2, per="day", name="calls")) as b:
        result = await b.router.run(chat())
        assert result.usage is not None
        assert (await b.sums()) == (0, result.usage.input_tokens + result.usage.output_tokens)
        assert (await b.sums("calls")) == (0, 1)
        await b.router.run(chat())
        refused = (await b.router.run(chat())).decision
        assert refused.cap is not None
        assert (refused.cap.cap, refused.cap.unit) == ("calls", "requests")


async def test_a_soft_cap_counts_and_alerts_once_and_lets_through(
    provider: LocalProvider, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(provider, Cap(usd="0.0002", per="hour", soft=True, name="all")) as b:
        results = [await b.router.run(chat()) for _ in range(3)]
        assert all(result.served for result in results)
        assert (await b.sums()) == (0, provider.spent())
    assert [r.getMessage() for r in caplog.records if "has reached" in r.getMessage()] == [
        "budget-router: cap all has reached 100 % of $0.0002"
    ]


# Streams.


@pytest.mark.parametrize("provider", [Reply(tokens=10, gate=True)], indirect=True)
@pytest.mark.parametrize("kind", ["chat", "response"])
async def test_a_stream_that_is_read_to_its_end_settles_at_the_providers_bill(provider: LocalProvider, kind: str) -> None:
    provider.advance(100)
    async with bench(provider) as b:
        stream = await b.router.stream(task_of(kind))
        text = "".join([text_of(kind, chunk) async for chunk in stream])
        assert text
        assert stream.decision.outcome == "served"
        assert stream.decision.usage_source == "provider"
        assert (await b.sums()) == (0, provider.spent())


@pytest.mark.parametrize("provider", [Reply(tokens=10)], indirect=True)
async def test_a_usage_chunk_that_was_not_asked_for_is_not_shown(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        quiet = [chunk async for chunk in await b.router.stream(chat())]
        asked = [chunk async for chunk in await b.router.stream(chat(stream_options={"include_usage": True}))]
        assert [c for c in quiet if not c.choices] == []
        assert [bool(c.usage) for c in asked if not c.choices] == [True]


@pytest.mark.parametrize("provider", [Reply(tokens=10, gate=True)], indirect=True)
@pytest.mark.parametrize("kind", ["chat", "response"])
@pytest.mark.parametrize("read", [0, 1, 4])
@pytest.mark.parametrize("how", ["break", "aclose", "error", "cancel", "drop"])
async def test_a_stream_that_is_left_settles_at_what_was_generated(
    provider: LocalProvider, kind: str, read: int, how: str
) -> None:
    async with bench(provider) as b:
        stream: RoutedStream | None = await b.router.stream(task_of(kind))
        assert stream is not None
        provider.advance(read)
        seen = 0

        async def reader() -> None:
            nonlocal seen
            assert stream is not None
            while seen < read:
                seen += bool(text_of(kind, await anext(stream)))
            if how == "error":
                async with stream:
                    raise KeyError("the reader's own")
            if how == "cancel":
                async with stream:
                    while True:
                        await anext(stream)

        if how == "break" and read:
            async for chunk in stream:
                seen += bool(text_of(kind, chunk))
                if seen == read:
                    break
        elif how == "error":
            with pytest.raises(KeyError):
                await reader()
        elif how == "cancel":
            task = asyncio.ensure_future(reader())
            await provider.wait_for(lambda p: p.open_streams == 1 and p.requests[0].generated == read)
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await reader()
        if how == "aclose" or (how == "break" and not read):
            await stream.aclose()
            await stream.aclose()
        if how == "drop":
            stream = None
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        await provider.wait_for(lambda p: p.open_streams == 0)
        while not b.router._settler.idle:
            await asyncio.sleep(0)
        assert provider.requests[0].generated == read
        held, spent = await b.sums()
        assert held == 0
        assert abs(spent - provider.spent()) <= provider.spent() * 0.02
        assert spent > 0
        if stream is not None:
            assert stream.decision.outcome in ("left", "cancelled", "failed")


def task_of(kind: str) -> Task:
    if kind == "chat":
        return chat("word " * 300)
    return Task.response(input="word " * 300, max_output_tokens=100)


def text_of(kind: str, chunk: Any) -> str:
    if kind == "chat":
        return (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return chunk.delta if chunk.type == "response.output_text.delta" else ""


# Admit.


async def test_admit_gives_the_model_and_the_request_and_settles_the_reply(provider: LocalProvider) -> None:
    async with bench(provider) as b, client_of(provider.base_url) as client:
        async with b.router.admit(chat(output=None)) as admission:
            reply = await client.chat.completions.create(**admission.request)
            admission.settle(reply)
            admission.settle(reply)
        assert admission.model == "strong-model"
        assert provider.requests[0].body["max_completion_tokens"] == 4096
        assert admission.decision.usage_source == "reported"
        assert (await b.sums()) == (0, provider.spent())


async def test_admit_settles_a_usage_or_a_sum(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        async with b.router.admit(chat()) as admission:
            admission.settle(Usage(input_tokens=10, output_tokens=10))
        async with b.router.admit(chat()) as admission:
            admission.settle_usd("0.01")
        assert (await b.sums()) == (0, 10 * 2000 + 10 * 10_000 + 10_000_000)
        async with b.router.admit(chat()) as admission:
            with pytest.raises(ValueError, match="without usage"):
                admission.settle({"no": "usage"})
            admission.release()


async def test_admit_left_by_an_exception_is_released_and_left_silently_is_charged(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        with pytest.raises(KeyError):
            async with b.router.admit(chat()) as failed:
                raise KeyError
        assert (failed.decision.outcome, failed.decision.actual) == ("released", 0)
        assert (await b.sums()) == (0, 0)
        async with b.router.admit(chat()) as silent:
            pass
        assert (silent.decision.outcome, silent.decision.usage_source) == ("unreported", "estimate")
        assert (await b.sums()) == (0, silent.decision.estimate)
        async with b.router.admit(chat()) as released:
            released.release()
        assert (await b.sums()) == (0, silent.decision.estimate)
        assert (await b.router.status()).unreported * 10**9 == silent.decision.estimate


# Retries and fallbacks.


@pytest.mark.parametrize("provider", [(Reply(stall="before_first_byte"), Reply())], indirect=True)
@pytest.mark.parametrize("on_unanswered", ["release", "charge"])
async def test_a_time_out_then_a_retry_is_one_reservation_and_one_settle(provider: LocalProvider, on_unanswered: str) -> None:
    retries = Retries(attempts=3, per_attempt=1, base=0.0, cap=0.0)
    async with bench(provider, on_unanswered=on_unanswered, retries=retries) as b:
        result = await b.router.run(chat())
        decision = result.decision
        assert (decision.attempts, decision.unconfirmed) == (2, decision.estimate)
        charged = decision.estimate if on_unanswered == "charge" else 0
        assert (await b.sums()) == (0, provider.spent() + charged)
        assert decision.actual == provider.spent() + charged
        status = await b.router.status()
        assert status.unconfirmed * 10**9 == decision.estimate


@pytest.mark.parametrize("provider", [Reply(status=503)], indirect=True)
async def test_transient_errors_to_the_end_give_the_budget_back(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        with pytest.raises(openai.InternalServerError):
            await b.router.run(chat())
        assert len(provider.requests) == 3
        assert (await b.sums()) == (0, 0)


@pytest.mark.parametrize(
    "provider",
    [Reply(status=402), Reply(status=429, code="insufficient_quota"), Reply(status=400), Reply(status=401)],
    indirect=True,
)
async def test_what_is_not_transient_is_not_retried(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        with pytest.raises(openai.APIStatusError):
            await b.router.run(chat())
        assert len(provider.requests) == 1
        assert (await b.sums()) == (0, 0)


async def test_ten_calls_that_cannot_connect_leave_nothing(provider: LocalProvider) -> None:
    async with client_of("http://127.0.0.1:9/v1") as nowhere:
        model = Model("strong-model", client=nowhere, price=STRONG, encoding="o200k_base")
        async with bench(provider, Cap(usd="0.0011", per="hour", admit_at=1, name="all"), strong=model) as b:
            for _ in range(10):
                with pytest.raises(openai.APIConnectionError):
                    await b.router.run(chat())
            assert (await b.sums()) == (0, 0)
            assert (await b.router.status()).unconfirmed == 0


def _by_model(entry: Entry) -> Reply:
    return Reply(status=500) if entry.model == "strong-model" else Reply()


@pytest.mark.parametrize("provider", [_by_model], indirect=True)
async def test_strong_fails_for_good_and_cheap_answers_at_its_own_price(provider: LocalProvider) -> None:
    strong_only = Cap(usd=1, per="hour", tiers={"strong"}, admit_at=1, name="strong")
    every = Cap(usd=1, per="hour", admit_at=1, name="all")
    async with bench(provider, strong_only, every, on_model_error="cheap") as b:
        result = await b.router.run(chat())
        decision = result.decision
        assert (decision.wanted, decision.tier, decision.reason) == ("strong", "cheap", "fallback")
        assert decision.error == "InternalServerError"
        assert decision.attempts == 4
        assert (await b.sums()) == (0, provider.spent())
        assert (await b.sums("strong")) == (0, 0)


@pytest.mark.parametrize("provider", [_by_model], indirect=True)
async def test_a_fallback_that_the_cap_refuses_leaves_the_models_error(provider: LocalProvider) -> None:
    cheap_only = Cap(usd=0, per="hour", tiers={"cheap"}, name="cheap")
    async with bench(provider, cheap_only, on_model_error="cheap") as b:
        with pytest.raises(openai.InternalServerError):
            await b.router.run(chat())
        assert [entry.model for entry in provider.requests] == ["strong-model"] * 3
        assert (await b.sums("cheap")) == (0, 0)


@pytest.mark.parametrize(
    ("provider", "attempts"),
    [((Reply(status=429, retry_after=7), Reply()), 2), ((Reply(status=429, retry_after=70), Reply()), 1)],
    indirect=["provider"],
)
async def test_retry_after_is_honoured_within_the_deadline(provider: LocalProvider, attempts: int) -> None:
    async with bench(provider) as b:
        running = asyncio.ensure_future(b.router.run(chat(deadline=60)))
        await provider.wait_for(lambda p: len(p.requests) == 1)
        if attempts == 2:
            while 7 not in b.clock.slept:
                await asyncio.sleep(0)
            await b.clock.advance(7)
            assert (await running).decision.attempts == 2
        else:
            with pytest.raises(openai.RateLimitError):
                await running
        assert len(provider.requests) == attempts
        assert (await b.sums()) == (0, provider.spent())


@pytest.mark.parametrize("provider", [Reply(gate=True)], indirect=True)
async def test_a_call_that_is_cancelled_gives_back_and_shows_what_is_unconfirmed(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        running = asyncio.ensure_future(b.router.run(chat()))
        await provider.wait_for(lambda p: len(p.requests) == 1)
        assert (await b.sums())[0] > 0
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await b.sums()) == (0, 0)
        assert (await b.router.status()).unconfirmed > 0


@pytest.mark.parametrize("provider", [(Reply(status=400), Reply(gate=True))], indirect=True)
async def test_the_record_says_whether_a_call_failed_or_was_cancelled(
    provider: LocalProvider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="budget_router")
    async with bench(provider) as b:
        with pytest.raises(openai.BadRequestError):
            await b.router.run(chat())
        running = asyncio.ensure_future(b.router.run(chat()))
        await provider.wait_for(lambda p: len(p.requests) == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    records = [r.budget_router for r in caplog.records if hasattr(r, "budget_router")]
    assert [record["outcome"] for record in records] == ["failed", "cancelled"]


# The store fails.


@pytest.mark.parametrize("answer", ["closed", "cheap", "open"])
async def test_a_store_that_is_down_is_answered_as_the_class_says(provider: LocalProvider, answer: str) -> None:
    clock = TestClock()
    inner = MemoryStore(clock=clock)
    faulty = Faulty(inner)
    more: dict[str, Any] = {} if answer == "closed" else {"allowance_usd": "0.0025" if answer == "open" else "0.0003"}
    classes = [TaskClass("chat", when_store_down=answer, **more)]  # type: ignore[arg-type]
    async with bench(provider, store=faulty, classes=classes) as b:
        await b.router.run(chat())
        before = provider.spent()
        faulty.fail = lambda _: StoreUnavailable("memory", "it is down")
        results = [await b.router.run(chat()) for _ in range(30)]
        served = [r for r in results if r.served]
        status = await b.router.status()
        assert "it is down" in status.store
        if answer == "closed":
            assert served == []
            assert {(r.decision.reason, r.decision.retry_after) for r in results} == {("store_unavailable", 5.0)}
            assert provider.spent() == before
        else:
            assert 0 < len(served) < 30
            assert {r.decision.reason for r in served} == {f"store_{answer}"}
            assert {r.decision.tier for r in served} == {"cheap" if answer == "cheap" else "strong"}
            assert before < provider.spent() <= before + 2_500_000
            assert status.outages[f"served_{answer}"] == len(served)
        faulty.fail = lambda _: None
        await b.clock.advance(3)
        await b.clock.advance(3)
        assert (await b.sums()) == (0, provider.spent())
        again = await b.router.run(chat())
        assert again.decision.reason == "rule"


async def test_a_store_that_rolled_back_refuses_whatever_the_class_says(provider: LocalProvider) -> None:
    faulty = Faulty(MemoryStore(clock=TestClock()))
    classes = [TaskClass("chat", when_store_down="open", allowance_usd=1)]
    async with bench(provider, store=faulty, classes=classes) as b:
        faulty.fail = lambda name: StoreRolledBack("memory") if name == "reserve" else None
        result = await b.router.run(chat())
        assert (result.served, result.decision.reason) == (False, "store_rolled_back")
        assert provider.requests == []


async def test_a_settle_that_the_store_would_not_take_is_neither_lost_nor_doubled(provider: LocalProvider) -> None:
    faulty = Faulty(MemoryStore(clock=TestClock()))
    async with bench(provider, store=faulty) as b:
        faulty.fail = lambda name: StoreUnavailable("memory", "it is down") if name == "settle" else None
        result = await b.router.run(chat())
        assert result.served
        assert (await b.router.status()).backlog == 1
        faulty.fail = lambda _: None
        await b.clock.advance(3)
        assert (await b.router.status()).backlog == 0
        assert (await b.sums()) == (0, provider.spent())


async def test_a_full_backlog_refuses_new_calls(provider: LocalProvider) -> None:
    faulty = Faulty(MemoryStore(clock=TestClock()))
    async with bench(provider, store=faulty, max_open=2) as b:
        faulty.fail = lambda name: StoreUnavailable("memory", "it is down") if name == "settle" else None
        results = [await b.router.run(chat()) for _ in range(4)]
        assert [r.served for r in results] == [True, True, False, False]
        assert {r.decision.reason for r in results if not r.served} == {"full"}
        faulty.fail = lambda _: None
        await b.clock.advance(3)


@pytest.mark.parametrize("provider", [Reply(gate=True)], indirect=True)
async def test_a_lease_is_renewed_while_the_call_lives(provider: LocalProvider) -> None:
    async with bench(provider, lease=30) as b:
        running = asyncio.ensure_future(b.router.run(chat()))
        await provider.wait_for(lambda p: len(p.requests) == 1)
        for _ in range(10):
            await b.clock.advance(10)
        (hold,) = await b.store.holds()
        assert hold.state == "held"
        provider.advance(1)
        await running
        assert (await b.sums()) == (0, provider.spent())


# Policies, clocks, records.


async def test_a_policy_is_replaced_while_calls_run(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        await b.router.run(chat())
        b.router.policy = policy_of(b.router.policy.strong.client, Cap(usd="0.0001", per="hour", admit_at=1, name="all"))
        refused = (await b.router.run(chat(output=1))).decision
        assert refused.cap is not None
        assert refused.served is False
        assert (refused.cap.remaining, refused.cap.debt) == (0, provider.spent() - 100_000)


async def test_the_offset_of_a_clock_that_is_wrong_is_corrected(provider: LocalProvider) -> None:
    store_clock = TestClock()
    store_clock.wall += 3 * 24 * 3600 * 1000
    async with bench(provider, store=MemoryStore(clock=store_clock)) as b:
        assert (await b.router.run(chat())).served
        assert (await b.sums()) == (0, provider.spent())


async def test_an_unknown_class_is_a_clear_error(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        with pytest.raises(TaskError, match="default"):
            await b.router.run(chat(task_class="defualt"))


async def test_after_aclose_everything_is_refused(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        await b.router.aclose()
        assert (await b.router.run(chat())).decision.reason == "closed"


async def test_one_record_per_request_without_key_or_prompt(provider: LocalProvider, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="budget_router")
    secret = "the secret prompt"
    async with bench(provider, Cap(usd="0.0011", per="hour", admit_at=1, name="all")) as b:
        served = await b.router.run(chat(secret, labels={"user": "alice"}))
        refused = await b.router.run(chat(secret))
        shown = "".join(map(repr, (served, refused, b.router, b.router.policy, b.router.policy.strong, chat(secret))))
    records = [r.budget_router for r in caplog.records if hasattr(r, "budget_router")]
    assert [(r["served"], r["outcome"], r["class"]) for r in records] == [
        (True, "served", "default"),
        (False, "refused", "default"),
    ]
    assert records[0]["actual"] == provider.spent()
    assert list(records[0]["balances"].values()) == [{"spent": provider.spent(), "held": 0}]
    everything = shown + caplog.text + repr(records)
    assert secret not in everything
    assert "sk-test" not in everything


async def test_every_entry_moves_the_counter(provider: LocalProvider) -> None:
    async with client_of(provider.base_url) as client:
        embedder = Model("embedder", client=client, price=Price.per_million(input="0.02", output="0"), encoding="cl100k_base")
        async with bench(provider, embedding=embedder) as b:
            before = 0
            for task in (chat(), task_of("response"), Task.embedding(input="text")):
                for _ in range(3):
                    assert (await b.router.run(task)).served
                    assert (await b.sums())[1] > before
                    before = (await b.sums())[1]
            for task in (chat(), task_of("response")):
                for _ in range(3):
                    async for _chunk in await b.router.stream(task):
                        pass
                    assert (await b.sums())[1] > before
                    before = (await b.sums())[1]
            assert before == provider.spent()


def test_a_decision_reads_as_a_sentence() -> None:
    decision = Decision(
        task_id="t", task_class="chat", served=True, reason="rule", tier="cheap", model="m", estimate=10, actual=5
    )
    assert str(decision) == "served by m (cheap, rule): $0.000000005 of an estimated $0.00000001"
    assert repr(Result(decision=decision)) == f"<Result {decision}>"
    assert CHEAP.bound(input_tokens=1, output_tokens=1) == 1200


@pytest.mark.parametrize("provider", [Reply(tokens=200, overrun=True)], indirect=True)
@pytest.mark.parametrize("on_overrun", ["extend", "cut"])
@pytest.mark.parametrize("room", ["much", "little"])
async def test_a_provider_that_generates_past_the_limit_is_counted_and_may_be_cut(
    provider: LocalProvider, on_overrun: str, room: str
) -> None:
    cap = Cap(usd="1" if room == "much" else "0.0006", per="hour", admit_at=1, name="all")
    async with bench(provider, cap, classes=[TaskClass("chat", on_overrun=on_overrun)]) as b:  # type: ignore[arg-type]
        stream = await b.router.stream(chat(output=50))
        seen = [chunk async for chunk in stream]
        decision = stream.decision
        if on_overrun == "extend" and room == "much":
            assert decision.outcome == "served"
            assert (await b.sums()) == (0, provider.spent())
            assert "more was held" in str(decision)
        else:
            assert decision.outcome == "cut"
            assert 50 < len(seen) < 100
            held, spent = await b.sums()
            assert held == 0
            assert spent > 51 * 10_000
        assert decision.unconfirmed >= 0


@pytest.mark.parametrize("provider", [Reply(tokens=200, overrun=True)], indirect=True)
async def test_for_an_overrun_a_quarter_more_than_was_generated_is_held(provider: LocalProvider) -> None:
    wire: Any = Wire(MemoryStore(clock=TestClock()))
    estimator = Estimator()
    text = ""
    expected: list[int] = []
    async with bench(provider, store=wire) as b:
        async for chunk in await b.router.stream(chat(output=50)):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if len(wire.ids("extend")) > len(expected):
                came, _ = await estimator.count_async(text, "strong-model", "o200k_base")
                expected.append(STRONG.bound(input_tokens=9, output_tokens=came * 5 // 4))
        held = [charge.amount for name, args in wire.asked if name == "extend" for charge in args[2]]
        assert held == expected != []
        assert (await b.sums()) == (0, provider.spent())


async def test_the_vocabulary_is_prepared_when_the_router_is_entered(provider: LocalProvider) -> None:
    async with bench(provider) as b:
        await b.router.run(chat())
        assert b.router._estimator.count("hello world", "strong-model", "o200k_base") == 2


async def test_the_backlog_is_tried_again_after_pauses_that_double_up_to_two_seconds(
    provider: LocalProvider, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(MemoryStore(clock=TestClock()))
    async with bench(provider, store=faulty) as b:
        faulty.fail = lambda name: StoreUnavailable("memory", "it is down") if name == "settle" else None
        await b.router.run(chat())
        for _ in range(8):
            await b.clock.advance(2)
        assert [pause for pause in b.clock.slept if pause < 20] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
        faulty.fail = lambda _: None
        await b.clock.advance(2)


@pytest.mark.parametrize("error", [TooLate("id", "the store keeps ids for 24 hours"), InvalidCharge("no such bucket")])
async def test_a_settle_that_can_never_be_counted_is_counted_as_such_and_not_tried_for_ever(
    provider: LocalProvider, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(MemoryStore(clock=TestClock()))
    async with bench(provider, store=faulty) as b:
        faulty.fail = lambda name: error if name == "settle" else None
        result = await b.router.run(chat())
        status = await b.router.status()
        assert (result.served, status.too_late, status.backlog) == (True, 1, 0)
        faulty.fail = lambda _: None
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == [
        f"budget-router: a settle could not be counted: {error}"
    ]


async def test_after_aclose_no_task_of_ours_is_left(provider: LocalProvider, caplog: pytest.LogCaptureFixture) -> None:
    async with bench(provider) as b:
        await b.router.run(chat())
        await b.router.aclose()
        await settle_down()
        assert caplog.records == []
        assert [task.get_name() for task in asyncio.all_tasks() if "budget-router" in task.get_name()] == []
