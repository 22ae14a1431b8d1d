from pathlib import Path

import pytest

from tests.mutants.harmless import gone, reason_of, reasons
from tests.mutants.sites import mutants

SOURCE = "def f(a, b):\n    return a < b and a + 1\n"
MUTANTS = mutants(Path("kvcache/example.py"), SOURCE)
(BOUNDARY,) = [one for one in MUTANTS if one.new == "a <= b"]


def written(folder: Path, *lines: str) -> Path:
    file = folder / "harmless.txt"
    file.write_text("\n".join(["# a comment", "", *lines]))
    return file


def test_a_mutant_is_harmless_where_its_key_is_listed(tmp_path: Path) -> None:
    known = reasons(written(tmp_path, f"{BOUNDARY.key} ## both are the same page"))
    assert reason_of(BOUNDARY, known) == "both are the same page"
    assert [one.key for one in MUTANTS if reason_of(one, known)] == [BOUNDARY.key]


def test_all_changes_of_an_operator_in_a_function_may_be_listed_at_once(tmp_path: Path) -> None:
    known = reasons(written(tmp_path, "kvcache/example.py:f | constant | * ## only speed depends on it"))
    assert {one.operator for one in MUTANTS if reason_of(one, known)} == {"constant"}


def test_an_entry_whose_expression_is_gone_is_reported(tmp_path: Path) -> None:
    lost = "kvcache/example.py:g | compare | a < b -> a <= b"
    known = reasons(written(tmp_path, f"{lost} ## why", f"{BOUNDARY.key} ## why"))
    assert gone(MUTANTS, known) == [lost]


@pytest.mark.parametrize("line", ["no reason", "kvcache/example.py:f | compare | a -> b ##  ", "f ## why"])
def test_a_line_without_a_key_or_a_reason_is_an_error(tmp_path: Path, line: str) -> None:
    with pytest.raises(
        ValueError, match="harmless.txt, line 3: expected 'file:function | operator | old -> new ## reason'"
    ):
        reasons(written(tmp_path, line))


def test_the_list_itself_can_be_read() -> None:
    assert all(reasons().values())
