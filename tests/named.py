"""Stores of each kind by name, and every call that one takes: for tests that say the same of all, and for their processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from stores import Bucket, BudgetStore, Charge, MemoryStore, SQLiteStore, StoreUnavailable, new_id

KINDS = ("memory", "sqlite", "redis")
RUN = Bucket("run")
CHARGES = [Charge(RUN, 1, 100, 100)]

CALLS: dict[str, Callable[[BudgetStore], Awaitable[object]]] = {
    "reserve": lambda store: store.reserve(new_id(), [CHARGES], lease=60_000),
    "extend": lambda store: store.extend(new_id(), 1, CHARGES),
    "settle": lambda store: store.settle(new_id(), CHARGES),
    "release": lambda store: store.release(new_id()),
    "renew": lambda store: store.renew([new_id()], lease=60_000),
    "balances": lambda store: store.balances([RUN]),
    "holds": lambda store: store.holds(),
    "credit": lambda store: store.credit(new_id(), []),
    "check": lambda store: store.check(),
    "accept": lambda store: store.accept(),
}


def name_of(kind: str, folder: Path, redis_url: Callable[[], str]) -> str:
    """Name an empty store of a kind; only one in Redis asks for its server."""
    return f"redis={redis_url()}#{folder.name}" if kind == "redis" else f"{kind}={folder / 'budget.sqlite'}"


def named(name: str, *, timeout: float = 5.0, clock: Callable[[], int] | None = None) -> BudgetStore:
    """Make the store of that name, or another client of it."""
    kind, _, place = name.partition("=")
    if kind == "memory":
        return MemoryStore(clock=clock)
    if kind == "sqlite":
        return SQLiteStore(place, timeout=timeout, clock=clock)
    from stores.redis import RedisStore

    url, _, namespace = place.partition("#")
    return RedisStore(url, namespace=namespace, timeout=timeout, clock=clock)


async def refusals(store: BudgetStore) -> set[str]:
    """Make every call; return what they were refused with."""
    why = set()
    async with asyncio.timeout(10):
        for name, call in CALLS.items():
            try:
                await call(store)
            except StoreUnavailable as error:
                why.add(error.why)
            else:
                why.add(f"{name} was answered")
    return why
