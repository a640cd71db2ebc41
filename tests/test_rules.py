from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable
from typing import Any

import pytest

from router.errors import PolicyError, RuleError
from router.rules import Rule, always, by_class, by_score, classes_of, resolve, version_of
from router.task import Task, Tier

pytestmark = pytest.mark.anyio

TASK = Task.chat(messages=[{"role": "user", "content": "a secret question"}], value=0.5)


def worth(task: Task) -> float:
    return task.value or 0


async def worth_later(task: Task) -> float:
    return task.value or 0


def pick(_: Task) -> Tier:
    return "cheap"


async def pick_later(_: Task) -> Tier:
    return "strong"


class Picker:
    def __call__(self, task: Task) -> Tier:
        return "strong"


@pytest.mark.parametrize("tier", ["strong", "cheap"])
async def test_always_wants_one_tier(tier: Tier) -> None:
    assert await resolve(always(tier), TASK) == tier


@pytest.mark.parametrize(("name", "tier"), [("chat", "strong"), ("batch", "cheap"), ("other", "cheap"), (None, "cheap")])
async def test_by_class_wants_what_the_class_is_mapped_to(name: str | None, tier: Tier) -> None:
    rule = by_class({"chat": "strong", "batch": "cheap"}, default="cheap")
    assert await resolve(rule, Task.chat(messages=[], task_class=name)) == tier


async def test_by_class_wants_strong_for_a_class_that_it_does_not_know() -> None:
    assert await resolve(by_class({"batch": "cheap"}), TASK) == "strong"


async def test_by_class_keeps_what_it_was_given() -> None:
    tiers: dict[str, Tier] = {"batch": "cheap"}
    rule = by_class(tiers)
    tiers["batch"] = "strong"
    assert await resolve(rule, Task.chat(messages=[], task_class="batch")) == "cheap"


@pytest.mark.parametrize("score", [worth, worth_later])
@pytest.mark.parametrize(("threshold", "tier"), [(0.49, "strong"), (0.5, "strong"), (0.51, "cheap")])
async def test_by_score_wants_strong_from_the_threshold_on(score: Any, threshold: float, tier: Tier) -> None:
    assert await resolve(by_score(score, threshold), TASK) == tier


@pytest.mark.parametrize(("rule", "tier"), [(pick, "cheap"), (pick_later, "strong"), (Picker(), "strong")])
async def test_any_callable_is_a_rule(rule: Rule, tier: Tier) -> None:
    assert await resolve(rule, TASK) == tier


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("medium", "'medium'"),
        (None, "None"),
        (True, "True"),
        (["strong"], "a value of type list"),
        ("a secret question", "a value of type str"),
    ],
)
async def test_an_answer_that_is_no_tier_names_the_rule(answer: Any, shown: str) -> None:
    def wrong(_: Task) -> Any:
        return answer

    with pytest.raises(RuleError) as refusal:
        await resolve(wrong, TASK)
    assert str(refusal.value) == (
        f"rule {__name__}.test_an_answer_that_is_no_tier_names_the_rule.<locals>.wrong "
        f"must return 'strong' or 'cheap', not {shown}"
    )


@pytest.mark.parametrize(
    ("score", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (True, "True"),
        (None, "None"),
        ("a secret question", "a value of type str"),
    ],
)
async def test_a_score_that_is_no_finite_number_names_the_rule(score: Any, shown: str) -> None:
    async def odd(_: Task) -> Any:
        return score

    with pytest.raises(RuleError) as refusal:
        await resolve(by_score(odd, 0.5), TASK)
    assert str(refusal.value).startswith("the score of rule by_score(")
    assert str(refusal.value).endswith(f"odd, 0.5) must be a finite number, not {shown}")


async def test_what_a_rule_raises_passes_through() -> None:
    def broken(_: Task) -> Tier:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await resolve(broken, TASK)


async def test_a_plain_rule_gives_control_to_nobody() -> None:
    step = resolve(pick, TASK)
    with pytest.raises(StopIteration) as done:
        step.send(None)
    assert done.value.value == "cheap"


@pytest.mark.parametrize(
    ("make", "mistake", "sentence"),
    [
        (always, ("stong",), "the tier of a rule must be 'strong' or 'cheap', not 'stong'; did you mean 'strong'?"),
        (
            by_class,
            ({"chat": "chep"},),
            "the tier of class 'chat' in by_class must be 'strong' or 'cheap', not 'chep'; did you mean 'cheap'?",
        ),
        (lambda word: by_class({}, default=word), ("x",), "the default of by_class must be 'strong' or 'cheap', not 'x'"),
        (by_class, ({"": "cheap"},), "a class in by_class must be a string that is not empty, not ''"),
        (by_class, ("chat",), "by_class must map the names of classes to tiers, not be 'chat'"),
        (by_score, ("worth", 0.5), "by_score needs a function that scores a task, not 'worth'"),
        (by_score, (worth, float("nan")), "the threshold of by_score must be a finite number, not nan"),
    ],
)
def test_a_mistake_in_a_rule_is_one_sentence(make: Any, mistake: Any, sentence: str) -> None:
    with pytest.raises(PolicyError) as refusal:
        make(*mistake)
    assert str(refusal.value) == sentence


def test_rules_say_what_they_are() -> None:
    assert repr(always("cheap")) == "always('cheap')"
    assert repr(by_class({"chat": "strong", "batch": "cheap"})) == (
        "by_class({'batch': 'cheap', 'chat': 'strong'}, default='strong')"
    )
    assert repr(by_score(worth, 0.5)) == f"by_score({__name__}.worth, 0.5)"


def test_the_version_follows_what_the_rule_is() -> None:
    assert version_of(by_class({"a": "cheap", "b": "strong"})) == version_of(by_class({"b": "strong", "a": "cheap"}))
    rules: list[Rule] = [always("strong"), always("cheap"), by_class({"a": "cheap"}), by_class({"a": "strong"})]
    rules += [by_class({"a": "cheap"}, default="cheap"), by_score(worth, 0.5), by_score(worth, 0.6), pick, pick_later]
    rules += [by_score(worth_later, 0.5), Picker()]
    assert len({version_of(rule) for rule in rules}) == len(rules)
    assert version_of(Picker()) == version_of(Picker())


def test_the_version_is_the_same_in_every_process() -> None:
    program = "from router.rules import *; print(version_of(by_class({'b': 'strong', 'a': 'cheap'})))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == version_of(by_class({"a": "cheap", "b": "strong"}))


def test_only_by_class_knows_classes() -> None:
    assert classes_of(by_class({"chat": "strong", "batch": "cheap"})) == ("chat", "batch")
    assert classes_of(pick) == classes_of(always("cheap")) == ()


def test_built_in_rules_are_values() -> None:
    assert by_class({"a": "cheap"}) == by_class({"a": "cheap"})
    assert by_score(worth, 1) == by_score(worth, 1)
    assert len({always("cheap"), always("cheap"), always("strong")}) == 2


def waits(answer: Awaitable[Tier]) -> Rule:
    return lambda _: answer


async def test_anything_that_can_be_awaited_is_awaited() -> None:
    assert await resolve(waits(pick_later(TASK)), TASK) == "strong"
