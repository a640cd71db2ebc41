"""A store in Redis or Valkey, shared by every machine that reaches it.

One script run carries out a whole batch on one budget tree, atomically; see `_redis.lua` for the keys and the rules. Whoever
sends a run twice changes nothing more: every operation is known by its id.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeAlias, cast

from stores._batched import BatchedStore
from stores._lanes import Lanes
from stores._ops import Balances, Check, Holds, Op, Outcome, Outcomes
from stores._redis_wire import Header, Run, Wire, tree_of
from stores.batching import Batcher
from stores.errors import StoreUnavailable

try:
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AskError,
        BusyLoadingError,
        ClusterError,
        MaxConnectionsError,
        NoScriptError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisClusterException,
        RedisError,
        ResponseError,
    )
    from redis.exceptions import ConnectionError as RedisConnectionError
except ImportError as error:
    raise ImportError("a RedisStore needs the client library: pip install 'budget-router[redis]'") from error

__all__ = ["RedisStore"]

Client: TypeAlias = "Redis | RedisCluster"

KNOWN_KEPT = 30 * 24 * 60 * 60
"""For how long, in seconds, a client relies on what it saw of a tree; the server keeps the epoch for a day more, at least."""

MOST_KNOWN = 10_000
"""Of how many trees a client remembers what it saw: of those that it used last."""

MARK_KEPT = 6 * 24 * 60 * 60
"""For how long, in seconds, a client may rely on the mark of its last write; the script keeps it for a day more."""


class RedisStore(BatchedStore):
    """Count in a Redis (7 or later) or Valkey server, or a cluster of them, under keys that begin with `{namespace:`.

    Give an address (redis://, rediss://, unix://, valkey://, valkeys://), and the store makes a client of its own and closes
    it; or give a `redis.asyncio.Redis` or `RedisCluster`, which stays yours to close. Every call is answered within `timeout`
    seconds. Time is the server's, or what `clock` returns, in milliseconds since the epoch. Connects at the first call.

    Refuses to work (`StoreUnavailable`) on a server that may evict keys. A server that came back empty or older, by a restart
    or a fail-over, is noticed per tree by every client that saw more; what no living client saw cannot be noticed. Raises
    `ValueError` for an address of another kind, and `TypeError` for a client of another kind.
    """

    name = "redis"

    def __init__(
        self,
        client_or_url: str | Client,
        *,
        namespace: str = "budget",
        timeout: float = 5.0,
        clock: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(timeout=timeout, batch=100, in_flight=2, waiting=100_000)
        self._own = isinstance(client_or_url, str)
        self._client: Any = _connect(client_or_url) if isinstance(client_or_url, str) else _checked(client_or_url)
        self._in_cluster = isinstance(self._client, RedisCluster)
        if self._in_cluster:

            def lane() -> Batcher[Op, Outcome]:
                return Batcher(self._carry_out, store="redis", size=100, in_flight=2, timeout=timeout, limit=100_000)

            self._batcher = Lanes(lane, lambda op: self._server_of(tree_of(op)))
        self._namespace = namespace
        self._timeout = timeout
        self._clock = clock
        self._wire = Wire(namespace)
        self._script = files("stores").joinpath("_redis.lua").read_text("utf-8")
        self._sha = hashlib.sha1(self._script.encode()).hexdigest()  # noqa: S324 (the name that the server gives it)
        self._trees: OrderedDict[str, _Known] = OrderedDict()
        self._under_way: dict[asyncio.Task[Any], Sequence[Op]] = {}
        self._mark = secrets.token_hex(8)
        self._runs = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keep: set[str] = set()
        """The servers that were seen not to evict."""

    def __repr__(self) -> str:
        return f"<RedisStore namespace={self._namespace!r}>"

    async def _carry_out(self, ops: Sequence[Op]) -> Outcomes:
        self._loop = asyncio.get_running_loop()
        this = cast(asyncio.Task[Any], asyncio.current_task())
        before = self._before(ops)
        self._under_way[this] = ops
        try:
            if before:
                # Two batches may be under way, on two connections. Writes may overtake each other, since an id's states
                # bear any order; who reads, sees all that this store was asked before.
                await asyncio.wait(before)
            return await (self._run_in_cluster(ops) if self._in_cluster else self._run_here(ops))
        except _FOREIGN as error:
            raise _unavailable(error) from error
        finally:
            del self._under_way[this]

    def _before(self, ops: Sequence[Op]) -> list[asyncio.Task[Any]]:
        """Return the batches under way that ask about a tree that this one reads."""
        trees = {tree_of(op) for op in ops if isinstance(op, Balances | Holds | Check)} if self._under_way else ()
        return [task for task, others in self._under_way.items() if trees and any(tree_of(op) in trees for op in others)]

    async def _run_here(self, ops: Sequence[Op]) -> Outcomes:
        if not self._keep:
            await self._refuse_eviction("", {})
        try:
            return await self._run(ops)
        except RedisConnectionError:
            # Most often the server closed a connection that lay idle, and the next one works. Whatever was carried out
            # already is known by its id.
            return await self._run(ops)

    async def _run_in_cluster(self, ops: Sequence[Op]) -> Outcomes:
        """Run them on the server of their lane; when it does not answer, ask the cluster who has taken its place."""
        await self._client.initialize()
        tree = tree_of(ops[0])
        server = self._server_of(tree)
        try:
            # A call that we end is not a failure to the client: by itself it would go on asking the server that hangs.
            async with asyncio.timeout(self._timeout / 2):
                if server not in self._keep:
                    await self._refuse_eviction(
                        server, {"target_nodes": self._client.get_node_from_key(self._wire.prefix(tree))}
                    )
                return await self._run(ops)
        except (RedisConnectionError, TimeoutError):
            await self._client.nodes_manager.initialize(last_failed_node_name=server)
            return await self._run(ops)

    def _server_of(self, tree: str) -> str:
        """Return the server of a cluster that has a tree, as far as the client knows it."""
        try:
            node = self._client.get_node_from_key(self._wire.prefix(tree))
        except RedisClusterException:
            return ""
        return str(node.name)

    async def _run(self, ops: Sequence[Op]) -> Outcomes:
        pending = self._wire.runs(ops)
        outcomes: list[Outcome] = [None] * len(ops)
        while pending:
            again = []
            for run, reply in zip(pending, await self._evaluate(pending), strict=True):
                if isinstance(reply, Exception):
                    for index in run.indexes:
                        outcomes[index] = _unavailable(reply)
                    continue
                header = self._wire.header(reply)
                self._learn(run.tree, header)
                if header.more:
                    # It ended as many leases as one run may, and nothing else: no operation meets a hold that is over.
                    again.append(run)
                    continue
                for index, outcome in zip(run.indexes, self._wire.outcomes(run.ops, reply, header), strict=True):
                    outcomes[index] = outcome
            pending = again
        return outcomes

    async def _evaluate(self, runs: Sequence[Run]) -> list[Any]:
        """Return the reply to each run; an exception is that run's own."""
        calls = [self._arguments(run) for run in runs]
        replies = await self._send("EVALSHA", self._sha, calls)
        missing = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if missing:  # the server was restarted or replaced, or its scripts were flushed; sending the text loads it
            found = await self._send("EVAL", self._script, [calls[at] for at in missing])
            for at, reply in zip(missing, found, strict=True):
                replies[at] = reply
        return replies

    async def _send(self, command: str, script: str, calls: Sequence[Sequence[str]]) -> list[Any]:
        if len(calls) == 1:
            try:
                return [await self._client.execute_command(command, script, *calls[0], **_AS_IT_IS)]
            except ResponseError as error:
                return [error]
        # One connection however many trees: a pool that raises when it is empty must not be emptied by one batch.
        pipeline = self._client.pipeline(transaction=False)
        for call in calls:
            pipeline.execute_command(command, script, *call, **_AS_IT_IS)
        replies = list(await pipeline.execute(raise_on_error=False))
        for reply in replies:
            if isinstance(reply, RedisConnectionError):  # of a cluster's pipeline, which takes it for an answer
                raise reply
        return replies

    def _arguments(self, run: Run) -> list[str]:
        prefix = self._wire.prefix(run.tree)
        keys = [f"{prefix}e", f"{prefix}l", f"{prefix}x", f"{prefix}c:{self._mark}", *run.ids, *run.buckets]
        if self._in_cluster:
            # A key that never exists: while a slot moves key by key, either side refuses a run that names a key it lacks
            # (TRYAGAIN). Else the new side would carry it out though records that nobody can name are not there yet.
            keys.append(f"{prefix}-")
        known = self._trees.get(run.tree)
        if known is not None and time.monotonic() - known.at > KNOWN_KEPT:
            del self._trees[run.tree]
            known = None
        # An epoch that no other begins with, should this run be the first of its tree.
        self._runs += 1
        head = f'"{self._mark}{self._runs:x}",'
        head += "false,0,0,0" if known is None else f'"{known.epoch}",{known.seen},{known.accepted},{known.acknowledged}'
        head += f",{'false' if self._clock is None else self._clock()},{len(run.ids)},{len(run.buckets)}"
        return [str(len(keys)), *keys, f"[{head},{run.body}]" if run.body else f"[{head}]"]

    def _learn(self, tree: str, header: Header) -> None:
        """Remember the most that was seen of a tree. Replies to runs in flight may come back out of order."""
        known = self._trees.get(tree)
        if known is None or header.accepted > known.accepted:
            self._trees[tree] = _Known(header.epoch, header.writes, header.accepted, time.monotonic())
            while len(self._trees) > MOST_KNOWN:
                self._trees.popitem(last=False)
        elif header.epoch == known.epoch and header.writes > known.seen:
            known.seen, known.at = header.writes, time.monotonic()
            self._trees.move_to_end(tree)
        # Else the server is not what it was, and until somebody accepts that, what this client saw is the evidence.

    async def _refuse_eviction(self, server: str, where: Mapping[str, Any]) -> None:
        memory = await self._memory(where)
        policy = str(memory.get("maxmemory_policy", memory.get("maxmemory-policy", "noeviction")))
        if int(memory.get("maxmemory", 0)) and policy != "noeviction":
            raise StoreUnavailable(
                "redis",
                f"its maxmemory-policy {policy} may evict what was counted; set maxmemory-policy to noeviction, "
                "or keep budgets in a server of their own",
            )
        self._keep.add(server)

    async def _memory(self, where: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a server says of its memory, or nothing when it does not say."""
        for ask, what in ((self._client.info, "memory"), (self._client.config_get, "maxmemory*")):
            with suppress(ResponseError):
                memory: Mapping[str, Any] = await ask(what, **where)
                if "maxmemory" in memory:
                    return memory
        _log.warning("the redis store may ask neither INFO nor CONFIG: make sure that maxmemory-policy is noeviction")
        return {}

    async def _close(self) -> None:
        # In another loop, or behind a fork, the connections are not ours to touch: they would be torn from under their owner.
        if not self._own or self._loop is not asyncio.get_running_loop():
            return
        with suppress(TimeoutError, *_FOREIGN):
            async with asyncio.timeout(self._timeout):
                await self._client.aclose()


@dataclass(slots=True)
class _Known:
    """The most that this client saw of one tree."""

    epoch: str
    seen: int  # the write counter of its own last run that was acknowledged: every run writes
    accepted: int  # when the epoch was accepted, in milliseconds; 0 for a first one
    at: float  # of time.monotonic(), when it was seen

    @property
    def acknowledged(self) -> int:
        """What the server must know of this client's last run; 0 when it may have forgotten it by its age."""
        return self.seen if time.monotonic() - self.at < MARK_KEPT else 0


def _connect(url: str) -> Redis:
    for ours, theirs in (("valkey://", "redis://"), ("valkeys://", "rediss://")):
        if url.startswith(ours):
            url = theirs + url.removeprefix(ours)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(
            f"a RedisStore has no use for an address that begins with {url.partition('://')[0][:20]!r}; "
            "write redis://, rediss://, unix://, valkey:// or valkeys://"
        )
    # No time-outs on the socket: the batcher's own ends a call, and redis-py then closes the connection, so that no reply is
    # left on it for another call. Protocol 2: with 3, redis-py hands out a connection that the server has closed.
    return Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=None,
        socket_connect_timeout=None,
        max_connections=8,
        protocol=2,
    )


def _checked(client: object) -> object:
    if isinstance(client, Redis | RedisCluster):
        return client
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    raise TypeError(f"a RedisStore needs an address or a client from redis.asyncio (Redis or RedisCluster), not {kind}")


def _unavailable(error: Exception) -> StoreUnavailable:
    match error:
        case StoreUnavailable():
            return error
        case ReadOnlyError():
            why = "it is a read-only replica; give the address of the primary"
        case OutOfMemoryError():
            why = "its memory is full; raise maxmemory"
        case BusyLoadingError():
            why = "it is still loading its data"
        case MaxConnectionsError():
            why = "the client has no connection left; give it a larger pool, or give the store an address"
        case AskError():  # and MovedError, which is one
            why = "it is one server of a cluster; give the store a redis.asyncio.RedisCluster"
        case ClusterError() if not isinstance(error, ResponseError):  # redis-py was sent to and fro until it gave up
            why = "the keys of this tree are on their way to another server of the cluster"
        case RuntimeError():
            why = f"its client does not work here, perhaps it belongs to another event loop ({error})"
        case _:
            why = f"{error} ({type(error).__name__})"
    return StoreUnavailable("redis", why)


_AS_IT_IS = {"NEVER_DECODE": True}
"""Keeps a client that decodes responses from decoding ours: a part of them is binary."""

_FOREIGN = (RedisError, RedisClusterException, OSError, RuntimeError)
_log = logging.getLogger(__name__)
