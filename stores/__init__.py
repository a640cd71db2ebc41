"""Stores that count charges in buckets: atomically, over several buckets at once, shared by as many callers as there are."""

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
