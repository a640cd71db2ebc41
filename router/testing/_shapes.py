from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from router.testing._plan import Item, Plan, Usage
from router.testing._text import embedded

Json: TypeAlias = dict[str, Any]

encode = json.JSONEncoder(separators=(",", ":")).encode


class Chunk(NamedTuple):
    """One step of a stream, with the output tokens that it brings."""

    data: bytes
    tokens: int
    usage: bool = False


def whole(plan: Plan) -> bytes:
    """Write the answer that is no stream."""
    if plan.entry.path.endswith("/embeddings"):
        return encode(_embeddings(plan)).encode()
    if plan.entry.path.endswith("/responses"):
        return encode(_Responses(plan).response(whole=True)).encode()
    return encode(_chat(plan)).encode()


def streamed(plan: Plan) -> tuple[bytes, list[Chunk], bytes]:
    """Write the answer as a stream: what opens it, its chunks, and what comes with the last of them."""
    if plan.entry.path.endswith("/responses"):
        events = _Responses(plan)
        opening = events.opening()
        return opening, list(events.chunks()), b""
    return b"", list(_chat_chunks(plan)), b"data: [DONE]\n\n"


def error(status: int, message: str, code: str | None = None) -> bytes:
    """Write an error as OpenAI does."""
    kind = code or ("server_error" if status >= 500 else "invalid_request_error")
    return encode({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def _chat_usage(usage: Usage | None) -> Json | None:
    if usage is None:
        return None
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["input_tokens"] + usage["output_tokens"],
        "prompt_tokens_details": {
            "cached_tokens": usage["cached_tokens"],
            "cache_write_tokens": usage["cache_write_tokens"],
            "audio_tokens": usage["input_audio_tokens"],
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage["reasoning_tokens"],
            "audio_tokens": usage["output_audio_tokens"],
        },
    }


def _call(plan: Plan, index: int, item: Item, arguments: str) -> Json:
    function = {"name": item.name, "arguments": arguments}
    return {"id": f"call_{plan.entry.id}_{index}", "type": "function", "function": function}


def _chat(plan: Plan) -> Json:
    message: Json = {"role": "assistant", "content": None, "refusal": None}
    for index, item in enumerate(plan.items):
        if item.kind == "call":
            message.setdefault("tool_calls", []).append(_call(plan, index, item, item.text))
        else:
            message["refusal" if item.kind == "refusal" else "content"] = item.text
    body = _chat_head(plan, "chat.completion") | {
        "choices": [
            {"index": index, "message": message, "logprobs": None, "finish_reason": plan.finish}
            for index in range(plan.choices)
        ]
    }
    if (usage := _chat_usage(plan.told(plan.total))) is not None:
        body["usage"] = usage
    return body


def _chat_head(plan: Plan, kind: str) -> Json:
    created = int(time.time())
    return {"id": f"chatcmpl-{plan.entry.id:024}", "object": kind, "created": created, "model": plan.model}


def _chat_chunks(plan: Plan) -> Iterator[Chunk]:
    head = _chat_head(plan, "chat.completion.chunk")
    options = plan.entry.body.get("stream_options")
    asked = isinstance(options, dict) and bool(options.get("include_usage"))
    asked = asked and plan.reply.usage != "missing"
    generated = 0

    def chunk(choices: list[Json], tokens: int, *, usage: Usage | None = None, last: bool = False) -> Chunk:
        nonlocal generated
        generated += tokens
        if plan.reply.usage == "cumulated":
            usage = plan.told(generated)
        body = head | {"choices": choices}
        if asked:
            body["usage"] = _chat_usage(usage)
        return Chunk(f"data: {encode(body)}\n\n".encode(), tokens, last)

    for step, (delta, tokens) in enumerate(_deltas(plan)):
        for index in range(plan.choices):
            first = step == index == 0
            told = plan.told(1) if first and plan.reply.usage == "placeholder_first" else None
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield chunk([choice], tokens + (plan.hidden if first else 0), usage=told)
    end: Json = {"delta": {}, "logprobs": None, "finish_reason": plan.finish}
    yield chunk([{"index": index, **end} for index in range(plan.choices)], 0)
    if asked:
        yield chunk([], 0, usage=plan.told(plan.total), last=True)


def _deltas(plan: Plan) -> Iterator[tuple[Json, int]]:
    role: Json = {"role": "assistant"}
    for index, item in enumerate(plan.items):
        if item.kind == "call":
            yield role | {"tool_calls": [{"index": index, **_call(plan, index, item, "")}]}, item.name_tokens
            role = {}
            for part in item.parts:
                yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}, 1
        for part in item.parts if item.kind != "call" else ():
            yield role | {"refusal" if item.kind == "refusal" else "content": part}, 1
            role = {}
    if role:
        yield role | {"content": ""}, 0


class _Responses:
    """Write a Responses answer; the events are numbered as they are written."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._number = 0
        self._created = int(time.time())

    def response(self, *, whole: bool, told: Usage | None = None) -> Json:
        """Describe the response, whole or just begun (then with the usage that is `told`)."""
        plan, body = self._plan, self._plan.entry.body
        cut = plan.finish == "length"
        usage = plan.told(plan.total) if whole else told
        return {
            "id": f"resp_{plan.entry.id:024}",
            "object": "response",
            "created_at": self._created,
            "status": ("incomplete" if cut else "completed") if whole else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if whole and cut else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": plan.entry.output_limit,
            "metadata": {},
            "model": plan.model,
            "output": [self._item(index, item) for index, item in enumerate(plan.items)] if whole else [],
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": 1.0,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
        }

    def opening(self) -> bytes:
        """Write the events before the first token."""
        plan = self._plan
        early = {"placeholder_first": 1, "cumulated": 0}.get(plan.reply.usage)
        begun = self.response(whole=False, told=None if early is None else plan.told(early))
        events = self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        if plan.items and plan.items[0].kind != "call":
            events += self._added(0, plan.items[0])
        return events

    def chunks(self) -> Iterator[Chunk]:
        """Write the tokens, then what closes the items, then the response with its usage."""
        plan, waiting, hidden = self._plan, b"", self._plan.hidden
        for index, item in enumerate(plan.items):
            where = self._where(index, item)
            if item.kind == "call":
                yield Chunk(waiting + self._added(index, item), item.name_tokens + hidden)
                waiting, hidden = b"", 0
            elif index:
                waiting += self._added(index, item)
            for part in item.parts:
                if item.kind == "text":
                    event = self._event("response.output_text.delta", **where, delta=part, logprobs=[])
                elif item.kind == "refusal":
                    event = self._event("response.refusal.delta", **where, delta=part)
                else:
                    event = self._event("response.function_call_arguments.delta", **where, delta=part)
                yield Chunk(waiting + event, 1 + hidden)
                waiting, hidden = b"", 0
            waiting += self._done(index, item)
        yield Chunk(waiting or b": \n\n", hidden)
        kind = "response.incomplete" if plan.finish == "length" else "response.completed"
        yield Chunk(self._event(kind, response=self.response(whole=True)), 0, usage=True)

    def _event(self, kind: str, **fields: object) -> bytes:
        data = encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    def _where(self, index: int, item: Item) -> Json:
        place: Json = {"item_id": self._item_id(index, item), "output_index": index}
        return place if item.kind == "call" else place | {"content_index": 0}

    def _added(self, index: int, item: Item) -> bytes:
        begun = self._item(index, item, begun=True)
        events = self._event("response.output_item.added", output_index=index, item=begun)
        if item.kind != "call":
            part = self._part(Item(item.kind, ()))
            events += self._event("response.content_part.added", **self._where(index, item), part=part)
        return events

    def _done(self, index: int, item: Item) -> bytes:
        where, text = self._where(index, item), item.text
        if item.kind == "call":
            kind = "response.function_call_arguments.done"
            events = self._event(kind, **where, name=item.name, arguments=text)
        elif item.kind == "refusal":
            events = self._event("response.refusal.done", **where, refusal=text)
        else:
            events = self._event("response.output_text.done", **where, text=text, logprobs=[])
        if item.kind != "call":
            events += self._event("response.content_part.done", **where, part=self._part(item))
        return events + self._event("response.output_item.done", output_index=index, item=self._item(index, item))

    def _item_id(self, index: int, item: Item) -> str:
        return f"{'fc' if item.kind == 'call' else 'msg'}_{self._plan.entry.id}_{index}"

    def _item(self, index: int, item: Item, *, begun: bool = False) -> Json:
        cut = self._plan.finish == "length" and index == len(self._plan.items) - 1
        status = "in_progress" if begun else "incomplete" if cut else "completed"
        common = {"id": self._item_id(index, item), "status": status}
        if item.kind == "call":
            arguments = "" if begun else item.text
            call_id = f"call_{self._plan.entry.id}_{index}"
            return common | {"type": "function_call", "call_id": call_id, "name": item.name, "arguments": arguments}
        content = [] if begun else [self._part(item)]
        return common | {"type": "message", "role": "assistant", "content": content}

    def _part(self, item: Item) -> Json:
        if item.kind == "refusal":
            return {"type": "refusal", "refusal": item.text}
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage["input_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["cached_tokens"],
                "cache_write_tokens": usage["cache_write_tokens"],
            },
            "output_tokens": usage["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
            "total_tokens": usage["input_tokens"] + usage["output_tokens"],
        }


def _embeddings(plan: Plan) -> Json:
    body = plan.entry.body
    size = body.get("dimensions") or 8
    vector = [1 / (index + 1) for index in range(size)]
    value: object = vector
    if body.get("encoding_format") == "base64":
        value = base64.b64encode(struct.pack(f"<{size}f", *vector)).decode()
    answer: Json = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": value} for index in range(len(embedded(body.get("input"))))
        ],
        "model": plan.model,
    }
    if (usage := plan.told(0)) is not None:
        answer["usage"] = {"prompt_tokens": usage["input_tokens"], "total_tokens": usage["input_tokens"]}
    return answer
