from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from router.testing._account import Entry
from router.testing._reply import Reply
from router.testing._text import Tokenizer, words

Usage: TypeAlias = dict[str, int]


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that an answer says: a text, a refusal or a call of a function; each part is one token."""

    kind: Literal["text", "refusal", "call"]
    parts: tuple[str, ...]
    name: str = ""
    name_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the answer to one request will be, if nothing interrupts it."""

    entry: Entry
    reply: Reply
    items: tuple[Item, ...]
    choices: int
    reasoning: int
    """Hidden tokens of each choice, as is `audio`."""
    audio: int
    finish: Literal["stop", "length", "tool_calls"]

    @property
    def model(self) -> str:
        return self.reply.model or self.entry.model

    @property
    def hidden(self) -> int:
        """Tokens of all choices that no chunk shows; they are generated with the first chunk."""
        return self.choices * (self.reasoning + self.audio)

    @property
    def total(self) -> int:
        """Output tokens of all choices."""
        return self.hidden + self.choices * sum(item.name_tokens + len(item.parts) for item in self.items)

    def usage(self, generated: int) -> Usage:
        """Return the true usage once `generated` output tokens are there."""
        prompt = self.entry.prompt_tokens
        cached = self.entry.cached_tokens
        written = min(self.reply.cache_write_tokens, prompt - cached)
        return {
            "input_tokens": prompt,
            "cached_tokens": cached,
            "cache_write_tokens": written,
            "input_audio_tokens": min(self.reply.input_audio_tokens, prompt - cached - written),
            "output_tokens": generated,
            "reasoning_tokens": self.choices * self.reasoning if generated else 0,
            "output_audio_tokens": self.choices * self.audio if generated else 0,
        }

    def told(self, generated: int) -> Usage | None:
        """Return the usage as the answer tells it; None when it tells none."""
        usage = self.usage(generated)
        match self.reply.usage:
            case "missing":
                return None
            case "zero":
                return dict.fromkeys(usage, 0)
            case "negative":
                return {name: -value for name, value in usage.items()}
            case "cached_over_prompt":
                return usage | {"cached_tokens": usage["input_tokens"] + 100, "cache_write_tokens": 0}
        return usage

    def bill(self) -> Usage:
        """Return the usage that a whole answer is billed at."""
        told = self.told(self.total)
        if told is None or self.reply.usage == "negative":
            return self.usage(self.total)
        return told | {"input_tokens": max(told["input_tokens"], told["cached_tokens"])}


def plan(entry: Entry, reply: Reply, tokenizer: Tokenizer, steered: int | None) -> Plan:
    """Decide what the answer says; `steered` output tokens if that is not None."""
    if entry.path.endswith("/embeddings"):
        return Plan(entry, reply, (), 1, 0, 0, "stop")
    items = _items(reply, tokenizer, steered)
    reasoning, audio = reply.reasoning_tokens, reply.output_audio_tokens
    finish: Literal["stop", "length", "tool_calls"] = "tool_calls" if reply.tool_calls else "stop"
    limit = entry.output_limit
    if limit is not None and not reply.overrun:
        wanted = reasoning + audio + sum(item.name_tokens + len(item.parts) for item in items)
        reasoning = min(reasoning, limit)
        audio = min(audio, limit - reasoning)
        if wanted > limit:
            items, finish = _shortened(items, limit - reasoning - audio), "length"
    n = entry.body.get("n")
    choices = n if isinstance(n, int) and n > 0 and entry.path.endswith("/completions") else 1
    return Plan(entry, reply, tuple(items), choices, reasoning, audio, finish)


def output_limit(body: Mapping[str, object]) -> int | None:
    """Return the output limit that a request names, in whichever field."""
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        if isinstance(limit := body.get(name), int):
            return limit
    return None


def _items(reply: Reply, tokenizer: Tokenizer, steered: int | None) -> list[Item]:
    if reply.tool_calls and steered is None:
        return [Item("call", tokenizer.split(arguments), name, tokenizer.count(name)) for name, arguments in reply.tool_calls]
    if reply.text is not None and steered is None:
        parts = tokenizer.split(reply.text)
    else:
        parts = words(next(number for number in (steered, reply.tokens, 16) if number is not None))
    return [Item("refusal" if reply.refusal else "text", parts)]


def _shortened(items: list[Item], room: int) -> list[Item]:
    kept: list[Item] = []
    for item in items:
        if item.kind == "call" and room < max(item.name_tokens, 1):
            break
        room -= item.name_tokens
        kept.append(Item(item.kind, item.parts[:room], item.name, item.name_tokens))
        room -= len(kept[-1].parts)
    return kept
