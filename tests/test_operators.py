"""What an operator does about a counter that is stuck, on every store: look, give back, correct, accept."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stores import Bucket, BudgetStore, Charge, StoreRolledBack, new_id
from tests.named import KINDS, name_of, named
from tests.redis_server import Server, running

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
RUN = Bucket("run")

OWNER = """
import asyncio, sys
from stores import Bucket, Charge, new_id
from tests.named import named

async def main():
    store = named(sys.argv[1])
    id = new_id()
    verdict = await store.reserve(id, [[Charge(Bucket("run"), 80, 100, 100)]], lease=3_600_000)
    print(id, verdict.state, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return name_of(request.param, tmp_path, lambda: str(request.getfixturevalue("redis_url")))


@pytest.fixture
def frail() -> Iterator[Server]:
    """A server for one test, which may kill it."""
    with running() as server:
        yield server


def charge(amount: int) -> Charge:
    return Charge(RUN, amount, 100, 100)


async def reserve(store: BudgetStore, amount: int) -> str:
    """Ask for an amount; return the state."""
    return (await store.reserve(new_id(), [[charge(amount)]], lease=60_000)).state


async def spend(store: BudgetStore, amount: int) -> None:
    id = new_id()
    assert (await store.reserve(id, [[charge(amount)]], lease=60_000)).held
    await store.settle(id, [charge(amount)])


async def held_by_one_that_is_gone(store: BudgetStore, name: str) -> str:
    """Leave a hold for an hour whose owner cannot settle it; return its id."""
    if name.startswith("memory"):
        id = new_id()
        assert (await store.reserve(id, [[charge(80)]], lease=3_600_000)).held
        return id
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, name),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert owner.stdout is not None
    said = (await owner.stdout.readline()).decode().split()
    owner.kill()
    await owner.communicate()
    assert said[1:] == ["held"]
    return said[0]


async def test_a_hold_whose_owner_is_gone_is_found_and_released_and_its_budget_is_free_at_once(name: str) -> None:
    store = named(name)
    id = await held_by_one_that_is_gone(store, name)
    assert await reserve(store, 80) == "refused"
    (stuck,) = [hold for hold in await store.holds() if hold.state == "held"]
    assert (stuck.id, stuck.charges) == (id, (charge(80),))
    assert stuck.lease_ends - (await store.check()).now > 3_000_000
    assert (await store.release(stuck.id)).counted
    assert await store.holds() == ()
    assert await reserve(store, 80) == "held"
    # Who was not gone after all is told that nothing was counted.
    assert (await store.settle(id, [charge(50)])).counted is False
    await store.aclose()


async def test_what_was_counted_too_high_is_taken_off_once_and_is_free_at_once(name: str) -> None:
    store = named(name)
    await spend(store, 95)
    assert await reserve(store, 30) == "refused"
    correction = new_id()
    for counted in (True, False):
        assert (await store.credit(correction, [charge(40)])).counted is counted
    (balance,) = await store.balances([RUN])
    assert (balance.spent, balance.credited) == (55, 40)
    assert await reserve(store, 30) == "held"
    await store.aclose()


async def test_the_health_of_a_store_is_one_line(name: str) -> None:
    store = named(name)
    kind = name.partition("=")[0]
    health = await store.check()
    assert str(health) == f"{kind}: ok (epoch {health.epoch}, {health.writes} writes)"
    await store.accept()  # where nothing is amiss, nothing changes
    assert not (await store.check()).rolled_back
    await store.aclose()


async def restored(store: BudgetStore, other: BudgetStore) -> None:
    """Do what an operator does about a store that came back older than it was."""
    for each in (store, other):
        with pytest.raises(StoreRolledBack, match="call accept"):
            await spend(each, 1)
    health = await store.check()
    assert str(health).partition(" (")[0] == f"{health.store}: rolled back: reserves are refused until accept()"
    # What the ledger or the provider's bill has and the copy has not.
    await store.settle(new_id(), [charge(50)])
    await store.accept()
    assert str(await other.check()).partition(" (")[0] == f"{health.store}: ok"
    assert [await reserve(each, amount) for each, amount in ((store, 11), (other, 10))] == ["refused", "held"]


async def test_after_a_file_was_put_back_from_a_copy_it_is_corrected_and_accepted(tmp_path: Path) -> None:
    name = name_of("sqlite", tmp_path, str)
    store = named(name)
    await spend(store, 40)
    await store.aclose()
    file, copy = tmp_path / "budget.sqlite", tmp_path / "copy"
    shutil.copy(file, copy)
    store, other = named(name), named(name)
    await spend(store, 50)
    await other.check()
    copy.replace(file)
    await restored(store, other)
    await store.aclose()
    await other.aclose()


async def test_after_a_server_came_back_from_its_last_save_it_is_corrected_and_accepted(frail: Server) -> None:
    name = f"redis={frail.url}#budget"
    store, other = named(name), named(name)
    await spend(store, 40)
    with frail.client() as client:
        client.save()
    await spend(store, 50)
    await other.check()
    frail.kill()
    await asyncio.to_thread(frail.start)
    await restored(store, other)
    await store.aclose()
    await other.aclose()
