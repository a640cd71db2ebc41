"""A process that waits for a budget which others hold, for the tests.

    python -m tests.waiting_worker FILE

Says "waits" when it stands in line and "admitted" when it has the budget; gives it back when a line comes in, and ends.
"""

from __future__ import annotations

import asyncio
import sys

from router import Cap, Router, TaskClass, WaitEvent
from router._vocabulary import local_encoding
from stores import SQLiteStore
from tests.support import policy_of, worth

CAP = Cap(usd="0.10", per=None, name="all", admit_at=1)


def told(event: WaitEvent) -> None:
    """Say that it stands in line."""
    if event.what == "enqueue":
        print("waits", flush=True)


async def main(path: str) -> None:
    """Wait for ten cents, and hold them until a line comes in."""
    local_encoding("o200k_base")  # before the router could wait for it too long
    policy = policy_of(None, CAP, classes=[TaskClass("waits", max_wait=60, when_expired="drop")])
    async with (
        SQLiteStore(path, timeout=30) as store,
        Router(policy, store, hooks=[told]) as router,
        router.admit(worth(10)) as admission,
    ):
        print("admitted" if admission.served else str(admission.decision), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        admission.settle_usd(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
