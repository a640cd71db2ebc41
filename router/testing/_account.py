from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

Amount: TypeAlias = int | float | str | Decimal | Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Price one model, in dollars per million tokens; a class without a rate of its own costs the plain one.

    A float counts as it is written (0.1 is a tenth).
    """

    input: Amount
    output: Amount
    cached_input: Amount | None = None
    cache_write: Amount | None = None
    input_audio: Amount | None = None
    output_audio: Amount | None = None

    def cost(self, usage: Mapping[str, int]) -> int:
        """Return what `usage` costs in nano-dollars, exact and rounded up once."""
        total = Fraction(0)
        plain_input, plain_output = usage["input_tokens"], usage["output_tokens"]
        for tokens, rate in (
            (usage["cached_tokens"], self.cached_input),
            (usage["cache_write_tokens"], self.cache_write),
            (usage["input_audio_tokens"], self.input_audio),
        ):
            if tokens and rate is not None:
                plain_input -= tokens
                total += tokens * _nanos_per_token(rate)
        if (audio := usage["output_audio_tokens"]) and self.output_audio is not None:
            plain_output -= audio
            total += audio * _nanos_per_token(self.output_audio)
        total += plain_input * _nanos_per_token(self.input) + plain_output * _nanos_per_token(self.output)
        return math.ceil(total)


@functools.cache
def _nanos_per_token(rate: Amount) -> Fraction:
    return Fraction(str(rate)) * 1000


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One request as it arrived, and what became of it. Written by the provider's thread, to be read from any.

    `hung_up` and `finished` are set after everything else, so that whoever sees one of them sees the bill too.
    """

    id: int
    path: str
    model: str
    stream: bool
    headers: Mapping[str, str]
    """Names in lower case; without those that carry keys."""
    body: Mapping[str, Any]
    opened_at: float
    """Seconds by `time.monotonic()`."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_limit: int | None = None
    """The limit as it was sent, in whichever field."""
    generated: int = 0
    """Output tokens written so far, over all choices, hidden reasoning included."""
    billed: Mapping[str, int] | None = None
    """The usage that is billed; None while nothing is."""
    cost: int | None = None
    """The bill in nano-dollars; None while there is none, or when the model has no price."""
    status: int | None = None
    """The status that was answered; None before there was an answer."""
    hung_up: bool = False
    """The client left before the answer was written."""
    finished: bool = False
    """The answer was written completely; set as its last bytes go out, and taken back if they do not get out."""

    def __repr__(self) -> str:
        state = "finished" if self.finished else "hung up" if self.hung_up else "open"
        return (
            f"<Entry {self.id} {self.path} {self.model!r} {self.status or '-'} {state}: "
            f"{self.prompt_tokens} in, {self.generated} out, billed {self.cost if self.billed else None}>"
        )


class Account:
    """Keep the entries and the sums of what they cost; safe to read from any thread."""

    def __init__(self, prices: Mapping[str, Rates]) -> None:
        self._prices = dict(prices)
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._spent: dict[str, int] = {}
        self._unpriced: set[str] = set()
        self.writing: set[int] = set()
        """The ids of the entries whose streams are being written now."""

    def entries(self) -> list[Entry]:
        """Return the entries so far, in the order of their arrival."""
        with self._lock:
            return self._entries.copy()

    def add(self, entry: Entry) -> None:
        """Write down a request that has arrived."""
        with self._lock:
            self._entries.append(entry)

    def bill(self, entry: Entry, usage: Mapping[str, int] | None) -> None:
        """Bill `usage` to `entry`, in place of what was billed to it before; None takes the bill back."""
        rates = self._prices.get(entry.model)
        cost = rates.cost(usage) if rates is not None and usage is not None else None
        with self._lock:
            if usage is not None and rates is None:
                self._unpriced.add(entry.model)
            self._spent[entry.model] = self._spent.get(entry.model, 0) - (entry.cost or 0) + (cost or 0)
            entry.billed, entry.cost = usage, cost

    def spent(self, model: str | None = None) -> int:
        """Return the sum of all bills, or of one model's, in nano-dollars.

        Raises LookupError when a model without a price was billed.
        """
        with self._lock:
            unpriced = sorted(self._unpriced if model is None else self._unpriced & {model})
            if unpriced:
                raise LookupError(
                    f"the provider billed {unpriced[0]!r}, which has no price; give it one: "
                    f"LocalProvider(prices={{{unpriced[0]!r}: Rates(input=…, output=…)}})"
                )
            return sum(self._spent.values()) if model is None else self._spent.get(model, 0)

    def report(self) -> dict[str, Any]:
        """Return the account as plain data, in which amounts are nano-dollars."""
        with self._lock:
            return {
                "open_streams": len(self.writing),
                "spent": sum(self._spent.values()),
                "models": dict(self._spent),
                "unpriced": sorted(self._unpriced),
                "requests": [
                    {name: getattr(entry, name) for name in Entry.__slots__ if name not in {"headers", "body"}}
                    for entry in self._entries
                ],
            }
