"""Deferred tasks as jobs of Procrastinate, which keeps them in PostgreSQL.

A job is a row of the database: it outlives every process. A worker that dies in the middle of one stops its heartbeat, and the
job is given back; so a task is run at least once, and more than once only when a worker dies or hangs while it runs it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from router.deferring import task_from_json, task_to_json
from router.task import Task

try:
    from procrastinate import App, BaseRetryStrategy, RetryDecision
    from procrastinate.exceptions import AlreadyEnqueued, JobAborted, UniqueViolation
    from procrastinate.jobs import Job, Status
except ImportError as error:
    raise ImportError("a ProcrastinateDeferral needs Procrastinate: pip install 'budget-router[procrastinate]'") from error

__all__ = ["ProcrastinateDeferral"]

_RUN = "budget_router.run"
_GIVE_BACK = "budget_router.give_back"

Handler = TypeVar("Handler", bound=Callable[[Task], Awaitable[object]])


class ProcrastinateDeferral:
    """Keep tasks as jobs of `app`, in a queue of their own.

    Give it to the router, `Router(policy, store, deferral=…)`; where jobs are run, say with `@deferral.handler` what is done
    with a task whose time has come. `app` must be open when a task is deferred; make one deferral per app.

    Args:
        app: the application, with a connector for asyncio.
        queue: the name of the queue that the jobs stand in.
        stalled_after: seconds without a heartbeat after which a worker counts as dead, and its jobs are given back; at least
            three times the worker's `update_heartbeat_interval`, which is 10 seconds unless you say otherwise.
        look_every: how often a worker looks for such jobs, as cron writes it; with a sixth column for seconds.

    Raises:
        TypeError: `app` is no `procrastinate.App`.
    """

    def __init__(
        self,
        app: App,
        *,
        queue: str = "budget_router",
        stalled_after: float = 30.0,
        look_every: str = "* * * * *",
    ) -> None:
        if not isinstance(app, App):
            raise TypeError(f"the app of a ProcrastinateDeferral must be a procrastinate.App(…), not {type(app).__name__}")
        self.queue = queue
        self._app = app
        self._stalled_after = stalled_after
        self._handler: Callable[[Task], Awaitable[object]] | None = None
        self._job = app.task(name=_RUN, queue=queue, retry=_AfterShutdown())(self._run)
        # Without a lock: that of a worker which died while it looked would keep everybody else from looking.
        look = app.task(name=_GIVE_BACK, queue=queue, queueing_lock=_GIVE_BACK)(self._give_back)
        app.periodic(cron=look_every)(look)

    def __repr__(self) -> str:
        return f"<ProcrastinateDeferral queue={self.queue!r}>"

    async def defer(self, task: Task, not_before: datetime) -> None:
        """Keep `task` until `not_before`; when it waits already under its id, it stays as it was kept first.

        Raises `TaskError` when its request cannot be written as JSON, and what Procrastinate raises when it is not kept.
        """
        # As text: a jsonb column would sort the keys, which a model sees in a schema, and refuses the character U+0000.
        kept = json.dumps(task_to_json(task))
        lock = f"budget_router:{task.id}"
        try:
            await self._job.configure(schedule_at=not_before, lock=lock, queueing_lock=lock).defer_async(kept=kept)
        except AlreadyEnqueued:
            return

    def handler(self, handler: Handler) -> Handler:
        """Have `handler(task)` run the tasks that a worker of this process takes; a decorator.

        It mostly is `await router.run(task)` and what is to be done with the result. A task is done when it returns; when it
        raises, the job has failed, and is not tried again.
        """
        self._handler = handler
        return handler

    async def _run(self, kept: str) -> None:
        if self._handler is None:
            raise RuntimeError("a deferred task came to a worker that has no handler: write @deferral.handler above one")
        await self._handler(task_from_json(json.loads(kept)))

    async def _give_back(self, timestamp: int) -> None:
        """Let others run the jobs of workers that died; `timestamp` is what Procrastinate hands to every periodic task."""
        manager = self._app.job_manager
        for name in (_RUN, _GIVE_BACK):
            for job in await manager.get_stalled_jobs(task_name=name, seconds_since_heartbeat=self._stalled_after):
                try:
                    await manager.retry_job(job)
                except UniqueViolation:
                    # It was deferred once more before its worker died: the later job stands for it.
                    await manager.finish_job(job, Status.ABORTED, delete_job=False)


class _AfterShutdown(BaseRetryStrategy):
    """Try again what a worker broke off because it was told to stop; the router has tried enough of everything else."""

    def get_retry_decision(self, *, exception: BaseException, job: Job) -> RetryDecision | None:
        return RetryDecision() if isinstance(exception, JobAborted | asyncio.CancelledError) else None
