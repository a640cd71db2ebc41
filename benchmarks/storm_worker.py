"""One of the processes of a storm, which is killed at any moment; `benchmarks.storm` starts it.

What its tasks come to is appended to its log, line by line, as soon as it is known: `+` a task begins, `=` what the router
recorded of it, `!` its reader saw all that was generated, `?` it had no answer within the time limit, `~` a settle that came
after its lease, `x` an error that no fault explains.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import httpx2
import openai

from benchmarks.storm_plan import OUTPUT, Ask, Storm, store_of
from router import Router, Task
from router.estimate import Estimator
from stores import BudgetStore, Charge, Settlement
from tests.support import local_client

LIMIT = 60.0
"""Seconds after which a caller without an answer hangs: far more than all time limits on its way together."""

GRACE = 2.0
"""Seconds that calls may go on after the storm; then they are cancelled."""


class Log(logging.Handler):
    """What this process knew; written at once, since it may be killed with the next instruction."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, mark: str, text: str) -> None:
        """Append a line."""
        os.write(self._file, f"{mark} {text}\n".encode())

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the router's record of a task."""
        facts: dict[str, Any] | None = getattr(record, "budget_router", None)
        if facts is not None and "task" in facts:
            kept = ("task", "served", "reason", "actual", "unconfirmed", "outcome", "notes")
            self.say("=", json.dumps({name: facts[name] for name in kept}))


def watched(store: BudgetStore, log: Log) -> BudgetStore:
    """Have a store write down what was settled after its lease, which alone may pass a limit."""
    settle = store.settle

    async def settle_and_see(id: str, charges: Sequence[Charge]) -> Settlement:
        settlement = await settle(id, charges)
        if settlement.late and settlement.counted and charges:
            log.say("~", str(max(charge.amount for charge in charges)))
        return settlement

    store.settle = settle_and_see  # type: ignore[method-assign]
    return store


class Callers:
    """All the callers of this process."""

    def __init__(self, storm: Storm, name: str, router: Router, log: Log) -> None:
        self._storm = storm
        self._name = name
        self._router = router
        self._log = log
        self._pausing: set[asyncio.Task[None]] = set()
        self._ended = False

    async def run(self, stop: asyncio.Event) -> None:
        """Let them all go on until `stop`; who is in a call then may end it, or is cancelled."""
        tasks = [asyncio.create_task(self._caller(number)) for number in range(self._storm.callers)]
        await stop.wait()
        self._ended = True
        for task in self._pausing:
            task.cancel()
        _, late = await asyncio.wait(tasks, timeout=GRACE)
        for task in late:
            task.cancel()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(answer, Exception):
                raise answer

    async def _caller(self, number: int) -> None:
        draw = random.Random(f"{self._storm.seed} {self._name} {number}")
        await self._pause(draw.random() * self._storm.pace / 2)
        count = 0
        while not self._ended:
            count += 1
            ask = Ask.drawn(f"{self._name}.{number}.{count}", draw, self._storm.pace)
            self._log.say("+", ask.key)
            try:
                async with asyncio.timeout(LIMIT):
                    await self._task(ask, draw)
            except TimeoutError:
                self._log.say("?", ask.key)
            await self._pause(draw.random() * self._storm.pace / 2)

    async def _pause(self, seconds: float) -> None:
        task = cast(asyncio.Task[None], asyncio.current_task())
        self._pausing.add(task)
        try:
            await asyncio.sleep(0 if self._ended else seconds)
        finally:
            self._pausing.discard(task)

    async def _task(self, ask: Ask, draw: random.Random) -> None:
        task = Task.chat(
            messages=[{"role": "user", "content": "Which way does the wind blow?"}],
            max_completion_tokens=OUTPUT,
            user=ask.key,
            labels={"user": f"u{draw.randrange(10)}", "task": ask.key},
            task_class=draw.choice(("chat", "batch")),
            id=ask.key,
        )
        if ask.kind.startswith("stream"):
            await self._carry(self._stream(ask, task))
        else:
            await self._carry(self._router.run(task), ask.takes if ask.kind == "call cancelled" else None)

    async def _carry(self, work: Coroutine[Any, Any, object], cancel_after: float | None = None) -> None:
        """Await work in a task of its own, so that it can be cancelled and its caller goes on."""
        task = asyncio.ensure_future(work)
        if cancel_after is not None:
            asyncio.get_running_loop().call_later(cancel_after, task.cancel)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
            await asyncio.wait((task,))
            error = None if task.cancelled() else task.exception()
            # The provider's faults are what the storm is about, and what they cost is in the record.
            if error is not None and not isinstance(error, openai.APIError | httpx2.TransportError | TimeoutError):
                self._log.say("x", repr(error))

    async def _stream(self, ask: Ask, task: Task) -> None:
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(None)
        seen = 0
        try:
            async with limit:
                stream = await self._router.stream(task)
                if not stream.served:
                    return
                async for chunk in stream:
                    seen += sum(bool(choice.delta.content) for choice in chunk.choices)
                    if seen < ask.tokens:
                        continue
                    match ask.kind:
                        case "stream broken off" | "stream left running":
                            break
                        case "stream cancelled":
                            loop.call_later(0.01, cast(asyncio.Task[None], asyncio.current_task()).cancel)
                        case "stream timed out":
                            limit.reschedule(loop.time() + 0.01)
        finally:
            if seen == ask.tokens and ask.kind not in ("stream read", "stream left running"):
                self._log.say("!", ask.key)


async def _work(storm: Storm, base_url: str, name: str, path: Path, link: Connection) -> None:
    log = Log(path)
    logging.getLogger("budget_router").addHandler(log)
    logging.getLogger("budget_router").setLevel(logging.INFO)
    logging.getLogger("budget_router").propagate = False
    store = watched(store_of(storm.store), log)
    words: asyncio.Queue[str] = asyncio.Queue()

    def hear() -> None:
        try:
            words.put_nowait(link.recv())
        except EOFError:
            os._exit(1)  # the storm itself was ended: nobody looks any more

    asyncio.get_running_loop().add_reader(link.fileno(), hear)
    stop = asyncio.Event()
    estimator = Estimator(load_timeout=LIMIT, allow_download=False)
    await estimator.prepare((), encodings=("o200k_base",))  # or what a left stream costs would be counted in bytes
    async with local_client(base_url) as client, Router(storm.policy(client), store, estimator=estimator) as router:
        link.send("ready")
        await words.get()
        callers = asyncio.create_task(Callers(storm, name, router, log).run(stop))
        await words.get()
        stop.set()
        await callers
    await store.aclose()


def work(storm: Storm, base_url: str, name: str, path: Path, link: Connection) -> None:
    """Take part: say "ready", begin at the word "go"; at "stop" end what is under way, settle and end."""
    asyncio.run(_work(storm, base_url, name, path, link))
