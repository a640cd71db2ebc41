"""Checks that turn a mistake in a policy into one sentence: what is wrong, and what to write instead."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from fractions import Fraction
from typing import TypeGuard

from router.errors import PolicyError

LARGEST = 2**52
"""The largest amount that a store counts exactly."""


def shown(value: object) -> str:
    """Return a value as a sentence may quote it: its repr, cut where it would drown the sentence."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def hint(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the known word nearest to this one, or nothing when none is near."""
    if not isinstance(word, str):
        return ""
    # The folded form finds "Europe/berlin" and "Strong", which count as far away letter by letter.
    by_fold = {name.casefold(): name for name in known}
    near = get_close_matches(word.casefold(), by_fold, n=1)
    return f"; did you mean {by_fold[near[0]]!r}?" if near else ""


def listed(words: Iterable[str]) -> str:
    """Return words as "'a', 'b' or 'c'"."""
    *firsts, last = [repr(word) for word in words]
    return f"{', '.join(firsts)} or {last}" if firsts else last


def word(value: object, known: Iterable[str], *, what: str) -> None:
    """Refuse a value that is not one of the known words."""
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        raise PolicyError(f"{what} must be {listed(known)}, not {shown(value)}{hint(value, known)}")


def flag(value: object, *, what: str) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        raise PolicyError(f"{what} must be True or False, not {shown(value)}")


def text(value: object, *, what: str) -> None:
    """Refuse what is not a string with something in it."""
    if not isinstance(value, str) or not value:
        raise PolicyError(f"{what} must be a string that is not empty, not {shown(value)}")


def whole(value: object, *, what: str, least: int = 0) -> int:
    """Return a whole number from `least` to 2**52 as it is; a bool and a float are none."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        raise PolicyError(f"{what} must be a whole number from {least} to 2**52, not {shown(value)}")
    return value


def is_number(value: object) -> TypeGuard[int | float]:
    """Say whether a value is a finite number; a bool is none."""
    # Compared, because math.isfinite fails at an int that no float can hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def seconds(value: object, *, what: str, zero: bool = False) -> float:
    """Return a finite number of seconds as it is; 0 only where it has a meaning."""
    if not is_number(value) or value < 0 or (value == 0 and not zero):
        raise PolicyError(f"{what} must be a number of seconds {'from' if zero else 'above'} 0, not {shown(value)}")
    if value > LARGEST:
        raise PolicyError(f"{what} must be at most 2**52 seconds, not {shown(value)}")
    return value


def fraction(value: object, *, what: str) -> Fraction:
    """Return a number of 0 or more exactly as it is written: 0.85 is 17/20, not its nearest binary fraction."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal | Fraction):
            raise TypeError
        number = value if isinstance(value, int | Fraction) else Decimal(str(value))
        # Checked before it is made exact, which would write 1e999999 out digit by digit.
        if isinstance(number, Decimal) and abs(number.adjusted()) > 30:
            raise ValueError
        exact = Fraction(number)
        if exact > LARGEST:
            raise ValueError
    except (TypeError, ValueError, OverflowError, InvalidOperation):
        raise PolicyError(f"{what} must be a number such as 0.85, not {shown(value)}") from None
    if exact < 0:
        raise PolicyError(f"{what} must not be negative, not {shown(value)}")
    return exact


def share(value: object, *, what: str) -> Fraction:
    """Return a part of a whole, above 0 and at most 1, exactly."""
    exact = fraction(value, what=what)
    if not 0 < exact <= 1:
        raise PolicyError(f"{what} must be above 0 and at most 1, not {shown(value)}")
    return exact
