"""Caps: a limit in one unit, over one window, for one scope, on some tiers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, get_args

from router import _checks
from router.errors import MissingLabel, PolicyError
from router.money import to_nanos, to_usd
from router.task import Tier
from router.windows import Calendar, Period, Weekday

__all__ = ["Cap", "Unit"]

Unit = Literal["usd", "tokens", "requests"]
Usd = int | float | str | Decimal

_LINE_OF_MONEY = Fraction(17, 20)
_HIERARCHY = ("group", "team", "seat", "org")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Cap:
    """Limit what may be spent.

    Args:
        usd, tokens, requests: the limit, in exactly one of these units; 0 admits nothing that costs. Dollars are taken
            as they are written: 0.1 is a tenth of a dollar, to the nano-dollar.
        per: the window: "minute", "hour", "day", "week", "month", a number of seconds, or None for none (a run).
        scope: the label, or the labels, whose values are counted apart; None counts everybody together.
        tiers: the tiers that it counts; None counts every call, embeddings too.
        soft: count and alert, and let the task through.
        limits: limits of their own for some values of labels, such as {"user:alice": 20, "group:research": 10}.
        timezone, week_starts: where the calendar of the window is read.
        admit_at: the part of the limit at which it stops admitting; by default 0.85 for hard usd caps over calendar
            windows (what is held is an estimate, and the rest is for its error) and 1 otherwise.
        alert_at: parts of the limit at which an alert is due, such as (0.5, 0.8).
        name: what its buckets are called; by default derived from what it counts, never from how much.

    Raises:
        PolicyError: one of them is not as said here.
    """

    unit: Unit
    limit: int
    """Nano-dollars, tokens or requests, by the unit."""
    period: Period
    scope: tuple[str, ...]
    tiers: frozenset[Tier] | None
    soft: bool
    limits: Mapping[str, int] = field(hash=False)
    line_at: Fraction
    alert_at: tuple[Fraction, ...]
    name: str
    _order: tuple[str, ...]

    def __init__(
        self,
        *,
        per: Calendar | float | None,
        usd: Usd | None = None,
        tokens: int | None = None,
        requests: int | None = None,
        scope: str | Sequence[str] | None = None,
        tiers: Collection[Tier] | None = None,
        soft: bool = False,
        limits: Mapping[str, Usd] | None = None,
        timezone: str = "UTC",
        week_starts: Weekday = "monday",
        admit_at: float | str | Decimal | Fraction | None = None,
        alert_at: Sequence[float | str | Decimal | Fraction] = (),
        name: str | None = None,
    ) -> None:
        unit, limit = _limit(usd=usd, tokens=tokens, requests=requests)
        _checks.flag(soft, what="soft")
        if soft and admit_at is not None:
            raise PolicyError("admit_at has no meaning for a soft cap, which refuses nothing: write alert_at instead")
        put = object.__setattr__
        put(self, "unit", unit)
        put(self, "limit", limit)
        put(self, "period", Period(per, timezone=timezone, week_starts=week_starts))
        put(self, "scope", _scope(scope))
        put(self, "tiers", None if tiers is None else _tiers(tiers))
        put(self, "soft", soft)
        put(self, "limits", MappingProxyType(_limits(limits, unit)))
        put(self, "line_at", self._default_line() if admit_at is None else _checks.share(admit_at, what="admit_at"))
        put(self, "alert_at", _levels(alert_at))
        if name is not None:
            _checks.text(name, what="name")
        put(self, "name", self._derived_name() if name is None else name)
        put(self, "_order", _order(self.scope, self.limits))

    def scope_values(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Return the values that a task with these labels is counted under, in the order of the scope.

        Raises:
            MissingLabel: the task lacks one.
        """
        try:
            return tuple([labels[label] for label in self.scope])
        except KeyError as missing:
            raise MissingLabel(missing.args[0], self.name) from None

    def limit_for(self, labels: Mapping[str, str]) -> int:
        """Return the limit for a task with these labels, the most specific that was given.

        That is the one for the value of the scope's last label (this user's own); else for the task's group, team,
        seat or org, in this order; else for any other label, in the order in which `limits` first names them; else the
        cap's own.
        """
        for label in self._order:
            if label in labels:
                limit = self.limits.get(f"{label}:{labels[label]}")
                if limit is not None:
                    return limit
        return self.limit

    def line_for(self, limit: int, admit_at: Fraction | None = None) -> int:
        """Return where a bucket with this limit stops admitting, for a class that may stop earlier still."""
        line_at = self.line_at if admit_at is None else min(self.line_at, admit_at)
        return limit * line_at.numerator // line_at.denominator

    def _default_line(self) -> Fraction:
        guarded = self.unit == "usd" and self.period.is_calendar and not self.soft
        return _LINE_OF_MONEY if guarded else Fraction(1)

    def _derived_name(self) -> str:
        scope = "".join(f"/{label}" for label in self.scope)
        tiers = "" if self.tiers is None else f"[{','.join(sorted(self.tiers))}]"
        return f"{self.unit}/{self.period}{scope}{tiers}"

    def __repr__(self) -> str:
        amount = f"${to_usd(self.limit).normalize():f}" if self.unit == "usd" else f"{self.limit} {self.unit}"
        kind = "soft" if self.soft else f"line at {float(self.line_at):g}"
        own = f", {len(self.limits)} limits of their own" if self.limits else ""
        return f"<Cap {self.name}: {amount}, {kind}{own}>"


def _limit(**given: object) -> tuple[Unit, int]:
    units: dict[Unit, object] = {unit: given[unit] for unit in get_args(Unit) if given[unit] is not None}
    if not units:
        raise PolicyError("a cap needs a limit: write one of usd=…, tokens=… or requests=…")
    if len(units) > 1:
        raise PolicyError(f"a cap counts in one unit, not in {' and '.join(units)}: write a cap for each")
    ((unit, amount),) = units.items()
    return unit, _amount(amount, unit, what=unit)


def _amount(amount: object, unit: Unit, *, what: str) -> int:
    if unit != "usd":
        return _checks.whole(amount, what=what)
    try:
        return to_nanos(amount, what=what)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise PolicyError(str(error)) from None


def _scope(scope: object) -> tuple[str, ...]:
    if scope is None:
        return ()
    labels = (scope,) if isinstance(scope, str) else scope
    if not isinstance(labels, list | tuple) or not labels:
        raise PolicyError(f"scope must be a label or a tuple of labels, such as 'user', not {_checks.shown(scope)}")
    for label in labels:
        # limits name a label by what stands before their first colon, so no label may hold one.
        if not isinstance(label, str) or not label or ":" in label:
            raise PolicyError(f"scope must name labels without a colon, such as 'user', not {_checks.shown(label)}")
    if len(set(labels)) < len(labels):
        raise PolicyError(f"scope names a label twice: {_checks.shown(scope)}")
    return tuple(labels)


def _tiers(tiers: object) -> frozenset[Tier]:
    known = get_args(Tier)
    if not isinstance(tiers, set | frozenset | list | tuple) or not tiers:
        raise PolicyError(f"tiers must be a set such as {{'strong'}}, or None for all, not {_checks.shown(tiers)}")
    for tier in tiers:
        _checks.word(tier, known, what="a tier")
    return frozenset(tiers)


def _limits(limits: object, unit: Unit) -> dict[str, int]:
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise PolicyError(f"limits must map 'label:value' to an amount in {unit}, not be {_checks.shown(limits)}")
    own: dict[str, int] = {}
    for key, amount in limits.items():
        label, colon, _ = key.partition(":") if isinstance(key, str) else ("", "", "")
        if not label or not colon:
            raise PolicyError(f"limits must have keys such as 'user:alice', label and value, not {_checks.shown(key)}")
        own[key] = _amount(amount, unit, what=f"limits[{_checks.shown(key)}]")
    return own


def _levels(levels: object) -> tuple[Fraction, ...]:
    if not isinstance(levels, list | tuple):
        raise PolicyError(f"alert_at must be parts of the limit such as (0.5, 0.8), not {_checks.shown(levels)}")
    exact = {_checks.fraction(level, what="alert_at") for level in levels}
    if 0 in exact:
        raise PolicyError("alert_at must hold parts of the limit above 0, not 0")
    return tuple(sorted(exact))


def _order(scope: tuple[str, ...], limits: Mapping[str, int]) -> tuple[str, ...]:
    """Return the labels that limits name, the most specific first."""
    named = dict.fromkeys(key.partition(":")[0] for key in limits)
    order = dict.fromkeys([*scope[-1:], *_HIERARCHY, *named])
    return tuple(label for label in order if label in named)
