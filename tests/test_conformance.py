"""Every store of ours against the whole contract."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings

from stores import MemoryStore, SQLiteStore
from stores.base import BudgetStore
from stores.conformance import ManualClock, StoreConformance
from stores.redis import RedisStore

CALLS = 100_000 if settings.get_current_profile_name() == "thorough" else 3_000


class TestMemoryStore(StoreConformance):
    calls: ClassVar[int] = CALLS

    async def open(self, clock: ManualClock) -> BudgetStore:
        return MemoryStore(clock=clock)


class TestSQLiteStore(StoreConformance):
    calls: ClassVar[int] = CALLS

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.files = 0

    async def open(self, clock: ManualClock) -> BudgetStore:
        self.files += 1
        return SQLiteStore(self.folder / f"{self.files}.sqlite", clock=clock)

    async def again(self, store: BudgetStore, clock: ManualClock) -> BudgetStore | None:
        return SQLiteStore(self.folder / f"{self.files}.sqlite", clock=clock)


class TestRedisStore(StoreConformance):
    calls: ClassVar[int] = CALLS

    @pytest.fixture(autouse=True)
    def _server(self, redis_url: str, tmp_path: Path) -> None:
        self.url = redis_url
        self.name = tmp_path.name
        self.namespaces = 0

    async def open(self, clock: ManualClock) -> BudgetStore:
        self.namespaces += 1
        return await self.again(None, clock)

    async def again(self, store: BudgetStore | None, clock: ManualClock) -> BudgetStore:
        return RedisStore(self.url, namespace=f"{self.name}-{self.namespaces}", clock=clock)


@pytest.mark.apt
class TestRedisStoreOnRedis(TestRedisStore):
    @pytest.fixture(autouse=True)
    def _server(self, debian_redis_url: str, tmp_path: Path) -> None:
        self.url = debian_redis_url
        self.name = tmp_path.name
        self.namespaces = 0
