"""Send each LLM task to a strong or a cheap model, and never spend more than the caps allow."""

from router.admission import Admission
from router.caps import Cap
from router.classes import TaskClass
from router.decision import CapState, Decision, Result
from router.deferral import Deferral
from router.errors import BudgetRouterError, MissingLabel, PolicyError, Refused, RuleError, TaskError
from router.policy import Model, Policy, Retries
from router.prices import Price, UnknownPrice
from router.queue import LineStatus, WaitEvent
from router.router import Router
from router.rules import always, by_class, by_score
from router.streams import RoutedStream
from router.task import Task
from router.telemetry import BucketStatus, Status
from router.usage import Usage

__all__ = [
    "Admission",
    "BucketStatus",
    "BudgetRouterError",
    "Cap",
    "CapState",
    "Decision",
    "Deferral",
    "LineStatus",
    "MissingLabel",
    "Model",
    "Policy",
    "PolicyError",
    "Price",
    "Refused",
    "Result",
    "Retries",
    "RoutedStream",
    "Router",
    "RuleError",
    "Status",
    "Task",
    "TaskClass",
    "TaskError",
    "UnknownPrice",
    "Usage",
    "WaitEvent",
    "always",
    "by_class",
    "by_score",
]
