"""What one call holds, what was billed for it, and what is said of it: bookkeeping without any I/O."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from router import Cap, Usage
from router.call import Call
from stores import Charge
from tests.support import CHEAP, STRONG, chat
from tests.test_settling import call_of

pytestmark = pytest.mark.anyio

ALL = Cap(usd=1, per="day", admit_at=1, name="all")
ON_STRONG = Cap(usd=1, per="day", admit_at=1, tiers={"strong"}, name="strong")
ON_CHEAP = Cap(tokens=1000, per="day", admit_at=1, tiers={"cheap"}, name="cheap")
ASKED = Cap(requests=10, per="day", admit_at=1, name="asked")

USAGE = Usage(input_tokens=8, output_tokens=16)
MORE = Usage(input_tokens=3, output_tokens=2)
ESTIMATE = STRONG.bound(input_tokens=9, output_tokens=100)
ON_CHEAP_AT_MOST = CHEAP.bound(input_tokens=9, output_tokens=100)


def amounts(call: Call, charges: tuple[Charge, ...]) -> dict[str, int]:
    """Return the amounts of charges by the names of their caps."""
    names = {slot.bucket.key: slot.cap.name for slot in call.slots}
    return {names[charge.bucket.key]: charge.amount for charge in charges}


async def test_a_new_call_has_taken_nothing() -> None:
    call = await call_of(ALL)
    decision = call.report()
    assert (call.attempts, call.step, call.local, call.tally.started) == (0, 0, False, False)
    assert (decision.attempts, decision.actual, decision.unconfirmed, decision.usage_source) == (0, 0, 0, "none")
    assert (decision.outcome, decision.notes) == ("open", ())


async def test_each_choice_has_the_limit_and_all_of_them_have_to_end() -> None:
    call = await call_of(ALL, task=chat(n=2))
    assert (call.estimate.output_tokens, call.estimate.with_limit(10).output_tokens) == (200, 20)
    for index, final in ((0, False), (1, True)):
        choice = SimpleNamespace(index=index, delta=None, finish_reason="stop")
        call.tally.add("chat", SimpleNamespace(choices=[choice]))
        assert call.tally.final is final


async def test_the_first_outcome_stands() -> None:
    call = await call_of(ALL)
    assert call.close("failed", KeyError("the secret prompt")) is True
    assert call.close("left", ValueError()) is False
    assert call.close("served") is False
    assert (call.outcome, call.report().outcome, call.report().notes) == ("failed", "failed", ("ended by KeyError",))


async def test_what_is_noted_again_is_said_once() -> None:
    call = await call_of(ALL)
    for text in ("odd", "odder", "odd"):
        call.note(text)
    assert call.report().notes == ("odd", "odder")


async def test_another_attempt_is_held_for_beside_what_was_billed() -> None:
    call = await call_of(ALL, ASKED)
    assert call.repeats_for_free
    assert amounts(call, call.needs()) == {"all": ESTIMATE, "asked": 1}
    call.bill(USAGE, "provider")
    assert not call.repeats_for_free
    assert amounts(call, call.needs()) == {"all": STRONG.cost(USAGE) + ESTIMATE, "asked": 1}
    call.bill(MORE, "provider")
    assert amounts(call, call.needs()) == {"all": STRONG.cost(USAGE) + STRONG.cost(MORE) + ESTIMATE, "asked": 1}


async def test_on_another_tier_what_was_billed_on_either_stays_held() -> None:
    call = await call_of(ALL, ON_STRONG, ON_CHEAP, on_model_error="cheap")
    call.bill(USAGE, "provider")
    billed = STRONG.cost(USAGE)
    expected = {"all": billed + ON_CHEAP_AT_MOST, "strong": billed, "cheap": 109}
    assert amounts(call, call.needs("cheap")) == expected
    call.switch("cheap")
    assert amounts(call, call.needs()) == expected
    call.bill(MORE, "provider")
    again = CHEAP.cost(MORE)
    assert amounts(call, call.needs()) == {
        "all": billed + again + ON_CHEAP_AT_MOST,
        "strong": billed,
        "cheap": MORE.tokens + 109,
    }
    assert amounts(call, call.actual()) == {"all": billed + again, "strong": billed, "cheap": MORE.tokens}
    assert (call.spent(), call.report().actual) == (billed + again, billed + again)


async def test_the_usage_is_that_of_all_attempts_and_its_source_that_of_the_last() -> None:
    call = await call_of(ALL)
    call.bill(USAGE, "provider")
    call.bill(MORE, "counted")
    assert call.usage == USAGE + MORE
    assert call.report().usage_source == "counted"


async def test_what_cost_nothing_is_settled_at_0_in_every_bucket_that_it_held() -> None:
    call = await call_of(ALL, ASKED)
    assert amounts(call, call.actual()) == {"all": 0, "asked": 0}
    call.bill(Usage(), "provider")
    assert amounts(call, call.actual()) == {"all": 0, "asked": 1}


async def test_what_a_caller_reports_in_dollars_counts_the_estimates_tokens() -> None:
    tokens = Cap(tokens=1000, per="day", admit_at=1, name="tokens")
    call = await call_of(ALL, ASKED, tokens)
    call.bill_usd(7)
    assert amounts(call, call.actual()) == {"all": 7, "asked": 1, "tokens": 109}
    assert call.report().usage_source == "reported"


@pytest.mark.parametrize(("on_unanswered", "billed"), [("release", 0), ("charge", 2 * ESTIMATE)])
async def test_attempts_without_an_answer_are_unconfirmed_and_billed_where_the_policy_says_so(
    on_unanswered: str, billed: int
) -> None:
    call = await call_of(ALL, on_unanswered=on_unanswered)
    call.unanswered()
    call.unanswered()
    assert (call.report().unconfirmed, call.spent()) == (2 * ESTIMATE, billed)
    assert call.repeats_for_free is (billed == 0)


async def test_a_repaired_usage_is_noted() -> None:
    call = await call_of(ALL)
    call.bill(USAGE, "provider")
    assert call.report().notes == ()
    call.bill(Usage(input_tokens=1, output_tokens=1, odd=True), "provider")
    assert call.report().notes == ("the provider's usage had impossible numbers, which were repaired",)


async def test_its_repr_says_how_far_it_came() -> None:
    call = await call_of(ALL)
    call.attempts = 2
    assert repr(call) == f"<Call {call.task.id} strong attempts=2 open>"


async def test_another_output_limit_changes_what_is_generated_at_most_and_nothing_else() -> None:
    estimate = (await call_of(ALL)).estimate
    smaller = estimate.with_limit(10)
    assert (smaller.output_limit, smaller.output_tokens, smaller.input_tokens) == (10, 10, estimate.input_tokens)
    assert smaller.amounts.usd == STRONG.bound(input_tokens=9, output_tokens=10)
    assert smaller.amounts.tokens == 19
