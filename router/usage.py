"""What a reply says that it used, read from any shape that providers send it in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# No context window is near it; a larger count is a fault of the reply, and would overflow what stores can count.
_LARGEST_COUNT = 10**9


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call, or of several added up.

    `input_tokens` is the whole prompt: what was read from the provider's cache, what was written to it, audio and
    images included. `output_tokens` is everything generated, reasoning included. The other counts say how much of
    those two was of which class. `odd` marks numbers that cannot be and were repaired.

    Raises:
        ValueError: a count is not a whole number of 0 or more.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    input_audio_tokens: int = 0
    input_image_tokens: int = 0
    output_audio_tokens: int = 0
    odd: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"{name} is {count!r}: write a whole number of tokens, 0 or more")

    @classmethod
    def zero(cls) -> Usage:
        """Return the usage of nothing."""
        return cls()

    @property
    def tokens(self) -> int:
        """Input and output together, once each: what a tokens cap counts."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return Usage(**sums, odd=self.odd or other.odd)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={count}" for name in _COUNTS if (count := getattr(self, name)))
        return f"Usage({counts}{', ' if counts and self.odd else ''}{'odd=True' if self.odd else ''})"


_COUNTS = (
    "input_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "input_audio_tokens",
    "input_image_tokens",
    "output_audio_tokens",
)


def usage_of(reply: object) -> Usage | None:
    """Read the usage of a chat completion, a Response, an embedding reply or one chunk or event of their streams.

    Takes the SDK's objects and plain dicts, and a bare usage object as well. Explicit zeros are zero. Where a detail
    cannot be (negative, NaN, text, booleans, absurdly large) it counts as 0; parts that exceed their whole raise it.
    Either is marked `odd`, and nothing raises.

    Returns:
        The usage, or None when the reply has none, or one whose tokens of input or output cannot be.
    """
    if isinstance(reply, Usage):
        return reply
    usage = _get(reply, "usage")
    if usage is None:
        # The last event of a Response's stream carries the whole Response.
        usage = _get(_get(reply, "response"), "usage")
    if usage is None:
        usage = reply
    if isinstance(usage, Usage):
        return usage
    return _read(usage)


def _read(usage: object) -> Usage | None:
    prompt = _first(usage, "prompt_tokens", "input_tokens")
    completion = _first(usage, "completion_tokens", "output_tokens")
    if prompt is None and completion is None:
        return None
    if any(_impossible(main) for main in (prompt, completion)):
        return None  # what says that less than nothing was used says nothing
    of_input = _first(usage, "prompt_tokens_details", "input_tokens_details", "input_token_details")
    of_output = _first(usage, "completion_tokens_details", "output_tokens_details", "output_token_details")
    count = _Counter()
    input_tokens = count(prompt)
    cached = count(_get(of_input, "cached_tokens"))
    written = count(_get(of_input, "cache_write_tokens"))
    output_tokens = count(completion)
    reasoning = count(_get(of_output, "reasoning_tokens"))
    total = count(_get(usage, "total_tokens"))

    # Anthropic's own names: there the input leaves out what the cache read and wrote.
    apart = (count(_get(usage, "cache_read_input_tokens")), count(_get(usage, "cache_creation_input_tokens")))
    if any(apart) and not (cached or written):
        cached, written = apart
        input_tokens += cached + written
    elif (cached or written) and total == input_tokens + cached + written + output_tokens:
        input_tokens += cached + written
    elif written > input_tokens:
        # More written than was sent: the prompt must have been given without it.
        input_tokens += cached + written
        count.odd = True
    elif cached + written > input_tokens:
        input_tokens = cached + written
        count.odd = True

    if reasoning and total == input_tokens + output_tokens + reasoning:
        output_tokens += reasoning
    elif reasoning > output_tokens:
        # More reasoning than output: the output must have been given without it.
        output_tokens += reasoning
        count.odd = True

    input_audio = count(_get(of_input, "audio_tokens"))
    input_image = count(_get(of_input, "image_tokens"))
    output_audio = count(_get(of_output, "audio_tokens"))
    if input_audio + input_image > input_tokens:
        input_tokens = input_audio + input_image
        count.odd = True
    if output_audio > output_tokens:
        output_tokens = output_audio
        count.odd = True
    return Usage(
        input_tokens=input_tokens,
        cached_tokens=cached,
        cache_write_tokens=written,
        output_tokens=output_tokens,
        reasoning_tokens=reasoning,
        input_audio_tokens=input_audio,
        input_image_tokens=input_image,
        output_audio_tokens=output_audio,
        odd=count.odd,
    )


def _impossible(value: object) -> bool:
    if value is None:
        return False
    if isinstance(value, float):
        return not (math.isfinite(value) and 0 <= value <= _LARGEST_COUNT)
    return isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_COUNT


class _Counter:
    """Reads counts, and remembers whether one could not be."""

    def __init__(self) -> None:
        self.odd = False

    def __call__(self, value: object) -> int:
        if value is None:
            return 0
        if isinstance(value, float) and math.isfinite(value):
            # Half a token cannot be; the next whole one is the cautious reading.
            whole = math.ceil(value)
            self.odd = self.odd or whole != value
            value = whole
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_COUNT:
            self.odd = True
            return 0
        return value


def _first(source: object, *names: str) -> Any:
    for name in names:
        value = _get(source, name)
        if value is not None:
            return value
    return None


def _get(source: object, name: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(name)
    try:
        return getattr(source, name, None)
    except Exception:  # noqa: BLE001 - a property of somebody's own reply class may raise anything
        return None
