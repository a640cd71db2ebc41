"""How far the estimate of a prompt lies above what the provider counts, over real prompts.

    python -m benchmarks.estimate [--data DIR] [--json]

The prompts are those of ParetoBandit/ParetoBandit (Apache-2.0; `paretobandit_val.jsonl` in DIR); they are counted by the local
provider's own tokenizer, which shares no code with the estimator. Bars: never below, with a vocabulary or without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import tiktoken

from benchmarks.report import Row, show
from router.estimate import Estimator
from router.testing._text import Tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up in the dictionary of a language.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "language": {"type": "string", "enum": ["en", "de", "fr"]}},
            "required": ["word"],
        },
    },
}


def no_vocabulary(name: str) -> tiktoken.Encoding:
    """Stand for a machine that has none."""
    raise LookupError(name)


def prompts(data: Path) -> list[str]:
    """Read the prompts, or say what is missing."""
    path = data / "paretobandit_val.jsonl"
    try:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line)["prompt"] for line in file]
    except OSError:
        raise SystemExit(f"benchmarks.estimate: {path} is not there; name its folder with --data") from None


async def ratios(estimator: Estimator, requests: Sequence[dict[str, Any]]) -> list[float]:
    """Return estimate over truth for each request."""
    tokenizer = Tokenizer()
    await estimator.prepare(["gpt-4o"])
    found = []
    for request in requests:
        bound = await estimator.prompt("chat", request, "gpt-4o")
        found.append(bound.input_tokens / tokenizer.prompt("/v1/chat/completions", request))
    return found


async def main(data: Path, as_json: bool) -> int:
    """Compare, and show."""
    texts = prompts(data)
    plain = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    with_tools = [{**request, "tools": [TOOL]} for request in plain]
    roles = ("system", "user", "assistant") * 4
    talks = [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts[start : start + 12], strict=False)]}
        for start in range(0, len(texts), 12)
    ]
    rows = []
    for name, estimator in (
        ("vocabulary", Estimator(allow_download=False)),
        ("bytes", Estimator(allow_download=False, load=no_vocabulary)),
    ):
        for what, requests in (("one message", plain), ("with a tool", with_tools), ("twelve messages", talks)):
            found = await ratios(estimator, requests)
            percent = quantiles(found, n=100, method="inclusive")
            title = f"{name}, {what}"
            rows.append(Row(f"{title}: least", min(found), "× the truth", bar="≥ 1", holds=min(found) >= 1))
            rows.append(Row(f"{title}: p50", percent[49], "× the truth"))
            rows.append(Row(f"{title}: p99", percent[98], "× the truth"))
    return show(f"Estimates of {len(texts):,} real prompts", rows, as_json=as_json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimate", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="the folder of the recorded data")
    parser.add_argument("--json", action="store_true", help="print one object")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.data, arguments.json)))
