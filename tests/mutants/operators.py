"""Small faults: each operator turns a node of the syntax tree into something that a mistake could leave there.

An operator sees one node without its surroundings. `sites` leaves out the nodes for which a change is not worthwhile.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Change(NamedTuple):
    """The replacement of one node by another.

    Attributes:
        operator: name of the operator.
        old: the node in the program.
        new: the node that replaces it, of the same kind (an expression or a statement).
    """

    operator: str
    old: ast.AST
    new: ast.AST


_BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
_IN_ORDER = {"sorted", "reversed"}
_SYMMETRIC = {"min", "max", "minimum", "maximum", "isinstance", "zip", "samestat", "compare_digest", "array_equal"}
_A_LIMIT = 64  # A larger number is a limit or a size. A wrong limit or size is not a fault.
_FAR = 1000


def _text(node: ast.AST | None) -> str:
    return ast.dump(node) if node else ""


def _with(node: Any, **fields: object) -> Any:
    """Returns a copy of a node with some fields replaced. The copy shares the child nodes, because nothing changes
    them.
    """
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _name_of(call: ast.Call) -> str:
    """Returns the last part of the name of a called function."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def compare(node: ast.AST) -> Iterator[ast.AST]:
    """`<` becomes `<=` and `>=`, `==` becomes `!=`, `in` becomes `not in`; chained comparisons change one at a time."""
    if not isinstance(node, ast.Compare):
        return
    for at, one in enumerate(node.ops):
        for table in (_BOUNDARY, _OPPOSITE):
            if type(one) in table:
                yield _with(node, ops=[*node.ops[:at], table[type(one)](), *node.ops[at + 1 :]])


def boolean(node: ast.AST) -> Iterator[ast.AST]:
    """`and` becomes `or`; each operand is dropped in turn."""
    if not isinstance(node, ast.BoolOp):
        return
    yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    for at in range(len(node.values)):
        left = [*node.values[:at], *node.values[at + 1 :]]
        yield _with(node, values=left) if len(left) > 1 else left[0]


def condition(test: ast.expr, *, repeats: bool) -> Iterator[ast.AST]:
    """A condition becomes always false or always true. The condition of a loop becomes false, so that the loop does not
    begin.
    """
    if not isinstance(test, ast.Constant):
        yield ast.Constant(value=False)
        if not repeats:
            yield ast.Constant(value=True)


def negated(test: ast.expr, *, repeats: bool) -> Iterator[ast.AST]:
    """Negates a condition, unless `compare` or `sign` already negates it."""
    if not repeats and not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):
        yield ast.UnaryOp(op=ast.Not(), operand=test)


def sign(node: ast.AST) -> Iterator[ast.AST]:
    """Replaces `-x`, `~x` and `not x` by `x`."""
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.UAdd) and not _is_up(node):
        yield node.operand


def constant(node: ast.AST) -> Iterator[ast.AST]:
    """A small number changes by one; a limit grows a thousandfold; `True` becomes `False`."""
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(value=not value)
    elif isinstance(value, int) and value <= _A_LIMIT:
        yield ast.Constant(value=value + 1)
        if value:
            yield ast.Constant(value=value - 1)
    elif isinstance(value, int | float):
        yield ast.Constant(value=_FAR * value if value else 1.0)


def arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    """`+` becomes `-`, `*` becomes `//`, `&` becomes `|`, except where text is concatenated."""
    if not isinstance(node, ast.BinOp | ast.AugAssign) or type(node.op) not in _ARITHMETIC:
        return
    if isinstance(node, ast.BinOp) and (_is_text(node.left) or _is_text(node.right) or _is_list(node)):
        return
    if isinstance(node, ast.AugAssign) and _is_text(node.value):
        return
    if not (isinstance(node, ast.BinOp) and _is_up(node)):
        yield _with(node, op=_ARITHMETIC[type(node.op)]())


def _is_list(node: ast.BinOp) -> bool:
    return any(isinstance(one, ast.List | ast.Tuple | ast.ListComp) for one in (node.left, node.right))


def _is_up(node: ast.AST) -> bool:
    """Returns whether a division or a sign is a part of the expression `-(-a // b)`."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and (
            isinstance(node.operand, ast.BinOp) and _is_up(node.operand) and isinstance(node.operand.op, ast.FloorDiv)
        )
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.FloorDiv)
        and isinstance(node.left, ast.UnaryOp)
        and isinstance(node.left.op, ast.USub)
    )


def rounding(node: ast.AST) -> Iterator[ast.AST]:
    """`-(-a // b)` becomes `a // b`, `a // b` becomes `-(-a // b)`, and `ceil` and `floor` become each other."""
    if isinstance(node, ast.UnaryOp) and _is_up(node):
        divided: Any = node.operand
        yield _with(divided, left=divided.left.operand)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and not _is_up(node):
        up = _with(node, left=ast.UnaryOp(op=ast.USub(), operand=node.left))
        yield ast.UnaryOp(op=ast.USub(), operand=up)
    elif isinstance(node, ast.Call) and _name_of(node) in {"ceil", "floor"}:
        yield _renamed(node, "floor" if _name_of(node) == "ceil" else "ceil")


def _renamed(call: ast.Call, name: str) -> ast.Call:
    func = _with(call.func, attr=name) if isinstance(call.func, ast.Attribute) else ast.Name(id=name, ctx=ast.Load())
    return _with(call, func=func)


def extreme(node: ast.AST) -> Iterator[ast.AST]:
    """`min` becomes `max`, `any` becomes `all`; `min` or `max` of two values becomes either value."""
    if not isinstance(node, ast.Call) or _name_of(node) not in _OTHER_CALL:
        return
    yield _renamed(node, _OTHER_CALL[_name_of(node)])
    if len(node.args) == 2 and not node.keywords and not any(isinstance(one, ast.Starred) for one in node.args):
        yield from node.args


def order(node: ast.AST) -> Iterator[ast.AST]:
    """`sorted` and `reversed` keep the order."""
    if isinstance(node, ast.Call) and _name_of(node) in _IN_ORDER and isinstance(node.func, ast.Name):
        yield _with(node, func=ast.Name(id="list", ctx=ast.Load()), keywords=[])


def alias(node: ast.AST) -> Iterator[ast.AST]:
    """A copy becomes the original object."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "copy" and not node.args and not node.keywords:
            yield node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _text(node.slice) == _text(ast.Slice()):
        yield node.value


def bounds(node: ast.AST) -> Iterator[ast.AST]:
    """Removes the first or the last bound of a slice."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        if node.slice.lower:
            yield _with(node, slice=_with(node.slice, lower=None))
        if node.slice.upper:
            yield _with(node, slice=_with(node.slice, upper=None))


def swapped(node: ast.AST) -> Iterator[ast.AST]:
    """Two neighbouring arguments of a call are exchanged."""
    if not isinstance(node, ast.Call) or _name_of(node) in _SYMMETRIC:
        return
    for at, (one, other) in enumerate(zip(node.args, node.args[1:], strict=False)):
        if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred) and _text(one) != _text(other):
            yield _with(node, args=[*node.args[:at], other, one, *node.args[at + 2 :]])


def default(node: ast.AST) -> Iterator[ast.AST]:
    """A keyword argument is left out, so that its default is used."""
    if isinstance(node, ast.Call):
        for at, keyword in enumerate(node.keywords):
            if keyword.arg not in {None, "strict"} and not _is_text(keyword.value):
                yield _with(node, keywords=[*node.keywords[:at], *node.keywords[at + 1 :]])


def dropped(node: ast.AST) -> Iterator[ast.AST]:
    """A statement is removed: a call for its effect, an assignment to a field or an element, a `del` or a `raise`."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield ast.Pass()
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is not None and all(isinstance(one, ast.Attribute | ast.Subscript) for one in targets):
            yield ast.Pass()
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Delete) and not isinstance(node.targets[0], ast.Name)):
        yield ast.Pass()


def returned(node: ast.AST) -> Iterator[ast.AST]:
    """`return x` becomes `return None`."""
    if isinstance(node, ast.Return) and node.value is not None and _text(node.value) != _text(ast.Constant(value=None)):
        yield ast.Return(value=ast.Constant(value=None))


def loop(node: ast.AST) -> Iterator[ast.AST]:
    """Replaces `continue` by `break`, and removes a `break`."""
    if isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Break):
        yield ast.Pass()


def replaced(node: ast.AST) -> Iterator[ast.AST]:
    """`+=` becomes `=`."""
    if isinstance(node, ast.AugAssign):
        yield ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno)


def cleanup(node: ast.AST) -> Iterator[ast.AST]:
    """A `finally` becomes empty, a handler re-raises its error, or a suppressed error is raised."""
    if isinstance(node, ast.Try):
        if node.finalbody:
            yield _with(node, finalbody=[ast.Pass()])
        for at, handler in enumerate(node.handlers):
            if not (isinstance(handler.body[0], ast.Raise) and handler.body[0].exc is None):
                again = _with(handler, body=[ast.Raise()])
                yield _with(node, handlers=[*node.handlers[:at], again, *node.handlers[at + 1 :]])
    elif isinstance(node, ast.With) and len(node.items) == 1 and not node.items[0].optional_vars:
        context = node.items[0].context_expr
        if isinstance(context, ast.Call) and _name_of(context) not in {"errstate", "no_grad", "inference_mode"}:
            yield ast.If(test=ast.Constant(value=True), body=node.body, orelse=[])


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    one.__name__: one
    for one in (
        compare,
        boolean,
        sign,
        constant,
        arithmetic,
        rounding,
        extreme,
        order,
        alias,
        bounds,
        swapped,
        default,
        dropped,
        returned,
        loop,
        replaced,
        cleanup,
    )
}


ON_CONDITIONS = {one.__name__: one for one in (condition, negated)}


def changes(node: ast.AST) -> Iterator[Change]:
    """Returns every change of one node and of its condition."""
    for name, operator in OPERATORS.items():
        for new in operator(node):
            yield Change(name, node, new)
    tests: list[ast.expr] = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
    tests += node.ifs if isinstance(node, ast.comprehension) else []
    for test in tests:
        for name, of_test in ON_CONDITIONS.items():
            for new in of_test(test, repeats=isinstance(node, ast.While)):
                yield Change(name, test, new)
