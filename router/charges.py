"""From a task's caps and amounts to the charges that a store counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from router.caps import Cap
from router.decision import CapState
from stores import MAX_AMOUNT, Bucket, Charge, Misfit, safe_name

__all__ = ["Amounts", "Metered", "Slot", "Slots", "charges_of", "room_for", "slots_of", "state_of"]

Metered = Literal["strong", "cheap", "embedding"]
"""What is metered: a tier, or an embedding, which only caps on all tiers count."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a call takes, in every unit that a cap may have: nano-dollars, tokens, requests."""

    usd: int = 0
    tokens: int = 0
    requests: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        # Attempts of one task are one request.
        return Amounts(self.usd + other.usd, self.tokens + other.tokens, max(self.requests, other.requests))

    def of(self, unit: Literal["usd", "tokens", "requests"]) -> int:
        """Return the amount in one unit."""
        return self.usd if unit == "usd" else self.tokens if unit == "tokens" else self.requests


@dataclass(frozen=True, slots=True)
class Slot:
    """One cap as it holds for one task: its bucket in the window of admission, its limit and its line."""

    cap: Cap
    bucket: Bucket
    limit: int
    line: int
    scope: Mapping[str, str]
    window: str
    pace: int | None = None
    """Of a drain bucket, what may have come out of the line by now; None for a cap's own bucket."""

    def counts(self, metered: Metered) -> bool:
        """Say whether the cap counts this tier."""
        return self.cap.tiers is None or metered in self.cap.tiers


Slots = Sequence[Slot]


def slots_of(
    caps: Iterable[Cap], labels: Mapping[str, str], *, now: int, tree: str | None, admit_at: Fraction | None
) -> tuple[Slot, ...]:
    """Resolve `caps` for a task with `labels`, at `now` (ms). Raises `MissingLabel` when a cap's label is not there."""
    slots = []
    name = "" if tree is None else f"{tree}={labels.get(tree, '')}"
    for cap in caps:
        values = cap.scope_values(labels)
        window = cap.period.at(now)
        key = "|".join((safe_name(cap.name), *map(safe_name, values), window.name))
        limit = cap.limit_for(labels)
        slots.append(
            Slot(
                cap,
                Bucket(key, tree=name, starts=window.starts, ends=window.ends),
                limit,
                cap.line_for(limit, admit_at),
                dict(zip(cap.scope, values, strict=True)),
                window.name,
            )
        )
    return tuple(slots)


def charges_of(slots: Slots, amounts: Mapping[Metered, Amounts]) -> tuple[Charge, ...]:
    """Turn amounts per tier into one charge per cap that counts any of those tiers."""
    charges = []
    for slot in slots:
        counted = [amount for metered, amount in amounts.items() if slot.counts(metered)]
        if not counted:
            continue
        # More than a store can count is more than any line: such an estimate is refused, and such an actual is a debt.
        total = min(sum(counted, Amounts()).of(slot.cap.unit), MAX_AMOUNT)
        if slot.pace is not None:
            # Ahead of the pace by at most one task; once it is out nothing holds it back.
            charges.append(Charge(slot.bucket, total, max(0, min(slot.pace + total - 1, MAX_AMOUNT))))
        elif slot.cap.soft:
            charges.append(Charge(slot.bucket, total))
        else:
            charges.append(Charge(slot.bucket, total, slot.line, slot.limit))
    return tuple(charges)


def state_of(slots: Slots, misfit: Misfit) -> CapState:
    """Describe the cap behind a charge that did not fit."""
    charge, balance = misfit
    slot = next(slot for slot in slots if slot.bucket.key == charge.bucket.key)
    return CapState(
        cap=slot.cap.name,
        unit=slot.cap.unit,
        scope=dict(slot.scope),
        window=slot.window,
        ends=slot.bucket.ends,
        limit=slot.limit,
        line=slot.line,
        spent=balance.spent,
        held=balance.held,
        asked=charge.amount,
    )


def room_for(slots: Slots, misfits: Iterable[Misfit]) -> dict[str, int]:
    """Return, per unit, the most that would still fit into all of the buckets that refused."""
    room: dict[str, int] = {}
    units = {slot.bucket.key: slot.cap.unit for slot in slots}
    for charge, balance in misfits:
        unit = units[charge.bucket.key]
        left = max(0, (charge.line or 0) - balance.held - balance.spent)
        room[unit] = min(left, room.get(unit, left))
    return room
