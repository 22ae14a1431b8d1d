"""Several block tables over an object store: the objects of each table, and prefixes from which all tables can
continue.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import LayerGroup, TextContext
from kvcache.tiers import object_tier as module
from tests.kvcache.replica.tables_below import TWO, WINDOW, Make, fill
from tests.kvcache.served import SIZE, Served, until
from tests.kvcache.tiers import stored_objects
from tests.kvcache.tiers.stored_objects import COUNT, StoredObjects, forget_host, objects_of, settled
from tests.kvcache.tiers.test_object_tier_contract import LONG

ONE = (LayerGroup("full", (0,)),)
PROMPT = range(51)  # The prompt has twelve full pages and three more tokens: three objects in each table.


@pytest.fixture
def served(store: StoredObjects) -> Make:
    def make(pages: int = 60, host_slots: int = 120, groups: tuple[LayerGroup, ...] = WINDOW, **options: Any) -> Served:
        layers, params = sum(len(group.layers) for group in groups), {"groups": groups, **options.pop("params", {})}
        return store.machine(Served, pages, host_slots, layers=layers, params=params, **options)

    return make


def key_of(it: Served, table: int, number: int, prompt: Iterable[int] = PROMPT) -> str:
    """Returns the key of object number `number` of the prompt in this table."""
    return stored_objects.key_of(it, prompt, (number + 1) * COUNT, table)


def written(served: Make, groups: tuple[LayerGroup, ...] = WINDOW) -> Served:
    """Returns a manager that has written the objects of the prompt and is closed."""
    it = served(groups=groups)
    assert it.serve(PROMPT, chunk=8) == 0
    it.manager.close()
    return it


@pytest.mark.parametrize("groups", [WINDOW, TWO])
def test_a_new_machine_finds_what_was_written_of_every_table(
    served: Make, store: StoredObjects, groups: tuple[LayerGroup, ...]
) -> None:
    it = written(served, groups)
    tables = len(it.manager.layer_tables.tables)
    assert len(store.pages) == 3 * tables
    assert {key_of(it, table, number) for table in range(tables) for number in range(3)} == set(store.pages)
    again = served(groups=groups)
    again.fetch(PROMPT)
    full = 2 if groups is TWO else 1
    # Token 48 sees tokens 43 to 47 of the window, which are in two pages of the last object. In the chunked table a
    # chunk begins with token 48, so no earlier page is needed.
    assert again.manager.metrics.object_blocks_read == 12 * full + 2
    assert store.read_bytes == (12 * full + 2) * objects_of(again)._layout.record_bytes
    assert again.serve(PROMPT) == 48
    assert again.kv.compared >= 48 * full
    again.manager.check()


def test_only_the_window_objects_that_the_next_query_sees_are_read(served: Make, store: StoredObjects) -> None:
    written(served, LONG)
    again = served(groups=LONG)
    del store.objects[key_of(again, 1, 0)]  # no query after page 12 sees this page
    again.fetch(PROMPT)
    assert again.manager.metrics.object_blocks_read == 12 + 6
    assert again.serve(PROMPT) == 48


def test_the_store_is_asked_in_few_rounds(served: Make, store: StoredObjects) -> None:
    written(served)
    again, longer = served(), [*PROMPT, *range(60)]
    settled(again)
    store.calls.clear()
    again.fetch(longer)
    # The first question asks for the objects of the full layers. The second question asks for the objects of the window
    # layers that end at the same pages of the prompt.
    assert store.calls == ["exist", "exist", "read"]
    assert again.serve(longer) == 48
    gone = [key_of(again, 1, number) for number in (1, 2)]
    for key in gone:
        del store.objects[key]
    third = served()
    settled(third)
    store.calls.clear()
    third.fetch(longer)
    assert store.calls == ["exist", "exist", "exist", "read"]  # The third question asks for all objects of windows.
    assert third.serve(longer) == 16
    settled(third)
    store.calls.clear()
    third.fetch(longer)
    third.fetch(longer)
    assert store.calls == []  # all is known


@pytest.mark.parametrize("length", [51, 59])
def test_the_store_is_not_asked_for_window_objects_of_a_prompt_that_nobody_has(
    served: Make, store: StoredObjects, length: int
) -> None:
    """A prompt may also have too few pages for an object. Then no process can have written an object, and the store is
    not asked.
    """
    it, keys = served(), list[str]()
    settled(it)
    io, tier = objects_of(it)._read_io, objects_of(it)
    exist = io.exist
    io.exist = lambda asked: keys.extend(asked) or exist(asked)  # type: ignore[method-assign]
    it.fetch(range(length))
    assert keys == [key_of(it, 0, number) for number in range(3)]
    assert tier.generation
    assert store.calls.count("read") == 0


@pytest.mark.parametrize(("table", "number", "found"), [(0, 2, 32), (0, 0, 0), (1, 2, 32), (1, 0, 48), (1, 1, 48)])
def test_a_prefix_ends_where_one_table_cannot_continue(
    served: Make, store: StoredObjects, table: int, number: int, found: int
) -> None:
    written(served)
    again = served()
    settled(again)
    del store.objects[key_of(again, table, number)]
    assert again.again(PROMPT) == found


def test_reading_pages_does_not_evict_the_window_with_which_the_request_resumes_meanwhile(
    served: Make, store: StoredObjects
) -> None:
    written(served)
    again = served(60, 52)
    again.fetch(PROMPT)  # The manager now remembers which objects the store has.
    forget_host(again)
    again.fetch(PROMPT[:19])  # This prompt has four full pages. A window keeps the last two of them.
    pool = again.tiers.host.pool
    others = pool.allocate(52 - 6)  # newer than these
    pool.index.publish(others, np.arange(len(others) * 4, dtype=np.uint64).reshape(len(others), 4) + np.uint64(7))
    pool.release(others)
    store.is_not_waited_for(lambda: again.serve(PROMPT) == 16)


def test_an_object_of_one_table_in_the_place_of_another_is_refused(served: Make, store: StoredObjects) -> None:
    written(served)
    again = served()
    settled(again)
    store.objects[key_of(again, 1, 2)] = store.objects[key_of(again, 0, 2)]
    again.fetch(PROMPT)
    assert objects_of(again).refusals == {"foreign": 2}
    assert again.serve(PROMPT) == 32


def test_objects_of_another_grouping_are_not_found(served: Make, store: StoredObjects) -> None:
    written(served)
    for groups in ((LayerGroup("full", (0,)), LayerGroup("window", (1,), 7)), (LayerGroup("full", (0, 1)),)):
        other = served(groups=groups)
        assert other.again(PROMPT) == 0
    assert store.read_bytes == 0


def test_loaded_pages_belong_to_their_own_table(served: Make) -> None:
    written(served)
    again = served()
    again.fetch(PROMPT)
    index = again.tiers.host.pool.index
    tables = again.manager._replicas.each[0].tables
    for table, digests in enumerate(tables.every(again.digests(PROMPT))):
        slots = index.find(digests)
        assert (index.tables[slots[slots > 0]] == table).all()
        assert np.count_nonzero(slots) == (2 if table else 12)


def test_the_objects_of_a_prompts_first_pages_are_written_first(
    served: Make, store: StoredObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED", 2)  # for each table
    it = served()
    settled(it)
    store.may.clear()
    it.serve(PROMPT, chunk=8)
    it.tiers.store_all()
    tier = objects_of(it)
    queued = [tier._layout.key(tier._epoch, name) for name in tier._queue]
    assert queued == [key_of(it, table, number) for number in (0, 1) for table in (0, 1)]
    store.may.set()
    settled(it)
    it.serve(PROMPT)  # Objects that the host has already take no room.
    it.manager.flush_tiers()
    assert set(store.pages) == {key_of(it, table, number) for number in range(3) for table in (0, 1)}


def test_an_answer_that_comes_between_two_looks_is_another_question(
    served: Make, store: StoredObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(served)
    again = served()
    again.fetch(PROMPT)
    # The manager still remembers which objects the store has. For windows it remembers only the last object.
    again.tiers.host.pool.forget()
    del store.objects[key_of(again, 1, 2)]
    store.may.clear()
    context, tier = again.claim(PROMPT), objects_of(again)
    assert again.manager.prefetch(context)
    ask = tier.ask

    def late(*given: Any) -> bool:
        coming = ask(*given)
        store.may.set()
        for job in [*tier._reader.jobs]:
            job.work.exception()
        return coming

    with monkeypatch.context() as patched:
        patched.setattr(tier, "ask", late)
        assert again.manager.prefetch(context)
    until(lambda: not again.manager.prefetch(context))
    assert again.manager.maybe_reserve(context)
    assert context.start_idx == 32
    again.run(context)
    again.manager.release(context.request_id)


def test_the_time_to_read_pages_is_compared_with_the_time_to_compute_their_tokens(
    served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(served)
    again, weighed = served(), list[tuple[int, int]]()
    again.serve(PROMPT[:27], chunk=8)  # The prompt has six pages in each table.
    again.tiers.store_all()

    def pays(pages: int, _before: int, gain: int, _now: float) -> bool:
        weighed.append((pages, gain))
        return False

    with monkeypatch.context() as patched:
        patched.setattr(objects_of(again).rates, "pays", pays)
        assert again.again(PROMPT) == 24
    # Each pair is the number of pages to read and the number of pages whose tokens need not be computed.
    assert set(weighed) == {(6 + 2, 6)}


def test_pages_in_a_store_are_loaded_for_any_reader_that_asks(served: Make) -> None:
    written(served)
    again = served()
    wanted = again.manager.contents.digests(TextContext([*PROMPT], 256, "theirs"))

    def is_brought() -> bool:
        again.manager.check()
        return not again.manager.contents.bring("theirs", 0, wanted, 100)

    until(is_brought)
    found = again.manager.contents.lease("theirs", 0, wanted, 100)
    assert found is not None
    assert [*map(len, found[1].groups)] == [12, 2]
    again.manager.end_lease(found[0])


def longest(it: Served, prompt: list[int], store: StoredObjects) -> int:
    """Returns how many tokens of a prompt must be found according to the documentation. Each page may be in
    any tier.
    """
    replica, tier = it.manager._replicas.each[0], objects_of(it)
    last = (len(prompt) - 1) // SIZE
    every = replica.tables.every(it.digests(prompt)[:last])
    indexes = [replica.pool.index, it.tiers.host.pool.index]
    indexes += [it.tiers.files.index] if it.tiers.files is not None else []
    # One read takes only as many pages as fit into the host.
    most = it.tiers.host.pool.num_pages // 2 // len(every) // COUNT * COUNT

    def there(table: int, column: int) -> bool:
        digests = every[table]
        if any(index.find(digests[column : column + 1])[0] for index in indexes):
            return True
        end = (column // COUNT + 1) * COUNT
        key = tier._layout.key(tier._epoch, digests[end - 1].tobytes()) if end <= min(last, most) else ""
        return key in store.objects

    def seen(table: int, end: int) -> int:
        group = it.manager.layer_tables.tables[table].group
        token = {"full": 0, "window": end * SIZE - group.window + 1}.get(group.kind, end * SIZE)
        return max(0, token - (token % group.window if group.kind == "chunked" else 0)) // SIZE

    for end in range(last, 0, -1):
        if all(there(table, at) for table in range(len(every)) for at in range(seen(table, end), end)):
            return end * SIZE
    return 0


@pytest.mark.few(2)
@pytest.mark.parametrize("groups", [ONE, WINDOW, TWO, LONG])
def test_random_prompts_over_four_tiers(
    served: Make, store: StoredObjects, tmp_path: Path, groups: tuple[LayerGroup, ...]
) -> None:
    """Two managers on one store, with small tiers. They must find the same pages as the model. All KV is compared."""
    rng, seen, now = np.random.default_rng(8), Counter[str](), time.monotonic()
    files = [{}, {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 9000 / 2**30}]
    sizes = (80, 44 if groups is ONE else 88)
    both = [served(*sizes, groups, params=one, checks=False) for one in files]
    for it in both:
        objects_of(it)._clock = lambda: now
    for move in range(200):
        now += 11.0  # After 11 s the manager asks again for objects that were absent.
        for it in both:
            it.tiers.store_all()
            settled(it)
        it = both[int(rng.integers(2))]
        prompt = [int(rng.integers(9)), *range(int(rng.integers(1, 48)))]
        expected = longest(it, prompt, store)
        read, gone = it.manager.metrics.object_blocks_read, objects_of(it).refusals.total()
        it.fetch(prompt)
        found = it.serve(prompt, chunk=int(rng.integers(1, 5)) * 8)
        # Pages that were read for a prefix that became shorter may have evicted pages that the shorter prefix needs.
        assert found == expected or (objects_of(it).refusals.total() > gone and found < expected), (move, prompt)
        seen["as expected"] += found == expected > 0
        it.manager.check()
        seen["found"] += found
        seen["found with objects"] += it.manager.metrics.object_blocks_read > read
        if rng.random() < 0.3:
            fill(it, 60)
        if rng.random() < 0.2 and store.pages:
            del store.objects[sorted(store.pages)[int(rng.integers(len(store.pages)))]]
            seen["gone"] += 1
        if rng.random() < 0.02:
            it.manager.reset_prefix_cache()
            seen["reset"] += 1
    assert seen["found"] > 1000
    assert seen["as expected"] > 50
    assert min(seen["found with objects"], seen["gone"]) > 20
    assert seen["reset"]
    for it in both:
        assert it.manager.metrics.object_blocks_written > 20
        assert it.kv.compared > 300
