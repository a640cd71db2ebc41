"""From a task to a reservation, or to a decision that says why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.call import Estimate
from router.charges import Metered, Slots, room_for, state_of
from router.classes import TaskClass
from router.decision import Decision, Reason
from router.estimate import Estimator, choices, output_limit
from router.policy import Policy
from router.task import Task, Tier
from stores import Misfit, Verdict

__all__ = ["BUSY_RETRY_AFTER", "DOWN_RETRY_AFTER", "Plan", "plan", "refusal_of"]

BUSY_RETRY_AFTER = 1.0
"""Seconds after which a refusal for held budget is worth another try. Holds settle as calls end, which nobody knows ahead."""

DOWN_RETRY_AFTER = 5.0
"""Seconds after which a refusal because the store is down is worth another try."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a task wants: its tiers in order of preference, and the most that each can take."""

    policy: Policy
    task: Task
    task_class: TaskClass
    wanted: Tier | None
    reason: Reason
    options: tuple[Metered, ...]
    estimates: Mapping[Metered, Estimate]
    unseen: bool

    def decide(self, *, served: bool, reason: Reason, metered: Metered | None = None, notes: Sequence[str] = ()) -> Decision:
        """Make the decision that follows; `metered` is what is used."""
        first = self.estimates[self.options[0] if metered is None else metered]
        tier = None if metered is None or metered == "embedding" else metered
        downgraded = served and self.wanted == "strong" and tier == "cheap"
        return Decision(
            task_id=self.task.id,
            task_class=self.task_class.name,
            served=served,
            reason=reason,
            wanted=self.wanted,
            tier=tier,
            model=first.model.name if served else None,
            estimate=first.amounts.usd,
            output_limit=first.output_limit,
            outcome="open" if served else "refused",
            review=downgraded and self.task_class.review_downgrades,
            notes=tuple(notes),
        )

    def shrunk(self, slots: Slots, verdict: Verdict) -> Plan | None:
        """Return the plan with output limits that fit into the room that the verdict found, or None where none can."""
        least = self.task_class.least_output
        if least is None:
            return None
        estimates = dict(self.estimates)
        for metered, misfits in zip(self.options, verdict.misfits, strict=True):
            estimate = estimates[metered]
            limit = None if not estimate.chosen else _limit_in(room_for(slots, misfits), estimate, least)
            if limit is None:
                del estimates[metered]
            else:
                estimates[metered] = estimate.with_limit(limit)
        options = tuple(option for option in self.options if option in estimates)
        kept = {tier: estimates.get(tier, estimate) for tier, estimate in self.estimates.items()}
        return replace(self, options=options, estimates=kept) if options else None


async def plan(policy: Policy, task: Task, task_class: TaskClass, estimator: Estimator) -> Plan:
    """Ask the rule, bound the call on each tier, and mind the envelope. Raises what the rule raises."""
    if task.kind == "embedding":
        estimate, unseen = await _estimate(policy, task, task_class, "embedding", estimator)
        return Plan(policy, task, task_class, None, "embedding", ("embedding",), {"embedding": estimate}, unseen)
    wanted = await policy.want(task)
    estimates: dict[Metered, Estimate] = {}
    options: tuple[Metered, ...] = ("cheap",)
    reason: Reason = "rule"
    unseen = False
    downgrades = task_class.when_expired == "downgrade"
    if wanted == "strong":
        strong, unseen = await _estimate(policy, task, task_class, "strong", estimator)
        if policy.fits(strong.input_tokens):
            estimates["strong"] = strong
            # A class that waits waits for strong; what it then takes instead is asked for when its wait is over.
            at_once = task_class.max_wait == 0 and downgrades
            options = ("strong", "cheap") if at_once else ("strong",)
        else:
            reason = "envelope"
    falls_back = (task_class.on_model_error or policy.on_model_error) == "cheap"
    if "cheap" in options or downgrades or falls_back or task_class.when_store_down == "cheap":
        estimates["cheap"], unseen_by_cheap = await _estimate(policy, task, task_class, "cheap", estimator)
        unseen = unseen or unseen_by_cheap
    return Plan(policy, task, task_class, wanted, reason, options, estimates, unseen)


async def _estimate(
    policy: Policy, task: Task, task_class: TaskClass, metered: Metered, estimator: Estimator
) -> tuple[Estimate, bool]:
    model = policy.model(metered)
    bound = await estimator.prompt(task.kind, task.request, model.name, model.encoding)
    tokens, likely = bound.input_tokens, bound.likely
    if bound.unseen and policy.unseen_input == "hold":
        # What cannot be seen is at most what the model can take in; refused where nobody says how much that is.
        tokens = likely = max(tokens, model.context_window or 0)
    unseen = bound.unseen and (policy.unseen_input == "refuse" or model.context_window is None)
    if task.kind == "embedding":
        return Estimate(model, tokens, likely, 0, None, False), unseen
    sent = output_limit(task.kind, task.request)
    if sent is not None:
        limit = sent[1]
    else:
        limit = task_class.output_limit or policy.output_limit
        if model.output_limit is not None:
            limit = min(limit, model.output_limit)
    return Estimate(model, tokens, likely, limit * choices(task.request), limit, sent is None), unseen


def _limit_in(room: Mapping[str, int], estimate: Estimate, least: int) -> int | None:
    """Return the largest output limit from `least` up whose amounts fit into `room`; None where even that does not."""

    def fits(limit: int) -> bool:
        amounts = estimate.with_limit(limit).amounts
        return all(amounts.of(unit) <= left for unit, left in room.items())  # type: ignore[arg-type]

    low, high = least, (estimate.output_limit or 0) - 1
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def refusal_of(decision: Decision, slots: Slots, verdict: Verdict, *, drop: bool) -> Decision:
    """Say which cap refused, what would make the task fit, and when to try again.

    The option that fits soonest counts; within it the bucket that stands longest in the way. A task that is dropped gets no
    time for another try.
    """
    order = {"busy": 0, "spent": 1, "never": 2}

    def delay(misfit: Misfit) -> float:
        ends = misfit.charge.bucket.ends
        left = float("inf") if ends is None else (ends - verdict.now) / 1000
        if misfit.kind == "busy":
            return min(BUSY_RETRY_AFTER, left)
        return left if misfit.kind == "spent" else float("inf")

    def rank(misfit: Misfit) -> tuple[int, float]:
        return order[misfit.kind], delay(misfit)

    worst = min((max(option, key=rank) for option in verdict.misfits), key=rank)
    wait = delay(worst)
    return replace(
        decision,
        kind=worst.kind,
        cap=state_of(slots, worst),
        retry_after=None if drop or wait == float("inf") else wait,
    )
