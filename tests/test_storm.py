"""Processes that are killed in the middle of everything, on one store: the short form of `python -m benchmarks.storm`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.storm import storm_of
from benchmarks.storm_plan import Storm

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

numbers = itertools.count()


@pytest.mark.parametrize("on_lease_end", ["release", "charge"])
@pytest.mark.parametrize("store", ["sqlite", "redis"])
async def test_a_storm_leaves_nothing_over_lost_double_or_hung(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, on_lease_end: Literal["release", "charge"]
) -> None:
    place = (
        f"sqlite:{tmp_path / 'budget.sqlite'}"
        if store == "sqlite"
        else f"{request.getfixturevalue('redis_url')}#storm{next(numbers)}"
    )
    storm = Storm(
        store=place,
        on_lease_end=on_lease_end,
        seconds=3,
        processes=3,
        callers=50,
        kills=3,
        lease=1.5,
        pace=1.5,
        patience=2.0,
        window=1,
        room=0.25,
        least=40,
        seed=next(numbers),
    )
    found = await storm_of(storm)
    assert (found.over, found.lost, found.double, found.hung, found.unexpected) == (0, 0, 0, 0, [])
    assert found.kills == 4  # three while it went on, and one at its end
    # It was a storm: tasks were served, refused by the caps, and ended by their leases.
    assert min(found.served, found.refused["cap"], found.ended, found.exact, found.samples) > 0
