"""Tasks: one unit of work that wants a model, as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args
from uuid import uuid4

from router._checks import is_number
from router.errors import TaskError

__all__ = ["Kind", "Task", "Tier"]

Tier = Literal["strong", "cheap"]
Kind = Literal["chat", "response", "embedding"]

_NOT_YOURS = {
    "model": "the router picks the model, after the policy: leave model out",
    "stream": "whether a reply is streamed is said by router.run or router.stream: leave stream out",
}


def _fresh_id() -> str:
    return uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Task:
    """Describe one unit of work that wants a model.

    Args:
        kind: which of the provider's interfaces the request is for.
        request: the request as the OpenAI SDK takes it, without `model` and `stream`; kept as a copy.
        task_class: the name of a class of the policy; None for the policy's default class.
        labels: what the task is counted by, such as {"user": "alice", "run": "r1"}; any string is a safe value.
        value: what the task is worth, for rules that weigh it; the router gives it no meaning of its own.
        deadline: seconds, from the moment that the router is given the task; None for no deadline.
        id: the name under which the task is recorded; by default a fresh UUID in hex.

    Raises:
        TaskError: one of them is not as said here.
    """

    kind: Kind
    request: Mapping[str, Any] = field(hash=False)
    task_class: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    value: float | None = None
    deadline: float | None = None
    id: str = field(default_factory=_fresh_id)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise TaskError(f"kind must be 'chat', 'response' or 'embedding', not {_kind_of(self.kind)}")
        object.__setattr__(self, "request", MappingProxyType(_request(self.request)))
        object.__setattr__(self, "labels", MappingProxyType(_labels(self.labels)))
        if self.task_class is not None and not isinstance(self.task_class, str):
            raise TaskError(f"task_class must be the name of a class or None, not {_kind_of(self.task_class)}")
        if self.value is not None and not is_number(self.value):
            raise TaskError(f"value must be a finite number or None, not {_kind_of(self.value)}")
        if self.deadline is not None and not (is_number(self.deadline) and self.deadline >= 0):
            raise TaskError(f"deadline must be a number of seconds from 0 or None, not {_kind_of(self.deadline)}")
        if not isinstance(self.id, str) or not self.id:
            raise TaskError("id must be a string that is not empty; leave it out for a fresh one")

    @classmethod
    def chat(
        cls,
        *,
        task_class: str | None = None,
        labels: Mapping[str, str] | None = None,
        value: float | None = None,
        deadline: float | None = None,
        id: str | None = None,
        **request: Any,
    ) -> Task:
        """Describe a task for Chat Completions: the request's keys are those of `chat.completions.create`."""
        return cls._of("chat", request, task_class=task_class, labels=labels, value=value, deadline=deadline, given=id)

    @classmethod
    def response(
        cls,
        *,
        task_class: str | None = None,
        labels: Mapping[str, str] | None = None,
        value: float | None = None,
        deadline: float | None = None,
        id: str | None = None,
        **request: Any,
    ) -> Task:
        """Describe a task for the Responses API: the request's keys are those of `responses.create`."""
        return cls._of("response", request, task_class=task_class, labels=labels, value=value, deadline=deadline, given=id)

    @classmethod
    def embedding(
        cls,
        *,
        task_class: str | None = None,
        labels: Mapping[str, str] | None = None,
        value: float | None = None,
        deadline: float | None = None,
        id: str | None = None,
        **request: Any,
    ) -> Task:
        """Describe a task for the Embeddings API, metered at the policy's embedding model and never routed."""
        return cls._of("embedding", request, task_class=task_class, labels=labels, value=value, deadline=deadline, given=id)

    @classmethod
    def _of(
        cls,
        kind: Kind,
        request: Mapping[str, Any],
        *,
        task_class: str | None,
        labels: Mapping[str, str] | None,
        value: float | None,
        deadline: float | None,
        given: str | None,
    ) -> Task:
        return cls(
            kind=kind,
            request=request,
            task_class=task_class,
            labels={} if labels is None else labels,
            value=value,
            deadline=deadline,
            id=_fresh_id() if given is None else given,
        )

    @property
    def include_usage(self) -> bool:
        """Say whether the caller of a stream asked for the chunk that carries the usage."""
        options = self.request.get("stream_options")
        return isinstance(options, Mapping) and bool(options.get("include_usage"))

    def in_class(self, name: str) -> Task:
        """Return this task as one of the named class: itself when it is one already."""
        return self if self.task_class == name else replace(self, task_class=name)

    def __reduce__(self) -> tuple[Callable[..., Task], tuple[Any, ...]]:
        # A read-only view cannot be pickled; what it shows can.
        facts = (dict(self.request), self.task_class, dict(self.labels), self.value, self.deadline, self.id)
        return _rebuilt, (type(self), self.kind, *facts)

    def __repr__(self) -> str:
        # Label names only, and nothing of the request: a repr ends in logs.
        return f"<Task {self.id} {self.kind} class={self.task_class or 'default'} labels={[*self.labels]}>"


def _rebuilt(cls: type[Task], *facts: Any) -> Task:
    names = ("kind", "request", "task_class", "labels", "value", "deadline", "id")
    return cls(**dict(zip(names, facts, strict=True)))


def _request(request: object) -> dict[str, Any]:
    if not isinstance(request, Mapping) or not all(isinstance(key, str) for key in request):
        raise TaskError(f"request must map the names of the API's parameters to values, not be {_kind_of(request)}")
    # The SDK lays `extra_body` over the body: what is written there is sent just as well.
    extra = request.get("extra_body")
    for key, reason in _NOT_YOURS.items():
        if key in request or (isinstance(extra, Mapping) and key in extra):
            raise TaskError(reason)
    for body in (request, extra if isinstance(extra, Mapping) else {}):
        if body.get("background"):
            raise TaskError("a response in the background is billed after the reply has come: leave background out")
    options = request.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise TaskError(f"stream_options must be a dict such as {{'include_usage': True}}, not {_kind_of(options)}")
    return {key: _copy(value) for key, value in request.items()}


def _copy(value: Any) -> Any:
    """Copy plain containers all the way down: an agent loop goes on appending to its messages while the task waits."""
    if type(value) is dict:
        return {key: _copy(inner) for key, inner in value.items()}
    if type(value) is list:
        return [_copy(inner) for inner in value]
    return value


def _labels(labels: object) -> dict[str, str]:
    if not isinstance(labels, Mapping):
        raise TaskError(f"labels must map names to strings, such as {{'user': 'alice'}}, not be {_kind_of(labels)}")
    for name, value in labels.items():
        if not isinstance(name, str):
            raise TaskError(f"the name of a label must be a string, not {_kind_of(name)}")
        if not isinstance(value, str):
            raise TaskError(f"label {name!r} must be a string, not {_kind_of(value)}: write str(…) around it")
    return dict(labels)


def _kind_of(value: object) -> str:
    """Name a wrong value without quoting it, unless it is a number: it may be part of a prompt."""
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a value of type {type(value).__name__}"
