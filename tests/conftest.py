from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings

from router._vocabulary import local_encoding
from router.testing import LocalProvider
from stores import BudgetStore
from tests import redis_server
from tests.support import PRICES, STORES, TestClock, opened_store, to_the_limit

pytest.register_assert_rewrite("stores.conformance")

settings.register_profile("thorough", max_examples=1000, deadline=None)


@pytest.fixture(scope="session", autouse=True)
def vocabulary() -> None:
    """Have the vocabulary that nearly every test counts with read once, before any of them could wait for it too long."""
    local_encoding("o200k_base")


@pytest.fixture
def anyio_backend() -> str:
    """The library is asyncio only."""
    return "asyncio"


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Valkey server for the whole session; each test takes a namespace of its own."""
    with redis_server.running() as server:
        yield server.url


@pytest.fixture(scope="session")
def debian_redis_url() -> Iterator[str]:
    """The `redis-server` of the operating system; a missing one fails the test."""
    with redis_server.running(program=redis_server.programs()["redis"]) as server:
        yield server.url


@pytest.fixture
def clock() -> TestClock:
    """The one clock of a test's router and store."""
    return TestClock()


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, clock: TestClock) -> AsyncIterator[BudgetStore]:
    """Each of our stores in turn, empty."""
    async with opened_store(request, clock) as opened:
        yield opened


@pytest.fixture
def provider(request: pytest.FixtureRequest) -> Iterator[LocalProvider]:
    """A provider that generates up to the limit it is sent, unless the test says otherwise."""
    with LocalProvider(prices=PRICES, reply=getattr(request, "param", to_the_limit)) as running:
        yield running
