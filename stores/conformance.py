"""What any store must pass. For a store of your own, with pytest, anyio and hypothesis installed, write `test_my_store.py`:

    import itertools
    import pytest
    pytest.register_assert_rewrite("stores.conformance")  # so that a failure shows the values; in conftest.py it serves all
    from stores.conformance import StoreConformance

    class TestMyStore(StoreConformance):
        places = itertools.count()

        async def open(self, clock):  # an empty store for each test
            self.place = f"test{next(self.places)}"
            return await self.again(None, clock)

        async def again(self, store, clock):  # another client of the same data; leave it out where there can be none
            return MyStore("…address…", schema=self.place, clock=clock)

and run `pytest test_my_store.py`; `tests/test_postgres_store.py` does so for the PostgreSQL store in `examples/`.

`clock` is called without arguments and returns milliseconds since the epoch; the store under test takes it for its own time,
since the tests move it by days. `aclose` is called for you. Each test is one sentence of `BudgetStore`. Where one expects
`InvalidCharge`, the message has these words, so that its reader knows what to change: new_id, lease, step, no bucket, has
spent, is a reservation. `test_random_calls_equal_the_model` holds the store against `Model`, which keeps no sums at all but
works every balance out from the ids; raise `calls` for a longer run.

Passing is not yet enough for a store that is reached over a wire: that a lost reply, a dead or hanging server, a roll-back, a
killed process, a fork and a second event loop do what `BudgetStore` says must be tested with its own server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stores.base import (
    AHEAD,
    MAX_AMOUNT,
    RETENTION,
    Balance,
    Bucket,
    BudgetStore,
    Charge,
    Hold,
    LeaseEnd,
    Verdict,
    new_id,
)
from stores.errors import InvalidCharge, TooLate

__all__ = ["ManualClock", "Model", "StoreConformance"]

HOUR = 3_600_000
START = 1_785_542_400_000  # 2026-08-01T00:00Z


@dataclass
class ManualClock:
    """A clock that moves when told, in milliseconds since the epoch."""

    now: int = START

    def __call__(self) -> int:
        return self.now

    def advance(self, ms: int) -> None:
        """Move `ms` milliseconds on (or back, below 0)."""
        self.now += ms


def hour(name: str = "hour", *, at: int = START, tree: str = "") -> Bucket:
    """Make a bucket whose window is the hour that begins at `at`."""
    return Bucket(f"{name}@{at}", tree=tree, starts=at, ends=at + HOUR)


def charge(bucket: Bucket, amount: int, line: int | None = 100, limit: int | None = None) -> Charge:
    """Make a charge whose limit is its line unless said."""
    return Charge(bucket, amount, line, line if limit is None else limit)


def sums(balance: Balance) -> tuple[int, int]:
    """Return what is held and what is spent."""
    return balance.held, balance.spent


class StoreConformance:
    """Subclass it, override `open`, and let pytest collect the subclass."""

    pytestmark: ClassVar[Any] = pytest.mark.anyio
    lease: ClassVar[int] = 60_000

    @pytest.fixture
    def anyio_backend(self) -> str:
        """Run each test once, on asyncio, though trio may be installed too."""
        return "asyncio"

    async def open(self, clock: ManualClock) -> BudgetStore:
        """Return an empty store, in a place of its own, whose time is `clock`."""
        raise NotImplementedError

    async def again(self, store: BudgetStore, clock: ManualClock) -> BudgetStore | None:
        """Return a second client of the same data, or None where there can be none."""
        return None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[BudgetStore, ManualClock]]:
        """Open a store, and close it whatever happens."""
        clock = ManualClock()
        store = await self.open(clock)
        try:
            yield store, clock
        finally:
            await store.aclose()

    async def hold(self, store: BudgetStore, *charges: Charge, on_lease_end: LeaseEnd = "release") -> str:
        """Reserve `charges` under a new id and return it."""
        id = new_id(charges[0].bucket.tree if charges else "", now=START)
        verdict = await store.reserve(id, [charges], lease=self.lease, on_lease_end=on_lease_end)
        assert verdict.state == "held"
        return id

    async def balance(self, store: BudgetStore, bucket: Bucket) -> Balance:
        """Return the balance of one bucket."""
        (found,) = await store.balances([bucket])
        return found

    # 1. Never over.

    async def test_of_many_at_once_exactly_as_many_are_held_as_fit(self) -> None:
        async with self.opened() as (store, _):
            asked = [[[charge(hour(), 20)]]] * 20
            verdicts = await asyncio.gather(*(store.reserve(new_id(now=START), o, lease=self.lease) for o in asked))
            assert [v.state for v in verdicts].count("held") == 5
            assert [v.state for v in verdicts].count("refused") == 15
            assert sums(await self.balance(store, hour())) == (100, 0)

    async def test_two_clients_share_one_line(self) -> None:
        async with self.opened() as (store, clock):
            other = await self.again(store, clock)
            if other is None:
                return
            try:
                stores = [store, other] * 10
                verdicts = await asyncio.gather(
                    *(s.reserve(new_id(now=START), [[charge(hour(), 30)]], lease=self.lease) for s in stores)
                )
                assert [v.state for v in verdicts].count("held") == 3
                for s in (store, other):
                    assert sums(await self.balance(s, hour())) == (90, 0)
            finally:
                await other.aclose()

    async def test_held_and_spent_count_together_up_to_the_line_and_not_past_it(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 60))
            await store.settle(id, [charge(hour(), 50)])
            await self.hold(store, charge(hour(), 30))
            over = await store.reserve(new_id(now=START), [[charge(hour(), 21)]], lease=self.lease)
            fits = await store.reserve(new_id(now=START), [[charge(hour(), 20)]], lease=self.lease)
            assert (over.state, fits.state) == ("refused", "held")

    async def test_growth_is_checked_against_the_limit_and_not_the_line(self) -> None:
        async with self.opened() as (store, _):
            bucket = hour()
            id = await self.hold(store, charge(bucket, 80, line=85, limit=100))
            grown = await store.extend(id, 1, [charge(bucket, 100, line=85, limit=100)])
            over = await store.extend(id, 2, [charge(bucket, 101, line=85, limit=100)])
            assert (grown.state, over.state) == ("held", "refused")
            assert sums(await self.balance(store, bucket)) == (100, 0)

    # 2. All or nothing; alternatives.

    async def test_a_reservation_over_several_buckets_holds_in_all_or_in_none(self) -> None:
        async with self.opened() as (store, _):
            wide, narrow = hour("wide"), Bucket("narrow")
            refused = await store.reserve(
                new_id(now=START), [[charge(wide, 10, 1000), charge(narrow, 10, 9)]], lease=self.lease
            )
            assert refused.state == "refused"
            assert [[m.charge.bucket.name for m in option] for option in refused.misfits] == [["narrow"]]
            assert await store.balances([wide, narrow]) == (Balance(wide), Balance(narrow))

    async def test_a_refusal_lists_every_bucket_that_does_not_fit_per_option(self) -> None:
        async with self.opened() as (store, _):
            a, b, c = hour("a"), hour("b"), hour("c")
            await self.hold(store, charge(a, 95), charge(b, 95))
            options = [[charge(a, 10), charge(b, 10), charge(c, 10)], [charge(b, 6), charge(c, 101)]]
            refused = await store.reserve(new_id(now=START), options, lease=self.lease)
            assert refused.state == "refused"
            assert refused.option is None
            assert [[m.charge.bucket for m in option] for option in refused.misfits] == [[a, b], [b, c]]
            assert [[m.kind for m in option] for option in refused.misfits] == [["busy", "busy"], ["busy", "never"]]
            first = refused.misfits[0][0].balance
            assert (first.held, first.spent) == (95, 0)
            assert first.lease_ends is not None
            assert START < first.lease_ends <= START + self.lease

    async def test_the_first_option_that_fits_is_held(self) -> None:
        async with self.opened() as (store, _):
            strong, both = hour("strong"), hour("both")
            options = [[charge(strong, 60), charge(both, 60, 1000)], [charge(both, 6, 1000)]]
            first = await store.reserve(new_id(now=START), options, lease=self.lease)
            second = await store.reserve(new_id(now=START), options, lease=self.lease)
            assert (first.state, first.option) == ("held", 0)
            assert (second.state, second.option) == ("held", 1)
            assert [sums(b) for b in first.balances] == [(60, 0), (60, 0)]
            assert [sums(b) for b in second.balances] == [(66, 0)]
            assert [b.bucket for b in first.balances] == [strong, both]

    async def test_kinds_tell_busy_from_spent_from_never(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 95))
            ask = [[charge(hour(), 10)]]
            busy = await store.reserve(new_id(now=START), ask, lease=self.lease)
            await store.settle(id, [charge(hour(), 95)])
            spent = await store.reserve(new_id(now=START), ask, lease=self.lease)
            never = await store.reserve(new_id(now=START), [[charge(hour(), 101)]], lease=self.lease)
            assert [v.misfits[0][0].kind for v in (busy, spent, never)] == ["busy", "spent", "never"]

    async def test_an_option_without_charges_is_held(self) -> None:
        async with self.opened() as (store, _):
            id = new_id(now=START)
            verdict = await store.reserve(id, [[]], lease=self.lease)
            assert (verdict.state, verdict.option, verdict.balances) == ("held", 0, ())
            assert (await store.settle(id, [])).counted

    # 3. Once; the states of an id.

    async def test_reserving_again_gives_the_same_answer_and_holds_once(self) -> None:
        async with self.opened() as (store, _):
            id, options = new_id(now=START), [[charge(hour(), 101)], [charge(hour(), 60)]]
            first = await store.reserve(id, options, lease=self.lease)
            second = await store.reserve(id, options, lease=self.lease)
            assert (first.state, first.option) == (second.state, second.option) == ("held", 1)
            assert [sums(b) for b in second.balances] == [(60, 0)]

    async def test_a_refusal_leaves_no_record(self) -> None:
        async with self.opened() as (store, _):
            id = new_id(now=START)
            other = await self.hold(store, charge(hour(), 100))
            assert (await store.reserve(id, [[charge(hour(), 1)]], lease=self.lease)).state == "refused"
            await store.release(other)
            assert (await store.reserve(id, [[charge(hour(), 1)]], lease=self.lease)).state == "held"

    async def test_settling_twice_counts_once(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 50))
            first = await store.settle(id, [charge(hour(), 30)])
            second = await store.settle(id, [charge(hour(), 99)])
            assert (first.counted, first.late) == (True, False)
            assert second.counted is False
            assert [sums(b) for b in first.balances] == [sums(b) for b in second.balances] == [(0, 30)]

    async def test_releasing_twice_or_after_a_settle_changes_nothing(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 50))
            await store.settle(id, [charge(hour(), 30)])
            assert (await store.release(id)).counted is False
            assert sums(await self.balance(store, hour())) == (0, 30)

    async def test_a_reserve_that_arrives_after_its_release_takes_nothing(self) -> None:
        async with self.opened() as (store, _):
            id = new_id(now=START)
            assert (await store.release(id)).counted
            assert (await store.reserve(id, [[charge(hour(), 50)]], lease=self.lease)).state == "gone"
            assert sums(await self.balance(store, hour())) == (0, 0)

    async def test_a_settle_of_an_absent_id_counts_and_closes_it(self) -> None:
        async with self.opened() as (store, _):
            id = new_id(now=START)
            settled = await store.settle(id, [charge(hour(), 30)])
            assert (settled.counted, settled.late) == (True, True)
            assert (await store.reserve(id, [[charge(hour(), 50)]], lease=self.lease)).state == "gone"
            assert (await store.settle(id, [charge(hour(), 30)])).counted is False
            assert sums(await self.balance(store, hour())) == (0, 30)

    async def test_a_closed_id_is_gone_for_reserve_and_extend_and_renew(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 50))
            await store.release(id)
            assert (await store.reserve(id, [[charge(hour(), 50)]], lease=self.lease)).state == "gone"
            assert (await store.extend(id, 1, [charge(hour(), 60)])).state == "gone"
            assert await store.renew([id], lease=self.lease) == frozenset()
            assert sums(await self.balance(store, hour())) == (0, 0)

    async def test_an_extend_of_an_absent_id_is_gone(self) -> None:
        async with self.opened() as (store, _):
            assert (await store.extend(new_id(now=START), 1, [charge(hour(), 60)])).state == "gone"
            assert sums(await self.balance(store, hour())) == (0, 0)

    async def test_an_extend_whose_step_is_not_above_the_last_changes_nothing(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 5))
            await store.extend(id, 2, [charge(hour(), 20)])
            late = await store.extend(id, 1, [charge(hour(), 10)])
            same = await store.extend(id, 2, [charge(hour(), 30)])
            assert (late.state, same.state) == ("held", "held")
            assert [sums(b) for b in late.balances] == [(20, 0)]
            assert sums(await self.balance(store, hour())) == (20, 0)

    async def test_extend_adds_grows_shrinks_and_drops_buckets(self) -> None:
        async with self.opened() as (store, _):
            a, b, c = hour("a"), hour("b"), hour("c")
            id = await self.hold(store, charge(a, 10), charge(b, 10))
            verdict = await store.extend(id, 1, [charge(b, 4), charge(c, 7)])
            assert [sums(x) for x in verdict.balances] == [(4, 0), (7, 0)]
            assert [sums(x) for x in await store.balances([a, b, c])] == [(0, 0), (4, 0), (7, 0)]
            with pytest.raises(InvalidCharge):
                await store.settle(id, [charge(a, 1)])
            await store.settle(id, [charge(b, 1), charge(c, 2)])
            assert [sums(x) for x in await store.balances([a, b, c])] == [(0, 0), (0, 1), (0, 2)]

    async def test_a_refused_extend_changes_nothing_and_its_step_may_be_used_again(self) -> None:
        async with self.opened() as (store, _):
            a, b = hour("a"), hour("b")
            id = await self.hold(store, charge(a, 10))
            refused = await store.extend(id, 1, [charge(a, 20), charge(b, 101)])
            assert refused.state == "refused"
            assert [[m.charge.bucket for m in option] for option in refused.misfits] == [[b]]
            assert [sums(x) for x in await store.balances([a, b])] == [(10, 0), (0, 0)]
            assert (await store.extend(id, 1, [charge(a, 20)])).state == "held"
            assert sums(await self.balance(store, a)) == (20, 0)

    async def test_shrinking_is_allowed_in_a_bucket_that_is_over_its_limit(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 50))
            await store.settle(new_id(now=START), [charge(hour(), 500)])
            assert (await store.extend(id, 1, [charge(hour(), 20)])).state == "held"
            assert sums(await self.balance(store, hour())) == (20, 500)

    # 4. Exact.

    async def test_large_amounts_are_exact_to_the_unit(self) -> None:
        async with self.opened() as (store, _):
            bucket = hour()
            odd = 2**51 - 1
            first = await self.hold(store, charge(bucket, odd, MAX_AMOUNT))
            second = await self.hold(store, charge(bucket, odd + 2, MAX_AMOUNT))
            refused = await store.reserve(new_id(now=START), [[charge(bucket, 1, MAX_AMOUNT)]], lease=self.lease)
            assert refused.state == "refused"
            assert refused.misfits[0][0].balance.held == MAX_AMOUNT
            await store.settle(first, [charge(bucket, odd - 2, MAX_AMOUNT)])
            await store.settle(second, [charge(bucket, odd, MAX_AMOUNT)])
            assert sums(await self.balance(store, bucket)) == (0, 2 * odd - 2)

    async def test_a_debt_past_two_to_the_53_still_refuses_and_is_still_exact(self) -> None:
        async with self.opened() as (store, _):
            for amount in (MAX_AMOUNT, MAX_AMOUNT, 1, MAX_AMOUNT - 1):
                await store.settle(new_id(now=START), [charge(hour(), amount, MAX_AMOUNT)])
            assert sums(await self.balance(store, hour())) == (0, 3 * MAX_AMOUNT)
            asked = [[charge(hour(), 1, MAX_AMOUNT)]]
            assert (await store.reserve(new_id(now=START), asked, lease=self.lease)).state == "refused"

    async def test_after_everything_is_settled_nothing_is_held(self) -> None:
        async with self.opened() as (store, _):
            draw = random.Random(1)  # noqa: S311
            buckets = [hour("a"), hour("b"), Bucket("run")]
            total = [0, 0, 0]

            async def one() -> None:
                held, actual = draw.randrange(1, 100), draw.randrange(0, 150)
                id = await self.hold(store, *(charge(b, held, MAX_AMOUNT) for b in buckets))
                await store.settle(id, [charge(b, actual + i, MAX_AMOUNT) for i, b in enumerate(buckets)])
                for i in range(3):
                    total[i] += actual + i

            await asyncio.gather(*(one() for _ in range(200)))
            assert [sums(b) for b in await store.balances(buckets)] == [(0, t) for t in total]
            assert await store.holds() == ()

    # 5. No leak.

    async def test_a_cancelled_reserve_leaves_no_hold(self) -> None:
        async with self.opened() as (store, _):
            for turns in range(12):
                task = asyncio.ensure_future(store.reserve(new_id(now=START), [[charge(hour(), 60)]], lease=self.lease))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled():
                    await store.release((await store.holds())[0].id)
                await store.check()  # what was sent before is carried out before
                assert sums(await self.balance(store, hour())) == (0, 0)

    async def test_the_end_of_a_lease_gives_back_and_counts_as_lost(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            id = await self.hold(store, charge(bucket, 60))
            clock.advance(self.lease - 1)
            assert (await self.balance(store, bucket)).held == 60
            clock.advance(1)
            balance = await self.balance(store, bucket)
            assert (balance.held, balance.spent, balance.lost) == (0, 0, 60)
            assert (await store.reserve(id, [[charge(bucket, 60)]], lease=self.lease)).state == "gone"
            assert (await store.extend(id, 1, [charge(bucket, 60)])).state == "gone"
            (hold,) = await store.holds()
            assert (hold.id, hold.state, hold.charges) == (id, "expired", (charge(bucket, 60),))

    async def test_a_lease_that_ended_makes_room_in_the_same_call(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            await self.hold(store, charge(bucket, 60))
            clock.advance(self.lease)
            await self.hold(store, charge(bucket, 60))

    async def test_the_end_of_a_lease_may_count_as_spent(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            await self.hold(store, charge(bucket, 60), on_lease_end="charge")
            clock.advance(self.lease)
            balance = await self.balance(store, bucket)
            assert (balance.held, balance.spent, balance.lost) == (0, 60, 60)

    async def test_every_answer_but_a_grant_says_by_when_the_first_lease_ends(self) -> None:
        async with self.opened() as (store, clock):
            first, second = [await self.hold(store, charge(hour(), 40)) for _ in range(2)]
            clock.advance(10)
            last = await self.hold(store, charge(hour(), 20))
            refused = await store.reserve(new_id(now=START), [[charge(hour(), 1)]], lease=self.lease)
            settled = await store.settle(first, [charge(hour(), 30)])
            credited = await store.credit(new_id(now=START), [charge(hour(), 10)])
            answers = [refused.misfits[0][0].balance, settled.balances[0], credited.balances[0]]
            for balance in (*answers, await self.balance(store, hour())):
                assert balance.lease_ends is not None
                assert clock.now < balance.lease_ends <= START + self.lease
            await store.release(second)
            assert (await store.release(last)).counted
            assert (await self.balance(store, hour())).lease_ends is None

    async def test_renew_keeps_a_hold_for_another_lease(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            ids = [await self.hold(store, charge(bucket, 10)) for _ in range(3)]
            unknown = new_id(now=START)
            clock.advance(self.lease - 1)
            assert await store.renew([*ids[:2], unknown], lease=self.lease) == frozenset(ids[:2])
            clock.advance(self.lease - 1)
            balance = await self.balance(store, bucket)
            assert (balance.held, balance.lost) == (20, 10)

    async def test_renew_takes_any_number_of_ids_of_any_trees(self) -> None:
        async with self.opened() as (store, clock):
            buckets = [Bucket("run", tree=tree) for tree in ("", "a", "b")]
            ids = await asyncio.gather(*(self.hold(store, Charge(bucket, 1)) for bucket in buckets for _ in range(120)))
            clock.advance(self.lease - 1)
            assert await store.renew(ids, lease=self.lease) == frozenset(ids)
            clock.advance(self.lease - 1)
            assert [(b.held, b.lost) for b in await store.balances(buckets)] == [(120, 0)] * 3
            assert await store.renew([], lease=self.lease) == frozenset()

    async def test_renew_takes_an_expired_id_again_when_it_fits(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            ends: tuple[LeaseEnd, ...] = ("release", "charge")
            for on_lease_end in ends:
                id = await self.hold(store, charge(bucket, 60), on_lease_end=on_lease_end)
                clock.advance(self.lease)
                assert await store.renew([id], lease=self.lease) == frozenset([id])
                balance = await self.balance(store, bucket)
                assert (balance.held, balance.spent, balance.lost) == (60, 0, 0)
                await store.release(id)

    async def test_renew_of_an_expired_id_that_does_not_fit_says_no(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            id = await self.hold(store, charge(bucket, 60))
            clock.advance(self.lease)
            await self.hold(store, charge(bucket, 50))
            assert await store.renew([id], lease=self.lease) == frozenset()
            balance = await self.balance(store, bucket)
            assert (balance.held, balance.spent, balance.lost) == (50, 0, 60)

    # 6. Late is still counted.

    async def test_a_settle_after_the_lease_counts_the_actual_once(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            ends: tuple[LeaseEnd, ...] = ("release", "charge")
            for round, on_lease_end in enumerate(ends, start=1):
                id = await self.hold(store, charge(bucket, 20), on_lease_end=on_lease_end)
                clock.advance(self.lease)
                settled = await store.settle(id, [charge(bucket, 7)])
                assert (settled.counted, settled.late) == (True, True)
                assert (await store.settle(id, [charge(bucket, 7)])).counted is False
                balance = await self.balance(store, bucket)
                assert (balance.held, balance.spent, balance.lost) == (0, 7 * round, 0)

    async def test_a_release_after_the_lease_undoes_what_its_end_wrote(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            id = await self.hold(store, charge(bucket, 20), on_lease_end="charge")
            clock.advance(self.lease)
            await store.release(id)
            balance = await self.balance(store, bucket)
            assert (balance.held, balance.spent, balance.lost) == (0, 0, 0)

    async def test_an_actual_above_the_limit_is_recorded_and_admits_nothing_more(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 95))
            await store.settle(id, [charge(hour(), 130)])
            refused = await store.reserve(new_id(now=START), [[charge(hour(), 1)]], lease=self.lease)
            assert refused.misfits[0][0].balance[1:3] == (0, 130)
            assert refused.misfits[0][0].kind == "spent"

    async def test_a_settle_past_its_retention_is_too_late_and_counts_nothing(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            closed = await self.hold(store, charge(bucket, 10))
            expired = await self.hold(store, charge(bucket, 10))
            absent = new_id(now=START)
            await store.settle(closed, [charge(bucket, 10)])
            clock.advance(self.lease)
            assert (await self.balance(store, bucket)).lost == 10
            clock.advance(RETENTION + self.lease)
            for id in (closed, expired, absent):
                with pytest.raises(TooLate):
                    await store.settle(id, [charge(bucket, 10)])
                assert (await store.reserve(id, [[charge(bucket, 1)]], lease=self.lease)).state == "gone"
            assert sums(await self.balance(store, bucket)) == (0, 10)

    async def test_a_settle_in_a_window_that_is_past_its_retention_is_too_late_and_counts_nothing(self) -> None:
        async with self.opened() as (store, clock):
            ends: tuple[LeaseEnd, ...] = ("release", "charge")
            expired = [await self.hold(store, charge(hour(), 10), on_lease_end=e) for e in ends]
            held = await self.hold(store, charge(hour(), 10))
            await store.renew([held], lease=3 * RETENTION)
            clock.advance(HOUR + RETENTION - 1)
            for id in expired:
                assert await store.renew([id], lease=RETENTION) == frozenset([id])
            in_time = new_id(now=clock.now)
            assert (await store.settle(in_time, [charge(hour(), 7)])).counted
            clock.advance(1)
            absent = new_id(now=clock.now)
            with pytest.raises(TooLate):
                await store.settle(absent, [charge(Bucket("run"), 7), charge(hour(), 7)])
            assert sums(await self.balance(store, Bucket("run"))) == (0, 0)
            clock.advance(RETENTION)
            for id in expired:
                with pytest.raises(TooLate):
                    await store.settle(id, [charge(hour(), 7)])
                assert (await store.release(id)).counted
            settled = await store.settle(held, [charge(hour(), 5)])
            assert (settled.counted, settled.late) == (True, False)

    async def test_a_release_is_never_too_late(self) -> None:
        async with self.opened() as (store, clock):
            id = new_id(now=START)
            clock.advance(RETENTION + 1)
            assert (await store.release(id)).counted

    async def test_an_id_is_known_for_a_day_after_it_closed_or_expired_and_no_longer(self) -> None:
        async with self.opened() as (store, clock):
            bucket = Bucket("run")
            closed = await self.hold(store, charge(bucket, 10))
            renewed, expired = [await self.hold(store, charge(bucket, 10)) for _ in range(2)]
            clock.advance(self.lease)
            await store.settle(closed, [charge(bucket, 10)])
            assert (await self.balance(store, bucket)).lost == 20
            clock.advance(RETENTION)
            assert {h.id for h in await store.holds()} == {renewed, expired}
            assert (await store.settle(closed, [charge(bucket, 10)])).counted is False
            assert await store.renew([renewed], lease=self.lease) == frozenset([renewed])
            clock.advance(1)
            assert [h.id for h in await store.holds()] == [renewed]
            assert await store.renew([expired], lease=self.lease) == frozenset()
            for id in (closed, expired):
                with pytest.raises(TooLate):
                    await store.settle(id, [charge(bucket, 10)])
            assert (await self.balance(store, bucket))[1:4] == (10, 10, 10)

    async def test_an_id_may_be_a_day_old_when_the_store_first_sees_it(self) -> None:
        async with self.opened() as (store, clock):
            early, late = ([new_id(now=START + more) for _ in range(2)] for more in (0, -1))
            clock.advance(RETENTION)
            assert (await store.reserve(early[0], [[]], lease=self.lease)).state == "held"
            assert (await store.reserve(late[0], [[]], lease=self.lease)).state == "gone"
            assert (await store.settle(early[1], [charge(Bucket("run"), 1)])).counted
            with pytest.raises(TooLate):
                await store.settle(late[1], [charge(Bucket("run"), 1)])

    async def test_a_hold_that_was_renewed_for_days_settles_like_any_other(self) -> None:
        async with self.opened() as (store, clock):
            id = await self.hold(store, charge(hour(), 10))
            day = 24 * HOUR
            for _ in range(3):
                assert await store.renew([id], lease=day + 1) == frozenset([id])
                clock.advance(day)
            settled = await store.settle(id, [charge(hour(), 7)])
            assert (settled.counted, settled.late) == (True, False)
            assert (settled.balances[0].held, settled.balances[0].spent) == (0, 7)
            assert sums(await self.balance(store, hour())) == (0, 7)

    async def test_an_id_made_by_a_clock_ahead_still_counts_once(self) -> None:
        async with self.opened() as (store, clock):
            bucket, id = Bucket("run"), new_id(now=START + 2 * HOUR)
            await store.settle(id, [charge(bucket, 10)])
            clock.advance(RETENTION + HOUR)
            assert (await store.settle(id, [charge(bucket, 10)])).counted is False
            assert sums(await self.balance(store, bucket)) == (0, 10)

    async def test_an_id_made_by_a_clock_ahead_keeps_no_other_from_being_forgotten(self) -> None:
        async with self.opened() as (store, clock):
            bucket, ids = Bucket("run"), [new_id(now=START + 2 * HOUR), new_id(now=START)]
            for id in ids:
                await store.settle(id, [charge(bucket, 10)])
            clock.advance(RETENTION + 1)
            with pytest.raises(TooLate):
                await store.settle(ids[1], [charge(bucket, 10)])
            assert (await store.settle(ids[0], [charge(bucket, 10)])).counted is False

    async def test_the_end_of_a_lease_is_undone_once_though_its_id_was_made_by_a_clock_ahead(self) -> None:
        async with self.opened() as (store, clock):
            bucket, ids = Bucket("run"), [new_id(now=START + 2 * HOUR) for _ in range(2)]
            for id in ids:
                await store.reserve(id, [[charge(bucket, 10)]], lease=self.lease, on_lease_end="charge")
            clock.advance(self.lease)
            assert (await self.balance(store, bucket))[1:4] == (0, 20, 20)
            clock.advance(RETENTION + HOUR)
            assert (await store.settle(ids[0], [charge(bucket, 7)])).late
            assert await store.renew(ids, lease=self.lease) == frozenset(ids[1:])
            assert (await self.balance(store, bucket))[1:4] == (10, 7, 0)

    async def test_the_end_of_a_lease_can_be_undone_as_long_as_its_id_is_kept(self) -> None:
        async with self.opened() as (store, clock):
            id = new_id(now=START + HOUR)
            await store.reserve(id, [[charge(hour(), 5)]], lease=RETENTION, on_lease_end="charge")
            clock.advance(RETENTION)
            assert (await self.balance(store, hour()))[1:4] == (0, 5, 5)
            clock.advance(HOUR + 1)
            await store.check()  # forgets what may be forgotten
            assert (await self.balance(store, hour()))[1:4] == (0, 5, 5)
            await store.release(id)
            assert (await self.balance(store, hour()))[1:4] == (0, 0, 0)

    async def test_what_a_clock_ahead_made_is_undone_as_late_as_its_id_is_kept(self) -> None:
        async with self.opened() as (store, clock):
            id = new_id(now=START + 3 * HOUR)
            await store.reserve(id, [[charge(hour(), 5)]], lease=self.lease, on_lease_end="charge")
            clock.advance(self.lease)
            assert (await self.balance(store, hour()))[1:4] == (0, 5, 5)
            clock.advance(RETENTION + 2 * HOUR)
            await store.check()  # forgets what may be forgotten
            await store.release(id)
            assert (await self.balance(store, hour()))[1:4] == (0, 0, 0)

    async def test_a_bucket_is_kept_as_long_as_it_holds_something(self) -> None:
        async with self.opened() as (store, clock):
            bucket, month = Bucket("run"), 30 * RETENTION
            id = await self.hold(store, charge(bucket, 5))
            for _ in range(2):
                await store.renew([id], lease=month)
                clock.advance(month - 1)
            await store.check()
            assert sums(await self.balance(store, bucket)) == (5, 0)
            assert (await store.settle(id, [charge(bucket, 3)])).late is False
            assert sums(await self.balance(store, bucket)) == (0, 3)

    # 7. The window is in the bucket's name; time.

    async def test_a_new_window_begins_empty_and_nothing_is_erased(self) -> None:
        async with self.opened() as (store, clock):
            old, new = hour(), hour(at=START + HOUR)
            id = await self.hold(store, charge(old, 90))
            clock.advance(HOUR)
            renewed = await self.hold(store, charge(new, 60))
            await store.settle(renewed, [charge(new, 60)])
            await store.settle(id, [charge(old, 10)])
            assert [sums(b) for b in await store.balances([old, new])] == [(0, 10), (0, 60)]

    async def test_a_reserve_in_a_window_that_is_over_or_far_ahead_is_stale(self) -> None:
        async with self.opened() as (store, clock):
            clock.advance(HOUR)
            over, now = hour(), hour(at=START + HOUR)
            ahead = hour(at=START + HOUR + AHEAD + 1)
            near = hour(at=START + HOUR + AHEAD)
            states = []
            for bucket in (over, now, ahead, near):
                verdict = await store.reserve(new_id(now=clock.now), [[charge(bucket, 1)]], lease=self.lease)
                states.append((verdict.state, verdict.now))
            assert states == [(s, clock.now) for s in ("stale", "held", "stale", "held")]

    async def test_extend_and_settle_may_name_a_window_that_is_over(self) -> None:
        async with self.opened() as (store, clock):
            id = await self.hold(store, charge(hour(), 10))
            await store.renew([id], lease=2 * HOUR)
            clock.advance(HOUR)
            assert (await store.extend(id, 1, [charge(hour(), 20)])).state == "held"
            assert (await store.settle(id, [charge(hour(), 20)])).counted

    async def test_the_stores_time_never_runs_backwards(self) -> None:
        async with self.opened() as (store, clock):
            clock.advance(HOUR)
            first = await store.reserve(new_id(now=START), [[charge(Bucket("run"), 1)]], lease=self.lease)
            clock.advance(-HOUR // 2)
            second = await store.reserve(new_id(now=START), [[charge(hour(), 1)]], lease=self.lease)
            assert first.now == second.now == START + HOUR
            assert second.state == "stale"

    # 9. Zero is a number.

    async def test_a_limit_of_zero_admits_nothing_that_costs_and_everything_that_does_not(self) -> None:
        async with self.opened() as (store, _):
            costs = await store.reserve(new_id(now=START), [[charge(hour(), 1, 0)]], lease=self.lease)
            free = await store.reserve(new_id(now=START), [[charge(hour(), 0, 0)]], lease=self.lease)
            assert (costs.state, free.state) == ("refused", "held")

    async def test_an_amount_of_zero_is_admitted_in_a_bucket_in_debt(self) -> None:
        async with self.opened() as (store, _):
            await store.settle(new_id(now=START), [charge(hour(), 500)])
            assert (await store.reserve(new_id(now=START), [[charge(hour(), 0)]], lease=self.lease)).state == "held"

    async def test_a_charge_without_a_line_is_counted_and_never_refuses(self) -> None:
        async with self.opened() as (store, _):
            soft = Charge(hour(), 1000)
            id = await self.hold(store, soft)
            assert (await store.extend(id, 1, [Charge(hour(), 5000)])).state == "held"
            await store.settle(id, [Charge(hour(), 4000)])
            assert sums(await self.balance(store, hour())) == (0, 4000)

    @pytest.mark.parametrize("amount", [-1, 1.5, float("nan"), float("inf"), True, "50", None, MAX_AMOUNT + 1])
    async def test_an_amount_that_is_no_whole_number_is_refused_when_built(self, amount: Any) -> None:
        with pytest.raises(InvalidCharge, match=r"whole number from 0 to 2\*\*52"):
            Charge(hour(), amount)

    # Wrong use changes nothing.

    async def test_a_settle_with_a_bucket_that_is_not_held_is_refused(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour("a"), 10))
            with pytest.raises(InvalidCharge, match="no bucket"):
                await store.settle(id, [charge(hour("a"), 5), charge(hour("b"), 5)])
            assert [sums(b) for b in await store.balances([hour("a"), hour("b")])] == [(10, 0), (0, 0)]

    async def test_a_bucket_twice_or_of_another_tree_is_refused(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 5))
            apart = [charge(hour(), 1), charge(hour("between"), 1), charge(hour(), 1)]
            for charges in ([charge(hour(), 1)] * 2, apart, [charge(hour(tree="other"), 1)], [charge(hour(tree="o"), 1)]):
                with pytest.raises(InvalidCharge):
                    await store.reserve(new_id(now=START), [charges], lease=self.lease)
                for call in (store.settle, store.credit):
                    with pytest.raises(InvalidCharge):
                        await call(new_id(now=START), charges)
                with pytest.raises(InvalidCharge):
                    await store.extend(id, 1, charges)
            assert sums(await self.balance(store, hour())) == (5, 0)
            with pytest.raises(InvalidCharge):
                await store.reserve(new_id(now=START), [], lease=self.lease)

    @pytest.mark.parametrize("id", ["", "x", ":", "a:b", ":" + "g" * 32, ":" + "0" * 31])
    async def test_an_id_that_new_id_did_not_make_is_refused(self, id: str) -> None:
        async with self.opened() as (store, _):
            calls: tuple[Callable[[], Coroutine[Any, Any, Any]], ...] = (
                lambda: store.reserve(id, [[charge(hour(), 1)]], lease=self.lease),
                lambda: store.extend(id, 1, [charge(hour(), 1)]),
                lambda: store.settle(id, [charge(hour(), 1)]),
                lambda: store.release(id),
                lambda: store.renew([id], lease=self.lease),
                lambda: store.credit(id, []),
            )
            for call in calls:
                with pytest.raises(InvalidCharge, match="new_id"):
                    await call()

    @pytest.mark.parametrize("step", [0, -1, 1.5, True, None, 2**52 + 1])
    async def test_a_step_that_orders_nothing_is_refused(self, step: Any) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 5))
            with pytest.raises(InvalidCharge, match="step"):
                await store.extend(id, step, [charge(hour(), 9)])
            assert (await store.extend(id, 2**52, [charge(hour(), 9)])).balances[0].held == 9

    @pytest.mark.parametrize("lease", [0, -1, 1.5, True, None, 30 * RETENTION + 1])
    async def test_a_lease_that_is_no_length_of_time_is_refused(self, lease: Any) -> None:
        async with self.opened() as (store, _):
            with pytest.raises(InvalidCharge, match="lease"):
                await store.reserve(new_id(now=START), [[charge(hour(), 1)]], lease=lease)
            id = new_id(now=START)
            assert (await store.reserve(id, [[charge(hour(), 1)]], lease=30 * RETENTION)).held
            with pytest.raises(InvalidCharge, match="lease"):
                await store.renew([id], lease=lease)
            assert (await store.holds())[0].lease_ends == START + 30 * RETENTION

    @pytest.mark.parametrize("end", ["chargee", "", None, True])
    async def test_an_end_of_a_lease_that_is_none_is_refused(self, end: Any) -> None:
        async with self.opened() as (store, _):
            with pytest.raises(InvalidCharge, match="on_lease_end"):
                await store.reserve(new_id(now=START), [[charge(hour(), 1)]], lease=self.lease, on_lease_end=end)
            assert await store.holds() == ()

    @pytest.mark.parametrize("limit", [-1, 1_000_001, 1.5, True, None])
    async def test_a_number_of_holds_that_is_none_is_refused(self, limit: Any) -> None:
        async with self.opened() as (store, _):
            await self.hold(store, charge(hour(), 5))
            with pytest.raises(InvalidCharge, match="limit"):
                await store.holds(limit=limit)
            assert await store.holds(limit=0) == ()

    # Trees and names.

    async def test_odd_names_never_meet(self) -> None:
        async with self.opened() as (store, _):
            odd = ["", "a", "a}b{c:d\n", "a}b{c", "{a}", ":", "é", "\ud800", "%", "x" * 10_000, "x" * 10_001, "\0"]
            buckets = [Bucket(name, tree=tree) for tree in odd for name in (odd[odd.index(tree) - 1], tree)]
            ids = [await self.hold(store, charge(b, n + 1)) for n, b in enumerate(buckets)]
            assert [b.held for b in await store.balances(buckets)] == list(range(1, len(buckets) + 1))
            for tree in odd:
                assert [h.charges[0].bucket.tree for h in await store.holds(tree=tree)] == [tree] * 2
            await asyncio.gather(*(store.release(id) for id in ids))
            assert [b.held for b in await store.balances(buckets)] == [0] * len(buckets)

    async def test_holds_lists_a_tree_in_the_order_of_lease_ends(self) -> None:
        async with self.opened() as (store, clock):
            first = await self.hold(store, charge(hour("a"), 5, 85, 100), on_lease_end="charge")
            clock.advance(10)
            second = await self.hold(store, Charge(Bucket("b"), 7), charge(hour("a"), 1))
            listed = await store.holds()
            assert [h.id for h in listed] == [first, second]
            assert listed[0].charges == (charge(hour("a"), 5, 85, 100),)
            assert (listed[0].state, listed[0].lease_ends) == ("held", START + self.lease)
            assert (listed[0].on_lease_end, listed[1].on_lease_end) == ("charge", "release")
            assert listed[1].charges == (Charge(Bucket("b"), 7), charge(hour("a"), 1))
            assert [h.id for h in await store.holds(limit=1)] == [first]
            clock.advance(self.lease - 10)
            third = await self.hold(store, charge(hour("a"), 1))
            assert [(h.id, h.state) for h in await store.holds(limit=2)] == [(first, "expired"), (second, "held")]
            await store.release(second)
            assert [h.id for h in await store.holds(limit=2)] == [first, third]

    async def test_what_was_closed_takes_no_place_in_the_list_of_holds(self) -> None:
        async with self.opened() as (store, clock):
            ids = []
            for _ in range(4):
                ids.append(await self.hold(store, charge(hour(), 5)))
                clock.advance(1)
            for id in ids[:2]:
                await store.settle(id, [charge(hour(), 1)])
            assert [h.id for h in await store.holds(limit=2)] == ids[2:]
            clock.advance(self.lease)
            assert [h.state for h in await store.holds(limit=2)] == ["expired"] * 2
            await store.settle(ids[2], [charge(hour(), 1)])
            assert [h.id for h in await store.holds(limit=1)] == ids[3:]

    async def test_holds_lists_a_thousand_unless_said(self) -> None:
        async with self.opened() as (store, _):
            await asyncio.gather(*(self.hold(store, Charge(Bucket("run"), 1)) for _ in range(1001)))
            assert len(await store.holds()) == 1000
            assert len(await store.holds(limit=1001)) == 1001

    # Operators.

    async def test_a_credit_takes_off_what_was_spent_once(self) -> None:
        async with self.opened() as (store, _):
            await store.settle(new_id(now=START), [charge(hour(), 50)])
            id = new_id(now=START)
            assert (await store.credit(id, [charge(hour(), 20)])).counted is True
            assert (await store.credit(id, [charge(hour(), 20)])).counted is False
            balance = await self.balance(store, hour())
            assert (balance.spent, balance.credited) == (30, 20)

    async def test_a_credit_past_its_retention_is_too_late_and_takes_nothing(self) -> None:
        async with self.opened() as (store, clock):
            bucket, early = Bucket("run"), new_id(now=START)
            await store.settle(new_id(now=START), [charge(bucket, 50)])
            clock.advance(RETENTION)
            assert (await store.credit(early, [charge(bucket, 10)])).counted
            late = new_id(now=START)
            clock.advance(1)
            with pytest.raises(TooLate):
                await store.credit(late, [charge(bucket, 10)])
            assert (await self.balance(store, bucket)).spent == 40

    async def test_a_credit_above_what_was_spent_or_of_a_reservation_is_refused(self) -> None:
        async with self.opened() as (store, _):
            held = await self.hold(store, charge(hour(), 50))
            for bucket in (hour(), hour("never written")):
                with pytest.raises(InvalidCharge, match="has spent"):
                    await store.credit(new_id(now=START), [charge(bucket, 1)])
            with pytest.raises(InvalidCharge, match="is a reservation"):
                await store.credit(held, [])
            assert (await self.balance(store, hour())).credited == 0

    async def test_check_says_how_the_store_is(self) -> None:
        async with self.opened() as (store, clock):
            health = await store.check()
            assert (health.now, health.rolled_back) == (clock.now, False)
            assert "ok" in str(health)
            await self.hold(store, charge(hour(), 1))
            later = await store.check()
            assert later.epoch == health.epoch
            assert later.writes > health.writes

    async def test_accept_of_a_store_that_is_well_changes_no_balance(self) -> None:
        async with self.opened() as (store, _):
            id = await self.hold(store, charge(hour(), 50))
            await store.accept()
            assert sums(await self.balance(store, hour())) == (50, 0)
            await store.settle(id, [charge(hour(), 40)])
            await self.hold(store, charge(hour(), 60))

    # All of it against the model.

    calls: ClassVar[int] = 3000
    """How many random calls are made at least."""

    def test_random_calls_equal_the_model(self) -> None:
        made = 0
        with asyncio.Runner() as runner:
            opened = self.opened()
            store, clock = runner.run(opened.__aenter__())

            @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(turns=_turns)
            def hold_against_the_model(turns: list[list[bytes]]) -> None:
                nonlocal made
                made += sum(map(len, turns))
                # A tree of its own in the one store, from the beginning of an hour on.
                clock.advance(HOUR - clock.now % HOUR)
                runner.run(self._against_the_model(store, clock, f"tree {made}", turns))

            try:
                while made < self.calls:
                    hold_against_the_model()
            finally:
                runner.run(opened.__aexit__(None, None, None))

    async def _against_the_model(
        self, store: BudgetStore, clock: ManualClock, tree: str, turns: Sequence[Sequence[bytes]]
    ) -> None:
        model = Model()
        ids = [new_id(tree, now=clock.now) for _ in range(8)]
        later = hour("a", at=clock.now + HOUR, tree=tree)
        buckets = [hour("a", at=clock.now, tree=tree), hour("b", at=clock.now, tree=tree), Bucket("run", tree=tree), later]
        for turn in turns:
            clock.advance(_PAUSES[turn[0][-1] % len(_PAUSES)])
            model.now = clock.now
            made = [_call(draw, ids, buckets) for draw in turn]
            # Started in one turn of the loop: the store sees them in this order, and may carry them out together.
            answers = await asyncio.gather(*(_outcome(store, *m) for m in made), return_exceptions=True)
            for (name, args), answer in zip(made, answers, strict=True):
                assert _plain(answer) == model.call(name, *args), f"{name}{args}"
            balances, listed = await asyncio.gather(store.balances(buckets), store.holds(tree=tree))
            assert [_sums(b) for b in balances] == [model.sums(b) for b in buckets]
            assert [h.lease_ends for h in listed] == sorted(h.lease_ends for h in listed)
            assert {h.id: h for h in listed} == {h.id: h for h in model.holds()}
            for balance in balances:
                ends = [h.lease_ends for h in listed if h.state == "held" and _in(h.charges, balance.bucket)]
                assert (balance.lease_ends is None) == (balance.held == 0)
                assert balance.lease_ends is None or balance.lease_ends <= min(ends)


# The plain model.


@dataclass
class _Id:
    state: Literal["held", "expired", "closed"]
    charges: dict[str, Charge] = field(default_factory=dict)
    option: int = 0
    step: int = 0
    lease_ends: int = 0
    on_lease_end: LeaseEnd = "release"
    paid: dict[str, int] = field(default_factory=dict)
    credited: dict[str, int] = field(default_factory=dict)


class Model:
    """The contract in its plainest form: a list of ids; every balance is a sum over all of them. `now` is set from outside."""

    def __init__(self) -> None:
        self.ids: dict[str, _Id] = {}
        self.now = START

    def sums(self, bucket: Bucket) -> tuple[int, int, int, int]:
        """Return held, spent, lost and credited of a bucket."""
        key, ids = bucket.key, self.ids.values()
        held = sum(i.charges[key].amount for i in ids if i.state == "held" and key in i.charges)
        lost = sum(i.charges[key].amount for i in ids if i.state == "expired" and key in i.charges)
        charged = sum(
            i.charges[key].amount for i in ids if i.state == "expired" and i.on_lease_end == "charge" and key in i.charges
        )
        credited = sum(i.credited.get(key, 0) for i in ids)
        return held, sum(i.paid.get(key, 0) for i in ids) + charged - credited, lost, credited

    def call(self, name: str, *args: Any) -> Any:
        """Carry out one call and return what `_plain` makes of a store's answer."""
        for entry in self.ids.values():
            if entry.state == "held" and entry.lease_ends <= self.now:
                entry.state = "expired"
        return getattr(self, name)(*args)

    def holds(self) -> list[Hold]:
        """Return what is held or expired, in no order."""
        return [
            Hold(id, entry.state, tuple(entry.charges.values()), entry.lease_ends, entry.on_lease_end)
            for id, entry in self.ids.items()
            if entry.state != "closed"
        ]

    def reserve(self, id: str, options: Sequence[Sequence[Charge]], lease: int, on_lease_end: LeaseEnd) -> Any:
        entry = self.ids.get(id)
        if entry is not None:
            return self.held(entry) if entry.state == "held" else ("gone", None, [])
        refused = []
        for index, charges in enumerate(options):
            if any(
                c.bucket.ends is not None
                and c.bucket.starts is not None
                and not c.bucket.starts - AHEAD <= self.now < c.bucket.ends
                for c in charges
            ):
                return ("stale", None, [])
            bad = [c for c in charges if not self.fits(c.bucket, c.amount, c.line)]
            if not bad:
                held = {c.bucket.key: c for c in charges}
                self.ids[id] = _Id("held", held, index, 0, self.now + lease, on_lease_end)
                return self.held(self.ids[id])
            refused.append(self.misfits(bad))
        return ("refused", refused)

    def held(self, entry: _Id) -> Any:
        return ("held", entry.option, self.after(entry.charges.values()))

    def after(self, charges: Iterable[Charge]) -> list[tuple[int, int, int, int]]:
        """Return the sums that an answer carries."""
        return [self.sums(c.bucket) for c in charges]

    def misfits(self, charges: Sequence[Charge]) -> list[Any]:
        return [(c, self.sums(c.bucket)) for c in charges]

    def fits(self, bucket: Bucket, growth: int, bound: int | None) -> bool:
        held, spent, _, _ = self.sums(bucket)
        return growth <= 0 or bound is None or held + spent + growth <= bound

    def extend(self, id: str, step: int, charges: Sequence[Charge]) -> Any:
        entry = self.ids.get(id)
        if entry is None or entry.state != "held":
            return ("gone", None, [])
        if step > entry.step:
            before = {key: c.amount for key, c in entry.charges.items()}
            bad = [c for c in charges if not self.fits(c.bucket, c.amount - before.get(c.bucket.key, 0), c.limit)]
            if bad:
                return ("refused", [self.misfits(bad)])
            entry.step, entry.charges = step, {c.bucket.key: c for c in charges}
        return self.held(entry)

    def settle(self, id: str, charges: Sequence[Charge]) -> Any:
        entry = self.ids.get(id)
        if entry is not None and entry.state == "closed":
            return (False, False, self.after(charges))
        if entry is not None and any(c.bucket.key not in entry.charges for c in charges):
            return InvalidCharge
        late = entry is None or entry.state == "expired"
        self.ids[id] = _Id("closed", paid={c.bucket.key: c.amount for c in charges})
        return (True, late, self.after(charges))

    def release(self, id: str) -> Any:
        return self.settle(id, ())

    def renew(self, ids: Sequence[str], lease: int) -> Any:
        held = set()
        for id in ids:
            entry = self.ids.get(id)
            if entry is None or entry.state == "closed":
                continue
            growth = entry.state == "expired" and entry.on_lease_end == "release"
            if growth and not all(self.fits(c.bucket, c.amount, c.limit) for c in entry.charges.values()):
                continue
            entry.state, entry.lease_ends = "held", self.now + lease
            held.add(id)
        return frozenset(held)

    def credit(self, id: str, charges: Sequence[Charge]) -> Any:
        entry = self.ids.get(id)
        if entry is not None:
            return (False, False, self.after(charges)) if entry.state == "closed" else InvalidCharge
        if any(c.amount > self.sums(c.bucket)[1] for c in charges):
            return InvalidCharge
        self.ids[id] = _Id("closed", credited={c.bucket.key: c.amount for c in charges})
        return (True, False, self.after(charges))


def _plain(answer: Any) -> Any:
    if isinstance(answer, Verdict):
        if answer.state == "refused":
            return ("refused", [[(m.charge, _sums(m.balance)) for m in option] for option in answer.misfits])
        return (answer.state, answer.option, [_sums(b) for b in answer.balances])
    if isinstance(answer, InvalidCharge):
        return InvalidCharge
    if isinstance(answer, BaseException):
        raise answer
    return answer if isinstance(answer, frozenset) else (answer.counted, answer.late, [_sums(b) for b in answer.balances])


def _sums(balance: Balance) -> tuple[int, int, int, int]:
    return balance.held, balance.spent, balance.lost, balance.credited


def _in(charges: Sequence[Charge], bucket: Bucket) -> bool:
    return any(c.bucket == bucket and c.amount for c in charges)


async def _outcome(store: BudgetStore, name: str, args: tuple[Any, ...]) -> Any:
    if name == "reserve":
        id, options, lease, on_lease_end = args
        return await store.reserve(id, options, lease=lease, on_lease_end=on_lease_end)
    if name == "renew":
        return await store.renew(args[0], lease=args[1])
    method: Callable[..., Any] = getattr(store, name)
    return await method(*args)


# Random calls, each from 32 random bytes: drawing every part by itself would take longer than the calls.

_turns = st.lists(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=30), min_size=1, max_size=25)
_PAUSES = (0, 0, 0, 1, 500, 60_000, HOUR // 2)
_NAMES = ("reserve",) * 4 + ("settle",) * 2 + ("extend",) * 2 + ("release", "renew", "credit")
_LEASES = (1000, 60_000, HOUR)


def _call(draw: bytes, ids: Sequence[str], buckets: Sequence[Bucket]) -> tuple[str, tuple[Any, ...]]:
    """Decode a call: small bytes make simple calls, which is what a failing example is shrunk to."""
    name, id = _NAMES[draw[0] % len(_NAMES)], ids[draw[1] % len(ids)]
    lease = _LEASES[draw[2] % len(_LEASES)]
    options = [_charges(draw[4 + 9 * option : 13 + 9 * option], buckets) for option in range(1 + draw[3] % 3)]
    if name == "reserve":
        return name, (id, tuple(options), lease, "charge" if draw[2] >= 128 else "release")
    if name == "extend":
        return name, (id, 1 + draw[2] % 4, options[0])
    if name == "renew":
        return name, (tuple(ids[(draw[1] + more) % len(ids)] for more in range(len(options))), lease)
    return name, (id,) if name == "release" else (id, options[0])


def _charges(draw: bytes, buckets: Sequence[Bucket]) -> tuple[Charge, ...]:
    found: dict[int, Charge] = {}
    for which, amount, line in zip(draw[0::3], draw[1::3], draw[2::3], strict=True):
        if which % 8 < len(buckets):
            bound = None if line >= 230 else line // 2
            found[which % 8] = Charge(buckets[which % 8], amount // 4, bound, None if bound is None else bound + 10)
    return tuple(found.values())
