"""What the cap refuses waits its turn: lines, classes, deadlines and a pace, each sentence held to on a clock that is moved."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router import Cap, Decision, PolicyError, Router, Task, TaskClass, WaitEvent
from router.charges import slots_of
from router.waiting import Lines, Need, Waiter
from stores import Balance, BudgetStore, MemoryStore, StoreUnavailable
from tests.support import CENT, Bench, TestClock, bench, chat, eventually, policy_of, settle_down, worth

pytestmark = pytest.mark.anyio

LOW = TaskClass("low", priority=9, max_wait=60, when_expired="retry_later")
HIGH = TaskClass("high", priority=0, max_wait=60, when_expired="retry_later")
AT_ONCE = TaskClass("at once", priority=5)
CLASSES = {"classes": (LOW, HIGH, AT_ONCE), "default_class": "low"}


class Waits:
    """A task that asks for budget in a task of its own, and gives it back when told."""

    def __init__(self, router: Router, task: Task, order: list[str], name: str) -> None:
        self._leave = asyncio.Event()
        self.decision: Decision | None = None
        self.name = name
        self._order = order
        self.actual: int | None = None
        self.task = asyncio.create_task(self._work(router, task))

    async def _work(self, router: Router, task: Task) -> None:
        async with router.admit(task) as admission:
            self.decision = admission.decision
            if not admission.served:
                return
            self._order.append(self.name)
            await self._leave.wait()
            if self.actual is None:
                admission.release()
            else:
                admission.settle_usd(f"0.{self.actual:02}")

    @property
    def admitted(self) -> bool:
        return self.decision is not None and self.decision.served

    async def leave(self, *, cents: int | None = None) -> None:
        """Give back what was held, having spent so many cents."""
        self.actual = cents
        self._leave.set()
        await self.task
        await settle_down()


class Crowd:
    """Those who ask one router for budget, in the order in which they come."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.order: list[str] = []
        self.all: list[Waits] = []

    async def comes(self, name: str, cents: int = 10, *, task_class: str = "low", **more: Any) -> Waits:
        """Let one come, and see what happens by itself."""
        return await self.brings(name, worth(cents, task_class=task_class, **more))

    async def brings(self, name: str, *tasks: Task) -> Waits:
        """Let tasks come, all at once, until each is in line or decided; return the last."""
        queue = self.bench.router._queue
        before = len(queue)
        new = [Waits(self.bench.router, task, self.order, name) for task in tasks]
        self.all += new

        async def placed() -> bool:
            return len(queue) - before + sum(one.decision is not None for one in new) >= len(new)

        await eventually(placed)
        await settle_down()
        return new[-1]

    async def end(self) -> None:
        """Let everybody go."""
        for one in self.all:
            one._leave.set()
            one.task.cancel()
        await asyncio.gather(*(one.task for one in self.all), return_exceptions=True)
        await settle_down()


@pytest.fixture
async def crowds(clock: TestClock) -> AsyncIterator[Any]:
    """Open routers in memory, each with a crowd; afterwards nobody waits and nothing is held."""
    async with AsyncExitStack() as stack:
        crowds = []

        async def make(*caps: Cap, store: MemoryStore | None = None, **more: Any) -> Crowd:
            if "classes" in more:
                more.setdefault("default_class", more["classes"][0].name)
            opened = await stack.enter_async_context(
                bench("http://127.0.0.1:9", *caps, store=store or MemoryStore(clock=clock), clock=clock, **{**CLASSES, **more})
            )
            crowd = Crowd(opened)
            crowds.append(crowd)
            return crowd

        yield make
        for crowd in crowds:
            await crowd.end()
            assert (await crowd.bench.router.status()).waiting == ()


def cents(amount: int, **more: Any) -> Cap:
    """A cap that everybody shares, without a window unless one is given."""
    more.setdefault("per", None)
    return Cap(usd=f"{amount / 100:.2f}", name=more.pop("name", "all"), admit_at=1, **more)


async def test_two_of_high_priority_go_before_eight_that_wait(crowds: Any) -> None:
    """Q1: room for one, eight of low priority wait, then two of high priority come: the two go next."""
    crowd = await crowds(cents(10))
    now = await crowd.comes("first")
    low = [await crowd.comes(f"low{number}") for number in range(8)]
    high = [await crowd.comes(f"high{number}", task_class="high") for number in range(2)]
    assert crowd.order == ["first"]
    for one in (now, *high, *low):
        await one.leave()
    assert crowd.order == ["first", "high0", "high1", *(f"low{number}" for number in range(8))]


async def test_a_thousand_deadlines_leave_no_line(crowds: Any, clock: TestClock) -> None:
    """Q2: 1,000 waiters pass their deadlines: line length 0, nothing held, each has its decision."""
    crowd = await crowds(cents(10))
    first = await crowd.comes("first")
    await crowd.brings("late", *(worth(10, task_class="low") for _ in range(1000)))
    waiting = crowd.all[1:]
    assert sum(line.depth for line in (await crowd.bench.router.status()).waiting) == 1000
    await clock.advance(59)
    assert [one for one in waiting if one.decision is not None] == []
    await clock.advance(1)
    decisions = [one.decision for one in waiting]
    assert {(d.served, d.reason, d.kind, d.waited, d.retry_after) for d in decisions if d is not None} == {
        (False, "expired", "busy", 60.0, 1.0)
    }
    assert len([decision for decision in decisions if decision is not None]) == 1000
    assert (await crowd.bench.router.status()).waiting == ()
    assert await crowd.bench.sums() == (10 * CENT, 0)
    await first.leave()
    assert await crowd.bench.sums() == (0, 0)


async def test_one_of_four_routers_gets_what_comes_back(crowds: Any, clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    four = [await crowds(cents(10), store=store) for _ in range(4)]
    first = await four[0].comes("first")
    waiting = [await crowd.comes(f"w{number}") for number, crowd in enumerate(four)]
    await first.leave()
    await clock.advance(1)
    await clock.advance(1)
    assert [one.admitted for one in waiting].count(True) == 1
    for _ in range(3):
        await next(one for one in waiting if one.admitted and not one.task.done()).leave()
        await clock.advance(1)
        await clock.advance(1)
    assert [one.admitted for one in waiting] == [True] * 4


async def test_one_of_four_processes_gets_what_comes_back(tmp_path: Path) -> None:
    """Q3: four processes, room for one: one is admitted, and each of the others when the one before it has left."""
    path = str(tmp_path / "budget.sqlite")
    first = await _waiting_process(path)
    others: list[asyncio.subprocess.Process] = []
    try:
        assert await _line_of(first) == "admitted"
        others += [await _waiting_process(path) for _ in range(4)]
        assert [await _line_of(other) for other in others] == ["waits"] * 4
        left = {asyncio.create_task(_line_of(other)): other for other in others}
        holder = first
        while left:
            assert [task for task in left if task.done()] == []
            await _leaves(holder)
            done, _ = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED, timeout=30)
            assert [task.result() for task in done] == ["admitted"]
            holder = left.pop(done.pop())
        await _leaves(holder)
    finally:
        for process in (first, *others):
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def _waiting_process(path: str) -> asyncio.subprocess.Process:
    root = Path(__file__).parent.parent
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.waiting_worker", path),
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def _line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode().strip()


async def _leaves(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    await process.stdin.drain()
    assert await process.wait() == 0


class Counting(MemoryStore):
    """Counts the reserves that it is asked for, and how many it grants."""

    asked = granted = 0

    async def reserve(self, *args: Any, **more: Any) -> Any:
        self.asked += 1
        verdict = await super().reserve(*args, **more)
        self.granted += verdict.held
        return verdict


async def test_one_reserve_for_one_unit_that_comes_back(crowds: Any, clock: TestClock) -> None:
    """Q4: N waiters, one unit of budget comes back: one reserve that succeeds, no herd of N reserves."""
    store = Counting(clock=clock)
    crowd = await crowds(cents(10), store=store)
    first = await crowd.comes("first")
    waiting = [await crowd.comes(f"w{number}") for number in range(50)]
    before = store.asked, store.granted
    await first.leave()
    assert (store.asked - before[0], store.granted - before[1]) == (1, 1)
    for one in waiting[:-1]:
        await one.leave()
    assert (store.asked - before[0], store.granted - before[1]) == (50, 50)


async def test_the_first_that_is_refused_asks_and_whoever_comes_behind_it_does_not(crowds: Any, clock: TestClock) -> None:
    store = Counting(clock=clock)
    crowd = await crowds(cents(10), store=store)
    await crowd.comes("first")
    for number in range(50):
        await crowd.comes(f"w{number}")
    assert store.asked == 2


async def test_without_a_class_the_default_class_waits(crowds: Any, clock: TestClock) -> None:
    """Q5: no class given: the policy's default class; never an error at call time."""
    crowd = await crowds(cents(10), default_class="low")
    first = await crowd.comes("first")
    second = await crowd.brings("second", worth(10))
    assert second.decision is None
    await first.leave()
    assert second.admitted
    assert second.decision is not None
    assert second.decision.task_class == "low"


async def test_what_never_fits_does_not_stand_in_the_line(crowds: Any) -> None:
    """Q6: a waiter whose estimate is larger than the whole cap is refused at once as never."""
    crowd = await crowds(cents(10))
    await crowd.comes("first")
    large = await crowd.comes("large", 11)
    assert large.decision is not None
    assert (large.decision.served, large.decision.kind, large.decision.retry_after) == (False, "never", None)
    assert (await crowd.bench.router.status()).waiting == ()


async def test_a_child_never_resets_its_parent(crowds: Any) -> None:
    """Q7: a child run's counter never resets its parent's."""
    crowd = await crowds(cents(30, scope="run"), cents(20, scope=("run", "child"), name="child"))
    labels = [{"run": "r", "child": child} for child in ("a", "b")]
    parts = [await crowd.comes("a", 20, labels=labels[0]), await crowd.comes("b", 10, labels=labels[1])]
    await parts[0].leave(cents=20)
    await parts[1].leave(cents=10)
    assert await crowd.bench.sums() == (0, 30 * CENT)
    third = await crowd.comes("c", 1, labels={"run": "r", "child": "c"})
    assert third.decision is not None
    assert (third.decision.served, third.decision.cap and third.decision.cap.cap) == (False, "all")


async def test_an_aged_head_blocks_only_those_whose_line_is_no_higher(crowds: Any, clock: TestClock) -> None:
    """Q8: an aged batch waiter, whose class stops at 0.6, is at the head, 0.7 is used, an interactive task is admitted."""
    batch = TaskClass("batch", priority=5, max_wait=600, ages_after=1, admit_at=0.6, when_expired="drop")
    chat = TaskClass("chat", priority=0, max_wait=2, when_expired="retry_later")
    crowd = await crowds(cents(100), classes=(batch, chat), default_class="chat")
    await crowd.comes("used", 70, task_class="chat")
    waiting = await crowd.comes("batch", 10, task_class="batch")
    await clock.advance(100)  # by now it ranks above every interactive task
    interactive = await crowd.comes("chat", 10, task_class="chat")
    assert (interactive.admitted, waiting.decision) == (True, None)


async def test_an_aged_head_goes_before_a_newcomer_of_higher_priority_with_the_same_line(crowds: Any, clock: TestClock) -> None:
    aging = TaskClass("aging", priority=3, max_wait=600, ages_after=10, when_expired="drop")
    crowd = await crowds(cents(10), classes=(aging, HIGH, LOW), default_class="low")
    first = await crowd.comes("first")
    old = await crowd.comes("old", task_class="aging")
    await clock.advance(29)
    young = await crowd.comes("young", task_class="high")
    await clock.advance(2)  # four tenths of a minute: three places up, and older
    late = await crowd.comes("late", task_class="high")
    for one in (first, old, young, late):
        await one.leave()
    assert crowd.order == ["first", "old", "young", "late"]


async def test_no_newcomer_of_equal_priority_overtakes_even_where_it_would_fit(crowds: Any) -> None:
    crowd = await crowds(cents(10))
    first = await crowd.comes("first", 6)
    large = await crowd.comes("large", 8)
    small = await crowd.comes("small", 1)
    assert (large.decision, small.decision) == (None, None)
    await first.leave()
    assert crowd.order == ["first", "large", "small"]


async def test_a_newcomer_that_does_not_wait_is_refused_rather_than_let_overtake(crowds: Any) -> None:
    crowd = await crowds(cents(10))
    await crowd.comes("first", 6)
    await crowd.comes("large", 8, task_class="high")
    small = await crowd.comes("small", 1, task_class="at once")
    assert small.decision is not None
    assert (small.decision.served, small.decision.kind, small.decision.retry_after) == (False, "busy", 1.0)


async def test_a_newcomer_of_higher_priority_takes_what_a_lower_one_waits_for(crowds: Any) -> None:
    crowd = await crowds(cents(10))
    await crowd.comes("first", 6)
    await crowd.comes("large", 8)
    small = await crowd.comes("small", 1, task_class="high")
    assert small.admitted


async def test_a_user_at_the_daily_cap_never_blocks_another_user(crowds: Any) -> None:
    user = Cap(usd="0.10", per="day", scope="user", name="user", admit_at=1)
    crowd = await crowds(cents(30), user)
    held = [await crowd.comes(name, labels={"user": name}) for name in ("alice", "carol", "dave")]
    waits = await crowd.comes("alice again", labels={"user": "alice"})  # refused by her own cap and by the shared one
    bob = await crowd.comes("bob", labels={"user": "bob"})  # by the shared one alone
    await held[1].leave()
    assert (waits.decision, bob.admitted) == (None, True)
    await held[0].leave()
    assert waits.admitted


async def test_a_waiter_keeps_its_age_when_it_goes_on_to_another_line(crowds: Any) -> None:
    user = Cap(usd="0.10", per=None, scope="user", name="user", admit_at=1)
    crowd = await crowds(cents(20), user)
    alice = await crowd.comes("alice", labels={"user": "alice"})
    bob = await crowd.comes("bob", labels={"user": "bob"})
    old = await crowd.comes("alice again", labels={"user": "alice"})
    young = await crowd.comes("carol", labels={"user": "carol"})
    await alice.leave()
    assert crowd.order == ["alice", "bob", "alice again"]
    await bob.leave()
    assert crowd.order == ["alice", "bob", "alice again", "carol"]
    assert (old.admitted, young.admitted) == (True, True)


async def test_a_waiter_that_is_cancelled_is_gone_at_that_moment(crowds: Any) -> None:
    crowd = await crowds(cents(10))
    first = await crowd.comes("first")
    gone = await crowd.comes("gone")
    second = await crowd.comes("second")
    gone.task.cancel()
    await settle_down()
    assert [line.depth for line in (await crowd.bench.router.status()).waiting] == [1]
    await first.leave()
    assert second.admitted


async def test_the_tasks_own_deadline_ends_the_wait_when_it_is_sooner(crowds: Any, clock: TestClock) -> None:
    crowd = await crowds(cents(10))
    await crowd.comes("first")
    hasty = await crowd.comes("hasty", deadline=3)
    await clock.advance(3)
    assert hasty.decision is not None
    assert (hasty.decision.reason, hasty.decision.waited) == ("expired", 3.0)


async def test_a_wait_that_is_over_is_answered_as_the_class_says(crowds: Any, clock: TestClock) -> None:
    kept: list[tuple[str, datetime]] = []

    class Keeper:
        async def defer(self, task: Task, not_before: datetime) -> None:
            kept.append((task.id, not_before))

    answers = {
        answer: TaskClass(answer, max_wait=5, when_expired=answer, review_downgrades=True)
        for answer in ("downgrade", "retry_later", "defer", "drop")
    }
    strong = Cap(usd="0.10", per="hour", tiers={"strong"}, name="strong", admit_at=1)
    crowd = await crowds(strong, classes=(*answers.values(), LOW), default_class="low", deferral=Keeper())
    await crowd.comes("first")
    waiting = {answer: await crowd.comes(answer, task_class=answer, id=answer) for answer in answers}
    await clock.advance(5)
    decided = {answer: one.decision for answer, one in waiting.items()}
    shown = {
        answer: (d.served, d.tier, d.reason, d.outcome, d.review, d.retry_after, d.waited) for answer, d in decided.items() if d
    }
    assert shown == {
        "downgrade": (True, "cheap", "downgrade", "open", True, None, 5.0),
        "retry_later": (False, None, "expired", "refused", False, 1.0, 5.0),
        "defer": (False, None, "expired", "deferred", False, 1.0, 5.0),
        "drop": (False, None, "expired", "dropped", False, None, 5.0),
    }
    assert kept == [("defer", datetime(2026, 8, 1, 0, 0, 6, tzinfo=UTC))]


async def test_a_task_that_could_not_be_deferred_is_refused_and_says_so(crowds: Any, clock: TestClock) -> None:
    class Broken:
        async def defer(self, task: Task, not_before: datetime) -> None:
            raise ConnectionError("no broker")

    later = TaskClass("later", when_expired="defer")
    crowd = await crowds(cents(10), classes=(later,), deferral=Broken())
    await crowd.comes("first", task_class="later")
    second = await crowd.comes("second", task_class="later")
    assert second.decision is not None
    assert (second.decision.outcome, second.decision.notes) == ("refused", ("it could not be deferred (ConnectionError)",))


async def test_a_class_that_defers_needs_somebody_who_keeps_its_tasks(clock: TestClock) -> None:
    policy = policy_of(None, classes=[TaskClass("later", when_expired="defer")])
    with pytest.raises(PolicyError, match=r"class 'later' defers: give the router who keeps its tasks"):
        Router(policy, MemoryStore(clock=clock))


@pytest.mark.parametrize("name", ["object", "sync", "class", "number"])
def test_whoever_cannot_keep_tasks_is_refused_when_the_router_is_built(name: str) -> None:
    class Sync:
        def defer(self, task: Task, not_before: datetime) -> None: ...

    class Right:
        async def defer(self, task: Task, not_before: datetime) -> None: ...

    class Number:
        defer = 5

    wrong: Any = {"object": object(), "sync": Sync(), "class": Right, "number": Number()}[name]
    with pytest.raises(PolicyError, match=r"deferral must be an object with 'async def defer\(task, not_before\)', not "):
        Router(policy_of(None), MemoryStore(), deferral=wrong)
    assert Router(policy_of(None), MemoryStore(), deferral=Right())


async def _waits_for(event: WaitEvent) -> None: ...


@pytest.mark.parametrize("hooks", [print, None, "abc", [5], [_waits_for], {"enqueue": print}])
def test_hooks_that_are_no_list_of_functions_are_refused_when_the_router_is_built(hooks: Any) -> None:
    with pytest.raises(PolicyError, match="hooks must be a list of functions that take a WaitEvent, none of them 'async def'"):
        Router(policy_of(None), MemoryStore(), hooks=hooks)


async def test_a_wait_that_is_over_says_how_the_cap_stands_by_then(crowds: Any, clock: TestClock) -> None:
    kept: list[datetime] = []

    class Keeper:
        async def defer(self, task: Task, not_before: datetime) -> None:
            kept.append(not_before)

    later = TaskClass("later", max_wait=60, when_expired="defer")
    crowd = await crowds(cents(10, per="hour"), classes=(later,), deferral=Keeper())
    first = await crowd.comes("first", task_class="later")
    waits = await crowd.comes("waits", task_class="later")
    await first.leave(cents=10)
    await clock.advance(60)
    decision = waits.decision
    assert decision is not None
    assert decision.cap is not None
    assert (decision.kind, decision.cap.spent, decision.cap.held, decision.retry_after) == ("spent", 10 * CENT, 0, 3540.0)
    assert kept == [datetime(2026, 8, 1, 1, tzinfo=UTC)]


async def test_a_spent_cap_without_a_window_lets_nobody_wait(crowds: Any) -> None:
    crowd = await crowds(cents(10))
    first = await crowd.comes("first")
    waits = await crowd.comes("waits")
    await first.leave(cents=10)
    late = await crowd.comes("late")
    for one in (waits, late):
        assert one.decision is not None
        assert (one.decision.reason, one.decision.kind, one.decision.retry_after) == ("cap", "spent", None)


async def test_the_expected_wait_is_that_of_whoever_comes_now_with_the_same_priority(crowds: Any, clock: TestClock) -> None:
    low = TaskClass("low", priority=9, max_wait="window", when_expired="drop")
    high = TaskClass("high", priority=0, max_wait="window", when_expired="drop")
    crowd = await crowds(cents(60, per="hour"), classes=(low, high))
    await (await crowd.comes("first", 60)).leave(cents=60)
    for number in range(5):
        await crowd.comes(f"low{number}", 10)
    await crowd.comes("high", 10, task_class="high")
    expected = {line.task_class: line.expected for line in (await crowd.bench.router.status()).waiting}
    assert expected == {"low": 3600 + 6 * 600, "high": 3600 + 600}


async def test_closing_the_router_ends_every_waiter_with_a_decision(crowds: Any, clock: TestClock) -> None:
    crowd = await crowds(cents(10))
    first = await crowd.comes("first")
    waiting = [await crowd.comes(f"w{number}") for number in range(3)]
    closing = asyncio.create_task(crowd.bench.router.aclose())
    await settle_down()
    assert [one.decision.reason for one in waiting if one.decision is not None] == ["closed"] * 3
    await first.leave()
    await closing


async def test_a_waiter_that_has_become_never_leaves_at_once(crowds: Any) -> None:
    crowd = await crowds(cents(10))
    await crowd.comes("first")
    second = await crowd.comes("second")
    policy = crowd.bench.router.policy
    crowd.bench.router.policy = policy_of(None, cents(9), **CLASSES)
    await settle_down()
    assert second.decision is not None
    assert (second.decision.served, second.decision.kind) == (False, "never")
    crowd.bench.router.policy = policy


async def test_a_cap_that_was_raised_lets_the_next_ones_in_without_a_herd(crowds: Any, clock: TestClock) -> None:
    store = Counting(clock=clock)
    crowd = await crowds(cents(10), store=store)
    await crowd.comes("first")
    waiting = [await crowd.comes(f"w{number}") for number in range(20)]
    before = store.asked
    crowd.bench.router.policy = policy_of(None, cents(30), **CLASSES)
    await settle_down()
    assert [one.admitted for one in waiting] == [True, True] + [False] * 18
    assert store.asked - before == 2


async def test_what_comes_above_the_bound_gets_its_answer_at_once(crowds: Any) -> None:
    crowd = await crowds(cents(10), max_waiting=2)
    await crowd.comes("first")
    waiting = [await crowd.comes(f"w{number}") for number in range(3)]
    assert [one.decision is None for one in waiting] == [True, True, False]
    assert waiting[2].decision is not None
    assert (waiting[2].decision.reason, waiting[2].decision.retry_after) == ("queue_full", 1.0)


async def test_the_bytes_that_wait_are_bounded_too(crowds: Any) -> None:
    crowd = await crowds(cents(10), max_waiting_bytes=20_000)
    await crowd.comes("first")
    fits = await crowd.brings("fits", chat("x" * 9000, output=5000))
    large = await crowd.brings("large", chat("x" * 19000, output=5000))
    assert fits.decision is None
    assert large.decision is not None
    assert large.decision.reason == "queue_full"


async def test_hooks_hear_who_begins_to_wait_and_how_it_ends(crowds: Any, clock: TestClock) -> None:
    heard: list[WaitEvent] = []

    def broken(event: WaitEvent) -> None:
        raise ValueError

    crowd = await crowds(cents(10), hooks=(broken, heard.append))
    first = await crowd.comes("first", id="first")
    await crowd.comes("second", id="second")
    await crowd.comes("third", id="third")
    await clock.advance(2)
    await first.leave()
    await clock.advance(58)
    assert [(event.what, event.task_id, event.cap, event.waited, event.waiting) for event in heard] == [
        ("enqueue", "second", "all", 0.0, 1),
        ("enqueue", "third", "all", 0.0, 2),
        ("admit", "second", "all", 2.0, 1),
        ("expire", "third", "all", 60.0, 0),
    ]


# Windows and the pace.


async def test_a_window_that_turns_lets_waiters_in(crowds: Any, clock: TestClock) -> None:
    until = TaskClass("until", max_wait="window", when_expired="drop")
    crowd = await crowds(cents(10, per="hour"), classes=(until,))
    first = await crowd.comes("first", task_class="until")
    await first.leave(cents=10)
    waits = await crowd.comes("waits", task_class="until")
    await clock.advance(3599)
    assert waits.decision is None
    await clock.advance(3)
    assert waits.admitted


async def test_a_full_queue_does_not_go_out_in_one_spike_when_the_window_turns(crowds: Any, clock: TestClock) -> None:
    until = TaskClass("until", max_wait="window", when_expired="drop")
    crowd = await crowds(cents(60, per="hour"), classes=(until,))
    first = await crowd.comes("first", 60, task_class="until")
    await first.leave(cents=60)
    waiting = [await crowd.comes(f"w{number}", 10, task_class="until") for number in range(6)]
    await clock.advance(3600)
    out = []
    for _ in range(60):
        await clock.advance(60)
        for one in waiting:
            if one.admitted and not one.task.done():
                await one.leave(cents=10)
        out.append(sum(one.admitted for one in waiting))
    # One of six every ten minutes: never more than one ahead of the part of the window that is over.
    assert [out[minute] for minute in (0, 10, 20, 30, 40, 50, 59)] == [1, 2, 3, 4, 5, 6, 6]


async def test_several_routers_keep_one_pace_together(crowds: Any, clock: TestClock) -> None:
    until = TaskClass("until", max_wait="window", when_expired="drop")
    store = MemoryStore(clock=clock)
    three = [await crowds(cents(60, per="hour"), classes=(until,), store=store) for _ in range(3)]
    first = await three[0].comes("first", 60, task_class="until")
    await first.leave(cents=60)
    waiting = [await crowd.comes(f"w{number}", 10, task_class="until") for crowd in three for number in range(2)]
    await clock.advance(3600)
    out = []
    for _ in range(62):
        await clock.advance(60)
        for one in waiting:
            if one.admitted and not one.task.done():
                await one.leave(cents=10)
        out.append(sum(one.admitted for one in waiting))
    for minute, number in enumerate(out[:60], start=1):
        assert number <= 1 + minute / 10
    assert out[-1] == 6


async def test_a_drain_bucket_is_never_reported_as_the_cap_that_refused(crowds: Any, clock: TestClock) -> None:
    until = TaskClass("until", max_wait="window", when_expired="retry_later")
    soon = TaskClass("soon", priority=1, max_wait=5, when_expired="retry_later")
    crowd = await crowds(cents(60, per="hour"), classes=(until, soon), default_class="until")
    first = await crowd.comes("first", 60, task_class="until")
    await first.leave(cents=60)
    waiting = [await crowd.comes(f"w{number}", 10, task_class="until") for number in range(6)]
    await clock.advance(3600)
    await clock.advance(2)
    behind = await crowd.comes("behind", 10, task_class="soon")
    await clock.advance(6)
    assert behind.decision is not None
    assert behind.decision.cap is not None
    assert (behind.decision.reason, behind.decision.cap.cap) == ("expired", "all")
    assert {bucket.cap for bucket in (await crowd.bench.router.status()).buckets} == {"all"}
    assert sum(one.admitted for one in waiting) == 1


async def test_status_says_how_many_wait_for_what_and_for_how_long(crowds: Any, clock: TestClock) -> None:
    until = TaskClass("until", max_wait="window", when_expired="drop")
    crowd = await crowds(cents(60, per="hour"), classes=(until,))
    first = await crowd.comes("first", 60, task_class="until")
    await crowd.comes("w0", 10, task_class="until")
    (line,) = (await crowd.bench.router.status()).waiting
    assert (line.cap, line.task_class, line.depth, line.oldest, line.waits_for) == ("all", "until", 1, 0.0, "room")
    await first.leave(cents=60)
    await clock.advance(60)
    (line,) = (await crowd.bench.router.status()).waiting
    assert (line.waits_for, line.oldest) == ("window", 60.0)
    assert line.expected == 59 * 60 + 600  # the rest of this hour, and its share of the next
    assert str(line) == "1 of until wait for all: window, oldest 60 s, about 4140 s for a newcomer"


async def test_budget_that_another_process_gives_back_is_seen_within_a_second(crowds: Any, clock: TestClock) -> None:
    store = MemoryStore(clock=clock)
    one, other = await crowds(cents(10), store=store), await crowds(cents(10), store=store)
    first = await other.comes("first")
    waits = await one.comes("waits")
    await first.leave()
    assert waits.decision is None
    await clock.advance(1)
    assert waits.admitted


async def test_a_soft_cap_holds_nobody_up(crowds: Any) -> None:
    crowd = await crowds(Cap(usd="0.01", per="hour", soft=True, name="all"))
    assert [(await crowd.comes(f"w{number}")).admitted for number in range(3)] == [True] * 3


async def test_in_every_store_waiters_of_two_routers_share_one_pace_and_one_order_each(
    store: BudgetStore, clock: TestClock
) -> None:
    until = TaskClass("until", max_wait="window", when_expired="drop")
    caps, more = (cents(60, per="hour"),), {"classes": (until,), "default_class": "until"}
    url = "http://127.0.0.1:9"
    async with (
        bench(url, *caps, store=store, clock=clock, **more) as one,
        bench(url, *caps, store=store, clock=clock, **more) as other,
    ):
        crowds = Crowd(one), Crowd(other)
        first = await crowds[0].comes("first", 60, task_class="until")
        await first.leave(cents=60)
        for number in range(6):
            await crowds[number % 2].comes(str(number), 10, task_class="until")

        async def out(least: int) -> None:
            async def are_out() -> bool:
                return sum(len(crowd.order) for crowd in crowds) - 1 >= least

            await eventually(are_out)

        await clock.advance(3600)
        for turn in range(1, 7):
            await clock.advance(1)  # the jitter of the first, and the look of those that came second
            await clock.advance(1)
            await out(turn)
            for one_waiter in [w for crowd in crowds for w in crowd.all if w.admitted and not w.task.done()]:
                await one_waiter.leave(cents=10)
            assert sum(len(crowd.order) for crowd in crowds) - 1 == turn
            await clock.advance(600)
        assert crowds[0].order == ["first", "0", "2", "4"]
        assert crowds[1].order == ["1", "3", "5"]


async def test_a_wait_for_a_window_lasts_until_the_one_that_follows_is_over(crowds: Any, clock: TestClock) -> None:
    until = TaskClass("until", max_wait="window", when_expired="retry_later")
    high = TaskClass("high", priority=-1)
    crowd = await crowds(cents(10, per="hour"), classes=(until, high))
    first = await crowd.comes("first", task_class="until")
    await first.leave(cents=10)
    waits = await crowd.comes("waits", task_class="until")
    await clock.advance(3599.5)
    await clock.advance(0.5)
    await (await crowd.comes("above", task_class="high")).leave(cents=10)
    await clock.advance(3598)
    assert waits.decision is None
    await clock.advance(2)
    assert waits.decision is not None
    assert (waits.decision.reason, waits.decision.waited) == ("expired", 7200.0)


async def test_a_policy_that_changes_while_somebody_tries_holds_for_what_it_does_next(crowds: Any, clock: TestClock) -> None:
    class Slow(MemoryStore):
        gate: asyncio.Event | None = None

        async def reserve(self, *args: Any, **more: Any) -> Any:
            if self.gate is not None:
                await self.gate.wait()
            return await super().reserve(*args, **more)

    store = Slow(clock=clock)
    crowd = await crowds(cents(10), store=store)
    first = await crowd.comes("first")
    waits = await crowd.comes("waits")
    store.gate = asyncio.Event()
    await first.leave()  # now it tries
    crowd.bench.router.policy = policy_of(None, cents(9), **CLASSES)
    store.gate.set()
    await settle_down()
    assert waits.admitted  # what was on its way is admitted under the policy that it began with
    late = await crowd.comes("late")
    assert late.decision is not None
    assert late.decision.kind == "never"


async def test_processes_spread_their_first_try_after_a_window_has_turned(clock: TestClock) -> None:
    hour = cents(10, per="hour")
    (slot,) = slots_of([hour], {}, now=clock.wall, tree=None, admit_at=None)
    need = Need((slot.bucket.tree, "all", ()), slot, CENT)
    first_tries = []
    for jitter in (0.0, 0.25, 0.999):
        lines = Lines(jitter=partial(float, jitter))
        waiter = Waiter(TaskClass("until", max_wait="window", when_expired="drop"), (need,), since=0.0, deadline=None, size=1)
        lines.enter(waiter, {need.key: Balance(slot.bucket, 0, 10 * CENT)}, clock.wall, 0.0)
        assert slot.bucket.ends is not None
        for now in range(slot.bucket.ends - 2, slot.bucket.ends + 1100):
            lines.advance(now, (now - clock.wall) / 1000)
            if waiter.future.done():
                first_tries.append(now - slot.bucket.ends)
                break
    assert first_tries == [0, 250, 999]


# What an attack on the lines found.


async def test_two_full_caps_send_nobody_back_and_forth(crowds: Any, clock: TestClock) -> None:
    crowd = await crowds(cents(10), cents(10, scope="user", name="user"))
    first = await crowd.comes("first", labels={"user": "a"})
    waits = await crowd.comes("waits", labels={"user": "a"})
    await clock.advance(1)  # a look at both lines
    await clock.advance(1)
    await first.leave()
    assert waits.admitted


async def test_a_deadline_outlives_a_policy_that_changes(crowds: Any, clock: TestClock) -> None:
    crowd = await crowds(cents(10))
    await crowd.comes("first")
    waits = await crowd.comes("waits", deadline=20)
    crowd.bench.router.policy = policy_of(None, cents(10), cents(1000, name="other"), **CLASSES)
    await clock.advance(19)
    assert waits.decision is None
    await clock.advance(1)
    assert waits.decision is not None
    assert waits.decision.reason == "expired"


async def test_who_plans_anew_keeps_its_place_and_ends_when_the_router_closes(crowds: Any, clock: TestClock) -> None:
    gate = asyncio.Event()
    gate.set()

    async def rule(task: Task) -> Any:
        await gate.wait()
        return "strong"

    crowd = await crowds(cents(10), rule=rule)
    first = await crowd.comes("first")
    waits = await crowd.comes("waits")
    gate.clear()
    crowd.bench.router.policy = policy_of(None, cents(10), rule=rule, **CLASSES)
    await settle_down()
    closing = asyncio.create_task(crowd.bench.router.aclose())
    await settle_down()
    gate.set()
    await settle_down()
    assert waits.decision is not None
    assert waits.decision.reason == "closed"
    await first.leave()
    await closing


async def test_a_cap_of_the_same_name_with_another_window_strands_nobody(crowds: Any, clock: TestClock) -> None:
    crowd = await crowds(cents(10, per="day"))
    first = await crowd.comes("first")
    await first.leave(cents=10)
    waits = await crowd.comes("waits")
    crowd.bench.router.policy = policy_of(None, cents(10, per="minute"), **CLASSES)
    await settle_down()
    assert waits.admitted


async def test_who_comes_from_another_line_overtakes_nobody(crowds: Any) -> None:
    user = cents(20, scope="user", name="user", limits={"user:v": "1.00", "user:x": "1.00"})
    crowd = await crowds(user, cents(100, name="shared"))
    await crowd.comes("x", 40, labels={"user": "x"})
    w0 = await crowd.comes("w0", 20, labels={"user": "w"})
    older = await crowd.comes("older", 20, labels={"user": "w"})
    v = await crowd.comes("v", 70, labels={"user": "v"})
    younger = await crowd.comes("younger", 20, labels={"user": "w"})
    await w0.leave()
    assert older.admitted
    await older.leave()
    assert (v.decision, younger.decision) == (None, None)
    await crowd.all[0].leave()
    assert crowd.order == ["x", "w0", "older", "v", "younger"]


async def test_lines_that_are_left_keep_nothing(crowds: Any, clock: TestClock) -> None:
    crowd = await crowds(cents(10, per="month", scope="user"))
    for user in map(str, range(20)):
        first = await crowd.comes("first", labels={"user": user})
        waits = await crowd.comes("waits", labels={"user": user})
        waits.task.cancel()
        await first.leave(cents=10)
    crowd.all.clear()  # a task that was cancelled remembers where
    del first, waits
    gc.collect()
    assert [one for one in gc.get_objects() if isinstance(one, Waiter)] == []


async def test_the_bound_on_open_calls_holds_for_waiters_too(crowds: Any, clock: TestClock) -> None:
    crowd = await crowds(cents(100), max_open=3)
    first = await crowd.comes("first", 100)
    waiting = [await crowd.comes(f"w{number}") for number in range(10)]
    await first.leave()
    assert [one.admitted for one in waiting].count(True) == 3
    for one in waiting[:3]:
        await one.leave()
    await clock.advance(1)
    assert [one.admitted for one in waiting].count(True) == 6


async def test_whoever_stands_behind_one_whose_time_is_over_goes_at_once(crowds: Any, clock: TestClock) -> None:
    crowd = await crowds(cents(10))
    await crowd.comes("first", 5)
    await crowd.comes("large", 10, deadline=10)
    small = await crowd.comes("small", 5)
    await clock.advance(10)
    assert small.admitted


async def test_a_call_that_comes_after_its_deadline_is_given_back(crowds: Any, clock: TestClock) -> None:
    gate = asyncio.Event()
    gate.set()

    class Slow(MemoryStore):
        async def reserve(self, *args: Any, **more: Any) -> Any:
            await gate.wait()
            return await super().reserve(*args, **more)

    crowd = await crowds(cents(10), store=Slow(clock=clock))
    first = await crowd.comes("first")
    waits = await crowd.comes("waits", deadline=5)
    gate.clear()
    await first.leave()
    await clock.advance(6)
    gate.set()
    await settle_down()
    assert waits.decision is not None
    assert (waits.decision.served, waits.decision.reason) == (False, "expired")
    assert await crowd.bench.sums() == (0, 0)


async def test_a_store_that_fails_once_costs_nobody_the_place(crowds: Any, clock: TestClock) -> None:
    class Flaky(MemoryStore):
        fails = False

        async def reserve(self, *args: Any, **more: Any) -> Any:
            if self.fails:
                raise StoreUnavailable("test", "it is away")
            return await super().reserve(*args, **more)

    store = Flaky(clock=clock)
    crowd = await crowds(cents(10), store=store)
    first = await crowd.comes("first")
    waits = await crowd.comes("waits")
    store.fails = True
    await first.leave()
    assert waits.decision is None
    store.fails = False
    await clock.advance(1)
    assert waits.admitted


# Whatever happens.


ARRIVALS = st.tuples(
    st.just("comes"),
    st.sampled_from(["low", "high", "at once", "until", "aging"]),
    st.sampled_from([10, 10, 10, 25, 40, 120]),
    st.sampled_from(["alice", "bob"]),
)
EVENTS = st.one_of(
    ARRIVALS,
    ARRIVALS,
    st.tuples(st.just("leaves"), st.integers(0, 9), st.sampled_from([0, 3, 10])),
    st.tuples(st.just("cancelled"), st.integers(0, 9)),
    st.tuples(st.just("advance"), st.sampled_from([1, 30, 61, 600, 3600])),
)
CROWD = (
    LOW,
    HIGH,
    AT_ONCE,
    TaskClass("until", priority=5, max_wait="window", when_expired="downgrade"),
    TaskClass("aging", priority=7, max_wait=900, ages_after=60, admit_at=0.6, when_expired="drop"),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(EVENTS, min_size=5, max_size=40))
def test_whatever_happens_every_task_has_one_end_and_no_cap_is_passed(events: list[tuple[Any, ...]]) -> None:
    asyncio.run(_live(events))


async def _live(events: list[tuple[Any, ...]]) -> None:
    clock, heard = TestClock(), list[WaitEvent]()
    store = MemoryStore(clock=clock)
    caps = cents(100, per="hour"), Cap(usd="0.60", per="day", scope="user", name="user", admit_at=1)
    async with bench(
        "http://127.0.0.1:9", *caps, store=store, clock=clock, classes=CROWD, default_class="low", hooks=[heard.append]
    ) as opened:
        crowd = Crowd(opened)

        async def check() -> None:
            for bucket in (await opened.router.status()).buckets:
                assert bucket.held + bucket.spent <= bucket.limit

        for number, event in enumerate(events):
            admitted = [one for one in crowd.all if one.admitted and not one.task.done()]
            waiting = [one for one in crowd.all if one.decision is None and not one.task.done()]
            match event:
                case "comes", task_class, amount, user:
                    await crowd.comes(str(number), amount, task_class=task_class, labels={"user": user}, id=str(number))
                case "leaves", at, spent if admitted:
                    await admitted[at % len(admitted)].leave(cents=spent)
                case "cancelled", at if waiting:
                    waiting[at % len(waiting)].task.cancel()
                    await settle_down()
                case "advance", seconds:
                    await clock.advance(seconds)
            await check()
        waiting = [one for one in crowd.all if one.decision is None and not one.task.done()]
        assert {one.name for one in waiting} == _waits(heard) - {one.name for one in crowd.all if one.task.cancelled()}
        closing = asyncio.create_task(opened.router.aclose())
        await settle_down()
        assert [one.name for one in crowd.all if one.decision is None and not one.task.cancelled()] == []
        await crowd.end()
        await closing
        assert len(crowd.order) == len(set(crowd.order))
        assert [(b.held, b.cap) for b in (await opened.router.status()).buckets if b.held] == []


def _waits(heard: list[WaitEvent]) -> set[str]:
    """Return who was told to have begun to wait and not to have ended; each begins once and ends once."""
    found: set[str] = set()
    for event in heard:
        if event.what == "enqueue":
            assert event.task_id not in found
            found.add(event.task_id)
        else:
            found.remove(event.task_id)
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(["low", "high"]), st.booleans()), min_size=3, max_size=25))
def test_in_one_line_the_order_is_priority_then_age(comings: list[tuple[str, bool]]) -> None:
    async def live() -> None:
        clock = TestClock()
        async with bench("http://127.0.0.1:9", cents(10), store=MemoryStore(clock=clock), clock=clock, **CLASSES) as opened:
            crowd = Crowd(opened)
            line: list[tuple[int, int]] = []
            expected = []
            now: Waits | None = None
            for number, (task_class, leaves) in enumerate(comings):
                one = await crowd.comes(str(number), task_class=task_class)
                if now is None:
                    now = one
                    expected.append(number)
                else:
                    line.append((0 if task_class == "high" else 9, number))
                if leaves:
                    await now.leave()
                    first = min(line, default=None)
                    now = None
                    if first is not None:
                        line.remove(first)
                        expected.append(first[1])
                        now = crowd.all[first[1]]
                assert crowd.order == [str(number) for number in expected]
            await crowd.end()

    asyncio.run(live())
