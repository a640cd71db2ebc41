from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import CompletionUsage
from openai.types.responses import Response, ResponseCompletedEvent

from router.prices import Price
from router.usage import Usage, usage_of


def _chat(**usage: Any) -> dict[str, Any]:
    return {"usage": usage}


def test_a_chat_completion_is_read_with_all_its_classes() -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 50,
        "total_tokens": 150,
        "prompt_tokens_details": {
            "cached_tokens": 20,
            "cache_write_tokens": 10,
            "audio_tokens": 5,
            "image_tokens": 7,
        },
        "completion_tokens_details": {"reasoning_tokens": 30, "audio_tokens": 4},
    }
    data = {"id": "c", "created": 1, "model": "gpt-5", "object": "chat.completion", "choices": [], "usage": usage}
    expected = Usage(
        input_tokens=100,
        cached_tokens=20,
        cache_write_tokens=10,
        output_tokens=50,
        reasoning_tokens=30,
        input_audio_tokens=5,
        input_image_tokens=7,
        output_audio_tokens=4,
    )
    assert expected == usage_of(data)
    assert expected == usage_of(ChatCompletion.model_validate(data))
    assert expected == usage_of(CompletionUsage.model_validate(usage))
    chunk = {**data, "object": "chat.completion.chunk"}
    assert expected == usage_of(ChatCompletionChunk.model_validate(chunk))


def test_a_response_and_the_last_event_of_its_stream_are_read() -> None:
    response = {
        "id": "r",
        "created_at": 1,
        "model": "gpt-5",
        "object": "response",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 3},
            "output_tokens": 50,
            "output_tokens_details": {"reasoning_tokens": 30},
            "total_tokens": 150,
        },
    }
    expected = Usage(input_tokens=100, cached_tokens=20, cache_write_tokens=3, output_tokens=50, reasoning_tokens=30)
    assert expected == usage_of(response)
    assert expected == usage_of(Response.model_validate(response))
    event = {"type": "response.completed", "sequence_number": 9, "response": response}
    assert expected == usage_of(event)
    assert expected == usage_of(ResponseCompletedEvent.model_validate(event))


def test_an_embedding_has_input_only() -> None:
    data = {"data": [], "model": "m", "object": "list", "usage": {"prompt_tokens": 8, "total_tokens": 8}}
    assert Usage(input_tokens=8) == usage_of(data)
    assert Usage(input_tokens=8) == usage_of(CreateEmbeddingResponse.model_validate(data))


@pytest.mark.parametrize("reply", [None, {}, {"usage": None}, {"usage": {}}, {"response": {"usage": None}}, 7, "text", []])
def test_a_reply_without_usage_has_none(reply: object) -> None:
    assert usage_of(reply) is None


def test_explicit_zeros_are_zero_and_not_missing() -> None:
    assert Usage.zero() == usage_of(_chat(prompt_tokens=0, completion_tokens=0, total_tokens=0))


@pytest.mark.parametrize("count", [-5, float("nan"), float("inf"), "12", True, 10**30, [], {}])
def test_a_detail_that_cannot_be_is_zero_and_marked_odd(count: object) -> None:
    usage = usage_of(_chat(prompt_tokens=10, completion_tokens=1, prompt_tokens_details={"cached_tokens": count}))
    assert Usage(input_tokens=10, output_tokens=1, odd=True) == usage


@pytest.mark.parametrize("count", [-5, float("nan"), float("inf"), "12", True, 10**30, [], {}])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_tokens_of_input_or_output_that_cannot_be_are_no_usage(name: str, count: object) -> None:
    assert usage_of(_chat(**{"prompt_tokens": 10, "completion_tokens": 1, name: count})) is None


def test_part_of_a_token_is_a_whole_one_and_odd() -> None:
    assert Usage(input_tokens=10, output_tokens=3, odd=True) == usage_of(_chat(prompt_tokens=10.0, completion_tokens=2.5))


def test_more_cached_than_sent_raises_the_input_and_is_odd() -> None:
    usage = usage_of(_chat(prompt_tokens=100, completion_tokens=1, prompt_tokens_details={"cached_tokens": 150}))
    assert Usage(input_tokens=150, cached_tokens=150, output_tokens=1, odd=True) == usage


@pytest.mark.parametrize(
    "usage",
    [
        {
            "input_tokens": 3,
            "cache_creation_input_tokens": 12_304,
            "cache_read_input_tokens": 0,
            "output_tokens": 550,
        },
        {
            "prompt_tokens": 3,
            "completion_tokens": 550,
            "total_tokens": 12_857,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 12_304},
        },
        {
            "prompt_tokens": 3,
            "completion_tokens": 550,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 12_304},
        },
    ],
)
def test_a_prompt_that_was_given_without_what_the_cache_took_is_completed(usage: dict[str, Any]) -> None:
    read = usage_of({"usage": usage})
    assert read is not None
    assert (read.input_tokens, read.cache_write_tokens) == (12_307, 12_304)
    assert Price.per_million(3, 15, cache_write="3.75").cost(read) == 54_399_000


@pytest.mark.parametrize(
    ("completion", "total", "output", "odd"),
    [
        (40, 50, 40, False),  # included, as OpenAI does
        (10, 50, 40, False),  # apart, and the total says so
        (0, 40, 30, False),
        (10, None, 40, True),  # apart, as it cannot be included
    ],
)
def test_reasoning_is_counted_once(completion: int, total: int | None, output: int, odd: bool) -> None:
    usage = usage_of(
        _chat(
            prompt_tokens=10,
            completion_tokens=completion,
            total_tokens=total,
            completion_tokens_details={"reasoning_tokens": 30},
        )
    )
    assert Usage(input_tokens=10, output_tokens=output, reasoning_tokens=30, odd=odd) == usage


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "prompt_tokens",
                "completion_tokens",
                "input_tokens",
                "output_tokens",
                "total_tokens",
                "cache_read_input_tokens",
            ]
        ),
        _anything,
    ),
    _anything | st.dictionaries(st.sampled_from(["cached_tokens", "cache_write_tokens", "audio_tokens"]), _anything),
    _anything | st.dictionaries(st.sampled_from(["reasoning_tokens", "audio_tokens"]), _anything),
)
def test_whatever_a_reply_says_the_parts_fit_into_their_whole(
    usage: dict[str, Any], of_input: object, of_output: object
) -> None:
    read = usage_of({"usage": usage | {"prompt_tokens_details": of_input, "completion_tokens_details": of_output}})
    if read is not None:
        assert read.input_tokens >= read.cached_tokens + read.cache_write_tokens
        assert read.input_tokens >= read.input_audio_tokens
        assert read.output_tokens >= max(read.reasoning_tokens, read.output_audio_tokens)


def test_usages_add_up_and_stay_odd() -> None:
    first = Usage(input_tokens=10, cached_tokens=4, output_tokens=2)
    second = Usage(input_tokens=1, output_tokens=3, reasoning_tokens=3, odd=True)
    both = Usage(input_tokens=11, cached_tokens=4, output_tokens=5, reasoning_tokens=3, odd=True)
    assert both == first + second
    assert both.tokens == 16


def test_a_usage_shows_only_what_there_is() -> None:
    assert repr(Usage(input_tokens=10, odd=True)) == "Usage(input_tokens=10, odd=True)"
    assert repr(Usage.zero()) == "Usage()"


@pytest.mark.parametrize("count", [-1, True, 1.5, "3"])
def test_a_usage_of_ones_own_must_be_whole_numbers(count: Any) -> None:
    with pytest.raises(ValueError, match=r"output_tokens is .*: write a whole number of tokens, 0 or more"):
        Usage(output_tokens=count)
