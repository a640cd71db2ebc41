"""What can go wrong in the router's own terms: one root, few branches, each with its facts as attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.decision import Decision

__all__ = ["BudgetRouterError", "MissingLabel", "PolicyError", "Refused", "RuleError", "TaskError"]


class BudgetRouterError(Exception):
    """Stand at the root of every error that the router raises by itself."""


class PolicyError(BudgetRouterError, ValueError):
    """Say what is wrong in a policy, where, and what to write instead; raised when the policy is built."""


class TaskError(BudgetRouterError, ValueError):
    """Say what is wrong in a task; never quotes its request or the values of its labels."""


class RuleError(BudgetRouterError):
    """Say that a rule gave an answer that is neither a tier nor, for a score, a finite number."""


class MissingLabel(BudgetRouterError, LookupError):
    """Say that a task lacks the label that a cap is counted by; nothing was reserved for it.

    Attributes:
        label: the name of the missing label.
        cap: the name of the cap that needs it.
    """

    def __init__(self, label: str, cap: str) -> None:
        super().__init__(label, cap)
        self.label = label
        self.cap = cap

    def __str__(self) -> str:
        wanted = f"labels={{{self.label!r}: …}}"
        return f"the task has no label {self.label!r}, which cap {self.cap!r} is counted by: give it with {wanted}"


class Refused(BudgetRouterError):
    """Say that what was touched is not there, because the task was refused.

    Attributes:
        decision: the `router.Decision` that refused it.
    """

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision

    def __str__(self) -> str:
        return f"task {self.decision.task_id}: {self.decision}"
