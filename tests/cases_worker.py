"""One process of several on one SQLite file, which admits what it is told and holds it, at a time that it is told.

    python -m tests.cases_worker PATH CAP

CAP is a JSON object with the arguments of a `Cap`. Says "ready", then reads JSON lines such as
`{"now": 1785542400000, "tasks": 2, "cents": 40, "labels": {}}` and answers each with a line that says how many were admitted.
Whoever starts it kills it.
"""

from __future__ import annotations

import asyncio
import json
import sys

from router import Cap, Router
from stores import SQLiteStore
from tests.support import TestClock, policy_of, worth


async def main(path: str, cap: str) -> None:
    clock = TestClock()
    store = SQLiteStore(path, timeout=30, clock=clock)
    async with Router(policy_of(None, Cap(**json.loads(cap)), lease=60), store, clock=clock) as router:
        say("ready")
        kept = []
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            clock.wall = asked["now"]
            admissions = [router.admit(worth(asked["cents"], labels=asked["labels"])) for _ in range(asked["tasks"])]
            await asyncio.gather(*(admission.__aenter__() for admission in admissions))
            kept += admissions
            say(json.dumps([admission.served for admission in admissions]))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
