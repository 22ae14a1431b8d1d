"""Finds the mutants of a source file: every change of its functions and constants that a test could notice.

Code that tests should not depend on is left out: docstrings, annotations, texts of errors and logs, `__repr__`,
`assert`, declarations without a body, and code that only a type checker reads.
"""

import ast
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.mutants.operators import changes

_SHOWN = 160  # The longest expression that a report shows, in characters.
_LEFT_OUT_NAMES = {"__repr__", "__str__", "__all__", "__slots__", "__match_args__", "__getattr__"}
_LOGS = {"_log", "log", "logger", "logging", "warnings"}
_CALLS_OF_TYPES = {"cast", "TypeVar", "NewType", "ParamSpec", "NamedTuple", "namedtuple", "getLogger"}
_TYPE_FIELDS = {"annotation", "returns", "decorator_list"}
_SHOW_A_CONSTANT = (
    ast.BinOp,
    ast.BoolOp,
    ast.Call,
    ast.Compare,
    ast.Subscript,
    ast.keyword,
    ast.IfExp,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Return,
)
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Mutant(NamedTuple):
    """One change of one source file.

    Attributes:
        path: the file, from the root of the repository.
        function: qualified name of the changed function, or of a constant of a module or a class.
        operator: the operator that makes the change.
        line: the line where the change begins.
        old: the old code, on one line.
        new: the new code, on one line.
        begin: start of the changed bytes in the file.
        end: end of the changed bytes.
        text: the text that replaces them.
    """

    path: Path
    function: str
    operator: str
    line: int
    old: str
    new: str
    begin: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        """Returns the source with the change."""
        data = source.encode()
        return (data[: self.begin] + self.text.encode() + data[self.end :]).decode()

    @property
    def key(self) -> str:
        """A key without line numbers. It has the file, the function, the operator and the expressions."""
        return f"{self.path}:{self.function} | {self.operator} | {self.old} -> {self.new}"


class Site(NamedTuple):
    """A node that may be changed, and the function to which it belongs.

    Attributes:
        function: qualified name of the function.
        node: the node.
        above: the nodes that contain it, outermost first.
    """

    function: str
    node: ast.AST
    above: tuple[ast.AST, ...]

    @property
    def is_alone(self) -> bool:
        """Whether the node is the only statement under a condition."""
        parent = self.above[-1] if self.above else None
        return isinstance(parent, ast.If) and parent.body == [self.node] and not parent.orelse

    @property
    def shown(self) -> ast.AST:
        """The node that a report shows. For a constant, the report shows the expression or statement around it."""
        if isinstance(self.node, ast.Constant):
            for one in reversed(self.above):
                if isinstance(one, _SHOW_A_CONSTANT):
                    return one
                if not isinstance(one, ast.Slice | ast.UnaryOp | ast.Tuple):
                    break
        return self.node


def mutants(path: Path, source: str) -> list[Mutant]:
    """Returns every mutant of a file once, in the order of the file."""
    starts = [0, *itertools.accumulate(len(line) for line in source.encode().splitlines(keepends=True))]
    found: dict[tuple[int, int, str], Mutant] = {}
    written = cache(ast.unparse)  # The texts are cached, because a node is changed in many ways.
    for site in sites(ast.parse(source)):
        for operator, old, new in changes(site.node):
            if site.is_alone and operator == "dropped":
                continue  # Another operator already makes the condition always false, which is the same change.
            assert isinstance(old, ast.expr | ast.stmt)
            assert old.end_lineno is not None
            assert old.end_col_offset is not None
            begin = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            before, text = written(old), ast.unparse(new)
            if text != before and (begin, end, text) not in found:
                shown = old.lineno, *_shown(site, before, new, text)
                found[begin, end, text] = Mutant(path, site.function, operator, *shown, begin, end, _placed(old, text))
    return [found[where] for where in sorted(found)]


def _placed(old: ast.expr | ast.stmt, text: str) -> str:
    """Returns the text in a form that can replace a node: an expression gets brackets, and a statement gets its
    indentation.
    """
    if isinstance(old, ast.stmt):
        return textwrap.indent(text, " " * old.col_offset).lstrip(" ")
    # The brackets are needed, because `0.sum()` is not an expression.
    return text if text.isidentifier() else f"({text})"


def _shown(site: Site, before: str, new: ast.AST, after: str) -> tuple[str, str]:
    """Returns the old and the new code as a report shows them, each on one line."""
    if isinstance(site.node, ast.Constant) and isinstance(new, ast.Constant):
        around, value = site.shown, site.node.value
        before = ast.unparse(around)
        site.node.value = new.value
        after = ast.unparse(around)
        site.node.value = value
    return _line(before), _line(after)


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def functions(program: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns every function and method of a file by its qualified name, except nested functions."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}

    def of(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, _DEFINITIONS):
                found[prefix + node.name] = node
            elif isinstance(node, ast.ClassDef):
                of(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try):
                of([one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)], prefix)

    of(program.body, "")
    return found


def sites(program: ast.Module) -> Iterator[Site]:
    """Yields the nodes of a file that are worth changing."""
    yield from _of_body(program.body, "")


def _of_body(body: Sequence[ast.stmt], prefix: str) -> Iterator[Site]:
    for node in body:
        yield from _of_declared(node, prefix)


def _of_declared(node: ast.stmt, prefix: str) -> Iterator[Site]:
    """Yields the nodes of a class, function or constant, including those in an `if` or `try`."""
    if isinstance(node, ast.ClassDef) and not _is_protocol(node):
        yield from _of_body(node.body, f"{prefix}{node.name}.")
    elif isinstance(node, _DEFINITIONS) and node.name not in _LEFT_OUT_NAMES and not _is_declaration(node):
        yield from _of_function(node, prefix + node.name)
    elif isinstance(node, ast.If) and not _is_for_types(node.test):
        yield from _of_body([*node.body, *node.orelse], prefix)
    elif isinstance(node, ast.Try):
        handled = [one for handler in node.handlers for one in handler.body]
        yield from _of_body([*node.body, *handled, *node.orelse, *node.finalbody], prefix)
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        is_type = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).endswith("TypeAlias")
        if isinstance(target, ast.Name) and target.id not in _LEFT_OUT_NAMES and not is_type:
            yield from _below(node.value, prefix + target.id)


def _is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def _is_declaration(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether a function has no body, or is an overload."""
    if any(ast.unparse(one).rpartition(".")[2] in {"overload", "abstractmethod"} for one in node.decorator_list):
        return True
    return all(isinstance(one, ast.Pass) or _is_bare(one) for one in node.body)


def _is_bare(node: ast.stmt) -> bool:
    """Returns whether a statement is a docstring or `...`."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_for_types(test: ast.expr) -> bool:
    return ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING"


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[Site]:
    for value in [*node.args.defaults, *node.args.kw_defaults]:
        if value is not None:
            yield from _below(value, name)
    for statement in node.body:
        yield from _below(statement, name)


def _below(node: ast.AST, name: str, above: tuple[ast.AST, ...] = ()) -> Iterator[Site]:
    """Yields the nodes below a node. Nodes on which tests should not depend are left out."""
    if isinstance(node, _DEFINITIONS):  # A nested function counts as a part of its outer function.
        yield from _of_function(node, name)
        return
    if isinstance(node, ast.ClassDef):
        for site in _of_body(node.body, ""):
            yield site._replace(function=name)
        return
    if _is_left_out(node):
        return
    yield Site(name, node, above)
    if isinstance(node, ast.Raise):
        return  # The node is the text of an error.
    for child in _children(node):
        yield from _below(child, name, (*above, node))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"isinstance", "issubclass"}:
        yield node.args[0]
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reshape":
        # Any negative number has the same meaning.
        yield from (one for one in (node.func, *node.args) if ast.unparse(one) != "-1")
        return
    if isinstance(node, ast.For) and _is_first_found(node):
        assert isinstance(node.iter, ast.Subscript)
        yield from (node.target, node.iter.value, *node.body)
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift) and isinstance(node.left, ast.Constant):
        return  # The node is a limit like `16 << 20`. Half or double the limit is not a fault.
    for field, value in ast.iter_fields(node):
        if field not in _TYPE_FIELDS:
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, ast.AST):
                    yield one


def _is_first_found(node: ast.For) -> bool:
    """Returns whether a loop is `for x in found[:1]: raise ...`. Such a loop always ends with its first element."""
    return isinstance(node.body[0], ast.Raise) and ast.unparse(node.iter).endswith("[:1]")


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
        return True
    if isinstance(node, ast.Call):
        first = node.func
        while isinstance(first, ast.Attribute | ast.Call):
            first = first.value if isinstance(first, ast.Attribute) else first.func
        name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
        return name in _CALLS_OF_TYPES or (isinstance(first, ast.Name) and first.id in _LOGS)
    if isinstance(node, ast.keyword):
        return node.arg == "strict"  # the `strict` of `zip` only guards against bugs
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_left_out(node.value)
    return isinstance(node, ast.If) and _is_for_types(node.test)
