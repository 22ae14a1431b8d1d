"""What keeps the packages apart, and the public surface what it says."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvcache", "transfer", "scheduler_adapters")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FORBIDDEN = {
    "kvcache": {"transfer", "scheduler_adapters", "nixl"},
    "transfer": {"scheduler_adapters"},
    "scheduler_adapters": set[str](),
}
# The contract between the packages: what `transfer` may know of `kvcache`.
CONTRACT = {"kvcache.errors", "kvcache.replica.block_table", "kvcache.layout"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    package, names = path.relative_to(ROOT).parts[0], imports(path)
    tops = {name.split(".")[0] for name in names}
    assert not tops & FORBIDDEN[package]
    if "nixl" in tops:
        assert path.relative_to(ROOT) == Path("transfer/nixl/agent.py")
    if package == "kvcache" and "zmq" in tops:
        assert path.name in ("events.py", "reset_endpoint.py")
    if package == "transfer":
        assert {name for name in names if name.split(".")[0] == "kvcache"} <= CONTRACT


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_raises_an_assertion_and_files_stay_readable(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise) and "AssertionError" in ast.dump(node)
    ]
    assert len(path.read_text().splitlines()) <= 450
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, f"{path}:{node.lineno} {node.name}"


@pytest.mark.parametrize("package", ["kvcache", "transfer"])
def test_init_lists_the_public_names_and_nothing_else(package: str) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert docstring or isinstance(node, ast.ImportFrom | ast.Assign), ast.dump(node)
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_importing_the_packages_loads_nothing_heavy() -> None:
    code = "import sys, kvcache, transfer; print([m for m in ('nixl', 'transformers', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
