"""The settler by itself: one settle for each call, whoever is cancelled, whatever fails, and in whatever order it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router import Cap, Task, Usage
from router.admitting import plan
from router.call import Call
from router.charges import charges_of, slots_of
from router.estimate import Estimator
from router.settling import Settler
from stores import Balance, Hold, MemoryStore, StoreUnavailable, TooLate, new_id
from tests.support import START, TestClock, Wire, chat, policy_of, settle_down

pytestmark = pytest.mark.anyio

USAGE = Usage(input_tokens=8, output_tokens=16)
SPENT = 8 * 2000 + 16 * 10_000
LEASE = 30_000


async def nothing(_: Any) -> None:
    """Do nothing."""


async def call_of(*caps: Cap, task: Task | None = None, **more: Any) -> Call:
    """Make a call on the strong tier, as a router does whose task was admitted."""
    policy = policy_of(None, *caps, **more)
    task = chat() if task is None else task
    task_class = policy.task_class(None)
    wish = await plan(policy, task, task_class, Estimator())
    slots = slots_of(policy.caps, {}, now=START, tree=None, admit_at=None)
    decision = wish.decide(served=True, reason="rule", metered="strong")
    return Call(new_id("", now=START), policy, task, task_class, slots, wish.estimates, "strong", decision, ends=None)


class Told:
    """An observer that writes down what it is told; `counts` bills a call."""

    def __init__(self) -> None:
        self.counts: Callable[[Call], Awaitable[None]] = nothing
        self.heard: list[tuple[str, str]] = []
        self.balances: list[tuple[Balance, ...]] = []

    async def count(self, call: Call) -> None:
        await self.counts(call)

    def counted(self, call: Call) -> None:
        self.heard.append(("counted", call.id))

    def concluded(self, call: Call, balances: tuple[Balance, ...]) -> None:
        self.heard.append(("concluded", call.id))
        self.balances.append(balances)

    def written(self, id: str) -> None:
        self.heard.append(("written", id))

    def times(self, what: str, id: str) -> int:
        """Return how often it was told so of an id."""
        return self.heard.count((what, id))


class Bench:
    """A settler over a store in memory, at the other end of a wire."""

    def __init__(self, *, patience: float = 5.0) -> None:
        self.clock = TestClock()
        self.inner = MemoryStore(clock=self.clock)
        self.store = Wire(self.inner)
        self.told = Told()
        wire: Any = self.store
        self.settler = Settler(wire, self.clock, lease=LEASE, patience=patience, observer=self.told)

    async def call(self) -> Call:
        """Reserve for a call, and hand it to the settler."""
        call = await call_of(Cap(usd=1, per="day", admit_at=1, name="all"))
        charges = charges_of(call.slots, {"strong": call.estimate.amounts})
        assert (await self.inner.reserve(call.id, [charges], lease=LEASE)).held
        self.settler.admit(call)
        return call

    async def spent(self, call: Call) -> int:
        """Return what is spent in the bucket of a call."""
        (balance,) = await self.inner.balances([slot.bucket for slot in call.slots])
        return balance.spent

    def renewed(self) -> list[list[str]]:
        """Return the ids of each renewal that the store was asked for."""
        return [args[0] for name, args in self.store.asked if name == "renew"]

    async def holds(self) -> tuple[Hold, ...]:
        return await self.inner.holds()

    def down(self, *names: str) -> None:
        """Let these methods of the store fail; without names none."""

        async def way(name: str) -> None:
            if name in names:
                raise StoreUnavailable("test", "it is down")

        self.store.there = way

    def held_up(self, name: str) -> asyncio.Event:
        """Hold up what a method asks until the event is set."""
        goes_on = asyncio.Event()

        async def way(method: str) -> None:
            if method == name:
                await goes_on.wait()

        self.store.there = way
        return goes_on


@asynccontextmanager
async def bench(**more: Any) -> AsyncIterator[Bench]:
    """Open a settler; afterwards it is idle and leaves no task."""
    b = Bench(**more)
    yield b
    async with asyncio.timeout(10):
        await b.settler.aclose()
    await settle_down()
    assert b.settler.idle
    assert ours() == []


def ours() -> list[str]:
    """Return the names of the tasks of settlers."""
    return sorted(task.get_name() for task in asyncio.all_tasks() if "budget-router" in task.get_name())


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# Once.


async def test_a_call_that_is_finished_twice_is_counted_and_settled_once() -> None:
    async with bench() as b:
        call = await b.call()
        call.bill(USAGE, "provider")
        first = b.settler.finish(call, "served")
        second = b.settler.finish(call, "left")
        assert second is None
        await b.settler.wait(second)
        await b.settler.wait(first)
        assert b.settler.finish(call, "left") is None
        assert call.outcome == "served"
        assert b.told.heard == [("counted", call.id), ("written", call.id), ("concluded", call.id)]
        assert b.store.ids("settle") == [call.id]
        assert await b.spent(call) == SPENT


async def test_a_call_that_is_finished_outside_of_a_loop_stays_open() -> None:
    async with bench() as b:
        call = await b.call()
        with pytest.raises(RuntimeError, match="no running event loop"):
            await asyncio.to_thread(b.settler.finish, call, "served")
        assert (call.outcome, b.settler.open) == ("open", 1)
        await b.settler.wait(b.settler.finish(call, "served"))
        assert await b.holds() == ()


async def test_what_is_awaited_first_comes_before_the_counting() -> None:
    steps: list[str] = []

    async def first() -> None:
        steps.append("first")

    async def count(_: Call) -> None:
        steps.append("count")

    async with bench() as b:
        b.told.counts = count
        await b.settler.wait(b.settler.finish(await b.call(), "served", first=first))
        assert steps == ["first", "count"]


# Whoever is cancelled.


async def test_a_caller_that_is_cancelled_does_not_take_the_settle_with_it() -> None:
    async with bench() as b:
        call = await b.call()
        call.bill(USAGE, "provider")
        goes_on = b.held_up("settle")
        settle = b.settler.finish(call, "served")
        caller = asyncio.ensure_future(b.settler.wait(settle))
        await settle_down()
        caller.cancel()
        await asyncio.wait((caller,))
        assert settle is not None
        assert (caller.cancelled(), settle.done()) == (True, False)
        goes_on.set()
        await settle
        assert await b.spent(call) == SPENT


async def test_a_caller_waits_no_longer_than_its_patience_and_the_settle_goes_on() -> None:
    async with bench(patience=0.01) as b:
        call = await b.call()
        call.bill(USAGE, "provider")
        goes_on = b.held_up("settle")
        settle = b.settler.finish(call, "served")
        async with asyncio.timeout(10):
            await b.settler.wait(settle)
        assert settle is not None
        assert (settle.done(), b.settler.backlog) == (False, 1)
        goes_on.set()
        await settle
        assert await b.spent(call) == SPENT


async def test_a_settle_that_is_cancelled_while_it_counts_settles_what_is_known() -> None:
    async with bench() as b:
        call = await b.call()
        call.bill(USAGE, "provider")
        never = asyncio.Event()

        async def count(_: Call) -> None:
            await never.wait()

        b.told.counts = count
        settle = b.settler.finish(call, "served")
        assert settle is not None
        await settle_down()
        settle.cancel()
        await settle_down()
        assert settle.cancelled()
        assert (b.settler.open, b.settler.backlog) == (0, 0)
        assert b.told.times("counted", call.id) == 1
        assert b.told.times("concluded", call.id) == 1
        assert await b.spent(call) == SPENT


async def test_a_settle_that_is_cancelled_on_its_way_is_told_as_concluded_and_sent_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        call = await b.call()
        call.bill(USAGE, "provider")
        goes_on = b.held_up("settle")
        settle = b.settler.finish(call, "served")
        assert settle is not None
        await settle_down()
        settle.cancel()
        await settle_down()
        assert settle.cancelled()
        assert b.told.times("concluded", call.id) == 1
        goes_on.set()
        await settle_down()
        assert b.store.ids("settle") == [call.id, call.id]
        assert (await b.spent(call), errors(caplog)) == (SPENT, [])


async def test_work_that_is_under_way_is_not_idle_and_is_waited_for_when_closing() -> None:
    async with bench() as b:
        goes_on = asyncio.Event()

        async def work() -> None:
            await goes_on.wait()

        task = b.settler.spawn(work())
        assert b.settler.idle is False
        closing = asyncio.ensure_future(b.settler.aclose())
        await settle_down()
        assert closing.done() is False
        goes_on.set()
        async with asyncio.timeout(10):
            await closing
        assert (task.done(), b.settler.idle) == (True, True)


# Whatever fails.


async def test_a_counting_that_fails_is_said_and_the_estimate_is_settled(caplog: pytest.LogCaptureFixture) -> None:
    async def count(_: Call) -> None:
        raise LookupError("a vocabulary")

    async with bench() as b:
        call = await b.call()
        b.told.counts = count
        await b.settler.wait(b.settler.finish(call, "served"))
        assert await b.spent(call) == call.estimate.amounts.usd
        assert call.usage_source == "estimate"
        assert errors(caplog) == ["budget-router: counting a call failed; its estimate is settled"]


async def test_a_log_handler_that_raises_while_a_counting_fails_ends_no_settle() -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the disk is full")

    async def count(_: Call) -> None:
        raise LookupError("a vocabulary")

    handler = Raises()
    async with bench() as b:
        call = await b.call()
        b.told.counts = count
        logging.getLogger("budget_router").addHandler(handler)
        try:
            settle = b.settler.finish(call, "served")
            await b.settler.wait(settle)
        finally:
            logging.getLogger("budget_router").removeHandler(handler)
        assert settle is not None
        assert settle.exception() is None
        assert b.told.times("concluded", call.id) == 1
        assert await b.spent(call) == call.estimate.amounts.usd


async def test_a_settle_that_a_store_fails_with_an_error_of_its_own_is_said_kept_and_sent_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = [ZeroDivisionError("a store of somebody else"), ZeroDivisionError("and again")]

    async def way(name: str) -> None:
        if name == "settle" and wrong:
            raise wrong.pop()

    async with bench() as b:
        call = await b.call()
        call.bill(USAGE, "provider")
        b.store.there = way
        await b.settler.wait(b.settler.finish(call, "served"))
        await settle_down()
        assert b.told.times("concluded", call.id) == 1
        assert (b.settler.backlog, await b.spent(call)) == (1, 0)
        await b.clock.advance(1)
        assert (b.settler.backlog, await b.spent(call)) == (0, SPENT)
        # Once by the call's own settle, once by the backlog.
        assert errors(caplog) == ["budget-router: a settle failed and is kept"] * 2


async def test_a_settle_that_is_taken_is_written_and_concluded_with_its_balances_and_one_that_waits_without() -> None:
    async with bench() as b:
        taken, waits = await b.call(), await b.call()
        taken.bill(USAGE, "provider")
        await b.settler.wait(b.settler.finish(taken, "served"))
        b.down("settle")
        await b.settler.wait(b.settler.finish(waits, "served"))
        assert [[balance.spent for balance in balances] for balances in b.told.balances] == [[SPENT], []]
        assert (b.told.times("written", taken.id), b.told.times("written", waits.id)) == (1, 0)
        b.down()
        await b.clock.advance(1)
        assert (b.told.times("written", waits.id), b.told.times("concluded", waits.id)) == (1, 1)


async def test_what_can_never_be_counted_leaves_the_backlog_and_the_settles_behind_it_go_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        first, second = await b.call(), await b.call()
        for call in (first, second):
            call.bill(USAGE, "provider")
        b.down("settle")
        for call in (first, second):
            await b.settler.wait(b.settler.finish(call, "served"))
        too_late = [TooLate(first.id, "the store keeps ids for 24 hours")]

        async def way(name: str) -> None:
            if name == "settle" and too_late:
                raise too_late.pop()

        b.store.there = way
        await b.clock.advance(1)
        assert (b.settler.too_late, b.settler.backlog, await b.spent(first)) == (1, 0, SPENT)
        assert len(errors(caplog)) == 1
        await b.inner.release(first.id)


# The backlog.


async def test_while_the_store_is_away_settles_wait_in_order_and_only_the_backlog_asks() -> None:
    async with bench() as b:
        calls = [await b.call() for _ in range(5)]
        b.down("settle")
        for call in calls:
            await b.settler.wait(b.settler.finish(call, "served"))
            await settle_down()
        # The first by itself, then by the one task that tries the backlog; the later ones wait for their turn.
        assert b.store.ids("settle") == [calls[0].id, calls[0].id]
        assert ours() == ["budget-router backlog", "budget-router leases"]
        b.down()
        b.store.asked.clear()
        await b.clock.advance(1)
        assert b.store.ids("settle") == [call.id for call in calls]
        assert b.settler.backlog == 0


async def test_what_is_on_its_way_is_not_sent_again_when_another_settle_ends() -> None:
    async with bench() as b:
        ends, waits = await b.call(), await b.call()
        goes_on = asyncio.Event()

        async def way(name: str) -> None:
            if b.store.ids("settle")[-1] == waits.id:
                await goes_on.wait()

        b.store.there = way
        first, second = b.settler.finish(ends, "served"), b.settler.finish(waits, "served")
        await b.settler.wait(first)
        await settle_down()
        assert b.store.ids("settle") == [ends.id, waits.id]
        goes_on.set()
        await b.settler.wait(second)
        assert b.store.ids("settle") == [ends.id, waits.id]


async def test_once_a_drain_has_ended_or_was_stopped_settles_go_out_by_themselves_again() -> None:
    async with bench(patience=0.5) as b:

        async def settle_one() -> None:
            call = await b.call()
            call.bill(USAGE, "provider")
            await b.settler.wait(b.settler.finish(call, "served"))

        b.down("settle")
        await settle_one()
        b.down()
        await b.clock.advance(1)
        await settle_one()
        b.down("settle")
        await settle_one()
        await settle_down()
        await b.settler.aclose()
        b.down()
        await settle_one()
        assert [len(balances) for balances in b.told.balances] == [0, 1, 0, 1]


async def test_a_drain_that_was_cancelled_before_it_began_is_begun_again() -> None:
    async with bench() as b:
        b.settler.forget("an id")
        for task in asyncio.all_tasks():
            if task.get_name() == "budget-router backlog":
                task.cancel()
        await settle_down()
        assert (b.settler.idle, b.store.ids("settle")) == (False, [])
        b.settler.forget("another id")
        await settle_down()
        assert (b.settler.idle, b.store.ids("settle")) == (True, ["an id", "another id"])


async def test_a_settle_that_was_not_taken_is_tried_again_while_other_work_is_under_way() -> None:
    async with bench() as b:
        goes_on = asyncio.Event()

        async def work() -> None:
            await goes_on.wait()

        other = b.settler.spawn(work())
        b.down("settle")
        call = await b.call()
        call.bill(USAGE, "provider")
        await b.settler.wait(b.settler.finish(call, "served"))
        await settle_down()
        b.down()
        await b.clock.advance(1)
        assert (other.done(), b.settler.backlog, await b.spent(call)) == (False, 0, SPENT)
        goes_on.set()


async def test_a_backlog_goes_out_a_hundred_at_a_time() -> None:
    async with bench() as b:
        calls = [await b.call() for _ in range(250)]
        b.down("settle")
        for call in calls:
            await b.settler.wait(b.settler.finish(call, "served"))
        goes_on = b.held_up("settle")
        b.store.asked.clear()
        await b.clock.advance(1)
        assert b.store.ids("settle") == [call.id for call in calls[:100]]
        goes_on.set()
        await settle_down(60)
        assert b.store.ids("settle") == [call.id for call in calls]


async def test_after_the_store_was_back_the_pauses_begin_anew() -> None:
    async with bench() as b:
        for _ in range(2):
            call = await b.call()
            b.down("settle")
            b.clock.slept.clear()
            await b.settler.wait(b.settler.finish(call, "served"))
            for _ in range(3):
                await b.clock.advance(0.5)
            assert [pause for pause in b.clock.slept if pause < 3] == [0.05, 0.1, 0.2, 0.4]
            b.down()
            await b.clock.advance(1)
            assert b.settler.backlog == 0


async def test_a_batch_of_the_backlog_that_goes_out_lets_the_next_pause_begin_anew() -> None:
    async with bench() as b:
        calls = [await b.call() for _ in range(101)]
        b.down("settle")
        for call in calls:
            await b.settler.wait(b.settler.finish(call, "served"))
        await b.clock.advance(0.1)
        b.clock.slept.clear()

        async def way(name: str) -> None:
            if name == "settle" and b.settler.backlog == 1:
                raise StoreUnavailable("test", "it is down again")

        b.store.there = way
        await b.clock.advance(1)
        await settle_down(60)
        assert (b.settler.backlog, [pause for pause in b.clock.slept if pause < 3]) == (1, [0.05])
        b.down()
        await b.clock.advance(1)


async def test_a_reserve_that_may_have_been_applied_is_closed_once_the_store_is_there() -> None:
    async with bench() as b:
        call = await b.call()
        await b.settler.wait(b.settler.finish(call, "served"))
        lost = new_id("", now=START)
        charges = charges_of(call.slots, {"strong": call.estimate.amounts})
        assert (await b.inner.reserve(lost, [charges], lease=LEASE)).held
        b.down("settle")
        b.settler.forget(lost)
        await settle_down()
        assert (b.settler.idle, b.settler.backlog, b.settler.open) == (False, 0, 0)
        b.down()
        b.store.asked.clear()
        await b.clock.advance(1)
        assert (b.settler.idle, await b.holds()) == (True, ())
        assert b.store.ids("settle") == [lost]


async def test_a_reserve_that_may_have_been_applied_is_closed_after_a_settle_that_was_under_way() -> None:
    async with bench() as b:
        call = await b.call()
        goes_on = b.held_up("settle")
        settle = b.settler.finish(call, "served")
        await settle_down()
        b.settler.forget("an id")
        goes_on.set()
        await b.settler.wait(settle)
        await settle_down()
        assert b.settler.idle
        assert b.store.ids("settle")[-1] == "an id"


async def test_no_more_than_ten_thousand_reserves_wait_to_be_closed() -> None:
    async with bench() as b:
        b.down("settle")
        for number in range(10_002):
            b.settler.forget(f"id {number}")
        await settle_down()
        b.down()
        b.store.asked.clear()
        await b.clock.advance(1)
        await settle_down(2000)
        assert b.settler.idle
        assert b.store.ids("settle") == [f"id {number}" for number in range(10_000)]


# Leases.


async def test_a_settle_in_the_backlog_keeps_its_hold() -> None:
    async with bench() as b:
        call = await b.call()
        b.down("settle")
        await b.settler.wait(b.settler.finish(call, "served"))
        for _ in range(6):
            await b.clock.advance(LEASE / 3000)
        assert [(hold.id, hold.state) for hold in await b.holds()] == [(call.id, "held")]
        b.down()
        await b.clock.advance(3)


async def test_renewals_that_fail_are_asked_again_and_only_an_error_of_a_strange_store_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong: list[Exception] = [StoreUnavailable("test", "it is down"), ZeroDivisionError("a store of somebody else")]

    async def way(name: str) -> None:
        if name == "renew" and wrong:
            raise wrong.pop()

    async with bench() as b:
        call = await b.call()
        b.store.there = way
        await b.clock.advance(LEASE / 3000)
        assert errors(caplog) == ["budget-router: renewing the leases failed"]
        for _ in range(3):
            await b.clock.advance(LEASE / 3000)
        assert errors(caplog) == ["budget-router: renewing the leases failed"]
        assert b.renewed() == [[call.id]] * 4
        assert [hold.state for hold in await b.holds()] == ["held"]
        await b.settler.wait(b.settler.finish(call, "served"))


async def test_one_task_renews_and_ends_when_nothing_is_held() -> None:
    async with bench() as b:
        for _ in range(2):
            calls = [await b.call() for _ in range(3)]
            await settle_down()
            assert ours() == ["budget-router leases"]
            for call in calls:
                await b.settler.wait(b.settler.finish(call, "served"))
            await b.clock.advance(LEASE / 3000)
            assert ours() == []
        assert b.renewed() == []


async def test_a_shorter_lease_is_renewed_for_at_once_and_then_three_times_a_lease() -> None:
    async with bench() as b:
        call = await b.call()
        await settle_down()
        b.settler.change_lease(LEASE // 10)
        await settle_down()
        assert b.renewed() == [[call.id]]
        assert ours() == ["budget-router leases"]
        for _ in range(10):
            await b.clock.advance(LEASE / 30_000)
        assert b.renewed() == [[call.id]] * 11
        await b.settler.wait(b.settler.finish(call, "served"))


@pytest.mark.parametrize("times", [1, 2])
async def test_a_lease_that_is_no_shorter_waits_for_its_turn(times: int) -> None:
    async with bench() as b:
        call = await b.call()
        await settle_down()
        b.settler.change_lease(LEASE * times)
        await settle_down()
        assert b.renewed() == []
        await b.clock.advance(LEASE / 3000)
        assert b.renewed() == [[call.id]]
        await b.settler.wait(b.settler.finish(call, "served"))


async def test_a_shorter_lease_with_nothing_held_begins_no_task() -> None:
    async with bench() as b:
        b.settler.change_lease(LEASE // 10)
        assert ours() == []


# Closing.


async def test_closing_says_what_the_store_has_not_taken_and_may_be_done_again(caplog: pytest.LogCaptureFixture) -> None:
    async with bench(patience=0.5) as b:
        settled, open_still = await b.call(), await b.call()
        settled.bill(USAGE, "provider")
        b.down("settle")
        await b.settler.wait(b.settler.finish(settled, "served"))
        async with asyncio.timeout(10):
            await b.settler.aclose()
        (said,) = errors(caplog)
        assert "1 settles that the store has not taken and 1 calls open" in said
        # What is open keeps its lease; nothing else goes on.
        assert ours() == ["budget-router leases"]
        await b.clock.advance(LEASE / 3000)
        assert set(b.renewed()[-1]) == {settled.id, open_still.id}
        b.down()
        await b.settler.wait(b.settler.finish(open_still, "served"))
        async with asyncio.timeout(10):
            await b.settler.aclose()
        assert (b.settler.idle, await b.spent(settled)) == (True, SPENT)
        assert errors(caplog) == [said]


async def test_closing_sends_what_an_earlier_closing_left(caplog: pytest.LogCaptureFixture) -> None:
    async with bench(patience=0.5) as b:
        call = await b.call()
        call.bill(USAGE, "provider")
        b.down("settle")
        await b.settler.wait(b.settler.finish(call, "served"))
        async with asyncio.timeout(10):
            await b.settler.aclose()
        assert (ours(), b.settler.backlog) == ([], 1)
        (said,) = errors(caplog)
        assert "1 settles that the store has not taken and 0 calls open" in said
        b.down()
        async with asyncio.timeout(10):
            await b.settler.aclose()
        assert (b.settler.backlog, await b.spent(call)) == (0, SPENT)


async def test_closing_again_sends_what_is_left_of_reserves_that_may_have_been_applied() -> None:
    async with bench(patience=0.5) as b:
        b.down("settle")
        b.settler.forget("an id")
        async with asyncio.timeout(10):
            await b.settler.aclose()
        assert (ours(), b.settler.idle) == ([], False)
        b.down()
        b.store.asked.clear()
        async with asyncio.timeout(10):
            await b.settler.aclose()
        assert (b.settler.idle, b.store.ids("settle")) == (True, ["an id"])


async def test_closing_waits_for_calls_that_end_by_themselves_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as b:
        call = await b.call()
        call.bill(USAGE, "provider")
        closing = asyncio.ensure_future(b.settler.aclose())
        await settle_down()
        assert closing.done() is False
        b.settler.finish(call, "served")
        async with asyncio.timeout(10):
            await closing
        assert (await b.spent(call), errors(caplog), ours()) == (SPENT, [], [])


async def test_closing_hangs_up_what_is_being_streamed_while_other_calls_are_left_alone() -> None:
    async with bench() as b:
        streamed, other = await b.call(), await b.call()
        streamed.hang_up = lambda: b.settler.finish(streamed, "left")
        closing = asyncio.ensure_future(b.settler.aclose())
        await settle_down()
        assert (streamed.outcome, other.outcome) == ("left", "open")
        b.settler.finish(other, "served")
        async with asyncio.timeout(10):
            await closing
        assert await b.holds() == ()
