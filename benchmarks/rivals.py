"""What the stores are compared with: what a good engineer would write by hand on the same server or file.

Each one reserves and settles over the same buckets and keeps what it holds by id; none has leases, retention, idempotent
repetition or a limit on how long a caller waits, unless it runs the same script.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiosqlite
from redis.asyncio import BlockingConnectionPool, Redis

from stores import Charge
from stores.redis import RedisStore


class Dicts:
    """The smallest correct pair in memory: nothing awaits between the look and the change."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._holds: dict[str, Sequence[tuple[str, int, int]]] = {}

    async def reserve(self, id: str, charges: Sequence[tuple[str, int, int]]) -> bool:
        """Hold (bucket, amount, line) in all buckets or in none."""
        used = self._used
        for name, amount, line in charges:
            if used.get(name, 0) + amount > line:
                return False
        for name, amount, _ in charges:
            used[name] = used.get(name, 0) + amount
        self._holds[id] = charges
        return True

    async def settle(self, id: str, actual: Sequence[int]) -> None:
        """Replace what was held by what was spent."""
        used = self._used
        for (name, held, _), spent in zip(self._holds.pop(id), actual, strict=True):
            used[name] += spent - held


class Script:
    """One EVALSHA of the store's own script for each call, with arguments that were written beforehand."""

    def __init__(self, url: str, *, connections: int | None = None) -> None:
        """Take redis-py's defaults, or a pool of so many connections that callers wait for."""
        if connections is None:
            self.client = Redis.from_url(url)
        else:
            self.client = Redis(connection_pool=BlockingConnectionPool.from_url(url, max_connections=connections, timeout=60))

    async def load(self, store: RedisStore) -> None:
        """Have the script known to the server."""
        self._sha = await self.client.script_load(store._script)

    async def run(self, arguments: Sequence[str]) -> Any:
        """Do one operation."""
        return await self.client.evalsha(self._sha, int(arguments[0]), *arguments[1:])

    def pair(self, written: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Callable[[int], Awaitable[None]]:
        """Return what does the reserve and the settle that were written under a number."""

        async def pair(at: int) -> None:
            reserve, settle = written[at]
            await self.run(reserve)
            await self.run(settle)

        return pair

    async def pipeline(self, calls: Sequence[Sequence[str]]) -> Any:
        """Send many operations together."""
        pipeline = self.client.pipeline(transaction=False)
        for arguments in calls:
            pipeline.evalsha(self._sha, int(arguments[0]), *arguments[1:])
        return await pipeline.execute()


class Transactions:
    """One transaction per call over aiosqlite, with the same promise of durability (WAL, synchronous FULL)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()  # a connection has one transaction at a time

    async def open(self) -> None:
        """Make the tables."""
        self._db = await aiosqlite.connect(self._path, isolation_level=None)
        await self._db.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
            "CREATE TABLE bucket (name TEXT PRIMARY KEY, held INTEGER NOT NULL, spent INTEGER NOT NULL) WITHOUT ROWID;"
            "CREATE TABLE hold (id TEXT, name TEXT, amount INTEGER NOT NULL, PRIMARY KEY (id, name)) WITHOUT ROWID;"
        )

    async def close(self) -> None:
        """Let go of the thread."""
        await self._db.close()

    async def reserve(self, id: str, charges: Sequence[Charge]) -> bool:
        """Hold in all buckets or in none."""
        async with self._lock:
            await self._db.execute("BEGIN IMMEDIATE")
            for charge in charges:
                cursor = await self._db.execute("SELECT held + spent FROM bucket WHERE name = ?", (charge.bucket.name,))
                row = await cursor.fetchone()
                if charge.line is not None and (row[0] if row is not None else 0) + charge.amount > charge.line:
                    await self._db.execute("ROLLBACK")
                    return False
            held = [(charge.bucket.name, charge.amount) for charge in charges]
            await self._db.executemany(
                "INSERT INTO bucket VALUES (?, ?, 0) ON CONFLICT (name) DO UPDATE SET held = held + excluded.held", held
            )
            await self._db.executemany("INSERT INTO hold VALUES (?, ?, ?)", [(id, *row) for row in held])
            await self._db.execute("COMMIT")
            return True

    async def settle(self, id: str, charges: Sequence[Charge]) -> None:
        """Replace what was held by what was spent."""
        async with self._lock:
            await self._db.execute("BEGIN IMMEDIATE")
            cursor = await self._db.execute("DELETE FROM hold WHERE id = ? RETURNING name, amount", (id,))
            held = [(amount, name) for name, amount in await cursor.fetchall()]
            await self._db.executemany("UPDATE bucket SET held = held - ? WHERE name = ?", held)
            spent = [(charge.amount, charge.bucket.name) for charge in charges]
            await self._db.executemany("UPDATE bucket SET spent = spent + ? WHERE name = ?", spent)
            await self._db.execute("COMMIT")
