"""One logical request from its admission to its one settle: what it holds, what was billed for it, what is unsure.

No method here awaits: each is one step of bookkeeping. The I/O that follows from it is done by whoever calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from router.charges import Amounts, Metered, Slots, charges_of
from router.classes import TaskClass
from router.decision import Decision, Outcome, UsageSource
from router.estimate import choices
from router.policy import Model, Policy
from router.prices import Price
from router.tally import Tally
from router.task import Task
from router.usage import Usage
from stores import Charge

__all__ = ["Call", "Estimate"]


def price_of_model(model: Model) -> Price:
    """Return the price of a policy's model."""
    assert model.price is not None  # noqa: S101 (looked up when the policy was built)
    return model.price


@dataclass(frozen=True, slots=True)
class Estimate:
    """The most that one attempt on a tier can take, and how it is sent.

    `input_tokens` bounds the prompt, and `likely_input` is what it most likely has. `output_tokens` is the output limit that is
    sent, times the number of choices; `chosen` says whether the router chose that limit.
    """

    model: Model
    input_tokens: int
    likely_input: int
    output_tokens: int
    output_limit: int | None
    chosen: bool

    amounts: Amounts = field(init=False)
    """The bound in every unit."""

    def __post_init__(self) -> None:
        usd = price_of_model(self.model).bound(input_tokens=self.input_tokens, output_tokens=self.output_tokens)
        object.__setattr__(self, "amounts", Amounts(usd, self.input_tokens + self.output_tokens, 1))

    def with_limit(self, limit: int) -> Estimate:
        """Return the same attempt with another output limit."""
        choices = self.output_tokens // self.output_limit if self.output_limit else 1
        return replace(self, output_limit=limit, output_tokens=limit * choices)


class Call:
    """The state of one admitted task. It is finished once; the first outcome stands."""

    def __init__(
        self,
        id: str,
        policy: Policy,
        task: Task,
        task_class: TaskClass,
        slots: Slots,
        estimates: Mapping[Metered, Estimate],
        metered: Metered,
        decision: Decision,
        *,
        ends: float | None,
        local: bool = False,
    ) -> None:
        self.id = id
        self.policy = policy
        self.task = task
        self.task_class = task_class
        self.slots = slots
        self.estimates = dict(estimates)
        self.metered: Metered = metered
        self.decision = decision
        self.ends = ends
        """When its time is over, by the monotonic clock; None when it has no end."""
        self.local = local
        """Whether the store knows nothing of it, because it was down when the call was admitted."""
        self.attempts = 0
        self.step = 0
        self.outcome: Outcome = "open"
        self.tally = Tally(choices(task.request) if task.kind == "chat" else 1)
        self.hang_up: Callable[[], object] | None = None
        """Begins to close the stream that is read, and to settle it; None while there is none."""
        self.usage: Usage | None = None
        self.usage_source: UsageSource = "none"
        self._billed: dict[Metered, Amounts] = {}
        self._touched: list[Metered] = [metered]
        self._notes: list[str] = []
        self.unconfirmed = 0

    def __repr__(self) -> str:
        return f"<Call {self.task.id} {self.metered} attempts={self.attempts} {self.outcome}>"

    @property
    def estimate(self) -> Estimate:
        """What one attempt on the present tier takes at most."""
        return self.estimates[self.metered]

    def note(self, text: str) -> None:
        """Remember something odd, once, for the decision."""
        if text not in self._notes:
            self._notes.append(text)

    def needs(self, metered: Metered | None = None) -> tuple[Charge, ...]:
        """Return the charges that cover what was billed so far and one more attempt on `metered` (or the present tier)."""
        target = self.metered if metered is None else metered
        amounts = {tier: self._billed.get(tier, Amounts()) for tier in self._touched}
        amounts[target] = amounts.get(target, Amounts()) + self.estimates[target].amounts
        return charges_of(self.slots, amounts)

    @property
    def repeats_for_free(self) -> bool:
        """Whether another attempt needs no more than is held already."""
        return not self._billed

    def switch(self, metered: Metered) -> None:
        """Go on with another tier; what the first one was billed stays counted."""
        self.metered = metered
        if metered not in self._touched:
            self._touched.append(metered)

    def bill(self, usage: Usage, source: UsageSource, *, price: Price | None = None) -> None:
        """Add what one attempt was billed. `price` is the present tier's unless said."""
        cost = (price_of_model(self.estimate.model) if price is None else price).cost(usage)
        self._add(Amounts(cost, usage.tokens, 1))
        self.usage = usage if self.usage is None else self.usage + usage
        self.usage_source = source
        if usage.odd:
            self.note("the provider's usage had impossible numbers, which were repaired")

    def bill_usd(self, usd: int) -> None:
        """Add an amount that the caller reports itself, in nano-dollars, with the estimate's tokens."""
        self._add(Amounts(usd, self.estimate.amounts.tokens, 1))
        self.usage_source = "reported"

    def bill_estimate(self) -> None:
        """Add the whole estimate: nobody will ever say what it was."""
        self._add(self.estimate.amounts)
        self.usage_source = "estimate"

    def unanswered(self) -> None:
        """Count an attempt that was sent and never answered: it may have been billed, and nobody can say."""
        self.unconfirmed += self.estimate.amounts.usd
        if self.policy.on_unanswered == "charge":
            self._add(self.estimate.amounts)

    def _add(self, amounts: Amounts) -> None:
        self._billed[self.metered] = self._billed.get(self.metered, Amounts()) + amounts

    def actual(self) -> tuple[Charge, ...]:
        """Return the charges to settle; 0 where nothing was billed, so that the answer says how every bucket stands then."""
        return charges_of(self.slots, {tier: self._billed.get(tier, Amounts()) for tier in self._touched})

    def spent(self) -> int:
        """Return what was billed, in nano-dollars."""
        return sum(amounts.usd for amounts in self._billed.values())

    def close(self, outcome: Outcome, error: BaseException | None = None) -> bool:
        """Give the call its outcome; False when it had one already."""
        if self.outcome != "open":
            return False
        self.outcome = outcome
        if error is not None:
            # The class alone: a provider's message may quote the prompt.
            self.note(f"ended by {type(error).__name__}")
        return True

    def report(self) -> Decision:
        """Return the decision with what came of the call so far."""
        return replace(
            self.decision,
            actual=self.spent(),
            unconfirmed=self.unconfirmed,
            attempts=self.attempts,
            usage_source=self.usage_source,
            outcome=self.outcome,
            notes=(*self.decision.notes, *self._notes),
        )
