from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import BudgetRouterError, MissingLabel, PolicyError, RuleError, TaskError
from router.task import Task

MESSAGES = [{"role": "user", "content": "a secret question"}]
# Lone surrogates included: labels come from outside.
TEXT = st.text(st.characters(), max_size=20)


def test_a_chat_task_keeps_the_request_as_the_sdk_takes_it() -> None:
    task = Task.chat(messages=MESSAGES, max_completion_tokens=5, extra_headers={"a": "b"})
    assert task.kind == "chat"
    assert dict(task.request) == {"messages": MESSAGES, "max_completion_tokens": 5, "extra_headers": {"a": "b"}}


def test_each_kind_has_its_own_maker() -> None:
    assert Task.response(input="hello").kind == "response"
    assert Task.embedding(input=["hello"]).kind == "embedding"


def test_what_is_said_of_the_task_is_no_part_of_the_request() -> None:
    task = Task.response(input="x", task_class="batch", labels={"user": "alice"}, value=2.5, deadline=30, id="t1")
    assert dict(task.request) == {"input": "x"}
    assert (task.task_class, dict(task.labels), task.value, task.deadline, task.id) == (
        "batch",
        {"user": "alice"},
        2.5,
        30,
        "t1",
    )


def test_a_task_without_an_id_gets_a_fresh_one() -> None:
    first, second = Task.chat(messages=[]), Task.chat(messages=[])
    assert first.id != second.id
    assert len(first.id) == 32


def test_a_task_cannot_be_changed_from_outside() -> None:
    request: dict[str, Any] = {"messages": MESSAGES}
    labels = {"user": "alice"}
    task = Task(kind="chat", request=request, labels=labels)
    request["messages"] = []
    labels["user"] = "bob"
    assert (task.request["messages"], task.labels["user"]) == (MESSAGES, "alice")
    with pytest.raises(TypeError):
        task.labels["user"] = "bob"  # type: ignore[index]
    with pytest.raises(TypeError):
        task.request["messages"] = []  # type: ignore[index]
    with pytest.raises(AttributeError):
        task.deadline = 5  # type: ignore[misc]


@given(st.dictionaries(TEXT, TEXT, max_size=4))
def test_any_string_is_a_safe_label(labels: dict[str, str]) -> None:
    assert dict(Task.chat(messages=[], labels=labels).labels) == labels


@pytest.mark.parametrize("value", ["a}b{c:d\n", "", "x" * 10_240, "\ud800", "\0"])
def test_odd_label_values_are_kept_as_they_are(value: str) -> None:
    assert Task.chat(messages=[], labels={"user": value}).labels["user"] == value


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": "gpt-5"}, "the router picks the model, after the policy: leave model out"),
        (
            {"stream": False},
            "whether a reply is streamed is said by router.run or router.stream: leave stream out",
        ),
        ({"labels": {"user": 7}}, "label 'user' must be a string, not 7: write str(…) around it"),
        (
            {"labels": {"user": ["a secret"]}},
            "label 'user' must be a string, not a value of type list: write str(…) around it",
        ),
        ({"labels": {7: "x"}}, "the name of a label must be a string, not 7"),
        (
            {"labels": "user"},
            "labels must map names to strings, such as {'user': 'alice'}, not be a value of type str",
        ),
        ({"task_class": 1}, "task_class must be the name of a class or None, not 1"),
        ({"value": float("nan")}, "value must be a finite number or None, not nan"),
        ({"value": True}, "value must be a finite number or None, not True"),
        ({"deadline": -1}, "deadline must be a number of seconds from 0 or None, not -1"),
        ({"deadline": float("inf")}, "deadline must be a number of seconds from 0 or None, not inf"),
        ({"deadline": "soon"}, "deadline must be a number of seconds from 0 or None, not a value of type str"),
        ({"id": ""}, "id must be a string that is not empty; leave it out for a fresh one"),
    ],
)
def test_a_mistake_in_a_task_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError) as refusal:
        Task.chat(messages=[], **options)
    assert str(refusal.value) == sentence


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TaskError, match="kind must be 'chat', 'response' or 'embedding'"):
        Task(kind="image", request={})  # type: ignore[arg-type]


def test_a_request_that_is_no_mapping_is_refused_without_being_quoted() -> None:
    with pytest.raises(TaskError) as refusal:
        Task(kind="chat", request="a secret question")  # type: ignore[arg-type]
    assert "secret" not in str(refusal.value)


def test_embeddings_name_no_model_either() -> None:
    with pytest.raises(TaskError, match="the router picks the model"):
        Task.embedding(input="x", model="text-embedding-3-small")


@pytest.mark.parametrize(
    ("options", "asked"),
    [({}, False), ({"stream_options": {"include_usage": True}}, True), ({"stream_options": None}, False)],
)
def test_a_task_remembers_whether_usage_was_asked_for(options: dict[str, Any], *, asked: bool) -> None:
    assert Task.chat(messages=[], **options).include_usage is asked


def test_a_repr_shows_the_names_of_labels_and_nothing_of_the_request() -> None:
    task = Task.chat(messages=MESSAGES, labels={"user": "alice", "run": "r1"}, task_class="batch", id="t1")
    assert repr(task) == "<Task t1 chat class=batch labels=['user', 'run']>"


def test_a_task_survives_pickle_and_copy() -> None:
    task = Task.response(input="x", labels={"user": "alice"}, value=1.5, deadline=9, task_class="batch")
    assert pickle.loads(pickle.dumps(task)) == task == copy.deepcopy(task)  # noqa: S301 - our own bytes


def test_tasks_can_stand_in_a_set() -> None:
    task = Task.chat(messages=MESSAGES)
    assert len({task, copy.copy(task), Task.chat(messages=MESSAGES)}) == 2


def test_a_task_put_into_a_class_is_otherwise_the_same() -> None:
    task = Task.chat(messages=MESSAGES, labels={"user": "alice"}, id="t1")
    assert task.in_class("batch") == Task.chat(messages=MESSAGES, labels={"user": "alice"}, id="t1", task_class="batch")
    assert task.in_class("batch").in_class("batch").task_class == "batch"


def test_a_missing_label_says_which_cap_needs_it() -> None:
    error = MissingLabel("user", "tokens/day@UTC/user")
    assert (error.label, error.cap) == ("user", "tokens/day@UTC/user")
    assert str(error) == (
        "the task has no label 'user', which cap 'tokens/day@UTC/user' is counted by: give it with labels={'user': …}"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own bytes


def test_every_error_has_the_one_root_and_a_builtin_of_its_kind() -> None:
    assert issubclass(RuleError, BudgetRouterError)
    assert [issubclass(MissingLabel, kind) for kind in (BudgetRouterError, LookupError)] == [True, True]
    assert [issubclass(PolicyError, kind) for kind in (BudgetRouterError, ValueError)] == [True, True]
    assert [issubclass(TaskError, kind) for kind in (BudgetRouterError, ValueError)] == [True, True]
