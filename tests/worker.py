"""One process of many on one store: sends tasks at a provider all at once and prints what became of them.

    python -m tests.worker STORE BASE_URL CAP_NANOS TASKS [hold]

With `hold` it reserves, says "held", and waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

from router import Cap, Router
from stores import BudgetStore, SQLiteStore
from tests.support import chat, client_of, policy_of


def store_of(name: str) -> BudgetStore:
    if name.startswith("sqlite:"):
        return SQLiteStore(name.removeprefix("sqlite:"), timeout=30)
    from stores.redis import RedisStore

    url, _, namespace = name.partition("#")
    return RedisStore(url, namespace=namespace, timeout=30)


async def main(store_name: str, base_url: str, cap: int, tasks: int, hold: bool) -> None:
    store = store_of(store_name)
    async with client_of(base_url) as client:
        policy = policy_of(client, Cap(usd=f"{cap / 10**9:.9f}", per="day", admit_at=1, name="all"), lease=2)
        async with Router(policy, store) as router:
            if hold:
                async with router.admit(chat(output=100)) as admission:
                    print("held" if admission.served else "refused", flush=True)
                    await asyncio.sleep(3600)
            if sys.stdin.readline().strip() != "go":
                raise SystemExit("the parent went away")
            results = await asyncio.gather(*(router.run(chat(output=100)) for _ in range(tasks)))
    await store.aclose()
    refused = Counter(
        f"{r.decision.reason} {r.decision.cap and r.decision.cap.cap} {r.decision.retry_after is not None}"
        for r in results
        if not r.served
    )
    print(json.dumps({"served": sum(r.served for r in results), "refused": refused}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), "hold" in sys.argv[5:]))
