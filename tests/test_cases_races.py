"""Cases from the field: races and admission."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from router import Cap, Model, Policy, PolicyError, Price, Result, Router, Task, TaskClass
from router.estimate import Estimator
from router.prices import Rates
from router.testing import Entry, LocalProvider, Reply
from router.testing import Rates as Billed
from stores import BudgetStore, MemoryStore
from tests.support import (
    CENT,
    CHEAP,
    FIFTEEN,
    PRICES,
    START,
    Bench,
    TestClock,
    bench,
    chat,
    policy_of,
    to_the_limit,
    to_the_limit_when_let,
    workers,
    worth,
)

pytestmark = pytest.mark.anyio

HUNDRED = Cap(usd=1, per="hour", admit_at=1, name="all")


@pytest.fixture
def provider(request: pytest.FixtureRequest) -> Iterator[LocalProvider]:
    """A provider that generates up to the limit it is sent, unless the test says otherwise."""
    prices = {**PRICES, "embedder": Billed(input="0.02", output="0"), "long-model": Billed(input="0.50", output="0")}
    with LocalProvider(prices=prices, reply=getattr(request, "param", to_the_limit)) as running:
        yield running


when_let = pytest.mark.parametrize("provider", [to_the_limit_when_let], indirect=True)


async def all_but(left: int, running: set[asyncio.Task[Result]]) -> list[Result]:
    """Wait until so many are left, and return what the others were answered."""
    done: set[asyncio.Task[Result]] = set()
    while len(running) > left:
        came, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        done |= came
    return [task.result() for task in done]


def at_once(*tasks: tuple[Router, Task]) -> set[asyncio.Task[Result]]:
    return {asyncio.ensure_future(router.run(task)) for router, task in tasks}


@when_let
async def test_of_ten_that_hold_forty_of_a_hundred_two_are_admitted_and_no_instant_is_over(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """R1."""
    async with bench(provider, HUNDRED, store=store, clock=clock) as b:
        seen: list[tuple[int, int]] = []

        async def sample() -> None:
            while True:
                seen.append(await b.sums())
                await asyncio.sleep(0.001)  # a pause, so that the provider's thread gets its turn

        sampler = asyncio.ensure_future(sample())
        running = at_once(*[(b.router, worth(40))] * 10)
        refused = await all_but(2, running)
        await provider.wait_for(lambda p: len(p.requests) == 2)
        provider.advance(2)
        served = [result for result in await asyncio.gather(*running) if result.served]
        sampler.cancel()
        seen.append(await b.sums())
        assert [result.served for result in refused] == [False] * 8
        assert {(r.decision.reason, r.decision.kind) for r in refused} == {("cap", "busy")}
        assert [result.decision.estimate for result in served] == [40 * CENT] * 2
        assert len(provider.requests) == 2
        assert max(held + spent for held, spent in seen) == 80 * CENT
        assert (80 * CENT, 0) in seen
        assert seen[-1] == (0, 80 * CENT)


@when_let
async def test_the_first_calls_ever_of_a_user_share_one_new_bucket(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """R2, in one process."""
    cap = Cap(usd=1, per="hour", scope="user", limits={"user:known": 20}, admit_at=1, name="all")
    async with bench(provider, cap, store=store, clock=clock) as b:
        running = at_once(*[(b.router, worth(60, labels={"user": "new"}))] * 8)
        refused = await all_but(1, running)
        assert [result.served for result in refused] == [False] * 7
        buckets = (await b.router.status()).buckets
        assert [(bucket.scope, bucket.held, bucket.limit) for bucket in buckets] == [({"user": "new"}, 60 * CENT, 100 * CENT)]
        await provider.wait_for(lambda p: len(p.requests) == 1)
        provider.advance(1)
        assert sorted(result.served for result in await asyncio.gather(*running)) == [False] * 7 + [True]


async def test_the_first_calls_ever_of_a_user_share_one_new_bucket_in_two_processes(tmp_path: Path) -> None:
    """R2, with a file that nobody has opened before."""
    path = tmp_path / "budget.sqlite"
    async with workers(2, path, usd=1, per="hour", scope="user", admit_at=1) as processes:
        answers = await asyncio.gather(
            *(process.admit(60, now=START, tasks=4, labels={"user": "new"}) for process in processes)
        )
        assert sorted(served for answer in answers for served in answer) == [False] * 7 + [True]
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT held, spent FROM account").fetchall() == [(60 * CENT, 0)]


@when_let
async def test_two_routers_with_stores_of_their_own_never_see_each_others_spend(
    provider: LocalProvider, clock: TestClock
) -> None:
    """R3."""
    small = Cap(usd="0.50", per="hour", admit_at=1, name="all")
    async with (
        MemoryStore(clock=clock) as one,
        MemoryStore(clock=clock) as other,
        bench(provider, HUNDRED, store=one, clock=clock) as wide,
        bench(provider, small, store=other, clock=clock) as narrow,
    ):
        running = at_once(*[(wide.router, worth(40)), (narrow.router, worth(40))] * 5)
        refused = await all_but(3, running)
        assert (
            sorted(result.decision.cap.limit for result in refused if result.decision.cap) == [50 * CENT] * 4 + [100 * CENT] * 3
        )
        assert (await wide.sums(), await narrow.sums()) == ((80 * CENT, 0), (40 * CENT, 0))
        await provider.wait_for(lambda p: len(p.requests) == 3)
        provider.advance(3)
        await asyncio.wait(running)
        assert (await wide.sums(), await narrow.sums()) == ((0, 80 * CENT), (0, 40 * CENT))


@when_let
async def test_two_routers_on_one_store_share_one_budget(provider: LocalProvider, store: BudgetStore, clock: TestClock) -> None:
    """R4."""
    async with (
        bench(provider, HUNDRED, store=store, clock=clock) as one,
        bench(provider, Cap(usd=1, per="hour", admit_at=1, name="all"), store=store, clock=clock) as other,
    ):
        running = at_once(*[(one.router, worth(40)), (other.router, worth(40))] * 5)
        refused = await all_but(2, running)
        assert [result.served for result in refused] == [False] * 8
        assert await one.sums() == await other.sums() == (80 * CENT, 0)
        await provider.wait_for(lambda p: len(p.requests) == 2)
        provider.advance(2)
        await asyncio.wait(running)
        assert await one.sums() == await other.sums() == (0, 80 * CENT)


# Every way in, as the provider and the counter see it.


def model_of(b: Bench, name: str, price: Price) -> Model:
    return Model(name, client=b.client, price=price)


async def run_chat(b: Bench) -> bool:
    return (await b.router.run(worth(1))).served


async def run_response(b: Bench) -> bool:
    return (await b.router.run(Task.response(input=FIFTEEN, max_output_tokens=10))).served


async def run_embedding(b: Bench) -> bool:
    return (await b.router.run(Task.embedding(input="some text"))).served


async def stream_chat(b: Bench) -> bool:
    return await read(b, chat(FIFTEEN, output=10))


async def stream_response(b: Bench) -> bool:
    return await read(b, Task.response(input=FIFTEEN, max_output_tokens=10))


async def admit(b: Bench) -> bool:
    async with b.router.admit(worth(1)) as admission:
        if admission.served:
            admission.settle(await b.client.chat.completions.create(**admission.request))
        return admission.served


async def read(b: Bench, task: Task) -> bool:
    stream = await b.router.stream(task)
    if stream.served:
        async for _ in stream:
            pass
    return stream.served


ENTRIES = [run_chat, run_response, run_embedding, stream_chat, stream_response, admit]


def with_embedder(b: Bench, *caps: Cap, price: Price | None = None) -> None:
    """Put a policy in force that has an embedding model too; with a price, all models have that one."""
    models = {"strong": "strong-model", "cheap": "cheap-model", "embedding": "embedder"}
    own = {"strong": policy_of(None).price("strong"), "cheap": CHEAP, "embedding": Price.per_million("0.02", 0)}
    given = {key: Model(name, client=b.client, price=own[key] if price is None else price) for key, name in models.items()}
    b.router.policy = policy_of(b.client, *caps, **given)


async def test_a_limit_of_zero_refuses_every_entry_and_serves_what_is_free(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """R5."""
    nothing = Cap(usd=0, per="hour", name="all")
    async with bench(provider, nothing, store=store, clock=clock) as b:
        with_embedder(b, nothing)
        assert [await entry(b) for entry in ENTRIES] == [False] * 6
        assert provider.requests == []
        with_embedder(b, nothing, price=Price.free())
        assert [await entry(b) for entry in ENTRIES] == [True] * 6
        assert len(provider.requests) == 6
        assert await b.sums() == (0, 0)


@when_let
async def test_a_free_model_holds_nothing_while_it_is_served_under_a_limit_of_zero(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """R5, while the call runs."""
    async with bench(provider, Cap(usd=0, per="hour", name="all"), store=store, clock=clock) as b:
        b.router.policy = policy_of(b.client, *b.router.policy.caps, strong=model_of(b, "strong-model", Price.free()))
        running = asyncio.ensure_future(b.router.run(worth(40)))
        await provider.wait_for(lambda p: len(p.requests) == 1)
        (hold,) = await store.holds()
        assert [charge.amount for charge in hold.charges] == [0]
        assert await b.sums() == (0, 0)
        provider.advance(1)
        assert (await running).decision.actual == 0


BAD_LIMITS = [
    (-1, "-1", "usd is -1: write a number that is not negative"),
    (float("nan"), "nan", "usd is nan: write a finite number, 0 or more"),
    (float("inf"), "inf", "usd is inf: write a finite number, 0 or more"),
    (True, "true", 'usd is True: write a number such as 20, "0.25" or Decimal("0.25")'),
    ("50 dollars", '"50 dollars"', "usd is '50 dollars': write a plain number such as 20 or \"0.25\""),
]


@pytest.mark.parametrize(("limit", "written", "sentence"), BAD_LIMITS)
def test_a_limit_that_is_none_is_refused_when_the_policy_is_built(limit: Any, written: str, sentence: str) -> None:
    """R6."""
    with pytest.raises(PolicyError) as in_python:
        policy_of(None, Cap(usd=limit, per="hour"))
    assert str(in_python.value) == sentence
    with pytest.raises(PolicyError) as for_one_user:
        policy_of(None, Cap(usd=1, per="hour", scope="user", limits={"user:alice": limit}))
    assert str(for_one_user.value) == sentence.replace("usd", "limits['user:alice']")
    models = '[strong]\nname = "gpt-5"\n[cheap]\nname = "gpt-5-mini"\n'
    with pytest.raises(PolicyError, match=r"caps\[0\]: usd ") as in_a_file:
        Policy.from_toml(f'{models}[[caps]]\nusd = {written}\nper = "hour"\n')
    assert str(in_a_file.value).count("\n") == 0


def test_each_limit_that_is_none_has_a_sentence_of_its_own() -> None:
    """R6."""
    assert len({sentence for _, _, sentence in BAD_LIMITS}) == len(BAD_LIMITS)


@when_let
async def test_a_month_without_room_refuses_and_the_hours_hold_does_not_move(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """R7."""
    month = Cap(usd="0.50", per="month", admit_at=1, name="month")
    async with bench(provider, Cap(usd=1, per="hour", admit_at=1, name="hour"), month, store=store, clock=clock) as b:
        running = asyncio.ensure_future(b.router.run(worth(30)))
        await provider.wait_for(lambda p: len(p.requests) == 1)
        refused = (await b.router.run(worth(40))).decision
        assert refused.cap is not None
        assert (refused.served, refused.cap.cap, refused.cap.window) == (False, "month", "2026-08")
        assert await b.sums("hour") == await b.sums("month") == (30 * CENT, 0)
        provider.advance(1)
        await running
        assert await b.sums("hour") == await b.sums("month") == (0, 30 * CENT)
        assert len(provider.requests) == 1


@when_let
async def test_cheap_is_reserved_at_its_own_price_and_not_called_with_nothing_left(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """R8."""
    strong = Cap(usd="0.30", per="hour", tiers={"strong"}, admit_at=1, name="strong")
    every = Cap(usd="0.08", per="hour", admit_at=1, name="all")
    classes = [TaskClass("chat", when_expired="downgrade")]
    async with bench(provider, strong, every, classes=classes, store=store, clock=clock) as b:
        for done in range(2):
            running = asyncio.ensure_future(b.router.run(worth(40)))
            await provider.wait_for(lambda p, due=done + 1: len(p.requests) == due)  # type: ignore[misc]
            assert (await b.sums("strong"), await b.sums()) == ((0, 0), (4 * CENT, done * 4 * CENT))
            provider.advance(1)
            decision = (await running).decision
            assert (decision.tier, decision.reason, decision.actual) == ("cheap", "downgrade", 4 * CENT)
        last = (await b.router.run(worth(40))).decision
        assert (last.served, last.reason) == (False, "cap")
        assert [entry.model for entry in provider.requests] == ["cheap-model"] * 2
        assert await b.sums() == (0, 8 * CENT)


async def test_every_entry_moves_the_counter_each_time(provider: LocalProvider, store: BudgetStore, clock: TestClock) -> None:
    """R9."""
    async with bench(provider, HUNDRED, store=store, clock=clock) as b:
        with_embedder(b, HUNDRED)
        for entry in ENTRIES:
            for _ in range(3):
                before = provider.spent()
                assert await entry(b)
                assert provider.spent() > before
                assert await b.sums() == (0, provider.spent())
        assert len(provider.requests) == 18


def _long(entry: Entry) -> Reply:
    return Reply(prompt_tokens=300_000, tokens=1, gate=True)


@pytest.mark.parametrize("provider", [_long], indirect=True)
async def test_a_long_prompt_is_held_at_the_price_of_the_tier_that_it_falls_in(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """R10."""
    near, far = (Rates.per_million(input=rate, output=0) for rate in ("0.25", "0.50"))
    price = Price(((0, near), (272_000, far)))
    async with bench(provider, Cap(usd="0.45", per="hour", admit_at=1, name="all"), store=store, clock=clock) as b:
        b.router.policy = policy_of(b.client, *b.router.policy.caps, strong=model_of(b, "long-model", price))
        task = await task_of_prompt(300_000)
        running = at_once(*[(b.router, task)] * 5)
        refused = await all_but(3, running)
        assert [result.served for result in refused] == [False] * 2
        assert await b.sums() == (45 * CENT, 0)
        await provider.wait_for(lambda p: len(p.requests) == 3)
        provider.advance(3)
        served = [task.result() for task in (await asyncio.wait(running))[0] if task.result().served]
        assert [(r.decision.estimate, r.decision.actual) for r in served] == [(15 * CENT, 15 * CENT)] * 3
        assert await b.sums() == (0, provider.spent()) == (0, 45 * CENT)


async def task_of_prompt(tokens: int) -> Task:
    """Return a task that is estimated at exactly so many input tokens by a model of which no vocabulary is known."""

    def asking(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "max_completion_tokens": 1}

    empty = await Estimator().prompt("chat", asking(""), "long-model")
    return Task.chat(**asking("x" * (tokens - empty.input_tokens)))


@when_let
async def test_a_cap_lowered_below_what_is_spent_lets_calls_settle_and_admits_nothing(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """R11."""
    async with bench(provider, HUNDRED, store=store, clock=clock) as b:
        await b.spend("0.40")
        running = at_once(*[(b.router, worth(20))] * 2)
        await provider.wait_for(lambda p: len(p.requests) == 2)
        b.router.policy = policy_of(b.client, Cap(usd="0.30", per="hour", admit_at=1, name="all"))
        refused = (await b.router.run(worth(10))).decision
        assert refused.cap is not None
        assert (refused.served, refused.cap.spent, refused.cap.held) == (False, 40 * CENT, 40 * CENT)
        assert (refused.cap.remaining, refused.cap.debt) == (0, 10 * CENT)
        provider.advance(2)
        assert [result.served for result in await asyncio.gather(*running)] == [True, True]
        (bucket,) = (await b.router.status()).buckets
        assert (bucket.held, bucket.spent, bucket.limit) == (0, 80 * CENT, 30 * CENT)
        assert (bucket.remaining, bucket.debt) == (0, 50 * CENT)
        assert (await b.router.run(worth(10))).decision.kind == "spent"
        assert len(provider.requests) == 2


async def test_a_minute_and_a_day_of_one_scope_are_two_buckets_and_both_count(
    provider: LocalProvider, store: BudgetStore, clock: TestClock
) -> None:
    """R12."""
    minute, day = Cap(usd="0.50", per="minute", scope="user", admit_at=1), Cap(usd=1, per="day", scope="user", admit_at=1)
    labels = {"user": "alice"}
    async with bench(provider, minute, day, store=store, clock=clock) as b:
        answers = []
        for _ in range(3):
            answers += [(await b.router.run(worth(cents, labels=labels))).decision for cents in (40, 20)]
            await b.clock.advance(60)
        assert [decision.cap and decision.cap.cap for decision in answers] == [
            *(None, minute.name),  # 60 of 50 in the minute
            *(None, minute.name),
            *(day.name, None),  # 120 of 100 in the day, and then 100
        ]
        spent = {(bucket.cap, bucket.window): bucket.spent for bucket in (await b.router.status()).buckets}
        assert spent == {
            (day.name, "2026-08-01"): 100 * CENT,
            (minute.name, "2026-08-01T00Z"): 40 * CENT,
            (minute.name, "2026-08-01T00:01Z"): 40 * CENT,
            (minute.name, "2026-08-01T00:02Z"): 20 * CENT,
        }


async def test_each_cap_is_used_up_by_its_own_limit(provider: LocalProvider, store: BudgetStore, clock: TestClock) -> None:
    """R13."""
    caps = [Cap(usd=15, per="hour", admit_at="0.99", name="hour"), Cap(usd=1000, per="month", admit_at="0.99", name="month")]
    strong = [Cap(usd=c.limit // 10**9, per=c.period.per, tiers={"strong"}, admit_at="0.99", name=c.name) for c in caps]
    async with bench(provider, *strong, classes=[TaskClass("chat", when_expired="downgrade")], store=store, clock=clock) as b:
        await b.spend("0.40")
        early = (await b.router.run(worth(10))).decision
        assert (early.tier, early.downgraded) == ("strong", False)
        # 99 % of the hour's 15 dollars are 14.85; of these, 0.50 are spent.
        await b.spend("14.25")
        last = (await b.router.run(worth(10))).decision
        over = (await b.router.run(worth(1))).decision
        assert (last.tier, over.tier, over.reason) == ("strong", "cheap", "downgrade")
        assert await b.sums("hour") == await b.sums("month") == (0, 1485 * CENT)


@pytest.mark.parametrize(("admit_at", "admitted"), [(1, 24), (0.85, 0), (None, 0)])
async def test_a_batch_near_the_line_is_admitted_call_by_call(
    provider: LocalProvider, store: BudgetStore, clock: TestClock, admit_at: float | None, admitted: int
) -> None:
    """R14."""
    async with bench(provider, Cap(usd=50, per="hour", admit_at=1, name="all"), store=store, clock=clock) as b:
        await b.spend(44)
        b.router.policy = policy_of(b.client, Cap(usd=50, per="hour", admit_at=admit_at, name="all"))

        async def task() -> int:
            calls = await asyncio.gather(*(b.router.run(worth(25)) for _ in ("draft", "verify")))
            return sum(call.served for call in calls)

        assert sum(await asyncio.gather(*(task() for _ in range(40)))) == admitted
        assert len(provider.requests) == admitted
        assert await b.sums() == (0, 4400 * CENT + admitted * 25 * CENT)


def test_the_default_line_of_a_cap_in_dollars_is_the_lower_one() -> None:
    """R14, the default."""
    assert Cap(usd=50, per="hour").line_at == Fraction(85, 100)
