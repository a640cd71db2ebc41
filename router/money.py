"""Amounts of money: whole nano-dollars inside, `Decimal` dollars outside, never a float sum."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from fractions import Fraction

NANOS = 10**9
"""Nano-dollars in one dollar."""

LARGEST = 2**52
"""The largest amount, in nano-dollars (about 4.5 million dollars): what every store counts exactly."""


def decimal_of(value: object, *, what: str) -> Decimal:
    """Read `value` as a finite number that is not negative.

    A float is taken at its shortest decimal form, so that `0.1` means a tenth and not the nearest binary fraction.

    Raises:
        ValueError: it is no such number; the sentence begins with `what`.
    """
    # To Python a bool is an int, but nobody means one dollar by True.
    if isinstance(value, bool) or not isinstance(value, int | str | float | Decimal):
        raise ValueError(f'{what} is {_shown(value)}: write a number such as 20, "0.25" or Decimal("0.25")')
    try:
        number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    except InvalidOperation:
        raise ValueError(f'{what} is {_shown(value)}: write a plain number such as 20 or "0.25"') from None
    if not number.is_finite():
        raise ValueError(f"{what} is {_shown(value)}: write a finite number, 0 or more")
    if number < 0:
        raise ValueError(f"{what} is {_shown(value)}: write a number that is not negative")
    return number


def to_nanos(value: int | str | Decimal | float, *, what: str) -> int:
    """Convert dollars to nano-dollars, exactly.

    Args:
        value: dollars.
        what: the name of the amount, with which the sentence of an error begins.

    Raises:
        ValueError: it is not a finite number from 0 to `LARGEST`, or it is finer than a nano-dollar.
    """
    dollars = decimal_of(value, what=what)
    # Both comparisons come before any exact arithmetic: 1e999999 and 1e-999999 are megabytes when written out.
    if dollars > to_usd(LARGEST):
        raise ValueError(f"{what} is {_shown(value)}: write at most {to_usd(LARGEST)} dollars")
    if dollars == 0:
        return 0
    nanos = Fraction(dollars) * NANOS if dollars >= to_usd(1) else Fraction(1, 2)
    if nanos.denominator != 1:
        raise ValueError(f"{what} is {_shown(value)}: write whole nano-dollars, that is nine decimal places at most")
    return nanos.numerator


def to_usd(nanos: int) -> Decimal:
    """Convert nano-dollars to dollars, exactly."""
    return Decimal(nanos).scaleb(-9)


def format_usd(nanos: int) -> str:
    """Write nano-dollars as dollars with the decimals they need, two at least: `$1.50`, `-$0.000000001`."""
    whole, part = divmod(abs(nanos), NANOS)
    decimals = f"{part:09d}".rstrip("0").ljust(2, "0")
    return f"{'-' if nanos < 0 else ''}${whole}.{decimals}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out an int of more than 4,300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
