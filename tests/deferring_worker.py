"""One worker process that runs deferred tasks on a router of its own, until it is killed.

    python -m tests.deferring_worker DSN BASE_URL STORE

STORE is the path of a SQLite file. Says "ready" when it begins to look for jobs.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from openai import AsyncOpenAI
from procrastinate import App, PsycopgConnector

from router import Cap, Policy, Retries, Router, Task, TaskClass
from router.procrastinate import ProcrastinateDeferral
from stores import SQLiteStore
from tests.support import client_of, policy_of

HEARTBEAT = 0.4


def policy(client: AsyncOpenAI) -> Policy:
    """Return a policy with ten cents a second, under which all that does not fit at once is deferred."""
    cap = Cap(usd="0.10", per=1, admit_at=1, name="all")
    retries = Retries(attempts=1, per_attempt=30)
    return policy_of(client, cap, classes=[TaskClass("later", when_expired="defer")], default_class="later", retries=retries)


async def main(dsn: str, base_url: str, path: str) -> None:
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("procrastinate").setLevel(logging.CRITICAL)
    app = App(connector=PsycopgConnector(conninfo=dsn))
    deferral = ProcrastinateDeferral(app, stalled_after=6 * HEARTBEAT, look_every="* * * * * *")
    store = SQLiteStore(path, timeout=30)
    async with client_of(base_url) as client, app.open_async(), Router(policy(client), store, deferral=deferral) as router:

        @deferral.handler
        async def run(task: Task) -> None:
            await router.run(task)

        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await app.run_worker_async(
            queues=[deferral.queue], update_heartbeat_interval=HEARTBEAT, fetch_job_polling_interval=0.2, concurrency=4
        )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
