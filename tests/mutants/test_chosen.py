import ast
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.mutants import chosen
from tests.mutants.chosen import Batch, changed_since, matching, mutants_of, sampled, thinned, touched_by
from tests.mutants.mutation import Module, Mutation, mutated

PAGES = Path("kvcache/pool/pages.py")
SOURCE = """MOST = 7

class Pool:
    def hold(self):
        self.held += 1

    def free(self):
        self.held -= 1
"""
HOLDS = Mutation("Pool.hold", "+= 1", "+= 2")
Listed = Callable[[Sequence[Module]], None]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns a repository with one commit. The test uses it in place of the real repository."""
    (tmp_path / PAGES).parent.mkdir(parents=True)
    (tmp_path / PAGES).write_text(SOURCE)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "first")
    monkeypatch.setattr(chosen, "ROOT", tmp_path)
    mutants_of.cache_clear()
    yield tmp_path
    mutants_of.cache_clear()


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Listed:
    """Replaces the list of handwritten mutations."""
    return lambda modules: monkeypatch.setattr(chosen, "HANDWRITTEN", modules)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def test_a_seed_draws_the_same_order_each_time_and_another_seed_another() -> None:
    batches = matching(["kvcache.pool"])
    once, again, other = sampled(batches, "one"), sampled(batches, "one"), sampled(batches, "two")
    assert once == again
    assert once != other
    keys = sorted(mutant.key for batch in batches for mutant in batch.mutants)
    assert keys == sorted(mutant.key for batch in once for mutant in batch.mutants)


def test_a_sample_takes_its_turn_at_every_file_before_it_returns_to_one() -> None:
    batches = matching(["kvcache.pool"])
    first = sampled(batches, "one")[: len(batches)]
    assert {batch.path for batch in first} == {batch.path for batch in batches}
    assert all(len(batch.mutants) <= 25 for batch in first)


def test_a_sample_of_each_function_reaches_all_of_them_and_draws_one_without_regard_to_the_others() -> None:
    batches = matching(["kvcache.pool"])
    few = thinned(batches, 2, "one")
    for batch, all_ in zip(few, batches, strict=True):
        counts = Counter(mutant.function for mutant in batch.mutants)
        assert counts == {name: min(2, count) for name, count in Counter(one.function for one in all_.mutants).items()}
        assert list(batch.mutants) == [mutant for mutant in all_.mutants if mutant in batch.mutants]
    assert few == thinned(batches, 2, "one") != thinned(batches, 2, "two")
    (alone,) = thinned(matching(["kvcache.pool.pages.PagePool.hold"]), 2, "one")
    assert set(alone.mutants) <= {mutant for batch in few for mutant in batch.mutants}


def test_a_package_a_module_a_function_or_an_operator_may_be_asked_for() -> None:
    assert {batch.path for batch in matching(["kvcache.pool.pages"])} == {PAGES}
    (batch,) = matching(["kvcache.pool.pages.PagePool.hold"])
    assert {mutant.function for mutant in batch.mutants} == {"PagePool.hold"}
    (batch,) = matching(["kvcache.pool.pages"], ["compare"])
    assert {mutant.operator for mutant in batch.mutants} == {"compare"}
    assert matching(["kvcache.pool.page"]) == []


@pytest.mark.usefixtures("repository")
def test_a_handwritten_mutation_is_one_more_mutant_of_its_file(listed: Listed) -> None:
    listed([Module("kvcache.pool.pages", [HOLDS])])
    found, unfit = chosen.by_hand.__wrapped__()
    (mutant,) = found[PAGES]
    assert (mutant.function, mutant.operator, mutant.line) == ("Pool.hold", chosen.BY_HAND, 5)
    assert mutant.applied(SOURCE) == mutated(SOURCE, HOLDS) == SOURCE.replace("+= 1", "+= 2")
    assert not unfit


@pytest.mark.usefixtures("repository")
def test_a_handwritten_mutation_whose_text_is_gone_is_reported_and_the_others_are_tried(listed: Listed) -> None:
    gone = Mutation("Pool.hold", "no such text", "")
    listed([Module("kvcache.pool.pages", [gone, HOLDS]), Module("kvcache.no_such_file", [HOLDS])])
    found, unfit = chosen.by_hand.__wrapped__()
    assert [mutant.old for mutant in found[PAGES]] == ["+= 1"]
    assert "kvcache/pool/pages.py:Pool.hold: Pool.hold: the text 'no such text' occurs 0 times" in unfit[0]
    assert unfit[1].startswith("kvcache/no_such_file.py")


def test_a_line_touches_the_function_in_which_it_stands() -> None:
    program = ast.parse("A = 1\n\ndef f():\n    return 1\n\nclass B:\n    def g(self):\n        return 1\n    C = 2\n")
    assert touched_by(program, {4}) == {"f"}
    assert touched_by(program, {8}) == {"B.g"}
    assert touched_by(program, {1, 2, 5, 9}) == set()


def test_changes_since_a_commit_are_found_by_their_function(repository: Path) -> None:
    assert changed_since("HEAD") == []
    (repository / PAGES).write_text(SOURCE.replace("self.held += 1", "self.held += 1  # another comment"))
    (batch,) = changed_since("HEAD")
    assert batch.path == PAGES
    assert batch.is_changed
    assert {mutant.function for mutant in batch.mutants} == {"Pool.hold"}


def test_a_constant_that_differs_is_found_by_its_line(repository: Path) -> None:
    (repository / PAGES).write_text(SOURCE.replace("MOST = 7", "MOST = 8"))
    (batch,) = changed_since("HEAD")
    assert {mutant.function for mutant in batch.mutants} == {"MOST"}


@pytest.mark.usefixtures("repository")
def test_an_unknown_commit_is_named() -> None:
    with pytest.raises(RuntimeError, match="--changed-since no-such: .*no-such"):
        changed_since("no-such")


def test_a_change_stays_marked_as_such_in_a_sample() -> None:
    (batch,) = matching(["kvcache.pool.pages"])
    assert all(one.is_changed for one in sampled([Batch(batch.path, batch.mutants, is_changed=True)], "one"))
