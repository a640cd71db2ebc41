"""What calls cost: exact rates per token, context-size tiers, and the price table that comes with genai-prices."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from router.money import NANOS, decimal_of
from router.usage import Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice, PriceCalculation, TieredPrices

_MILLION = 10**6
_Amount = int | str | Decimal | float


class UnknownPrice(ValueError):
    """No price is known for a model, so no cap in dollars could hold it."""

    def __init__(self, model: str, because: str) -> None:
        super().__init__(
            f"model {model!r} has no price: {because}; give one with "
            f'Model({model!r}, price=Price.per_million(input="…", output="…")), or Price.free() if it costs nothing; '
            'in a policy file, price = {input = "…", output = "…"}'
        )
        self.model = model


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Nano-dollars per token of each class, and per call."""

    input: Fraction
    cached_input: Fraction
    cache_write: Fraction
    input_audio: Fraction
    input_image: Fraction
    output: Fraction
    output_audio: Fraction
    call: Fraction = Fraction(0)
    _over: int = field(init=False, repr=False, compare=False)
    _whole: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The same rates as whole numbers over one denominator: exact too, and many times faster to add up.
        rates = (
            self.input,
            self.cached_input,
            self.cache_write,
            self.input_audio,
            self.input_image,
            self.output,
            self.output_audio,
            self.call,
        )
        *whole, over = _whole(*rates)
        object.__setattr__(self, "_over", over)
        object.__setattr__(self, "_whole", tuple(whole))

    @classmethod
    def per_million(
        cls,
        *,
        input: _Amount,
        output: _Amount,
        cached_input: _Amount | None = None,
        cache_write: _Amount | None = None,
        input_audio: _Amount | None = None,
        input_image: _Amount | None = None,
        output_audio: _Amount | None = None,
    ) -> Rates:
        """Build rates from dollars per million tokens; a class without its own is billed as plain input or output.

        Raises:
            ValueError: a rate is not a finite number of 0 or more.
        """
        plain_in, plain_out = _rate(input, "input"), _rate(output, "output")
        return cls(
            input=plain_in,
            cached_input=plain_in if cached_input is None else _rate(cached_input, "cached_input"),
            cache_write=plain_in if cache_write is None else _rate(cache_write, "cache_write"),
            input_audio=plain_in if input_audio is None else _rate(input_audio, "input_audio"),
            input_image=plain_in if input_image is None else _rate(input_image, "input_image"),
            output=plain_out,
            output_audio=plain_out if output_audio is None else _rate(output_audio, "output_audio"),
        )

    def dearest(self) -> tuple[Fraction, Fraction]:
        """Return the highest rate that an input token and that an output token can be billed at."""
        inputs = (self.input, self.cached_input, self.cache_write, self.input_audio, self.input_image)
        return max(inputs), max(self.output, self.output_audio)

    def cost(self, usage: Usage) -> Fraction:
        """Return the exact cost of `usage` in nano-dollars; no token is billed twice."""
        cached, written = usage.cached_tokens, usage.cache_write_tokens
        # Replies do not say how much of the audio and the images came from the cache. What did is billed as
        # cached, so no more of them is left at their own rate than there are tokens outside the cache.
        rest = max(0, usage.input_tokens - cached - written)
        audio = min(usage.input_audio_tokens, rest)
        image = min(usage.input_image_tokens, rest - audio)
        spoken = min(usage.output_audio_tokens, usage.output_tokens)
        plain, from_cache, to_cache, heard, looked_at, out, said, call = self._whole
        return Fraction(
            call
            + plain * (rest - audio - image)
            + from_cache * cached
            + to_cache * written
            + heard * audio
            + looked_at * image
            + out * (usage.output_tokens - spoken)
            + said * spoken,
            self._over,
        )

    def __str__(self) -> str:
        parts = [f"{_dollars(self.input)} in"]
        named = (
            ("cached", self.cached_input, self.input),
            ("cache write", self.cache_write, self.input),
            ("audio in", self.input_audio, self.input),
            ("images in", self.input_image, self.input),
        )
        parts += [f"{_dollars(rate)} {name}" for name, rate, plain in named if rate != plain]
        parts.append(f"{_dollars(self.output)} out")
        if self.output_audio != self.output:
            parts.append(f"{_dollars(self.output_audio)} audio out")
        return ", ".join(parts) + " per 1M tokens" + (f", {_dollars(self.call / _MILLION)} a call" if self.call else "")


@dataclass(frozen=True, slots=True, repr=False)
class Price:
    """What a model costs, by the size of the prompt.

    `tiers` holds pairs of a token count and the rates of every call whose whole prompt, cached tokens included, is
    larger than that; the first is for all smaller ones and starts at 0. The whole call is billed at one tier.

    Raises:
        ValueError: the tiers do not start at 0, or do not rise.
    """

    tiers: tuple[tuple[int, Rates], ...]
    _dearest: tuple[tuple[int, int, int, int, int], ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.tiers]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"price tiers start at {starts}: write 0 first, then rising token counts")
        object.__setattr__(self, "_dearest", tuple((start, *_whole(*r.dearest(), r.call)) for start, r in self.tiers))

    @classmethod
    def per_million(
        cls,
        input: _Amount,
        output: _Amount,
        *,
        cached_input: _Amount | None = None,
        cache_write: _Amount | None = None,
        input_audio: _Amount | None = None,
        input_image: _Amount | None = None,
        output_audio: _Amount | None = None,
    ) -> Price:
        """Build a price without tiers from dollars per million tokens, as `Rates.per_million` reads them.

        Raises:
            ValueError: a rate is not a finite number of 0 or more.
        """
        rates = Rates.per_million(
            input=input,
            output=output,
            cached_input=cached_input,
            cache_write=cache_write,
            input_audio=input_audio,
            input_image=input_image,
            output_audio=output_audio,
        )
        return cls(((0, rates),))

    @classmethod
    def free(cls) -> Price:
        """Return the price of a model that costs nothing, which is not the same as an unknown price."""
        return cls.per_million(0, 0)

    @property
    def version(self) -> str:
        """Twelve hex digits that change when any rate does."""
        return hashlib.sha256(repr(self.tiers).encode()).hexdigest()[:12]

    def cost(self, usage: Usage) -> int:
        """Return what `usage` costs in nano-dollars, rounded up once."""
        rates = self.tiers[0][1]
        for start, above in self.tiers[1:]:
            if usage.input_tokens > start:
                rates = above
        return math.ceil(rates.cost(usage))

    def bound(self, *, input_tokens: int, output_tokens: int) -> int:
        """Return the most, in nano-dollars, that a call with at most that many tokens can cost.

        Every tier up to that size counts, each with the largest prompt that falls in it, because a table may price
        a larger prompt lower. Each token counts at the dearest rate of its side, writing to the cache included.
        """
        most = 0
        for index, (start, per_input, per_output, call, over) in enumerate(self._dearest):
            if index and start >= input_tokens:
                break
            last = index + 1 == len(self._dearest)
            largest = input_tokens if last else min(input_tokens, self._dearest[index + 1][0])
            most = max(most, -(-(per_input * largest + per_output * output_tokens + call) // over))
        return most

    def __str__(self) -> str:
        first, *more = self.tiers
        if not more and not any((*first[1].dearest(), first[1].call)):
            return "free"
        return "; ".join([str(first[1]), *(f"above {start:,} tokens of prompt {rates}" for start, rates in more)])

    def __repr__(self) -> str:
        return f"<Price: {self}>"


def _whole(*rates: Fraction) -> tuple[int, ...]:
    """Return rates as whole numbers over the denominator that follows them."""
    over = math.lcm(*(rate.denominator for rate in rates))
    return (*(int(rate * over) for rate in rates), over)


def price_of(
    model: str, *, provider: str | None = None, service_tier: str | None = None, at: datetime | None = None
) -> tuple[Price, int | None]:
    """Look a model up in the table that comes with genai-prices; no network is used.

    Where a price depends on the time of day, the dearest of the day is taken: a call may be billed at any of them.
    Fees for what a call only pays when it uses it (web search, file search, an hour of cache) are not in the price,
    nor are images, audio and video that the table prices by other measures than tokens.

    Args:
        model: the name as the provider takes it.
        provider: whose price, by genai-prices' name ("openai", "azure", "anthropic", …); without one the table
            guesses from the model's name, and tries "openai" last.
        service_tier: "priority", "flex", … as the request asks for it; None, "auto" and "default" are the standard.
        at: when the price is in force; now, unless said.

    Returns:
        The price, and the context window in tokens where the table has one.

    Raises:
        UnknownPrice: the table has no such model or provider, or prices it by something else than tokens.
    """
    at = at or datetime.now(UTC)
    standard = service_tier in (None, "auto", "default", "standard")
    context = {} if standard else {"service_tier": str(service_tier)}
    found = _find(model, provider, at)
    info = found.model
    # Without a line of its own "flex" costs at most the standard price; any other tier may be dearer.
    if not standard and service_tier != "flex" and not _has_variant(info, context, at):
        raise UnknownPrice(model, f"the price table has none for service tier {service_tier!r}")
    prices = [info.get_prices(moment, context) for moment in _moments(info, at)]
    for price in prices:
        _check(model, price)
    return Price(_tiers(prices)), info.context_window


def _find(model: str, provider: str | None, at: datetime) -> PriceCalculation:
    # Its data is a module of thirty thousand lines, which whoever gives own prices need not load.
    from genai_prices import calc_price  # noqa: PLC0415
    from genai_prices.types import Usage as NoUsage  # noqa: PLC0415

    for name in (provider,) if provider is not None else (None, "openai"):
        try:
            return calc_price(NoUsage(), model, provider_id=name, genai_request_timestamp=at)
        except LookupError:
            continue
    where = f" for provider {provider!r}" if provider is not None else ""
    raise UnknownPrice(model, f"the price table of genai-prices has no such model{where}")


def _has_variant(info: ModelInfo, context: dict[str, str], at: datetime) -> bool:
    return any(
        variant.when == context and (variant.constraint is None or variant.constraint.active(at))
        for variant in info.price_variants or ()
    )


def _moments(info: ModelInfo, at: datetime) -> Iterable[datetime]:
    """Yield `at`, and every time of its day at which the price of the model may change."""
    yield at
    conditions = [] if not isinstance(info.prices, list) else [price.constraint for price in info.prices]
    for condition in conditions + [variant.constraint for variant in info.price_variants or ()]:
        for name in ("start_time", "end_time"):
            time = getattr(condition, name, None)
            if time is not None:
                yield datetime.combine(at.date(), time, time.tzinfo or UTC)


def _check(model: str, price: ModelPrice) -> None:
    if price.input_mtok is None:
        raise UnknownPrice(model, "the price table of genai-prices does not price its input by tokens")
    for key in ("output_reasoning_mtok", "output_citation_mtok"):
        if getattr(price, key, None) is not None:
            raise UnknownPrice(model, f"it bills {key.removesuffix('_mtok')} tokens apart, which no bound can hold")


def _tiers(prices: list[ModelPrice]) -> tuple[tuple[int, Rates], ...]:
    def per_token(start: int, key: str, fallback: Fraction) -> Fraction:
        values = [getattr(price, key, None) for price in prices]
        return max(fallback if value is None else _at(value, start) * NANOS / _MILLION for value in values)

    starts = {0}
    for price in prices:
        for value in vars(price).values():
            starts.update(tier.start for tier in getattr(value, "tiers", ()))
    tiers = []
    for start in sorted(starts):
        plain_in = per_token(start, "input_mtok", Fraction(0))
        plain_out = per_token(start, "output_mtok", Fraction(0))
        rates = Rates(
            input=plain_in,
            cached_input=per_token(start, "cache_read_mtok", plain_in),
            cache_write=per_token(start, "cache_write_mtok", plain_in),
            input_audio=per_token(start, "input_audio_mtok", plain_in),
            input_image=per_token(start, "input_image_mtok", plain_in),
            output=plain_out,
            output_audio=per_token(start, "output_audio_mtok", plain_out),
            call=per_token(start, "requests_kcount", Fraction(0)) * 1000,
        )
        tiers.append((start, rates))
    return tuple(tiers)


def _at(value: Decimal | TieredPrices, start: int) -> Fraction:
    """Return the dollars of the tier that a prompt of just more than `start` tokens falls in."""
    if isinstance(value, Decimal):
        return Fraction(value)
    price = value.base
    for tier in value.tiers:
        if tier.start <= start:
            price = tier.price
    return Fraction(price)


def _rate(value: _Amount, name: str) -> Fraction:
    dollars = decimal_of(value, what=f"price {name}")
    # The comparison keeps 1e999999 from being written out as a fraction.
    if dollars > _MILLION or (dollars and dollars.adjusted() < -30):
        raise ValueError(f"price {name} is {value!r}: write dollars per million tokens, at most {_MILLION}")
    return Fraction(dollars) * NANOS / _MILLION


def _dollars(nanos_per_token: Fraction) -> str:
    dollars = nanos_per_token * _MILLION / NANOS
    if dollars.denominator == 1:
        return f"${dollars.numerator}"
    text = f"{Decimal(dollars.numerator) / Decimal(dollars.denominator):f}"
    return "$" + (text if len(text.partition(".")[2]) >= 2 else text + "0")
