"""What of a request becomes prompt: its texts, its images, what cannot be read, and what cannot be seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["chat", "response", "embedding"]

# OpenAI's cookbook ("How to count tokens with tiktoken") gives 3 tokens around each message, 1 for a name and 3 that
# prime the reply; older models took 4 a message. For tools it gives up to 12 around each function. The rest is margin.
_PER_MESSAGE, _PER_MESSAGE_NOW, _PER_NAME, _PRIMING = 4, 3, 1, 3
_PER_PART, _PER_CALL, _PER_TOOL, _TOOLS, _SCHEMA = 2, 8, 12, 16, 24

# Said to the provider, not to the model.
_SETTINGS = frozenset(
    """
    audio background best_of cache_control context_management dimensions encoding_format extra_body extra_headers
    extra_query frequency_penalty include logit_bias logprobs max_completion_tokens max_output_tokens max_retries
    max_tokens max_tool_calls metadata modalities model n parallel_tool_calls presence_penalty prompt_cache_key
    prompt_cache_retention reasoning reasoning_effort safety_identifier seed service_tier stop store stream
    stream_options temperature timeout top_k top_logprobs top_p truncation user verbosity
    """.split()  # noqa: SIM905 - forty names read better so
)
# Their content is kept, or fetched, by the provider.
_ELSEWHERE = frozenset({"previous_response_id", "conversation", "prompt", "web_search_options"})
# Tools whose answers come back through the request; all others bring text of their own into the prompt.
_OUR_TOOLS = frozenset({None, "function", "custom", "namespace"})

_MESSAGE_TEXTS = frozenset({"role", "name", "refusal", "arguments"})
# Keys by which a part is more than text, and which are then not read as JSON.
_IMAGE_KEYS = frozenset({"image_url", "detail", "result"})
_AUDIO_KEYS = frozenset({"input_audio"})
_FILE_KEYS = frozenset({"file", "file_data", "file_id", "file_url", "filename"})

# What one value costs to walk, in characters to encode.
_PER_VALUE = 16
# No request that a provider would take has more; a structure of shared parts can unfold to any size.
_MOST_VALUES = 250_000


class TooLarge(Exception):
    """The request is larger than the limit up to which it was to be read."""


@dataclass(slots=True)
class Content:
    """What was found: texts to count, tokens around them (of which margin), characters of data, the detail of each image."""

    texts: list[str] = field(default_factory=list)
    overhead: int = 0
    margin: int = 0
    opaque: int = 0
    images: list[str] = field(default_factory=list)
    tools: bool = False
    unseen: bool = False


def body_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request with `extra_body` laid over it, as the SDK sends it."""
    extra = request.get("extra_body")
    return {**request, **extra} if isinstance(extra, Mapping) else dict(request)


def read(kind: Kind, request: Mapping[str, Any], *, limit: int | None = None) -> Content:
    """Read a request; nothing in it is changed or used up, and nothing odd in it raises.

    Raises:
        TooLarge: reading and encoding it would cost more than encoding `limit` characters.
    """
    reader = _Reader(limit)
    try:
        reader.request(kind, body_of(request))
    except TooLarge:
        if limit is not None:
            raise
        reader.content.unseen = True
    except Exception:  # noqa: BLE001 - somebody's own mapping may raise anything, and what it holds is then unknown
        reader.content.unseen = True
    return reader.content


class _Reader:
    def __init__(self, limit: int | None) -> None:
        self.content = Content()
        self._limit = limit
        self._size = 0
        self._values = 0

    def request(self, kind: Kind, body: Mapping[str, Any]) -> None:
        if kind == "embedding":
            self._embedding(body.get("input"))
            return
        self.content.overhead += _PRIMING
        for key, value in body.items():
            if key in _SETTINGS or absent(value):
                continue
            if key in ("messages", "input"):
                self._messages(value)
            elif key == "instructions":
                self._messages([value] if isinstance(value, str) else value)
            elif key in ("tools", "functions"):
                self._tools(value)
            elif key in _ELSEWHERE:
                self.content.unseen = True
                self._json(value)
            else:
                self.content.overhead += _SCHEMA
                self._json(value)

    def _embedding(self, value: object) -> None:
        if isinstance(value, list | tuple):
            if value and isinstance(value[0], int):
                self.content.overhead += len(value)
            else:
                for item in value:
                    self._visit()
                    self._embedding(item)
        else:
            self._content(value)

    def _messages(self, value: object) -> None:
        for item in value if isinstance(value, list | tuple) else (value,):
            self._message(_plain(item))

    def _message(self, message: object) -> None:
        self._visit()
        self.content.overhead += _PER_MESSAGE
        if not isinstance(message, Mapping):
            self._content(message)
            return
        self.content.margin += _PER_MESSAGE - _PER_MESSAGE_NOW
        kind = message.get("type")
        # Items that name what the provider keeps: it puts more into the prompt than is written here.
        if kind == "item_reference" or (kind == "reasoning" and not message.get("encrypted_content")):
            self.content.unseen = True
        if _is_image(message):
            self._part(message)
            return
        for key, value in message.items():
            if absent(value):
                continue
            if key == "encrypted_content" and isinstance(value, str):
                self.content.opaque += len(value)
            elif key in ("content", "output", "summary") or (isinstance(value, str) and key in _MESSAGE_TEXTS):
                self.content.overhead += _PER_NAME if key == "name" else 0
                self._content(value)
            elif key == "audio":
                # An answer of earlier, by its id.
                self.content.unseen = True
            elif key != "type":
                if key == "tool_calls" and isinstance(value, list | tuple):
                    self.content.overhead += _PER_CALL * len(value)
                self._json(value)

    def _content(self, value: object) -> None:
        if isinstance(value, str):
            self._text(value)
        elif isinstance(value, list | tuple):
            for part in value:
                self._part(_plain(part))
        elif not absent(value):
            self._part(_plain(value))

    def _part(self, part: object) -> None:
        self._visit()
        self.content.overhead += _PER_PART
        self.content.margin += _PER_PART
        if isinstance(part, str):
            self._text(part)
            return
        if not isinstance(part, Mapping):
            self._json(part)
            return
        if _is_image(part):
            read = _IMAGE_KEYS
            self._image(part)
        elif "input_audio" in part:
            read = _AUDIO_KEYS
            self._audio(part["input_audio"])
        elif not part.keys().isdisjoint(_FILE_KEYS):
            read = _FILE_KEYS
            self._file(part.get("file", part))
        else:
            read = frozenset()
        for key, value in part.items():
            if isinstance(value, str) and key in ("text", "refusal"):
                self._text(value)
            elif value and key != "type" and key not in read:
                self._json({key: value})

    def _image(self, part: Mapping[str, Any]) -> None:
        inner = part.get("image_url")
        detail = part.get("detail") or (inner.get("detail") if isinstance(inner, Mapping) else None)
        self.content.images.append(detail if isinstance(detail, str) else "auto")

    def _audio(self, audio: object) -> None:
        data = audio.get("data") if isinstance(audio, Mapping) else None
        if isinstance(data, str | bytes):
            # A tenth of a second of sound is about one token, and far more than one character.
            self.content.opaque += len(data)
        else:
            self.content.unseen = True

    def _file(self, file: object) -> None:
        data = file.get("file_data") if isinstance(file, Mapping) else None
        if isinstance(data, str | bytes):
            self.content.opaque += len(data)
        # A page of a PDF becomes its text and an image, however few bytes it has: only plain text shows its size.
        if not isinstance(data, str) or not data.startswith("data:text/"):
            self.content.unseen = True
        if isinstance(file, Mapping) and isinstance(file.get("filename"), str):
            self._text(file["filename"])

    def _tools(self, value: object) -> None:
        self.content.tools = True
        self.content.overhead += _TOOLS
        for item in value if isinstance(value, list | tuple) else (value,):
            tool = _plain(item)
            self.content.overhead += _PER_TOOL
            if not isinstance(tool, Mapping) or tool.get("type") not in _OUR_TOOLS:
                self.content.unseen = True
            self._json(tool)

    def _text(self, text: str) -> None:
        self._grow(len(text))
        self.content.texts.append(text)

    def _json(self, value: object) -> None:
        """Add a value as its JSON text, and a token for each list or object, whose marks may be written otherwise."""
        out: list[str] = []
        # Without recursion, as depth is up to the caller; what is open is known, as a circle would never end.
        frames: list[tuple[int, Iterator[tuple[bool, object]]]] = [(0, iter([(False, value)]))]
        opened: set[int] = set()
        while frames:
            identity, steps = frames[-1]
            step = next(steps, None)
            if step is None:
                opened.discard(identity)
                frames.pop()
                continue
            is_text, item = step
            if is_text:
                self._grow(len(str(item)))
                out.append(str(item))
                continue
            item = _plain(item)
            if not isinstance(item, Mapping | list | tuple):
                out.append(self._scalar(item))
            elif id(item) not in opened:
                self._visit(len(item))
                self.content.overhead += 1
                opened.add(id(item))
                frames.append((id(item), _unfold(item)))
        self.content.texts.append("".join(out))

    def _scalar(self, value: object) -> str:
        if isinstance(value, str):
            self._grow(len(value))
            return f'"{value}"'
        if isinstance(value, bytes | bytearray):
            self.content.opaque += len(value)
            return ""
        if isinstance(value, bool) or absent(value):
            return "false"
        if isinstance(value, int):
            # Python refuses to write out an int of more than 4,300 digits; a bit is less than a third of one.
            return str(value) if value.bit_length() < 10_000 else "0" * (value.bit_length() // 3 + 1)
        if isinstance(value, float):
            return repr(value)
        # Not JSON: an iterator, say, that reading would use up.
        self.content.unseen = True
        return ""

    def _visit(self, values: int = 1) -> None:
        self._values += values
        if self._values > _MOST_VALUES:
            raise TooLarge
        self._grow(_PER_VALUE * values)

    def _grow(self, size: int) -> None:
        self._size += size
        if self._limit is not None and self._size > self._limit:
            raise TooLarge


def _unfold(item: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterator[tuple[bool, object]]:
    """Yield the JSON text of a list or object, as marks and keys (True) and the values between them (False)."""
    mapping = isinstance(item, Mapping)
    yield True, "{" if mapping else "["
    comma = ""
    for key in item:
        yield True, f'{comma}"{key}": ' if mapping else comma
        yield False, item[key] if isinstance(item, Mapping) else key
        comma = ", "
    yield True, "}" if mapping else "]"


_IMAGES = frozenset({"image_url", "input_image", "computer_screenshot", "image_generation_call"})


def _is_image(part: Mapping[Any, Any]) -> bool:
    return "image_url" in part or part.get("type") in _IMAGES


def absent(value: object) -> bool:
    """Say whether a value stands for nothing: None, or one of the SDK's marks for what was not given."""
    return value is None or type(value).__name__ in ("NotGiven", "Omit")


def _plain(value: Any) -> Any:
    """Return the SDK's objects, and any pydantic model or class of one, as the plain data that is sent."""
    if value is None or isinstance(value, str | int | float | Mapping | list | tuple):
        return value
    try:
        if isinstance(value, type) and hasattr(value, "model_json_schema"):
            return value.model_json_schema()
        if hasattr(value, "model_dump"):
            return value.model_dump(exclude_unset=True, warnings=False)
    except Exception:  # noqa: BLE001 - somebody's own serializer may raise anything
        return value
    return value
