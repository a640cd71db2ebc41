"""Admissions whose caller calls the model: what is said of them first stands, and the end of the block waits for the settle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any

import pytest

from router import Admission, Cap, Refused, Router, Usage
from stores import MemoryStore
from tests.support import STRONG, TestClock, Wire, chat, policy_of, settle_down

pytestmark = pytest.mark.anyio

ESTIMATE = STRONG.bound(input_tokens=9, output_tokens=100)  # of chat() on the strong model
USAGE = Usage(input_tokens=8, output_tokens=16)
SPENT = 8 * 2000 + 16 * 10_000

Way = Callable[[Admission], object]


@asynccontextmanager
async def router_over(store: Wire, clock: TestClock, usd: str = "1") -> AsyncIterator[Router]:
    """Open a router that calls no model itself."""
    wire: Any = store
    async with Router(policy_of(None, Cap(usd=usd, per="day", admit_at=1, name="all")), wire, clock=clock) as router:
        yield router
    assert [hold for hold in await store.inner.holds() if hold.state == "held"] == []


@pytest.fixture
def wire(clock: TestClock) -> Wire:
    return Wire(MemoryStore(clock=clock))


async def spent(router: Router) -> int:
    (bucket,) = (await router.status()).buckets
    return bucket.spent


def settle(admission: Admission) -> None:
    admission.settle(USAGE)


def settle_usd(admission: Admission) -> None:
    admission.settle_usd("0.001")


def release(admission: Admission) -> None:
    admission.release()


WAYS: dict[Way, tuple[str, int, str]] = {
    settle: ("served", SPENT, "reported"),
    settle_usd: ("served", 1_000_000, "reported"),
    release: ("released", 0, "none"),
}


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("then", WAYS)
async def test_what_is_said_first_stands(wire: Wire, clock: TestClock, first: Way, then: Way) -> None:
    async with router_over(wire, clock) as router:
        async with router.admit(chat()) as admission:
            first(admission)
            then(admission)
            decision = admission.decision
            # At once, before anything is awaited.
            assert (decision.outcome, decision.actual, decision.usage_source) == WAYS[first]
            await settle_down()
            then(admission)
        then(admission)
        await settle_down()
        decision = admission.decision
        assert (decision.outcome, decision.actual, decision.usage_source) == WAYS[first]
        assert await spent(router) == WAYS[first][1]
        assert len(wire.ids("settle")) == 1


@pytest.mark.parametrize("first", WAYS)
async def test_what_was_said_before_an_exception_stands(wire: Wire, clock: TestClock, first: Way) -> None:
    async with router_over(wire, clock) as router:
        with pytest.raises(LookupError):  # noqa: PT012
            async with router.admit(chat()) as admission:
                first(admission)
                raise LookupError
        decision = admission.decision
        assert (decision.outcome, decision.actual, decision.notes) == (*WAYS[first][:2], ())


async def test_left_by_an_exception_its_class_is_noted(wire: Wire, clock: TestClock) -> None:
    async with router_over(wire, clock) as router:
        with pytest.raises(LookupError):
            async with router.admit(chat()) as admission:
                raise LookupError("the secret prompt")
        assert admission.decision.notes == ("ended by LookupError",)


@pytest.mark.parametrize("way", [*WAYS, None])
async def test_the_end_of_the_block_waits_for_the_settle(wire: Wire, clock: TestClock, way: Way | None) -> None:
    goes_on = asyncio.Event()

    async def there(name: str) -> None:
        if name == "settle":
            await goes_on.wait()

    wire.there = there
    async with router_over(wire, clock) as router:

        async def work() -> None:
            async with router.admit(chat()) as admission:
                if way is not None:
                    way(admission)

        working = asyncio.ensure_future(work())
        await settle_down()
        assert (working.done(), len(wire.ids("settle"))) == (False, 1)
        goes_on.set()
        await working
        assert await wire.inner.holds() == ()


async def test_a_settle_in_another_loop_is_carried_by_the_loop_that_entered(wire: Wire, clock: TestClock) -> None:
    async def elsewhere(admission: Admission) -> None:
        admission.settle(USAGE)

    async with router_over(wire, clock) as router:
        async with router.admit(chat()) as admission:
            await asyncio.to_thread(asyncio.run, elsewhere(admission))
        assert admission.decision.outcome == "served"
        assert await spent(router) == SPENT


async def test_two_threads_that_settle_count_once(wire: Wire, clock: TestClock) -> None:
    async with router_over(wire, clock) as router:
        async with router.admit(chat()) as admission:
            await asyncio.gather(*(asyncio.to_thread(settle, admission) for _ in range(8)))
            await settle_down()
        assert (admission.decision.actual, await spent(router)) == (SPENT, SPENT)


async def test_an_admission_that_was_refused_raises_that_refusal_and_leaves_its_block_quietly(
    wire: Wire, clock: TestClock
) -> None:
    async with router_over(wire, clock, usd="0") as router:
        async with router.admit(chat()) as admission:
            assert admission.served is False
            assert admission.decision.reason == "cap"
            touches: list[Way] = [*WAYS, attrgetter("model"), attrgetter("request")]
            for touch in touches:
                with pytest.raises(Refused) as refused:
                    touch(admission)
                assert refused.value.decision is admission.decision
        assert wire.ids("settle") == []


async def test_an_admission_that_was_not_entered_says_so(wire: Wire, clock: TestClock) -> None:
    async with router_over(wire, clock) as router:
        admission = router.admit(chat())
        assert (admission.served, repr(admission)) == (False, "<Admission, not entered>")
        touches: list[Way] = [*WAYS, attrgetter("decision")]
        for touch in touches:
            with pytest.raises(RuntimeError, match=r"write 'async with router\.admit"):
                touch(admission)
        async with admission:
            assert repr(admission) == f"<Admission {admission.decision}>"
            assert admission.served
            admission.release()


async def test_a_second_entry_reserves_nothing(wire: Wire, clock: TestClock) -> None:
    async with router_over(wire, clock) as router:
        async with router.admit(chat()) as admission:
            with pytest.raises(RuntimeError, match="entered once"):
                await admission.__aenter__()
            admission.release()
        with pytest.raises(RuntimeError, match="entered once"):
            await admission.__aenter__()
        assert len(wire.ids("reserve")) == 1


async def test_a_second_entry_while_the_first_one_reserves_reserves_nothing(wire: Wire, clock: TestClock) -> None:
    goes_on = asyncio.Event()

    async def there(name: str) -> None:
        if name == "reserve":
            await goes_on.wait()

    wire.there = there
    async with router_over(wire, clock) as router:
        admission = router.admit(chat())
        entering = [asyncio.ensure_future(admission.__aenter__()) for _ in range(2)]
        await settle_down()
        goes_on.set()
        first, second = await asyncio.gather(*entering, return_exceptions=True)
        assert first is admission
        assert isinstance(second, RuntimeError)
        assert len(wire.ids("reserve")) == 1
        admission.release()
        await settle_down()


@pytest.mark.parametrize("reply", [None, 5, "text", {"usage": None}, {}])
async def test_what_has_no_usage_is_refused_and_the_admission_stays_open(wire: Wire, clock: TestClock, reply: Any) -> None:
    async with router_over(wire, clock) as router:
        async with router.admit(chat()) as admission:
            with pytest.raises(ValueError, match=f"not a {type(reply).__name__} without usage"):
                admission.settle(reply)
            assert admission.decision.outcome == "open"
            admission.settle({"prompt_tokens": 8, "completion_tokens": 16, "total_tokens": 24})
        assert await spent(router) == SPENT
