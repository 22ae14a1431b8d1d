"""A reservation is decided before anything changes. After this, only the request's context can refuse the reservation,
by refusing to set its indices.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache.replica.context import TextContext
from kvcache.replica.replica import Replica
from tests.kvcache.books import Books, books_of, first_difference
from tests.kvcache.random_model.matrix import with_needed
from tests.kvcache.random_model.run import Run

COMMON = ("forks", "preemption", "batches", "leases", "hints", "quotas", "stale")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "features",
    [
        (*COMMON, "states in slabs", "window", "imports"),
        (*COMMON, "window", "chunk"),
        (*COMMON, "states apart", "drafts"),
        COMMON,
    ],
    ids=" ".join,
)
def test_a_plan_changes_nothing_and_the_move_of_the_context_comes_first(
    features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In random runs with many features, the manager's state is compared at three moments: before a plan, after the
    plan, and when the context's indices are set. The state must not have changed.
    """
    seen: Counter[str] = Counter()
    before: list[tuple[Replica, Books]] = []

    def same(what: str, books: Books, replica: Replica) -> None:
        changed = first_difference(books, books_of(replica))  # type: ignore[arg-type]
        assert not changed, f"{what}: {changed}"
        seen[what] += 1

    def pure(name: str) -> None:
        planned = getattr(Replica, name)

        def plan(self: Replica, *args: Any) -> Any:
            books = books_of(self)  # type: ignore[arg-type]
            made = planned(self, *args)
            same(name, books, self)
            return made

        monkeypatch.setattr(Replica, name, plan)

    acted, moved = Replica.act, TextContext.run_from

    def act(self: Replica, *args: Any) -> Any:
        before.append((self, books_of(self)))  # type: ignore[arg-type]
        try:
            return acted(self, *args)
        finally:
            before.clear()

    def move(context: TextContext, start: int, active: int) -> None:
        if before:
            replica, books = before[0]
            same("move", books, replica)
            seen["cut"] += active < context.active_idx
        moved(context, start, active)

    pure("_plan")
    pure("plan_fork")
    monkeypatch.setattr(Replica, "act", act)
    monkeypatch.setattr(TextContext, "run_from", move)
    run = Run(with_needed(features))
    for seed in range(16):
        run.manager(seed, 100)
    assert seen["_plan"] > 40, seen
    assert seen["move"] > 5, seen
    assert seen["plan_fork"] > 2, seen
    assert not any("states" in one for one in features) or seen["cut"] > 3


@pytest.mark.few(1)
@pytest.mark.parametrize("states", ["states in slabs", "states apart", "preemption"])
def test_a_context_that_refuses_to_be_moved_leaves_everything_as_it_was(
    states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context of a request first refuses each reservation that would change it. Then the reservation is repeated.
    It succeeds as if there had been no first attempt.
    """
    seen: Counter[str] = Counter()
    reserved, moved, refuses = Replica.act, TextContext.run_from, [False]

    def move(context: TextContext, start: int, active: int) -> None:
        if refuses[0]:
            raise RuntimeError("not now")
        moved(context, start, active)

    def act(self: Replica, *args: Any) -> Any:
        books = books_of(self)  # type: ignore[arg-type]
        refuses[0] = True
        try:
            return reserved(self, *args)  # The call returns only if the reservation does not move the context.
        except RuntimeError:
            assert not (changed := first_difference(books, books_of(self))), changed  # type: ignore[arg-type]
            seen["refused"] += 1
        finally:
            refuses[0] = False
        return reserved(self, *args)

    monkeypatch.setattr(Replica, "act", act)
    monkeypatch.setattr(TextContext, "run_from", move)
    run = Run(with_needed((*COMMON, states)))
    for seed in range(8):
        run.manager(seed, 100)
    assert seen["refused"] > 10, seen
