"""How load is put on a store: bursts and closed loops of callers, in blocks that alternate between what is compared."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

Pair = Callable[[int], Awaitable[object]]
"""Reserve and settle once; the number says which of the prepared inputs to take."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one block showed. `elapsed` and `waits`, one per pair, are in seconds."""

    elapsed: float
    waits: tuple[float, ...]
    errors: int = 0

    @property
    def rate(self) -> float:
        """Pairs per second."""
        return len(self.waits) / self.elapsed

    def percentile(self, percent: int) -> float:
        """Return how long the given part of the callers waited at most, in seconds."""
        if len(self.waits) == 1:
            return self.waits[0]
        return quantiles(self.waits, n=100, method="inclusive")[percent - 1]


async def burst(pair: Pair, numbers: Sequence[int]) -> Figures:
    """Let one caller per number do its pair, all at once."""
    waits: list[float] = []
    errors = 0

    async def caller(number: int) -> None:
        nonlocal errors
        start = time.perf_counter()
        try:
            await pair(number)
        except Exception:  # noqa: BLE001 (whatever it is, that caller was not served)
            errors += 1
        waits.append(time.perf_counter() - start)

    gc.collect()
    start = time.perf_counter()
    await asyncio.gather(*map(caller, numbers))
    return Figures(time.perf_counter() - start, tuple(waits), errors)


async def loops(pair: Pair, numbers: Sequence[int], *, callers: int) -> Figures:
    """Let so many callers each do one pair after another until the numbers are used up."""
    waits: list[float] = []
    left = iter(numbers)

    async def caller() -> None:
        for number in left:
            start = time.perf_counter()
            await pair(number)
            waits.append(time.perf_counter() - start)

    gc.collect()
    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return Figures(time.perf_counter() - start, tuple(waits))


class Numbers:
    """Numbers that were not used yet."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, many: int) -> range:
        """Return so many of them."""
        self._next += many
        return range(self._next - many, self._next)


async def alternate(blocks: int, sides: Mapping[str, Callable[[], Awaitable[Figures]]]) -> dict[str, list[Figures]]:
    """Run each side once per block, every other block in the reverse order, after one turn that is not counted."""
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    for block in range(blocks + 1):
        for name in list(sides) if block % 2 else reversed(list(sides)):
            figures = await sides[name]()
            if block:
                found[name].append(figures)
    return found


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Divide block by block."""
    return [a / b for a, b in zip(over, under, strict=True)]
