"""Between a task and its reservation: what is in the way then, what is given back, and what a process counts by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from router import Cap, Decision, MissingLabel, Router, TaskClass, Usage
from router.estimate import Estimator
from stores import MemoryStore, StoreUnavailable
from tests.support import STRONG, TestClock, Wire, chat, loses_the_first, policy_of, settle_down

pytestmark = pytest.mark.anyio

ESTIMATE = STRONG.bound(input_tokens=9, output_tokens=100)  # of chat() on the strong model
USAGE = Usage(input_tokens=8, output_tokens=16)
SPENT = 8 * 2000 + 16 * 10_000
ALL = Cap(usd=1, per="day", admit_at=1, name="all")


@pytest.fixture
def wire(clock: TestClock) -> Wire:
    return Wire(MemoryStore(clock=clock))


@asynccontextmanager
async def router_over(wire: Wire, clock: TestClock, *caps: Cap, **more: Any) -> AsyncIterator[Router]:
    """Open a router that calls no model itself; afterwards nothing is held."""
    store: Any = wire
    estimator = more.pop("estimator", None)
    async with Router(policy_of(None, *(caps or (ALL,)), **more), store, clock=clock, estimator=estimator) as router:
        yield router
    assert [hold for hold in await wire.inner.holds() if hold.state == "held"] == []


async def admit(router: Router, **more: Any) -> Decision:
    """Admit a task, settle it where it was served, and return the decision."""
    async with router.admit(chat(**more)) as admission:
        if admission.served:
            admission.settle(USAGE)
    return admission.decision


def down(wire: Wire) -> None:
    """Let the store be away."""

    async def way(_: str) -> None:
        raise StoreUnavailable("test", "it is down")

    wire.there = way


def up(wire: Wire) -> None:
    """Let the store be back."""

    async def way(_: str) -> None:
        pass

    wire.there = way


def outage(estimates: int) -> TaskClass:
    """Make a class that serves without the store, up to so many estimates."""
    return TaskClass("chat", when_store_down="open", allowance_usd=f"{estimates * ESTIMATE / 10**9:.9f}")


async def test_a_task_that_could_not_be_reserved_for_gives_its_place_back(wire: Wire, clock: TestClock) -> None:
    by_user = Cap(usd=1, per="day", scope="user", admit_at=1, name="all")
    async with router_over(wire, clock, by_user, max_open=2) as router:
        for _ in range(3):
            with pytest.raises(MissingLabel):
                await admit(router)
        assert (await admit(router, labels={"user": "alice"})).served


async def test_those_that_reserve_now_take_places(wire: Wire, clock: TestClock) -> None:
    goes_on = asyncio.Event()

    async def way(name: str) -> None:
        if name == "reserve":
            await goes_on.wait()

    async with router_over(wire, clock, max_open=2) as router:
        for _ in range(3):
            assert (await admit(router)).served
        wire.there = way
        waiting = [asyncio.ensure_future(admit(router)) for _ in range(2)]
        await settle_down()
        third = asyncio.ensure_future(admit(router))
        await settle_down()
        goes_on.set()
        assert (await third).reason == "full"
        assert [decision.served for decision in await asyncio.gather(*waiting)] == [True, True]


async def test_a_router_that_is_closed_asks_its_store_for_nothing(wire: Wire, clock: TestClock) -> None:
    async with router_over(wire, clock) as router:
        await router.aclose()
        assert (await admit(router)).reason == "closed"
        assert wire.ids("reserve") == []


async def test_a_reserve_that_is_answered_after_the_router_closed_is_given_back(wire: Wire, clock: TestClock) -> None:
    goes_on = asyncio.Event()

    async def way(name: str) -> None:
        if name == "reserve":
            await goes_on.wait()

    wire.back = way
    async with router_over(wire, clock) as router:
        reserving = asyncio.ensure_future(admit(router))
        await settle_down()
        assert len(await wire.inner.holds()) == 1
        await router.aclose()
        goes_on.set()
        assert (await reserving).reason == "closed"
        await settle_down()
        assert wire.ids("settle") == wire.ids("reserve")
        assert await wire.inner.holds() == ()


@pytest.mark.parametrize("when_expired", ["downgrade", "retry_later", "drop"])
async def test_only_a_task_that_is_dropped_gets_no_time_for_another_try(
    wire: Wire, clock: TestClock, when_expired: Literal["downgrade", "retry_later", "drop"]
) -> None:
    spent = Cap(usd=f"{(ESTIMATE + 1) / 10**9:.9f}", per="day", admit_at=1, name="all")
    async with router_over(wire, clock, spent, classes=[TaskClass("chat", when_expired=when_expired)]) as router:
        async with router.admit(chat()) as admission:
            admission.settle_usd(f"{ESTIMATE / 10**9:.9f}")
        refused = await admit(router)
        assert (refused.served, refused.kind) == (False, "spent")
        assert refused.retry_after == (None if when_expired == "drop" else 24 * 3600)


async def test_a_call_in_an_outage_counts_although_the_reserve_that_was_lost_is_closed(wire: Wire, clock: TestClock) -> None:
    wire.back = loses_the_first("reserve")
    async with router_over(wire, clock, classes=[outage(1)]) as router:
        decision = await admit(router)
        assert (decision.served, decision.reason) == (True, "store_open")
        await clock.advance(5)
        (bucket,) = (await router.status()).buckets
        assert (bucket.held, bucket.spent) == (0, SPENT)


async def test_what_a_call_in_an_outage_did_not_spend_is_left_for_the_next(wire: Wire, clock: TestClock) -> None:
    down(wire)
    async with router_over(wire, clock, classes=[outage(2)]) as router:
        # Each is admitted by its estimate, and counts what it spent: so many that the rest is less than an estimate.
        decisions = [await admit(router) for _ in range(20)]
        assert [decision.served for decision in decisions].count(True) == (2 * ESTIMATE - ESTIMATE) // SPENT + 1
        assert decisions[-1].reason == "store_unavailable"
        up(wire)
        await clock.advance(5)


async def test_the_allowance_is_whole_again_when_all_is_written(wire: Wire, clock: TestClock) -> None:
    async with router_over(wire, clock, classes=[outage(1)]) as router:
        for _ in range(3):
            down(wire)
            assert [(await admit(router)).served for _ in range(2)] == [True, False]
            up(wire)
            await clock.advance(5)
            assert (await router.status()).backlog == 0


async def test_a_vocabulary_that_is_still_fetched_when_the_router_closes_leaves_no_task(wire: Wire, clock: TestClock) -> None:
    class Fetches(Estimator):
        async def prepare(self, *_: Any, **__: Any) -> None:
            await asyncio.Event().wait()

    async with router_over(wire, clock, estimator=Fetches()):
        await settle_down()
    await settle_down()
    assert [task.get_name() for task in asyncio.all_tasks() if "budget-router" in task.get_name()] == []
