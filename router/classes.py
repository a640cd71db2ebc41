"""Task classes: what a task may expect of the router."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal, get_args

from router import _checks
from router.errors import PolicyError
from router.money import to_nanos

__all__ = ["TaskClass", "WhenExpired", "WhenStoreDown"]

WhenExpired = Literal["downgrade", "retry_later", "defer", "drop"]
WhenStoreDown = Literal["closed", "cheap", "open"]
OnModelError = Literal["error", "cheap"]
OnOverrun = Literal["extend", "cut"]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class TaskClass:
    """Say what the tasks of one class may expect.

    Args:
        name: what a task calls it by.
        priority: its place in a line; the lower number goes first.
        max_wait: the longest wait for budget in seconds; or "window": until the next window opens, and then for its turn
            as long as that lasts; 0 for none. A task's own deadline ends it too.
        ages_after: seconds of waiting that raise it by one priority, so that it is not starved for ever; None for never.
        when_expired: what happens when the wait is over; needed where there is one. Without a wait: "retry_later".
        when_store_down: what happens when no budget can be reserved: "closed" refuses, "cheap" and "open" serve, up to
            the allowance.
        allowance_usd: what this process may spend while the store is down; needed with "cheap" and "open" only.
        output_limit: tokens of output when a request names no limit; None for the policy's.
        least_output: tokens down to which that limit may shrink to what the caps have room for; None never shrinks it.
        admit_at: the part of every limit at which this class is not admitted any more; None for the caps' own.
        on_model_error: what follows when the strong model fails for good; None for the policy's.
        on_overrun: what happens to a stream that passes its output limit.
        review_downgrades: mark its downgrades for a review.

    Raises:
        PolicyError: one of them is not as said here.
    """

    name: str
    priority: int
    max_wait: float | Literal["window"]
    ages_after: float | None
    when_expired: WhenExpired
    when_store_down: WhenStoreDown
    allowance: int
    """Nano-dollars; 0 where the class is closed."""
    output_limit: int | None
    least_output: int | None
    admit_at: Fraction | None
    on_model_error: OnModelError | None
    on_overrun: OnOverrun
    review_downgrades: bool

    def __init__(
        self,
        name: str,
        *,
        priority: int = 0,
        max_wait: float | Literal["window"] = 0,
        ages_after: float | None = None,
        when_expired: WhenExpired | None = None,
        when_store_down: WhenStoreDown = "closed",
        allowance_usd: int | float | str | Decimal | None = None,
        output_limit: int | None = None,
        least_output: int | None = None,
        admit_at: float | str | Decimal | Fraction | None = None,
        on_model_error: OnModelError | None = None,
        on_overrun: OnOverrun = "extend",
        review_downgrades: bool = False,
    ) -> None:
        _checks.text(name, what="name")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise PolicyError(f"priority must be a whole number, not {_checks.shown(priority)}")
        if isinstance(max_wait, str) and max_wait != "window":
            near = _checks.hint(max_wait, ["window"])
            raise PolicyError(f"max_wait must be a number of seconds or 'window', not {_checks.shown(max_wait)}{near}")
        if max_wait != "window":
            _checks.seconds(max_wait, what="max_wait", zero=True)
        if ages_after is not None:
            _checks.seconds(ages_after, what="ages_after")
        answers = get_args(WhenExpired)
        if when_expired is not None:
            _checks.word(when_expired, answers, what="when_expired")
        elif max_wait != 0:
            raise PolicyError(f"when_expired must be said by a class that waits: write {_checks.listed(answers)}")
        _checks.word(when_store_down, get_args(WhenStoreDown), what="when_store_down")
        if output_limit is not None:
            _checks.whole(output_limit, what="output_limit", least=1)
        if least_output is not None:
            _checks.whole(least_output, what="least_output", least=1)
        if on_model_error is not None:
            _checks.word(on_model_error, get_args(OnModelError), what="on_model_error")
        _checks.word(on_overrun, get_args(OnOverrun), what="on_overrun")
        _checks.flag(review_downgrades, what="review_downgrades")
        put = object.__setattr__
        put(self, "name", name)
        put(self, "priority", priority)
        put(self, "max_wait", max_wait)
        put(self, "ages_after", ages_after)
        put(self, "when_expired", when_expired or "retry_later")
        put(self, "when_store_down", when_store_down)
        put(self, "allowance", _allowance(allowance_usd, when_store_down))
        put(self, "output_limit", output_limit)
        put(self, "least_output", least_output)
        put(self, "admit_at", None if admit_at is None else _checks.share(admit_at, what="admit_at"))
        put(self, "on_model_error", on_model_error)
        put(self, "on_overrun", on_overrun)
        put(self, "review_downgrades", review_downgrades)

    def __repr__(self) -> str:
        wait = "until the window ends" if self.max_wait == "window" else f"{self.max_wait:g} s"
        return (
            f"<TaskClass {self.name}: priority {self.priority}, waits {wait}, then {self.when_expired}, "
            f"{self.when_store_down} when the store is down>"
        )


def _allowance(usd: int | float | str | Decimal | None, when_store_down: WhenStoreDown) -> int:
    if when_store_down == "closed":
        if usd is not None:
            raise PolicyError("allowance_usd has no meaning with when_store_down='closed': leave it out")
        return 0
    if usd is None:
        raise PolicyError(
            f"allowance_usd must be said with when_store_down={when_store_down!r}: "
            "what this process may spend while the store is down"
        )
    try:
        return to_nanos(usd, what="allowance_usd")
    except (TypeError, ValueError) as error:
        raise PolicyError(str(error)) from None
