"""A store where it does not belong (a second loop, another thread, behind a fork, after its end): one clear error, no hang."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stores import BudgetStore, MemoryStore
from stores.redis import RedisStore
from tests.named import CALLS, KINDS, name_of, named, refusals

ROOT = Path(__file__).parent.parent

Make = Callable[[], BudgetStore]


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name a store of each kind, empty."""
    return name_of(request.param, tmp_path, lambda: str(request.getfixturevalue("redis_url")))


@pytest.fixture
def make(name: str) -> Make:
    return lambda: named(name)


def in_another_thread(work: Callable[[], Awaitable[Any]]) -> Future[Any]:
    """Run it in a loop of another thread."""
    found: Future[Any] = Future()

    def run() -> None:
        async def main() -> Any:
            return await work()

        try:
            found.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001 (handed on)
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found


OTHER_LOOP = {"it belongs to another event loop; make one store per loop"}


def test_a_second_loop_gets_one_clear_error_from_every_call_and_the_first_goes_on(make: Make) -> None:
    store = make()
    with asyncio.Runner() as first:
        first.run(store.check())
        with asyncio.Runner() as second:
            assert second.run(refusals(store)) == OTHER_LOOP
        assert first.run(CALLS["reserve"](store)).held  # type: ignore[arg-type]
        first.run(store.aclose())


def test_another_thread_gets_one_clear_error_from_every_call_and_the_first_goes_on(make: Make) -> None:
    store = make()

    async def main() -> None:
        await store.check()
        calls = [asyncio.ensure_future(CALLS["reserve"](store)) for _ in range(50)]
        other = asyncio.wrap_future(in_another_thread(lambda: refusals(store)))
        assert await other == OTHER_LOOP
        assert [verdict.held for verdict in await asyncio.gather(*calls)] == [True] * 50  # type: ignore[attr-defined]
        await store.aclose()

    asyncio.run(main())


def test_closing_it_in_another_thread_leaves_nobody_waiting(make: Make) -> None:
    store = make()

    async def main() -> None:
        await store.check()
        calls = [asyncio.ensure_future(CALLS["reserve"](store)) for _ in range(250)]
        await asyncio.sleep(0)
        other = asyncio.wrap_future(in_another_thread(store.aclose))
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*calls, return_exceptions=True)
            closing = await asyncio.gather(other, return_exceptions=True)
        assert {type(answer).__name__ for answer in answers} <= {"Verdict", "StoreUnavailable"}
        if not isinstance(store, MemoryStore):
            assert str(closing[0]).endswith("it belongs to an event loop that runs in another thread; close it there")
            assert {type(answer).__name__ for answer in answers} == {"Verdict"}
        await store.aclose()

    asyncio.run(main())


def test_closing_it_while_its_own_loop_stands_still_answers_those_who_wait_there(make: Make) -> None:
    store = make()
    calls: list[asyncio.Future[object]] = []

    async def begin() -> None:
        await store.check()
        calls.extend(asyncio.ensure_future(CALLS["check"](store)) for _ in range(250))
        await asyncio.sleep(0)

    async def end() -> list[object]:
        async with asyncio.timeout(10):
            return await asyncio.gather(*calls, return_exceptions=True)

    with asyncio.Runner() as own:
        own.run(begin())
        asyncio.run(store.aclose())
        answers = own.run(end())
        assert {type(answer).__name__ for answer in answers} <= {"Health", "StoreUnavailable"}
        if isinstance(store, RedisStore):
            own.run(store._client.aclose())  # whose connections are of this loop


def test_after_its_end_every_call_gets_one_clear_error(make: Make) -> None:
    store = make()

    async def main() -> None:
        await store.check()
        await store.aclose()
        await store.aclose()
        assert await refusals(store) == {"it was closed"}

    asyncio.run(main())


def test_a_store_that_was_never_used_can_be_closed_anywhere_and_is_closed(make: Make) -> None:
    store = make()

    async def main() -> None:
        await store.aclose()
        assert await refusals(store) == {"it was closed"}

    asyncio.run(main())


# Processes of their own.

FORK = """
import asyncio, os, sys
from tests.named import named, refusals

async def child(store):
    print(sorted(await refusals(store)), flush=True)
    await store.aclose()

async def main():
    store = named(sys.argv[1])
    await store.check()
    if (process := os.fork()) == 0:
        try:
            asyncio.events._set_running_loop(None)
            asyncio.run(child(store))
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    print((await store.check()).rolled_back)
    await store.aclose()

asyncio.run(main())
"""

FORGETFUL = """
import asyncio, sys, threading
from stores import Bucket, Charge, new_id
from tests.named import named

async def main():
    global store
    store = named(sys.argv[1])
    verdict = await store.reserve(new_id(), [[Charge(Bucket("run"), 1)]], lease=60_000)
    calls = [asyncio.ensure_future(store.check()) for _ in range(250 if "busy" in sys.argv else 0)]
    await asyncio.sleep(0)
    print(verdict.held)

asyncio.run(main())
"""

CLOSED = """
import asyncio, os, sys, threading
from tests.named import named

def files():
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}

async def main():
    threads, before = set(threading.enumerate()), files()
    store = named(sys.argv[1])
    await asyncio.gather(*(store.check() for _ in range(300)))
    used = files() - before
    await store.aclose()
    await asyncio.sleep(0)
    print(bool(used), files() - before, set(threading.enumerate()) - threads, len(asyncio.all_tasks()))

asyncio.run(main())
"""


def output(script: str, *args: str, warnings: str = "error") -> str:
    """Run a program to its end; it may not complain of anything."""
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_forked_child_gets_one_clear_error_from_every_call_and_the_parent_goes_on(name: str) -> None:
    assert output(FORK, name).splitlines() == [str(sorted(OTHER_LOOP)), "False"]


@pytest.mark.parametrize("how", ["idle", "busy"])
def test_a_program_that_forgets_to_close_still_exits_in_silence(name: str, how: str) -> None:
    # Who asks for every warning is told by redis-py which connections were left open.
    assert output(FORGETFUL, name, how, warnings="default::DeprecationWarning") == "True\n"


def test_a_closed_store_leaves_no_thread_no_connection_and_no_task(name: str) -> None:
    assert output(CLOSED, name) == f"{not name.startswith('memory')} set() set() 1\n"
