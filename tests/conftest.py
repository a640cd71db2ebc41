from __future__ import annotations

import pytest

pytest.register_assert_rewrite("stores.conformance")


@pytest.fixture
def anyio_backend() -> str:
    """The library is asyncio only."""
    return "asyncio"
