"""`recover` releases a request only if its claim or change was interrupted before the call could return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache import PagedKVCacheManager, TextContext
from kvcache.claims import Claims
from kvcache.errors import InterruptedCallError, NotReservedError
from kvcache.replica import imports
from kvcache.replica.copier import ImportBook
from kvcache.replica.leases import PageLeases
from kvcache.replica.replica import Replica
from kvcache.replicas import Replicas
from kvcache.steps_in_flight import StepsInFlight
from tests.kvcache.build import manager_of, proven
from tests.kvcache.random_model.interrupts import interrupted


class Ctrl(BaseException):
    """An exception that a signal handler raises in the middle of a call."""


def computed(manager: PagedKVCacheManager, name: str, first: int = 0) -> TextContext:
    context = TextContext([*range(first, first + 10)], 64, name)
    manager.external_claim(name, 0)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    return context


def after(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    """Makes later calls of this method raise an interrupt after the method has done its work."""
    real = getattr(owner, method)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        raise Ctrl

    monkeypatch.setattr(owner, method, interrupted)


class Two:
    """A manager with two requests that have run, and a third request that waits for an import."""

    def __init__(self) -> None:
        self.manager = manager_of(40, page_size=4)
        self.contexts = [computed(self.manager, name, first) for name, first in (("a", 0), ("b", 100))]
        source = manager_of(40, page_size=4)
        computed(source, "r", 200)
        self.table = source.block_table("r")
        self.reader = TextContext([*range(200, 211)], 64, "r")
        self.manager.external_claim("r", 0)
        pending = self.manager.import_block_table(self.reader, self.table)
        assert pending is not None
        self.pending = pending


def import_another(it: Two) -> None:
    it.manager.external_claim("s", 0)
    it.manager.import_block_table(TextContext([*range(200, 211)], 64, "s"), it.table)


CALLS: dict[str, tuple[type, str, Callable[[Two], object], list[str]]] = {
    "external_claim": (Claims, "claim", lambda it: it.manager.external_claim("new", 0), ["new"]),
    "fork": (Claims, "bind", lambda it: it.manager.fork(it.contexts[0], it.contexts[0].fork("child")), ["child"]),
    "fork, before it has a page": (
        Claims,
        "claim",
        lambda it: it.manager.fork(it.contexts[0], it.contexts[0].fork("child")),
        ["child"],
    ),
    "fork, with its pages": (
        Replicas,
        "fork",
        lambda it: it.manager.fork(it.contexts[0], it.contexts[0].fork("child")),
        ["child"],
    ),
    "release": (Claims, "release", lambda it: it.manager.release("a"), ["a"]),
    "import_block_table": (ImportBook, "begin", import_another, ["s"]),
    "copier": (ImportBook, "make_copier", lambda it: it.manager.copier(it.pending), []),
    "commit_import": (
        ImportBook,
        "commit",
        lambda it: it.manager.commit_import(it.reader, it.pending, proven(it.manager, it.pending)),
        ["r"],
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_recover_releases_requests_that_no_caller_was_told_of_and_all_others_continue(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Two()
    manager = it.manager
    pages = {name: list(manager.get_req_blocks(name)) for name in "ab"}
    owner, method, interrupted, released = CALLS[call]
    with monkeypatch.context() as patched:
        after(patched, owner, method)
        with pytest.raises(Ctrl):
            interrupted(it)
    found = manager.recover()
    assert found.call == call.partition(",")[0]
    assert [*found.released] == released
    left = {"a", "b", "r"} - {*released}
    assert {*found.claimed} == left
    assert found.imports == ((it.pending,) if "r" in left else ())
    assert found.copiers == ()
    manager.check()
    if "r" in left:
        with pytest.raises(NotReservedError, match="'r': maybe_reserve while its import is pending"):
            manager.maybe_reserve(it.reader)
        with pytest.raises(NotReservedError, match="'r': fetch while its import is pending"):
            manager.fetch([it.reader])
    for name in released:
        assert not manager.contains(name)
        manager.external_claim(name, 0)  # The id is free again.
        manager.release(name)
    for context in it.contexts:
        if context.request_id in left:
            assert list(manager.get_req_blocks(context.request_id)) == pages[context.request_id]
            assert manager.maybe_reserve(context)
            manager.fetch([context])
            context.update(2)
            manager.step([context])
    if "r" in left:
        manager.commit_import(it.reader, it.pending, proven(manager, it.pending))
    for name in left:
        manager.release(name)
    assert manager.num_free_blocks == 40
    manager.close()


class Held:
    """A manager with two requests. One is leased and has a step in flight. The other imports page by page."""

    def __init__(self) -> None:
        self.manager = manager_of(40, page_size=4, host_slots=40)
        context = computed(self.manager, "a")
        assert self.manager.maybe_reserve(context)
        self.lease, self.step = self.manager.lease("a"), self.manager.fetch_ahead([context])
        source = manager_of(40, page_size=4)
        computed(source, "r", 200)
        self.table = source.block_table("r", full_pages=True)
        self.reader = TextContext([*range(200, 211)], 64, "r")
        self.manager.external_claim("r", 0)
        pending = self.manager.import_block_table(self.reader, self.table, partial=True)
        assert pending is not None
        self.pending = pending


NAMED: dict[str, tuple[Any, str, Callable[[Held], object]]] = {
    "lease": (Replica, "grant", lambda it: it.manager.lease("a")),
    "end_lease": (PageLeases, "end", lambda it: it.manager.end_lease(it.lease)),
    "end_step": (StepsInFlight, "end", lambda it: it.manager.end_step(it.step)),
    "extend_import": (
        imports,
        "extend_import",
        lambda it: it.manager.extend_import(it.reader, it.pending, it.table, last=False),
    ),
    "cancel_import": (ImportBook, "cancel", lambda it: it.manager.cancel_import(it.pending)),
    "reset_prefix_cache": (Replicas, "forget", lambda it: it.manager.reset_prefix_cache()),
    "flush_tiers": (Replicas, "flush", lambda it: it.manager.flush_tiers()),
    "close": (Replicas, "close", lambda it: it.manager.close()),
}


@pytest.mark.parametrize("call", NAMED)
def test_an_interrupted_call_keeps_all_others_out_until_the_repair_which_names_it(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Held()
    owner, method, interrupted = NAMED[call]
    with monkeypatch.context() as patched:
        after(patched, owner, method)
        with pytest.raises(Ctrl):
            interrupted(it)
    with pytest.raises(InterruptedCallError, match=f"^contains: {call} was interrupted"):
        it.manager.contains("a")
    found = it.manager.recover()
    assert found.call == call
    assert "a" in found.claimed
    assert (found.leases, found.steps) == ((it.lease,) * (call != "end_lease"), (it.step,) * (call != "end_step"))
    it.manager.check()
    it.manager.close()


class Own:
    """A caller's own context, which raises errors after the test has set a flag."""

    def __init__(self, own: TextContext) -> None:
        self.request_id, self.is_broken, self._own = own.request_id, False, own

    def __getattr__(self, name: str) -> Any:
        if self.is_broken:
            raise OSError("gone")
        return getattr(self._own, name)


def test_recover_releases_a_request_with_an_interrupted_reservation_if_its_context_is_broken() -> None:
    manager = manager_of(40, page_size=4)
    contexts: list[Any] = [Own(TextContext(range(100 * at, 100 * at + 10), 64, f"own {at}")) for at in range(2)]
    for context in contexts:
        manager.external_claim(context.request_id, 0)
        assert manager.maybe_reserve(context)
    for name in ("waits", "waits too"):
        manager.external_claim(name, 0)
    contexts[1].is_broken = True
    for name, released in (("own 0", ()), ("own 1", ("own 1",)), ("waits", ("waits",))):
        manager._mark.call = ("maybe_reserve", name)  # it was interrupted
        assert manager.recover().released == released
    assert manager.contains("own 0")
    assert manager.contains("waits too")
    for name in ("own 0", "waits too"):
        manager.release(name)
    manager.close()


def test_recover_keeps_a_request_that_has_found_cached_pages_and_has_not_run() -> None:
    it = Two()
    manager = it.manager
    context = TextContext([*range(8), 50, 51], 64, "hit")
    manager.external_claim("hit", 0)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 8
    pages = manager.get_req_blocks("hit")
    manager._mark.call = ("maybe_reserve", "hit")  # it was interrupted
    assert manager.recover().released == ()
    assert manager.get_req_blocks("hit") == pages
    manager.fetch([context])
    manager.close()


def test_a_copier_that_gives_up_meanwhile_does_not_hide_which_call_was_interrupted() -> None:
    it = Two()
    copier = it.manager.copier(it.pending)
    it.manager.cancel_import(it.pending)
    it.manager._mark.call = ("fork", "child")  # it was interrupted
    copier.give_up()
    assert it.manager.recover().call == "fork"
    assert it.manager.recover().imports == ()
    it.manager.close()


def test_a_recovery_of_a_right_state_changes_nothing_and_reports_what_is_held() -> None:
    it = Two()
    lease = it.manager.lease("a")
    for _ in range(2):
        found = it.manager.recover()
        assert (found.call, found.released) == (None, ())
        assert {*found.claimed} == {"a", "b", "r"}
        assert (found.leases, found.imports, found.copiers) == ((lease,), (it.pending,), ())
    other = Two()
    proven(other.manager, other.pending)
    found = other.manager.recover()
    assert (found.imports, found.copiers) == ((other.pending,), ()), "the copier of this import has ended"
    other.manager.close()
    copier = it.manager.copier(it.pending)
    assert it.manager.recover().copiers == (copier,)
    it.manager.cancel_import(it.pending)
    assert it.manager.recover().copiers == (copier,)
    copier.give_up()
    assert it.manager.recover().imports == ()
    it.manager.close()


def test_a_recovery_that_is_interrupted_anywhere_and_made_again_loses_no_request_and_no_page_that_readers_know() -> (
    None
):
    it = Two()
    manager = it.manager
    lease, table = manager.lease("b"), manager.block_table("b")
    before = {name: manager.get_req_blocks(name) for name in ("a", "b", "r")}
    done, at = True, 0
    while done:
        at += 3
        manager._mark.call = ("prefetch", None)  # it was interrupted
        _, _, done = interrupted(manager.recover, at, KeyboardInterrupt)
        report = manager.recover()
        assert (report.claimed, report.leases) == (("a", "b", "r"), (lease,)), f"interrupted at {at}"
        assert {name: manager.get_req_blocks(name) for name in before} == before, f"interrupted at {at}"
        manager.check()
    assert at > 1000
    for name in before:
        manager.release(name)
    held = [page for one in manager._replicas.each[0].leases._held[lease] for page in one.pages.tolist()]
    assert held == [*table.groups[0]]
