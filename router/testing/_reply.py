from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from router.testing._account import Entry

UsageKind: TypeAlias = Literal["true", "missing", "zero", "negative", "cached_over_prompt", "cumulated", "placeholder_first"]

_CUTS = ("before_request_read", "after_request_read", "before_first_byte", "mid_chunk:N", "before_usage_chunk")
_STALLS = ("before_request_read", "before_first_byte", "after_chunk:N")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Script one answer; without arguments it is a good one of 16 tokens.

    A *chunk* is what carries one token of a stream; after the tokens come one chunk with the finish reason (of each
    choice) and one with the usage, if that was asked for. Responses streams open with events that are no chunk.

    Raises ValueError for a word that is not known here.
    """

    tokens: int | None = None
    """How many output tokens to generate for each choice, cut at the limit that was sent; 16 unless said."""
    text: str | None = None
    """The text to generate instead; its tokens are its own."""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments (JSON text) of the functions to call, instead of a text."""
    refusal: bool = False
    """Give the text as a refusal."""
    overrun: bool = False
    """Generate past the limit that was sent."""
    reasoning_tokens: int = 0
    """Hidden tokens, generated for each choice before its first visible one."""
    output_audio_tokens: int = 0
    """As `reasoning_tokens`, of the audio class."""
    prompt_tokens: int | None = None
    """What the prompt counts, instead of what it was counted at."""
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    input_audio_tokens: int = 0
    usage: UsageKind = "true"
    """What is told of the usage: `zero` and `cached_over_prompt` are billed as told, all others as generated."""
    model: str | None = None
    """The model's name in the answer."""
    status: int = 200
    body: Literal["json", "html"] = "json"
    code: str | None = None
    """The code of an error, such as `insufficient_quota`."""
    retry_after: float | str | None = None
    """The Retry-After header: seconds, or any text."""
    billed: bool = False
    """Bill the whole answer where none was given: an error, a cut or a hang-up before the first byte."""
    delay: float = 0
    """Seconds before the first byte."""
    chunk_delay: float = 0
    """Seconds before each chunk."""
    stall: str | None = None
    """Where to stop for ever: `before_request_read`, `before_first_byte` or `after_chunk:N`."""
    cut: str | None = None
    """Where to reset the connection: `before_request_read`, `after_request_read`, `before_first_byte`, `mid_chunk:N`
    (after N whole ones) or `before_usage_chunk`; in an answer that is no stream the last two fall into its middle."""
    gate: bool = False
    """Hold every chunk, or the whole answer, until `LocalProvider.advance` lets it go."""
    compress: bool = False
    """Send the body gzipped."""
    keep_alive: bool = True
    """Keep the connection for the next request."""

    def __post_init__(self) -> None:
        if self.tokens is not None and (self.text is not None or self.tool_calls):
            raise ValueError("Reply: a text or tool calls count their own tokens; leave out tokens=")
        if self.usage not in get_args(UsageKind):
            raise ValueError(f"Reply: usage={self.usage!r} is none of {', '.join(get_args(UsageKind))}")
        for name, value, known in (("stall", self.stall, _STALLS), ("cut", self.cut, _CUTS)):
            if value is not None and re.sub(r":\d+$", ":N", value) not in known:
                raise ValueError(f"Reply: {name}={value!r} is none of {', '.join(known)}")


def sequence(*replies: Reply) -> Callable[[Entry], Reply]:
    """Script successive requests, whichever they are: one reply each, the last one for all that follow."""
    if not replies:
        raise ValueError("sequence() needs at least one Reply")
    rest = iter(replies)
    return lambda _: next(rest, replies[-1])
