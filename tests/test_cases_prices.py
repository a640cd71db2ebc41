"""Cases from the field: prices and usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router import Cap, Model, Policy, PolicyError, Price, Task, Usage
from router.prices import price_of
from router.testing import LocalProvider, Rates, Reply
from stores import BudgetStore, MemoryStore
from tests.support import (
    CENT,
    CHEAP,
    FIFTEEN,
    STRONG,
    Bench,
    TestClock,
    bench,
    chat,
    policy_of,
    to_the_limit,
    to_the_limit_when_let,
    worth,
)

pytestmark = pytest.mark.anyio

PLENTY = Cap(usd=100, per="hour", admit_at=1, name="all")


@pytest.fixture
async def memory(clock: TestClock) -> AsyncIterator[BudgetStore]:
    """One store, where a case is about the price and not about the counting."""
    async with MemoryStore(clock=clock) as opened:
        yield opened


def provider_of(reply: Any, **rates: Any) -> LocalProvider:
    """Return a provider with one model, whose rates are in dollars per million tokens."""
    return LocalProvider(prices={"strong-model": Rates(**rates)}, reply=reply)


def model_of(b: Bench, name: str = "strong-model", **rates: Any) -> Model:
    """Return a model with the same rates in the policy."""
    return Model(name, client=b.client, price=Price.per_million(**rates), encoding="o200k_base")


KINDS = ["run chat", "run response", "stream chat", "stream response"]


async def ask(b: Bench, kind: str, output: int = 100) -> Any:
    """Send one request and return what came of it, with its usage and its decision."""
    task = chat(FIFTEEN, output=output) if "chat" in kind else Task.response(input=FIFTEEN, max_output_tokens=max(16, output))
    if "run" in kind:
        return await b.router.run(task)
    stream = await b.router.stream(task)
    async for _ in stream:
        pass
    return stream


@pytest.mark.parametrize("kind", KINDS)
async def test_cached_tokens_cost_their_own_price_and_the_others_the_full_one(
    memory: BudgetStore, clock: TestClock, kind: str
) -> None:
    """P1."""
    rates = {"input": "2", "output": "10", "cached_input": "0.50"}
    with provider_of(Reply(prompt_tokens=2006, cached_tokens=1920, tokens=4), **rates) as provider:
        async with bench(provider, PLENTY, store=memory, clock=clock) as b:
            b.router.policy = policy_of(b.client, PLENTY, strong=model_of(b, **rates))
            answer = await ask(b, kind)
            assert answer.usage == Usage(input_tokens=2006, cached_tokens=1920, output_tokens=4)
            assert answer.decision.actual == 86 * 2000 + 1920 * 500 + 4 * 10_000
            assert await b.sums() == (0, 86 * 2000 + 1920 * 500 + 4 * 10_000) == (0, provider.spent())


@pytest.mark.parametrize("kind", KINDS)
async def test_more_cached_than_sent_costs_each_class_and_is_marked_as_odd(
    memory: BudgetStore, clock: TestClock, kind: str
) -> None:
    """P2."""
    rates = {"input": "2", "output": "10", "cached_input": "0.50"}
    with provider_of(Reply(prompt_tokens=1000, usage="cached_over_prompt", tokens=4), **rates) as provider:
        async with bench(provider, PLENTY, store=memory, clock=clock) as b:
            b.router.policy = policy_of(b.client, PLENTY, strong=model_of(b, **rates))
            answer = await ask(b, kind)
            # The provider says 1,000 of prompt, and 1,100 of them cached: none is left at the full price.
            assert answer.usage.cached_tokens == 1100
            assert answer.usage.odd is True
            assert any("impossible numbers" in note for note in answer.decision.notes)
            assert await b.sums() == (0, 1100 * 500 + 4 * 10_000) == (0, provider.spent())


CACHE_WRITE = {"input": "3", "output": "15", "cached_input": "0.30", "cache_write": "3.75"}


@pytest.mark.parametrize("kind", KINDS)
async def test_writing_to_the_cache_costs_its_own_price(memory: BudgetStore, clock: TestClock, kind: str) -> None:
    """P3, the input given as a whole."""
    with provider_of(Reply(prompt_tokens=12_307, cache_write_tokens=12_304, tokens=550), **CACHE_WRITE) as provider:
        async with bench(provider, PLENTY, store=memory, clock=clock) as b:
            b.router.policy = policy_of(b.client, PLENTY, strong=model_of(b, **CACHE_WRITE))
            await ask(b, kind, output=550)
            assert await b.sums() == (0, 54_399_000) == (0, provider.spent())


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": 3, "cache_creation_input_tokens": 12_304, "cache_read_input_tokens": 0, "output_tokens": 550},
        {
            "prompt_tokens": 3,
            "completion_tokens": 550,
            "cache_creation_input_tokens": 12_304,
            "cache_read_input_tokens": 0,
            "total_tokens": 553,
        },
        {
            "prompt_tokens": 12_307,
            "completion_tokens": 550,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 12_304},
        },
        Usage(input_tokens=12_307, cache_write_tokens=12_304, output_tokens=550),
    ],
    ids=["anthropic", "a gateway's", "openai", "our own"],
)
async def test_writing_to_the_cache_costs_the_same_however_it_is_reported(
    memory: BudgetStore, clock: TestClock, usage: Any
) -> None:
    """P3, in each of the shapes in which it is reported."""
    with provider_of(Reply(), **CACHE_WRITE) as provider:
        async with bench(provider, PLENTY, store=memory, clock=clock) as b:
            b.router.policy = policy_of(b.client, PLENTY, strong=model_of(b, **CACHE_WRITE))
            async with b.router.admit(chat()) as admission:
                admission.settle(usage)
            assert await b.sums() == (0, 54_399_000)
            assert admission.decision.notes == ()


@pytest.mark.parametrize("place", ["strong", "cheap", "embedding"])
def test_a_model_that_the_table_does_not_know_is_refused_when_the_policy_is_built(place: str) -> None:
    """P4."""
    with pytest.raises(PolicyError) as caught:
        policy_of(None, **{place: Model("nobody-knows-9")})
    assert str(caught.value) == (
        f"{place}: model 'nobody-knows-9' has no price: the price table of genai-prices has no such model; give one with "
        'Model(\'nobody-knows-9\', price=Price.per_million(input="…", output="…")), or Price.free() if it costs nothing; '
        'in a policy file, price = {input = "…", output = "…"}'
    )
    names = {"strong": "gpt-5", "cheap": "gpt-5-mini", place: "nobody-knows-9"}
    toml = "\n".join(f'[{tier}]\nname = "{name}"' for tier, name in names.items())
    with pytest.raises(PolicyError, match=rf"{place}: model 'nobody-knows-9' has no price"):
        Policy.from_toml(toml)


async def test_an_unknown_model_in_a_reply_is_never_priced_at_nothing(memory: BudgetStore, clock: TestClock) -> None:
    """P4, where the policy prices what was served."""
    with provider_of(Reply(model="nobody-knows-9"), input="2", output="10") as provider:
        async with bench(provider, PLENTY, store=memory, clock=clock, price_as="served") as b:
            decision = (await b.router.run(chat())).decision
            assert decision.served_model == "nobody-knows-9"
            assert any("'nobody-knows-9', which has no known price" in note for note in decision.notes)
            assert (decision.actual, await b.sums()) == (provider.spent(), (0, provider.spent()))
            assert provider.spent() > 0


@pytest.mark.parametrize("price", [Price.free(), Price.per_million(0, 0), Price.per_million("0", "0.00")])
async def test_a_price_of_zero_is_free_and_not_unknown(store: BudgetStore, clock: TestClock, price: Price) -> None:
    """P5."""
    with provider_of(Reply(), input=0, output=0) as provider:
        async with bench(provider, Cap(usd=0, per="hour", name="all"), store=store, clock=clock) as b:
            model = Model("strong-model", client=b.client, price=price)
            b.router.policy = policy_of(b.client, *b.router.policy.caps, strong=model)
            decision = (await b.router.run(chat())).decision
            assert (decision.served, decision.estimate, decision.actual) == (True, 0, 0)
            assert decision.usage_source == "provider"
            assert await b.sums() == (0, 0)
            assert "free" in repr(model)


@pytest.mark.parametrize("price_as", ["policy", "served"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_reply_that_names_another_model_is_priced_as_the_policy_says(
    memory: BudgetStore, clock: TestClock, kind: str, price_as: str
) -> None:
    """P6."""
    dated = "gpt-5-mini-2025-08-07"
    with provider_of(Reply(model=dated, prompt_tokens=1000, tokens=10), input="2", output="10") as provider:
        async with bench(provider, PLENTY, store=memory, clock=clock, price_as=price_as) as b:
            answer = await ask(b, kind)
            usage = Usage(input_tokens=1000, output_tokens=10)
            price = STRONG if price_as == "policy" else price_of(dated)[0]
            assert price_of(dated)[0].cost(usage) != STRONG.cost(usage) == provider.spent()
            assert answer.decision.actual == price.cost(usage)
            assert (answer.decision.model, answer.decision.served_model) == ("strong-model", dated)
            assert await b.sums() == (0, price.cost(usage))


@pytest.mark.parametrize("how", [{"n": 3}, {"extra_body": {"n": 3}}], ids=["asked for", "in extra_body"])
async def test_of_three_answers_the_output_is_held_three_times(store: BudgetStore, clock: TestClock, how: Any) -> None:
    """P7."""
    with provider_of(to_the_limit_when_let, input="2", output="10") as provider:
        async with bench(provider, PLENTY, store=store, clock=clock) as b:
            running = asyncio.ensure_future(b.router.run(chat(FIFTEEN, output=100, **how)))
            await provider.wait_for(lambda p: len(p.requests) == 1)
            assert await b.sums() == (15 * 2000 + 300 * 10_000, 0)
            provider.advance(1)
            assert (await running).usage == Usage(input_tokens=15, output_tokens=300)
            assert await b.sums() == (0, 15 * 2000 + 300 * 10_000) == (0, provider.spent())


async def test_ten_times_a_tenth_is_one_and_the_eleventh_is_refused(store: BudgetStore, clock: TestClock) -> None:
    """P8, by what the provider billed."""
    with provider_of(to_the_limit, input="2", output="10") as provider:
        async with bench(provider, Cap(usd=1.00, per="hour", admit_at=1, name="all"), store=store, clock=clock) as b:
            assert [(await b.router.run(worth(10))).served for _ in range(10)] == [True] * 10
            eleventh = (await b.router.run(worth(10))).decision
            assert (eleventh.served, eleventh.kind, eleventh.cap and eleventh.cap.spent) == (False, "spent", 100 * CENT)
            assert await b.sums() == (0, 10**9) == (0, provider.spent())
            assert len(provider.requests) == 10


async def test_ten_floats_of_a_tenth_are_one_dollar_exactly(store: BudgetStore, clock: TestClock) -> None:
    """P8, by what the caller reports."""
    with provider_of(Reply(), input="2", output="10") as provider:
        async with bench(provider, Cap(usd=1.00, per="hour", admit_at=1, name="all"), store=store, clock=clock) as b:
            for _ in range(10):
                await b.spend(0.1, worth(10))
            assert await b.sums() == (0, 10**9)
            async with b.router.admit(worth(10)) as eleventh:
                assert eleventh.served is False


SENSES = {
    "prompt_tokens": 1000,
    "completion_tokens": 100,
    "prompt_tokens_details": {"audio_tokens": 300, "image_tokens": 200},
    "completion_tokens_details": {"audio_tokens": 40},
}


@pytest.mark.parametrize(
    ("rates", "cost"),
    [
        (
            {"input": "2", "output": "10", "input_audio": "32", "input_image": "5", "output_audio": "64"},
            500 * 2000 + 300 * 32_000 + 200 * 5000 + 60 * 10_000 + 40 * 64_000,
        ),
        ({"input": "2", "output": "10", "input_audio": "32"}, 700 * 2000 + 300 * 32_000 + 100 * 10_000),
        ({"input": "2", "output": "10"}, 1000 * 2000 + 100 * 10_000),
    ],
    ids=["each its own", "audio in alone", "none"],
)
async def test_audio_and_images_cost_their_own_price_where_there_is_one(
    memory: BudgetStore, clock: TestClock, rates: dict[str, str], cost: int
) -> None:
    """P9."""
    with provider_of(Reply(), input=0, output=0) as provider:
        async with bench(provider, PLENTY, store=memory, clock=clock) as b:
            b.router.policy = policy_of(b.client, PLENTY, strong=model_of(b, **rates))
            async with b.router.admit(chat()) as admission:
                admission.settle({"usage": SENSES})
            assert await b.sums() == (0, cost)


async def test_audio_costs_what_the_table_says(memory: BudgetStore, clock: TestClock) -> None:
    """P9, with a model of the table."""
    rates = Rates(input="2.50", output="10", input_audio="32", output_audio="64")
    reply = Reply(prompt_tokens=500, input_audio_tokens=300, output_audio_tokens=40, tokens=20)
    with LocalProvider(prices={"gpt-audio": rates}, reply=reply) as provider:
        async with bench(provider, PLENTY, store=memory, clock=clock) as b:
            b.router.policy = policy_of(b.client, PLENTY, strong=Model("gpt-audio", client=b.client))
            actual = (await b.router.run(chat())).decision.actual
            assert actual == 200 * 2500 + 300 * 32_000 + 20 * 10_000 + 40 * 64_000 == provider.spent()


@pytest.mark.parametrize("calls", [1, 4])
async def test_half_a_nano_is_rounded_up_once_a_call(memory: BudgetStore, clock: TestClock, calls: int) -> None:
    """P10."""
    rates = {"input": "0.0375", "output": "0"}
    with provider_of(Reply(prompt_tokens=3), **rates) as provider:
        async with bench(provider, PLENTY, store=memory, clock=clock) as b:
            b.router.policy = policy_of(b.client, PLENTY, strong=model_of(b, **rates))
            assert [(await b.router.run(chat())).decision.actual for _ in range(calls)] == [113] * calls
            assert await b.sums() == (0, 113 * calls) == (0, provider.spent())


def test_the_prices_of_these_cases_are_the_fields() -> None:
    """The prices that all cases are about, in nano-dollars a token."""
    one = Usage(input_tokens=1)
    assert (STRONG.cost(one), CHEAP.cost(one)) == (2000, 200)
    assert (STRONG.cost(Usage(output_tokens=1)), CHEAP.cost(Usage(output_tokens=1))) == (10_000, 1000)
