"""Many processes, one budget; and processes that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.testing import LocalProvider, Rates, Reply
from stores import BudgetStore, Charge
from tests.support import STRONG
from tests.worker import store_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

ROOT = Path(__file__).parent.parent
ESTIMATE = STRONG.bound(input_tokens=11, output_tokens=100)


@pytest.fixture
def provider() -> Iterator[LocalProvider]:
    """A provider that always generates up to the limit, so that the actual is near the estimate."""
    with LocalProvider(prices={"strong-model": Rates(input="2", output="10")}, reply=Reply(tokens=1000)) as running:
        yield running


@pytest.fixture(params=["sqlite", "redis"])
def store_name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'budget.sqlite'}"
    url = request.getfixturevalue("redis_url")
    return f"{url}#{tmp_path.name}"


async def start(store_name: str, provider: LocalProvider, cap: int, tasks: int, *more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.worker",
        *(store_name, provider.base_url, str(cap), str(tasks), *more),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def balance_of(store: BudgetStore) -> Any:
    (hold,) = await store.holds()
    (balance,) = await store.balances([hold.charges[0].bucket])
    return balance


async def test_four_processes_of_fifty_tasks_serve_exactly_as_many_as_fit(store_name: str, provider: LocalProvider) -> None:
    fits = 37
    cap = fits * ESTIMATE + ESTIMATE // 2
    workers = [await start(store_name, provider, cap, 50) for _ in range(4)]
    outputs = await asyncio.gather(*(worker.communicate(b"go\n") for worker in workers))
    answers = [json.loads(out) for out, _ in outputs]
    served = sum(answer["served"] for answer in answers)
    refused: dict[str, int] = {}
    for answer in answers:
        for why, count in answer["refused"].items():
            refused[why] = refused.get(why, 0) + count
    # The actual is just below the estimate, so that settling makes no room for one more.
    assert served == fits
    assert refused == {"cap all True": 200 - fits}
    assert len(provider.requests) == fits
    assert provider.spent() <= cap


async def test_the_holds_of_a_killed_process_come_back_and_a_late_settle_counts_once(
    store_name: str, provider: LocalProvider
) -> None:
    worker = await start(store_name, provider, 10 * ESTIMATE, 1, "hold")
    assert worker.stdout is not None
    assert await worker.stdout.readline() == b"held\n"
    store = store_of(store_name)
    (hold,) = await store.holds()
    assert (await balance_of(store)).held > 0
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    while (await balance_of(store)).held:
        await asyncio.sleep(0.05)  # the store's own clock ends the lease, two seconds after the last renewal
    balance = await balance_of(store)
    amount = hold.charges[0].amount
    assert (balance.held, balance.spent, balance.lost) == (0, 0, amount)
    late = [Charge(hold.charges[0].bucket, 123)]
    assert (await store.settle(hold.id, late)).late
    assert (await store.settle(hold.id, late)).counted is False
    (after,) = await store.balances([hold.charges[0].bucket])
    assert (after.held, after.spent, after.lost) == (0, 123, 0)
    await store.aclose()
