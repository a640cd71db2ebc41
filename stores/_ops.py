"""The calls of the contract as values, so that many of them can travel in one batch, and what comes back for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from stores.base import Balance, Bucket, Charge, Health, Hold, LeaseEnd, Settlement, Verdict


class Reserve(NamedTuple):
    id: str
    options: tuple[tuple[Charge, ...], ...]
    lease: int
    on_lease_end: LeaseEnd


class Extend(NamedTuple):
    id: str
    step: int
    charges: tuple[Charge, ...]


class Settle(NamedTuple):
    id: str
    charges: tuple[Charge, ...]


class Renew(NamedTuple):
    ids: tuple[str, ...]  # of one tree
    lease: int


class Balances(NamedTuple):
    buckets: tuple[Bucket, ...]  # of one tree


class Holds(NamedTuple):
    tree: str  # as safe_name writes it
    limit: int


class Credit(NamedTuple):
    id: str
    charges: tuple[Charge, ...]


class Check(NamedTuple):
    tree: str


class Accept(NamedTuple):
    tree: str


Op: TypeAlias = Reserve | Extend | Settle | Renew | Balances | Holds | Credit | Check | Accept
Outcome: TypeAlias = Verdict | Settlement | frozenset[str] | tuple[Balance, ...] | tuple[Hold, ...] | Health | Exception | None
Outcomes: TypeAlias = Sequence[Outcome]
