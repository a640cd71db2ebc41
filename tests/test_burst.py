"""The main job, as the README runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(180)


def burst(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "burst.py"), *args],
        cwd=cwd,
        env={**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )


def figures_of(*args: str, cwd: Path) -> dict[str, Any]:
    done = burst(*args, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@pytest.mark.parametrize("store", ["memory:", "sqlite:"])
def test_a_burst_stays_under_the_cap_and_equals_the_providers_bill(store: str, tmp_path: Path) -> None:
    figures = figures_of("--tasks", "150", "--store", store, "--speed", "1000", cwd=tmp_path)
    money = {key: Decimal(figures[key]) for key in ("cap", "spent", "held", "provider_spent", "naive_provider_spent")}
    assert money["spent"] == money["provider_spent"]
    assert money["spent"] <= money["cap"] < money["naive_provider_spent"]
    assert money["held"] == 0
    assert figures["strong"] + figures["cheap"] + figures["refused"] == figures["tasks"] == 150
    assert figures["strong"] > 0
    assert figures["refused"] > 0


def test_a_recorded_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:17:0{i}.9799600,{100 * i + 1},{10 * i + 1}\n" for i in range(5))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    figures = figures_of("--trace", str(trace), "--cap", "5", "--speed", "1000", cwd=tmp_path)
    # Prompt and output tokens of the five rows at $2 and $10 per million, with the chat format's 7 tokens a prompt.
    expected = sum((100 * i + 1 + 7) * 2000 + (10 * i + 1) * 10_000 for i in range(5))
    assert figures["strong"] == 5
    assert Decimal(figures["provider_spent"]) * 10**9 == expected


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["--store", "mongodb://x"], "--store must be memory:"),
        (["--cap", "lots"], "write an amount in dollars"),
        (["--tasks", "0"], "write a whole number from 1"),
        (["--strong", "gpt-5"], "others need --base-url"),
        (["--base-url", "http://127.0.0.1:9/v1"], "set OPENAI_API_KEY"),
        (["--speed", "-1"], "--speed must be above 0"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(args: list[str], says: str, tmp_path: Path) -> None:
    done = burst(*args, cwd=tmp_path)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
