"""`ManagerWatch` sends correct snapshots of a real manager over its socket, in a thousand states of the manager."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcache import InvalidParamsError, PagedKVCacheManager, Retention, TextContext
from kvcache.endpoints import watch as endpoint
from kvcache.endpoints.follower import Followed, WatchClient
from kvcache.endpoints.watch import ManagerWatch
from kvcache.errors import InvariantError, WatchError
from kvcache.watch import book
from kvcache.watch.messages import (
    AskLook,
    Beside,
    LeaseRow,
    Look,
    PageState,
    PullRow,
    ages_of,
    request_digest,
    states_of,
)
from kvcache.watch.names import tenant_name
from tests.kvcache.build import manager_of
from tests.kvcache.random_model.run import Model
from tests.kvcache.watch.recount import assert_same


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the endpoint prepare a new snapshot for every question, because the tests ask more often than a real
    watcher.
    """
    monkeypatch.setattr(endpoint, "_LEAST_S", 0.0)
    monkeypatch.setattr(endpoint, "_SHARE", 1e6)
    monkeypatch.setattr(book, "_TREE_SHARE", 1e6)
    monkeypatch.setattr(endpoint, "_LOOP_SHARE", 1e6)


class Watcher:
    """A manager's watch and a client that follows it."""

    def __init__(self, manager: PagedKVCacheManager, **options: object) -> None:
        self.watch = ManagerWatch(manager, **{"clear_names": True, **options})  # pyright: ignore[reportArgumentType]
        self.client = WatchClient(self.watch.address)
        self.followed = Followed()

    def look(self, *, check: bool = False) -> Look:
        ask = self.followed.ask
        self.client.ask(msgspec.structs.replace(ask, check=check))
        frames = self.client.answer(20.0)
        assert frames is not None
        return self.followed.apply(frames)

    def look_in_time(self) -> Look:
        """Asks for a snapshot until the endpoint accepts the client, and returns the snapshot."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return self.look()
            except WatchError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def close(self) -> None:
        self.client.close()
        self.watch.close()


def served(manager: PagedKVCacheManager, name: str, tokens: list[int], **options: object) -> TextContext:
    """Returns a claimed request that has computed its whole prompt."""
    context = TextContext(tokens, 256, name, **options)  # pyright: ignore[reportArgumentType]
    manager.external_claim(name)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    return context


@pytest.mark.parametrize("part", range(4))
def test_the_watch_agrees_with_a_recount_in_a_thousand_random_states(part: int) -> None:
    states = looks = 0
    seen: Counter[PageState] = Counter()
    wanted = (PageState.FREE, PageState.IDLE, PageState.HELD, PageState.LEASED)
    for seed in range(16):
        if states >= 250 and all(seen[state] >= 3 for state in wanted):
            break
        moves = Model.of(1000 * part + seed, ("leases", "forks", "preemption", "batches", "resets"))
        watcher = Watcher(moves.manager)
        for _ in range(64):
            moves.move()
            look = watcher.look()
            seen += assert_same(watcher.followed, moves.manager)
            states += 1
            looks += bool(look.base)
        moves.finish()
        watcher.look()
        assert_same(watcher.followed, moves.manager)
        watcher.close()
    assert states >= 250
    assert looks >= states - seed, "all but the first were differences"
    assert all(seen[state] >= 3 for state in wanted), seen


def test_imports_are_written_and_quarantined_and_their_requests_named() -> None:
    source, manager = manager_of(), manager_of()
    served(source, "a", list(range(40)))
    table = source.block_table("a")
    watcher = Watcher(manager)
    context = TextContext([*range(40), 1], 256, "b")
    manager.external_claim("b")
    pending = manager.import_block_table(context, table)
    assert pending is not None
    copier = manager.copier(pending)
    look = watcher.look()
    assert "importing" in look.owners.phases
    assert assert_same(watcher.followed, manager)[PageState.WRITTEN] == 10
    manager.release("b")
    manager.cancel_import(pending)
    look = watcher.look()
    assert assert_same(watcher.followed, manager)[PageState.QUARANTINED] == 10
    assert dict(zip(look.owners.request_ids, look.owners.phases, strict=True)) == {"b": "quarantined"}
    copier.give_up()
    watcher.look()
    assert assert_same(watcher.followed, manager)[PageState.FREE] == 64
    watcher.close()


def test_nothing_is_recorded_before_the_first_look_and_after_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "_FORGET_S", 0.05)
    manager = manager_of()
    pool = manager._replicas.each[0].pool
    watcher = Watcher(manager)
    assert not pool.journal.readers
    watcher.look()
    assert pool.journal.readers
    deadline = time.monotonic() + 20
    while pool.journal.readers and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not pool.journal.readers
    first = watcher.followed.look
    served(manager, "a", [1, 2, 3, 4, 5])
    again = watcher.look()
    assert first is not None
    assert again.base == 0, "a client that returns gets a whole snapshot"
    assert again.incarnation != first.incarnation
    assert_same(watcher.followed, manager)
    watcher.close()


def test_evictions_have_reasons_and_it_is_seen_when_an_evicted_page_is_requested_again() -> None:
    manager = manager_of(16, rows=2, params={"tenant_quota": 0.3})
    watcher = Watcher(manager)
    watcher.look()
    served(manager, "a", list(range(33)))
    manager.release("a")  # 8 idle pages
    served(manager, "b", list(range(100, 157)))  # Request "b" takes 15 pages and evicts 7 pages of other requests.
    manager.release("b")
    look = watcher.look()
    assert look.evicted == {"LRU": (7, 0)}
    served(manager, "c", list(range(33)))  # Request "c" computes all pages of "a" again, except the first page.
    manager.release("c")
    look = watcher.look()
    assert sum(again for _, again in look.evicted.values()) == 7
    assert sum(row.again for row in look.evictions) == 7
    assert {row.reason for row in look.evictions} == {"LRU"}
    served(manager, "d", list(range(200, 230)), cache_salt="t")
    manager.release("d")  # The tenant "t" leaves 7 idle pages. Its quota is 4 pages.
    served(manager, "e", list(range(300, 357)))
    manager.release("e")
    look = watcher.look()
    assert look.evicted["quota"][0] == 3
    idle = manager._replicas.each[0].pool.idle.count
    manager.reset_prefix_cache()
    look = watcher.look()
    assert look.evicted["reset"][0] == idle > 0
    assert sum(pages for reason, (pages, _) in look.evicted.items() if reason != "reset") == manager.metrics.evictions
    watcher.close()


def test_a_page_that_a_hint_puts_first_is_counted_as_evicted_by_a_hint() -> None:
    manager = manager_of(32, rows=2)
    watcher = Watcher(manager)
    watcher.look()
    for number in range(8):
        ends = Retention(session_continues=number % 2 == 0)
        served(manager, f"r{number}", list(range(100 * number, 100 * number + 29)), retention=ends)
        manager.release(f"r{number}")
        watcher.look()
    assert watcher.look().evicted["hint"][0] > 0
    watcher.close()


def test_the_tree_has_shared_prefixes_with_their_sizes_and_hits() -> None:
    manager = manager_of(64)
    served(manager, "before", [*range(16), 7])
    watcher = Watcher(manager)
    assert [(row.pages, row.below, row.hits) for row in watcher.look().tree] == [(4, 4, 0)], (
        "the pages in the rows are known from the beginning"
    )
    for number in range(3):
        served(manager, f"r{number}", [*range(16), *[50 + number] * 9])
    tree = watcher.look().tree
    root = tree[0]
    assert (root.pages, root.below, root.hits, root.parent) == (4, 10, 3, 0)
    assert [(row.pages, row.parent, row.hits) for row in tree[1:]] == [(2, root.page, 0)] * 3
    for number in range(3):
        manager.release(f"r{number}")
    manager.release("before")
    manager.reset_prefix_cache()
    watcher.close()
    again = Watcher(manager)
    assert again.look().tree == ()
    again.close()


def test_pages_of_older_weights_are_counted() -> None:
    manager = manager_of(64)
    served(manager, "r", list(range(33)))
    watcher = Watcher(manager)
    assert watcher.look().pools[0].older == 0
    manager.set_weights("b")
    assert watcher.look().pools[0].older == 8
    manager.set_weights(None)
    assert watcher.look().pools[0].older == 0
    watcher.close()


def test_old_and_young_pages_are_distinguished() -> None:
    manager = manager_of(64)
    for number in range(4):
        served(manager, f"r{number}", list(range(100 * number, 100 * number + 33)))
    order = [manager.get_req_blocks(f"r{number}")[:8] for number in range(4)]
    for number in range(4):
        manager.release(f"r{number}")
    watcher = Watcher(manager)
    watcher.look()
    ages = ages_of(watcher.followed.cells["0"])
    means = [ages[pages].mean() for pages in order]
    assert means == sorted(means)
    assert ages[order[0]].max() < ages[order[3]].min()
    watcher.close()


def test_the_serving_loop_makes_the_recount_and_it_names_what_is_wrong() -> None:
    manager = manager_of(checks=False)
    served(manager, "a", list(range(33)))
    watcher = Watcher(manager)
    assert watcher.look(check=True).check is None, "the serving loop has not made the recount yet"
    watcher.watch.attend()
    report = watcher.look().check
    assert report is not None
    assert report.error == ""
    assert report.counts["0"] == watcher.followed.look.pools[0].counts  # pyright: ignore[reportOptionalMemberAccess]
    manager._replicas.each[0].pool.holders[5] += 1
    watcher.look(check=True)
    deadline = time.monotonic() + 20
    while report.error == "" and time.monotonic() < deadline:
        watcher.watch.attend()
        report = watcher.look().check
        assert report is not None
    assert "page 5" in report.error
    manager._replicas.each[0].pool.holders[5] -= 1
    watcher.close()


def test_the_host_tier_is_a_pool_of_its_own() -> None:
    manager = manager_of(16, host_slots=8)
    served(manager, "a", list(range(33)))
    manager.release("a")
    manager.flush_tiers()
    watcher = Watcher(manager)
    look = watcher.look()
    assert [pool.name for pool in look.pools] == ["0", "host"]
    host = manager._replicas.tiers.host.pool  # pyright: ignore[reportOptionalMemberAccess]
    assert (states_of(watcher.followed.cells["host"]) == PageState.IDLE).tolist() == host.index.published.tolist()
    watcher.close()


def test_a_forgotten_manager_ends_its_watch_and_a_bad_question_gets_no_answer() -> None:
    manager = manager_of()
    watcher = Watcher(manager)
    watcher.client._socket.send(b"\xc1 nothing")
    assert watcher.client.answer(0.3) is None
    assert watcher.look().number == 1
    thread = watcher.watch._thread
    watcher.client.close()
    del manager, watcher
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_impossible_endpoints_are_refused() -> None:
    manager = manager_of()
    with pytest.raises(InvalidParamsError, match="can be reached from other hosts"):
        ManagerWatch(manager, "tcp://0.0.0.0:0")
    with pytest.raises(InvalidParamsError, match="cannot bind"):
        ManagerWatch(manager, "ipc:///nowhere/at/all")
    with pytest.raises(WatchError, match="cannot be watched"):
        WatchClient("nowhere")


def test_a_message_that_is_not_a_look_changes_nothing() -> None:
    manager = manager_of()
    watcher = Watcher(manager)
    watcher.look()
    watcher.client.ask(AskLook())
    whole = watcher.client.answer(20.0)
    assert whole is not None
    followed = watcher.followed
    before = followed.cells["0"].copy()
    header = msgspec.msgpack.decode(whole[0], type=Look)
    difference = msgspec.msgpack.encode(msgspec.structs.replace(header, base=1, number=9))
    near, far = (np.array([page], np.uint32).tobytes() for page in (64, 65))

    def of_pool(**changes: Any) -> bytes:
        pools = (msgspec.structs.replace(header.pools[0], **changes),)
        return msgspec.msgpack.encode(msgspec.structs.replace(header, base=1, number=9, pools=pools))

    for frames, what in (
        ([], "are not a snapshot"),
        ([b"\xc1"], "are not a snapshot"),
        (whole[:2], "came in 2 frames"),
        ([whole[0], b"", b"1234"], "1 cells"),
        ([whole[0], b"", b"123"], "multiple"),
        ([difference, far, far], "1 pages and 1 cells"),
        ([of_pool(name="unheard of"), near, near], "'unheard of' of 64 pages: 1 pages and 1 cells"),
        ([of_pool(num_pages=100), near, near], "of 100 pages: 1 pages and 1 cells"),
        ([msgspec.msgpack.encode(msgspec.structs.replace(header, base=70, number=71)), b"", b""], "has not come|last"),
        (
            [msgspec.msgpack.encode(msgspec.structs.replace(header, base=1, incarnation="x")), b"", b""],
            "was not received",
        ),
    ):
        with pytest.raises(WatchError, match=what):
            followed.apply(frames)
    assert np.array_equal(before, followed.cells["0"])
    watcher.close()


def test_a_pool_that_was_replaced_is_watched_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(manager_of()) as manager, closing(manager_of()) as other, closing(Watcher(manager)) as watcher:
        first, book = watcher.look(), watcher.watch._worker._book
        assert book is not None
        deadline = time.monotonic() + 20
        while not book.cost_s and time.monotonic() < deadline:  # `cost_s` is set after the answer.
            time.sleep(0.001)
        assert 0.0 < book.beside_s < book.cost_s
        monkeypatch.setattr(book._pools[0].watched, "_pool", other._replicas.each[0].pool)
        again = watcher.look()
        assert again.base == 0
        assert again.incarnation != first.incarnation


def test_a_look_waits_as_long_as_a_loop_that_never_rests_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pause = endpoint._pause
    assert pause(0.001, 0.001, 0.0) == 0.05, "no loop runs, so the least pause applies"
    assert pause(0.010, 0.010, 0.5) == pytest.approx(0.5), "a hundredth of half of the time"
    assert pause(0.010, 0.010, 8.0) == pytest.approx(1.0), "more than one thread needs the interpreter at a time"
    assert pause(0.138, 0.010, 0.1) == pytest.approx(3 * 0.138), (
        "work that numpy does without holding the interpreter does not count"
    )
    assert pause(0.100, 0.100, 1.0) == 2.0, (
        "the pause has a limit, because a client takes a process for gone after three seconds"
    )
    monkeypatch.setattr(endpoint, "_LOOP_SHARE", 1e-6)
    monkeypatch.setattr(endpoint, "_MOST_S", 1.0)
    with closing(manager_of()) as manager, closing(Watcher(manager)) as watcher:
        watcher.look()
        until = time.process_time() + 0.2
        while time.process_time() < until:
            served(manager, "a", list(range(33)))
            manager.release("a")
        watcher.look()
        worker, deadline = watcher.watch._worker, time.monotonic() + 20
        # The endpoint moves `_due` after it has sent its answer.
        while worker._due <= worker._asked_at + 0.5 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert worker._due > worker._asked_at + 0.5, "this thread has run all the time"
        watcher.client.ask(watcher.followed.ask)
        started = time.process_time()
        watcher.watch.close()
        assert not watcher.watch._thread.is_alive(), "a look that waits does not keep the thread from ending"
        assert time.process_time() - started < 0.5


def test_a_look_that_fails_costs_its_answer_and_neither_the_watch_nor_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reports are read while other threads write them. A table of a report may therefore change while it is counted."""
    monkeypatch.setattr(endpoint, "_FAILED_S", 0.0)
    fails = [True]

    def beside() -> Beside:
        if fails:
            raise RuntimeError("dictionary changed size during iteration")
        return Beside()

    with closing(manager_of(16, rows=4, dp=1)) as manager, closing(Watcher(manager, beside=beside)) as watcher:
        watcher.client.ask(AskLook())
        assert watcher.client.answer(0.3) is None
        assert not manager._replicas.each[0].pool.journal.readers, "nothing is recorded for a look that has failed"
        fails.clear()
        assert watcher.look().pools[0].num_pages == 16
    assert "a snapshot could not be made" in caplog.text


def test_two_clients_of_one_socket_both_get_an_answer() -> None:
    manager = manager_of()
    watcher = Watcher(manager)
    other, theirs = WatchClient(watcher.watch.address), Followed()
    for number in range(4):
        served(manager, f"r{number}", list(range(100 * number, 100 * number + 10)))
        watcher.look()
        if number % 2:
            other.ask(theirs.ask)
            frames = other.answer(20.0)
            assert frames is not None
            theirs.apply(frames)
    assert np.array_equal(theirs.cells["0"], watcher.followed.cells["0"])
    other.close()
    watcher.close()


def told_of(manager: PagedKVCacheManager, **options: object) -> tuple[Look, bytes]:
    """Returns a snapshot of a manager, and its size on the wire in bytes."""
    with closing(Watcher(manager, **options)) as watcher:
        watcher.client.ask(AskLook())
        frames = watcher.client.answer(20.0)
        assert frames is not None
        return watcher.followed.apply(frames), frames[0]


def test_without_keys_neither_salts_nor_request_ids_are_sent() -> None:
    manager = manager_of()
    for name, salt in (("chat-1", "acme"), ("chat-2", "acme"), ("chat-3", "globex"), ("chat-4", None)):
        served(manager, name, [*range(9)], cache_salt=salt)
    lease = LeaseRow(request_id="chat-9", pool="0", age_s=1.0, left_s=2.0)
    pull = PullRow(key="chat-8", pool="0", source="e", stage="reading", num_bytes=1, age_s=1.0, left_s=1.0)

    def beside() -> Beside:
        return Beside(phases={"chat-1": "pulling", "chat-7": "queued"}, leases=(lease,), pulls=(pull,))

    look, told = told_of(manager, clear_names=None, beside=beside)
    assert not any(secret in told for secret in (b"chat", b"acme", b"globex"))
    rows = dict(zip(look.owners.request_ids, zip(look.owners.tenants, look.owners.phases, strict=True), strict=True))
    assert rows[request_digest("chat-1")] == (tenant_name("acme"), "pulling"), (
        "the request can still be followed by its digest"
    )
    assert rows[request_digest("chat-2")][0] == tenant_name("acme") != rows[request_digest("chat-3")][0]
    assert rows[request_digest("chat-4")][0] == ""
    assert request_digest("chat-7") in rows
    assert look.leases[0].request_id == request_digest("chat-9")
    assert look.pulls[0].key == request_digest("chat-8")
    look, told = told_of(manager, beside=beside)
    assert "chat-1" in look.owners.request_ids
    assert not any(salt in told for salt in (b"acme", b"globex")), "no client is told a salt"


def test_the_report_of_a_recount_names_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(manager_of(checks=False)) as manager:
        served(manager, "chat-1", [*range(9)])

        def check() -> None:
            raise InvariantError("request 'chat-1' has page 5 twice")

        monkeypatch.setattr(manager, "check", check)
        with closing(Watcher(manager, clear_names=None)) as watcher:
            watcher.look(check=True)
            watcher.watch.attend()
            report = watcher.look().check
            assert report is not None
            assert report.error == f"request {request_digest('chat-1')!r} has page 5 twice"


def test_salts_cannot_be_tried_out_in_another_process() -> None:
    code = "from kvcache.watch.names import tenant_name; print(tenant_name('acme'))"
    others = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert others.stdout.strip() != tenant_name("acme") == tenant_name("acme")


def test_a_question_of_another_version_is_refused_with_both_versions() -> None:
    with closing(ManagerWatch(manager_of(8))) as watch, closing(WatchClient(watch.address)) as client:
        client._socket.send(msgspec.msgpack.encode({"type": "ask_look/9"}))
        frames = client.answer(20.0)
        assert frames is not None
        with pytest.raises(WatchError, match="it speaks 'ask_look/9', and 'ask_look/1' is known here"):
            Followed().apply(frames)
        client._socket.send(b"\xc1")  # Invalid data gets no answer.
        client.ask(AskLook())
        frames = client.answer(20.0)
        assert frames is not None
        assert Followed().apply(frames).number > 0


def test_watchers_are_bounded_and_one_more_is_refused_at_once_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FORGET_S", 1.0)
    with closing(manager_of()) as manager, closing(Watcher(manager)) as watcher, ExitStack() as stack:
        crowd = [stack.enter_context(closing(WatchClient(watcher.watch.address))) for _ in range(100)]
        deadline, looks, refusals = time.monotonic() + 30, [0] * len(crowd), [0] * len(crowd)
        followed = [Followed() for _ in crowd]
        for at, client in enumerate(crowd):
            client.ask(followed[at].ask)
        while sum(map(bool, looks)) + sum(map(bool, refusals)) < 100 or max(looks) < 3:
            assert time.monotonic() < deadline
            for at, client in enumerate(crowd):
                while (frames := client.answer()) is not None:
                    try:
                        followed[at].apply(frames)
                        looks[at] += 1
                    except WatchError as error:
                        assert "the process refuses to be watched: there are 64 watchers" in str(error)  # noqa: PT017
                        refusals[at] += 1
                    client.ask(followed[at].ask)
        assert sum(map(bool, looks)) == 64
        assert sum(map(bool, refusals)) == 36
        with pytest.raises(WatchError, match="there are 64 watchers"):
            watcher.look()
        for client in crowd:
            client.close()
        assert watcher.look_in_time().base == 0


def test_one_snapshot_answers_all_waiting_clients_and_a_new_client_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(manager_of()) as manager, closing(Watcher(manager)) as watcher, ExitStack() as stack:
        worker = watcher.watch._worker
        crowd = [stack.enter_context(closing(WatchClient(watcher.watch.address))) for _ in range(20)]
        followed, order, numbers = [Followed() for _ in crowd], list[bytes](), Counter[int]()
        send, answer, held = worker._send, worker._answer, [False]

        def held_back() -> None:
            if held[0]:
                time.sleep(0.001)
            else:
                answer()

        def noted(parts: Any) -> bool:
            order.append(parts[0])
            numbers[msgspec.msgpack.decode(parts[1], type=Look).number] += 1
            return send(parts)

        monkeypatch.setattr(worker, "_send", noted)
        monkeypatch.setattr(worker, "_answer", held_back)

        def asked_by(*who: tuple[WatchClient, Followed]) -> None:
            """Makes these clients ask at the same time, so that the endpoint reads all questions before it answers."""
            held[0] = True
            for client, one in who:
                client.ask(one.ask)
            deadline = time.monotonic() + 20
            while sum(one.asked is not None for one in list(worker._watchers.values())) < len(who):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            order.clear()
            numbers.clear()
            held[0] = False
            for client, one in who:
                frames = client.answer(20.0)
                assert frames is not None
                one.apply(frames)

        everybody = list(zip(crowd, followed, strict=True))
        asked_by(*everybody)
        assert sorted(numbers.values()) == [20], "one snapshot answers all clients"
        known = set(order)
        monkeypatch.setattr(endpoint, "_TURN_S", 0.0)  # Each turn now sends one answer.
        asked_by(*everybody)
        assert len(numbers) == 20
        first = list(order)
        with closing(WatchClient(watcher.watch.address)) as late:
            asked_by(*everybody, (late, Followed()))
        assert order[0] not in known, "a client without a snapshot comes first"
        assert order[1:] == first, "then the client that has waited longest"
