"""Handwritten mutations, and the function that applies a mutation to a source."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Mutation(NamedTuple):
    """A small change of one function.

    Attributes:
        function: qualified name of the function in the module ("PagePool.release"), or of a class or a constant.
        old: text that occurs once in it, regardless of line breaks.
        new: the text that replaces it.
    """

    function: str
    old: str
    new: str


class Module(NamedTuple):
    """The mutations of one module.

    Attributes:
        name: dotted name.
        mutations: the mutations of its functions.
    """

    name: str
    mutations: Sequence[Mutation]

    @property
    def path(self) -> Path:
        """The module's file, from the root of the repository."""
        return Path(*self.name.split(".")).with_suffix(".py")


class StaleMutationError(ValueError):
    """The list of mutations no longer matches the source."""


def mutated(source: str, mutation: Mutation) -> str:
    """Returns the source with one mutation applied.

    Raises:
        StaleMutationError: there is no such function, the old text does not occur exactly once, or the result is not a
            program, or it is the same program.
    """
    named = _find(_parsed(source), mutation.function)
    first, last = _span(named)
    lines = source.splitlines(keepends=True)
    text = "".join(lines[first:last])
    found = list(_pattern(mutation.old).finditer(text))
    if len(found) != 1:
        raise StaleMutationError(
            f"{mutation.function}: the text {mutation.old!r} occurs {len(found)} times, expected once"
        )
    start, end = found[0].span()
    changed = "".join([*lines[:first], text[:start], mutation.new, text[end:], *lines[last:]])
    try:
        program = ast.parse(changed)
    except SyntaxError as error:
        raise StaleMutationError(f"{mutation.function}: {mutation.new!r} makes the source invalid: {error}") from error
    # Only the function is compared: no other code has changed, and a comparison of whole files takes long.
    if _is_same(named, program, mutation.function):
        raise StaleMutationError(f"{mutation.function}: {mutation.new!r} changes nothing")
    return changed


def _pattern(old: str) -> re.Pattern[str]:
    """Returns a pattern that matches a text, no matter where the formatter has broken its lines."""
    before = re.match(r"\s*", old)
    after = re.search(r"\s*$", old)
    assert before is not None
    assert after is not None
    words = re.findall(r"\w+|[^\w\s]", old)
    return re.compile(re.escape(before[0]) + r"\s*".join(map(re.escape, words)) + re.escape(after[0]))


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _is_same(named: ast.stmt, program: ast.Module, qualified: str) -> bool:
    """Returns whether the function is the same in another program."""
    try:
        return ast.dump(_find(program, qualified)) == ast.dump(named)
    except StaleMutationError:
        return False  # The mutation has changed the name of the function.


def _find(program: ast.Module, qualified: str) -> ast.stmt:
    """Returns a function, class or constant by its name."""
    body: Sequence[ast.stmt] = program.body
    found: ast.stmt | None = None
    for name in qualified.split("."):
        found = next((node for node in reversed(list(_nested(body))) if name in _names(node)), None)
        if found is None:
            raise StaleMutationError(f"{qualified}: there is no {name!r}")
        body = found.body if isinstance(found, Defined) else ()
    assert found is not None
    return found


def _span(named: ast.stmt) -> tuple[int, int]:
    """Returns the line range of a function, class or constant: the first line, and the line after the last line."""
    first = min([named.lineno, *(one.lineno for one in getattr(named, "decorator_list", []))])
    return first - 1, named.end_lineno or named.lineno


def _nested(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Returns the statements of a body, including those in `if`, `try` and loops.

    Statements in functions and classes are left out.
    """
    for node in body:
        yield node
        if not isinstance(node, Defined):
            yield from _nested([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, Defined):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
