"""Deferred tasks in Procrastinate, on a real PostgreSQL, with workers that are killed."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

from router import Cap, Router, Task, TaskClass
from router.deferring import task_from_json, task_to_json
from router.errors import TaskError
from router.procrastinate import ProcrastinateDeferral
from router.testing import Entry, LocalProvider, Reply
from stores import MemoryStore, SQLiteStore
from tests.deferring_worker import policy
from tests.postgres_server import Server, running
from tests.support import PRICES, TestClock, bench, chat, eventually, local_client, worth

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
NOW = datetime(2026, 8, 1, tzinfo=UTC)
PROMPT = "a prompt that stands in no log"
LIMIT = 8_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with Procrastinate's tables for the whole module."""
    with running() as found:
        with App(connector=SyncPsycopgConnector(conninfo=found.dsn)).open() as app:
            app.schema_manager.apply_schema()
        yield found


@pytest.fixture
async def app(server: Server) -> AsyncIterator[App]:
    """An application without jobs."""
    async with App(connector=PsycopgConnector(conninfo=server.dsn)).open_async() as opened:
        await opened.connector.execute_query_async("TRUNCATE procrastinate_jobs, procrastinate_workers CASCADE")
        yield opened


async def jobs(server: Server) -> list[tuple[str, str]]:
    """Return the lock and the status of every deferred task, the oldest first."""
    connection: asyncpg.Connection[Any] = await server.connect()
    try:
        rows = await connection.fetch(
            "SELECT lock, status::text FROM procrastinate_jobs WHERE task_name = 'budget_router.run' ORDER BY id"
        )
    finally:
        await connection.close()
    return [(row[0].removeprefix("budget_router:"), row[1]) for row in rows]


async def caught_up(app: App, **more: Any) -> None:
    """Run what is due, in this process, after a look for workers that died."""
    await app.configure_task("budget_router.give_back", queueing_lock="look", priority=1).defer_async(timestamp=0)
    await app.run_worker_async(wait=False, install_signal_handlers=False, listen_notify=False, **more)


@asynccontextmanager
async def a_worker(*args: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a worker process, wait until it is ready, and kill it if that is still to be done."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.deferring_worker", *args),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        await killed(process)


async def killed(process: asyncio.subprocess.Process) -> None:
    """Kill it as `kill -9` does."""
    if process.returncode is None:
        process.kill()
    await process.communicate()


def held_back(entry: Entry) -> Reply:
    """Answer the deferred task only once the provider is told to advance."""
    return Reply(prompt_tokens=15, tokens=entry.output_limit, gate=entry.output_limit == LIMIT)


@pytest.mark.parametrize("moment", ["before it begins", "in the middle of it"])
async def test_a_deferred_task_whose_worker_is_killed_runs_once_in_the_next_window(
    moment: str, server: Server, app: App, tmp_path: Path
) -> None:
    path, log = tmp_path / "budget.sqlite", tmp_path / "log"
    interrupted = moment == "in the middle of it"

    def of_the_task() -> list[Entry]:
        return [entry for entry in provider.requests if entry.output_limit == LIMIT]

    async def arrived(times: int) -> None:
        await provider.wait_for(lambda _: len(of_the_task()) == times, timeout=30)

    async def succeeded() -> bool:
        return await jobs(server) == [("t1", "succeeded")]

    with LocalProvider(prices=PRICES, reply=held_back) as provider:
        args = (server.dsn, provider.base_url, str(path))
        async with a_worker(*args, log=log) as first:
            # Procrastinate knows real time only: this router stands still half a second before a window that is to come.
            clock = TestClock(1000 * (int(time.time()) + (1 if interrupted else 3)) - 500)
            store = SQLiteStore(path, timeout=30, clock=clock)
            deferral = ProcrastinateDeferral(app)
            async with (
                local_client(provider.base_url) as client,
                Router(policy(client), store, deferral=deferral, clock=clock) as router,
            ):
                assert (await router.run(worth(10))).served
                decision = (await router.run(chat(PROMPT, output=LIMIT, id="t1"))).decision
            await store.aclose()
            assert (decision.outcome, decision.retry_after) == ("deferred", 0.5)
            if interrupted:
                await arrived(1)
            await killed(first)
        assert await jobs(server) == [("t1", "doing" if interrupted else "todo")]
        async with a_worker(*args, log=log):
            await arrived(2 if interrupted else 1)
            provider.advance()
            await eventually(succeeded)
        assert [entry.billed is not None for entry in of_the_task()] == [False] * interrupted + [True]
    # A worker logs all that it can, but for Procrastinate, which would log the arguments of its jobs.
    assert "budget_router" in log.read_text()
    assert PROMPT not in log.read_text()


async def test_a_task_waits_for_its_time_and_comes_as_it_was(server: Server, app: App) -> None:
    came: list[Task] = []
    deferral = ProcrastinateDeferral(app)

    @deferral.handler
    async def run(task: Task) -> None:
        came.append(task)

    schema = {"zebra": {"type": "string"}, "a": {"type": "number"}}
    task = Task.response(
        input="nul \x00, half a pair \ud800, ünï",
        text={"format": schema},
        task_class="later",
        labels={"user": "bob"},
        value=0.1,
    )
    await deferral.defer(chat(id="later"), datetime.now(UTC) + timedelta(days=1))
    await deferral.defer(task, NOW)
    await caught_up(app)
    assert came == [task]
    assert list(came[0].request["text"]["format"]) == ["zebra", "a"]  # a model writes in the order of the schema
    assert await jobs(server) == [("later", "todo"), (task.id, "succeeded")]


async def test_what_is_deferred_twice_waits_once_and_may_be_deferred_again_while_it_runs(server: Server, app: App) -> None:
    runs: list[str] = []
    deferral = ProcrastinateDeferral(app)

    @deferral.handler
    async def run(task: Task) -> None:
        runs.append(task.id)
        if len(runs) == 1:
            await deferral.defer(task, datetime.now(UTC) + timedelta(days=1))

    for _ in range(2):
        await deferral.defer(chat(id="t1"), NOW)
    assert await jobs(server) == [("t1", "todo")]
    await caught_up(app)
    assert await jobs(server) == [("t1", "succeeded"), ("t1", "todo")]
    assert runs == ["t1"]


async def test_a_job_whose_worker_died_is_given_back_unless_its_task_was_deferred_again(server: Server, app: App) -> None:
    ran: list[str] = []
    deferral = ProcrastinateDeferral(app)

    @deferral.handler
    async def run(task: Task) -> None:
        ran.append(task.id)

    for id in ("lost", "again"):
        await deferral.defer(chat(id=id), NOW)
    # A worker that took both and is never heard of again.
    worker = await app.job_manager.register_worker()
    for _ in range(2):
        await app.job_manager.fetch_job(queues=None, worker_id=worker)
    await deferral.defer(chat(id="again"), NOW)
    await app.connector.execute_query_async("UPDATE procrastinate_workers SET last_heartbeat = 'epoch'")
    await caught_up(app)
    assert await jobs(server) == [("lost", "succeeded"), ("again", "aborted"), ("again", "succeeded")]
    assert sorted(ran) == ["again", "lost"]


async def test_a_job_whose_worker_lives_is_left_alone(server: Server, app: App) -> None:
    deferral = ProcrastinateDeferral(app)
    await deferral.defer(chat(id="t1"), NOW)
    worker = await app.job_manager.register_worker()
    await app.job_manager.fetch_job(queues=None, worker_id=worker)
    await caught_up(app)
    assert await jobs(server) == [("t1", "doing")]


async def test_a_task_that_a_stopping_worker_breaks_off_waits_again(server: Server, app: App) -> None:
    began = asyncio.Event()
    deferral = ProcrastinateDeferral(app)

    @deferral.handler
    async def run(task: Task) -> None:
        began.set()
        await asyncio.Event().wait()

    await deferral.defer(chat(id="t1"), NOW)
    working = asyncio.create_task(caught_up(app, shutdown_graceful_timeout=0))
    await began.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert await jobs(server) == [("t1", "todo")]


@pytest.mark.parametrize("reason", ["the handler raises", "there is no handler"])
async def test_a_task_whose_run_fails_is_kept_as_failed(reason: str, server: Server, app: App) -> None:
    deferral = ProcrastinateDeferral(app)
    if reason == "the handler raises":

        @deferral.handler
        async def run(task: Task) -> None:
            raise ConnectionError("no provider")

    await deferral.defer(chat(id="t1"), NOW)
    await caught_up(app)
    assert await jobs(server) == [("t1", "failed")]


async def test_a_request_that_json_cannot_write_is_refused_before_anything_is_kept(server: Server, app: App) -> None:
    clock = TestClock()
    later = TaskClass("later", when_expired="defer")
    more: dict[str, Any] = {"classes": [later], "default_class": "later", "deferral": ProcrastinateDeferral(app)}
    cap = Cap(usd="0.10", per="hour", admit_at=1, name="all")
    with LocalProvider(prices=PRICES) as provider:
        store = MemoryStore(clock=clock)
        async with bench(provider, cap, store=store, clock=clock, **more) as found, found.router.admit(worth(10)):
            decision = (await found.router.run(worth(9, metadata={"at": NOW}))).decision
    assert (decision.outcome, decision.notes) == ("refused", ("it could not be deferred (TaskError)",))
    assert await jobs(server) == []


async def test_a_database_that_is_away_is_said_in_the_decision_and_nothing_is_lost_silently(server: Server) -> None:
    closed = App(connector=PsycopgConnector(conninfo=server.dsn))
    with pytest.raises(Exception, match="App was not open"):
        await ProcrastinateDeferral(closed).defer(chat(), NOW)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(
    request=st.dictionaries(st.text(), plain, max_size=3).map(lambda found: {f"_{key}": value for key, value in found.items()}),
    labels=st.dictionaries(st.text(), st.text(), max_size=2),
    value=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    deadline=st.none() | st.floats(min_value=0, max_value=1e9),
    task_class=st.none() | st.text(min_size=1),
    kind=st.sampled_from(["chat", "response", "embedding"]),
)
def test_a_task_read_back_is_the_task_that_was_written(**facts: Any) -> None:
    task = Task(**facts)
    again = task_from_json(json.loads(json.dumps(task_to_json(task), allow_nan=False)))
    assert again == task
    assert repr(again.request) == repr(task.request)  # the order of the keys too


class Message:
    """What an object of the SDK looks like."""

    def model_dump(self) -> dict[str, str]:
        return {"role": "assistant"}


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (
            {"messages": [{}, Message()]},
            "request['messages'][1] is of type Message, which cannot be kept for later as JSON: write .model_dump() after it",
        ),
        (
            {"at": NOW},
            "request['at'] is of type datetime, which cannot be kept for later as JSON: use text, numbers, lists and dicts",
        ),
        (
            {"temperature": math.inf},
            "request['temperature'] is inf, which cannot be kept for later as JSON: use text, numbers, lists and dicts",
        ),
        ({"logit_bias": {17: 1}}, "request['logit_bias'] has a key that is no string, and so cannot be kept for later as JSON"),
    ],
)
def test_what_json_cannot_write_is_refused_by_its_place_and_not_its_value(part: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError) as raised:
        task_to_json(Task.chat(**part))
    assert str(raised.value) == sentence


def test_a_tuple_is_kept_as_a_list_as_it_is_sent() -> None:
    assert task_from_json(task_to_json(Task.chat(stop=("a", "b")))).request["stop"] == ["a", "b"]


@pytest.mark.parametrize("kept", [{}, {"id": "t1"}, task_to_json(chat()) | {"more": 1}, []])
def test_what_is_no_task_is_not_read_as_one(kept: Any) -> None:
    with pytest.raises(TaskError, match=r"a task that was kept must have id, kind, .* and no more"):
        task_from_json(kept)


def test_an_app_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a procrastinate\.App\(…\), not str"):
        ProcrastinateDeferral("postgresql://")  # type: ignore[arg-type]


def test_without_the_extra_one_sentence_says_what_to_install() -> None:
    code = "import sys; sys.modules['procrastinate'] = None; import router; import router.procrastinate"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: a ProcrastinateDeferral needs Procrastinate: pip install 'budget-router[procrastinate]'"
    )
