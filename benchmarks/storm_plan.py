"""What a storm is made of: the kinds of tasks and faults, what the provider does for each, and the caps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, get_args

from openai import AsyncOpenAI

from router import Cap, Policy, Retries, TaskClass
from router.testing import Entry, Reply
from stores import BudgetStore, SQLiteStore
from tests.support import policy_of

Kind = Literal[
    "whole call",
    "stream read",
    "stream broken off",  # its reader leaves where the provider has paused
    "stream left running",  # its reader leaves, and the provider is ahead of it
    "stream cancelled",
    "stream timed out",
    "call cancelled",
    "stall, then an answer",
    "error, then an answer",
    "cut, then an answer",
    "error for good",
    "strong fails",
    "stream cut",
]

WEIGHTS: dict[Kind, int] = dict(zip(get_args(Kind), (30, 18, 6, 6, 6, 5, 6, 5, 8, 5, 5, 4, 6), strict=True))
OUTPUT = 12  # the output limit of every task, in tokens
ESTIMATE = 150_000  # what one holds on the strong model, about, in nano-dollars
CHEAP = ESTIMATE // 4  # more than one holds on the cheap model
ACTUAL = 90_000  # what one is settled at, about
USERS = 10
STATUSES = (500, 503, 429, 408, 529)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """One storm. All times are in seconds.

    `pace` is how long a caller takes from one task to the next, `patience` how long it waits for an answer; the shortest cap is
    over windows of `window`; `room` is the part of the tasks that the caps have room for. The storm lasts until `least` tasks
    were served, however slow the machine.
    """

    store: str
    on_lease_end: Literal["release", "charge"]
    seconds: float
    processes: int = 8
    callers: int = 500
    kills: int = 12
    lease: float = 5.0
    pace: float = 30.0
    patience: float = 5.0
    window: int = 5
    room: float = 0.5
    least: int = 0
    seed: int = 0

    def policy(self, client: AsyncOpenAI | None) -> Policy:
        """Return the policy: caps over four kinds of windows, small enough that much is refused, and a count per task."""
        tasks = self.processes * self.callers / self.pace * self.seconds
        total = max(tasks * ACTUAL * self.room, 20 * ESTIMATE)
        short = max(tasks / self.seconds * self.window * ESTIMATE * 1.6 * self.room, 10 * ESTIMATE)
        users = {f"user:u{number}": _usd(total / (5 if number % 2 else 20)) for number in range(USERS)}
        return policy_of(
            client,
            Cap(usd=_usd(short), per=self.window, admit_at=1, name="window"),
            Cap(usd=_usd(total), per="hour", admit_at=1, name="hour"),
            Cap(usd=_usd(total), per="month", admit_at=1, name="month"),
            Cap(usd=_usd(total / 10), per="day", scope="user", limits=users, admit_at=1, name="user-day"),
            # Refuses nothing: the store's own word on every single task.
            Cap(usd=1000, per=None, scope="task", soft=True, name="task"),
            classes=[TaskClass("chat", when_expired="downgrade", on_model_error="cheap"), TaskClass("batch")],
            default_class="batch",
            lease=self.lease,
            on_lease_end=self.on_lease_end,
            on_unanswered=self.on_lease_end,
            retries=Retries(attempts=2, per_attempt=self.patience, base=0.05, cap=0.1),
        )


def _usd(nanos: float) -> Decimal:
    return Decimal(round(nanos)) / 10**9


def store_of(name: str) -> BudgetStore:
    """Open the store that a storm names: `sqlite:PATH` or `URL#NAMESPACE`."""
    if name.startswith("sqlite:"):
        return SQLiteStore(name.removeprefix("sqlite:"), timeout=30)
    from stores.redis import RedisStore  # noqa: PLC0415 (a storm on SQLite alone needs no client library)

    url, _, namespace = name.partition("#")
    return RedisStore(url, namespace=namespace, timeout=30)


@dataclass(frozen=True, slots=True)
class Ask:
    """One task: who asks, what happens to it, at which token, and how long an answer takes (in seconds).

    Its key travels in the request, so that the provider's account and the store's tell of the same task.
    """

    who: str
    kind: Kind
    tokens: int
    takes: float

    @property
    def key(self) -> str:
        """All of it as one string."""
        return f"{self.who}/{self.kind}/{self.tokens}/{self.takes:.3f}"

    @classmethod
    def read(cls, key: str) -> Ask:
        """Read a key."""
        who, kind, tokens, takes = key.split("/")
        return cls(who, kind, int(tokens), float(takes))  # type: ignore[arg-type]

    @classmethod
    def drawn(cls, who: str, draw: random.Random, pace: float) -> Ask:
        """Draw one."""
        (kind,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        return cls(who, kind, draw.randrange(1, OUTPUT), draw.random() * pace / 2)


def replies() -> Callable[[Entry], Reply]:
    """Make the provider's side: what it does with each attempt at a task."""
    attempts: Counter[str] = Counter()

    def reply(entry: Entry) -> Reply:
        key = str(entry.body.get("user"))
        attempts[key] += 1
        return _reply(Ask.read(key), attempts[key], entry.model)

    return reply


def _reply(ask: Ask, attempt: int, model: str) -> Reply:
    good = Reply(tokens=ask.tokens, delay=ask.takes / 2)
    match ask.kind:
        case "whole call":
            return Reply(tokens=ask.tokens, delay=ask.takes)
        case "stream read":
            return Reply(tokens=ask.tokens, chunk_delay=ask.takes / ask.tokens)
        case "stream left running":
            return Reply(tokens=OUTPUT, chunk_delay=ask.takes / OUTPUT)
        case "stream broken off" | "stream cancelled" | "stream timed out":
            return Reply(tokens=OUTPUT, delay=ask.takes, stall=f"after_chunk:{ask.tokens}")
        case "stream cut":
            return Reply(tokens=OUTPUT, delay=ask.takes, cut=f"mid_chunk:{ask.tokens}")
        case "call cancelled":
            return Reply(stall="before_first_byte")
        case "stall, then an answer":
            return Reply(stall="before_first_byte") if attempt == 1 else good
        case "error, then an answer":
            status = STATUSES[ask.tokens % len(STATUSES)]
            # An answer of 500 may come from a gateway in front of a model that did its work, and bills it.
            return Reply(status=status, retry_after=0, billed=status == 500) if attempt == 1 else good
        case "cut, then an answer":
            return Reply(cut="before_first_byte") if attempt == 1 else good
        case "error for good":
            return Reply(status=400)
        case "strong fails":
            return Reply(status=503) if model == "strong-model" else good
