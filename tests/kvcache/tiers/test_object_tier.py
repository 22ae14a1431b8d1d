"""The object tier: pages outlive processes and folders. Any fault in the store leads only to misses, in
bounded time.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcache import InvariantError
from kvcache.pool.index import NO_PAGE
from kvcache.tiers import object_tier as module
from kvcache.tiers.host_tier import Job
from kvcache.tiers.object_tier import ReadRates
from kvcache.under_way import Call
from tests.kvcache.served import LONGEST_WAIT_S, Served
from tests.kvcache.states.served_states import ServedStates
from tests.kvcache.tiers.stored_objects import (
    COUNT,
    DAMAGE,
    StoredObjects,
    forget_host,
    key_of,
    objects_of,
    settled,
    tiers_of,
)

PROMPT = range(33)  # eight full pages of 4 tokens, which make two objects, and one more token
Make = Callable[..., Served]


@pytest.fixture
def served(store: StoredObjects) -> Make:
    def make(pages: int = 12, host_slots: int = 40, **options: Any) -> Served:
        return store.machine(Served, pages, host_slots, **options)

    return make


def test_a_new_machine_finds_what_was_written(served: Make, store: StoredObjects) -> None:
    it = served()
    assert it.serve(PROMPT) == 0
    assert it.serve([7, *range(40)]) == 0
    it.manager.close()
    # Each prompt has two full objects. Its last two pages are written to no object.
    assert it.manager.metrics.object_blocks_written == 16
    again = served()
    again.fetch(PROMPT)
    again.fetch([7, *range(40)])
    assert again.serve(PROMPT) == 32
    assert again.serve([7, *range(40)]) == 32
    assert again.manager.metrics.object_blocks_read == 16
    assert again.kv.compared == 64
    assert len(store.pages) == 4


def test_objects_are_asked_for_once_and_written_once(served: Make, store: StoredObjects) -> None:
    it = served()
    for _ in range(3):
        it.serve(PROMPT)
        settled(it)
    assert store.calls.count("write") == 1
    again = served()
    for _ in range(2):
        again.serve(PROMPT)
        settled(again)
    assert store.calls.count("write") == 1
    store.calls.clear()
    third = served()
    third.fetch([*range(150)])
    # The manager asks for the epoch, then for the objects that exist, and then reads their contents.
    assert store.calls == ["exist", "exist", "read"]


def test_an_object_that_another_process_has_written_meanwhile_is_not_written_again(
    served: Make, store: StoredObjects
) -> None:
    both = [served(), served()]
    for it in both:
        it.fetch(PROMPT)  # both processes have asked the store, and know that it is empty
    for it in both:
        it.serve(PROMPT)
        it.manager.flush_tiers()
    assert store.calls.count("write") == 1
    assert [it.manager.metrics.object_blocks_written for it in both] == [8, 0]


def test_objects_that_wait_to_be_written_are_given_up_if_the_store_fails(served: Make, store: StoredObjects) -> None:
    store.fails = True
    store.may.clear()
    it = served()
    it.serve(PROMPT)
    it.tiers.store_all()
    assert len(objects_of(it)._queue) == 2
    store.may.set()
    objects_of(it)._reader.jobs[0].work.exception()
    objects_of(it).tick()
    assert not objects_of(it)._queue


def test_after_a_repair_a_waiting_request_looks_up_the_store_again(served: Make) -> None:
    it = served()
    it.fetch(PROMPT)
    known = objects_of(it).generation
    assert known > 0
    generations = {known}
    for repairs in (1, 2):
        it.manager._mark.call = Call("prefetch")  # it was interrupted
        it.manager.recover()
        generations.add(objects_of(it).generation)
        assert len(generations) == 1 + repairs


def test_a_repair_waits_for_reads_and_frees_the_slots_that_they_filled(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.close()
    again = served()
    again.fetch(PROMPT)
    forget_host(again)
    store.may.clear()
    assert again.manager.prefetch(again.waiting(PROMPT))
    assert sum(map(len, objects_of(again).held_slots)) == 8
    again.manager._mark.call = Call("prefetch")  # it was interrupted
    ends = threading.Timer(0.2, store.may.set)
    ends.start()
    again.manager.recover()
    assert store.may.is_set(), "until then the thread may write to the slots"
    assert again.tiers.host.pool.free_count == 40
    ends.join()


def test_calls_queued_after_a_failing_call_are_not_tried(served: Make, store: StoredObjects) -> None:
    store.fails = True
    store.may.clear()
    it = served()  # the manager asks the store for the epoch
    objects_of(it)._ask([b"object"])
    store.may.set()
    settled(it)
    assert store.calls == ["exist"]
    assert (it.manager.metrics.object_store_failures, objects_of(it)._busy) == (1, {})


def test_a_short_read_is_not_filled_with_bytes_of_an_earlier_read(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.flush_tiers()
    others = set(store.pages)
    it.serve([7, *PROMPT])
    it.manager.close()
    again = served()
    again.fetch(PROMPT)
    for key in store.pages.keys() - others:
        store.objects[key] = store.objects[key][: objects_of(again)._layout.record_bytes]
    again.fetch([7, *PROMPT])
    assert objects_of(again).refusals == {"cut": 6}
    assert again.serve([7, *PROMPT]) == 4


@pytest.mark.parametrize("other", ["key", "salt", "dim", "algorithm", "page_order", "count"])
def test_pages_of_another_kind_are_not_found(served: Make, store: StoredObjects, other: str) -> None:
    it = served(layers=2, heads=2)
    it.serve(PROMPT, salt="a")
    it.manager.close()
    options: dict[str, dict[str, Any]] = {
        "key": {"params": {"file_tier_key": "another model"}},
        "dim": {"head_dim": 4},
        "algorithm": {"params": {"hash_algorithm": "xxh3_128"}},
        "page_order": {"params": {"page_order": "layer,side,head,token,dim"}},
        "count": {"params": {"object_tier_pages": 2}},
        "salt": {},
    }
    again = served(layers=2, heads=2, **options[other])
    salt = "b" if other == "salt" else "a"
    again.fetch(PROMPT, salt)
    assert again.serve(PROMPT, salt=salt) == 0
    assert again.manager.metrics.object_blocks_refused == 0
    assert store.read_bytes == 0


def test_an_object_has_the_pages_of_all_shards_side_by_side(served: Make) -> None:
    it = served(tp=2, heads=4)
    it.serve(PROMPT)
    it.manager.close()
    again = served(tp=2, heads=4, dp=2)
    again.fetch(PROMPT)
    assert again.serve(PROMPT, replica=1) == 32
    assert again.kv.compared == 64


# "longer" adds extra bytes at the end of an object. All of its pages are then still right, so they are read and the
# object stays.
@pytest.mark.few(3)
@pytest.mark.parametrize("how", DAMAGE)
def test_the_writer_of_an_object_replaces_it_when_it_finds_it_damaged(
    served: Make, store: StoredObjects, how: str
) -> None:
    rng, prompts = np.random.default_rng(3), [[first, *range(33)] for first in range(15)]
    it = served(40, 40)
    for prompt in prompts:
        it.serve(prompt)
        it.manager.flush_tiers()
    right = dict(store.pages)
    assert len(right) == 30
    for key in right:
        store.damage(key, how, rng)
    damage = dict(store.pages)
    for prompt in prompts:
        while (it.tiers.host.pool.index.find(it.digests(prompt)) != NO_PAGE).any():
            it.fill(30)
        assert (it.again(prompt) == 32) == (how == "longer")
        it.manager.flush_tiers()
    assert it.manager.metrics.object_store_failures == 0
    it.manager.close()
    replaced = {key: content for key, content in store.pages.items() if key in right}
    assert replaced == (damage if how == "longer" else right)
    again = served(40, 40)
    for prompt in prompts:
        assert again.again(prompt) == 32  # `again` also compares the KV.


def test_a_damaged_object_stays_marked_until_it_is_overwritten(
    served: Make,
) -> None:
    """The tier checks for the object and then writes it. Between the check and the write, another process writes the
    object. This object is then damaged.
    """
    it = served()
    it.fetch(PROMPT)
    it.serve(PROMPT)
    tier = objects_of(it)
    it.manager.flush_tiers()
    name = it.digests(PROMPT)[COUNT - 1].tobytes()
    tier._broken.add(name)
    tier._know(name, tier._clock() + 10)  # A read that finds damage makes these two changes.
    tier._take_written({name: it.digests(PROMPT)[:COUNT]}, [])
    assert name in tier._broken
    assert tier._known[name] is not None, (
        "a write that was skipped because the object exists does not repair the object"
    )
    tier._take_written({name: it.digests(PROMPT)[:COUNT]}, [name])
    assert name not in tier._broken
    assert tier._known[name] is None


def test_a_reset_drops_pages_that_are_being_read(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.close()
    again = served()
    settled(again)
    tier = objects_of(again)
    context = again.claim(PROMPT)
    store.may.clear()
    assert again.manager.prefetch(context)  # This call would have handled the answer if the store had answered at once.
    asked = tier._reader.jobs[0]
    store.may.set()
    asked.work.result()
    store.may.clear()
    assert again.manager.prefetch(context)  # This call handles the answer and begins to read.
    assert tier.held_slots[0].size == 8
    again.manager.reset_prefix_cache()
    again.manager.check()
    store.may.set()
    settled(again)
    assert again.manager.metrics.object_blocks_read == 0
    assert not again.tiers.host.pool.index.published.any()
    again.manager.release(context.request_id)


def test_an_answer_from_before_a_reset_does_not_affect_questions_after_it(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.close()
    again = served()
    settled(again)
    tier = objects_of(again)
    store.may.clear()
    context = again.claim(PROMPT)
    assert again.manager.prefetch(context)
    first = tier._reader.jobs[0]
    names = first.names
    again.manager.reset_prefix_cache()
    assert again.manager.prefetch(context)  # The call asks for the same objects again.
    busy = dict(tier._busy)
    assert busy
    assert names == [*busy]
    assert [job.names for job in tier._reader.jobs] == [(), names]
    again.manager.check()
    # The answer to the earlier question arrives. The answer to the later question does not.
    held = tier._reader.jobs.popleft()
    store.may.set()
    held.work.result()
    tier._end(held)
    assert tier._busy == busy
    assert not tier._known
    again.manager.check()
    settled(again)
    assert not tier._busy
    again.manager.release(context.request_id)


def test_a_reset_reaches_the_store_once_it_answers_again(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.flush_tiers()
    store.fails = True
    it.manager.reset_prefix_cache()
    settled(it)
    assert objects_of(it)._untold
    store.fails = False
    objects_of(it)._paused_until = 0.0
    it.manager.close()
    again = served()
    assert again.again(PROMPT) == 0


def test_an_epoch_that_is_broken_is_a_miss_until_a_reset(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.reset_prefix_cache()
    it.serve(PROMPT)
    it.manager.close()
    (current,) = store.objects.keys() - store.pages.keys()
    for content in (b"", b"?" * 32, store.objects[current][:-8], store.objects[current] + b"?"):
        store.objects[current] = content
        again = served()
        again.fetch(PROMPT)
        longer = content.endswith(b"?") and len(content) == 33
        assert again.serve(PROMPT) == (32 if longer else 0)
        assert again.manager.metrics.object_store_failures == (not longer)
        again.manager.close()
    again = served()
    again.manager.reset_prefix_cache()
    objects_of(again)._paused_until = 0.0
    again.serve(PROMPT)
    again.manager.close()
    assert served().manager.metrics.object_store_failures == 0


def test_an_epoch_that_cannot_be_read_is_not_taken_from_an_earlier_read(served: Make, store: StoredObjects) -> None:
    it = served()
    it.manager.reset_prefix_cache()
    settled(it)
    tier = objects_of(it)
    (current,) = store.objects
    assert tier._find_epoch() == tier._epoch
    store.objects[current] = b""
    with pytest.raises(OSError, match="names no epoch; call reset_prefix_cache to rewrite it"):
        tier._find_epoch()


def test_a_request_that_waits_for_free_pages_uses_the_pages_that_come_from_the_store_meanwhile(
    served: Make, store: StoredObjects
) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.close()
    again = served()
    holder, waiting = again.claim(range(1000, 1040)), again.claim(PROMPT)
    assert again.manager.maybe_reserve(holder)
    ends = time.monotonic() + LONGEST_WAIT_S
    while again.manager.metrics.object_blocks_read < 8:  # No step runs, so only these calls handle answers.
        store.may.clear()
        assert not again.manager.maybe_reserve(waiting)
        assert time.monotonic() < ends
        store.may.set()
        for job in objects_of(again)._reader.jobs:
            job.wait()
    again.manager.release(holder.request_id)
    assert again.manager.maybe_reserve(waiting)
    assert waiting.start_idx == 32
    again.run(waiting)
    again.manager.release(waiting.request_id)


def test_a_state_that_the_store_has_lost_is_written_again_when_it_is_used(store: StoredObjects) -> None:
    it = store.machine(ServedStates)
    prompt = range(43)
    it.serve(prompt)
    it.manager.flush_tiers()
    key = key_of(it, prompt, 10, state=True)
    del store.objects[key]
    tiers_of(it)[1]._known.clear()  # The tier has forgotten this object among many other objects.
    assert it.serve(prompt) == 40
    it.manager.flush_tiers()
    assert key in store.objects


def test_the_store_is_asked_only_for_the_states_that_the_caller_names(store: StoredObjects) -> None:
    it = store.machine(ServedStates)
    settled(it)
    tier, digests = tiers_of(it)[1], it.digests(range(43))[None]
    for page in (2, 9):  # The store is known to lack the state after page 2 when the state after page 9 is asked for.
        store.may.clear()
        assert tier.ask(digests, np.arange(10)[None] == page)
        assert [*tier._busy] == [digests[0, page].tobytes()]
        store.may.set()
        settled(it)


def test_a_question_and_the_queue_have_at_most_256_objects_of_a_table(store: StoredObjects) -> None:
    it = store.machine(ServedStates)
    settled(it)
    tier, words = tiers_of(it)[1], it.digests(range(8)).shape[1]
    digests = np.arange(300 * words, dtype=np.uint64).reshape(1, 300, words)
    store.may.clear()
    assert tier.ask(digests, np.ones((1, 300), np.bool_))
    assert len(tier._busy) == 256
    tier.offer(digests[0])
    assert len(tier._queue) == 256
    store.may.set()
    settled(it)


def test_an_object_counts_as_absent_for_ten_seconds(
    served: Make, store: StoredObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, other = served(), served()
    it.fetch(PROMPT)
    other.serve(PROMPT)
    other.manager.close()
    assert store.pages
    later = [0.0]
    monkeypatch.setattr(objects_of(it), "_clock", lambda: time.monotonic() + later[0])
    it.fetch(PROMPT)
    assert it.manager.metrics.object_blocks_read == 0
    later[0] = 10.0
    it.fetch(PROMPT)
    assert it.manager.metrics.object_blocks_read == 8


def test_a_flush_waits_at_most_ten_seconds_for_the_store(
    served: Make, store: StoredObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, seconds, waits = served(), itertools.count(), list[float]()
    it.serve(PROMPT)
    it.tiers.store_all()
    tier = objects_of(it)
    store.may.clear()
    with monkeypatch.context() as patched:
        patched.setattr(tier, "_clock", lambda: float(next(seconds)))  # one second passes at each call
        patched.setattr(Job, "wait", lambda _, longest: waits.append(longest))
        tier.flush()
    assert 0 < max(waits) < 10
    assert next(seconds) < 20
    store.may.set()


def test_objects_are_read_if_reading_pays() -> None:
    rates = ReadRates(0.010)
    assert rates.pays(100, 0, 100, 0.0)  # No rate was measured yet.
    rates.asked(0.020)
    rates.fetched(10, 0.070)
    assert rates.page_s == pytest.approx(0.005)
    assert rates.pays(5, 0, 5, 1.0)
    assert not rates.pays(5, 5, 5, 1000.0) or not rates.pays(5, 5, 5, 1000.0)
    assert rates.pays(3, 0, 3, 2000.0)  # Now and then a read is tried although it does not pay.
    assert not rates.pays(3, 0, 3, 2029.0)
    assert rates.pays(3, 0, 3, 2031.0)
    for _ in range(40):
        rates.fetched(10, 0.020 + 10 * 0.001)
    assert rates.pays(3, 0, 3, 2032.0)
    assert ReadRates(math.inf).pays(1, 10**9, 1, 0.0)


def test_a_store_slower_than_the_model_is_not_read(served: Make) -> None:
    it = served()
    it.serve(PROMPT)
    it.serve([7, *PROMPT])
    it.manager.close()
    again = served(params={"object_tier_tokens_per_s": 1e9})
    again.fetch(PROMPT)
    assert again.manager.metrics.object_blocks_read == 8  # The first read is always tried, to measure its rate.
    objects_of(again).rates._tried = time.monotonic()
    assert again.again([7, *PROMPT]) == 0
    assert again.manager.metrics.object_blocks_read == 8


def test_a_store_is_not_flooded(served: Make, store: StoredObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED", 3)
    it = served(16, 40)
    settled(it)
    store.may.clear()
    for first in range(4):
        it.serve([first, *PROMPT])
    it.tiers.store_all()
    assert len(objects_of(it)._queue) <= 3
    store.may.set()
    it.manager.flush_tiers()
    assert 1 <= len(store.pages) <= 5


def test_check_recounts_the_objects_that_are_looked_up_or_read(served: Make) -> None:
    it = served(checks=False)
    settled(it)
    objects_of(it)._busy[b"?"] = 0.0
    with pytest.raises(InvariantError, match="0 objects are being looked up or read, but 1 are marked"):
        it.manager.check()
    objects_of(it)._busy.clear()


def test_a_manager_without_objects_has_no_thread_and_asks_nobody() -> None:
    it = Served(8, 40)
    assert it.tiers.lower == []
    assert not it.manager.prefetch(it.claim(PROMPT))
