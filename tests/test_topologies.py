"""RedisStore where more than one server counts, or where it may do little: clusters, Sentinel, TLS, the least user."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from redis.asyncio import RedisCluster, Sentinel

from stores.base import Balance, Bucket, BudgetStore, Charge, new_id
from stores.conformance import ManualClock, StoreConformance
from stores.errors import StoreRolledBack, StoreUnavailable
from stores.redis import RedisStore
from tests.redis_cluster import SERVICE, Cluster, Watched, cluster, cut_off, has_all, until, watched
from tests.redis_server import Server, free_port, programs, running

pytestmark = pytest.mark.anyio

Answer = TypeVar("Answer")

PROGRAMS = ["valkey", *(pytest.param(name, marks=pytest.mark.apt) for name in ("redis", "redis 8"))]

DOCS = Path(__file__).parent.parent / "docs" / "redis.md"
START = 1_785_542_400_000  # 2026-08-01T00:00Z
LEASE = 60_000

numbers = itertools.count()


@pytest.fixture
def namespace() -> str:
    return f"topology{next(numbers)}"


def charge(bucket: Bucket, amount: int, line: int | None = None) -> Charge:
    return Charge(bucket, amount, line, line)


async def balance(store: RedisStore, bucket: Bucket) -> Balance:
    (found,) = await insist(store.balances, [bucket])
    return found


async def spend(store: RedisStore, bucket: Bucket, amount: int) -> None:
    id = new_id(bucket.tree)
    assert (await store.reserve(id, [[charge(bucket, amount)]], lease=LEASE)).held
    await store.settle(id, [charge(bucket, amount)])


async def insist(call: Callable[..., Awaitable[Answer]], *args: Any, **more: Any) -> Answer:
    """Make a call again, as it is, until the store carries it out; the store's own limit ends each."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await call(*args, **more)
            except StoreRolledBack:
                raise
            except StoreUnavailable:
                await asyncio.sleep(0.01)  # there are other processes to wait for


class Load:
    """Callers that hold and settle, one unit of two, one after another, and insist."""

    def __init__(self, store: RedisStore, bucket: Bucket) -> None:
        self.store = store
        self.bucket = bucket
        self.settled = 0
        self.failures: Counter[str] = Counter()
        self._stop = False

    async def _call(self) -> None:
        while not self._stop:
            id = new_id(self.bucket.tree)
            await insist(self._seen, self.store.reserve, id, [[charge(self.bucket, 2)]], lease=LEASE)
            await insist(self._seen, self.store.settle, id, [charge(self.bucket, 1)])
            self.settled += 1

    async def _seen(self, call: Callable[..., Awaitable[Any]], *args: Any, **more: Any) -> None:
        try:
            await call(*args, **more)
        except StoreUnavailable as error:
            self.failures[error.why] += 1
            raise

    async def more(self, pairs: int = 20) -> None:
        """Wait until so many more have settled."""
        wanted = self.settled + pairs
        async with asyncio.timeout(30):
            while self.settled < wanted:
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def running(self, callers: int = 4) -> AsyncIterator[None]:
        """Let them call until the block ends. Afterwards what they settled is what was counted, and nothing is held."""
        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(self._call())
            try:
                await self.more()
                yield
                await self.more()
            finally:
                self._stop = True
        assert (await balance(self.store, self.bucket))[1:3] == (0, self.settled)
        assert await insist(self.store.holds, tree=self.bucket.tree) == ()


# A cluster.


@pytest.fixture(scope="module")
def joined() -> Iterator[Cluster]:
    """Three primaries and their replicas. The tests that kill one stand last."""
    with cluster() as found:
        yield found


@pytest.fixture
async def client(joined: Cluster) -> AsyncIterator[RedisCluster]:
    async with RedisCluster("127.0.0.1", joined.alive[0].port) as found:
        yield found


def slot_of(joined: Cluster, namespace: str, tree: str) -> int:
    return joined.slot(f"{{{namespace}:{tree}}}:")


def three_trees(joined: Cluster, namespace: str) -> list[Bucket]:
    """Return a bucket of a tree on each primary."""
    found: dict[int, Bucket] = {}
    for number in itertools.count():
        tree = f"org{number}"
        found.setdefault(joined.owner(slot_of(joined, namespace, tree)).port, Bucket("all", tree=tree))
        if len(found) == 3:
            return list(found.values())
    raise AssertionError


def owner(joined: Cluster, namespace: str, bucket: Bucket) -> Server:
    return joined.owner(slot_of(joined, namespace, bucket.tree))


class _ClusterStore(RedisStore):
    """One that closes the client that it was given."""

    async def aclose(self) -> None:
        await super().aclose()
        await self._client.aclose()


class TestRedisStoreOnACluster(StoreConformance):
    calls: ClassVar[int] = 300

    @pytest.fixture(autouse=True)
    def _cluster(self, joined: Cluster, tmp_path: Path) -> None:
        self.port = joined.alive[0].port
        self.name = tmp_path.name
        self.namespaces = 0

    async def open(self, clock: ManualClock) -> BudgetStore:
        self.namespaces += 1
        return await self.again(None, clock)

    async def again(self, store: BudgetStore | None, clock: ManualClock) -> BudgetStore:
        client = RedisCluster("127.0.0.1", self.port)
        return _ClusterStore(client, namespace=f"{self.name}-{self.namespaces}", clock=clock)


async def test_clients_share_the_lines_of_trees_all_over_a_cluster(
    joined: Cluster, client: RedisCluster, namespace: str
) -> None:
    buckets = [Bucket("all", tree=f"org{number}") for number in range(30)]
    async with RedisCluster("127.0.0.1", joined.alive[1].port) as another:
        stores = [RedisStore(each, namespace=namespace) for each in (client, another)]
        asked = [
            store.reserve(new_id(bucket.tree), [[charge(bucket, 10, 70)]], lease=LEASE)
            for bucket in buckets
            for store in stores * 5
        ]
        states = [verdict.state for verdict in await asyncio.gather(*asked)]
        assert (states.count("held"), states.count("refused")) == (7 * 30, 3 * 30)
        for store in stores:
            assert [b.held for b in await store.balances(buckets)] == [70] * 30
            assert {store._server_of(b.tree) for b in buckets} == {f"127.0.0.1:{p.port}" for p in joined.primaries}
            await store.aclose()
            for bucket in buckets:
                with pytest.raises(StoreUnavailable, match="closed"):
                    await store.balances([bucket])


async def test_connections_that_the_servers_of_a_cluster_closed_are_opened_anew(
    joined: Cluster, client: RedisCluster, namespace: str
) -> None:
    store = RedisStore(client, namespace=namespace)
    buckets = [Bucket("all", tree=f"org{number}") for number in range(30)]
    for n in range(1, 4):
        await asyncio.gather(*(spend(store, bucket, 1) for bucket in buckets))
        assert [b.spent for b in await store.balances(buckets)] == [n] * 30
        for primary in joined.primaries:
            with primary.client() as admin:
                admin.client_kill_filter(_type="normal", skipme=True)
    await store.aclose()


async def test_a_server_of_a_cluster_that_evicts_is_refused_and_the_others_serve(
    joined: Cluster, client: RedisCluster, namespace: str
) -> None:
    bucket, *others = three_trees(joined, namespace)
    store = RedisStore(client, namespace=namespace)
    with owner(joined, namespace, bucket).client() as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", "100mb")
        try:
            await spend(store, others[0], 1)
            with pytest.raises(StoreUnavailable, match="maxmemory-policy allkeys-lru"):
                await spend(store, bucket, 1)
            await spend(store, others[1], 1)
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", 0)
    await spend(store, bucket, 1)
    await store.aclose()


async def test_the_address_of_one_server_of_a_cluster_is_an_answer(joined: Cluster, namespace: str) -> None:
    here, *others = three_trees(joined, namespace)
    async with RedisStore(owner(joined, namespace, here).url, namespace=namespace) as store:
        for bucket in others:
            with pytest.raises(StoreUnavailable, match=r"one server of a cluster; give the store a .*RedisCluster"):
                await store.balances([bucket])


async def test_a_tree_whose_keys_are_on_their_way_waits_and_loses_nothing(
    joined: Cluster, client: RedisCluster, namespace: str
) -> None:
    now = START
    bucket, other, _ = three_trees(joined, namespace)
    source, target = owner(joined, namespace, bucket), owner(joined, namespace, other)
    store = RedisStore(client, namespace=namespace, clock=lambda: now)
    first, second = (new_id(bucket.tree, now=START) for _ in range(2))
    await store.reserve(first, [[charge(bucket, 10)]], lease=1)
    now += 1
    await store.reserve(second, [[charge(bucket, 20)]], lease=1000)
    tried = 0
    for moved in joined.move(slot_of(joined, namespace, bucket.tree), source, target):
        if ":i:" in moved:
            # One of the two records is here and one is there, with all that leads to them. Their leases are over.
            now = START + 2000
            tried += 1
            with pytest.raises(StoreUnavailable, match="on their way to another server"):
                await store.holds(tree=bucket.tree)
            await spend(store, other, 1)
    assert tried == 2
    assert owner(joined, namespace, bucket) is target
    assert await balance(store, bucket) == Balance(bucket, 0, 0, lost=30)
    assert (await store.settle(second, [charge(bucket, 5)])).late
    assert await balance(store, bucket) == Balance(bucket, 0, 5, lost=10)
    await store.aclose()


async def test_a_slot_that_moves_there_and_back_while_calls_run_loses_and_doubles_nothing(
    joined: Cluster, client: RedisCluster, namespace: str
) -> None:
    store = RedisStore(client, namespace=namespace)
    bucket, other, _ = three_trees(joined, namespace)
    slot = slot_of(joined, namespace, bucket.tree)
    source, target = owner(joined, namespace, bucket), owner(joined, namespace, other)
    moving, staying = Load(store, bucket), Load(store, other)
    async with moving.running(), staying.running():
        for there, here in ((source, target), (target, source)):
            for _ in await asyncio.to_thread(list, joined.move(slot, there, here)):
                await asyncio.sleep(0)
            await moving.more()
    assert not staying.failures
    await store.aclose()


async def test_a_slot_that_moves_as_a_whole_is_not_noticed(joined: Cluster, client: RedisCluster, namespace: str) -> None:
    store = RedisStore(client, namespace=namespace)
    bucket, other, _ = three_trees(joined, namespace)
    slot = slot_of(joined, namespace, bucket.tree)
    source, target = owner(joined, namespace, bucket), owner(joined, namespace, other)
    load = Load(store, bucket)
    async with load.running():
        with source.client() as at:
            at.execute_command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", joined.id(target))
        await asyncio.to_thread(until, lambda: joined.owner(slot) is target)
    assert not load.failures
    await store.aclose()


async def test_a_planned_take_over_loses_nothing(joined: Cluster, client: RedisCluster, namespace: str) -> None:
    store = RedisStore(client, namespace=namespace)
    bucket, *_ = three_trees(joined, namespace)
    after = joined.other(owner(joined, namespace, bucket))
    async with Load(store, bucket).running():
        with after.client() as successor:
            successor.execute_command("CLUSTER", "FAILOVER")
        await asyncio.to_thread(until, lambda: owner(joined, namespace, bucket) is after)
    await store.aclose()


async def test_a_server_that_hangs_is_replaced_and_holds_up_no_tree_of_another(
    joined: Cluster, client: RedisCluster, namespace: str
) -> None:
    store = RedisStore(client, namespace=namespace, timeout=3)
    bucket, *others = three_trees(joined, namespace)
    loads = [Load(store, other) for other in others]
    before = owner(joined, namespace, bucket)
    after = joined.other(before)
    await spend(store, bucket, 7)
    await asyncio.to_thread(until, has_all, after, before)
    async with loads[0].running(), loads[1].running():
        before.pause()
        try:
            ids = [new_id(bucket.tree) for _ in range(10)]
            await asyncio.gather(*(insist(store.settle, id, [charge(bucket, 1)]) for id in ids))
        finally:
            before.resume()
    assert [load.failures for load in loads] == [Counter(), Counter()]
    assert await balance(store, bucket) == Balance(bucket, 0, 17)
    await asyncio.to_thread(until, has_all, before, after)  # for the tests that follow
    await store.aclose()


async def test_a_server_that_dies_is_replaced_and_nothing_is_counted_twice(
    joined: Cluster, client: RedisCluster, namespace: str
) -> None:
    store = RedisStore(client, namespace=namespace, timeout=2)
    bucket, *others = three_trees(joined, namespace)
    load = Load(store, others[0])
    before = owner(joined, namespace, bucket)
    ids = [new_id(bucket.tree) for _ in range(20)]
    await asyncio.gather(*(store.reserve(id, [[charge(bucket, 2)]], lease=LEASE) for id in ids))
    await asyncio.to_thread(until, has_all, joined.other(before), before)
    async with load.running():
        before.kill()
        for _ in "12":  # twice as if each first answer had been lost
            await asyncio.gather(*(insist(store.settle, id, [charge(bucket, 1)]) for id in ids))
        assert owner(joined, namespace, bucket) is joined.other(before)
    assert not load.failures
    assert await balance(store, bucket) == Balance(bucket, 0, 20)
    await spend(store, bucket, 1)  # nobody missed anything
    await store.aclose()


async def lose(store: RedisStore, bucket: Bucket, newcomer: RedisStore, fail_over: Callable[[], Any]) -> None:
    """Go through a loss: 40 are there, 50 more get lost; who saw them notices, and nobody else does by himself."""
    id = new_id(bucket.tree)
    await store.reserve(id, [[charge(bucket, 30)]], lease=LEASE)
    await spend(store, bucket, 50)
    await asyncio.to_thread(fail_over)
    (unknowing,) = await insist(newcomer.balances, [bucket])
    assert unknowing.spent == 40
    await spend(newcomer, bucket, 1)
    assert (await insist(store.settle, id, [charge(bucket, 20)])).late
    for witness in (store, newcomer):
        with pytest.raises(StoreRolledBack):
            await insist(spend, witness, bucket, 1)
    assert await balance(store, bucket) == Balance(bucket, 0, 61)
    await store.settle(new_id(bucket.tree), [charge(bucket, 50)])
    await newcomer.accept(tree=bucket.tree)
    for admitted in (store, newcomer):
        await spend(admitted, bucket, 1)


async def test_a_replica_without_the_last_writes_takes_over_and_is_found_out(
    joined: Cluster, client: RedisCluster, namespace: str
) -> None:
    store, newcomer = (RedisStore(client, namespace=namespace) for _ in "12")
    # A primary that was not killed yet.
    bucket, *others = (b for b in three_trees(joined, namespace) if joined.other(owner(joined, namespace, b)).process)
    before = owner(joined, namespace, bucket)
    after = joined.other(before)

    def fail_over() -> None:
        before.kill()
        assert owner(joined, namespace, bucket) is after

    await spend(store, others[0], 40)
    await spend(store, bucket, 40)
    await asyncio.to_thread(cut_off, after, before)
    await lose(store, bucket, newcomer, fail_over)
    await spend(store, others[0], 1)
    for each in (store, newcomer):
        await each.aclose()


# Sentinel.


@pytest.fixture(params=PROGRAMS)
def guarded(request: pytest.FixtureRequest) -> Iterator[Watched]:
    with watched(programs()[request.param]) as found:
        yield found


@asynccontextmanager
async def primary_of(guarded: Watched) -> AsyncIterator[Any]:
    """Open a client of whatever server Sentinel names."""
    sentinel: Any = Sentinel([("127.0.0.1", guarded.sentinel)])  # type: ignore[no-untyped-call]
    try:
        async with sentinel.master_for(SERVICE) as found:
            yield found
    finally:
        for each in sentinel.sentinels:
            await each.aclose()


async def test_a_fail_over_by_sentinel_that_loses_writes_is_found_out(guarded: Watched) -> None:
    bucket = Bucket("all")

    def fail_over() -> None:
        guarded.primary.kill()
        until(guarded.leads, guarded.replica)

    async with (
        primary_of(guarded) as client,
        primary_of(guarded) as another,
        RedisStore(client) as store,
        RedisStore(another) as newcomer,
    ):
        await spend(store, bucket, 40)
        await asyncio.to_thread(cut_off, guarded.replica, guarded.primary)
        await lose(store, bucket, newcomer, fail_over)


async def test_a_primary_that_hangs_is_replaced_by_sentinel_and_nothing_is_counted_twice(guarded: Watched) -> None:
    bucket = Bucket("all")
    async with primary_of(guarded) as client, RedisStore(client, timeout=1) as store:
        await spend(store, bucket, 7)
        await asyncio.to_thread(until, has_all, guarded.replica, guarded.primary)
        guarded.primary.pause()
        try:
            ids = [new_id() for _ in range(10)]
            for _ in "12":
                await asyncio.gather(*(insist(store.settle, id, [charge(bucket, 1)]) for id in ids))
            assert guarded.leads(guarded.replica)
        finally:
            guarded.primary.resume()
        assert await balance(store, bucket) == Balance(bucket, 0, 17)
        await spend(store, bucket, 1)


# What an operator may do against losses.


async def test_a_server_with_an_append_only_file_that_is_always_synced_comes_back_as_it_was() -> None:
    bucket = Bucket("all")
    with running("--appendonly", "yes", "--appendfsync", "always") as server:
        async with RedisStore(server.url) as store:
            await spend(store, bucket, 40)
            id = new_id()
            await store.reserve(id, [[charge(bucket, 30)]], lease=LEASE)
            server.kill()
            await asyncio.to_thread(server.start)
            assert (await store.reserve(new_id(), [[charge(bucket, 1)]], lease=LEASE)).held
            assert not (await store.settle(id, [charge(bucket, 20)])).late


async def test_a_primary_that_wants_replicas_and_has_none_is_an_answer_and_nothing_is_written() -> None:
    bucket = Bucket("all")
    with running() as server, server.client() as client:
        async with RedisStore(server.url) as store:
            await spend(store, bucket, 40)
            client.config_set("min-replicas-to-write", 1)
            for call in (lambda: spend(store, bucket, 1), store.check):
                with pytest.raises(StoreUnavailable, match="Not enough good replicas"):
                    await call()
            client.config_set("min-replicas-to-write", 0)
            assert await balance(store, bucket) == Balance(bucket, 0, 40)


# The least user, as the documentation has it.

RULE, CLUSTER_RULE = (line.split() for line in re.findall(r"^ACL SETUSER .*$", DOCS.read_text("utf-8"), re.MULTILINE))
USER, PASSWORD = RULE[2], next(word for word in RULE if word.startswith(">"))[1:]


def allowed(rule: list[str]) -> set[str]:
    """Return the commands that a rule allows."""
    return {word[1:] for word in rule if word.startswith("+")}


def used(*servers: Server) -> set[str]:
    """Return the commands that servers have carried out, as an ACL rule names them, less what needs no right or is ours."""
    found = set()
    for server in servers:
        with server.client() as client:
            stats = client.info("commandstats")
        found |= {name.removeprefix("cmdstat_") for name, stat in stats.items() if stat["calls"]}
    return found - {"auth", "hello", "client|setinfo", "config|resetstat", "script|flush", "flushall", "ping"}


def as_user(server: Server) -> str:
    return server.url.replace("//", f"//{USER}:{PASSWORD}@")


@pytest.fixture(scope="module", params=PROGRAMS)
def ruled(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with the least user."""
    with running(program=programs()[request.param]) as server:
        with server.client() as client:
            client.execute_command(*RULE)
        yield server


class TestRedisStoreOfTheLeastUser(StoreConformance):
    calls: ClassVar[int] = 300

    @pytest.fixture(autouse=True)
    def _server(self, ruled: Server) -> None:
        self.server = ruled

    async def open(self, clock: ManualClock) -> BudgetStore:
        with self.server.client() as client:
            client.flushall()  # the namespace stands in the rule
        return await self.again(None, clock)

    async def again(self, store: BudgetStore | None, clock: ManualClock) -> BudgetStore:
        return RedisStore(as_user(self.server), clock=clock)


async def go_everywhere(target: Any, forget: Callable[[], Any], tree: str) -> None:
    """Have a store send every command that it ever sends, on one tree."""
    now = START
    bucket, hour = Bucket("all", tree=tree), Bucket("hour", tree=tree, starts=START, ends=START + 3_600_000)
    async with RedisStore(target, clock=lambda: now) as store:
        lent, kept, short = (new_id(tree, now=START) for _ in "123")
        await store.reserve(lent, [[charge(bucket, 10, 100), charge(hour, 10)]], lease=1000)
        await store.reserve(kept, [[charge(bucket, 5, 100)]], lease=LEASE)
        await store.extend(kept, 1, [charge(bucket, 6, 100)])
        now += 1000
        assert await store.renew([lent, kept], lease=1000) == {lent, kept}
        now += 1000
        assert [hold.state for hold in await store.holds(tree=tree)] == ["expired", "expired"]
        assert (await store.settle(kept, [charge(bucket, 3)])).late
        await store.credit(new_id(tree, now=START), [charge(bucket, 1)])
        await store.reserve(short, [[charge(bucket, 5)]], lease=LEASE)
        await store.settle(short, [charge(bucket, 2)])
        assert await store.balances([bucket]) == (Balance(bucket, 0, 4, lost=10, credited=1),)
        now += 25 * 3_600_000  # the ended record is forgotten
        assert await store.holds(tree=tree) == ()
        await asyncio.to_thread(forget)
        with pytest.raises(StoreRolledBack):
            await store.reserve(new_id(tree, now=now), [[charge(bucket, 5)]], lease=LEASE)
        await store.accept(tree=tree)
    async with RedisStore(target) as by_the_servers_clock:
        await by_the_servers_clock.balances([bucket])


async def test_the_acl_rule_in_the_docs_names_the_commands_that_are_used_and_no_other(ruled: Server) -> None:
    with ruled.client() as client:
        client.flushall()
        client.script_flush()
        client.execute_command("CONFIG", "RESETSTAT")
        await go_everywhere(as_user(ruled), client.flushall, "")
    assert used(ruled) == allowed(RULE)


async def test_the_least_user_reaches_no_other_namespace(ruled: Server) -> None:
    async with RedisStore(as_user(ruled), namespace="budgets of others") as store:
        with pytest.raises(StoreUnavailable, match="NoPermissionError"):
            await store.check()
    with ruled.client() as client:
        assert client.keys("*others*") == []


@pytest.fixture(scope="module", params=PROGRAMS)
def ruled_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of one server with the least user."""
    with cluster(programs()[request.param], size=1) as found:
        for server in found.alive:
            with server.client() as client:
                client.execute_command(*CLUSTER_RULE)
        yield found


async def test_the_acl_rule_for_a_cluster_names_what_its_client_sends_too(ruled_cluster: Cluster) -> None:
    (server,) = ruled_cluster.primaries
    with server.client() as client:
        client.flushall()
        client.script_flush()
        client.execute_command("CONFIG", "RESETSTAT")
        async with RedisCluster("127.0.0.1", server.port, username=USER, password=PASSWORD) as user:
            await go_everywhere(user, client.flushall, "org")
    assert used(server) - {"cluster|nodes", "psync", "replconf"} == allowed(CLUSTER_RULE)


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `cert.pem`, which signs itself, and `key.pem`."""
    folder = tmp_path_factory.mktemp("tls")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    where = f"-addext subjectAltName=IP:127.0.0.1 -keyout {folder}/key.pem -out {folder}/cert.pem"
    subprocess.run([*make.split(), *where.split()], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def secret(certificate: Path) -> Iterator[Server]:
    """A server that speaks TLS on the port of its address, with the least user."""
    tls = free_port()
    ours = f"--tls-cert-file {certificate}/cert.pem --tls-key-file {certificate}/key.pem"
    options = f"--tls-port {tls} --tls-auth-clients no {ours}"
    with running(*options.split(), program=programs()["redis"]) as server:
        with server.client() as client:
            client.execute_command(*RULE)
        yield replace(server, port=tls)


def over_tls(server: Server, authority: Path) -> str:
    return as_user(server).replace("redis:", "rediss:") + f"?ssl_ca_certs={authority}"


@pytest.mark.apt
async def test_a_server_is_reached_over_tls_whoever_its_certificate_is_signed_by(secret: Server, certificate: Path) -> None:
    bucket = Bucket("all")
    for scheme in ("rediss:", "valkeys:"):
        async with RedisStore(over_tls(secret, certificate / "cert.pem").replace("rediss:", scheme)) as store:
            await asyncio.gather(*(spend(store, bucket, 1) for _ in range(300)))
            cancelled = asyncio.ensure_future(store.reserve(new_id(), [[charge(bucket, 1)]], lease=LEASE))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            cancelled.cancel()
            await store.check()
            assert await store.holds() == ()


@pytest.mark.apt
async def test_a_certificate_that_nobody_vouches_for_is_refused(secret: Server) -> None:
    async with RedisStore(as_user(secret).replace("redis:", "rediss:")) as store:
        with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await store.check()


@pytest.mark.apt
async def test_a_plain_address_of_a_tls_port_is_an_answer(secret: Server) -> None:
    async with RedisStore(as_user(secret), timeout=2) as store:
        with pytest.raises(StoreUnavailable):
            await store.check()
