"""What can be seen from outside: counters, one log record per request, and one alert per bucket and level."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from router.charges import Slot, Slots
from router.decision import Decision, Standing
from router.money import format_usd
from router.queue import LineStatus
from router.task import Task
from stores import Balance

__all__ = ["BucketStatus", "Status", "Telemetry", "record_of", "status_of"]

_log = logging.getLogger("budget_router")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStatus(Standing):
    """One bucket as the store has it. `lost` is what leases ended and nobody settled since."""

    soft: bool
    lost: int

    def __str__(self) -> str:
        lost = f", {self.amount(self.lost)} lost" if self.lost else ""
        return f"{Standing.__str__(self)}{', soft' if self.soft else ''}{lost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a router stands: what its store says of the buckets that it used, and what it counted by itself.

    `store` is "ok" or what is wrong with the store; where it could not be asked, `buckets` is empty. A bucket of a scope is
    listed once this router has used it; `waiting` has the tasks in line, per class and line. The counters are those of this
    router since it was built: `refused` and `downgraded` by class, `served` by tier, `outages` by what was done. `unconfirmed`
    is what may have been billed beyond what was settled: attempts without an answer, streams that were left; `unreported` what
    was charged for admissions that nobody settled.
    """

    store: str
    buckets: tuple[BucketStatus, ...]
    open: int
    backlog: int
    waiting: tuple[LineStatus, ...]
    served: Mapping[str, int]
    refused: Mapping[str, int]
    downgraded: Mapping[str, int]
    outages: Mapping[str, int]
    failed: int
    unreported: Decimal
    too_late: int
    spent: Decimal
    unconfirmed: Decimal


class Telemetry:
    """Count what happens and say it, without waiting for anybody."""

    def __init__(self, *, remember: int = 1000) -> None:
        self.served: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.downgraded: Counter[str] = Counter()
        self.outages: Counter[str] = Counter()
        self.failed = 0
        self.unreported = 0
        self.spent = 0
        self.unconfirmed = 0
        self._remember = remember
        self._slots: OrderedDict[str, Slot] = OrderedDict()
        self._alerted: OrderedDict[tuple[str, Fraction], None] = OrderedDict()

    def saw(self, slots: Slots) -> None:
        """Remember buckets, the newest `remember` of them, so that `status` can ask for their balances."""
        for slot in slots:
            self._slots[slot.bucket.key] = slot
            self._slots.move_to_end(slot.bucket.key)
        while len(self._slots) > self._remember:
            self._slots.popitem(last=False)

    def slots(self) -> tuple[Slot, ...]:
        """Return the buckets that were seen last."""
        return tuple(self._slots.values())

    def refuse(self, task: Task, decision: Decision) -> None:
        """Count and log a task that no model was asked for."""
        self.refused[decision.task_class] += 1
        self._record(task, decision, ())

    def finish(self, task: Task, decision: Decision, balances: Iterable[Balance]) -> None:
        """Count and log a call that has ended."""
        self.spent += decision.actual or 0
        self.unconfirmed += decision.unconfirmed
        if decision.outcome in ("served", "left", "cut", "unreported"):
            self.served[decision.tier or "embedding"] += 1
        elif decision.outcome != "released":
            self.failed += 1
        if decision.outcome == "unreported":
            self.unreported += decision.actual or 0
        if decision.downgraded:
            self.downgraded[decision.task_class] += 1
        self._record(task, decision, balances)

    def outage(self, action: str, task_class: str) -> None:
        """Count a decision that was made without the store, and alert once per class and action."""
        self.outages[action] += 1
        if self.outages[action] == 1:
            _say(logging.WARNING, "budget-router: the store is down; class %r is %s", task_class, action)

    def check_levels(self, balances: Iterable[Balance]) -> None:
        """Alert once per bucket and level of its cap, when what is spent and held has reached it."""
        for balance in balances:
            slot = self._slots.get(balance.bucket.key)
            if slot is None:
                continue
            cap = slot.cap
            levels = (*cap.alert_at, Fraction(1)) if cap.soft else cap.alert_at
            used = balance.held + balance.spent
            for level in levels:
                if used < slot.limit * level or (balance.bucket.key, level) in self._alerted:
                    continue
                self._alerted[balance.bucket.key, level] = None
                if len(self._alerted) > 10 * self._remember:
                    self._alerted.popitem(last=False)
                _say(
                    logging.WARNING,
                    "budget-router: cap %s has reached %g %% of %s",
                    cap.name,
                    float(level * 100),
                    format_usd(slot.limit) if cap.unit == "usd" else f"{slot.limit} {cap.unit}",
                    extra={"budget_router": {"alert": "level", "cap": cap.name, "window": slot.window, "level": float(level)}},
                )

    def _record(self, task: Task, decision: Decision, balances: Iterable[Balance]) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        record = record_of(task, decision, balances)
        _say(logging.INFO, "budget-router: task %s %s", ascii(task.id)[1:-1][:200], decision, extra={"budget_router": record})


def _say(level: int, message: str, *facts: object, extra: Mapping[str, Any] | None = None) -> None:
    # Somebody's own handler or filter may raise. It is called between a reservation and its settle, and may end neither.
    with contextlib.suppress(Exception):
        _log.log(level, message, *facts, extra=extra, stacklevel=2)


def record_of(task: Task, decision: Decision, balances: Iterable[Balance]) -> dict[str, Any]:
    """Return the structured record of one request: no prompt, no key. Money is in nano-dollars."""
    return {
        "task": task.id,
        "kind": task.kind,
        "class": decision.task_class,
        "labels": {name: value[:200] for name, value in task.labels.items()},
        "served": decision.served,
        "reason": decision.reason,
        "refusal": decision.kind,
        "cap": None if decision.cap is None else asdict(decision.cap),
        "retry_after": decision.retry_after,
        "waited": decision.waited,
        "wanted": decision.wanted,
        "tier": decision.tier,
        "model": decision.model,
        "served_model": decision.served_model,
        "downgraded": decision.downgraded,
        "review": decision.review,
        "attempts": decision.attempts,
        "estimate": decision.estimate,
        "actual": decision.actual,
        "unconfirmed": decision.unconfirmed,
        "usage_source": decision.usage_source,
        "outcome": decision.outcome,
        "error": decision.error,
        "notes": list(decision.notes),
        "balances": {b.bucket.key: {"spent": b.spent, "held": b.held} for b in balances},
    }


def status_of(slots: Iterable[Slot], balances: Iterable[Balance]) -> tuple[BucketStatus, ...]:
    """Join what the policy says of buckets and what the store says."""
    return tuple(
        BucketStatus(
            cap=slot.cap.name,
            unit=slot.cap.unit,
            scope=dict(slot.scope),
            window=slot.window,
            ends=slot.bucket.ends,
            soft=slot.cap.soft,
            limit=slot.limit,
            line=slot.line,
            spent=balance.spent,
            held=balance.held,
            lost=balance.lost,
        )
        for slot, balance in zip(slots, balances, strict=True)
    )
