"""A caller's own `ObjectIO` or `PageIO` that fails in any way never makes a call of the manager fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import InvalidParamsError
from kvcache.tiers.page_files import SystemIO
from tests.kvcache.served import Served, until
from tests.kvcache.tiers.stored_objects import COUNT, StoredObjects, forget_host, objects_of, settled

PROMPT = [*range(1, 34)]
CALLS = ("exist", "write", "read")


class ClientError(Exception):
    """An error of a store's client, which is no `OSError`."""


def raises(*_: Any) -> Any:
    raise ClientError("403 Forbidden")


# For each fault, what a call returns in place of its answer.
ANSWERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "no answers": lambda _: [],
    "one answer less": lambda answers: answers[:-1],
    "one answer more": lambda answers: [*answers, True],
    "a number": lambda _: 1,
    "answers without a truth value": lambda answers: [np.zeros(2)] * len(answers),
}


class Faulty(StoredObjects):
    """A store with a client whose calls `broken` do what `fault` says."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: tuple[str, ...] = ()
        self.fault = "raises"

    def __call__(self, size: int, timeout_s: float) -> Any:
        return _Client(self, super().__call__(size, timeout_s))


class _Client:
    def __init__(self, store: Faulty, inner: Any) -> None:
        self._store, self._inner, self.memory = store, inner, inner.memory

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)
        if name not in self._store.broken:
            return call
        if self._store.fault == "raises":
            return raises
        return lambda *told: ANSWERS[self._store.fault](call(*told))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", ["raises", *ANSWERS])
def test_a_store_that_fails_in_any_way_counts_as_one_that_fails(call: str, fault: str) -> None:
    store = Faulty()
    it = store.machine(Served, 12, 40, checks=False)
    store.broken, store.fault = (call,), fault
    tier = objects_of(it)
    settled(it)
    tier._paused_until = 0.0
    it.serve(PROMPT)
    it.manager.flush_tiers()
    may_be_fine = call == "write" and fault != "raises"  # a write answers nothing
    if call == "read":  # the pages are in the store, and cannot be read
        assert store.pages
        it.manager._replicas.each[0].forget()
        forget_host(it)
        while it.manager.prefetch(it.waiting(PROMPT)):
            it.manager.check()

    def has_failed() -> bool:
        it.manager.fetch([])
        return it.manager.metrics.object_store_failures > 0

    until(lambda: may_be_fine or has_failed())
    it.manager.check()
    store.broken, tier._paused_until = (), 0.0
    it.serve(PROMPT)
    it.serve([*PROMPT, 5])
    it.manager.check()
    store.close()


def test_a_client_that_cannot_be_closed_does_not_keep_the_manager_open() -> None:
    store = Faulty()
    it = store.machine(Served, 12, 40, checks=False)
    it.serve(PROMPT)
    store.broken = ("close",)
    it.manager.close()
    it.manager.close()
    with pytest.raises(RuntimeError, match="closed"):
        it.claim(PROMPT)


@pytest.mark.parametrize("made", [None, 5, StoredObjects()])
def test_an_object_that_is_no_io_is_refused(made: Any, tmp_path: Path) -> None:
    params = {"file_tier_key": "model", "object_tier_io": lambda *_: made, "object_tier_pages": COUNT}
    with pytest.raises(InvalidParamsError, match=r"object_tier_io\(.*\) returned .*: an ObjectIO with a memory"):
        Served(12, 40, params=params)
    params = {"file_tier_key": "model", "file_tier_dir": str(tmp_path), "file_tier_max_gb": 1}
    with pytest.raises(InvalidParamsError, match=r"file_tier_io returned .*: a PageIO is needed"):
        Served(12, 40, params={**params, "file_tier_io": lambda _: made})


def test_a_store_with_too_little_memory_is_refused() -> None:
    store = StoredObjects()
    params = {"file_tier_key": "model", "object_tier_io": lambda size, wait: store(size - 1, wait)}
    with pytest.raises(InvalidParamsError, match="an ObjectIO with a memory of that many bytes is needed"):
        Served(12, 40, params=params)


class _Disk(SystemIO):
    """A `PageIO` with a fault: it raises an error that is no `OSError`, or moves no bytes."""

    def __init__(self, faults: dict[str, str]) -> None:
        self._faults = faults

    def write(self, file: int, parts: Sequence[Any], offset: int) -> None:
        self._move("write", super().write, file, parts, offset)

    def read(self, file: int, parts: Sequence[Any], offset: int) -> None:
        self._move("read", super().read, file, parts, offset)

    def _move(self, name: str, move: Callable[..., None], *told: Any) -> None:
        fault = self._faults.get(name)
        if fault == "raises":
            raise ClientError("device lost")
        if fault is None:
            move(*told)


@pytest.mark.parametrize("fault", ["raises", "moves nothing"])
@pytest.mark.parametrize("call", ["write", "read"])
def test_files_that_cannot_be_moved_are_misses(tmp_path: Path, call: str, fault: str) -> None:
    faults: dict[str, str] = {}
    params = {"file_tier_key": "model", "file_tier_dir": str(tmp_path), "file_tier_max_gb": 1}
    it = Served(12, 40, params={**params, "file_tier_io": lambda _: _Disk(faults)}, checks=False)
    faults[call] = fault
    it.serve(PROMPT)
    it.manager.flush_tiers()
    it.manager._replicas.each[0].forget()
    forget_host(it)
    it.serve(PROMPT)
    it.manager.check()
    faults.clear()
    it.serve([*PROMPT, 5])
    it.manager.flush_tiers()
    it.manager.check()
    assert not [*tmp_path.rglob("*.tmp")]
    it.manager.close()
