"""Tasks as plain JSON, for whoever keeps them until later: what a `Deferral` writes and its worker reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from router.errors import TaskError
from router.task import Task

__all__ = ["task_from_json", "task_to_json"]

_FIELDS = ("id", "kind", "task_class", "labels", "value", "deadline", "request")


def task_to_json(task: Task) -> dict[str, Any]:
    """Return a task as a dict of what JSON knows, of which `task_from_json` makes an equal task.

    A tuple becomes a list, as it does on the way to the provider. Raises `TaskError`, which names the place and not the value,
    when the request holds anything else that JSON cannot write.
    """
    kept: dict[str, Any] = {name: getattr(task, name) for name in _FIELDS}
    return kept | {"labels": dict(task.labels), "request": _plain(task.request, "request")}


def task_from_json(kept: Mapping[str, Any]) -> Task:
    """Return the task that `task_to_json` wrote. Raises `TaskError` when it is none."""
    if not isinstance(kept, Mapping) or set(kept) != set(_FIELDS):
        raise TaskError(f"a task that was kept must have {', '.join(_FIELDS)} and no more: write it with task_to_json(task)")
    return Task(**kept)


def _plain(value: object, where: str) -> Any:
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TaskError(f"{where} has a key that is no string, and so cannot be kept for later as JSON")
        return {key: _plain(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    # Objects of the SDK are the usual case: an agent loop appends the message that it got.
    remedy = "write .model_dump() after it" if hasattr(value, "model_dump") else "use text, numbers, lists and dicts"
    kind = repr(value) if isinstance(value, float) else f"of type {type(value).__name__}"
    raise TaskError(f"{where} is {kind}, which cannot be kept for later as JSON: {remedy}")
