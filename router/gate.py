"""The gate: from a task to a call that may be made, or to a decision that says why not.

A newcomer reserves at once unless somebody stands ahead of it in a line; what the caps refuse then stands in line, if its class
waits, and tries again when the queue lets it. Every task leaves with exactly one call or one decision.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from router.admitting import BUSY_RETRY_AFTER, DOWN_RETRY_AFTER, Plan, plan, refusal_of
from router.call import Call
from router.charges import Metered, Slot, Slots, charges_of, slots_of
from router.clock import Clock
from router.decision import Decision, Reason
from router.deferral import Deferral
from router.errors import PolicyError
from router.estimate import Estimator
from router.outage import Allowances
from router.policy import Policy
from router.queue import Queue, WaitEvent
from router.settling import Settler
from router.task import Task
from router.telemetry import Telemetry
from router.waiting import LineKey, Need, Waiter, drain_of, needs_of
from stores import Balance, BudgetStore, Misfit, StoreRolledBack, StoreUnavailable, Verdict, new_id

__all__ = ["Gate"]

_log = logging.getLogger("budget_router")

LOOK_AGAIN = 60.0
"""Seconds until a deferred task is tried again where a cap without a window says no time."""

_TRIES = 4
"""How often one admission may reserve: the clock's offset is corrected, or a limit shrinks to the room that was left."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What a refused try found: the plan it was for, the needs of its first option, and the balances that refused it."""

    wish: Plan
    decision: Decision
    needs: tuple[Need, ...]
    balances: Mapping[LineKey, Balance]
    ends: int | None
    """When the last of the refusing windows ends, in milliseconds since the epoch; None where one has no end."""

    @property
    def may_fit(self) -> bool:
        """Whether waiting may help: a cap without a window that is spent stays so, unless somebody credits it."""
        cap = self.decision.cap
        return self.decision.kind != "never" and not (self.decision.kind == "spent" and cap is not None and cap.ends is None)


class Gate:
    """Admit tasks under `policy`, which may be replaced; admit nothing more once `closed`."""

    def __init__(
        self,
        policy: Policy,
        store: BudgetStore,
        clock: Clock,
        estimator: Estimator,
        *,
        settler: Settler,
        telemetry: Telemetry,
        allowances: Allowances,
        deferral: Deferral | None,
    ) -> None:
        self.policy = policy
        self.closed = False
        self.queue: Queue
        self._store = store
        self._clock = clock
        self._estimator = estimator
        self._settler = settler
        self._telemetry = telemetry
        self._allowances = allowances
        self._deferral = deferral
        self._offset = 0  # the store's time less ours, in milliseconds
        self._reserving = 0

    def now(self) -> int:
        """Return the store's time in milliseconds since the epoch, as far as it is known."""
        return self._clock.now() + self._offset

    async def admit(self, task: Task) -> Call | Decision:
        """Return the call, whose settle the settler then owns, or the decision that there is none.

        Raises `MissingLabel`, `TaskError` or `RuleError` when the task or the rule is at fault: nothing is reserved then.
        """
        started = self._clock.monotonic()
        policy = self.policy
        wish = await plan(policy, task, policy.task_class(task.task_class), self._estimator)
        if self.closed:
            decided: Call | Decision = wish.decide(served=False, reason="closed")
        elif self._is_full(policy):
            decided = replace(wish.decide(served=False, reason="full"), retry_after=BUSY_RETRY_AFTER)
        elif wish.unseen:
            decided = wish.decide(served=False, reason="unseen_input")
        else:
            decided = await self._newcomer(wish, started)
        if isinstance(decided, Decision):
            self._telemetry.refuse(task, decided)
        return decided

    def _is_full(self, policy: Policy) -> bool:
        """Say whether as many calls are open as may be: every settle must have a place, should the store be away."""
        return self._settler.open + self._settler.backlog + self._reserving >= policy.max_open

    async def _newcomer(self, wish: Plan, started: float) -> Call | Decision:
        behind = self._behind(wish)
        if behind is None:
            tried = await self._try(wish, started)
        elif behind.wish.options:
            # What nobody stands ahead of, it may have; the option that it wants more stays in line for who came first.
            tried = await self._try(behind.wish, started)
        else:
            tried = replace(behind, wish=wish)
        if not isinstance(tried, _Refusal):
            return tried
        if tried.wish.task_class.max_wait == 0 or not tried.may_fit:
            return await self._answer(tried, started)
        return await self._wait(tried, started)

    def _behind(self, wish: Plan) -> _Refusal | None:
        """Return what keeps a newcomer from overtaking, with the options that it may have all the same; None for nothing."""
        if not len(self.queue):
            return None
        slots = self._slots(wish)
        free = []
        found: _Refusal | None = None
        for option in wish.options:
            needs = needs_of(slots, option, wish.estimates[option].amounts)
            line = self.queue.line_ahead(needs, wish.task_class.priority)
            if line is None:
                free.append(option)
            elif found is None:
                need = next(need for need in needs if need.key == line.key)
                balance = Balance(need.slot.bucket, line.held, line.spent)
                charge = next(c for c in charges_of((need.slot,), {option: wish.estimates[option].amounts}))
                found = self._refusal(wish, slots, ((Misfit(charge, balance),),), option, self.now())
        return None if found is None else replace(found, wish=replace(wish, options=tuple(free)))

    # One try.

    async def _try(self, wish: Plan, started: float, waiter: Waiter | None = None) -> Call | Decision | _Refusal:
        """Reserve the first option that fits. No await stands between the store's answer and the call's registration."""
        self._reserving += 1
        try:
            return await self._reserve(wish, started, waiter)
        finally:
            self._reserving -= 1

    async def _reserve(self, wish: Plan, started: float, waiter: Waiter | None) -> Call | Decision | _Refusal:
        policy = wish.policy
        refusal = None
        for _ in range(_TRIES):
            slots = self._slots(wish, waiter)
            id = new_id(_tree_of(slots), now=self.now())
            options = [charges_of(slots, {option: wish.estimates[option].amounts}) for option in wish.options]
            try:
                verdict = await self._store.reserve(id, options, lease=_ms(policy.lease), on_lease_end=policy.on_lease_end)
            except StoreRolledBack as error:
                return self._refuse_outage(wish, "store_rolled_back", str(error))
            except StoreUnavailable as error:
                self._settler.forget(id)
                return self._without_store(wish, slots, started, str(error))
            own = [slot for slot in slots if slot.pace is None]
            self._telemetry.saw(own)
            if self.closed:
                self._settler.forget(id)
                return wish.decide(served=False, reason="closed")
            if verdict.option is not None and verdict.held:
                call = self._admitted(wish, id, slots, wish.options[verdict.option], started, verdict)
                self.queue.saw(verdict.balances)
                return call
            if verdict.state != "refused":
                self._offset = verdict.now - self._clock.now()
                continue
            refusal = self._refusal(wish, slots, verdict.misfits, wish.options[0], verdict.now)
            shrunk = None if waiter is not None else wish.shrunk(slots, verdict)
            if shrunk is None:
                break
            wish = shrunk
        return refusal or self._refuse_outage(wish, "store_unavailable", "the store's clock could not be followed")

    def _slots(self, wish: Plan, waiter: Waiter | None = None) -> tuple[Slot, ...]:
        """Return the buckets of a task now; of one that waited, with the drain buckets of the lines it stood in."""
        policy, task = wish.policy, wish.task
        slots = slots_of(policy.caps, task.labels, now=self.now(), tree=policy.tree, admit_at=wish.task_class.admit_at)
        if waiter is None:
            return slots
        paces = self.queue.paces(waiter)
        drains = [
            replace(slot, bucket=drain_of(slot.bucket), pace=paces[key])
            for slot in slots
            if (key := (slot.bucket.tree, slot.cap.name, tuple(slot.scope.values()))) in paces
        ]
        return (*slots, *drains)

    def _refusal(
        self, wish: Plan, slots: Slots, misfits: tuple[tuple[Misfit, ...], ...], option: Metered, now: int
    ) -> _Refusal:
        """Say what refused: the option that fits soonest for people, the first option for the line."""
        drains = {slot.bucket.key: slot for slot in slots if slot.pace is not None}
        needs = needs_of([slot for slot in slots if slot.pace is None], option, wish.estimates[option].amounts)
        keys = {need.slot.bucket.key: need.key for need in needs}
        keys |= {drain_of(need.slot.bucket).key: need.key for need in needs}
        balances = {keys[misfit.charge.bucket.key]: misfit.balance for misfit in misfits[0]}
        ends = [misfit.charge.bucket.ends for misfit in misfits[0]]
        caps = tuple(tuple(m for m in option if m.charge.bucket.key not in drains) for option in misfits)
        decision = wish.decide(served=False, reason="cap")
        if all(caps):
            verdict = Verdict("refused", None, (), caps, now)
            decision = refusal_of(decision, slots, verdict, drop=wish.task_class.when_expired == "drop")
        return _Refusal(wish, decision, needs, balances, None if None in ends else max(end for end in ends if end is not None))

    def _admitted(self, wish: Plan, id: str, slots: Slots, metered: Metered, started: float, verdict: Verdict | None) -> Call:
        if verdict is None:
            reason: Reason = "store_cheap" if wish.task_class.when_store_down == "cheap" else "store_open"
        else:
            downgraded = wish.reason == "rule" and wish.wanted == "strong" and metered == "cheap"
            reason = "downgrade" if downgraded else wish.reason
            self._telemetry.check_levels(verdict.balances)
        decision = wish.decide(served=True, reason=reason, metered=metered)
        # A task's deadline counts from when the router was given it, the limit on its attempts from here.
        deadline, total = wish.task.deadline, wish.policy.retries.total
        ends = [] if deadline is None else [started + deadline]
        ends += [] if total is None else [self._clock.monotonic() + total]
        call = Call(
            id,
            wish.policy,
            wish.task,
            wish.task_class,
            slots,
            wish.estimates,
            metered,
            decision,
            ends=min(ends, default=None),
            local=verdict is None,
        )
        self._settler.admit(call)
        return call

    # Waiting.

    async def _wait(self, refusal: _Refusal, started: float) -> Call | Decision:
        """Stand in line until it fits, or until its time is over."""
        wish, since = refusal.wish, self._clock.monotonic()
        policy, task = wish.policy, wish.task
        size = _size_of(task.request)
        if len(self.queue) >= policy.max_waiting or self.queue.size + size > policy.max_waiting_bytes:
            return await self._answer(replace(refusal, decision=replace(refusal.decision, reason="queue_full")), started)
        waiter = Waiter(wish.task_class, refusal.needs, since=since, deadline=self._until(refusal, started, since), size=size)
        told = refusal.decision  # of the last cap that refused, for the record
        admitted = False

        def is_late() -> bool:
            return waiter.deadline is not None and self._clock.monotonic() >= waiter.deadline

        try:
            self.queue.enter(waiter, refusal.balances)
            self._say("enqueue", refusal, 0.0)
            while True:
                if await waiter.future == "expired":
                    break
                known = None
                while wish.policy is not self.policy and not self.closed:
                    wish = await self._again(wish)
                    known = self._known(wish, waiter)
                if self.closed:
                    return self._waited(wish.decide(served=False, reason="closed"), since)
                if known is None and self._is_full(wish.policy):
                    self.queue.pause(waiter)
                    self.queue.enter(waiter, refusal.balances)
                    continue
                tried = await self._try(wish, started, waiter) if known is None else known
                if isinstance(tried, Call):
                    if is_late():
                        self._settler.withdraw(tried)
                        break
                    admitted = True
                    tried.decision = self._waited(tried.decision, since)
                    return tried
                if isinstance(tried, Decision):
                    if tried.reason == "store_unavailable" and not is_late():
                        self.queue.pause(waiter)
                        self.queue.enter(waiter, refusal.balances)
                        continue
                    return self._waited(tried, since)
                refusal, waiter.needs, waiter.task_class = tried, tried.needs, wish.task_class
                told = refusal.decision if refusal.decision.cap is not None else told
                if told.kind == "never" or is_late():
                    break
                self.queue.enter(waiter, refusal.balances)
                if wish.policy is not self.policy:
                    self.queue.tell(waiter, "policy")
        finally:
            self.queue.leave(waiter)
            self._say("admit" if admitted else "expire", refusal, self._clock.monotonic() - since)
        # How the caps stand by now, not how they stood when it came.
        last = self._known(wish, waiter)
        if last is not None and last.decision.cap is not None:
            refusal, told = last, last.decision
        if refusal.may_fit:
            told = replace(told, reason="expired")
        return await self._answer(replace(refusal, decision=told), started, since)

    def _known(self, wish: Plan, waiter: Waiter) -> _Refusal | None:
        """Return what the lines that a waiter stands in say to it under another policy; None where they say nothing."""
        option = wish.options[0]
        slots = self._slots(wish)
        charges = {charge.bucket.key: charge for charge in charges_of(slots, {option: wish.estimates[option].amounts})}
        misfits = []
        for need in needs_of(slots, option, wish.estimates[option].amounts):
            line = waiter.stood.get(need.key)
            if line is not None and line.bucket.key != need.slot.bucket.key:
                line = None  # of another window: what is in this one is not known
            if line is not None or need.amount > need.slot.line:
                balance = Balance(need.slot.bucket) if line is None else Balance(need.slot.bucket, line.held, line.spent)
                misfits.append(Misfit(charges[need.slot.bucket.key], balance))
        return self._refusal(wish, slots, (tuple(misfits),), option, self.now()) if misfits else None

    async def _again(self, wish: Plan) -> Plan:
        """Return what a task wants under the policy that holds now; a class that is gone stays as it was."""
        policy = self.policy
        try:
            task_class = policy.task_class(wish.task.task_class)
        except PolicyError:
            task_class = wish.task_class
        return await plan(policy, wish.task, task_class, self._estimator)

    def _until(self, refusal: _Refusal, started: float, since: float) -> float | None:
        """Return when the wait is over, by the monotonic clock; None for a wait that only ends by an event."""
        task, most = refusal.wish.task, refusal.wish.task_class.max_wait
        moments = [started + task.deadline] if task.deadline is not None else []
        if most != "window":
            moments.append(since + most)
        elif refusal.ends is not None:
            moments.append(since + (self._last_turn(refusal) - self.now()) / 1000)
        return min(moments, default=None)

    def _last_turn(self, refusal: _Refusal) -> int:
        """Return the end of the window that follows the last of those that refused: until then it may get its turn."""
        found = 0
        for need in refusal.needs:
            ends = need.slot.bucket.ends
            if need.key in refusal.balances and ends is not None:
                found = max(found, need.slot.cap.period.at(ends).ends or 0)
        return found

    def _waited(self, decision: Decision, since: float) -> Decision:
        return replace(decision, waited=self._clock.monotonic() - since)

    def _say(self, what: Any, refusal: _Refusal, waited: float) -> None:
        task, cap = refusal.wish.task, refusal.decision.cap
        self.queue.said(
            WaitEvent(
                what=what,
                task_id=task.id,
                task_class=refusal.wish.task_class.name,
                cap="" if cap is None else cap.cap,
                waited=waited,
                waiting=len(self.queue),
            )
        )

    # The class's answer.

    async def _answer(self, refusal: _Refusal, started: float, since: float | None = None) -> Call | Decision:
        """Do what the class says of a task that no cap lets through in its time."""
        wish, decision = refusal.wish, refusal.decision
        if since is not None:
            decision = self._waited(decision, since)
        if decision.kind == "never":
            return decision
        match wish.task_class.when_expired:
            case "downgrade" if "cheap" not in wish.options and wish.wanted == "strong" and "cheap" in wish.estimates:
                cheap = replace(wish, options=("cheap",))
                behind = self._behind(cheap)
                tried = await self._try(cheap, started) if behind is None else behind
                if isinstance(tried, Call):
                    tried.decision = replace(tried.decision, waited=decision.waited)
                    return tried
                return replace(tried, waited=decision.waited) if isinstance(tried, Decision) else decision
            case "defer":
                return await self._defer(wish.task, decision)
            case "drop":
                return replace(decision, outcome="dropped", retry_after=None)
            case _:
                return decision

    async def _defer(self, task: Task, decision: Decision) -> Decision:
        assert self._deferral is not None  # noqa: S101 (checked with the policy)
        later = LOOK_AGAIN if decision.retry_after is None else decision.retry_after
        moment = datetime.fromtimestamp(self.now() / 1000, UTC) + timedelta(seconds=later)
        try:
            await self._deferral.defer(task, moment)
        except Exception as error:  # noqa: BLE001 (whatever it is, the task is not kept, and its owner must know)
            with contextlib.suppress(Exception):
                _log.exception("budget-router: a task could not be deferred")
            return replace(decision, notes=(*decision.notes, f"it could not be deferred ({type(error).__name__})"))
        return replace(decision, outcome="deferred")

    # Without the store.

    def _without_store(self, wish: Plan, slots: Slots, started: float, why: str) -> Call | Decision:
        task_class = wish.task_class
        if task_class.when_store_down == "closed":
            return self._refuse_outage(wish, "store_unavailable", why)
        metered = wish.options[0]
        if task_class.when_store_down == "cheap" and metered != "embedding":
            metered = "cheap"
        # An id of its own: the one that was tried may be held after all, with other buckets.
        id = new_id(_tree_of(slots), now=self.now())
        if not self._allowances.admit(task_class, id, wish.estimates[metered].amounts.usd):
            return self._refuse_outage(wish, "store_unavailable", f"{why}; the allowance of the class is used up")
        self._telemetry.outage(f"served_{task_class.when_store_down}", task_class.name)
        return self._admitted(wish, id, slots, metered, started, None)

    def _refuse_outage(self, wish: Plan, reason: Reason, why: str) -> Decision:
        self._telemetry.outage("refused", wish.task_class.name)
        return replace(wish.decide(served=False, reason=reason, notes=(why,)), retry_after=DOWN_RETRY_AFTER)


def _size_of(value: object) -> int:
    """Return about how many bytes a request takes."""
    if isinstance(value, str | bytes):
        return 50 + len(value)
    if isinstance(value, Mapping):
        return 100 + sum(_size_of(key) + _size_of(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return 60 + sum(map(_size_of, value))
    return 30


def _tree_of(slots: Slots) -> str:
    return slots[0].bucket.tree if slots else ""


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
