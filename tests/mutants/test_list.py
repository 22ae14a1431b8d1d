"""The list of mutations fits the source and the tests: without running any of them."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.__main__ import MODULES, chosen
from tests.mutants.mutation import ROOT, Module, Mutation, StaleMutationError, mutated

LEAST = {"kvcache": 65, "transfer": 55, "scheduler_adapters": 30}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_every_mutation_applies_to_the_source_as_it_is(module: Module) -> None:
    source = (ROOT / module.path).read_text()
    changed = [mutated(source, mutation) for mutation in module.mutations]
    assert len(set(changed)) == len(changed), "a mutation is listed twice"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_every_mutation_names_tests_that_there_are(module: Module) -> None:
    for mutation in module.mutations:
        tests = module.tests_of(mutation)
        assert tests
        for test in tests:
            path, *names = test.split("::")
            assert (ROOT / path).exists(), test
            assert not names or names[-1].partition("[")[0] in functions_of(ROOT / path), test


@cache
def functions_of(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def test_the_list_is_long_enough_and_names_each_mutation_once() -> None:
    listed = [(module.name, each.function, each.old, each.new) for module in MODULES for each in module.mutations]
    assert len(set(listed)) == len(listed)
    for package, least in LEAST.items():
        assert len(chosen([package])) >= least


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        (Mutation("Pages.free", "pages", "x"), "there is no 'free'"),
        (Mutation("Pages.hold", "count", "x"), "'count' occurs 2 times"),
        (Mutation("Pages.hold", "gone", "x"), "'gone' occurs 0 times"),
        (Mutation("Pages.hold", "+= 1", "+= 01"), "leaves no program"),
        (Mutation("Pages.hold", "+= 1", "+=  1"), "changes nothing"),
    ],
)
def test_a_mutation_that_does_not_fit_is_an_error_of_the_list(mutation: Mutation, message: str) -> None:
    source = "class Pages:\n    def hold(self, count):\n        self.held += 1\n        return count\n"
    with pytest.raises(StaleMutationError, match=message):
        mutated(source, mutation)


def test_only_the_function_that_is_named_changes() -> None:
    source = "LIMIT = 3\n\ndef one():\n    return 1\n\ndef other():\n    return 1\n"
    assert mutated(source, Mutation("other", "return 1", "return 2")) == source[:-2] + "2\n"
    assert mutated(source, Mutation("LIMIT", "3", "4")) == source.replace("3", "4")
