"""What a model generated, as it comes by: the usage that the provider gives, and the text to count where it gives none."""

from __future__ import annotations

from typing import Any

from router.task import Kind
from router.usage import Usage, usage_of

__all__ = ["Tally"]


class Tally:
    """Add chunks, events or whole replies to it; nothing that a provider sends makes it raise.

    `end` is the usage that came with or after the end, which is what the provider bills; `so_far` is the last one that came
    before it: cumulated, or a placeholder. `started` says whether a model began to answer; `final` whether all of the
    `choices` came to their end; `odd` whether something came that could not be read. `deltas` and `chars` are how much text
    came.
    """

    __slots__ = ("_choices", "_ended", "_texts", "chars", "deltas", "end", "final", "model", "odd", "so_far", "started")

    def __init__(self, choices: int = 1) -> None:
        self.end: Usage | None = None
        self.so_far: Usage | None = None
        self.started = False
        self.final = False
        self.odd = False
        self.model: str | None = None
        self.deltas = 0
        self.chars = 0
        self._choices = choices
        self._ended: set[object] = set()
        self._texts: dict[object, list[str]] = {}

    @property
    def texts(self) -> tuple[str, ...]:
        """All that was generated, one text for each choice or item: their tokens do not run into each other."""
        return tuple("".join(pieces) for pieces in self._texts.values())

    def add(self, kind: Kind, chunk: Any) -> None:
        """Count one chunk of Chat Completions, or one event of Responses."""
        try:
            if kind == "chat":
                self._add_chunk(chunk)
            else:
                self._add_event(chunk)
        except Exception:  # noqa: BLE001 (whatever it is, the reader may make sense of it)
            self.odd = True

    def add_whole(self, kind: Kind, reply: Any) -> None:
        """Count a reply that was not streamed."""
        self.started = self.final = True
        try:
            # First of all, because it is what counts.
            self._add_reply(reply)
            if kind == "chat":
                for number, choice in enumerate(getattr(reply, "choices", None) or ()):
                    self._add_message(number, getattr(choice, "message", None))
            elif kind == "response":
                for number, item in enumerate(getattr(reply, "output", None) or ()):
                    self._add_item(number, item)
        except Exception:  # noqa: BLE001 (as above)
            self.odd = True

    def _add_chunk(self, chunk: Any) -> None:
        for choice in getattr(chunk, "choices", None) or ():
            index = getattr(choice, "index", 0)
            self._add_message(index, getattr(choice, "delta", None))
            if getattr(choice, "finish_reason", None) is not None:
                self._ended.add(index)
                self.final = len(self._ended) >= self._choices
        self._add_reply(chunk)

    def _add_event(self, event: Any) -> None:
        name = getattr(event, "type", "")
        where = getattr(event, "output_index", 0)
        if name.endswith(".delta"):
            self._add_text(where, getattr(event, "delta", None))
        elif name == "response.output_item.added":
            self._add_text(where, getattr(getattr(event, "item", None), "name", None))
        elif name in ("response.completed", "response.incomplete", "response.failed"):
            self.final = True
        self._add_reply(getattr(event, "response", None))

    def _add_item(self, number: int, item: Any) -> None:
        for name in ("name", "arguments"):
            self._add_text(number, getattr(item, name, None))
        for part in (*(getattr(item, "content", None) or ()), *(getattr(item, "summary", None) or ())):
            self._add_text(number, getattr(part, "text", None) or getattr(part, "refusal", None))

    def _add_reply(self, reply: Any) -> None:
        model = getattr(reply, "model", None)
        if isinstance(model, str) and model:
            self.model = model
        usage = usage_of(reply) if reply is not None else None
        if usage is None:
            return
        if self.final:
            self.end = usage
        else:
            self.so_far = usage

    def _add_message(self, index: object, message: Any) -> None:
        if message is None:
            return
        for name in ("content", "refusal", "reasoning_content"):
            self._add_text(index, getattr(message, name, None))
        for tool in getattr(message, "tool_calls", None) or ():
            self._add_function(index, getattr(tool, "function", None))
        self._add_function(index, getattr(message, "function_call", None))

    def _add_function(self, index: object, function: Any) -> None:
        self._add_text(index, getattr(function, "name", None))
        self._add_text(index, getattr(function, "arguments", None))

    def _add_text(self, index: object, text: Any) -> None:
        if isinstance(text, str) and text:
            self._texts.setdefault(index, []).append(text)
            self.deltas += 1
            self.chars += len(text)
