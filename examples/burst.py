"""Send a burst of real traffic at a strong and a cheap model under an hourly and a monthly cap, and compare the bills.

    python examples/burst.py                                      # everything local: no key, no network
    python examples/burst.py --trace trace.csv                    # a recorded trace: time, prompt tokens, output tokens
    python examples/burst.py --store redis://localhost            # one budget with every process that does the same
    OPENAI_API_KEY=… python examples/burst.py --base-url https://… --strong gpt-5 --cheap gpt-5-mini --tasks 20

The same traffic then goes through a counter that is read before each call and raised after it, to see what that overspends.
Without `--trace`, arrivals and lengths are drawn from the figures of a public one: AzureLLMInferenceTrace_code of
Azure/AzurePublicDataset (CC-BY 4.0): 2.6 requests a second that come in bursts, prompts of 1,469 tokens in the median and 7,436
in the 99th percentile, outputs of 13 and 252.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx2
from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from router import Cap, Model, Policy, PolicyError, Price, Router, Task, TaskClass
from router.money import to_usd
from router.testing import LocalProvider, Rates
from stores import BudgetStore, MemoryStore, SQLiteStore, StoreError

PRICES = {"strong-model": ("2", "10"), "cheap-model": ("0.20", "1")}
"""Dollars per million tokens, in and out, of the local provider's two models."""

# The log-normal distributions that fit the trace named above (mean and deviation of the logarithm).
PROMPT, OUTPUT, LONGEST_PROMPT, LONGEST_OUTPUT = (6.999, 1.360), (2.788, 0.847), 7437, 1899


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the first, and its lengths in tokens."""

    at: float
    prompt: int
    output: int


def drawn(count: int, draw: random.Random) -> list[Arrival]:
    """Draw requests that come in bursts, as those of the trace named above."""
    arrivals: list[Arrival] = []
    now = 0.0
    while len(arrivals) < count:
        # Bursts of 20 in the mean with pauses between them: 2.6 a second over all.
        now += draw.expovariate(2.6 / 20)
        for _ in range(min(count - len(arrivals), 1 + int(draw.expovariate(1 / 20)))):
            prompt = min(LONGEST_PROMPT, max(1, round(draw.lognormvariate(*PROMPT))))
            arrivals.append(Arrival(now, prompt, min(LONGEST_OUTPUT, max(1, round(draw.lognormvariate(*OUTPUT))))))
    return arrivals


def recorded(path: Path, count: int | None) -> list[Arrival]:
    """Read a trace whose columns are a time (ISO or seconds), prompt tokens and output tokens."""
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        raise SystemExit(f"burst: --trace {path} cannot be read: {error.strerror}") from None
    arrivals: list[Arrival] = []
    for number, row in enumerate(rows[1:], start=2):
        if count is not None and len(arrivals) >= count:
            break
        try:
            arrivals.append(Arrival(_seconds(row[0]), max(1, int(row[1])), max(1, int(row[2]))))
        except (ValueError, IndexError):
            raise SystemExit(
                f"burst: --trace {path}, line {number}: write a time, prompt tokens and output tokens, "
                f"not {','.join(row)[:60]!r}"
            ) from None
    if not arrivals:
        raise SystemExit(f"burst: --trace {path} has no requests under its heading")
    first = arrivals[0].at
    return [Arrival(a.at - first, a.prompt, a.output) for a in arrivals]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Seven digits of a second are more than datetime reads.
        head, _, digits = text.partition(".")
        return datetime.fromisoformat(f"{head}.{digits[:6]:0<6}").timestamp()


def store_of(name: str, folder: str) -> BudgetStore:
    """Open the store that a word of the command line names."""
    if name == "memory:":
        return MemoryStore()
    if name == "sqlite:":
        return SQLiteStore(Path(folder) / "budget.sqlite")
    if name.startswith("sqlite:"):
        return SQLiteStore(Path(name.removeprefix("sqlite:")))
    if name.startswith(("redis://", "rediss://", "unix://", "valkey://")):
        try:
            from stores.redis import RedisStore  # noqa: PLC0415 (only who uses it needs the client library)
        except ImportError as error:
            raise SystemExit(f"burst: --store {name}: {error}") from None
        return RedisStore(name)
    raise SystemExit(f"burst: --store must be memory:, sqlite:, sqlite:PATH or redis://…, not {name!r}")


@dataclass
class Run:
    """What came of one pass over the traffic."""

    by_tier: Counter[str]
    refused: Counter[str]
    errors: list[float]
    estimated: int = 0
    actual: int = 0


async def everything(
    arrivals: list[Arrival],
    one: Callable[[int, Arrival], Awaitable[None]],
    *,
    speed: float,
    at_once: int,
    progress: Callable[[], None],
) -> None:
    """Start each request at its time, `speed` times as fast as it came, with at most `at_once` under way."""
    room = asyncio.Semaphore(at_once)
    began = asyncio.get_running_loop().time()

    async def start(number: int, arrival: Arrival) -> None:
        async with room:
            await one(number, arrival)
            progress()

    async with asyncio.TaskGroup() as group:
        for number, arrival in enumerate(arrivals):
            wait = began + arrival.at / speed - asyncio.get_running_loop().time()
            if wait > 0.001:
                await asyncio.sleep(wait)
            group.create_task(start(number, arrival))


def request_of(arrival: Arrival, limit: int, *, local: bool) -> dict[str, Any]:
    """Make a request of the arrival's lengths; the local provider is told how much to generate."""
    request: dict[str, Any] = {
        "messages": [{"role": "user", "content": "word" + " word" * (arrival.prompt - 1)}],
        "max_completion_tokens": limit,
    }
    if local:
        request["extra_headers"] = {"x-local-provider-output": str(arrival.output)}
    return request


async def routed(
    router: Router, arrivals: list[Arrival], args: argparse.Namespace, local: bool, tick: Callable[[], None]
) -> Run:
    """Send everything through the router; every fourth task is a stream."""
    run = Run(Counter(), Counter(), [])

    async def one(number: int, arrival: Arrival) -> None:
        task_class = "chat" if number % 3 else "batch"
        task = Task.chat(task_class=task_class, **request_of(arrival, args.output_limit, local=local))
        if number % 4:
            decision = (await router.run(task)).decision
        else:
            stream = await router.stream(task)
            if stream.served:
                async for _ in stream:
                    pass
            decision = stream.decision
        if not decision.served:
            run.refused[f"{decision.task_class}: {decision.kind or decision.reason}"] += 1
            return
        run.by_tier[decision.tier or ""] += 1
        actual = decision.actual or 0
        run.estimated += decision.estimate
        run.actual += actual
        if actual:
            run.errors.append((decision.estimate - actual) / actual)

    await everything(arrivals, one, speed=args.speed, at_once=args.at_once, progress=tick)
    return run


async def naive(
    client: AsyncOpenAI, arrivals: list[Arrival], args: argparse.Namespace, cap: int, tick: Callable[[], None]
) -> None:
    """Send everything to the strong model while a counter, read before each call and raised after it, is below the cap."""
    price = Price.per_million(input=PRICES["strong-model"][0], output=PRICES["strong-model"][1])
    spent = 0

    async def one(number: int, arrival: Arrival) -> None:
        nonlocal spent
        if spent + price.bound(input_tokens=arrival.prompt + 7, output_tokens=args.output_limit) > cap:
            return
        request = request_of(arrival, args.output_limit, local=True)
        reply = await client.chat.completions.create(model="strong-model", **request)
        assert reply.usage is not None  # noqa: S101 (the local provider always says)
        spent += price.bound(input_tokens=reply.usage.prompt_tokens, output_tokens=reply.usage.completion_tokens)

    await everything(arrivals, one, speed=args.speed, at_once=args.at_once, progress=tick)


def dear(arrivals: list[Arrival], limit: int) -> Decimal:
    """Return what the traffic would cost on the strong model, in dollars."""
    into, out = (Decimal(rate) for rate in PRICES["strong-model"])
    tokens_in = sum(a.prompt + 7 for a in arrivals)
    tokens_out = sum(min(a.output, limit) for a in arrivals)
    return (tokens_in * into + tokens_out * out) / 1_000_000


@contextlib.asynccontextmanager
async def client_of(base_url: str, key: str) -> AsyncIterator[AsyncOpenAI]:
    """Open a client that keeps up with a burst."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=1000)
    timeout = httpx2.Timeout(600, connect=30)
    async with AsyncOpenAI(
        base_url=base_url, api_key=key, http_client=httpx2.AsyncClient(limits=limits, timeout=timeout)
    ) as client:
        yield client


def provider_of() -> LocalProvider:
    """Make the local provider with its prices."""
    return LocalProvider(prices={name: Rates(input=into, output=out) for name, (into, out) in PRICES.items()})


def policy_of(args: argparse.Namespace, client: AsyncOpenAI, cap: Decimal) -> Policy:
    """Make the policy: an hourly cap, a monthly one, and two classes that take a refusal differently."""

    def model(name: str) -> Model:
        if name not in PRICES:
            return Model(name, client=client)
        into, out = PRICES[name]
        return Model(name, client=client, price=Price.per_million(input=into, output=out), encoding="o200k_base")

    return Policy(
        strong=model(args.strong),
        cheap=model(args.cheap),
        caps=[
            Cap(usd=cap, per="hour", admit_at=1, name="hour"),
            Cap(usd=cap * 100, per="month", name="month"),
        ],
        classes=[
            TaskClass("chat", when_expired="downgrade"),
            TaskClass("batch", when_expired="retry_later"),
        ],
        default_class="chat",
    )


@contextlib.contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Show how far each pass is, on the standard error."""
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def begin(name: str, total: int) -> Callable[[], None]:
            bar = progress.add_task(name, total=total)
            return lambda: progress.advance(bar)

        yield begin


async def main(args: argparse.Namespace) -> int:
    """Run both passes and show what they spent."""
    arrivals = recorded(args.trace, args.tasks) if args.trace else drawn(args.tasks or 2000, random.Random(args.seed))
    if args.speed is None:
        args.speed = max(1.0, arrivals[-1].at / 10)
    cap = args.cap if args.cap is not None else (dear(arrivals, args.output_limit) * Decimal("0.4")).quantize(Decimal("0.01"))
    cap = max(cap, Decimal("0.01"))
    local = args.base_url is None
    naive_spent: int | None = None

    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        begin = stack.enter_context(progress_bar(args.json))
        provider = stack.enter_context(provider_of()) if local else None
        url = args.base_url if provider is None else provider.base_url
        client = await stack.enter_async_context(client_of(url, os.environ.get("OPENAI_API_KEY", "local")))
        store = store_of(args.store, folder)
        stack.push_async_callback(store.aclose)
        await store.check()
        router = await stack.enter_async_context(Router(policy_of(args, client, cap), store))
        run = await routed(router, arrivals, args, local, begin("with budget-router", len(arrivals)))
        status = await router.status()
        if local:
            other = stack.enter_context(provider_of())
            counter = await stack.enter_async_context(client_of(other.base_url, "local"))
            nanos = int(cap * 10**9)
            await naive(counter, arrivals, args, nanos, begin("with a naive counter", len(arrivals)))
            naive_spent = other.spent()
        provider_spent = None if provider is None else provider.spent()

    # The hour may have turned in the middle: then there are two of them, each with its own cap.
    hours = [bucket for bucket in status.buckets if bucket.cap == "hour"]
    percent = quantiles(run.errors, n=100, method="inclusive") if len(run.errors) > 1 else [0.0] * 99
    figures = {
        "cap": f"{cap * max(1, len(hours)):f}",
        "spent": dollars(sum(bucket.spent for bucket in hours)),
        "held": dollars(sum(bucket.held for bucket in hours)),
        "provider_spent": None if provider_spent is None else dollars(provider_spent),
        "naive_provider_spent": None if naive_spent is None else dollars(naive_spent),
        "tasks": len(arrivals),
        "strong": run.by_tier["strong"],
        "cheap": run.by_tier["cheap"],
        "refused": run.refused.total(),
        "estimate_error_p50": round(percent[49], 4),
        "estimate_error_p99": round(percent[98], 4),
    }
    if args.json:
        print(json.dumps(figures))
    else:
        show(figures, run)
    return 0


def dollars(nanos: int) -> str:
    """Write nano-dollars as dollars, every digit of them."""
    return f"{to_usd(nanos):f}"


def show(figures: dict[str, Any], run: Run) -> None:
    """Print the table for people."""
    table = Table(title="A burst under a cap", show_header=False)
    table.add_column()
    table.add_column(justify="right")

    def shown(value: str | None) -> str:
        return "not known" if value is None else f"${Decimal(value):,.6f}"

    rows = [
        ("tasks", f"{figures['tasks']:,}"),
        ("served by the strong model", f"{figures['strong']:,}"),
        ("served by the cheap model", f"{figures['cheap']:,}"),
        *((f"refused, {why}", f"{count:,}") for why, count in run.refused.most_common()),
        ("estimated, of what was served", shown(dollars(run.estimated))),
        ("actual", shown(dollars(run.actual))),
        ("estimate above actual, p50 / p99", f"{figures['estimate_error_p50']:+.0%} / {figures['estimate_error_p99']:+.0%}"),
        ("the hourly cap", shown(figures["cap"])),
        ("spent, by our count", shown(figures["spent"])),
        ("still held", shown(figures["held"])),
        ("spent, by the provider's own count", shown(figures["provider_spent"])),
        ("the same traffic through a naive counter", shown(figures["naive_provider_spent"])),
    ]
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def parser() -> argparse.ArgumentParser:
    """Build the command line."""
    text, _, more = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        prog="burst", description=text, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--trace", type=Path, metavar="FILE", help="replay this CSV: time, prompt tokens, output tokens")
    made.add_argument("--tasks", type=_count, metavar="N", help="at most so many tasks (2000 are drawn without a trace)")
    made.add_argument("--cap", type=_dollars, metavar="USD", help="the hourly cap (40 %% of what strong alone would cost)")
    made.add_argument("--store", default="sqlite:", help="memory:, sqlite: (a new file), sqlite:PATH or redis://…")
    made.add_argument("--base-url", metavar="URL", help="a real endpoint; its key is read from OPENAI_API_KEY")
    made.add_argument("--strong", default="strong-model", metavar="MODEL", help="the strong model")
    made.add_argument("--cheap", default="cheap-model", metavar="MODEL", help="the cheap model")
    made.add_argument("--output-limit", type=_count, default=300, metavar="N", help="tokens of output that each task asks for")
    made.add_argument("--at-once", type=_count, default=64, metavar="N", help="requests under way at once, at most")
    made.add_argument("--speed", type=float, metavar="X", help="replay so many times as fast (all within ten seconds)")
    made.add_argument("--seed", type=int, default=1, help="of what is drawn")
    made.add_argument("--json", action="store_true", help="print one object instead of the table")
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"write a whole number from 1, not {text!r}")
    return int(text)


def _dollars(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except ArithmeticError:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount < 0:
        raise argparse.ArgumentTypeError(f"write an amount in dollars such as 2.50, not {text!r}")
    return amount


def command() -> int:
    """Run from the command line; a user's mistake is one sentence."""
    args = parser().parse_args()
    if args.speed is not None and not args.speed > 0:
        raise SystemExit(f"burst: --speed must be above 0, not {args.speed}")
    if args.base_url is None and not {args.strong, args.cheap} <= set(PRICES):
        raise SystemExit("burst: the local provider has the models strong-model and cheap-model; others need --base-url")
    if args.base_url is not None and not os.environ.get("OPENAI_API_KEY"):
        raise SystemExit("burst: --base-url needs a key: set OPENAI_API_KEY in the environment")
    try:
        return asyncio.run(main(args))
    except (PolicyError, StoreError) as error:
        raise SystemExit(f"burst: {error}") from None
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(command())
