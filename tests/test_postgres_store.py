"""The PostgreSQL store of the examples: the whole contract, and what a server, a wire and other processes add to it."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from examples.postgres_store import PostgresStore
from stores.base import MAX_AMOUNT, RETENTION, Bucket, BudgetStore, Charge, Verdict, new_id
from stores.conformance import ManualClock, StoreConformance
from stores.errors import InvalidCharge, StoreRolledBack, StoreUnavailable
from tests.postgres_server import Server, running

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
LEASE = 60_000
RUN = Bucket("run")
TABLES = ("tree", "client", "bucket", "entry")

schemas = (f"test{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server for the whole module; each test takes a schema of its own."""
    with running() as found:
        yield found


@pytest.fixture
def schema() -> str:
    return next(schemas)


class TestPostgresStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.dsn = server.dsn

    async def open(self, clock: ManualClock) -> BudgetStore:
        self.schema = next(schemas)
        return PostgresStore(self.dsn, schema=self.schema, clock=clock)

    async def again(self, store: BudgetStore, clock: ManualClock) -> BudgetStore | None:
        return PostgresStore(self.dsn, schema=self.schema, clock=clock)


def charge(amount: int, line: int | None = 100, bucket: Bucket = RUN) -> Charge:
    return Charge(bucket, amount, line, line)


async def reserve(store: PostgresStore, amount: int, *, id: str | None = None, line: int | None = 100) -> Verdict:
    return await store.reserve(id or new_id(), [[charge(amount, line)]], lease=LEASE)


async def sums(store: PostgresStore, bucket: Bucket = RUN) -> tuple[int, int]:
    (found,) = await store.balances([bucket])
    return found.held, found.spent


# Many processes.

PROCESS = """
import asyncio, sys
from examples.postgres_store import PostgresStore
from stores.base import Bucket, Charge, new_id

async def main():
    async with PostgresStore(sys.argv[1], schema=sys.argv[2], timeout=30) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        asked = [[[Charge(Bucket("run"), 10, 1000, 1000)]]] * 50
        verdicts = await asyncio.gather(*(store.reserve(new_id(), options, lease=60_000) for options in asked))
        print(sum(v.held for v in verdicts), flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""


async def process(server: Server, schema: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-W", "error", "-c", PROCESS, server.dsn, schema)
    worker = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT)
    assert await line_of(worker) == "ready"
    return worker


async def line_of(worker: asyncio.subprocess.Process) -> str:
    assert worker.stdout is not None
    return (await worker.stdout.readline()).decode().strip()


async def go(worker: asyncio.subprocess.Process) -> int:
    assert worker.stdin is not None
    worker.stdin.write(b"go\n")
    return int(await line_of(worker))


async def test_of_four_processes_that_all_make_the_tables_exactly_as_many_are_held_as_fit(server: Server, schema: str) -> None:
    workers = [await process(server, schema) for _ in range(4)]
    held = await asyncio.gather(*map(go, workers))
    assert sum(held) == 100
    async with PostgresStore(server.dsn, schema=schema) as store:
        assert await sums(store) == (1000, 0)
    for worker in workers:
        await worker.communicate(b"end\n")


async def test_what_a_killed_process_held_comes_back_after_its_lease_and_its_connection_keeps_nobody_waiting(
    server: Server, schema: str
) -> None:
    worker = await process(server, schema)
    assert await go(worker) == 50
    worker.kill()
    await worker.wait()
    async with PostgresStore(server.dsn, schema=schema) as store:
        assert await sums(store) == (500, 0)
        now = (await store.check()).now
    async with PostgresStore(server.dsn, schema=schema, clock=lambda: now + LEASE) as later:
        (balance,) = await later.balances([RUN])
        assert (balance.held, balance.spent, balance.lost) == (0, 0, 500)


async def test_two_stores_that_take_the_same_trees_in_opposite_order_never_wait_for_each_other(
    server: Server, schema: str
) -> None:
    trees = [f"tree {number}" for number in range(20)]

    async def rounds(store: PostgresStore, trees: list[str]) -> None:
        for _ in range(20):
            asked = (store.settle(new_id(tree), [charge(1, None, Bucket("x", tree))]) for tree in trees)
            assert all(settled.counted for settled in await asyncio.gather(*asked))

    async with PostgresStore(server.dsn, schema=schema) as one, PostgresStore(server.dsn, schema=schema) as other:
        await asyncio.gather(rounds(one, trees), rounds(other, trees[::-1]))
        assert [b.spent for b in await one.balances([Bucket("x", tree) for tree in trees])] == [40] * 20


# A server that is restarted, dead, kept busy, read-only.


@pytest.fixture
def frail(server: Server) -> Iterator[Server]:
    """The server, which this test may kill."""
    yield server
    if server.process is None:
        server.start()


async def test_a_restart_between_two_calls_is_not_even_noticed(frail: Server, schema: str) -> None:
    async with PostgresStore(frail.dsn, schema=schema) as store:
        id = new_id()
        assert (await reserve(store, 60, id=id)).held
        frail.kill()
        await asyncio.to_thread(frail.start)
        assert (await store.settle(id, [charge(30)])).counted
        assert await sums(store) == (0, 30)
        assert (await reserve(store, 70)).held


async def test_restarts_in_a_storm_lose_nothing_acknowledged_and_count_nothing_twice(frail: Server, schema: str) -> None:
    async with PostgresStore(frail.dsn, schema=schema, timeout=2) as store:
        await store.check()
        settled: list[int] = []

        async def until_answered(call: Callable[..., Awaitable[Any]], *args: Any, **more: Any) -> Any:
            while True:
                try:
                    return await call(*args, **more)
                except StoreUnavailable:
                    await asyncio.sleep(0.01)  # lets the server come back

        async def pairs(amount: int) -> None:
            while len(settled) < 1000:
                id = new_id()
                assert (await until_answered(reserve, store, 1000, id=id, line=None)).held
                await until_answered(store.settle, id, [charge(amount, None)])
                settled.append(amount)

        storm = asyncio.gather(*(pairs(amount) for amount in range(1, 51)))
        for part in (200, 600):
            while len(settled) < part:
                await asyncio.sleep(0)
            frail.kill()
            await asyncio.to_thread(frail.start)
        await storm
        assert await sums(store) == (0, sum(settled))
        assert await store.holds() == ()
        assert not (await store.check()).rolled_back


async def test_a_dead_server_is_an_answer_and_the_store_works_when_it_is_back(frail: Server, schema: str) -> None:
    async with PostgresStore(frail.dsn, schema=schema) as store:
        assert (await reserve(store, 60)).held
        frail.kill()
        with pytest.raises(StoreUnavailable, match="the postgres store is unavailable: "):
            await store.check()
        frail.start()
        assert await sums(store) == (60, 0)


async def test_a_server_that_never_answers_is_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with PostgresStore(f"postgresql://me@127.0.0.1:{port}/app?sslmode=disable", timeout=0.1) as store:
            with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.1 s"):
                await store.check()


@asynccontextmanager
async def locked(server: Server, schema: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """Keep every batch waiting inside the server, as a session that somebody forgot would."""
    connection = await server.connect()
    try:
        async with connection.transaction():
            await connection.execute(f'LOCK TABLE "{schema}".tree')
            yield connection
    finally:
        await connection.close()


async def test_a_lock_past_the_time_limit_is_an_answer_and_nothing_is_carried_out_afterwards(
    server: Server, schema: str
) -> None:
    async with PostgresStore(server.dsn, schema=schema) as store:
        await store.check()
        async with locked(server, schema) as other:
            async with PostgresStore(server.dsn, schema=schema, timeout=0.5) as hasty:
                with pytest.raises(StoreUnavailable, match=r"statement timeout|did not answer within 0\.5 s"):
                    await reserve(hasty, 60)
            async with asyncio.timeout(10):
                while await waiting(other):
                    pass
        assert await sums(store) == (0, 0)


async def waiting(connection: asyncpg.Connection[Any]) -> int:
    """Return how many sessions wait for a lock."""
    found: int = await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted")
    return found


async def test_a_caller_cancelled_while_the_server_is_busy_leaves_no_hold(server: Server, schema: str) -> None:
    async with PostgresStore(server.dsn, schema=schema) as store:
        await store.check()
        async with locked(server, schema) as other:
            task = asyncio.ensure_future(reserve(store, 60))
            while not await waiting(other):
                pass
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
        assert await sums(store) == (0, 0)
        assert await store.holds() == ()


async def test_a_server_that_may_only_be_read_is_an_answer(server: Server, schema: str) -> None:
    async with PostgresStore(server.dsn, schema=schema) as store:
        await store.check()
    async with PostgresStore(server.dsn + "&options=-c%20default_transaction_read_only%3Don", schema=schema) as store:
        with pytest.raises(StoreUnavailable, match="read-only"):
            await store.balances([RUN])


# Replies that are lost.


class Line:
    """A line between the store and the server. While `losses` are left, a reply to a batch is lost and the line breaks."""

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.port = 0
        self.losses = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        below, above = await asyncio.open_connection("127.0.0.1", self.server_port)
        there = asyncio.ensure_future(self._copy(reader, above))
        try:
            while reply := await below.read(1 << 20):
                if b'"answers"' in reply and self.losses:
                    self.losses -= 1
                    return
                writer.write(reply)
        finally:
            there.cancel()
            above.close()
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(1 << 20):
            writer.write(request)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Line]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)


@pytest.mark.parametrize("losses", [1, 2])
async def test_a_call_whose_reply_was_lost_counts_once_when_it_is_made_again(server: Server, schema: str, losses: int) -> None:
    async with Line(server.port).open() as line, PostgresStore(server.dsn_at(line.port), schema=schema) as store:
        await store.check()

        async def lossy(call: Callable[[], Awaitable[Any]]) -> Any:
            line.losses = losses
            if losses == 2:  # the store itself sends once more
                with pytest.raises(StoreUnavailable):
                    await call()
            answer = await call()
            assert line.losses == 0
            return answer

        id, other = new_id(), new_id()
        assert (await lossy(lambda: reserve(store, 60, id=id))).balances[0].held == 60
        assert (await lossy(lambda: store.extend(id, 1, [charge(70)]))).balances[0].held == 70
        assert await lossy(lambda: store.renew([id], lease=LEASE)) == {id}
        assert [b[1:3] for b in (await lossy(lambda: store.settle(id, [charge(30)]))).balances] == [(0, 30)]
        assert [b.spent for b in (await lossy(lambda: store.credit(other, [charge(10)]))).balances] == [20]
        await lossy(store.accept)
        assert (await reserve(store, 80)).held
        assert not (await store.check()).rolled_back


# A server that came back empty or older.


async def test_books_that_came_back_empty_are_noticed_and_settles_count_until_they_are_accepted(
    server: Server, schema: str
) -> None:
    async with PostgresStore(server.dsn, schema=schema) as store:
        id = new_id()
        assert (await reserve(store, 60, id=id)).held
        await drop(server, schema)
        with pytest.raises(StoreRolledBack, match="accept"):
            await reserve(store, 1)
        assert (await store.check()).rolled_back
        settled = await store.settle(id, [charge(30)])
        assert (settled.counted, settled.late) == (True, True)
        async with PostgresStore(server.dsn, schema=schema) as newcomer:
            with pytest.raises(StoreRolledBack):
                await reserve(newcomer, 1)
            await newcomer.accept()
        assert not (await store.check()).rolled_back
        assert (await reserve(store, 70)).held


async def drop(server: Server, schema: str) -> None:
    connection = await server.connect()
    await connection.execute(f'DROP SCHEMA "{schema}" CASCADE')
    await connection.close()


async def test_books_that_came_back_older_are_noticed_by_who_saw_more_though_others_have_written_since(
    server: Server, schema: str
) -> None:
    connection = await server.connect()
    async with (
        PostgresStore(server.dsn, schema=schema) as store,
        PostgresStore(server.dsn, schema=schema) as other,
    ):
        assert (await reserve(store, 10)).held
        assert (await reserve(other, 10)).held
        await keep(connection, schema)
        assert (await reserve(store, 10)).held
        await bring_back(connection, schema)
        for _ in range(3):
            assert (await reserve(other, 10)).held  # it saw no more than is there
        with pytest.raises(StoreRolledBack):
            await reserve(store, 10)
        with pytest.raises(StoreRolledBack):
            await reserve(other, 10)
        await store.accept()
        assert (await reserve(other, 10)).held
        assert (await reserve(store, 10)).held
        assert await sums(store) == (70, 0)
    await connection.close()


async def keep(connection: asyncpg.Connection[Any], schema: str) -> None:
    for table in TABLES:
        await connection.execute(f'CREATE TABLE "{schema}".{table}_kept AS SELECT * FROM "{schema}".{table}')  # noqa: S608


async def bring_back(connection: asyncpg.Connection[Any], schema: str) -> None:
    for table in TABLES:
        await connection.execute(f'TRUNCATE "{schema}".{table}')
        await connection.execute(f'INSERT INTO "{schema}".{table} SELECT * FROM "{schema}".{table}_kept')  # noqa: S608


@pytest.mark.parametrize("newcomer", [False, True])
async def test_a_roll_back_behind_an_acceptance_can_be_accepted(server: Server, schema: str, newcomer: bool) -> None:
    connection = await server.connect()
    async with (
        PostgresStore(server.dsn, schema=schema) as store,
        PostgresStore(server.dsn, schema=schema) as other,
    ):
        await store.check()
        await keep(connection, schema)
        await store.accept()
        await store.check()
        await bring_back(connection, schema)
        assert (await store.check()).rolled_back
        await (other if newcomer else store).accept()
        assert not (await store.check()).rolled_back
    await connection.close()


async def test_a_client_whose_mark_was_forgotten_after_a_week_takes_that_for_no_roll_back(server: Server, schema: str) -> None:
    clock = ManualClock()
    async with (
        PostgresStore(server.dsn, schema=schema, clock=clock) as store,
        PostgresStore(server.dsn, schema=schema, clock=clock) as newcomer,
    ):
        await store.check()
        clock.advance(7 * RETENTION + 1)
        await newcomer.check()  # forgets the mark
        assert not (await store.check()).rolled_back


async def test_a_lost_tree_is_no_other_trees_loss(server: Server, schema: str) -> None:
    connection = await server.connect()
    async with PostgresStore(server.dsn, schema=schema) as store:
        await store.accept(tree="a:b")
        await store.accept(tree="c")
        await connection.execute(f"DELETE FROM \"{schema}\".tree WHERE tree <> 'c'")  # noqa: S608
        asked = [store.reserve(new_id(tree), [[charge(1, 1, Bucket("x", tree))]], lease=LEASE) for tree in ("a:b", "c")]
        lost, well = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(lost, StoreRolledBack)
        assert lost.tree == "a:b"
        assert isinstance(well, Verdict)
        assert well.held
    await connection.close()


# What the books do that a small test does not meet.


async def test_all_leases_that_ended_make_room_however_many(server: Server, schema: str) -> None:
    clock = ManualClock()
    async with PostgresStore(server.dsn, schema=schema, clock=clock, timeout=30) as store:
        held = await asyncio.gather(*(reserve(store, 1, line=2500, id=new_id(now=clock.now)) for _ in range(2500)))
        assert all(verdict.held for verdict in held)
        clock.advance(LEASE)
        verdict = await reserve(store, 2500, line=2500, id=new_id(now=clock.now))
        assert [balance[1:4] for balance in verdict.balances] == [(2500, 0, 2500)]


async def test_a_debt_past_every_fixed_size_of_number_is_exact(server: Server, schema: str) -> None:
    async with PostgresStore(server.dsn, schema=schema, timeout=30) as store:
        await asyncio.gather(*(store.settle(new_id(), [charge(MAX_AMOUNT)]) for _ in range(2100)))
        assert await sums(store) == (0, 2100 * MAX_AMOUNT)
        assert (await reserve(store, 1)).state == "refused"


async def test_what_is_past_its_retention_is_deleted_by_and_by(server: Server, schema: str) -> None:
    clock = ManualClock()
    connection = await server.connect()
    async with PostgresStore(server.dsn, schema=schema, clock=clock) as store:
        hour = Bucket("hour", starts=clock.now, ends=clock.now + 3_600_000)
        await asyncio.gather(*(store.settle(new_id(now=clock.now), [charge(1, None, hour)]) for _ in range(300)))
        clock.advance(3 * RETENTION)
        for left in ((100, 0), (0, 0)):
            await store.check()
            counts = f'SELECT (SELECT count(*) FROM "{schema}".entry), (SELECT count(*) FROM "{schema}".bucket)'  # noqa: S608
            assert tuple(await connection.fetchrow(counts) or ()) == left
    await connection.close()


async def test_a_bucket_is_kept_as_long_as_an_id_that_a_clock_days_ahead_made(server: Server, schema: str) -> None:
    clock = ManualClock()
    async with PostgresStore(server.dsn, schema=schema, clock=clock) as store:
        hour = Bucket("hour", starts=clock.now, ends=clock.now + 3_600_000)
        id = new_id(now=clock.now + 3 * RETENTION)
        await store.reserve(id, [[charge(5, 100, hour)]], lease=LEASE, on_lease_end="charge")
        clock.advance(LEASE)
        await store.check()
        clock.advance(3 * RETENTION)
        await store.check()  # forgets what may be forgotten
        await store.release(id)
        (balance,) = await store.balances([hour])
        assert (balance.held, balance.spent, balance.lost) == (0, 0, 0)


async def test_bucket_names_of_every_kind_never_meet(server: Server, schema: str) -> None:
    odd = ["", "a", "a\0", "\0", "\ud800", "é", ":", "%3A", '"', "\\", "\\u0000", "{}", " ", "a ", "A"]
    # Ten thousand letters that no compression makes fit into an index.
    long = [random.Random(seed).randbytes(5_000).hex() for seed in range(2)]
    names = [*odd, *long, *(name[:-1] for name in long)]
    buckets = [Bucket(name) for name in names]
    async with PostgresStore(server.dsn, schema=schema) as store:
        for amount, bucket in enumerate(buckets, start=1):
            await store.reserve(new_id(), [[charge(amount, None, bucket)]], lease=LEASE)
        assert [b.held for b in await store.balances(buckets)] == list(range(1, len(buckets) + 1))
        assert {hold.charges[0].bucket for hold in await store.holds()} == set(buckets)


async def test_an_end_of_lease_that_is_no_such_thing_is_refused(server: Server, schema: str) -> None:
    async with PostgresStore(server.dsn, schema=schema) as store:
        with pytest.raises(InvalidCharge, match="on_lease_end"):
            await store.reserve(new_id(), [[charge(1)]], lease=LEASE, on_lease_end="keep")  # type: ignore[arg-type]


# Loops and names.


def test_a_second_loop_gets_one_clear_answer(server: Server, schema: str) -> None:
    store = PostgresStore(server.dsn, schema=schema)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(store.check())
        with pytest.raises(StoreUnavailable, match="another event loop"):
            second.run(store.check())
        second.run(store.aclose())
        first.run(store.aclose())


FORK = """
import asyncio, os, sys
from examples.postgres_store import PostgresStore
from stores.errors import StoreUnavailable

async def child(store):
    try:
        await store.check()
    except StoreUnavailable as error:
        print(error, flush=True)
    await store.aclose()

async def main():
    async with PostgresStore(sys.argv[1], schema=sys.argv[2]) as store:
        await store.check()
        pid = os.fork()
        if pid == 0:
            asyncio.run(child(store))
            os._exit(0)
        os.waitpid(pid, 0)
        print((await store.check()).rolled_back)

asyncio.run(main())
"""


async def test_a_forked_child_gets_one_clear_answer_and_the_parent_goes_on(server: Server, schema: str) -> None:
    command = (sys.executable, "-W", "error", "-c", FORK, server.dsn, schema)
    worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    out, _ = await worker.communicate()
    assert out.decode().splitlines() == [
        "the postgres store is unavailable: it belongs to another event loop; make one store per loop",
        "False",
    ]


def test_a_repr_shows_no_password() -> None:
    assert repr(PostgresStore("postgresql://me:hunter2@localhost/app")) == '<PostgresStore schema="budget_v1">'
