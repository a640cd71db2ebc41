"""What every benchmark prints: a table for people, one object for programs, and a status that says whether the bars hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its median, how far its blocks lay apart, and the bar that it is held to, if there is one."""

    name: str
    value: float
    unit: str
    spread: tuple[float, float] | None = None
    bar: str | None = None
    holds: bool = True

    @classmethod
    def at_most(cls, name: str, values: Sequence[float], unit: str, bar: float) -> Row:
        """Hold the median of `values` to an upper bar; the spread may explain a miss."""
        middle, lowest = median(values), min(values)
        return cls(name, middle, unit, (lowest, max(values)), f"≤ {bar:g}", middle <= bar or lowest <= bar)

    @classmethod
    def at_least(cls, name: str, values: Sequence[float], unit: str, bar: float) -> Row:
        """Hold the median of `values` to a lower bar; the spread may explain a miss."""
        middle, highest = median(values), max(values)
        return cls(name, middle, unit, (min(values), highest), f"≥ {bar:g}", middle >= bar or highest >= bar)

    @classmethod
    def plain(cls, name: str, values: Sequence[float], unit: str) -> Row:
        """Show the median of `values`, held to nothing."""
        return cls(name, median(values), unit, (min(values), max(values)) if len(values) > 1 else None)


def number_above_0(text: str) -> float:
    """Read an argument that must be a number above 0, for argparse."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def whole_above_0(text: str) -> int:
    """Read an argument that must be a whole number above 0, for argparse."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def show(title: str, rows: Sequence[Row], *, as_json: bool) -> int:
    """Print the rows; return 1 when a bar does not hold."""
    if as_json:
        json.dump({"rows": [asdict(row) for row in rows]}, sys.stdout)
        print()
    else:
        table = Table("what", "median", "", "spread", "bar", "holds", title=title)
        for row in rows:
            spread = "" if row.spread is None else f"{row.spread[0]:.3g} … {row.spread[1]:.3g}"
            held = "" if row.bar is None else "yes" if row.holds else "NO"
            table.add_row(row.name, f"{row.value:.4g}", row.unit, spread, row.bar or "", held)
        console = Console()
        console.width = max(console.width, 130)  # a name on one line, in a log too
        console.print(table)
    return int(not all(row.holds for row in rows))
