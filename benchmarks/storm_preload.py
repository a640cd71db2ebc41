"""What every process of a storm needs at once: imported by the one that they are forked from."""

from __future__ import annotations

import benchmarks.storm_worker  # noqa: F401 (for what it imports)
from router._vocabulary import local_encoding

local_encoding("o200k_base")  # remembered for the whole process, and so for those forked from it
