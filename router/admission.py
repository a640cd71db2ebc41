"""A reservation for a call that the caller makes itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from types import TracebackType
from typing import Any

from router.call import Call
from router.calls import request_of
from router.decision import Decision, Outcome
from router.errors import Refused
from router.money import to_nanos
from router.settling import Settler
from router.task import Task
from router.usage import Usage, usage_of

__all__ = ["Admission"]


class Admission:
    """Enter it to reserve; call the model yourself; say what it took with `settle`.

    Left by an exception without `settle`: released. Left without `settle` or `release`: the estimate is charged, and the
    decision says `unreported`. Entering a refused one raises nothing; touching what is not there raises `Refused`.
    """

    def __init__(self, task: Task, admit: Callable[[Task], Awaitable[Call | Decision]], settler: Settler) -> None:
        self._task = task
        self._admit = admit
        self._settler = settler
        self._decided: Call | Decision | None = None
        self._settle: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return "<Admission, not entered>" if self._decided is None else f"<Admission {self.decision}>"

    async def __aenter__(self) -> Admission:
        if self._loop is not None:
            raise RuntimeError("an admission is entered once: call router.admit(task) for each")
        self._loop = asyncio.get_running_loop()
        self._decided = await self._admit(self._task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call = self._decided
        if not isinstance(call, Call):
            return
        if call.outcome == "open":
            if error is None:
                call.bill_estimate()
                self._finish("unreported")
            else:
                self._finish("released", error)
        await self._settler.wait(self._settle)

    @property
    def served(self) -> bool:
        """Whether the task was admitted."""
        return isinstance(self._decided, Call)

    @property
    def decision(self) -> Decision:
        """What was decided, and what came of it so far."""
        if self._decided is None:
            raise RuntimeError("write 'async with router.admit(task) as admission:' before asking for its decision")
        return self._decided.report() if isinstance(self._decided, Call) else self._decided

    @property
    def model(self) -> str:
        """The name of the model to call. Raises `Refused` when there is none."""
        return self._call.estimate.model.name

    @property
    def request(self) -> dict[str, Any]:
        """The request to send: the task's own, with the model and the output limit that was reserved. Raises `Refused`."""
        return {"model": self.model, **request_of(self._call)}

    def settle(self, actual: Any) -> None:
        """Settle what the call took: a `Usage`, or a reply of the SDK or its usage. Counted once; later calls change nothing.

        Raises `Refused` when nothing was admitted, `ValueError` for something that has no usage in it.
        """
        call = self._call
        usage = actual if isinstance(actual, Usage) else usage_of(actual)
        if usage is None:
            raise ValueError(
                f"settle() takes a Usage or a reply that has one, not a {type(actual).__name__} without usage; "
                "for a sum of money call settle_usd()"
            )
        self._in_loop(lambda: call.bill(usage, "reported"), "served")

    def settle_usd(self, amount: int | str | Decimal | float) -> None:
        """Settle a sum in dollars; tokens caps count the estimate. Raises like `settle`."""
        call = self._call
        usd = to_nanos(amount, what="settle_usd")
        self._in_loop(lambda: call.bill_usd(usd), "served")

    def release(self) -> None:
        """Give the budget back: nothing was called. Counted once. Raises `Refused` when nothing was admitted."""
        _ = self._call
        self._in_loop(lambda: None, "released")

    @property
    def _call(self) -> Call:
        decided = self._decided
        if isinstance(decided, Call):
            return decided
        raise Refused(self.decision if decided is None else decided)

    def _in_loop(self, bill: Callable[[], None], outcome: Outcome) -> None:
        """Bill and finish, in the loop that entered: a synchronous client may be called in a thread, and settle there."""

        def work() -> None:
            if self._call.outcome == "open":
                bill()
                self._finish(outcome)

        loop = self._loop
        assert loop is not None  # noqa: S101 (an admission that was decided was entered)
        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            work()
        else:
            loop.call_soon_threadsafe(work)

    def _finish(self, outcome: Outcome, error: BaseException | None = None) -> None:
        self._settle = self._settler.finish(self._call, outcome, error)
