"""`enable_runtime_checks` checks the state around every call that changes it. The tables name every public call."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcache import InterruptedCallError, InvariantError, LruOrder, PagedKVCacheManager, TextContext
from kvcache.copies import Copy
from kvcache.replica.contents import PageContents
from kvcache.replica.copier import ImportCopier
from tests.kvcache.build import manager_of
from tests.kvcache.tiers.stored_objects import StoredObjects

SIZE = 4


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what belongs to an object of the package, by name."""
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in {"__weakref__", "__dict__"} and hasattr(value, name):
                yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


def state(value: Any, seen: dict[int, int] | None = None) -> Any:  # noqa: PLR0911
    """Returns the state of a manager as plain values, which can be compared. The contents of pages are left out."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray):
        return (value.shape, value.tobytes())
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, Mapping):
        return [(state(key, seen), state(one, seen)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque):
        return [state(one, seen) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if type(value).__module__.startswith("kvcache") and not isinstance(value, TextContext):
        return [(name, state(one, seen)) for name, one in parts(value)]
    return type(value).__name__


class Rig:
    """A manager with a host tier and objects below it, and something of everything that its calls take."""

    def __init__(self, store: StoredObjects) -> None:
        self.checks = 0
        objects = {"object_tier_io": store, "object_tier_timeout_s": 60.0, "object_tier_pages": 1}
        tiers = {"file_tier_key": "k", **objects}
        self.manager = manager = manager_of(64, page_size=SIZE, dp=2, host_slots=16, params=tiers)
        mark: Any = manager._mark
        check = mark.recount

        def counted() -> None:
            self.checks += 1
            check()

        mark.recount = counted
        self.old = self.run("old", range(200, 213))
        manager.release("old")
        self.context = self.run("r", range(13))
        self.lease = manager.lease("r")
        self.table = manager.block_table("r")
        self.early = msgspec.structs.replace(
            self.table, num_tokens=8, groups=(self.table.groups[0][:2],), digests=self.table.digests[:64]
        )
        self.reader = TextContext(range(14), 64, "reader")
        manager.external_claim("reader", 1)
        pending = manager.import_block_table(self.reader, self.early, partial=True)
        assert pending is not None
        self.pending = pending
        self.copier: ImportCopier | None = None
        self.wanted = manager.contents.digests(self.context)
        self.step = manager.fetch_ahead([self.context])

    def run(self, name: str, tokens: Any) -> TextContext:
        context = TextContext(tokens, 64, name)
        self.manager.external_claim(name, 0)
        assert self.manager.maybe_reserve(context)
        context.update(1)
        self.manager.step([context])
        return context

    def new(self) -> TextContext:
        context = TextContext(range(14), 64, "new")
        self.manager.external_claim("new", 1)
        return context

    def with_new(self, call: Callable[[TextContext], object]) -> Callable[[], object]:
        context = self.new()
        return lambda: call(context)

    def copied(self) -> ImportCopier:
        self.manager.extend_import(self.reader, self.pending, self.table, last=True)
        self.copier = self.manager.copier(self.pending)
        self.copier.take()
        return self.copier

    def commit(self) -> Callable[[], object]:
        proof = self.copied().prove()
        return lambda: self.manager.commit_import(self.reader, self.pending, proof)

    def import_pages(self) -> Any:
        table = msgspec.structs.replace(self.table, num_tokens=12, groups=(self.table.groups[0][:3],))
        return self.manager.contents.import_pages(TextContext(range(14), 64, "nobody"), 1, table)

    def commit_pages(self) -> Callable[[], object]:
        pending = self.import_pages()
        copier = self.manager.copier(pending)
        copier.take()
        proof = copier.prove()
        return lambda: self.manager.contents.commit_pages(pending, proof)

    def to_fetch(self, call: str) -> Callable[[], object]:
        context = self.new()
        assert self.manager.maybe_reserve(context)
        return lambda: getattr(self.manager, call)([context])

    def computed(self) -> Callable[[], object]:
        context = self.new()
        assert self.manager.maybe_reserve(context)
        self.manager.fetch([context])
        context.update(1)
        return lambda: self.manager.step([context])

    def below(self, call: Callable[[], object]) -> Callable[[], object]:
        """Leaves the old prompt's pages only in objects."""
        self.manager.flush_tiers()
        for replica in self.manager._replicas.each:
            replica.forget()
        self.manager._replicas.tiers.host.pool.forget()
        return call

    def loading(self, call: str) -> Callable[[], object]:
        """Begins to copy the old prompt's pages from host memory to the device, as on a GPU, which copies meanwhile."""
        self.manager.flush_tiers()
        for replica in self.manager._replicas.each:
            replica.forget()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Copy, "over", lambda _: False)
            assert self.manager.contents.bring("peer", 0, self.manager.contents.digests(self.old), 99)
        return lambda: getattr(self.manager, call)(TextContext([1], 9, "waiting"))


# For each call that may change the state, a function that prepares a change and returns the call that makes it.
CHANGES: dict[str, Callable[[Rig], Callable[[], object]]] = {
    "external_claim": lambda it: lambda: it.manager.external_claim("new", 0),
    "claim": lambda it: lambda: it.manager.claim(TextContext([1], 9, "new"), 0).__enter__(),
    "release": lambda it: lambda: it.manager.release("r"),
    "admission": lambda it: it.loading("admission"),
    "get_or_recommend_replica": lambda it: it.loading("get_or_recommend_replica"),
    "prefetch": lambda it: it.below(lambda: it.manager.prefetch(TextContext(range(200, 213), 64, "waiting"))),
    "maybe_reserve": lambda it: it.with_new(it.manager.maybe_reserve),
    "reserve_batch": lambda it: it.with_new(lambda new: it.manager.reserve_batch([new])),
    "fork": lambda it: lambda: it.manager.fork(it.context, it.context.fork("child")),
    "fetch": lambda it: it.to_fetch("fetch"),
    "fetch_ahead": lambda it: it.to_fetch("fetch_ahead"),
    "end_step": lambda it: lambda: it.manager.end_step(it.step),
    "step": lambda it: it.computed(),
    "lease": lambda it: lambda: it.manager.lease("r"),
    "end_lease": lambda it: lambda: it.manager.end_lease(it.lease),
    "import_block_table": lambda it: it.with_new(lambda new: it.manager.import_block_table(new, it.table)),
    "extend_import": lambda it: lambda: it.manager.extend_import(it.reader, it.pending, it.table, last=True),
    "copier": lambda it: lambda: it.manager.copier(it.pending),
    "commit_import": lambda it: it.commit(),
    "cancel_import": lambda it: lambda: it.manager.cancel_import(it.pending),
    "reset_prefix_cache": lambda it: it.manager.reset_prefix_cache,
    "set_weights": lambda it: lambda: it.manager.set_weights(2),
    "flush_tiers": lambda it: it.manager.flush_tiers,
    "contents.lease": lambda it: lambda: it.manager.contents.lease("peer", 0, it.wanted, 99),
    "contents.bring": lambda it: it.below(
        lambda: it.manager.contents.bring("peer", 0, it.manager.contents.digests(it.old), 99)
    ),
    "contents.import_pages": lambda it: it.import_pages,
    "contents.commit_pages": lambda it: it.commit_pages(),
    "copier.prove": lambda it: it.copied().prove,
    "copier.give_up": lambda it: it.copied().give_up,
}
# Calls that record one fact, so that no change can be left half done.
SINGLE = {"block_table", "reset_metrics", "copier.take"}
QUESTIONS: dict[str, Callable[[Rig], object]] = {
    "contains": lambda it: it.manager.contains("r"),
    "get_replica": lambda it: it.manager.get_replica(it.context),
    "batch": lambda it: it.manager.batch([it.context]),
    "increment_cache_lengths": lambda it: it.manager.increment_cache_lengths(
        [*it.step.inputs],
        SimpleNamespace(input_row_offsets=torch.tensor([0, 1]), data_parallel_splits=[0, 1, 1]),
    ),
    "get_data_parallel_splits": lambda it: it.manager.get_data_parallel_splits([it.context]),
    "input_symbols": lambda it: it.manager.input_symbols(),
    "get_req_blocks": lambda it: it.manager.get_req_blocks("r"),
    "lineage": lambda it: it.manager.lineage("r"),
    "check": lambda it: it.manager.check(),
    "recover": lambda it: it.manager.recover(),
    "contents.digests": lambda it: it.manager.contents.digests(it.context),
    "contents.cached": lambda it: it.manager.contents.cached(0, it.wanted),
    "copier.from_others": lambda it: ImportCopier(it.pending, lambda: None).from_others(),
}
# Functions over parameters, and the last call, which works even if the state is wrong.
NEITHER = {"estimated_memory_size", "infer_optimal_batch_size", "max_supported_sequence_length", "close"}


@pytest.fixture
def rig(store: StoredObjects) -> Iterator[Rig]:
    made = Rig(store)
    yield made
    made.manager.close()


def test_the_tables_name_every_public_call() -> None:
    every = {
        prefix + name
        for prefix, kind in (("", PagedKVCacheManager), ("contents.", PageContents), ("copier.", ImportCopier))
        for name, value in vars(kind).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, staticmethod))
    }
    named = [*CHANGES, *SINGLE, *QUESTIONS, *NEITHER]
    assert len(named) == len({*named})
    assert {*named} == every, "say whether the call changes something, and how"


@pytest.mark.parametrize("call", CHANGES)
def test_a_call_that_changes_something_is_checked_before_and_after(rig: Rig, call: str) -> None:
    change = CHANGES[call](rig)
    before, rig.checks = state(rig.manager), 0
    kept = change()
    assert rig.checks >= 2, f"{call} was not checked"
    assert state(rig.manager) != before, "this call was to change something"
    rig.manager.check()
    del kept


@pytest.mark.parametrize("call", CHANGES)
def test_a_state_that_a_call_leaves_wrong_is_noticed_at_its_end(rig: Rig, call: str) -> None:
    change, pool = CHANGES[call](rig), rig.manager._replicas.each[0].pool
    mark: Any = rig.manager._mark
    check, checks = mark.recount, list[None]()

    def spoiled() -> None:
        checks.append(None)
        check()
        if len(checks) == 1:  # the call changes the state from here on, and makes one mistake
            pool.holders[pool.num_pages] += 1

    mark.recount = spoiled
    with pytest.raises(InvariantError):
        change()
    pool.holders[pool.num_pages] -= 1


@pytest.mark.parametrize("call", QUESTIONS)
def test_a_question_changes_nothing(rig: Rig, call: str) -> None:
    rig.manager.end_step(rig.step)
    QUESTIONS[call](rig)
    before = state(rig.manager)
    QUESTIONS[call](rig)
    assert state(rig.manager) == before


class SameAgain(LruOrder):
    """An order with a fault: it returns the same page twice."""

    def pop(self, count: int) -> NDArray[np.int32]:
        return np.repeat(super().pop(count)[:1], count)


@pytest.mark.parametrize("checks", [True, False])
def test_the_fault_of_an_eviction_order_is_named_with_and_without_checks(checks: bool) -> None:
    manager = manager_of(8, page_size=SIZE, checks=checks, params={"eviction_order": SameAgain})
    context = TextContext(range(30), 64, "r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    context.update(1)
    manager.step([context])
    manager.release("r")
    other = TextContext(range(100, 130), 64, "other")
    manager.external_claim("other")
    with pytest.raises(InvariantError, match="SameAgain"):
        manager.maybe_reserve(other)
    with pytest.raises(InterruptedCallError, match="maybe_reserve was interrupted"):
        manager.check()
    assert manager.recover().call == "maybe_reserve"
    manager.check()


def test_a_manager_whose_state_is_wrong_can_be_closed() -> None:
    manager = manager_of(8)
    manager.external_claim("r")
    manager._replicas.each[0].pool.holders[3] += 1
    with pytest.raises(InvariantError):
        manager.release("r")
    with pytest.raises(InvariantError):
        manager.external_claim("s")
    manager.close()
