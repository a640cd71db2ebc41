from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import redis_server

pytest.register_assert_rewrite("stores.conformance")

settings.register_profile("thorough", max_examples=1000, deadline=None)


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
