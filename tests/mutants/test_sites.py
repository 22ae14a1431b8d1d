import ast
from pathlib import Path

import pytest

from tests.mutants.mutation import ROOT
from tests.mutants.operators import changes
from tests.mutants.places import beside, sources
from tests.mutants.sites import Mutant, functions, mutants, sites

PATH = Path("kvcache/example.py")


def of(source: str) -> list[Mutant]:
    return mutants(PATH, source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""\nimport os\nfrom os import path\n',
        "def f() -> int:\n    '''Returns 1.'''\n    ...\n",
        "def f(a: int | None, b: 'list[1]'): pass\n",
        "class A(Protocol):\n    def f(self):\n        return self.a + 1\n",
        "class A:\n    __slots__ = (1, 2)\n    a: int\n    def __repr__(self):\n        return self.a + 1\n",
        "if TYPE_CHECKING:\n    LIMIT = 1\n",
        "@overload\ndef f(a, b=1): return a\n",
        "@abc.abstractmethod\ndef f(a):\n    return a + 1\n",
        "__all__ = [1]\n",
        "def f():\n    assert a < b, c + 1\n",
        "def f():\n    log.debug('text', a + 1)\n    _log.warning(a)\n    warnings.warn(a - 1)\n",
        "A = TypeVar('A', bound=1)\n_log = logging.getLogger('a')\n",
        "def f():\n    f'{a + 1}'\n",
        "def f():\n    a = b(strict=True)\n",
        "def f():\n    a = b.reshape(-1)\n",
        "A: TypeAlias = int | str\n",
    ],
)
def test_code_that_tests_should_not_depend_on_is_not_changed(source: str) -> None:
    assert of(source) == []


def test_the_text_of_an_error_stays_and_the_error_may_be_dropped() -> None:
    assert {(one.operator, one.new) for one in of("def f():\n    raise E(f'{a - 1}', b + 1)\n")} == {
        ("dropped", "pass")
    }


def test_an_error_that_is_the_only_statement_under_a_condition_is_dropped_once() -> None:
    found = of("def f():\n    if a:\n        raise E\n")
    assert [(one.operator, one.new) for one in found] == [
        ("condition", "False"),
        ("condition", "True"),
        ("negated", "not a"),
    ]


def test_slices_of_a_list_whose_first_item_raises_are_not_changed() -> None:
    assert [one.old for one in of("def f():\n    for a in b[c + 1][:1]:\n        raise E\n")] == [
        "c + 1",
        "c + 1",
        "c + 1",
        "raise E",
    ]


def test_half_a_limit_is_no_mutant_and_an_almost_zero_limit_is_one() -> None:
    assert [(one.operator, one.new) for one in of("MOST = 16 << 20\n")] == [("arithmetic", "16 >> 20")]


def test_a_mutant_is_of_the_outermost_function_or_of_a_constant() -> None:
    source = (
        "LIMIT = 1\n"
        "class Pool:\n"
        "    most = 2\n"
        "    def take(self):\n"
        "        def inner():\n"
        "            return 3\n"
        "        class Inner:\n"
        "            def f(self): return 4\n"
        "        return lambda: 5\n"
    )
    assert {(one.function, one.old) for one in of(source) if one.operator == "constant"} == {
        ("LIMIT", "1"),
        ("Pool.most", "2"),
        ("Pool.take", "return 3"),
        ("Pool.take", "return 4"),
        ("Pool.take", "5"),
    }


def test_a_constant_is_shown_with_what_it_is_part_of() -> None:
    source = "def f(a):\n    a.b = 4\n    return g(a[-1:], c=2) < a + 3\n"
    assert [(one.old, one.new) for one in of(source) if one.operator == "constant"] == [
        ("a.b = 4", "a.b = 3"),
        ("a.b = 4", "a.b = 5"),
        ("a[-1:]", "a[-0:]"),
        ("a[-1:]", "a[-2:]"),
        ("c=2", "c=1"),
        ("c=2", "c=3"),
        ("a + 3", "a + 2"),
        ("a + 3", "a + 4"),
    ]
    assert of(source)[0].applied(source) != source


def test_only_the_expression_changes_whatever_letters_stand_before_it() -> None:
    source = "def f():\n    a = 'äöü'; return b < c  # as it is\n"
    (found,) = [one for one in of(source) if one.new == "b <= c"]
    assert found.applied(source) == source.replace("b < c", "(b <= c)")


def test_a_number_whose_method_is_called_leaves_a_program() -> None:
    changed = {one.applied("a = max(0, b).bit_count()\n") for one in of("a = max(0, b).bit_count()\n")}
    assert "a = (0).bit_count()\n" in changed


def test_a_statement_keeps_its_indentation_and_a_branch_its_elif() -> None:
    source = (
        "def f():\n    if a:\n        x.b(1)\n    elif c:\n"
        "        try:\n            d()\n        finally:\n            e()\n"
    )
    changed = {one.applied(source) for one in of(source)}
    assert source.replace("elif c:", "elif False:") in changed
    assert source.replace("x.b(1)", "pass") in changed
    assert source.replace("            e()", "            pass") in changed
    assert all(ast.parse(one) for one in changed)


def test_the_name_of_a_mutant_does_not_depend_on_the_code_around_it() -> None:
    source = "def f(a):\n    return a < 1\n"
    moved = (
        "import os\n\n\ndef g():\n    return 7\n\n\n"
        "def f(a):\n    print(a)\n    return (\n        a\n        < 1\n    )\n"
    )
    (one,) = [one.key for one in of(source) if one.new == "a <= 1"]
    assert one == "kvcache/example.py:f | compare | a < 1 -> a <= 1"
    assert one in {other.key for other in of(moved)}


def test_every_mutant_of_a_file_is_another_program() -> None:
    path = Path("kvcache/pool/pages.py")
    source = (ROOT / path).read_text()
    changed = [one.applied(source) for one in mutants(path, source)]
    assert len(changed) > 150
    dumps = {ast.dump(ast.parse(one)) for one in changed}
    assert ast.dump(ast.parse(source)) not in dumps
    assert len(dumps) == len(changed)


def is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether a function has a docstring and no statements, as the methods of a protocol do."""
    return all(isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in function.body)


def test_every_function_of_five_lines_has_a_mutant_unless_it_only_forwards() -> None:
    reached, without = 0, []
    for path in sources():
        if not beside(path):
            continue
        source = (ROOT / path).read_text()
        program = ast.parse(source)
        have = {site.function for site in sites(program) if any(changes(site.node))}
        for name, node in functions(program).items():
            if (node.end_lineno or 0) - node.lineno + 1 >= 5 and not is_stub(node):
                reached += name in have
                without += [] if name in have else [f"{path}:{name}"]
    assert reached > 99 * len(without), without
