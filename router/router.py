"""The router: the one place where rule, estimate, reservation, call, settle and record meet."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from openai import AsyncOpenAI

from router.admission import Admission
from router.call import Call, price_of_model
from router.calls import Answer, Sender, attempts, request_of
from router.charges import slots_of
from router.clock import Clock, SystemClock
from router.decision import Decision, Outcome, Result
from router.deferral import Deferral
from router.errors import PolicyError, TaskError
from router.estimate import Estimator
from router.gate import Gate
from router.money import to_usd
from router.outage import Allowances
from router.policy import Policy
from router.prices import Price, UnknownPrice, price_of
from router.queue import Queue, WaitEvent
from router.settling import Settler
from router.streams import RoutedStream
from router.task import Task
from router.telemetry import Status, Telemetry, status_of
from router.usage import Usage
from stores import Balance, BudgetStore, Charge, StoreUnavailable

__all__ = ["Router"]

T = TypeVar("T")


class Router:
    """Send each task to the strong or the cheap model of a policy, and never pass the caps that it sets.

    `store` may be shared with any number of routers and processes; the router does not close it. Built without a running
    loop; belongs to the loop that first uses it. `deferral` keeps what classes with `when_expired="defer"` could not have yet;
    `hooks` are told who begins to wait, who is admitted from a line and whose wait is over. `clock` and `estimator` are for
    tests.
    """

    def __init__(
        self,
        policy: Policy,
        store: BudgetStore,
        *,
        deferral: Deferral | None = None,
        hooks: Sequence[Callable[[WaitEvent], None]] = (),
        clock: Clock | None = None,
        estimator: Estimator | None = None,
    ) -> None:
        if not isinstance(store, BudgetStore) or isinstance(store, type):
            shown = store.__name__ if isinstance(store, type) else type(store).__name__
            raise PolicyError(f"the store of a router must be a store such as SQLiteStore('budget.sqlite'), not {shown}")
        self._store = store
        self._clock: Clock = SystemClock() if clock is None else clock
        self._estimator = Estimator() if estimator is None else estimator
        self._telemetry = Telemetry()
        self._allowances = Allowances()
        self._senders: dict[int, Sender] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._deferral = deferral
        _check(policy, deferral)
        if not isinstance(hooks, list | tuple) or not all(map(_is_hook, hooks)):
            raise PolicyError("hooks must be a list of functions that take a WaitEvent, none of them 'async def'")
        self._settler = Settler(
            store, self._clock, lease=_ms(policy.lease), patience=policy.settle_timeout, observer=_Observer(self)
        )
        self._gate = Gate(
            policy,
            store,
            self._clock,
            self._estimator,
            settler=self._settler,
            telemetry=self._telemetry,
            allowances=self._allowances,
            deferral=deferral,
        )
        self._queue = self._gate.queue = Queue(store, self._clock, now=self._gate.now, hooks=hooks)

    def __repr__(self) -> str:
        state = "closed" if self._gate.closed else f"{self._settler.open} open, {len(self._queue)} waiting"
        return f"<Router {self.policy.strong.name}/{self.policy.cheap.name} over {self._store!r}: {state}>"

    @property
    def policy(self) -> Policy:
        """The policy in force. Setting another one holds for what is admitted from then on; open calls settle as they began."""
        return self._gate.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        _check(policy, self._deferral)
        self._gate.policy = policy
        self._queue.tell_all("policy")
        self._senders = {}
        self._settler.change_lease(_ms(policy.lease))

    async def __aenter__(self) -> Router:
        # In the background: where the vocabulary has to be fetched, nobody waits for it, and lengths are the bound until then.
        policy = self.policy
        models = [model for model in (policy.strong, policy.cheap, policy.embedding) if model is not None]
        encodings = [model.encoding for model in models if model.encoding is not None]
        names = [model.name for model in models if model.encoding is None]
        prepare = self._estimator.prepare(names, encodings=encodings)
        self._preparing = asyncio.get_running_loop().create_task(prepare, name="budget-router vocabularies")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # The public face.

    async def run(self, task: Task) -> Result:
        """Reserve, call, settle. A refusal is in the result's decision; what the model raises is raised.

        Raises `MissingLabel`, `TaskError` or `RuleError` when the task or the rule is at fault: nothing is reserved then; and
        `TimeoutError` when the task's deadline or an attempt's time limit is over.
        """
        call = await self._admit(task)
        if isinstance(call, Decision):
            return Result(decision=call)

        async def send(timeout: float | None) -> Answer:
            return await self._sender(call).whole(task.kind, request_of(call), timeout=timeout)

        answer = await self._sent(call, send)
        call.tally.add_whole(task.kind, answer.reply)
        await self._settler.wait(self._settler.finish(call, "served"))
        return Result(decision=call.report(), usage=call.usage, answer=answer.reply)

    async def stream(self, task: Task) -> RoutedStream:
        """Reserve and open a stream, which settles however it is left. Raises like `run`."""
        if isinstance(task, Task) and task.kind == "embedding":
            raise TaskError("an embedding has no stream: use router.run(task)")
        call = await self._admit(task)
        if isinstance(call, Decision):
            return RoutedStream(call)

        async def send(timeout: float | None) -> Any:
            return await self._sender(call).stream(task.kind, request_of(call), timeout=timeout)

        source = await self._sent(call, send)
        call.tally.started = True
        return RoutedStream(
            call.decision, call=call, source=source, settler=self._settler, clock=self._clock, overrun=self._overrun
        )

    def admit(self, task: Task) -> Admission:
        """Reserve for a call that the caller makes; an async context manager. Entering it raises like `run`."""
        return Admission(task, self._admit, self._settler)

    async def status(self) -> Status:
        """Return balances, open calls, backlog and counters. A store that is down is said, not raised."""
        telemetry, settler = self._telemetry, self._settler
        if self.policy.tree is None:
            shared = [cap for cap in self.policy.caps if not cap.scope]
            telemetry.saw(slots_of(shared, {}, now=self._gate.now(), tree=None, admit_at=None))
        slots, store, balances = telemetry.slots(), "ok", tuple[Balance, ...]()
        try:
            health = await self._store.check()
            if health.rolled_back:
                store = str(health)
            balances = await self._store.balances([slot.bucket for slot in slots])
        except StoreUnavailable as error:
            slots, store = (), str(error)
        return Status(
            store=store,
            buckets=status_of(slots, balances),
            open=settler.open,
            backlog=settler.backlog,
            waiting=self._queue.status(),
            served=dict(telemetry.served),
            refused=dict(telemetry.refused),
            downgraded=dict(telemetry.downgraded),
            outages=dict(telemetry.outages),
            failed=telemetry.failed,
            unreported=to_usd(telemetry.unreported),
            too_late=settler.too_late,
            spent=to_usd(telemetry.spent),
            unconfirmed=to_usd(telemetry.unconfirmed),
        )

    async def aclose(self) -> None:
        """Admit nothing more, close what is being streamed, and settle; waits at most the policy's `settle_timeout`.

        Calls that are still open then settle when they end, if the loop lives that long; else their leases end.
        """
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise RuntimeError("this router belongs to another event loop: close it there, before that loop ends")
        self._gate.closed = True
        await self._queue.aclose()
        if self._preparing is not None:
            self._preparing.cancel()
        await self._settler.aclose()

    async def _admit(self, task: Task) -> Call | Decision:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("this router belongs to another event loop: make one router per loop")
        if not isinstance(task, Task):
            raise TaskError(f"a router takes a task, such as Task.chat(messages=…), not {type(task).__name__}")
        return await self._gate.admit(task)

    # Calling.

    async def _sent(self, call: Call, send: Callable[[float | None], Awaitable[T]]) -> T:
        """Send a call with its retries and its fallback; settle it when that fails, however it fails."""
        try:
            try:
                return await self._attempts(call, send)
            except Exception as error:
                if not await self._falls_back(call, error):
                    raise
                call.note(f"the strong model failed ({type(error).__name__}), cheap was asked")
                return await self._attempts(call, send)
        except BaseException as error:
            outcome: Outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
            await self._settler.wait(self._settler.finish(call, outcome, error))
            raise

    async def _attempts(self, call: Call, send: Callable[[float | None], Awaitable[T]]) -> T:
        async def make_room() -> bool:
            return call.repeats_for_free or await self._extend(call, call.needs())

        return await attempts(
            call, send, retries=call.policy.retries, clock=self._clock, deadline=call.ends, make_room=make_room
        )

    async def _falls_back(self, call: Call, error: Exception) -> bool:
        answer = call.task_class.on_model_error or call.policy.on_model_error
        if call.metered != "strong" or answer != "cheap" or "cheap" not in call.estimates:
            return False
        if not await self._extend(call, call.needs("cheap")):
            return False
        call.switch("cheap")
        call.decision = replace(
            call.decision,
            tier="cheap",
            model=call.estimate.model.name,
            reason="fallback",
            output_limit=call.estimate.output_limit,
            error=type(error).__name__,
        )
        return True

    async def _overrun(self, call: Call) -> bool:
        """Hold more for a stream that generated past the limit that it was sent; False when it has to be cut."""
        estimate = call.estimate
        generated, _ = await self._generated(call)
        if generated <= estimate.output_tokens:
            return True
        if call.task_class.on_overrun == "cut":
            return False
        call.estimates[call.metered] = replace(estimate, output_tokens=generated * 5 // 4)
        if await self._extend(call, call.needs()):
            call.note("the provider generated past the limit that it was sent: more was held")
            return True
        call.estimates[call.metered] = estimate
        return False

    async def _extend(self, call: Call, charges: tuple[Charge, ...]) -> bool:
        if call.local:
            usd = call.spent() + call.estimate.amounts.usd
            return self._allowances.admit(call.task_class, call.id, usd)
        call.step += 1
        try:
            verdict = await self._store.extend(call.id, call.step, charges)
        except StoreUnavailable:
            return False
        return verdict.held

    def _sender(self, call: Call) -> Sender:
        model = call.estimate.model
        sender = self._senders.get(id(model))
        if sender is None:
            sender = self._senders[id(model)] = Sender(model)
        return sender

    # What the settler asks and tells.

    async def _count(self, call: Call) -> None:
        """Bill a call by the provider's usage when it came, else by the tokens that came by."""
        tally = call.tally
        if not tally.started:
            return
        price = _price_of(call)
        if tally.odd:
            call.note("the provider sent something that could not be read")
        if tally.end is not None:
            call.bill(tally.end, "provider", price=price)
            return
        if call.policy.hidden_reasoning == "reserved":
            call.bill_estimate()
            call.note("no usage came: what was reserved was settled, for reasoning that may have been hidden")
            return
        output, exact = await self._generated(call)
        so_far = tally.so_far
        if so_far is not None and so_far.output_tokens >= output:
            call.bill(so_far, "provider", price=price)
            return
        seen = call.estimate.likely_input if so_far is None or not so_far.input_tokens else so_far.input_tokens
        usage = Usage(input_tokens=seen, output_tokens=output)
        call.bill(usage, "counted", price=price)
        if not tally.final:
            # A provider writes ahead of its reader, and may bill what never came by.
            call.unconfirmed += max(0, call.estimate.amounts.usd - price.cost(usage))
        call.note("the provider sent no usage: tokens were counted" + ("" if exact else ", as bytes"))

    async def _generated(self, call: Call) -> tuple[int, bool]:
        """Count the tokens that came by so far, and say whether a vocabulary was used."""
        model = call.estimate.model
        counts = [await self._estimator.count_async(text, model.name, model.encoding) for text in call.tally.texts]
        return sum(count for count, _ in counts), all(exact for _, exact in counts)


class _Observer:
    """What the settler tells the router, so that the router's own face stays small."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def count(self, call: Call) -> None:
        await self._router._count(call)

    def counted(self, call: Call) -> None:
        self._router._allowances.finish(call)

    def concluded(self, call: Call, balances: tuple[Balance, ...]) -> None:
        telemetry = self._router._telemetry
        telemetry.check_levels(balances)
        self._router._queue.saw(balances)
        telemetry.finish(call.task, call.report(), balances)

    def written(self, id: str) -> None:
        self._router._allowances.written(id)


def _price_of(call: Call) -> Price:
    """Return the price of the model that answered, as the policy says; note when it is another than was asked for."""
    model, served = call.estimate.model, call.tally.model
    if served is None or served == model.name:
        return price_of_model(model)
    call.decision = replace(call.decision, served_model=served)
    if call.policy.price_as == "served":
        try:
            return price_of(served, provider=model.provider)[0]
        except UnknownPrice:
            call.note(f"the reply names {served!r}, which has no known price: priced as {model.name}")
    return price_of_model(model)


def _check(policy: Policy, deferral: Deferral | None) -> None:
    """Refuse a policy that this router cannot serve. Raises `PolicyError`."""
    if not isinstance(policy, Policy):
        raise PolicyError(f"the policy of a router must be a Policy(…), not {type(policy).__name__}")
    for model in (policy.strong, policy.cheap, policy.embedding):
        if model is not None and model.client is not None and not isinstance(model.client, AsyncOpenAI):
            kind = type(model.client).__name__
            raise PolicyError(f"the client of model {model.name!r} must be an openai.AsyncOpenAI, not {kind}")
    if deferral is not None and (
        isinstance(deferral, type) or not inspect.iscoroutinefunction(getattr(deferral, "defer", None))
    ):
        shown = f"the class {deferral.__name__}" if isinstance(deferral, type) else type(deferral).__name__
        raise PolicyError(f"deferral must be an object with 'async def defer(task, not_before)', not {shown}")
    for task_class in policy.classes:
        if task_class.when_expired == "defer" and deferral is None:
            raise PolicyError(
                f"class {task_class.name!r} defers: give the router who keeps its tasks, Router(policy, store, deferral=…), "
                "or write when_expired='downgrade', 'retry_later' or 'drop'"
            )


def _is_hook(hook: object) -> bool:
    return callable(hook) and not inspect.iscoroutinefunction(hook)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
