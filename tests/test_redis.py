"""What RedisStore adds to the contract: a server that restarts, hangs, fills up, forgets; clients of every kind."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from stores._ops import Settle
from stores.base import MAX_AMOUNT, RETENTION, Balance, Bucket, Charge, Verdict, new_id
from stores.errors import InvalidCharge, StoreRolledBack, StoreUnavailable, TooLate
from stores.redis import RedisStore
from tests.redis_server import Server, free_port, programs, running

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
START = 1_785_542_400_000  # 2026-08-01T00:00Z
HOUR = 3_600_000
LEASE = 60_000
RUN = Bucket("run")
PROGRAMS = ["valkey", *(pytest.param(name, marks=pytest.mark.apt) for name in ("redis", "redis 8"))]

numbers = itertools.count()


def program(name: str) -> str:
    """Return the server program of that name, or skip the test."""
    found = programs().get(name)
    if found is None:
        pytest.skip(f"there is no {name}-server")
    return found


@pytest.fixture(scope="module", params=PROGRAMS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server for the tests that leave it in peace."""
    with running(program=program(request.param)) as found:
        yield found


@pytest.fixture(params=PROGRAMS)
def frail(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server for one test, which may kill it."""
    with running(program=program(request.param)) as found:
        yield found


@pytest.fixture
def namespace() -> str:
    return f"test{next(numbers)}"


def charge(amount: int, line: int | None = 100, bucket: Bucket = RUN, limit: int | None = None) -> Charge:
    return Charge(bucket, amount, line, line if limit is None else limit)


async def reserve(
    store: RedisStore, amount: int, *, id: str | None = None, line: int | None = 100, lease: int = LEASE
) -> Verdict:
    return await store.reserve(id or new_id(), [[charge(amount, line)]], lease=lease)


async def settle(store: RedisStore, amount: int) -> None:
    """Hold and settle an amount."""
    id = new_id()
    assert (await reserve(store, amount, id=id, line=None)).held
    await store.settle(id, [charge(amount, None)])


async def balance(store: RedisStore, bucket: Bucket = RUN) -> Balance:
    (found,) = await store.balances([bucket])
    return found


async def sums(store: RedisStore, bucket: Bucket = RUN) -> tuple[int, int]:
    found = await balance(store, bucket)
    return found.held, found.spent


async def restart(server: Server) -> None:
    """Kill a server and start it again. Meanwhile the loop turns, so that clients learn that their connections are closed."""
    server.kill()
    await asyncio.to_thread(server.start)


def contents(server: Server, pattern: str = "*") -> dict[str, Any]:
    """Return every key that the server has, with its value."""
    with server.client() as client:
        readers: dict[str, Callable[[str], Any]] = {
            "string": client.get,
            "hash": client.hgetall,
            "list": lambda key: client.lrange(key, 0, -1),
            "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        }
        return {str(key): readers[str(client.type(key))](key) for key in client.scan_iter(pattern)}


# Clients of every kind.


async def every_call(store: RedisStore) -> None:
    """Go through every method and every kind of answer."""
    hour = Bucket("hour", starts=START, ends=START + HOUR)
    id, other, late = new_id(now=START), new_id(now=START), new_id(now=START)
    held = await store.reserve(id, [[charge(101)], [charge(60), charge(1, None, hour)]], lease=LEASE)
    assert (held.state, held.option) == ("held", 1)
    assert held.balances == (Balance(RUN, 60), Balance(hour, 1))
    again = await store.reserve(id, [[charge(101)], [charge(60), charge(1, None, hour)]], lease=LEASE)
    assert (again.state, again.option, [b.bucket for b in again.balances]) == ("held", 1, [RUN, hour])
    refused = await store.reserve(other, [[charge(50)], [charge(41), charge(1, 0, hour)]], lease=LEASE)
    assert [[m.charge.bucket for m in option] for option in refused.misfits] == [[RUN], [RUN, hour]]
    assert refused.misfits[0][0].balance == Balance(RUN, 60, lease_ends=START + LEASE)
    stale = Bucket("hour", starts=START - HOUR, ends=START)
    assert (await store.reserve(other, [[charge(1, 1, stale)]], lease=LEASE)).state == "stale"
    assert [b.held for b in (await store.extend(id, 1, [charge(70)])).balances] == [70]
    assert (await store.extend(id, 2, [charge(101)])).state == "refused"
    assert await store.renew([id, other], lease=LEASE) == {id}
    (hold,) = await store.holds()
    assert (hold.id, hold.state, hold.charges, hold.lease_ends) == (id, "held", (charge(70),), START + LEASE)
    with pytest.raises(InvalidCharge, match="no bucket"):
        await store.settle(id, [charge(1, None, hour)])
    assert (await store.settle(id, [charge(30)])).balances == (Balance(RUN, 0, 30),)
    assert (await store.reserve(id, [[charge(1)]], lease=LEASE)).state == "gone"
    with pytest.raises(InvalidCharge, match="has spent 30"):
        await store.credit(late, [charge(31)])
    assert (await store.credit(late, [charge(10)])).balances == (Balance(RUN, 0, 20, credited=10),)
    with pytest.raises(TooLate):
        await store.settle(new_id(now=START - RETENTION - 1), [charge(1)])
    assert not (await store.check()).rolled_back


KINDS: dict[str, Callable[[Server], Any]] = {
    "address": lambda server: server.url,
    "valkey address": lambda server: server.url.replace("redis:", "valkey:"),
    "address with protocol 3": lambda server: f"{server.url}?protocol=3",
    "default client": lambda server: Redis(port=server.port),
    "decoding client": lambda server: Redis(port=server.port, decode_responses=True),
    "protocol 2": lambda server: Redis(port=server.port, protocol=2),
    "protocol 3 decoding": lambda server: Redis(port=server.port, protocol=3, decode_responses=True),
    "one connection": lambda server: Redis(port=server.port, single_connection_client=True),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_client_gets_the_same_answers(server: Server, namespace: str, kind: str) -> None:
    client = KINDS[kind](server)
    async with RedisStore(client, namespace=namespace, clock=lambda: START) as store:
        await every_call(store)
    if not isinstance(client, str):
        assert await client.ping()  # it is its owner's to close
        await client.aclose()


async def test_a_client_that_was_given_keeps_its_connections(server: Server, namespace: str) -> None:
    async with Redis(port=server.port) as client:
        with server.client() as watch:
            async with RedisStore(client, namespace=namespace) as store:
                await settle(store, 1)
                before = {one["id"] for one in watch.client_list()}
            assert {one["id"] for one in watch.client_list()} >= before


async def test_a_unix_socket_serves(tmp_path_factory: pytest.TempPathFactory, namespace: str) -> None:
    path = tmp_path_factory.mktemp("s") / "s"
    with running("--unixsocket", str(path)):
        async with RedisStore(f"unix://{path}", namespace=namespace) as store:
            assert (await reserve(store, 60)).held


def test_a_client_of_another_kind_is_refused() -> None:
    for client in (redis.Redis(), None, 7):
        with pytest.raises(TypeError, match=r"client from redis\.asyncio"):
            RedisStore(client)  # type: ignore[arg-type]


def test_an_address_of_another_kind_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match=r"'http'; write redis://") as refused:
        RedisStore("http://user:hunter2@localhost")
    assert "hunter2" not in str(refused.value)


def test_a_repr_shows_no_password() -> None:
    assert repr(RedisStore("redis://user:hunter2@localhost", namespace="n")) == "<RedisStore namespace='n'>"


async def test_an_own_client_is_closed(server: Server, namespace: str) -> None:
    with server.client() as watch:
        before = len(watch.client_list())
        store = RedisStore(server.url, namespace=namespace)
        await asyncio.gather(*(settle(store, 1) for _ in range(300)))
        assert len(watch.client_list()) > before
        await store.aclose()
        await store.aclose()
        while len(watch.client_list()) > before:
            await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.check()


async def test_ten_thousand_at_once_on_a_default_client_meet_no_error(server: Server, namespace: str) -> None:
    async with Redis(port=server.port) as client:
        store = RedisStore(client, namespace=namespace, timeout=30)
        verdicts = await asyncio.gather(*(reserve(store, 1, line=6000) for _ in range(10_000)))
        assert [v.state for v in verdicts].count("held") == 6000
        assert await sums(store) == (6000, 0)
        await store.aclose()


async def test_a_hundred_trees_at_once_need_few_connections(server: Server, namespace: str) -> None:
    pool = redis.asyncio.ConnectionPool(port=server.port, max_connections=2)
    async with Redis.from_pool(pool) as client:
        store = RedisStore(client, namespace=namespace)
        buckets = [Bucket("all", tree=f"org {i}") for i in range(300)]
        asked = [store.reserve(new_id(b.tree), [[charge(i, None, b)]], lease=LEASE) for i, b in enumerate(buckets)]
        assert {v.state for v in await asyncio.gather(*asked)} == {"held"}
        assert [b.held for b in await store.balances(buckets)] == list(range(300))
        await store.aclose()


# A cluster.


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Server]]:
    """Three servers that share the slots."""
    buses = [free_port() for _ in range(3)]  # a port of its own each: the default, 10,000 above the first, may not exist
    options = [("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", str(bus)) for bus in buses]
    with running(*options[0]) as a, running(*options[1]) as b, running(*options[2]) as c:
        servers = [a, b, c]
        for server, first, last in ((a, 0, 5460), (b, 5461, 10922), (c, 10923, 16383)):
            with server.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
                if server is not a:
                    client.execute_command("CLUSTER MEET", "127.0.0.1", a.port, buses[0])
        for server in servers:
            with server.client() as client:
                while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    time.sleep(0.01)
        yield servers


async def test_a_cluster_gets_the_same_answers(cluster: list[Server], namespace: str) -> None:
    async with RedisCluster("127.0.0.1", cluster[0].port) as client:
        store = RedisStore(client, namespace=namespace, clock=lambda: START)
        await every_call(store)
        await store.aclose()
        assert await client.ping()


async def test_trees_spread_over_a_cluster_and_travel_in_one_batch(cluster: list[Server], namespace: str) -> None:
    async with RedisCluster("127.0.0.1", cluster[0].port) as client:
        store = RedisStore(client, namespace=namespace)
        buckets = [Bucket("all", tree=f"org {i}") for i in range(50)]
        for n in range(1, 3):
            for server in cluster:
                with server.client() as node:
                    node.script_flush()
            asked = [store.reserve(new_id(b.tree), [[charge(10, 20, b)]], lease=LEASE) for b in buckets]
            assert {v.state for v in await asyncio.gather(*asked)} == {"held"}
            assert [b.held for b in await store.balances(buckets)] == [10 * n] * 50
        assert all(contents(server, f"{{{namespace}:*") for server in cluster)
        await store.aclose()


async def test_a_cluster_with_a_dead_node_is_an_answer(cluster: list[Server], namespace: str) -> None:
    """Stands last: it kills the node."""
    async with RedisCluster("127.0.0.1", cluster[0].port) as client:
        store = RedisStore(client, namespace=namespace, timeout=1)
        await store.check()
        buckets = [Bucket("all", tree=f"org {i}") for i in range(20)]
        cluster[2].kill()
        asked = [store.reserve(new_id(b.tree), [[charge(10, 20, b)]], lease=LEASE) for b in buckets]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert any(isinstance(answer, StoreUnavailable) for answer in answers)
        assert all(isinstance(answer, StoreUnavailable | Verdict) for answer in answers)
        await store.aclose()


# Names.


async def test_odd_bucket_names_never_meet(server: Server, namespace: str) -> None:
    odd = ["", "=", "-", " ", "a b", "a}b{c:d\n", '"', "\\", "\ud800", "\0", "é", "%", "%25", "x" * 10_000, "x" * 10_001]
    buckets = [Bucket(name) for name in odd]
    async with RedisStore(server.url, namespace=namespace) as store:
        ids = [new_id() for _ in buckets]
        for n, (id, bucket) in enumerate(zip(ids, buckets, strict=True), start=1):
            assert (await store.reserve(id, [[charge(n, None, bucket)]], lease=LEASE)).balances == (Balance(bucket, n),)
        assert [b.held for b in await store.balances(buckets)] == list(range(1, len(odd) + 1))
        assert {h.charges[0].bucket.name for h in await store.holds()} == set(odd)
        for id, bucket in zip(ids, buckets, strict=True):
            assert (await store.settle(id, [charge(1, None, bucket)])).counted
        assert [await sums(store, bucket) for bucket in buckets] == [(0, 1)] * len(odd)


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("a:b", "a"), ("a}", "a"), ("", ":")])
async def test_two_namespaces_never_meet(server: Server, namespace: str, one: str, other: str) -> None:
    async with (
        RedisStore(server.url, namespace=namespace + one) as a,
        RedisStore(server.url, namespace=namespace + other) as b,
    ):
        id = new_id()
        assert (await reserve(a, 60, id=id)).held
        assert (await reserve(b, 60, id=id)).held
        await a.release(id)
        assert (await sums(a), await sums(b)) == ((0, 0), (60, 0))


async def test_every_key_of_a_tree_has_one_hash_tag(server: Server, namespace: str) -> None:
    async with RedisStore(server.url, namespace=namespace) as store:
        odd = "a}b{c:d\n"
        id = new_id(odd)
        await store.reserve(id, [[charge(5, None, Bucket(odd, tree=odd))]], lease=LEASE)
        await store.release(id)
    keys = contents(server, f"*{namespace}*")
    assert {key[: key.index("}") + 1] for key in keys} == {f"{{{namespace}:a%7Db%7Bc%3Ad%0A}}"}
    assert all(key.startswith("{") for key in keys)


# Numbers.


async def test_sums_around_two_to_the_53_are_exact_within_one_batch_and_between_two(server: Server, namespace: str) -> None:
    async with RedisStore(server.url, namespace=namespace) as store:
        amounts = [MAX_AMOUNT, MAX_AMOUNT, 1, MAX_AMOUNT - 1, 3]
        settled = await asyncio.gather(*(store.settle(new_id(), [charge(a)]) for a in amounts))
        assert [s.balances[0].spent for s in settled] == list(itertools.accumulate(amounts))
        assert (await reserve(store, 1, line=MAX_AMOUNT)).misfits[0][0].balance.spent == sum(amounts)
        other = Bucket("other")
        for n, a in enumerate(amounts, start=1):
            await store.settle(new_id(), [charge(a, None, other)])
            assert await sums(store, other) == (0, sum(amounts[:n]))
        credits = [MAX_AMOUNT, MAX_AMOUNT, MAX_AMOUNT - 1]
        asked = [
            *(store.credit(new_id(), [charge(a)]) for a in credits),
            reserve(store, MAX_AMOUNT - 3, line=MAX_AMOUNT),  # 4 are spent by now
            reserve(store, MAX_AMOUNT - 4, line=MAX_AMOUNT),
            reserve(store, 1, line=MAX_AMOUNT),
        ]
        *_, over, fits, full = await asyncio.gather(*asked)
        assert [v.state for v in (over, fits, full) if isinstance(v, Verdict)] == ["refused", "held", "refused"]
        assert await balance(store) == Balance(
            RUN, MAX_AMOUNT - 4, 4, credited=sum(credits), lease_ends=(await balance(store)).lease_ends
        )


async def test_random_large_amounts_add_up(server: Server, namespace: str) -> None:
    draw = random.Random(7)
    async with RedisStore(server.url, namespace=namespace) as store:
        spent = 0
        for _ in range(10):
            ids = [new_id() for _ in range(20)]
            held = [draw.randrange(MAX_AMOUNT) for _ in ids]
            await asyncio.gather(*(reserve(store, h, id=id, line=None) for id, h in zip(ids, held, strict=True)))
            assert await sums(store) == (sum(held), spent)
            paid = [draw.randrange(MAX_AMOUNT) for _ in ids]
            await asyncio.gather(*(store.settle(id, [charge(p)]) for id, p in zip(ids, paid, strict=True)))
            spent += sum(paid)
            assert await sums(store) == (0, spent)


async def test_what_would_not_fit_into_a_counter_is_refused_whole(server: Server, namespace: str) -> None:
    async with RedisStore(server.url, namespace=namespace) as store:
        full = 2**61 - MAX_AMOUNT
        await asyncio.gather(*(store.settle(new_id(), [charge(MAX_AMOUNT)]) for _ in range(full // MAX_AMOUNT)))
        other = Bucket("other")
        with pytest.raises(InvalidCharge, match=r"2\*\*61"):
            await store.settle(new_id(), [charge(1, None, other), charge(MAX_AMOUNT)])
        assert (await reserve(store, MAX_AMOUNT, line=None)).state == "refused"
        assert (await sums(store), await sums(store, other)) == ((0, full), (0, 0))


# Leases and lifetimes.


async def test_many_ended_leases_are_all_ended_before_a_reserve(server: Server, namespace: str) -> None:
    now = START
    async with RedisStore(server.url, namespace=namespace, clock=lambda: now) as store:
        await asyncio.gather(*(reserve(store, 1, id=new_id(now=START), line=None) for _ in range(1100)))
        now += LEASE
        verdict = await reserve(store, 100, id=new_id(now=START))
        assert verdict.balances == (Balance(RUN, 100, lost=1100),)
        assert len(await store.holds(limit=2000)) == 1101


async def test_a_bucket_never_expires_while_it_holds(server: Server, namespace: str) -> None:
    hour = Bucket("hour", starts=START, ends=START + HOUR)
    async with RedisStore(server.url, namespace=namespace, clock=lambda: START) as store:
        with server.client() as look:

            def lives() -> list[int]:
                return [int(look.pttl(f"{{{namespace}:}}:b:{name}")) for name in ("run", "hour")]

            both = [charge(5), charge(5, None, hour)]
            for _ in range(2):
                id = new_id(now=START)
                await store.reserve(id, [both], lease=LEASE)
                assert lives() == [-1, -1]
                await store.settle(id, both)
                run, of_hour = lives()
                assert 29 * RETENTION < run <= 30 * RETENTION
                assert RETENTION < of_hour <= RETENTION + HOUR + LEASE
            closed = int(look.pttl(f"{{{namespace}:}}:i:{id[-32:]}"))
            assert RETENTION - LEASE < closed <= RETENTION + 1
            ahead = new_id(now=START + HOUR)  # by a clock ahead of the store's: forgotten sooner, it could count twice
            await store.release(ahead)
            assert int(look.pttl(f"{{{namespace}:}}:i:{ahead[-32:]}")) > RETENTION + HOUR - LEASE


async def test_the_end_of_a_lease_is_not_undone_in_a_bucket_that_somebody_deleted(server: Server, namespace: str) -> None:
    now = START
    async with RedisStore(server.url, namespace=namespace, clock=lambda: now) as store:
        ids = [new_id(now=START) for _ in range(2)]
        for id in ids:
            await store.reserve(id, [[charge(10)]], lease=LEASE, on_lease_end="charge")
        now += LEASE
        assert await balance(store) == Balance(RUN, 0, 20, 20)
        with server.client() as client:
            client.delete(f"{{{namespace}:}}:b:run")
        assert (await store.settle(ids[0], [charge(7)])).late
        assert await balance(store) == Balance(RUN, 0, 7)


async def test_an_expired_record_is_forgotten_with_its_key(server: Server, namespace: str) -> None:
    now = START
    async with RedisStore(server.url, namespace=namespace, clock=lambda: now) as store:
        await asyncio.gather(*(reserve(store, 1, id=new_id(now=START)) for _ in range(3)))
        now += LEASE
        assert [h.state for h in await store.holds()] == ["expired"] * 3
        now += RETENTION + 1
        assert await store.holds() == ()
        assert [key for key in contents(server, f"*{namespace}*") if ":i:" in key or key.endswith(":x")] == []
        assert (await balance(store)).lost == 3


async def test_expired_records_are_forgotten_while_others_expire(server: Server, namespace: str) -> None:
    now = START
    async with RedisStore(server.url, namespace=namespace, clock=lambda: now) as store:
        for _ in range(3):
            id = new_id(now=now)
            await reserve(store, 1, id=id)
            now += LEASE
            await store.check()
            now += RETENTION + 1
        left = contents(server, f"{{{namespace}:*:x")
        assert [member for members in left.values() for member, _ in members] == [id[-32:]]


async def test_the_first_lease_end_is_that_of_the_shortest_lease_of_a_batch(server: Server, namespace: str) -> None:
    async with RedisStore(server.url, namespace=namespace, clock=lambda: START) as store:
        asked = [reserve(store, 50, id=new_id(now=START), lease=lease) for lease in (LEASE, 1000, LEASE)]
        *_, refused = await asyncio.gather(*asked)
        assert refused.misfits[0][0].balance.lease_ends == START + 1000
        assert (await balance(store)).lease_ends == START + 1000


async def test_who_reads_sees_all_that_the_store_was_asked_before(server: Server, namespace: str) -> None:
    gate = asyncio.Event()

    class Slow(RedisStore):
        async def _evaluate(self, runs: Any) -> list[Any]:
            if any(isinstance(op, Settle) for run in runs for op in run.ops):
                await gate.wait()
            return await super()._evaluate(runs)

    async with Slow(server.url, namespace=namespace) as store:
        await store.check()
        settling = asyncio.ensure_future(store.settle(new_id(), [charge(30)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reading = asyncio.ensure_future(sums(store))
        for _ in range(50):
            await asyncio.sleep(0)
        gate.set()
        assert await reading == (0, 30)
        await settling
        assert not store._under_way


# A server that forgets.


async def test_a_flushed_script_is_loaded_again(server: Server, namespace: str) -> None:
    async with RedisStore(server.url, namespace=namespace) as store:
        trees = [Bucket("all", tree=tree) for tree in ("", "a", "b")]
        with server.client() as client:
            for n in range(1, 4):
                client.script_flush()
                assert (await reserve(store, 10)).held
                client.script_flush()
                await asyncio.gather(*(store.settle(new_id(b.tree), [charge(1, None, b)]) for b in trees))
                assert [b.spent for b in await store.balances(trees)] == [n] * 3


async def test_a_server_that_came_back_empty_is_noticed_and_settles_count_until_it_is_accepted(frail: Server) -> None:
    async with RedisStore(frail.url) as store, RedisStore(frail.url) as newcomer:
        await settle(store, 40)
        id = new_id()
        await reserve(store, 30, id=id)
        await restart(frail)
        with pytest.raises(StoreRolledBack, match="call accept"):
            await reserve(store, 1)
        with pytest.raises(StoreRolledBack):
            await reserve(newcomer, 1)  # it saw nothing, but the store remembers
        assert (await store.check()).rolled_back
        assert (await store.settle(id, [charge(20)])).late
        assert await sums(store) == (0, 20)
        await newcomer.accept()
        assert (await reserve(store, 1)).held
        assert (await reserve(newcomer, 1)).held
        assert not (await store.check()).rolled_back


async def test_the_first_call_after_a_loss_may_be_the_accepting_one(frail: Server) -> None:
    async with RedisStore(frail.url) as store, RedisStore(frail.url) as other:
        await settle(store, 40)
        await settle(other, 40)
        with frail.client() as client:
            client.flushall()
        await store.accept()
        assert (await reserve(store, 1)).held
        assert (await reserve(other, 1)).held
        with frail.client() as client:
            client.flushall()
        with pytest.raises(StoreRolledBack):  # a second loss is noticed like the first
            await reserve(other, 1)


async def test_a_server_that_came_back_older_is_noticed(frail: Server) -> None:
    async with RedisStore(frail.url) as store:
        await settle(store, 40)
        with frail.client() as client:
            client.save()
        await settle(store, 50)
        assert await sums(store) == (0, 90)
        await restart(frail)
        with pytest.raises(StoreRolledBack):
            await reserve(store, 1)
        assert await sums(store) == (0, 40)
        await store.credit(new_id(), [charge(40)])
        await store.settle(new_id(), [charge(90)])
        await store.accept()
        assert (await reserve(store, 10)).held
        assert (await reserve(store, 1)).state == "refused"


async def test_a_server_that_came_back_older_after_an_acceptance_is_noticed_too(frail: Server) -> None:
    async with RedisStore(frail.url) as store:
        await settle(store, 40)
        with frail.client() as client:
            client.flushall()
            await store.accept()
            await settle(store, 1)
            client.save()
        await settle(store, 50)
        await restart(frail)
        with pytest.raises(StoreRolledBack):
            await reserve(store, 1)


async def test_an_idle_client_notices_though_others_have_written_past_what_it_saw(frail: Server) -> None:
    async with RedisStore(frail.url) as idle:
        await settle(idle, 40)
        with frail.client() as client:
            client.save()
        await settle(idle, 50)
        seen = (await idle.check()).writes
        await restart(frail)
        async with RedisStore(frail.url) as newcomer:
            while (await newcomer.check()).writes <= seen + 5:
                assert (await reserve(newcomer, 1)).held
            with pytest.raises(StoreRolledBack):
                await reserve(idle, 1)
            with pytest.raises(StoreRolledBack):
                await reserve(newcomer, 1)


@pytest.mark.parametrize("loss", ["older", "empty", "empty and busy since"])
async def test_a_client_idle_for_a_week_notices_by_the_epoch_and_its_counter(frail: Server, loss: str) -> None:
    async with RedisStore(frail.url) as idle:
        await settle(idle, 40)
        with frail.client() as client:
            client.save()
            await settle(idle, 50)
            idle._trees[""].at -= 7 * 24 * 3600  # since then its mark may have been forgotten, which proves nothing
            client.delete(*client.keys("*:c:*"))
            assert (await reserve(idle, 1)).state == "held"
            idle._trees[""].at -= 7 * 24 * 3600
            if loss != "older":
                client.flushall()
        if loss == "older":
            await restart(frail)
        if loss == "empty and busy since":
            async with RedisStore(frail.url) as newcomer:
                while (await newcomer.check()).writes <= idle._trees[""].seen:
                    assert (await reserve(newcomer, 1)).held
        with pytest.raises(StoreRolledBack):
            await reserve(idle, 1)


async def test_clients_that_take_turns_suspect_nothing(server: Server, namespace: str) -> None:
    stores = [RedisStore(server.url, namespace=namespace) for _ in range(3)]
    for turn in range(30):
        store = stores[turn % 3]
        if turn == 15:
            await store.accept()
        await asyncio.gather(*(settle(store, 1) for _ in range(20)))
    assert await sums(stores[0]) == (0, 600)
    for store in stores:
        assert not (await store.check()).rolled_back
        await store.aclose()


async def test_a_lost_tree_is_no_other_trees_loss(server: Server, namespace: str) -> None:
    async with RedisStore(server.url, namespace=namespace) as store:
        lost, kept = Bucket("all", tree="lost org"), Bucket("all", tree="kept org")
        for bucket in (lost, kept):
            await store.settle(new_id(bucket.tree), [charge(1, None, bucket)])
        with server.client() as client:
            client.delete(*client.keys(f"{{{namespace}:lost*"))
        with pytest.raises(StoreRolledBack, match="'lost org'"):
            await store.reserve(new_id("lost org"), [[charge(1, None, lost)]], lease=LEASE)
        assert (await store.reserve(new_id("kept org"), [[charge(1, None, kept)]], lease=LEASE)).held
        await store.accept(tree="lost org")
        assert (await store.reserve(new_id("lost org"), [[charge(1, None, lost)]], lease=LEASE)).held


# A server that fails.


async def test_a_dead_server_is_an_answer_and_the_store_works_when_it_is_back(frail: Server) -> None:
    async with RedisStore(frail.url) as store:
        await settle(store, 40)
        with frail.client() as client:
            client.save()
        frail.kill()
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="the redis store is unavailable"):
                await store.settle(new_id(), [charge(1)])
        await asyncio.to_thread(frail.start)
        assert (await reserve(store, 60)).held
        assert await sums(store) == (60, 40)


async def test_a_server_that_hangs_is_an_answer_and_what_it_was_sent_is_unknown_not_undone(frail: Server) -> None:
    async with RedisStore(frail.url, timeout=1) as store:
        await store.check()
        frail.pause()
        id = new_id()
        with pytest.raises(StoreUnavailable, match=r"did not answer within 1 s"):
            await reserve(store, 60, id=id)
        with pytest.raises(StoreUnavailable):
            await store.check()
        frail.resume()
        while True:
            try:
                again = await reserve(store, 60, id=id)
                break
            except StoreUnavailable:
                await asyncio.sleep(0)
        assert (again.state, again.balances[0].held) == ("held", 60)
        assert (await store.settle(id, [charge(5)])).balances == (Balance(RUN, 0, 5),)


async def test_a_caller_cancelled_while_the_server_hangs_leaves_no_hold(frail: Server) -> None:
    async with RedisStore(frail.url) as store:
        await store.check()
        frail.pause()
        caller = asyncio.ensure_future(reserve(store, 60))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled()
        frail.resume()
        await store.check()
        assert await sums(store) == (0, 0)
        assert await store.holds() == ()


async def test_a_replica_is_refused_and_nothing_is_written(frail: Server) -> None:
    async with RedisStore(frail.url) as store:
        await settle(store, 40)
        with frail.client() as client:
            client.replicaof("127.0.0.1", 1)
            for call in (store.check, lambda: reserve(store, 1), lambda: store.balances([RUN])):
                with pytest.raises(StoreUnavailable, match="read-only replica"):
                    await call()
            client.replicaof("NO", "ONE")
        assert (await reserve(store, 60)).held
        assert await sums(store) == (60, 40)


async def test_a_full_server_is_an_answer_and_nothing_is_half_written(frail: Server) -> None:
    async with RedisStore(frail.url) as store:
        hour = Bucket("hour", starts=START, ends=2 * START)
        held = new_id()
        both = [charge(10), charge(10, None, hour)]
        assert (await store.reserve(held, [both], lease=LEASE)).held
        await reserve(store, 1, lease=1)
        with frail.client() as client:
            client.config_set("maxmemory", 1)
            before = contents(frail)
            asked: list[Callable[[], Any]] = [
                lambda: store.reserve(new_id(), [both], lease=LEASE),
                lambda: store.settle(held, both),
                lambda: store.extend(held, 1, [charge(20)]),
                lambda: store.renew([held], lease=LEASE),
                lambda: store.credit(new_id(), []),
                store.check,
            ]
            for call in asked:
                with pytest.raises(StoreUnavailable, match="memory is full"):
                    await call()
            assert contents(frail) == before
            client.config_set("maxmemory", 0)
        assert (await store.settle(held, both)).counted
        assert (await sums(store), await sums(store, hour)) == ((0, 10), (0, 10))


async def test_a_key_that_is_not_ours_stops_a_call_before_its_first_write(server: Server, namespace: str) -> None:
    async with RedisStore(server.url, namespace=namespace) as store:
        await settle(store, 40)
        other = Bucket("other")
        with server.client() as client:
            key = f"{{{namespace}:}}:b:other"
            spoils: list[Callable[[], Any]] = [lambda: client.rpush(key, "x"), lambda: client.hset(key, "h", "1e3")]
            for spoil in spoils:
                client.delete(key)
                spoil()
                before = contents(server, f"*{namespace}*")
                with pytest.raises(StoreUnavailable, match=r"WRONGTYPE|b:other holds something else"):
                    await store.reserve(new_id(), [[charge(1), charge(1, None, other)]], lease=LEASE)
                assert contents(server, f"*{namespace}*") == before
        assert await sums(store) == (0, 40)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_evicts_is_refused_until_it_does_not(frail: Server, policy: str) -> None:
    with frail.client() as client:
        client.config_set("maxmemory-policy", policy)
        async with RedisStore(frail.url, namespace="unbounded") as store:
            assert (await reserve(store, 1)).held  # without a bound nothing is evicted
        client.config_set("maxmemory", "100mb")
        async with RedisStore(frail.url) as store:
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match=f"maxmemory-policy {policy} .* set maxmemory-policy to noeviction"):
                    await reserve(store, 1)
            client.config_set("maxmemory-policy", "noeviction")
            assert (await reserve(store, 1)).held


async def test_who_may_ask_neither_info_nor_config_is_warned_once(frail: Server, caplog: pytest.LogCaptureFixture) -> None:
    with frail.client() as client:
        client.execute_command("ACL", "SETUSER", "plain", "on", ">secret", "~*", "+@all", "-info", "-config")
    with caplog.at_level(logging.WARNING, logger="stores.redis"):
        async with RedisStore(f"redis://plain:secret@127.0.0.1:{frail.port}") as store:
            for _ in range(3):
                assert (await reserve(store, 1)).held
    assert [record.message for record in caplog.records] == [
        "the redis store may ask neither INFO nor CONFIG: make sure that maxmemory-policy is noeviction"
    ]


async def test_a_wrong_password_is_an_answer_that_does_not_show_it(server: Server) -> None:
    async with RedisStore(f"redis://nobody:hunter2@127.0.0.1:{server.port}") as store:
        with pytest.raises(StoreUnavailable) as refused:
            await store.check()
    assert "hunter2" not in str(refused.value)


# Replies that are lost.


class Line:
    """A line between a client and a server. While `losses` are left, a reply to a script is lost and the line breaks."""

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.port = 0
        self.losses = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        below, above = await asyncio.open_connection("127.0.0.1", self.server_port)
        try:
            while request := await reader.read(1 << 20):
                above.write(request)
                reply = await below.read(1 << 20)
                if b"EVAL" in request and self.losses:
                    self.losses -= 1
                    return
                writer.write(reply)
        finally:
            above.close()
            writer.close()

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


async def test_a_call_whose_reply_was_lost_counts_once_when_it_is_made_again(server: Server, namespace: str) -> None:
    async with (
        Line(server.port).open() as line,
        RedisStore(f"redis://127.0.0.1:{line.port}", namespace=namespace) as store,
    ):
        await store.check()

        async def twice(call: Callable[[], Any]) -> Any:
            line.losses = 2  # the store itself sends once more
            with pytest.raises(StoreUnavailable):
                await call()
            return await call()

        id, other = new_id(), new_id()
        assert (await twice(lambda: reserve(store, 60, id=id))).balances[0].held == 60
        assert (await twice(lambda: store.extend(id, 1, [charge(70)]))).balances[0].held == 70
        assert await twice(lambda: store.renew([id], lease=LEASE)) == {id}
        assert (await twice(lambda: store.settle(id, [charge(30)]))).balances == (Balance(RUN, 0, 30),)
        assert (await twice(lambda: store.credit(other, [charge(10)]))).balances == (Balance(RUN, 0, 20, credited=10),)
        await twice(store.accept)
        assert (await reserve(store, 80)).held


async def test_a_client_that_sends_again_by_itself_counts_once(server: Server, namespace: str) -> None:
    async with Line(server.port).open() as line:
        client = Redis(port=line.port, retry=Retry(NoBackoff(), 3))
        store = RedisStore(client, namespace=namespace)
        id = new_id()
        line.losses = 2
        assert (await reserve(store, 60, id=id)).balances[0].held == 60
        line.losses = 2
        await store.settle(id, [charge(30)])
        line.losses = 2
        await store.accept()
        assert await sums(store) == (0, 30)
        assert not (await store.check()).rolled_back
        await store.aclose()
        await client.aclose()


# Many processes; loops and forks.


PROCESS = """
import asyncio, sys
from stores.base import Bucket, Charge, new_id
from stores.redis import RedisStore

async def main():
    async with RedisStore(sys.argv[1], namespace=sys.argv[2], timeout=30) as store:
        await store.check()
        print("ready", flush=True)
        sys.stdin.readline()
        bucket = Bucket("run")
        asked = [[[Charge(bucket, 10, 1000, 1000)]]] * 50
        verdicts = await asyncio.gather(*(store.reserve(new_id(), options, lease=60_000) for options in asked))
        print(sum(v.held for v in verdicts))

asyncio.run(main())
"""


async def test_of_four_processes_with_fifty_each_exactly_as_many_are_held_as_fit(server: Server, namespace: str) -> None:
    pipe = asyncio.subprocess.PIPE
    workers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", PROCESS, server.url, namespace), stdin=pipe, stdout=pipe, cwd=ROOT
        )
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"ready\n"
    held = [int(out) for out, _ in await asyncio.gather(*(worker.communicate(b"go\n") for worker in workers))]
    assert sum(held) == 100
    async with RedisStore(server.url, namespace=namespace) as store:
        assert await sums(store) == (1000, 0)


def test_a_second_loop_gets_one_clear_answer(server: Server, namespace: str) -> None:
    store = RedisStore(server.url, namespace=namespace)

    async def first() -> None:
        await store.check()
        await store._client.aclose()  # or its connection would outlive its loop

    asyncio.run(first())
    with pytest.raises(StoreUnavailable, match="another event loop"):
        asyncio.run(store.check())


FORK = """
import asyncio, os, sys
from stores.errors import StoreUnavailable
from stores.redis import RedisStore

async def child(store):
    try:
        await store.check()
    except StoreUnavailable as error:
        print(error, flush=True)
    await store.aclose()

async def main():
    async with RedisStore(sys.argv[1], namespace=sys.argv[2]) as store:
        await store.check()
        pid = os.fork()
        if pid == 0:
            asyncio.run(child(store))
            os._exit(0)
        os.waitpid(pid, 0)
        print((await store.check()).rolled_back)

asyncio.run(main())
"""


async def test_a_forked_child_gets_one_clear_answer_and_the_parent_goes_on(server: Server, namespace: str) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", FORK, server.url, namespace), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    out, _ = await worker.communicate()
    assert out.decode().splitlines() == [
        "the redis store is unavailable: it belongs to another event loop; make one store per loop",
        "False",
    ]
