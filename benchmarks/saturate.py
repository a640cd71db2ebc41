"""One of several processes that do all they can on one SQLite file; `benchmarks.stores` starts them.

    python -m benchmarks.saturate FILE SECONDS

Says "ready", waits for a line, and prints how many pairs it did and how long the longest of its callers waited, in seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from stores import Bucket, Charge, SQLiteStore, new_id

CALLERS = 50


async def main(path: Path, seconds: float) -> None:
    """Saturate."""
    held = tuple(Charge(Bucket(f"hot-{number}"), 5, 2**50, 2**50) for number in range(2))
    spent = tuple(Charge(charge.bucket, 3) for charge in held)
    pairs, longest = 0, 0.0

    async def caller(end: float) -> None:
        nonlocal pairs, longest
        while (start := time.perf_counter()) < end:
            id = new_id()
            await store.reserve(id, (held,), lease=600_000)
            middle = time.perf_counter()
            await store.settle(id, spent)
            longest = max(longest, middle - start, time.perf_counter() - middle)
            pairs += 1

    async with SQLiteStore(path, timeout=30) as store:
        await store.check()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        end = time.perf_counter() + seconds
        await asyncio.gather(*(caller(end) for _ in range(CALLERS)))
    print(json.dumps({"pairs": pairs, "longest": longest}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
