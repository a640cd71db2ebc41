"""Time, so that tests can bring their own."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What the router asks about time."""

    def now(self) -> int:
        """Return the wall clock, in milliseconds since the epoch; may jump."""
        ...

    def monotonic(self) -> float:
        """Return seconds that only ever grow, from any start."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds."""
        ...


class SystemClock:
    """This machine's clocks."""

    def now(self) -> int:
        """See `Clock.now`."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        await asyncio.sleep(seconds)
