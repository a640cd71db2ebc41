"""Stores that count charges in buckets: atomically, over several buckets at once, shared by as many callers as there are."""

from typing import TYPE_CHECKING, Any

from stores.base import (
    MAX_AMOUNT,
    Balance,
    Bucket,
    BudgetStore,
    Charge,
    Health,
    Hold,
    Misfit,
    Settlement,
    Verdict,
    new_id,
    safe_name,
)
from stores.errors import InvalidCharge, StoreError, StoreRolledBack, StoreUnavailable, TooLate
from stores.memory import MemoryStore
from stores.sqlite import SQLiteStore

if TYPE_CHECKING:
    from stores.redis import RedisStore

__all__ = [
    "MAX_AMOUNT",
    "Balance",
    "Bucket",
    "BudgetStore",
    "Charge",
    "Health",
    "Hold",
    "InvalidCharge",
    "MemoryStore",
    "Misfit",
    "RedisStore",
    "SQLiteStore",
    "Settlement",
    "StoreError",
    "StoreRolledBack",
    "StoreUnavailable",
    "TooLate",
    "Verdict",
    "new_id",
    "safe_name",
]


def __getattr__(name: str) -> Any:
    if name == "RedisStore":
        # Its client library is an extra: whoever does without it imports nothing of it.
        from stores.redis import RedisStore  # noqa: PLC0415

        return RedisStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
