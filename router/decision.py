"""What the router decided and why, as values."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from router.errors import Refused
from router.money import format_usd, to_usd
from router.task import Tier
from router.usage import Usage

__all__ = ["CapState", "Decision", "Kind", "Outcome", "Reason", "Result", "Standing", "UsageSource"]

Reason = Literal[
    "rule",  # the rule's wish, and it fitted
    "embedding",  # metered, never routed
    "envelope",  # larger than the envelope: cheap
    "downgrade",  # a cap refused strong, the class takes cheap
    "fallback",  # strong failed for good, cheap answered
    "store_cheap",  # the store is down, the class is served by cheap
    "store_open",  # the store is down, the class is served
    "cap",  # a cap refused
    "store_unavailable",  # the store is down, and the class is closed or its allowance is used up
    "store_rolled_back",  # the store lost spend; somebody has to accept or correct
    "expired",  # a cap refused, and the wait for it is over
    "queue_full",  # a cap refused, and as many tasks as may wait for budget do
    "full",  # as many calls as may be open are open or wait to be settled
    "unseen_input",  # the size of the input cannot be known, and the policy refuses that
    "closed",  # the router was closed
]
"""Why a task is served as it is (the first seven), or not served (the others)."""

Kind = Literal["busy", "spent", "never"]
"""A refusal by caps: fits once holds settle; fits after the window turns; fits never."""

Outcome = Literal[
    "open", "served", "refused", "deferred", "dropped", "failed", "cancelled", "left", "cut", "released", "unreported"
]
"""How a task ended: `deferred` was handed on for later, `dropped` was refused by a class that wants no other try, `left` is a
stream that was not read to its end, `cut` one that generated past its limit, `unreported` an admission that nobody settled."""

UsageSource = Literal["none", "provider", "counted", "reported", "estimate"]
"""Where the tokens that were settled came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a bucket of a cap stands. Amounts are in the cap's unit: nano-dollars, tokens or requests; `ends` in ms."""

    cap: str
    unit: Literal["usd", "tokens", "requests"]
    scope: dict[str, str]
    window: str
    ends: int | None
    limit: int
    line: int
    spent: int
    held: int

    @property
    def remaining(self) -> int:
        """What is left to the limit, never below 0."""
        return max(0, self.limit - self.spent - self.held)

    @property
    def debt(self) -> int:
        """How far spending has passed the limit."""
        return max(0, self.spent - self.limit)

    def amount(self, value: int) -> str:
        """Write an amount of this cap with its unit."""
        return format_usd(value) if self.unit == "usd" else f"{value:,} {self.unit}"

    def __str__(self) -> str:
        scope = ", ".join(f"{label}={_shown(value)}" for label, value in self.scope.items())
        where = f"{self.cap}{f' ({scope})' if scope else ''}{f' in {self.window}' if self.window else ''}"
        line = f", admits up to {self.amount(self.line)}" if self.line != self.limit else ""
        return f"{where}: {self.amount(self.spent)} spent and {self.amount(self.held)} held of {self.amount(self.limit)}{line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapState(Standing):
    """A cap as it stood when it refused, and what it was asked for."""

    asked: int

    def __str__(self) -> str:
        # Named, because a class with slots is made anew after its methods, which a bare super() does not see.
        return f"{Standing.__str__(self)}, asked {self.amount(self.asked)}"


def _shown(value: str) -> str:
    """Write a label's value on one line: it comes from outside, and may be long or hold line breaks."""
    text = value if value.isprintable() else ascii(value)[1:-1]
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the router decided for one task, and, once the call has ended, what came of it.

    Money is in nano-dollars. `served` says whether the task was admitted. `wanted` is the rule's wish and `tier` what is used
    (both None for an embedding). `estimate` is what was reserved first and `actual` what was settled. `unconfirmed` is the
    estimate of attempts that were sent and never answered. `waited` is how long it stood in line, in seconds. `notes` says in
    words what was odd.
    """

    task_id: str
    task_class: str
    served: bool
    reason: Reason
    wanted: Tier | None = None
    tier: Tier | None = None
    model: str | None = None
    kind: Kind | None = None
    cap: CapState | None = None
    retry_after: float | None = None
    waited: float = 0.0
    estimate: int = 0
    output_limit: int | None = None
    actual: int | None = None
    unconfirmed: int = 0
    attempts: int = 0
    usage_source: UsageSource = "none"
    served_model: str | None = None
    outcome: Outcome = "open"
    review: bool = False
    error: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def downgraded(self) -> bool:
        """Whether strong was wanted and cheap is used."""
        return self.served and self.wanted == "strong" and self.tier == "cheap"

    def __str__(self) -> str:
        if self.served:
            text = f"served by {self.model}" + (f" ({self.tier}, {self.reason})" if self.tier else "")
            if self.outcome == "released":
                text = f"released: {self.model} was admitted and not used"
            elif self.actual is not None:
                text += f": {format_usd(self.actual)} of an estimated {format_usd(self.estimate)}"
            return "; ".join((text, *self.notes))
        word = self.outcome if self.outcome in ("deferred", "dropped") else "refused"
        text = f"{word} ({self.reason}{f', {self.kind}' if self.kind else ''})"
        if self.cap is not None:
            text += f" by {self.cap}"
        if self.waited:
            text += f" after {self.waited:.3g} s in line"
        if self.retry_after is not None:
            text += f"; retry in {self.retry_after:g} s"
        return "; ".join((text, *self.notes))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """What came of `Router.run`."""

    decision: Decision
    usage: Usage | None = None
    answer: Any = None

    @property
    def served(self) -> bool:
        """Whether a model answered."""
        return self.decision.served

    @property
    def response(self) -> Any:
        """The SDK's own object. Raises `Refused` when no model was asked."""
        if not self.decision.served:
            raise Refused(self.decision)
        return self.answer

    @property
    def cost(self) -> Decimal:
        """What was settled, in dollars."""
        return to_usd(self.decision.actual or 0)

    def __repr__(self) -> str:
        return f"<Result {self.decision}>"
