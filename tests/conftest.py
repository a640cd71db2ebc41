from __future__ import annotations

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("stores.conformance")

settings.register_profile("thorough", max_examples=1000, deadline=None)


@pytest.fixture
def anyio_backend() -> str:
    """The library is asyncio only."""
    return "asyncio"
