"""What a model generated, as it comes by: the usage that the provider gives, and the text to count where it gives none."""

from __future__ import annotations

from typing import Any

from router.task import Kind
from router.usage import Usage, usage_of

__all__ = ["Tally"]


class Tally:
    """Add chunks, events or whole replies to it.

    `end` is the usage that came with or after the end, which is what the provider bills; `so_far` is the last one that came
    before it: cumulated, or a placeholder. `started` says whether a model began to answer; `final` whether it came to its end.
    `deltas` and `chars` are how much text came.
    """

    __slots__ = ("_pieces", "chars", "deltas", "end", "final", "model", "so_far", "started")

    def __init__(self) -> None:
        self.end: Usage | None = None
        self.so_far: Usage | None = None
        self.started = False
        self.final = False
        self.model: str | None = None
        self.deltas = 0
        self.chars = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that was generated, in the order in which it came."""
        return "".join(self._pieces)

    def add(self, kind: Kind, chunk: Any) -> None:
        """Count one chunk of Chat Completions, or one event of Responses."""
        if kind == "chat":
            for choice in getattr(chunk, "choices", None) or ():
                self._add_message(getattr(choice, "delta", None))
                if getattr(choice, "finish_reason", None) is not None:
                    self.final = True
            self._add_reply(chunk)
            return
        name = getattr(chunk, "type", "")
        if name.endswith(".delta"):
            self._add_text(getattr(chunk, "delta", None))
        elif name == "response.output_item.added":
            self._add_text(getattr(getattr(chunk, "item", None), "name", None))
        elif name in ("response.completed", "response.incomplete", "response.failed"):
            self.final = True
        self._add_reply(getattr(chunk, "response", None))

    def add_whole(self, kind: Kind, reply: Any) -> None:
        """Count a reply that was not streamed."""
        self.started = self.final = True
        if kind == "chat":
            for choice in getattr(reply, "choices", None) or ():
                self._add_message(getattr(choice, "message", None))
        elif kind == "response":
            for item in getattr(reply, "output", None) or ():
                for name in ("name", "arguments"):
                    self._add_text(getattr(item, name, None))
                for part in (*(getattr(item, "content", None) or ()), *(getattr(item, "summary", None) or ())):
                    self._add_text(getattr(part, "text", None) or getattr(part, "refusal", None))
        self._add_reply(reply)

    def _add_reply(self, reply: Any) -> None:
        if reply is None:
            return
        self.model = getattr(reply, "model", None) or self.model
        usage = usage_of(reply)
        if usage is None:
            return
        if self.final:
            self.end = usage
        else:
            self.so_far = usage

    def _add_message(self, message: Any) -> None:
        if message is None:
            return
        for name in ("content", "refusal", "reasoning_content"):
            self._add_text(getattr(message, name, None))
        for tool in getattr(message, "tool_calls", None) or ():
            self._add_function(getattr(tool, "function", None))
        self._add_function(getattr(message, "function_call", None))

    def _add_function(self, function: Any) -> None:
        self._add_text(getattr(function, "name", None))
        self._add_text(getattr(function, "arguments", None))

    def _add_text(self, text: Any) -> None:
        if isinstance(text, str) and text:
            self._pieces.append(text)
            self.deltas += 1
            self.chars += len(text)
