import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def functions_with_pipes() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(BENCHMARKS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and ".Pipe(" in ast.unparse(node):
                yield f"{path.relative_to(BENCHMARKS)}:{node.name}", node


FUNCTIONS = dict(functions_with_pipes())


def test_the_pipes_of_the_benchmarks_are_found() -> None:
    assert len(FUNCTIONS) >= 5


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_child_that_dies_is_not_waited_for_without_end(name: str) -> None:
    """`recv` raises EOFError once no process holds the other end of the pipe. The parent must therefore close its own
    copy of that end.
    """
    lines = ast.unparse(FUNCTIONS[name]).splitlines()
    made = [at for at, line in enumerate(lines) if ".Pipe(" in line]
    started = [at for at, line in enumerate(lines) if ".start()" in line]
    closed = [at for at, line in enumerate(lines) if "theirs.close()" in line]
    received = [at for at, line in enumerate(lines) if ".recv()" in line or "_answer()" in line]
    assert len(made) == len(closed) == 1
    assert made[0] < min(started) < closed[0] < min(received, default=len(lines))
