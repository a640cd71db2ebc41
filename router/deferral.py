"""Work that the caps refuse for now, handed on to whoever keeps it until later."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol, runtime_checkable

from router.task import Task

__all__ = ["Deferral"]


@runtime_checkable
class Deferral(Protocol):
    """Keep tasks until later; what comes of them there is none of the router's business any more.

    A class with `when_expired="defer"` needs one, given to the router.
    """

    async def defer(self, task: Task, not_before: datetime) -> None:
        """Keep `task`, and see that it is run once, not before a moment (UTC). Return when it is kept; raise when it is not."""
        ...
