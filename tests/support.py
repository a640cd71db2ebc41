"""What several test modules share: a clock that moves when told, and policies with the prices of the field's cases."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from router import Cap, Model, Policy, Price, Task

START = 1_785_542_400_000  # 2026-08-01T00:00Z
CENT = 10_000_000  # nano-dollars

STRONG = Price.per_million(input="2", output="10")
CHEAP = Price.per_million(input="0.20", output="1")


class TestClock:
    """A `router.clock.Clock` whose sleepers wake when it is advanced past their time."""

    __test__ = False

    def __init__(self, now: int = START) -> None:
        self.wall = now
        self.elapsed = 0.0
        self.slept: list[float] = []
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def __call__(self) -> int:
        """Serve as the clock of a store too."""
        return self.wall

    def now(self) -> int:
        return self.wall

    def monotonic(self) -> float:
        return self.elapsed

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if seconds <= 0:
            return
        wake = asyncio.Event()
        self._sleepers.append((self.elapsed + seconds, wake))
        await wake.wait()

    @property
    def sleeping(self) -> int:
        """How many sleep now."""
        return len(self._sleepers)

    async def advance(self, seconds: float) -> None:
        """Move on, wake whose time has come, and let them run until nothing more happens by itself."""
        await settle_down()
        self.wall += round(seconds * 1000)
        self.elapsed += seconds
        due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self.elapsed]
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] > self.elapsed]
        for _, wake in due:
            wake.set()
        await settle_down()


async def settle_down(turns: int = 20) -> None:
    """Let the tasks that can run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)


def client_of(base_url: str) -> AsyncOpenAI:
    """Return a client for a local provider; its own retries are on, as users leave them."""
    return AsyncOpenAI(base_url=base_url, api_key="sk-test-key-never-logged", max_retries=5)


def policy_of(client: AsyncOpenAI | None, *caps: Cap, **more: Any) -> Policy:
    """Return a policy with the prices of the field's cases."""
    more.setdefault("strong", Model("strong-model", client=client, price=STRONG, encoding="o200k_base"))
    more.setdefault("cheap", Model("cheap-model", client=client, price=CHEAP, encoding="o200k_base"))
    return Policy(caps=caps, **more)


def chat(text: str = "hello", *, output: int | None = 100, labels: Mapping[str, str] | None = None, **more: Any) -> Task:
    """Return a small chat task."""
    request: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if output is not None:
        request["max_completion_tokens"] = output
    return Task.chat(labels=labels, **request, **more)
