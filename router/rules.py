"""Rules: which tier a task wants. A rule knows nothing of caps; what the caps make of its wish is decided elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from types import MappingProxyType
from typing import get_args

from router import _checks
from router.errors import PolicyError, RuleError
from router.task import Task, Tier

__all__ = ["Rule", "Score", "always", "by_class", "by_score", "classes_of", "resolve", "version_of"]

Rule = Callable[[Task], Tier | Awaitable[Tier]]
Score = Callable[[Task], float | Awaitable[float]]

_TIERS = get_args(Tier)


def always(tier: Tier) -> Rule:
    """Make the rule by which every task wants the same tier."""
    _checks.word(tier, _TIERS, what="the tier of a rule")
    return _Always(tier)


def by_class(tiers: Mapping[str, Tier], *, default: Tier = "strong") -> Rule:
    """Make the rule by which a task wants the tier that its class is mapped to, and otherwise the default.

    A policy refuses a class that it does not have, when it is built.
    """
    if not isinstance(tiers, Mapping):
        raise PolicyError(f"by_class must map the names of classes to tiers, not be {_checks.shown(tiers)}")
    for name, tier in tiers.items():
        _checks.text(name, what="a class in by_class")
        _checks.word(tier, _TIERS, what=f"the tier of class {name!r} in by_class")
    _checks.word(default, _TIERS, what="the default of by_class")
    return _ByClass(MappingProxyType(dict(tiers)), default)


def by_score(score: Score, threshold: float) -> Rule:
    """Make the rule by which a task wants strong when its score is at the threshold or above, and otherwise cheap.

    The score is a function of the task, plain or async. One that is no finite number is a `RuleError`.
    """
    if not callable(score):
        raise PolicyError(f"by_score needs a function that scores a task, not {_checks.shown(score)}")
    if not _checks.is_number(threshold):
        raise PolicyError(f"the threshold of by_score must be a finite number, not {_checks.shown(threshold)}")
    return _ByScore(score, threshold)


async def resolve(rule: Rule, task: Task) -> Tier:
    """Return the tier that a rule says a task wants.

    Raises:
        RuleError: the answer is not a tier. What the rule itself raises passes through.
    """
    answer = rule(task)
    if isawaitable(answer):
        answer = await answer
    if not isinstance(answer, str) or answer not in _TIERS:
        raise RuleError(f"rule {_name_of(rule)} must return 'strong' or 'cheap', not {_quoted(answer)}")
    return answer


def version_of(rule: Rule) -> str:
    """Return 12 hex digits that stay the same in every process while the rule is the same.

    A function is known by its qualified name alone: rename it when what it decides has changed.
    """
    return hashlib.sha256(_name_of(rule).encode()).hexdigest()[:12]


def classes_of(rule: Rule) -> tuple[str, ...]:
    """Return the names of the classes that a rule knows, for a policy to check; a function tells none."""
    return tuple(rule.tiers) if isinstance(rule, _ByClass) else ()


@dataclass(frozen=True, slots=True, repr=False)
class _Always:
    tier: Tier

    def __call__(self, task: Task) -> Tier:
        return self.tier

    def __repr__(self) -> str:
        return f"always({self.tier!r})"


@dataclass(frozen=True, slots=True, repr=False)
class _ByClass:
    tiers: Mapping[str, Tier] = field(hash=False)
    default: Tier

    def __call__(self, task: Task) -> Tier:
        return self.default if task.task_class is None else self.tiers.get(task.task_class, self.default)

    def __repr__(self) -> str:
        return f"by_class({dict(sorted(self.tiers.items()))!r}, default={self.default!r})"


@dataclass(frozen=True, slots=True, repr=False)
class _ByScore:
    score: Score
    threshold: float

    def __call__(self, task: Task) -> Tier | Awaitable[Tier]:
        score = self.score(task)
        return self._later(score) if isawaitable(score) else self._tier(score)

    async def _later(self, score: Awaitable[float]) -> Tier:
        return self._tier(await score)

    def _tier(self, score: object) -> Tier:
        if not _checks.is_number(score):
            raise RuleError(f"the score of rule {self!r} must be a finite number, not {_quoted(score)}")
        return "strong" if score >= self.threshold else "cheap"

    def __repr__(self) -> str:
        return f"by_score({_name_of(self.score)}, {self.threshold!r})"


def _name_of(function: Callable[[Task], object]) -> str:
    if isinstance(function, _Always | _ByClass | _ByScore):
        return repr(function)
    # An object that can be called has no name of its own, and its repr may hold an address that differs each time.
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _quoted(answer: object) -> str:
    """Quote a short word or a number; name only the type of anything else, which may be part of a prompt."""
    if answer is None or isinstance(answer, int | float):
        return repr(answer)
    if isinstance(answer, str) and len(answer) <= 20 and answer.isidentifier():
        return repr(answer)
    return f"a value of type {type(answer).__name__}"
