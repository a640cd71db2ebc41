"""Every store of ours against the whole contract."""

from __future__ import annotations

from stores import MemoryStore
from stores.base import BudgetStore
from stores.conformance import ManualClock, StoreConformance


class TestMemoryStore(StoreConformance):
    async def open(self, clock: ManualClock) -> BudgetStore:
        return MemoryStore(clock=clock)
