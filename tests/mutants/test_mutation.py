"""Tests the handwritten mutations, and the function that applies a mutation to a source."""

import pytest

from tests.mutants.handwritten import HANDWRITTEN
from tests.mutants.mutation import Mutation, StaleMutationError, mutated

SOURCE = "class Pages:\n    def hold(self, count):\n        self.held += 1\n        return count\n"


def test_the_handwritten_list_names_each_mutation_once() -> None:
    listed = [(module.name, each.function, each.old, each.new) for module in HANDWRITTEN for each in module.mutations]
    assert len(set(listed)) == len(listed)
    assert len({module.name for module in HANDWRITTEN}) == len(HANDWRITTEN)


def test_a_text_is_found_however_its_lines_are_broken() -> None:
    source = "def one(a, b):\n    return max(\n        a,\n        b\n    )\n"
    assert mutated(source, Mutation("one", "max(a, b)", "a")) == "def one(a, b):\n    return a\n"


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        (Mutation("Pages.free", "pages", "x"), "there is no 'free'"),
        (Mutation("Pages.hold", "count", "x"), "'count' occurs 2 times"),
        (Mutation("Pages.hold", "gone", "x"), "'gone' occurs 0 times"),
        (Mutation("Pages.hold", "+= 1", "+= 01"), "makes the source invalid"),
        (Mutation("Pages.hold", "+= 1", "+=  1"), "changes nothing"),
    ],
)
def test_a_mutation_that_does_not_fit_is_an_error_of_the_list(mutation: Mutation, message: str) -> None:
    with pytest.raises(StaleMutationError, match=message):
        mutated(SOURCE, mutation)


def test_only_the_function_that_is_named_changes() -> None:
    source = "LIMIT = 3\n\ndef one():\n    return 1\n\ndef other():\n    return 1\n"
    assert mutated(source, Mutation("other", "return 1", "return 2")) == source[:-2] + "2\n"
    assert mutated(source, Mutation("LIMIT", "3", "4")) == source.replace("3", "4")
