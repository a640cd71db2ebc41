from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.money import LARGEST, NANOS, format_usd, to_nanos, to_usd


@pytest.mark.parametrize(
    ("dollars", "nanos"),
    [
        (0, 0),
        (50, 50 * NANOS),
        ("0.25", 250_000_000),
        ("1e-9", 1),
        (Decimal("0.000000001"), 1),
        (0.1, 100_000_000),
        (1e-9, 1),
        (-0.0, 0),
        ("1.50000000000000000000000000000000000000", 1_500_000_000),
        (" 20 ", 20 * NANOS),
        (Decimal(LARGEST).scaleb(-9), LARGEST),
    ],
)
def test_dollars_become_nano_dollars_exactly(dollars: int | str | Decimal | float, nanos: int) -> None:
    assert nanos == to_nanos(dollars, what="usd")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (-1, "usd is -1: write a number that is not negative"),
        ("-0.5", "usd is '-0.5': write a number that is not negative"),
        (float("nan"), "usd is nan: write a finite number, 0 or more"),
        (float("inf"), "usd is inf: write a finite number, 0 or more"),
        ("sNaN", "usd is 'sNaN': write a finite number, 0 or more"),
        (True, 'usd is True: write a number such as 20, "0.25" or Decimal("0.25")'),
        (None, 'usd is None: write a number such as 20, "0.25" or Decimal("0.25")'),
        ("50 dollars", "usd is '50 dollars': write a plain number such as 20 or \"0.25\""),
        ("", "usd is '': write a plain number such as 20 or \"0.25\""),
        ("1e-10", "usd is '1e-10': write whole nano-dollars, that is nine decimal places at most"),
        ("1e-999999", "usd is '1e-999999': write whole nano-dollars, that is nine decimal places at most"),
        ("0.1000000001", "usd is '0.1000000001': write whole nano-dollars, that is nine decimal places at most"),
        ("1e999999", "usd is '1e999999': write at most 4503599.627370496 dollars"),
        pytest.param(
            10**5000,
            "usd is a number of thousands of digits: write at most 4503599.627370496 dollars",
            id="huge",
        ),
        (to_usd(LARGEST + 1), "usd is Decimal('4503599.627370497'): write at most 4503599.627370496 dollars"),
    ],
)
def test_an_amount_that_cannot_be_is_refused_in_its_own_words(value: object, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the sentence is compared whole
        to_nanos(value, what="usd")  # type: ignore[arg-type]
    assert sentence == str(caught.value)


@given(st.integers(0, LARGEST))
def test_nano_dollars_survive_the_way_to_dollars_and_back(nanos: int) -> None:
    assert nanos == to_nanos(to_usd(nanos), what="usd")
    assert nanos == to_nanos(format_usd(nanos)[1:], what="usd")


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (0, "$0.00"),
        (1_234_567_000, "$1.234567"),
        (1_500_000_000, "$1.50"),
        (20_000 * NANOS, "$20000.00"),
        (1, "$0.000000001"),
        (-1_500_000_000, "-$1.50"),
    ],
)
def test_dollars_are_written_with_the_decimals_they_need(nanos: int, text: str) -> None:
    assert text == format_usd(nanos)
