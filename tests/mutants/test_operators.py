import ast

import pytest

from tests.mutants.operators import ON_CONDITIONS, OPERATORS, changes

CASES = {
    "compare": {
        "a < b": ["a <= b", "a >= b"],
        "a >= b": ["a > b", "a < b"],
        "a == b": ["a != b"],
        "a is None": ["a is not None"],
        "a not in b": ["a in b"],
        "0 <= a < b": ["0 < a < b", "0 > a < b", "0 <= a <= b", "0 <= a >= b"],
    },
    "boolean": {
        "a and b": ["a or b", "b", "a"],
        "a or b or c": ["a and b and c", "b or c", "a or c", "a or b"],
    },
    "sign": {"not a": ["a"], "-a": ["a"], "~a": ["a"], "-(-a // b)": [], "+a": []},
    "constant": {
        "0": ["1"],
        "1": ["2", "0"],
        "64": ["65", "63"],
        "4096": ["4096000"],
        "5.0": ["5000.0"],
        "0.0": ["1.0"],
        "True": ["False"],
        "None": [],
        "'text'": [],
    },
    "arithmetic": {
        "a + b": ["a - b"],
        "a // b": ["a * b"],
        "a & b": ["a | b"],
        "a << b": ["a >> b"],
        "'a' + b": [],
        "[*a] + b": [],
        "-(-a // b)": [],
        "a += b": ["a -= b"],
    },
    "rounding": {
        "-(-a // b)": ["a // b"],
        "a // b": ["-(-a // b)"],
        "math.ceil(a)": ["math.floor(a)"],
        "floor(a)": ["ceil(a)"],
    },
    "extreme": {
        "min(a, b)": ["max(a, b)", "a", "b"],
        "np.maximum(a, b)": ["np.minimum(a, b)", "a", "b"],
        "max(a)": ["min(a)"],
        "any(a)": ["all(a)"],
        "min(*a)": ["max(*a)"],
    },
    "order": {"sorted(a, key=b)": ["list(a)"], "reversed(a)": ["list(a)"], "a.sorted()": []},
    "alias": {"a.copy()": ["a"], "a[:]": ["a"], "a[1:]": [], "a.copy(b)": [], "a[:] = b": []},
    "bounds": {"a[b:c]": ["a[:c]", "a[b:]"], "a[:]": [], "a[b]": []},
    "swapped": {"f(a, b)": ["f(b, a)"], "f(a, a)": [], "max(a, b)": [], "f(a, *b)": []},
    "default": {"f(a, b=c)": ["f(a)"], "zip(a, b, strict=True)": [], "f(b='text')": []},
    "dropped": {
        "f(a)": ["pass"],
        "a.b = c": ["pass"],
        "a[b] += c": ["pass"],
        "a.b: int = c": ["pass"],
        "del a[b]": ["pass"],
        "raise a": ["pass"],
        "a = b": [],
        "a: int": [],
    },
    "returned": {"return a": ["return None"], "return None": [], "return": []},
    "loop": {"continue": ["break"], "break": ["pass"]},
    "replaced": {"a += b": ["a = b"], "a.b |= c": ["a.b = c"]},
    "cleanup": {
        "try:\n    a\nfinally:\n    b": ["try:\n    a\nfinally:\n    pass"],
        "try:\n    a\nexcept E:\n    b": ["try:\n    a\nexcept E:\n    raise"],
        "try:\n    a\nexcept E:\n    raise": [],
        "with suppress(E):\n    a": ["if True:\n    a"],
        "with self.lock:\n    a": [],
        "with np.errstate():\n    a": [],
        "with f() as a:\n    b": [],
    },
    "condition": {
        "if a:\n    b": ["False", "True"],
        "while a:\n    b": ["False"],
        "while True:\n    b": [],
        "b if a else c": ["False", "True"],
    },
    "negated": {"if a:\n    b": ["not a"], "if a == b:\n    c": [], "while a:\n    b": []},
}


@pytest.mark.parametrize(
    ("operator", "source"), [(operator, source) for operator, cases in CASES.items() for source in cases]
)
def test_an_operator_turns_a_program_into_just_these(operator: str, source: str) -> None:
    assert changed(source, operator) == CASES[operator][source]


def changed(source: str, operator: str) -> list[str]:
    """Returns the results of an operator for the only statement of a program. If this statement is an expression, the
    operator gets the expression.
    """
    (statement,) = _in_loop(source)
    nodes: list[ast.AST] = [statement]
    if isinstance(statement, ast.Expr) and operator != "dropped":
        nodes = [statement.value]
    if isinstance(statement, ast.Assign) and operator in {"alias", "bounds"}:
        nodes = [statement.targets[0]]
    found = [change for node in nodes for change in changes(node)]
    return [ast.unparse(ast.fix_missing_locations(new)) for name, _, new in found if name == operator]


def _in_loop(source: str) -> list[ast.stmt]:
    """Wraps statements in a loop and a function, because `continue` and `return` need these."""
    body = "".join(f"  {line}\n" for line in source.splitlines())
    function = ast.parse(f"def f():\n for one in two:\n{body}").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert isinstance(function.body[0], ast.For)
    return function.body[0].body


def test_each_operator_has_its_cases() -> None:
    assert CASES.keys() == OPERATORS.keys() | ON_CONDITIONS.keys()


def test_the_condition_of_a_comprehension_is_changed_too() -> None:
    expression = ast.parse("[a for a in b if c]").body[0].value  # type: ignore[attr-defined]
    found = [(name, ast.unparse(old), ast.unparse(new)) for name, old, new in changes(expression.generators[0])]
    assert found == [("condition", "c", "False"), ("condition", "c", "True"), ("negated", "c", "not c")]
