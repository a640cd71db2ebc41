"""A provider to test against: a local server that speaks OpenAI's API, does what it is told and keeps its own account."""

from __future__ import annotations

from router.testing._account import Entry, Rates
from router.testing._reply import Reply, sequence
from router.testing.provider import LocalProvider

__all__ = ["Entry", "LocalProvider", "Rates", "Reply", "sequence"]
