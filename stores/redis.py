"""A store in Redis or Valkey, shared by every machine that reaches it.

One script run carries out a whole batch on one budget tree, atomically; see `_redis.lua` for the keys and the rules. Whoever
sends a run twice changes nothing more: every operation is known by its id.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeAlias, cast

from stores._batched import BatchedStore
from stores._ops import Balances, Check, Holds, Op, Outcome, Outcomes
from stores._redis_wire import Header, Run, Wire
from stores.errors import StoreUnavailable

try:
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        BusyLoadingError,
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
        self._namespace = namespace
        self._timeout = timeout
        self._clock = clock
        self._wire = Wire(namespace)
        self._script = files("stores").joinpath("_redis.lua").read_text("utf-8")
        self._sha = hashlib.sha1(self._script.encode()).hexdigest()  # noqa: S324 (the name that the server gives it)
        self._trees: dict[str, _Known] = {}
        self._under_way: set[asyncio.Task[Any]] = set()
        self._mark = secrets.token_hex(8)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeps = False

    def __repr__(self) -> str:
        return f"<RedisStore namespace={self._namespace!r}>"

    async def _carry_out(self, ops: Sequence[Op]) -> Outcomes:
        self._loop = asyncio.get_running_loop()
        before, this = self._under_way.copy(), cast(asyncio.Task[Any], asyncio.current_task())
        self._under_way.add(this)
        try:
            if before and any(isinstance(op, Balances | Holds | Check) for op in ops):
                # Two batches may be under way, on two connections. Writes may overtake each other, since an id's states
                # bear any order; who reads, sees all that this store was asked before.
                await asyncio.wait(before)
            if not self._keeps:
                await self._refuse_eviction()
            try:
                return await self._run(ops)
            except RedisConnectionError:
                # Most often the server closed a connection that lay idle, and the next one works. Whatever was carried out
                # already is known by its id.
                return await self._run(ops)
        except _FOREIGN as error:
            raise _unavailable(error) from error
        finally:
            self._under_way.discard(this)

    async def _run(self, ops: Sequence[Op]) -> Outcomes:
        outcomes: list[Outcome] = [None] * len(ops)
        pending = self._wire.runs(ops)
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
        return list(await pipeline.execute(raise_on_error=False))

    def _arguments(self, run: Run) -> list[str]:
        prefix = self._wire.prefix(run.tree)
        keys = [f"{prefix}e", f"{prefix}l", f"{prefix}x", f"{prefix}c:{self._mark}", *run.ids, *run.buckets]
        known = self._trees.get(run.tree)
        head: list[str | int | bool] = [secrets.token_hex(8)]
        head += (False, 0, 0, 0) if known is None else (known.epoch, known.seen, known.accepted, known.acknowledged)
        head += (False if self._clock is None else self._clock(), len(run.ids), len(run.buckets))
        start = json.dumps(head, separators=(",", ":"))[:-1]
        return [str(len(keys)), *keys, f"{start},{run.body}]" if run.body else f"{start}]"]

    def _learn(self, tree: str, header: Header) -> None:
        """Remember the most that was seen of a tree. Replies to runs in flight may come back out of order."""
        known = self._trees.get(tree)
        if known is None or header.accepted > known.accepted:
            self._trees[tree] = _Known(header.epoch, header.writes, header.accepted, time.monotonic())
        elif header.epoch == known.epoch and header.writes > known.seen:
            known.seen, known.at = header.writes, time.monotonic()
        # Else the server is not what it was, and until somebody accepts that, what this client saw is the evidence.

    async def _refuse_eviction(self) -> None:
        for memory in await self._memory():
            policy = str(memory.get("maxmemory_policy", memory.get("maxmemory-policy", "noeviction")))
            if int(memory.get("maxmemory", 0)) and policy != "noeviction":
                raise StoreUnavailable(
                    "redis",
                    f"its maxmemory-policy {policy} may evict what was counted; set maxmemory-policy to noeviction, "
                    "or keep budgets in a server of their own",
                )
        self._keeps = True

    async def _memory(self) -> list[Mapping[str, Any]]:
        """Return what each server says of its memory, or nothing when it does not say."""
        everywhere = {"target_nodes": "primaries"} if isinstance(self._client, RedisCluster) else {}
        for ask, what in ((self._client.info, "memory"), (self._client.config_get, "maxmemory*")):
            with suppress(ResponseError):
                answer: Mapping[str, Any] = await ask(what, **everywhere)
                found = list(answer.values()) if everywhere else [answer]
                if all("maxmemory" in memory for memory in found):
                    return found
        _log.warning("the redis store may ask neither INFO nor CONFIG: make sure that maxmemory-policy is noeviction")
        return []

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
        case RuntimeError():
            why = f"its client does not work here, perhaps it belongs to another event loop ({error})"
        case _:
            why = f"{error} ({type(error).__name__})"
    return StoreUnavailable("redis", why)


_AS_IT_IS = {"NEVER_DECODE": True}
"""Keeps a client that decodes responses from decoding ours: a part of them is binary."""

_FOREIGN = (RedisError, RedisClusterException, OSError, RuntimeError)
_log = logging.getLogger(__name__)
