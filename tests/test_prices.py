from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import genai_prices
import pytest
from genai_prices.data_snapshot import get_snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prices import Price, Rates, UnknownPrice, price_of
from router.usage import Usage

_WHEN = datetime(2026, 12, 1, 12, tzinfo=UTC)


def test_cached_tokens_are_billed_at_their_own_rate() -> None:
    price = Price.per_million(2, 10, cached_input="0.20")
    assert price.cost(Usage(input_tokens=2006, cached_tokens=1920)) == 86 * 2000 + 1920 * 200


def test_more_cached_than_sent_costs_each_class_and_never_less_than_nothing() -> None:
    price = Price.per_million(2, 10, cached_input="0.20")
    assert price.cost(Usage(input_tokens=100, cached_tokens=150, output_tokens=1, odd=True)) == 150 * 200 + 10_000


def test_writing_to_the_cache_has_its_rate() -> None:
    price = Price.per_million(3, 15, cache_write="3.75", cached_input="0.3")
    usage = Usage(input_tokens=12_307, cache_write_tokens=12_304, output_tokens=550)
    assert price.cost(usage) == 54_399_000


def test_a_cost_is_exact_and_rounded_up_once() -> None:
    assert Price.per_million("0.0375", 0).cost(Usage(input_tokens=3)) == 113
    assert Price.per_million("0.0005", "0.0005").cost(Usage(input_tokens=1, output_tokens=1)) == 1


def test_audio_and_images_are_billed_at_their_own_rates_and_only_outside_the_cache() -> None:
    price = Price.per_million(4, 16, cached_input="0.4", input_audio=32, input_image=5, output_audio=64)
    usage = Usage(
        input_tokens=100,
        cached_tokens=40,
        input_audio_tokens=50,
        input_image_tokens=20,
        output_tokens=30,
        output_audio_tokens=10,
    )
    assert price.cost(usage) == 40 * 400 + 50 * 32_000 + 10 * 5_000 + 20 * 16_000 + 10 * 64_000


def test_a_class_without_a_rate_is_billed_as_plain_tokens() -> None:
    usage = Usage(
        input_tokens=10,
        cached_tokens=4,
        cache_write_tokens=3,
        input_audio_tokens=2,
        output_tokens=5,
        output_audio_tokens=1,
    )
    assert Price.per_million("2", "10").cost(usage) == 10 * 2000 + 5 * 10_000


def test_free_is_a_price() -> None:
    assert Price.free().bound(input_tokens=10**6, output_tokens=10**6) == 0
    assert str(Price.free()) == "free"
    assert Price.free() == Price.per_million(0, "0.0")


def _tiered() -> Price:
    return Price(
        (
            (0, Rates.per_million(input="0.15", output=1)),
            (272_000, Rates.per_million(input="0.5", output=2)),
        )
    )


def test_the_whole_call_is_billed_at_the_tier_of_its_prompt() -> None:
    price = _tiered()
    assert price.cost(Usage(input_tokens=272_000, output_tokens=1)) == 272_000 * 150 + 1_000
    assert price.cost(Usage(input_tokens=272_001, output_tokens=1)) == 272_001 * 500 + 2_000
    assert price.bound(input_tokens=300_000, output_tokens=0) == 300_000 * 500
    assert price.bound(input_tokens=272_000, output_tokens=0) == 272_000 * 150


_amounts = st.decimals(0, 100, places=4, allow_nan=False)
_rates = st.builds(
    Rates.per_million,
    input=_amounts,
    output=_amounts,
    cached_input=st.none() | _amounts,
    cache_write=st.none() | _amounts,
    input_audio=st.none() | _amounts,
    input_image=st.none() | _amounts,
    output_audio=st.none() | _amounts,
)
# Cheaper tiers above dearer ones occur here: the bound must hold for those, too.
_prices = st.builds(
    lambda first, more: Price(((0, first), *sorted(more.items()))),
    _rates,
    st.dictionaries(st.integers(1, 400), _rates, max_size=3),
)


@st.composite
def _usages(draw: st.DrawFn, most: int = 500) -> Usage:
    total, output = draw(st.integers(0, most)), draw(st.integers(0, most))
    cached = draw(st.integers(0, total))
    written = draw(st.integers(0, total - cached))
    audio = draw(st.integers(0, total))
    image = draw(st.integers(0, total - audio))
    return Usage(
        input_tokens=total,
        cached_tokens=cached,
        cache_write_tokens=written,
        input_audio_tokens=audio,
        input_image_tokens=image,
        output_tokens=output,
        output_audio_tokens=draw(st.integers(0, output)),
    )


@given(_prices, _usages(), st.integers(0, 100), st.integers(0, 100))
def test_no_call_costs_more_than_its_bound(price: Price, usage: Usage, spare_in: int, spare_out: int) -> None:
    bound = price.bound(input_tokens=usage.input_tokens + spare_in, output_tokens=usage.output_tokens + spare_out)
    assert price.cost(usage) <= bound


@given(_prices, st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_a_bound_never_falls_when_more_tokens_are_allowed(price: Price, a: int, b: int, more_a: int, more_b: int) -> None:
    less = price.bound(input_tokens=a, output_tokens=b)
    assert less <= price.bound(input_tokens=a + more_a, output_tokens=b + more_b)


def _table() -> list[tuple[str, str]]:
    """Every tenth model of the table, and all of OpenAI's."""
    names = [(provider.id, model.id) for provider in get_snapshot().providers for model in provider.models]
    return [name for index, name in enumerate(names) if name[0] == "openai" or index % 10 == 0]


def test_costs_are_those_of_the_price_table() -> None:
    compared = 0
    for provider, model in _table():
        try:
            price, _ = price_of(model, provider=provider, at=_WHEN)
        except UnknownPrice:
            continue
        for total, cached, written, output in [
            (7, 0, 0, 3),
            (2006, 1920, 0, 300),
            (200_000, 9, 50, 1),
            (272_001, 5, 7, 9),
        ]:
            usage = Usage(input_tokens=total, cached_tokens=cached, cache_write_tokens=written, output_tokens=output)
            theirs = genai_prices.Usage(
                input_tokens=total, cache_read_tokens=cached, cache_write_tokens=written, output_tokens=output
            )
            cost = genai_prices.calc_price(theirs, model, provider_id=provider, genai_request_timestamp=_WHEN).total_price
            # Above the table's price only where that depends on the time of day.
            assert math.ceil(cost * 10**9) == price.cost(usage) or provider == "deepseek", (provider, model)
            assert cost * 10**9 <= price.bound(input_tokens=total, output_tokens=output)
            compared += 1
    assert compared > 800


@pytest.mark.parametrize("model", ["gpt-audio", "gpt-realtime", "gpt-image-1"])
@settings(max_examples=30, deadline=None)
@given(audio=st.integers(0, 50), image=st.integers(0, 50), spoken=st.integers(0, 50))
def test_audio_and_images_cost_what_the_table_says(model: str, audio: int, image: int, spoken: int) -> None:
    price, _ = price_of(model, at=_WHEN)
    usage = Usage(
        input_tokens=100,
        input_audio_tokens=audio,
        input_image_tokens=image,
        output_tokens=60,
        output_audio_tokens=spoken,
    )
    theirs = genai_prices.Usage(
        input_tokens=100,
        input_audio_tokens=audio,
        input_image_tokens=image,
        output_tokens=60,
        output_audio_tokens=spoken,
    )
    cost = genai_prices.calc_price(theirs, model, provider_id="openai", genai_request_timestamp=_WHEN).total_price
    assert math.ceil(cost * 10**9) == price.cost(usage)


def test_a_price_comes_with_the_context_window() -> None:
    price, context_window = price_of("gpt-5", at=_WHEN)
    assert Price.per_million("1.25", 10, cached_input="0.125") == price
    assert context_window == 400_000


def test_an_embedding_model_is_found_without_its_provider() -> None:
    price, _ = price_of("text-embedding-3-small", at=_WHEN)
    assert Price.per_million("0.02", 0) == price


def test_a_price_that_depends_on_the_time_of_day_is_the_dearest() -> None:
    night = price_of("deepseek-chat", at=datetime(2026, 12, 1, 20, tzinfo=UTC))[0]
    noon = price_of("deepseek-chat", at=_WHEN)[0]
    assert noon == night
    assert Price.per_million("0.27", "1.1", cached_input="0.07") == noon


def test_a_price_is_the_one_in_force_on_its_day() -> None:
    before = price_of("gpt-5.6-sol", at=datetime(2026, 8, 20, tzinfo=UTC))[0]
    after = price_of("gpt-5.6-sol", at=datetime(2026, 8, 21, tzinfo=UTC))[0]
    assert (before.cost(Usage(input_tokens=1)), after.cost(Usage(input_tokens=1))) == (5_000, 4_000)


def test_a_service_tier_has_its_own_price() -> None:
    standard = price_of("gpt-5", at=_WHEN)[0]
    assert Price.per_million("2.5", 20, cached_input="0.25") == price_of("gpt-5", service_tier="priority", at=_WHEN)[0]
    assert standard == price_of("gpt-5", service_tier="auto", at=_WHEN)[0]
    assert standard == price_of("gpt-5", service_tier="default", at=_WHEN)[0]


def test_a_dear_service_tier_that_the_table_does_not_know_has_no_price() -> None:
    with pytest.raises(UnknownPrice, match="has none for service tier 'priority'"):
        price_of("gpt-3.5-turbo", service_tier="priority", at=_WHEN)
    assert price_of("gpt-3.5-turbo", at=_WHEN) == price_of("gpt-3.5-turbo", service_tier="flex", at=_WHEN)


def test_a_fee_for_each_call_is_in_cost_and_bound() -> None:
    price, _ = price_of("sonar-pro", provider="perplexity", at=_WHEN)
    assert 14_000_000 == price.cost(Usage.zero()) == price.bound(input_tokens=0, output_tokens=0)


@pytest.mark.parametrize(
    ("model", "provider", "because"),
    [
        ("no-such-model", None, "has no such model;"),
        ("gpt-5", "nobody", "has no such model for provider 'nobody'"),
        ("whisper-1", None, "does not price its input by tokens"),
        ("sonar-deep-research", "perplexity", "bills output_reasoning tokens apart"),
    ],
)
def test_a_model_without_a_price_is_refused_with_what_to_write(model: str, provider: str | None, because: str) -> None:
    with pytest.raises(UnknownPrice) as caught:
        price_of(model, provider=provider, at=_WHEN)
    assert because in str(caught.value)
    assert f'Model({model!r}, price=Price.per_million(input="…", output="…"))' in str(caught.value)


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), True, "50 dollars", "1e999999", "1e-999999", None])
def test_a_rate_that_cannot_be_is_refused(amount: Any) -> None:
    with pytest.raises(ValueError, match=r"^price output is .*: write "):
        Price.per_million(1, amount)


@pytest.mark.parametrize("starts", [[], [1], [0, 5, 5], [0, 7, 3]])
def test_tiers_must_rise_from_zero(starts: list[int]) -> None:
    rates = Rates.per_million(input=1, output=1)
    with pytest.raises(ValueError, match="write 0 first, then rising token counts"):
        Price(tuple((start, rates) for start in starts))


def test_a_price_reads_like_a_price_list() -> None:
    assert str(Price.per_million("2", "10", cached_input="0.2")) == "$2 in, $0.20 cached, $10 out per 1M tokens"
    assert (
        repr(_tiered())
    ) == "<Price: $0.15 in, $1 out per 1M tokens; above 272,000 tokens of prompt $0.50 in, $2 out per 1M tokens>"


def test_a_version_changes_with_any_rate_and_with_nothing_else() -> None:
    price = Price.per_million("2", "10")
    assert price.version == Price.per_million(2.0, Decimal("10.00"), cached_input=2).version
    assert len(price.version) == 12
    others = [
        Price.per_million("2", "10", cache_write="2.0001"),
        Price.per_million("2", "10.1"),
        _tiered(),
        Price.free(),
    ]
    assert len({price.version, *(other.version for other in others)}) == 5


def test_rates_are_exact_fractions_of_a_nano_dollar() -> None:
    assert Fraction(75, 2) == Rates.per_million(input="0.0375", output=0).input
