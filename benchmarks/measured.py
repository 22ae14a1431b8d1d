"""Records which code a result has measured, so that later changes to it are detected.

A result names the modules of ours that its process had loaded, and the benchmarks that made it, each with a digest of
its code. For `peers` and `pulls` the whole folder counts, because they start other programs. The digest leaves out
comments, docstrings and empty lines, which change no figure. Commits and dates are not compared: a result stays valid
when its commit is squashed or rebased, and becomes out of date when one line of code changes.
"""

from __future__ import annotations

import ast
import hashlib
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvcache", "transfer", "scheduler_adapters", "pagewire")
_FRAME = {"__init__", "__main__", "frame", "measured", "plots", "readme", "results", "figures"}
"""Files that only start benchmarks, or write, draw or read results. Changes to them do not make results out of date."""


def measured() -> dict[str, str]:
    """Returns the digest of each loaded package of ours and of each benchmark, by path."""
    paths = [name for name in PACKAGES if name in sys.modules]
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(ROOT / "benchmarks"):
            path = Path(file).relative_to(ROOT / "benchmarks")
            if str(path.with_suffix("")) not in _FRAME:
                paths.append(f"benchmarks/{path.parts[0]}")
    return {path: digest(ROOT / path) for path in dict.fromkeys(sorted(paths))}


def changed(measures: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """The paths whose code has changed or disappeared since `measures` was made."""
    return [path for path, was in measures.items() if not (root / path).exists() or digest(root / path) != was]


def digest(path: Path) -> str:
    """Sixteen hexadecimal digits that identify the code of a file, or of all Python files below a folder."""
    found = hashlib.blake2b(digest_size=8)
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        name = "" if file == path else str(file.relative_to(path))
        found.update(f"{name}\0{code_of(file.read_text())}\0".encode())
    return found.hexdigest()


@cache
def code_of(text: str) -> str:
    """A program without its comments, docstrings and empty lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for first, last in _docstrings(ast.parse(text)):
        lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yields the first and last line of each string that is a statement, such as a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno
