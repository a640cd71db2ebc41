"""What this process may spend by itself while the store is down."""

from __future__ import annotations

from router.call import Call
from router.classes import TaskClass

__all__ = ["Allowances"]


class Allowances:
    """Count, per task class, what was admitted without the store. Amounts are in nano-dollars.

    What is spent is written back under the same ids when the store returns; the allowance is whole again when all of it is.
    """

    def __init__(self) -> None:
        self._taken: dict[str, dict[str, int]] = {}

    def taken(self, task_class: str) -> int:
        """Return what a class has taken of its allowance."""
        return sum(self._taken.get(task_class, {}).values())

    def admit(self, task_class: TaskClass, id: str, usd: int) -> bool:
        """Take `usd` for the call `id` if the class's allowance has room for it; for an id that has some, take that much."""
        taken = self._taken.setdefault(task_class.name, {})
        if sum(taken.values()) - taken.get(id, 0) + usd > task_class.allowance:
            return False
        taken[id] = usd
        return True

    def finish(self, call: Call) -> None:
        """Replace what a call took by what it spent."""
        if call.local:
            self._taken.setdefault(call.task_class.name, {})[call.id] = call.spent()

    def written(self, id: str) -> None:
        """Give back what a call took: the store knows of it now."""
        for taken in self._taken.values():
            taken.pop(id, None)
