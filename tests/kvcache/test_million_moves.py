"""The random model with every combination of features. Some manager has each allowed pair of features, and every result
agrees with the model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache import InvalidParamsError
from tests.kvcache import million_moves
from tests.kvcache.million_moves import main
from tests.kvcache.random_model.matrix import FEATURES, REFUSED, World, build, drawn, pairs, with_needed
from tests.kvcache.random_model.moves import SeededChooser
from tests.kvcache.random_model.run import Model, Run
from tests.kvcache.tiers.stored_objects import StoredObjects

T = TypeVar("T")
COMMON = ("forks", "preemption", "batches", "renames", "stale", "resets")
# The least number of times that a rare event must occur on managers with the given features.
SELDOM: dict[tuple[str, ...], dict[str, int]] = {
    (*COMMON, "leases", "lends"): {"hit": 20, "refused": 10, "evicted": 20, "moved back": 5, "kept": 5, "fits": 10},
    (*COMMON, "hints", "quotas", "window"): {"hint": 50, "evicted": 20, "slid": 20, "came back": 10, "chunk": 20},
    (*COMMON, "host", "chunk", "leases"): {"came from the host": 1, "told of a window": 1, "slid": 20},
    (*COMMON, "window", "chunk", "leases"): {"not told of a window": 20, "kept for readers": 5},
    (*COMMON, "host", "replicas", "shards"): {"came from the host": 1, "rename refused": 5, "does not fit": 1},
    (*COMMON, "states apart", "drafts", "host"): {"state hit": 5, "states evicted": 10, "cut": 20, "set back": 5},
    (*COMMON, "states in slabs", "drafts", "window"): {"state hit": 1, "moved": 1, "no state": 1, "all right": 2},
    ("imports", "leases", "window", "host"): {"imported": 10, "import cancelled": 10, "import begun again": 2},
    ("forks", "overlap", "window"): {"forked in flight": 3, "forked late": 1, "fork refused: InvalidRequestError": 1},
    ("forks", "chunk"): {"forked late": 5, "fork refused: InvalidRequestError": 1},
    ("forks", "states apart"): {"fork refused: StatePageError": 5},
    (*COMMON, "interrupts", "imports", "drafts"): {"in the marked part": 30, "interrupted": 60},
}


# Seeds at which the model itself had a mistake, with the features of their managers.
MENDED = {
    # Mistake: two replicas of a batch use the same page ids.
    840246: "batches,chunk,drafts,forks,hostile,leases,partial,preemption,renames,replicas,shards",
    # Mistake: an import determines where the chunks of its prompt end.
    900497: (
        "chunk,drafts,forks,imports,leases,lends,own contexts,preemption,renames,replicas,resets,stale,states in slabs,"
        "window,windows alone"
    ),
    # Mistake: a state copy that a reader holds is not evicted.
    902136: "chunk,forks,lends,own contexts,preemption,resets,states apart,window,windows alone",
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.ci
def test_every_allowed_pair_of_features_is_combined() -> None:
    """For each allowed pair of features, some manager uses both features. This takes about 45 managers."""
    run = Run()
    for seed in range(120):
        run.manager(seed)
        if not (lacking := [pair for pair in pairs() if not run.pairs[pair]]):
            return
    pytest.fail(f"these do not meet: {lacking}")


@pytest.mark.parametrize("features", SELDOM, ids=" ".join)
def test_rare_events_occur(features: tuple[str, ...]) -> None:
    run, least = Run(with_needed(features)), SELDOM[features]
    lacking = least
    for seed in range(7, 47):
        run.manager(seed)
        if not (lacking := {event: run.seen[event] for event, count in least.items() if run.seen[event] < count}):
            return
    pytest.fail(f"seen less often than {least}: {lacking}")


@pytest.mark.parametrize("seed", MENDED)
def test_a_seed_with_which_the_model_was_wrong_finds_no_discrepancy(seed: int) -> None:
    Run(with_needed(MENDED[seed].split(","))).manager(seed)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda one: " and ".join(sorted(one)))
def test_each_combination_in_the_list_of_refusals_is_refused_with_its_message(
    refused: frozenset[str], tmp_path: Path
) -> None:
    with pytest.raises(InvalidParamsError, match=REFUSED[refused]):
        build(SeededChooser(1), with_needed(refused), World(tmp_path, StoredObjects()))


def test_only_the_list_of_refusals_excludes_features() -> None:
    left_out = {one for refused in REFUSED if len(refused) == 1 for one in refused}
    assert {one for pair in pairs() for one in pair} == {*FEATURES} - left_out


class DrawnChooser:
    """Choices by Hypothesis, which shrinks a failing sequence to the shortest one."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def pick(self, choices: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(choices))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(0, 1 << 20), st.integers(1, 40))
def test_drawn_moves(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int, count: int) -> None:
    """Hypothesis shrinks a failing run: both the number of moves and each choice in them."""
    # The place of an interrupt depends on the length of calls, which Hypothesis does not control.
    features = drawn(SeededChooser(seed)) - {"interrupts"}
    model = Model(DrawnChooser(data), World(tmp_path_factory.mktemp("files"), StoredObjects()), features)
    for _ in range(count):
        model.move()
    model.finish()
    assert model.manager.num_free_blocks == model.manager.total_num_pages
    model.close()


def test_the_tool_prints_which_features_were_combined(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seed", "7", "--moves", "800"])
    said = capsys.readouterr().out
    assert "seeds 7 to 10, no discrepancy" in said
    assert "'moves': 800" in said
    assert [one for one in FEATURES if f" {one} " not in said] == []


def test_a_seed_that_fails_is_named_and_fails_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moves: Counter[str] = Counter()

    class Wrong(Model):
        def same_books(self) -> None:
            super().same_books()
            moves["all"] += 1
            # An interrupt comes at a bytecode, whose number depends on the threads of the tiers.
            assert self.seen["hit"] < 3 or "interrupts" in self.features

    monkeypatch.setattr("tests.kvcache.random_model.run.Model", Wrong)
    with pytest.raises(AssertionError, match="3 < 3"):
        main(["--seed", "40", "--moves", "4000"])
    said, first = capsys.readouterr().out, moves["all"]
    line = next(one for one in said.splitlines() if "fails" in one)
    moves.clear()
    words = line.split(": ", 1)[1].split(" --only ")
    with pytest.raises(AssertionError, match="3 < 3"):
        main([*words[0].split(), "--only", words[1].strip("'")])
    assert 0 < moves["all"] <= first


def test_an_unknown_feature_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        million_moves.main(["--only", "windows,host"])
    assert "--only: windows is no feature" in capsys.readouterr().err
