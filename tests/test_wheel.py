"""The faults that `make test-wheel` finds in a wheel before its installation. Every import of the code must be
declared.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.pagewire.distributions import DISTRIBUTIONS
from tests.wheel import ROOT, Failed, commands, contents, declared, packaged, required, zipped

INFO = "pagewire-0.1.0.dist-info"
PACKAGES = ("kvcache", "transfer", "scheduler_adapters", "pagewire")
Files = dict[str, str]


def right() -> Files:
    """Returns the files of a wheel of this tree. All files are empty except the metadata."""
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in of.items())
        for group, of in commands().items()
    )
    files = dict.fromkeys(packaged(), "")
    files[f"{INFO}/METADATA"] = "Name: pagewire\n" + "".join(f"Requires-Dist: {one}\n" for one in sorted(required()))
    files[f"{INFO}/entry_points.txt"] = points
    files[f"{INFO}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{INFO}/RECORD"))
    return files


def without(files: Files, part: str) -> Files:
    """Returns the files of a wheel without one folder or file. The record also lacks this folder or file."""
    kept = {name: text for name, text in files.items() if not name.startswith(part)}
    lines = [line for line in files[f"{INFO}/RECORD"].splitlines(keepends=True) if not line.startswith(part)]
    return {**kept, f"{INFO}/RECORD": "".join(lines)}


def changed(files: Files, name: str, old: str, new: str = "") -> Files:
    assert old in files[f"{INFO}/{name}"]
    return {**files, f"{INFO}/{name}": files[f"{INFO}/{name}"].replace(old, new)}


def made(files: Files, folder: Path) -> Path:
    return zipped(folder / "pagewire-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl", files)


def test_a_wheel_of_this_tree_is_right(tmp_path: Path) -> None:
    contents(made(right(), tmp_path))


FOLDERS = sorted({str(Path(file).parent) for file in packaged()})
BROKEN: dict[str, tuple[Callable[[Files], Files], str]] = {
    **{
        f"no {folder}": ((lambda files, folder=folder: without(files, f"{folder}/")), f"lacks files: .*{folder}/")
        for folder in FOLDERS
    },
    "no compiled module": (lambda files: without(files, "kvcache/replica/chained.abi3.so"), "lacks files: .*abi3.so$"),
    "no stub": (lambda files: without(files, "pagewire/__init__.pyi"), "lacks files: pagewire/__init__.pyi$"),
    "no mark of types": (lambda files: without(files, "transfer/py.typed"), "lacks files: transfer/py.typed$"),
    **{
        f"without {one}": (
            (lambda files, one=one: changed(files, "METADATA", f"Requires-Dist: {one}\n")),
            "lacks requirements: ",
        )
        for one in required()
    },
    "another version": (lambda files: changed(files, "METADATA", "msgspec>=0.19", "msgspec>=0.1"), "msgspec>=0.19$"),
    "a stranger's file": (lambda files: {**files, "tests/wheel.py": ""}, "files that it should not: tests/wheel.py$"),
    "not recorded": (lambda files: changed(files, "RECORD", "pagewire/cli.py,,\n"), "recorded files: pagewire/cli.py$"),
    "no command": (
        lambda files: changed(files, "entry_points.txt", "pagewire.cli:main", "pagewire:main"),
        "entry points",
    ),
    "no metadata": (lambda files: without(files, f"{INFO}/METADATA"), "no more than"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_wheel_is_noticed(how: str, tmp_path: Path) -> None:
    break_it, said = BROKEN[how]
    with pytest.raises(Failed, match=said):
        contents(made(break_it(right()), tmp_path))


def imported(package: str, *, heads: bool = False) -> set[str]:
    """Returns the third-party packages that a package imports. With `heads`, only the imports at the top of modules
    count.
    """
    found: set[str] = set()
    engines = [ROOT / "scheduler_adapters" / name for name in ("vllm", "sglang")]
    for file in (ROOT / package).rglob("*.py"):
        if not any(engine in file.parents for engine in engines):
            tree = ast.parse(file.read_text())
            for one in tree.body if heads else ast.walk(tree):
                if isinstance(one, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in one.names}
                elif isinstance(one, ast.ImportFrom) and one.module:
                    found.add(one.module.partition(".")[0])
    return found - sys.stdlib_module_names - {*PACKAGES}


def test_whatever_the_code_imports_is_declared() -> None:
    always = {Requirement(one).name for one in declared()["project"]["dependencies"]}
    extras = {Requirement(one).name for one in required()} - always
    needed = {DISTRIBUTIONS.get(one, one) for package in PACKAGES for one in imported(package)}
    assert needed <= always | extras
    at_once = {DISTRIBUTIONS.get(one, one) for one in imported("kvcache", heads=True)}
    assert at_once - always == {"prometheus-client"}, "kvcache.endpoints.families is for those who have it"
    assert always <= needed, "declared, and not imported"
