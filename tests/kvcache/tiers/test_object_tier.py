"""The object tier: pages outlive processes and folders. Whatever is wrong in the store is a miss, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import InvariantError
from kvcache.pool.index import NO_PAGE
from kvcache.tiers import object_tier as module
from kvcache.tiers.object_tier import ObjectTier
from kvcache.tiers.read_rates import ReadRates
from tests.kvcache.served import Served
from tests.kvcache.tiers.stored_objects import StoredObjects

COUNT = 4  # pages of an object
PROMPT = range(33)  # eight full pages and a token: two objects
Make = Callable[..., Served]


@pytest.fixture
def store() -> Iterable[StoredObjects]:
    made = StoredObjects()
    yield made
    assert made.open == 0


@pytest.fixture
def served(store: StoredObjects) -> Iterable[Make]:
    made: list[Served] = []

    def make(pages: int = 12, host_slots: int = 40, **options: Any) -> Served:
        given = {"file_tier_key": "model", "object_tier_io": store, "object_tier_pages": COUNT}
        made.append(Served(pages, host_slots, params={**given, **options.pop("params", {})}, **options))
        return made[-1]

    yield make
    for one in made:
        one.manager.check()
        one.manager.close()


def objects_of(it: Served) -> ObjectTier:
    return it.tiers._counted_objects[0]


def fetch(it: Served, prompt: Iterable[int], salt: str | None = None, seconds: float = 10.0) -> None:
    """Wait for a prompt's pages as a scheduler does, before it claims a replica."""
    context = it.claim(prompt, salt)
    ends = time.monotonic() + seconds
    while it.manager.prefetch(context):
        assert time.monotonic() < ends
        time.sleep(0.001)
    it.manager.release(context.request_id)


def settled(it: Served) -> None:
    """Wait until the threads have nothing to do."""
    tier = objects_of(it)
    for _ in range(10_000):
        tier.tick()
        if not (tier._jobs or tier._writing or tier._queue):
            return
        time.sleep(0.001)
    raise AssertionError("the threads are at work still")


def test_a_new_machine_finds_what_was_written(served: Make, store: StoredObjects) -> None:
    it = served()
    assert it.serve(PROMPT) == 0
    assert it.serve([7, *range(40)]) == 0
    it.manager.close()
    assert it.manager.metrics.object_blocks_written == 16  # two objects each: the last two pages make none
    again = served()
    fetch(again, PROMPT)
    fetch(again, [7, *range(40)])
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
    fetch(third, [*range(150)])
    assert store.calls == ["exist", "exist", "read"]  # the epoch, the objects, and what is there of them


def test_what_another_has_written_meanwhile_is_not_written_again(served: Make, store: StoredObjects) -> None:
    both = [served(), served()]
    for it in both:
        fetch(it, PROMPT)  # both know that there is nothing
    for it in both:
        it.serve(PROMPT)
        it.manager.flush_tiers()
    assert store.calls.count("write") == 1
    assert [it.manager.metrics.object_blocks_written for it in both] == [8, 0]


def test_what_waits_to_be_written_is_given_up_with_a_store_that_fails(served: Make, store: StoredObjects) -> None:
    store.fails = True
    store.may.clear()
    it = served()
    it.serve(PROMPT)
    it.tiers.settle()
    assert len(objects_of(it)._queue) == 2
    store.may.set()
    objects_of(it)._jobs[0].done.exception()
    objects_of(it).tick()
    assert not objects_of(it)._queue


def test_what_is_cut_short_is_not_taken_for_what_was_read_before(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.flush_tiers()
    others = set(store.pages)
    it.serve([7, *PROMPT])
    it.manager.close()
    again = served()
    fetch(again, PROMPT)
    for key in store.pages.keys() - others:
        store.objects[key] = store.objects[key][: objects_of(again)._layout.record_bytes]
    fetch(again, [7, *PROMPT])
    assert objects_of(again).refusals == {"cut": 6}
    assert again.serve([7, *PROMPT]) == 4


def test_an_object_of_which_the_host_has_lost_a_page_is_not_written(served: Make, store: StoredObjects) -> None:
    store.may.clear()
    it = served(12, 10)
    it.serve(PROMPT)
    it.tiers.settle()
    assert len(objects_of(it)._queue) == 2
    it.fill(4)
    it.tiers.settle()
    left = it.tiers.host.pool.index.find(it.digests(PROMPT)) != 0
    assert left.any()
    assert not left.all()
    store.may.set()
    it.manager.flush_tiers()
    whole = sum(left[at : at + COUNT].all() for at in (0, COUNT))
    assert it.manager.metrics.object_blocks_written == COUNT * whole == COUNT


def test_only_what_the_host_lacks_is_read(served: Make, store: StoredObjects) -> None:
    it = served(host_slots=20)
    it.serve(PROMPT)
    it.manager.close()
    again = served()
    again.serve(range(25))  # six pages
    settled(again)
    store.read_bytes = 0
    again.manager.reset_metrics()
    fetch(again, PROMPT)
    assert store.read_bytes == 2 * objects_of(again)._layout.record_bytes
    assert again.serve(PROMPT) == 32


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
    fetch(again, PROMPT, salt)
    assert again.serve(PROMPT, salt=salt) == 0
    assert again.manager.metrics.object_blocks_refused == 0
    assert store.read_bytes == 0


def test_shards_lie_side_by_side_in_an_object(served: Make) -> None:
    it = served(tp=2, heads=4)
    it.serve(PROMPT)
    it.manager.close()
    again = served(tp=2, heads=4, dp=2)
    fetch(again, PROMPT)
    assert again.serve(PROMPT, replica=1) == 32
    assert again.kv.compared == 64


def damaged(store: StoredObjects, key: str, how: str, rng: np.random.Generator) -> bytes | None:
    content = bytearray(store.objects[key])
    others = [one for one in store.pages if one != key]
    made: dict[str, Callable[[], bytes | None]] = {
        "gone": lambda: None,
        "swapped": lambda: store.objects[others[int(rng.integers(len(others)))]],
        "empty": lambda: b"",
        "cut": lambda: bytes(content[: int(rng.integers(len(content)))]),
        "noise": lambda: rng.integers(0, 256, len(content), np.uint8).tobytes(),
        "shifted": lambda: bytes(content[1:]) + b"?",
        "pushed": lambda: b"?" + bytes(content),
        "longer": lambda: bytes(content) + rng.integers(0, 256, int(rng.integers(1, 200)), np.uint8).tobytes(),
    }
    if how in made:
        return made[how]()
    content[int(rng.integers(len(content)))] ^= int(rng.integers(1, 256))
    return bytes(content)


# An object that is longer at its end has every page right: they are read, and it stays.
DAMAGE = ("gone", "swapped", "empty", "cut", "noise", "shifted", "pushed", "flipped", "longer")


@pytest.mark.parametrize("rounds", [12, pytest.param(1500, marks=pytest.mark.long)])
def test_ten_thousand_damaged_objects_are_misses(served: Make, store: StoredObjects, rounds: int) -> None:
    """Each object is damaged after it was written; all that is read of it is compared, token by token."""
    rng, seen, refused, compared, damages = np.random.default_rng(5), set[str](), 0, 0, 0
    for number in range(rounds):
        params = {"file_tier_key": f"{number}"}
        it, prompts = served(40, 80, params=params), [[first, *range(33)] for first in range(4)]
        for prompt in prompts:
            it.serve(prompt)
        it.manager.close()
        whole = dict(store.pages)
        for key, right in whole.items():
            how = DAMAGE[int(rng.integers(len(DAMAGE)))]
            content = damaged(store, key, how, rng)
            damages += content != right
            store.objects.pop(key) if content is None else store.objects.update({key: content})
        again = served(40, 80, params=params)
        for prompt in prompts * 2:
            fetch(again, prompt)
            again.serve(prompt)  # its KV is compared
        again.manager.check()
        seen |= {refusal.value for refusal in objects_of(again).refusals}
        refused += again.manager.metrics.object_blocks_refused
        compared += again.kv.compared
        assert again.manager.metrics.object_store_failures == 0
        again.manager.close()
        store.objects.clear()
    assert seen == {"gone", "cut", "foreign", "corrupted"}
    assert damages > 7 * rounds
    assert refused > rounds
    assert compared > 0


@pytest.mark.parametrize("live", [False, True], ids=["new machine", "same process"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_object_is_replaced_by_the_next_write_of_its_pages(
    served: Make, store: StoredObjects, how: str, live: bool
) -> None:
    rng, prompts = np.random.default_rng(3), [[first, *range(33)] for first in range(15)]
    it = served(40, 40)
    for prompt in prompts:
        it.serve(prompt)
        it.manager.flush_tiers()
    if not live:
        it.manager.close()
    right = dict(store.pages)
    assert len(right) == 30
    for key in right:
        if (content := damaged(store, key, how, rng)) is None:
            del store.objects[key]
        else:
            store.objects[key] = content
    damage = dict(store.pages)
    again = it if live else served(40, 40)
    for prompt in prompts:
        while (again.tiers.host.pool.index.find(again.digests(prompt)) != NO_PAGE).any():
            again.fill(30)
        fetch(again, prompt)
        assert (again.serve(prompt) == 32) == (how == "longer")
        again.manager.flush_tiers()
    assert again.manager.metrics.object_store_failures == 0
    again.manager.close()
    replaced = {key: content for key, content in store.pages.items() if key in right}
    assert replaced == (damage if how == "longer" else right)
    third = served(40, 40)
    for prompt in prompts:
        fetch(third, prompt)
        assert third.serve(prompt) == 32  # and its KV is compared


def test_an_object_found_damaged_while_it_is_not_written_over_stays_to_be_written(
    served: Make,
) -> None:
    """Another process has it written and damaged, between our look at what is there and the end of our write."""
    it = served()
    fetch(it, PROMPT)
    it.serve(PROMPT)
    tier = objects_of(it)
    it.manager.flush_tiers()
    name = it.digests(PROMPT)[COUNT - 1].tobytes()
    tier._broken.add(name)
    tier._take_written({name: it.digests(PROMPT)[:COUNT]}, [])
    assert name in tier._broken


def test_a_broken_object_is_written_again(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.close()
    right = dict(store.pages)
    store.objects |= {key: b"?" * len(content) for key, content in right.items()}
    again = served()
    fetch(again, PROMPT)
    assert again.serve(PROMPT) == 0
    assert again.manager.metrics.object_blocks_refused == 8
    again.manager.close()
    assert store.pages == right


def test_a_store_that_is_slow_is_waited_for_no_longer_than_its_time(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.close()
    patient = served(params={"object_tier_timeout_s": 60.0})
    settled(patient)
    store.is_not_waited_for(lambda: patient.manager.maybe_reserve(patient.claim(PROMPT)))
    patient.manager.close()
    again = served(params={"object_tier_timeout_s": 0.2})
    settled(again)
    store.may.clear()
    context = again.claim(PROMPT)
    assert again.manager.maybe_reserve(context)
    again.manager.release(context.request_id)
    fetch(again, PROMPT, seconds=1.5)  # the default is 2
    assert again.serve(PROMPT) == 0
    settled(again)
    store.may.set()
    assert again.manager.metrics.object_store_failures == 1
    calls = len(store.calls)
    fetch(again, [5, *PROMPT], seconds=0.1)  # it is left alone
    again.serve([5, *PROMPT])
    assert len(store.calls) == calls
    assert objects_of(again)._queue == {}
    now = time.monotonic() + 10.1
    objects_of(again)._clock = lambda: now
    fetch(again, [6, *PROMPT])
    assert len(store.calls) > calls


def test_pages_that_come_too_late_are_there_for_the_next_request(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.close()
    again = served()
    settled(again)
    tier, now = objects_of(again), time.monotonic()
    tier._clock = lambda: now
    context = again.claim(PROMPT)
    assert again.manager.prefetch(context)
    settled(again)  # what there is, is known
    store.may.clear()
    assert again.manager.prefetch(context)
    now += 2.01
    assert not again.manager.prefetch(context)
    store.may.set()
    settled(again)
    assert again.manager.metrics.object_blocks_read == 8
    assert again.manager.maybe_reserve(context)
    assert context.start_idx == 32
    again.run(context)


@pytest.mark.parametrize("failing", [True, False])
def test_a_store_that_fails_costs_a_request_nothing(served: Make, store: StoredObjects, *, failing: bool) -> None:
    store.fails = failing
    it = served()
    for first in range(5):
        fetch(it, [first, *PROMPT])
        it.serve([first, *PROMPT])
    it.manager.flush_tiers()
    assert it.manager.metrics.object_store_failures == failing
    assert (it.manager.metrics.object_blocks_written == 0) == failing
    it.manager.check()


def test_a_reset_finds_no_object_of_before_here_or_after_a_restart(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.flush_tiers()
    it.manager.reset_prefix_cache()
    fetch(it, PROMPT)
    assert it.serve(PROMPT) == 0
    it.manager.close()
    assert len(store.pages) == 4
    again = served()
    fetch(again, PROMPT)
    assert again.serve(PROMPT) == 32
    again.manager.reset_prefix_cache()
    again.manager.close()
    third = served()
    fetch(third, PROMPT)
    assert third.serve(PROMPT) == 0


def test_a_reset_drops_what_is_being_read(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.close()
    again = served(params={"object_tier_timeout_s": 60.0})
    settled(again)
    tier = objects_of(again)
    context = again.claim(PROMPT)
    store.may.clear()
    assert again.manager.prefetch(context)  # an answer that came at once would have been taken up by this call
    asked = tier._jobs[0]
    store.may.set()
    asked.done.result()
    store.may.clear()
    assert again.manager.prefetch(context)  # takes the answer up, and reads
    assert tier.held_slots[0].size == 8
    again.manager.reset_prefix_cache()
    again.manager.check()
    store.may.set()
    settled(again)
    assert again.manager.metrics.object_blocks_read == 0
    assert not again.tiers.host.pool.index.published.any()
    again.manager.release(context.request_id)


def test_an_answer_from_before_a_reset_leaves_what_was_asked_after_it(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.close()
    again = served(params={"object_tier_timeout_s": 60.0})
    settled(again)
    tier = objects_of(again)
    store.may.clear()
    context = again.claim(PROMPT)
    assert again.manager.prefetch(context)
    first = tier._jobs[0]
    again.manager.reset_prefix_cache()
    assert again.manager.prefetch(context)  # asks anew, and of the same objects
    busy = dict(tier._busy)
    assert busy
    assert first.names == [*busy]
    assert [job.names for job in tier._jobs] == [first.names, first.names]
    again.manager.check()
    held = tier._jobs.popleft()  # only the answer of before comes
    store.may.set()
    held.done.result()
    tier._end(held)
    assert tier._busy == busy
    assert not tier._known
    again.manager.check()
    settled(again)
    assert not tier._busy
    again.manager.release(context.request_id)


def test_a_reset_is_told_when_the_store_answers_again(served: Make, store: StoredObjects) -> None:
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
    fetch(again, PROMPT)
    assert again.serve(PROMPT) == 0


def test_an_epoch_that_is_broken_is_a_miss_until_a_reset(served: Make, store: StoredObjects) -> None:
    it = served()
    it.serve(PROMPT)
    it.manager.reset_prefix_cache()
    it.serve(PROMPT)
    it.manager.close()
    (current,) = store.objects.keys() - store.pages.keys()
    for content in (b"", b"?" * 32, store.objects[current][:-1], store.objects[current] + b"?"):
        store.objects[current] = content
        again = served()
        fetch(again, PROMPT)
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


def test_files_come_before_objects(served: Make, store: StoredObjects, tmp_path: Path) -> None:
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-3}
    it = served(params=files)
    it.serve(range(17))
    it.manager.close()
    other = served()
    other.serve(PROMPT)
    other.manager.close()
    assert len(store.pages) == 2
    store.read_bytes = 0
    again = served(params=files)
    fetch(again, PROMPT)
    assert again.serve(PROMPT) == 32
    assert (again.manager.metrics.file_blocks_read, again.manager.metrics.object_blocks_read) == (4, 4)
    assert store.read_bytes == COUNT * objects_of(again)._layout.record_bytes


def test_a_prompt_larger_than_the_host_tier_is_not_read_again_and_again(served: Make) -> None:
    it = served(16, 40)
    it.serve(range(61))
    it.manager.close()
    again = served(16, 10)
    for _ in range(5):
        fetch(again, range(61))
    assert again.tiers.host.pool.index.published.sum() == again.manager.metrics.object_blocks_read == 4
    assert again.serve(range(61)) == 16


def test_reads_leave_half_of_the_free_slots_to_writes(served: Make, store: StoredObjects) -> None:
    it = served(16, 40)
    it.serve(range(61))
    it.manager.close()
    again = served(16, 40, checks=False)
    held = again.tiers.host.pool.allocate(40)
    context, tier = again.claim(range(61)), objects_of(again)
    again.manager.prefetch(context)
    settled(again)  # it knows what there is, and has no room for it
    again.tiers.host.pool.release(held[:5])
    held = held[5:]
    store.may.clear()
    for _ in range(3):
        again.manager.prefetch(context)
    assert sum(map(len, tier.held_slots)) == 2
    store.may.set()
    again.manager.release(context.request_id)
    settled(again)
    again.tiers.host.pool.release(held)


def test_reading_is_done_where_it_pays() -> None:
    rates = ReadRates(0.010)
    assert rates.pays(100, 0, 0.0)  # nothing is known yet
    rates.asked(0.020)
    rates.fetched(10, 0.070)
    assert rates.page_s == pytest.approx(0.005)
    assert rates.pays(5, 0, 1.0)
    assert not rates.pays(5, 5, 1000.0) or not rates.pays(5, 5, 1000.0)
    assert rates.pays(3, 0, 2000.0)  # once in a while all the same
    assert not rates.pays(3, 0, 2029.0)
    assert rates.pays(3, 0, 2031.0)
    for _ in range(40):
        rates.fetched(10, 0.020 + 10 * 0.001)
    assert rates.pays(3, 0, 2032.0)
    assert ReadRates(None).pays(1, 10**9, 0.0)


def test_a_store_slower_than_the_model_is_not_read(served: Make) -> None:
    it = served()
    it.serve(PROMPT)
    it.serve([7, *PROMPT])
    it.manager.close()
    again = served(params={"object_tier_tokens_per_s": 1e9})
    fetch(again, PROMPT)
    assert again.manager.metrics.object_blocks_read == 8  # the first is measured
    objects_of(again).rates._tried = time.monotonic()
    fetch(again, [7, *PROMPT])
    assert again.serve([7, *PROMPT]) == 0
    assert again.manager.metrics.object_blocks_read == 8


def test_a_store_is_not_flooded(served: Make, store: StoredObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED", 3)
    it = served(16, 40)
    settled(it)
    store.may.clear()
    for first in range(4):
        it.serve([first, *PROMPT])
    it.tiers.settle()
    assert len(objects_of(it)._queue) <= 3
    store.may.set()
    it.manager.flush_tiers()
    assert 1 <= len(store.pages) <= 5


def test_check_recounts_what_is_asked_for(served: Make) -> None:
    it = served(checks=False)
    settled(it)
    objects_of(it)._busy[b"?"] = 0.0
    with pytest.raises(InvariantError, match="0 objects are asked for or read, 1 marked"):
        it.manager.check()
    objects_of(it)._busy.clear()


def test_a_manager_without_objects_has_no_thread_and_asks_nobody() -> None:
    it = Served(8, 40)
    assert it.tiers.lower == []
    assert not it.manager.prefetch(it.claim(PROMPT))


def test_random_prompts_over_four_tiers(
    served: Make, store: StoredObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two managers on one store, small on every tier; every cached token is compared, all books after each move."""
    monkeypatch.setattr(module, "_ABSENT_S", 0.01)
    rng = np.random.default_rng(8)
    files = [{}, {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 9000 / 2**30}]
    both = [served(12, 24, params=one, checks=False) for one in files]
    for move in range(300):
        it = both[int(rng.integers(2))]
        prompt, salt = [int(rng.integers(9)), *range(int(rng.integers(1, 44)))], [None, "t"][rng.integers(2)]
        if rng.random() < 0.7:
            fetch(it, prompt, salt)
        it.serve(prompt, salt=salt)
        it.manager.check()
        if rng.random() < 0.05 and store.pages:
            key = sorted(store.pages)[int(rng.integers(len(store.pages)))]
            store.objects[key] = damaged(store, key, "flipped", rng) or b""
        if move % 100 == 99:
            it.manager.reset_prefix_cache()
    for it in both:
        assert it.manager.metrics.object_blocks_written > 20
        assert it.manager.metrics.object_blocks_read > 20
        assert it.kv.compared > 300
