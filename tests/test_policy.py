from __future__ import annotations

import inspect
import subprocess
import sys
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from router.caps import Cap
from router.classes import TaskClass
from router.errors import MissingLabel, PolicyError, TaskError
from router.policy import Model, Policy, Retries
from router.prices import Price, UnknownPrice, price_of
from router.rules import always, by_class, by_score, resolve
from router.task import Task

CENT = 10_000_000
DOLLAR = 100 * CENT
STRONG = Model("strong-model", price=Price.per_million(input="2", output="10"))
CHEAP = Model("cheap-model", price=Price.per_million(input="0.20", output="1"))


def policy(**options: Any) -> Policy:
    return Policy(**{"strong": STRONG, "cheap": CHEAP, **options})


def refusal_of(make: Any) -> str:
    with pytest.raises(PolicyError) as refusal:
        make()
    return str(refusal.value)


# --- caps


def test_a_cap_in_dollars_is_counted_in_nano_dollars_as_they_are_written() -> None:
    amounts: list[Any] = [50, "50", 50.0, Decimal(50), 0.1, "0.000000001", 0]
    assert [Cap(usd=amount, per="hour").limit for amount in amounts] == [
        *([50 * DOLLAR] * 4),
        DOLLAR // 10,
        1,
        0,
    ]


def test_a_cap_in_tokens_or_requests_is_counted_as_it_is() -> None:
    assert [(cap.unit, cap.limit) for cap in (Cap(tokens=0, per="day"), Cap(requests=7, per="day"))] == [
        ("tokens", 0),
        ("requests", 7),
    ]


@pytest.mark.parametrize(
    ("cap", "line_at"),
    [
        (Cap(usd=1, per="minute"), Fraction(17, 20)),
        (Cap(usd=1, per="month"), Fraction(17, 20)),
        (Cap(usd=1, per=3600), Fraction(1)),
        (Cap(usd=1, per=None, scope="run"), Fraction(1)),
        (Cap(usd=1, per="hour", soft=True), Fraction(1)),
        (Cap(tokens=1, per="hour"), Fraction(1)),
        (Cap(usd=1, per="hour", admit_at=1), Fraction(1)),
        (Cap(tokens=1, per="hour", admit_at=0.6), Fraction(3, 5)),
        (Cap(tokens=1, per="hour", admit_at="0.1"), Fraction(1, 10)),
        (Cap(tokens=1, per="hour", admit_at=Fraction(1, 3)), Fraction(1, 3)),
    ],
)
def test_where_a_cap_stops_admitting(cap: Cap, line_at: Fraction) -> None:
    assert cap.line_at == line_at


def test_the_line_is_rounded_down_and_the_lower_part_holds() -> None:
    cap = Cap(tokens=10, per="day", admit_at=0.85)
    assert cap.line_for(10) == 8
    assert cap.line_for(10, Fraction(1, 2)) == 5
    assert cap.line_for(10, Fraction(1)) == 8
    assert cap.line_for(0) == 0


@given(limit=st.integers(0, 2**52), part=st.fractions(Fraction(1, 1000), 1, max_denominator=1000))
def test_the_line_is_the_largest_whole_number_within_the_part(limit: int, part: Fraction) -> None:
    line = Cap(tokens=limit, per="day").line_for(limit, part)
    assert line <= limit * part < line + 1


LIMITS = {"user:alice": 20, "group:research": 10, "seat:pro": 8, "org:acme": 6, "team:blue": 9, "city:rome": 3, "pet:cat": 2}


@pytest.mark.parametrize(
    ("labels", "limit"),
    [
        ({"user": "alice", "group": "research", "seat": "pro"}, 20),
        ({"user": "bob", "group": "research", "seat": "pro"}, 10),
        ({"user": "bob", "seat": "pro", "team": "blue", "org": "acme"}, 9),
        ({"user": "bob", "org": "acme", "seat": "pro"}, 8),
        ({"user": "bob", "org": "acme", "city": "rome"}, 6),
        ({"pet": "cat", "user": "bob", "city": "rome"}, 3),
        ({"user": "bob", "pet": "cat"}, 2),
        ({"user": "bob", "group": "sales", "city": "oslo"}, 5),
        ({"user": "bob"}, 5),
    ],
)
def test_limits_go_from_the_most_specific_to_the_least(labels: dict[str, str], limit: int) -> None:
    assert Cap(tokens=5, per="day", scope="user", limits=LIMITS).limit_for(labels) == limit


def test_the_last_label_of_a_scope_is_its_most_specific() -> None:
    cap = Cap(tokens=5, per="day", scope=("org", "user"), limits={"org:acme": 6, "group:research": 10, "user:alice": 20})
    assert cap.limit_for({"org": "acme", "user": "alice", "group": "research"}) == 20
    assert cap.limit_for({"org": "acme", "user": "bob", "group": "research"}) == 10
    assert cap.limit_for({"org": "acme", "user": "bob"}) == 6


def test_the_value_in_a_key_of_limits_begins_after_its_first_colon() -> None:
    cap = Cap(tokens=5, per="day", scope="user", limits={"user:a:b": 7, "user:": 0})
    assert [cap.limit_for({"user": value}) for value in ("a:b", "", "a")] == [7, 0, 5]


def test_no_label_reaches_the_limit_of_another() -> None:
    cap = Cap(tokens=5, per="day", scope="user", limits={"user:a:b": 7})
    assert cap.limit_for({"user": "x", "user:a": "b"}) == 5


def test_limits_are_in_the_unit_of_the_cap() -> None:
    cap = Cap(usd=5, per="day", scope="user", limits={"user:alice": "0.5"})
    assert cap.limit_for({"user": "alice"}) == DOLLAR // 2


def test_a_scope_takes_its_values_in_its_own_order() -> None:
    cap = Cap(tokens=5, per="day", scope=("org", "user"))
    assert cap.scope_values({"user": "alice", "org": "acme", "run": "r1"}) == ("acme", "alice")
    assert Cap(tokens=5, per="day").scope_values({}) == ()


def test_a_label_that_a_scope_needs_is_missed_by_name() -> None:
    with pytest.raises(MissingLabel) as missing:
        Cap(tokens=5, per="day", scope=("org", "user")).scope_values({"org": "acme"})
    assert (missing.value.label, missing.value.cap) == ("user", "tokens/day@UTC/org/user")


@pytest.mark.parametrize(
    ("cap", "name"),
    [
        (Cap(usd=1, per="hour", scope="user", tiers={"strong"}), "usd/hour@UTC/user[strong]"),
        (Cap(usd=2, per="week", timezone="Asia/Tokyo", week_starts="sunday"), "usd/week(sunday)@Asia/Tokyo"),
        (Cap(tokens=3, per=172_800, tiers={"strong", "cheap"}), "tokens/172800s[cheap,strong]"),
        (Cap(requests=4, per=None, scope=("org", "run")), "requests/none/org/run"),
        (Cap(usd=1, per="hour", name="the hour"), "the hour"),
    ],
)
def test_the_name_of_a_cap_says_what_it_counts_and_never_how_much(cap: Cap, name: str) -> None:
    assert cap.name == name


def test_alerts_are_due_from_the_lowest_to_the_highest() -> None:
    assert Cap(usd=1, per="hour", alert_at=(0.8, "0.5", 1.2, 0.8)).alert_at == (
        Fraction(1, 2),
        Fraction(4, 5),
        Fraction(6, 5),
    )


def test_caps_say_what_they_are() -> None:
    limits = {"user:a": 1}
    assert repr(Cap(usd=50, per="hour", tiers={"strong"})) == "<Cap usd/hour@UTC[strong]: $50, line at 0.85>"
    assert repr(Cap(usd="0.25", per=None, scope="run", soft=True)) == "<Cap usd/none/run: $0.25, soft>"
    assert repr(Cap(tokens=9, per="day", scope="user", limits=limits)) == (
        "<Cap tokens/day@UTC/user: 9 tokens, line at 1, 1 limits of their own>"
    )


def test_caps_are_values() -> None:
    caps = [Cap(usd=50, per="hour", limits={"user:a": 1}), Cap(usd="50.0", per="hour", limits={"user:a": "1"})]
    assert caps[0] == caps[1]
    assert len({*caps}) == 1
    assert caps[0] != Cap(usd=50, per="hour", limits={"user:a": 2})


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), True, "50 dollars", "1e-10", 2**52, None])
def test_an_amount_that_is_none_is_refused_by_its_name(amount: Any) -> None:
    own: Any = {"user:a": amount}
    assert refusal_of(lambda: Cap(usd=5, per="day", limits=own)).startswith("limits['user:a'] ")
    if amount is not None:
        assert refusal_of(lambda: Cap(usd=amount, per="day")).startswith("usd ")


def test_mistakes_in_an_amount_have_a_sentence_each() -> None:
    amounts: list[Any] = [-1, float("nan"), float("inf"), True, "50 dollars"]
    assert len({refusal_of(lambda amount=amount: Cap(usd=amount, per="day")) for amount in amounts}) == 5


@pytest.mark.parametrize("amount", [-1, 1.5, 5.0, True, "5", float("nan"), 2**52 + 1])
def test_tokens_and_requests_are_whole_numbers(amount: Any) -> None:
    assert refusal_of(lambda: Cap(tokens=amount, per="day")) == (
        f"tokens must be a whole number from 0 to 2**52, not {amount!r}"
    )
    assert refusal_of(lambda: Cap(requests=amount, per="day")).startswith("requests must be a whole number")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "a cap needs a limit: write one of usd=…, tokens=… or requests=…"),
        ({"usd": 1, "tokens": 0}, "a cap counts in one unit, not in usd and tokens: write a cap for each"),
        (
            {"tokens": 1, "tiers": {"stong"}},
            "a tier must be 'strong' or 'cheap', not 'stong'; did you mean 'strong'?",
        ),
        ({"tokens": 1, "tiers": "strong"}, "tiers must be a set such as {'strong'}, or None for all, not 'strong'"),
        ({"tokens": 1, "tiers": []}, "tiers must be a set such as {'strong'}, or None for all, not []"),
        ({"tokens": 1, "scope": ""}, "scope must name labels without a colon, such as 'user', not ''"),
        ({"tokens": 1, "scope": "a:b"}, "scope must name labels without a colon, such as 'user', not 'a:b'"),
        ({"tokens": 1, "scope": ("org", 7)}, "scope must name labels without a colon, such as 'user', not 7"),
        ({"tokens": 1, "scope": ()}, "scope must be a label or a tuple of labels, such as 'user', not ()"),
        ({"tokens": 1, "scope": ("a", "a")}, "scope names a label twice: ('a', 'a')"),
        ({"tokens": 1, "limits": {"alice": 2}}, "limits must have keys such as 'user:alice', label and value, not 'alice'"),
        ({"tokens": 1, "limits": {":a": 2}}, "limits must have keys such as 'user:alice', label and value, not ':a'"),
        ({"tokens": 1, "limits": {7: 2}}, "limits must have keys such as 'user:alice', label and value, not 7"),
        ({"tokens": 1, "limits": [1]}, "limits must map 'label:value' to an amount in tokens, not be [1]"),
        ({"tokens": 1, "limits": {"a:b": 0.5}}, "limits['a:b'] must be a whole number from 0 to 2**52, not 0.5"),
        ({"tokens": 1, "admit_at": 0}, "admit_at must be above 0 and at most 1, not 0"),
        ({"tokens": 1, "admit_at": 1.01}, "admit_at must be above 0 and at most 1, not 1.01"),
        ({"tokens": 1, "admit_at": -0.1}, "admit_at must not be negative, not -0.1"),
        ({"tokens": 1, "admit_at": True}, "admit_at must be a number such as 0.85, not True"),
        ({"tokens": 1, "admit_at": "most"}, "admit_at must be a number such as 0.85, not 'most'"),
        ({"tokens": 1, "admit_at": "1e999999"}, "admit_at must be a number such as 0.85, not '1e999999'"),
        ({"tokens": 1, "admit_at": float("nan")}, "admit_at must be a number such as 0.85, not nan"),
        ({"tokens": 1, "admit_at": float("inf")}, "admit_at must be a number such as 0.85, not inf"),
        (
            {"tokens": 1, "soft": True, "admit_at": 0.5},
            "admit_at has no meaning for a soft cap, which refuses nothing: write alert_at instead",
        ),
        ({"tokens": 1, "soft": "no"}, "soft must be True or False, not 'no'"),
        ({"tokens": 1, "alert_at": 0.5}, "alert_at must be parts of the limit such as (0.5, 0.8), not 0.5"),
        ({"tokens": 1, "alert_at": (0, 0.5)}, "alert_at must hold parts of the limit above 0, not 0"),
        ({"tokens": 1, "name": ""}, "name must be a string that is not empty, not ''"),
    ],
)
def test_a_mistake_in_a_cap_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    assert refusal_of(lambda: Cap(per="day", **options)) == sentence


def test_a_window_or_a_time_zone_that_does_not_exist_is_refused_by_the_cap() -> None:
    hourly: Any = "hourly"
    assert refusal_of(lambda: Cap(usd=1, per=hourly)).endswith("not 'hourly'; did you mean 'hour'?")
    assert refusal_of(lambda: Cap(usd=1, per="day", timezone="Asia/Tokio")).endswith("did you mean 'Asia/Tokyo'?")


def test_a_cap_without_a_window_has_to_say_so() -> None:
    with pytest.raises(TypeError, match="'per'"):
        Cap(usd=1)  # type: ignore[call-arg]


# --- classes


def test_a_class_that_does_not_wait_needs_no_answer_for_the_end_of_the_wait() -> None:
    task_class = TaskClass("chat")
    assert (task_class.max_wait, task_class.when_expired, task_class.when_store_down) == (0, "retry_later", "closed")
    assert (task_class.allowance, task_class.on_overrun, task_class.admit_at) == (0, "extend", None)


def test_a_class_keeps_what_it_was_given() -> None:
    batch = TaskClass(
        "batch",
        priority=9,
        max_wait="window",
        when_expired="defer",
        when_store_down="cheap",
        allowance_usd="0.5",
        output_limit=100,
        least_output=10,
        admit_at=0.6,
        on_model_error="cheap",
        on_overrun="cut",
        review_downgrades=True,
    )
    assert (batch.priority, batch.max_wait, batch.when_expired, batch.allowance) == (9, "window", "defer", DOLLAR // 2)
    assert (batch.output_limit, batch.least_output, batch.admit_at) == (100, 10, Fraction(3, 5))
    assert (batch.on_model_error, batch.on_overrun, batch.review_downgrades) == ("cheap", "cut", True)


def test_classes_say_what_they_are() -> None:
    assert repr(TaskClass("batch", priority=9, max_wait="window", when_expired="defer")) == (
        "<TaskClass batch: priority 9, waits until the window ends, then defer, closed when the store is down>"
    )
    assert repr(TaskClass("chat", max_wait=2.5, when_expired="downgrade", when_store_down="open", allowance_usd=1)) == (
        "<TaskClass chat: priority 0, waits 2.5 s, then downgrade, open when the store is down>"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"max_wait": 2},
            "when_expired must be said by a class that waits: write 'downgrade', 'retry_later', 'defer' or 'drop'",
        ),
        (
            {"when_expired": "differ"},
            "when_expired must be 'downgrade', 'retry_later', 'defer' or 'drop', not 'differ'; did you mean 'defer'?",
        ),
        ({"max_wait": "windows"}, "max_wait must be a number of seconds or 'window', not 'windows'; did you mean 'window'?"),
        ({"max_wait": -1}, "max_wait must be a number of seconds from 0, not -1"),
        ({"max_wait": float("inf")}, "max_wait must be a number of seconds from 0, not inf"),
        ({"max_wait": True}, "max_wait must be a number of seconds from 0, not True"),
        ({"max_wait": None}, "max_wait must be a number of seconds from 0, not None"),
        (
            {"when_store_down": "opened"},
            "when_store_down must be 'closed', 'cheap' or 'open', not 'opened'; did you mean 'open'?",
        ),
        (
            {"when_store_down": "open"},
            "allowance_usd must be said with when_store_down='open': what this process may spend while the store is down",
        ),
        ({"allowance_usd": 0}, "allowance_usd has no meaning with when_store_down='closed': leave it out"),
        ({"priority": 1.5}, "priority must be a whole number, not 1.5"),
        ({"priority": True}, "priority must be a whole number, not True"),
        ({"output_limit": 0}, "output_limit must be a whole number from 1 to 2**52, not 0"),
        ({"least_output": 1.5}, "least_output must be a whole number from 1 to 2**52, not 1.5"),
        ({"admit_at": 2}, "admit_at must be above 0 and at most 1, not 2"),
        ({"on_model_error": "chep"}, "on_model_error must be 'error' or 'cheap', not 'chep'; did you mean 'cheap'?"),
        ({"on_overrun": "cuts"}, "on_overrun must be 'extend' or 'cut', not 'cuts'; did you mean 'cut'?"),
        ({"review_downgrades": 1}, "review_downgrades must be True or False, not 1"),
        ({"name": 7}, "name must be a string that is not empty, not 7"),
    ],
)
def test_a_mistake_in_a_class_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    assert refusal_of(lambda: TaskClass(**{"name": "chat", **options})) == sentence


@pytest.mark.parametrize("amount", [-1, float("nan"), True, "5 dollars"])
def test_an_allowance_that_is_no_amount_is_refused_by_its_name(amount: Any) -> None:
    refusal = refusal_of(lambda: TaskClass("chat", when_store_down="open", allowance_usd=amount))
    assert refusal.startswith("allowance_usd ")


def test_an_allowance_of_zero_is_a_number() -> None:
    assert TaskClass("chat", when_store_down="open", allowance_usd=0).allowance == 0


# --- models and prices


def test_prices_are_looked_up_when_the_policy_is_built() -> None:
    price, context_window = price_of("gpt-5")
    built = policy(strong=Model("gpt-5"))
    assert built.price("strong") == price
    assert built.model("strong").context_window == context_window
    assert built.price("cheap") == CHEAP.price


def test_own_figures_override_those_that_are_looked_up() -> None:
    own = Price.per_million(input="1", output="1")
    model = policy(strong=Model("gpt-5", price=own, context_window=77)).model("strong")
    assert (model.price, model.context_window) == (own, 77)
    assert policy(strong=Model("gpt-5", price=own)).model("strong").context_window == price_of("gpt-5")[1]


def test_a_model_without_a_price_is_refused_with_how_to_give_one() -> None:
    refusal = refusal_of(lambda: policy(cheap=Model("no-such-model")))
    with pytest.raises(UnknownPrice) as unknown:
        price_of("no-such-model")
    assert refusal == f"cheap: {unknown.value}"
    assert "Price.per_million" in refusal


def test_a_price_of_zero_is_a_price() -> None:
    free = Price.per_million(input=0, output=0)
    assert policy(cheap=Model("home-made", price=free)).price("cheap") == free


def test_one_model_may_serve_both_tiers() -> None:
    built = policy(cheap=STRONG)
    assert built.model("strong") == built.model("cheap")


def test_embeddings_are_metered_at_the_model_that_the_policy_names() -> None:
    model = Model("embedder", price=Price.per_million(input="0.02", output=0))
    assert policy(embedding=model).model("embedding") == model
    assert policy(embedding=model).price("embedding") == model.price
    with pytest.raises(TaskError, match="no model for embeddings"):
        policy().model("embedding")


def test_no_key_is_shown_by_a_model_or_a_policy() -> None:
    client = AsyncOpenAI(api_key="sk-very-secret", base_url="http://127.0.0.1:9/v1")
    model = Model("strong-model", client=client, price=STRONG.price)
    built = policy(strong=model)
    assert "secret" not in f"{model!r}{built!r}"
    assert repr(model) == f"<Model strong-model: {STRONG.price}, AsyncOpenAI>"
    assert repr(Model("gpt-5")) == "<Model gpt-5: price not looked up, no client>"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": ""}, "the name of a model must be a string that is not empty, not ''"),
        ({"client": "sk-very-secret"}, "the client of model 'm' must be an AsyncOpenAI, not a str"),
        ({"price": 2}, "the price of model 'm' must be made by Price.per_million(input=…, output=…)"),
        ({"context_window": 0}, "context_window must be a whole number from 1 to 2**52, not 0"),
        ({"output_limit": -5}, "output_limit must be a whole number from 1 to 2**52, not -5"),
        ({"provider": 7}, "provider must be a string that is not empty, not 7"),
        ({"encoding": ""}, "encoding must be a string that is not empty, not ''"),
    ],
)
def test_a_mistake_in_a_model_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    assert refusal_of(lambda: Model(**{"name": "m", **options})) == sentence


# --- the policy as a whole


def test_a_policy_has_the_defaults_that_are_documented() -> None:
    built = policy()
    assert [task_class.name for task_class in built.classes] == [built.default_class] == ["default"]
    assert (built.caps, built.envelope, built.headroom, built.tree) == ((), None, Fraction(1, 5), None)
    assert (built.on_lease_end, built.on_unanswered, built.on_model_error) == ("release", "release", "error")
    assert (built.hidden_reasoning, built.unseen_input, built.price_as) == ("observed", "hold", "policy")
    assert (built.lease, built.output_limit, built.max_open, built.retries) == (60, 4096, 10_000, Retries())
    assert built.rule == always("strong")


def test_a_prompt_fits_when_it_is_within_the_envelope_with_its_headroom() -> None:
    assert [policy(envelope=6_000).fits(tokens) for tokens in (5_000, 5_001)] == [True, False]
    assert [policy(envelope=6_000, headroom=0).fits(tokens) for tokens in (6_000, 6_001)] == [True, False]
    assert [policy(envelope=0).fits(tokens) for tokens in (0, 1)] == [True, False]
    assert policy().fits(10**9)


def test_classes_are_found_by_name() -> None:
    built = policy(classes=[TaskClass("chat"), TaskClass("batch")], default_class="chat")
    assert [built.task_class(name).name for name in (None, "chat", "batch")] == ["chat", "chat", "batch"]
    with pytest.raises(TaskError) as refusal:
        built.task_class("bacth")
    assert str(refusal.value) == "task_class must be 'chat' or 'batch', not 'bacth'; did you mean 'batch'?"


def test_the_least_output_of_a_class_is_held_to_its_own_limit_first() -> None:
    task_class = TaskClass("chat", output_limit=6_000, least_output=5_000)
    assert policy(classes=[task_class]).task_class("chat").least_output == 5_000
    tight = TaskClass("chat", output_limit=10, least_output=11)
    assert refusal_of(lambda: policy(classes=[tight])).endswith("must not be above its output_limit: 11 > 10")


def test_the_only_class_is_the_default_one() -> None:
    assert policy(classes=[TaskClass("chat")]).default_class == "chat"


@pytest.mark.anyio
async def test_a_task_without_a_class_wants_what_its_default_class_wants() -> None:
    classes = [TaskClass("chat"), TaskClass("batch")]
    built = policy(classes=classes, default_class="batch", rule=by_class({"batch": "cheap", "chat": "strong"}))
    assert await built.want(Task.chat(messages=[])) == "cheap"
    assert await built.want(Task.chat(messages=[], task_class="chat")) == "strong"
    with pytest.raises(TaskError, match="task_class must be"):
        await built.want(Task.chat(messages=[], task_class="none"))


@pytest.mark.anyio
async def test_a_rule_may_be_named_by_its_tier() -> None:
    assert await resolve(policy(rule="cheap").rule, Task.chat(messages=[])) == "cheap"


def nested(*scopes: Any) -> list[Cap]:
    return [Cap(tokens=number, per="day", scope=scope) for number, scope in enumerate(scopes)]


def test_caps_that_nest_under_the_tree_are_accepted() -> None:
    assert policy(tree="org", caps=nested("org", ("org", "user"), ("team", "org"))).tree == "org"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"caps": nested("user", None), "tree": "org"}, "write scope=('org', 'user') or leave tree out"),
        ({"caps": nested(None), "tree": "org"}, "cap 'tokens/day@UTC' does not nest under tree='org': write scope=('org',) "),
        ({"tree": ""}, "tree must be a string that is not empty, not ''"),
        (
            {"caps": [Cap(usd=1, per="day"), Cap(usd=2, per="day")]},
            "two caps count the same thing, 'usd/day@UTC': give one of them another name=…",
        ),
        ({"caps": Cap(usd=1, per="day")}, "caps must be a list of Cap, not <Cap usd/day@UTC: $1, line at 0.85>"),
        ({"caps": [50]}, "caps must hold nothing but Cap(…), not 50"),
        ({"classes": ["chat"]}, "classes must hold nothing but TaskClass(…), not 'chat'"),
        (
            {"classes": [TaskClass("chat"), TaskClass("chat")]},
            "two classes are called 'chat': give one of them another name",
        ),
        (
            {"classes": [TaskClass("chat"), TaskClass("batch")]},
            "default_class must be said where classes are several: 'chat' or 'batch'",
        ),
        ({"default_class": "defualt"}, "default_class must be 'default', not 'defualt'; did you mean 'default'?"),
        (
            {"classes": [TaskClass("chat", least_output=5000)]},
            "least_output of class 'chat' must not be above its output_limit: 5000 > 4096",
        ),
        ({"envelope": -1}, "envelope must be a whole number from 0 to 2**52, not -1"),
        ({"envelope": True}, "envelope must be a whole number from 0 to 2**52, not True"),
        ({"headroom": -0.2}, "headroom must not be negative, not -0.2"),
        ({"headroom": "nan"}, "headroom must be a number such as 0.85, not 'nan'"),
        ({"rule": "stong"}, "rule must be 'strong' or 'cheap', not 'stong'; did you mean 'strong'?"),
        ({"rule": 7}, "rule must be 'strong', 'cheap' or a function of the task, not 7"),
        (
            {"rule": by_class({"chatt": "cheap"}), "classes": [TaskClass("chat")]},
            "a class in by_class must be 'chat', not 'chatt'; did you mean 'chat'?",
        ),
        ({"retries": 3}, "retries must be Retries(attempts=…), not 3"),
        ({"lease": 0}, "lease must be a number of seconds above 0, not 0"),
        ({"lease": float("nan")}, "lease must be a number of seconds above 0, not nan"),
        ({"on_lease_end": "charged"}, "on_lease_end must be 'release' or 'charge', not 'charged'; did you mean 'charge'?"),
        ({"on_unanswered": "free"}, "on_unanswered must be 'release' or 'charge', not 'free'"),
        ({"on_model_error": "chep"}, "on_model_error must be 'error' or 'cheap', not 'chep'; did you mean 'cheap'?"),
        ({"hidden_reasoning": 1}, "hidden_reasoning must be 'observed' or 'reserved', not 1"),
        ({"unseen_input": "held"}, "unseen_input must be 'hold' or 'refuse', not 'held'; did you mean 'hold'?"),
        ({"price_as": "server"}, "price_as must be 'policy' or 'served', not 'server'; did you mean 'served'?"),
        ({"output_limit": 0}, "output_limit must be a whole number from 1 to 2**52, not 0"),
        ({"settle_timeout": -1}, "settle_timeout must be a number of seconds above 0, not -1"),
        ({"max_open": 0}, "max_open must be a whole number from 1 to 2**52, not 0"),
        ({"strong": "gpt-5"}, "strong must be a Model, not 'gpt-5': write Model('name', client=…)"),
    ],
)
def test_a_mistake_in_a_policy_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal_of(lambda: policy(**options))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attempts": 0}, "attempts must be a whole number from 1 to 2**52, not 0"),
        ({"attempts": 1.5}, "attempts must be a whole number from 1 to 2**52, not 1.5"),
        ({"per_attempt": 0}, "per_attempt must be a number of seconds above 0, not 0"),
        ({"total": float("inf")}, "total must be a number of seconds above 0, not inf"),
        ({"base": -1}, "base must be a number of seconds from 0, not -1"),
        ({"base": 9}, "cap, the longest wait, must not be below base, the first: 8.0 < 9"),
    ],
)
def test_a_mistake_in_the_retries_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    assert refusal_of(lambda: Retries(**options)) == sentence


def test_retries_may_be_without_limits_of_time() -> None:
    assert Retries(per_attempt=None, total=None, base=0, cap=0).per_attempt is None


JUNK: list[Any] = [
    *([], {}, (), set(), object(), b"x", "x", "", "\ud800", 1.5, -1, 0, True, float("nan"), float("-inf")),
    *(10**400, 10**5000, Decimal("sNaN"), Decimal("1e999999"), date(2026, 1, 1), [None], {"a": None}, ("x", 1)),
]
NEEDED: dict[Any, dict[str, Any]] = {
    Cap: {"tokens": 1, "per": "day"},
    TaskClass: {"name": "chat"},
    Retries: {},
    Model: {"name": "m"},
    Policy: {"strong": STRONG, "cheap": CHEAP},
}


@pytest.mark.parametrize("kind", [*NEEDED])
def test_nothing_that_is_given_raises_another_error(kind: Any) -> None:
    refused = 0
    for option in inspect.signature(kind).parameters:
        for junk in JUNK:
            try:
                kind(**{**NEEDED[kind], option: junk})
            except PolicyError as refusal:
                refused += 1
                assert len(str(refusal)) < 300  # noqa: PT017 - most are refused, and some are fine
    assert refused > len(JUNK)


# --- versions


CHANGES: list[dict[str, Any]] = [
    {"caps": [Cap(usd=50, per="hour")]},
    {"caps": [Cap(usd=51, per="hour")]},
    {"caps": [Cap(usd=50, per="hour", admit_at=1)]},
    {"caps": [Cap(usd=50, per="hour", alert_at=(0.5,))]},
    {"caps": [Cap(usd=50, per="hour", name="x")]},
    {"caps": [Cap(usd=50, per="hour", limits={"user:a": 1})]},
    {"caps": [Cap(usd=50, per="hour", timezone="Asia/Tokyo")]},
    {"classes": [TaskClass("default", priority=1)]},
    {"classes": [TaskClass("default", admit_at=0.5)]},
    {"envelope": 8_000},
    {"envelope": 8_000, "headroom": 0.1},
    {"retries": Retries(attempts=2)},
    {"tree": "org"},
    {"lease": 61},
    {"on_unanswered": "charge"},
    {"cheap": Model("cheap-model", price=STRONG.price)},
    {"cheap": Model("other-model", price=CHEAP.price)},
]


def test_the_version_of_the_net_follows_everything_but_the_rule() -> None:
    versions = {policy(**change).net_version for change in CHANGES}
    assert len(versions | {policy().net_version}) == len(CHANGES) + 1
    assert {policy(**change).rule_version for change in CHANGES} == {policy().rule_version}


def test_the_version_of_the_rule_follows_the_rule_alone() -> None:
    rules: list[Any] = ["strong", "cheap", by_class({"default": "cheap"}), by_score(lambda _: 1, 0.5)]
    assert len({policy(rule=rule).rule_version for rule in rules}) == len(rules)
    assert {policy(rule=rule).net_version for rule in rules} == {policy().net_version}


def test_a_policy_written_differently_has_the_same_version() -> None:
    one = policy(caps=[Cap(usd=50, per=3600, tiers={"strong", "cheap"})], lease=60, headroom="0.2")
    two = policy(caps=(Cap(usd="50.0", per=3600.0, tiers={"cheap", "strong"}),), lease=60.0, rule=always("strong"))
    assert one.version == two.version == f"{one.rule_version}-{one.net_version}"
    assert len(one.version) == 25


def test_the_client_is_no_part_of_the_version() -> None:
    client = AsyncOpenAI(api_key="k", base_url="http://127.0.0.1:9/v1")
    assert policy(strong=Model("strong-model", client=client, price=STRONG.price)).version == policy().version


def test_the_version_is_the_same_in_every_process() -> None:
    program = """
from router.caps import Cap
from router.policy import Model, Policy
from router.prices import Price
free = Price.per_million(input=0, output=0)
caps = [Cap(usd=1, per="day", tiers={"strong", "cheap"}, limits={"user:b": 1, "user:a": 2})]
version = Policy(strong=Model("s", price=free), cheap=Model("c", price=free), caps=caps).version
"""
    here: dict[str, Any] = {}
    exec(program, here)  # noqa: S102 - the text above
    other = subprocess.run([sys.executable, "-c", program + "print(version)"], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == here["version"]


def test_policies_say_what_they_are() -> None:
    built = policy(caps=[Cap(usd=1, per="day")])
    assert repr(built) == (
        f"<Policy {built.version}: strong strong-model, cheap cheap-model, 1 caps, 1 classes, always('strong')>"
    )
