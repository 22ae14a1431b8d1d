"""A subscriber knows exactly the contents of the manager's indexes, whatever happens to the subscriber or the
manager.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvcache import KVEvents, LayerGroup, PagedKVCacheManager, TextContext
from kvcache.events.log import Described
from kvcache.replica.hashing import PrefixHasher
from tests.kvcache.build import manager_of, proven, run_once
from tests.kvcache.events.mirror import Mirror, parked, settled, worker_of
from tests.kvcache.random_model.run import Model

ANY = "tcp://127.0.0.1:0"
PAGE = 4


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the time until a follower learns that it has lost the last message."""
    monkeypatch.setattr("kvcache.endpoints.publisher._QUIET_S", 0.02)


def events(**options: object) -> KVEvents:
    return KVEvents(ANY, ANY, **options)  # type: ignore[arg-type]


def refuse_what_is_not_hashed_yet(manager: PagedKVCacheManager) -> None:
    log = manager._replicas._log
    assert log is not None

    def described(entry: Described) -> None:
        for hasher, last in zip(entry[0], entry[2], strict=True):
            assert len(hasher.known) >= last * hasher.width, "the log must be free for the other thread"
        log.entries.append(entry)  # pyright: ignore[reportAttributeAccessIssue]

    log.describe = described


@pytest.mark.parametrize(
    ("seed", "features"),
    [
        *((seed, ("host", "replicas") if seed % 2 else ("leases",)) for seed in range(6)),
        *((seed, ("window", "host") if seed % 2 else ("window", "chunk")) for seed in range(9)),
    ],
)
def test_a_mirror_equals_the_index_at_every_quiet_point_of_random_moves(seed: int, features: tuple[str, ...]) -> None:
    """Messages are lost, subscribers join late, and only few sent messages are kept for replays. Nevertheless, the
    mirror equals the manager's indexes whenever the stream is quiet.
    """
    losses = random.Random(seed)
    told = {"kv_events": events(buffer_steps=losses.choice([2, 10_000]))}
    moves = Model.of(seed, ("forks", "preemption", "batches", "resets", *features), told)
    if not moves.caching:
        assert moves.manager.kv_event_endpoints == []
        return
    mirrors: list[tuple[int, Mirror]] = []
    refuse_what_is_not_hashed_yet(moves.manager)

    def join() -> None:
        for rank, endpoints in enumerate(moves.manager.kv_event_endpoints):
            mirrors.append((rank, Mirror(endpoints, lambda _: losses.random() < 0.3)))

    join()
    for number in range(6):
        for _ in range(25):
            moves.move()
        if number == 3:
            join()
        for rank, mirror in mirrors:
            mirror.settle(moves.manager, rank)
            mirror.check_same(moves.manager, rank)
    moves.finish()
    moves.manager.close()
    for _, mirror in mirrors:
        mirror.close()


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_tokens_of_a_block_hash_to_it(algorithm: str) -> None:
    manager = manager_of(64, params={"kv_events": events(), "hash_algorithm": algorithm})
    with Mirror(manager.kv_event_endpoints[0]) as mirror:
        rng = np.random.default_rng(1)
        prompts = [rng.integers(0, 99, 30).tolist() for _ in range(3)]
        for prompt in [*prompts, prompts[0][:17] + [5] * 9]:
            run_once(manager, prompt)
        mirror.settle(manager, 0)
        known = mirror.there["GPU"]
        for block, found in known.items():
            tokens, before = found
            while before is not None:
                tokens, before = known[before][0] + tokens, known[before][1]
            hasher = PrefixHasher(algorithm, PAGE, None, ())  # type: ignore[arg-type]
            digest = hasher.digests(np.array(tokens, np.int32), len(tokens) // PAGE - 1, len(tokens) // PAGE)
            assert int.from_bytes(digest.tobytes()[-8:], "big") == block
    manager.close()


def test_each_block_table_is_a_group_with_its_kind_and_equal_hashes() -> None:
    groups = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6), LayerGroup("chunked", (2,), 8)
    manager = manager_of(40, layers=3, params={"kv_events": events(), "groups": groups})
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        mirror.forget_the_begin(manager, 0)
        tokens = [*range(30)]
        run_once(manager, tokens)
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        told = [event for event in mirror.events if event["type"] == "BlockStored"]
        kinds = {
            event["group_idx"]: (event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window"))
            for event in told
        }
        assert kinds == {0: ("full_attention", None), 1: ("chunked_local_attention", None), 2: ("sliding_window", 6)}
        assert len({tuple(event["block_hashes"]) for event in told}) == 1
        assert {tuple(event["token_ids"]) for event in told} == {tuple(range(28))}
        run_once(manager, [*range(100, 148)])  # This prompt first evicts pages of windows.
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        gone = {event["group_idx"] for event in mirror.events if event["type"] == "BlockRemoved"}
        assert gone - {0}
    manager.close()


def test_a_run_of_new_pages_is_one_event_and_the_removals_of_a_call_are_another() -> None:
    manager = manager_of(16, params={"kv_events": events()})
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        mirror.forget_the_begin(manager, 0)
        run_once(manager, [*range(1, 41)])
        run_once(manager, [*range(101, 149)])
        mirror.settle(manager, 0)
    stored = [event for event in mirror.events if event["type"] == "BlockStored"]
    removed = [event for event in mirror.events if event["type"] == "BlockRemoved"]
    assert [len(event["block_hashes"]) for event in stored] == [10, 12]
    assert [len(event["block_hashes"]) for event in removed] == [6]
    manager.close()


def test_tiers_report_which_pages_come_and_go(tmp_path: Path) -> None:
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-4, "file_tier_key": "m"}
    manager = manager_of(8, params={"kv_events": events(), **files}, host_slots=16, dp=2)
    with Mirror(manager.kv_event_endpoints[0]) as one, Mirror(manager.kv_event_endpoints[1]) as other:
        for start in range(8):
            run_once(manager, [*range(start * 100 + 1, start * 100 + 25)], start % 2)
            manager.flush_tiers()
            for rank, mirror in enumerate((one, other)):
                mirror.settle(manager, rank)
                mirror.check_same(manager, rank)
        assert one.there["CPU"] == other.there["CPU"]
        run_once(manager, [*range(1, 25)], 1)  # Replica 1 loads the pages from files or from the host.
        for rank, mirror in enumerate((one, other)):
            mirror.settle(manager, rank)
            mirror.check_same(manager, rank)
        count = len(one.there["STORAGE"])
        assert count > 16
    manager.close()
    # A restarted process knows only the digests of the pages in files. It learns the tokens of a page when a prompt
    # contains them.
    manager = manager_of(8, params={"kv_events": events(), **files}, host_slots=16)
    with Mirror(manager.kv_event_endpoints[0]) as mirror:
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        assert [tokens for tokens, _ in mirror.there["STORAGE"].values()] == [()] * count
        run_once(manager, [*range(701, 725)])
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        found = {tokens for tokens, _ in mirror.there["STORAGE"].values()}
        assert {(701, 702, 703, 704), (717, 718, 719, 720)} <= found
        manager.reset_prefix_cache()
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        assert not any(mirror.there.values())
    manager.close()


def test_imported_pages_are_reported_when_they_are_committed() -> None:
    source = manager_of(16)
    manager = manager_of(16, params={"kv_events": events()})
    prompt = [*range(1, 30)]
    context, twin = TextContext(prompt, 64), TextContext(prompt, 64)
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror, source.claim(context), manager.claim(twin):
        assert source.maybe_reserve(context)
        source.fetch([context])
        context.update(1)
        source.step([context])
        pending = manager.import_block_table(twin, source.block_table(context.request_id, full_pages=True))
        assert pending is not None
        mirror.settle(manager, 0)
        assert not mirror.there.get("GPU")
        manager.commit_import(twin, pending, proven(manager, pending))
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        assert len(mirror.there["GPU"]) == 7
    manager.close()


@pytest.mark.parametrize("waits", [True, False])
def test_the_commit_of_an_import_ends_a_call_in_the_log(*, waits: bool) -> None:
    """Otherwise its pages are reported only with the next call's."""
    source, manager = manager_of(32), manager_of(32, params={"kv_events": events()})
    worker = worker_of(manager)
    context, twin = TextContext(range(1, 30), 64), TextContext(range(1, 30), 64)
    with source.claim(context), manager.claim(twin):
        assert source.maybe_reserve(context)
        source.fetch([context])
        context.update(1)
        source.step([context])
        lent = source.contents.lease(context.request_id, 0, manager.contents.digests(twin), 100)
        assert lent is not None
        if waits:
            table = source.block_table(context.request_id, full_pages=True)
            pending = manager.import_block_table(twin, table)
        else:
            pending = manager.contents.import_pages(twin, 0, lent[1])
        assert pending is not None
        proof = proven(manager, pending)
        parked(worker)
        if waits:
            manager.commit_import(twin, pending, proof)
        else:
            manager.contents.commit_pages(pending, proof)
        assert len(worker._log.entries) > 1
        assert worker._log.entries[-1] is None
        del worker.turn
        source.end_lease(lent[0])
    manager.close()
    source.close()


def test_if_no_thread_reads_the_log_the_loop_reads_it_and_subscribers_stay_right() -> None:
    manager = manager_of(16, params={"kv_events": events()})
    worker = worker_of(manager)
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        with worker._applying:  # The lock stops the publisher's thread.
            for start in range(4):
                run_once(manager, [*range(start * 100 + 1, start * 100 + 30)])
            assert len(worker._log.entries) > 8
        worker.catch_up()
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
    manager.close()


def test_a_full_log_is_read_by_the_serving_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.events.log.MOST_ENTRIES", 4)
    manager = manager_of(16, params={"kv_events": events()})
    worker = worker_of(manager)
    parked(worker)
    settled_by_loop = worker._log
    for start in range(8):
        run_once(manager, [*range(start * 100 + 1, start * 100 + 30)])
        assert len(settled_by_loop.entries) <= 4 + 8
    assert worker._untold
    del worker.turn
    with Mirror(manager.kv_event_endpoints[0]) as mirror:
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
    manager.close()


def test_the_loop_takes_some_entries_in_a_call_and_what_follows_from_them_is_told_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache.endpoints.publisher._ENTRIES_OF_LOOP", 5)
    manager = manager_of(16, params={"kv_events": events()})
    worker = worker_of(manager)
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        mirror.forget_the_begin(manager, 0)
        parked(worker)
        for start in range(4):
            run_once(manager, [*range(start * 100 + 1, start * 100 + 30)])
        before = len(worker._log.entries)
        worker.catch_up()
        assert len(worker._log.entries) == before - 5
        assert 0 < len(worker._untold) <= 5
        del worker.turn
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        assert {"type": "AllBlocksCleared"} not in mirror.events
        # If the changes cannot be sent in time, the whole state is sent instead.
        monkeypatch.setattr("kvcache.endpoints.publisher._MOST_UNTOLD", 0)
        parked(worker)
        run_once(manager, [*range(901, 930)])
        worker.catch_up()
        assert (worker._untold, worker._behind) == ([], True)
        del worker.turn
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
        assert {"type": "AllBlocksCleared"} in mirror.events
    manager.close()


def test_a_loop_waits_for_nobody_and_a_log_that_nobody_takes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.events.log.MOST_ENTRIES", 4)
    monkeypatch.setattr("kvcache.endpoints.publisher._LOST_AT", 40)
    manager = manager_of(16, params={"kv_events": events()})
    worker = worker_of(manager)
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        run_once(manager, [*range(1, 30)])
        mirror.settle(manager, 0)
        assert mirror.there["GPU"]
        with worker._applying:  # While this lock is held, the publisher's thread cannot send.
            longest = number = 0
            while not worker._lost:
                number += 1  # a prompt that changes nothing in the index adds no entry
                run_once(manager, [*range(number * 100 + 1, number * 100 + 30)])
                longest = max(longest, len(worker._log.entries))
            assert 30 < longest < 60
        mirror.settle(manager, 0)
        assert not any(mirror.there.values())
        for start in range(200, 208):  # These prompts evict all earlier pages.
            run_once(manager, [*range(start * 100 + 1, start * 100 + 30)])
        mirror.settle(manager, 0)
        mirror.check_same(manager, 0)
    manager.close()


def test_every_change_of_an_index_is_written_by_one_function() -> None:
    import ast

    from kvcache.pool import index

    tree = ast.parse(Path(index.__file__).read_text())
    writers = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if ast.unparse(target).startswith("self.published[")
    }
    # Pages that `rename` moves are neither added nor removed. `EventPublisher.agree` reports what `clear`
    # changes.
    assert writers == {"_changed", "rename", "clear"}


def test_a_closed_manager_reports_that_all_pages_are_gone_and_leaves_no_thread() -> None:
    manager = manager_of(16, params={"kv_events": events()})
    thread = manager._replicas._events._thread  # type: ignore[union-attr]
    with Mirror(manager.kv_event_endpoints[0]).begin() as mirror:
        run_once(manager, [*range(1, 30)])
        mirror.settle(manager, 0)
        manager.close()
        manager.close()
        mirror.until(lambda: not mirror.there)
    assert not thread.is_alive()


def test_a_manager_that_is_forgotten_ends_its_thread() -> None:
    import gc

    manager = manager_of(16, params={"kv_events": events()})
    thread = manager._replicas._events._thread  # type: ignore[union-attr]
    settled(manager)
    del manager
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("dp", [1, 2])
def test_a_subscriber_knows_the_pages_of_the_current_weights_only(dp: int) -> None:
    manager = manager_of(16, dp=dp, host_slots=20, params={"kv_events": events(), "weights": "a"})
    rank = dp - 1
    with Mirror(manager.kv_event_endpoints[rank]).begin() as mirror:
        mirror.forget_the_begin(manager, rank)
        run_once(manager, [*range(30)], rank)
        manager.flush_tiers()
        mirror.settle(manager, rank)
        known = {medium: {*pages} for medium, pages in mirror.there.items()}
        assert [len(known[medium]) for medium in ("GPU", "CPU")] == [7, 7]
        del mirror.events[:]
        manager.set_weights("b")
        mirror.until(lambda: not mirror.there)
        assert mirror.events == [{"type": "AllBlocksCleared"}]
        run_once(manager, [*range(100, 150)], rank)  # 12 pages, so that pages of before are evicted
        mirror.settle(manager, rank)
        assert len(mirror.there["GPU"]) == 12
        assert {event["type"] for event in mirror.events[1:]} == {"BlockStored"}, "what is unknown is not removed"
        manager.set_weights("a")
        mirror.until(lambda: {*mirror.there.get("CPU", ())} == known["CPU"])
        assert {*mirror.there["GPU"]} < known["GPU"]
        mirror.whole()
        run_once(manager, [*range(30)], rank)
        mirror.settle(manager, rank)
        assert {*mirror.there["GPU"]} == known["GPU"]
        late = Mirror(manager.kv_event_endpoints[rank]).begin()
        late.forget_the_begin(manager, rank)
        assert {*late.there["GPU"]} == known["GPU"]
        late.close()
    manager.close()
