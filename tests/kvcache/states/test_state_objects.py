"""Recurrent states over an object store.

Each state is an object. A request finds the pages of its prompt up to the last state.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.states import state_pages as module
from kvcache.tiers.object_tier import ObjectTier
from tests.kvcache.served import SIZE
from tests.kvcache.states.served_states import STATE_BYTES, ServedStates
from tests.kvcache.tiers.stored_objects import COUNT, StoredObjects, key_of, settled, tiers_of

# The prompt has ten full pages and three more tokens: two full objects, and one object of two pages.
PROMPT = range(43)
Make = Callable[..., ServedStates]


@pytest.fixture
def served(store: StoredObjects) -> Make:
    def make(*sizes: int, **options: Any) -> ServedStates:
        return store.machine(ServedStates, *sizes, **options)

    return make


def written(served: Make, *prompts: Iterable[int], new: int = 1, **options: Any) -> ServedStates:
    """Returns a manager that has served these prompts and written their objects, and is closed."""
    it = served(**options)
    for prompt in prompts or [PROMPT]:
        it.serve(prompt, new=new)
    it.manager.close()
    return it


@pytest.mark.each_value
@pytest.mark.parametrize("slabs", [True, False])
@pytest.mark.parametrize("length", [3, 4, 5, 16, 17, 20, 21, 33, 43])
def test_a_new_machine_resumes_prompts_with_the_store_alone(served: Make, slabs: bool, length: int) -> None:
    """A manager with states among its pages finds the objects of a manager with separate states, and the other way
    round.
    """
    pages, full = (length - 1) // SIZE, length // SIZE
    wrote = written(served, range(length), slabs=slabs).manager.metrics
    # There are two states: one after the last page from which other prompts can continue, and one after the last full
    # page.
    places = {pages, full} - {0}
    assert wrote.object_states_written == len(places)
    assert wrote.object_blocks_written == full // COUNT * COUNT + sum(place % COUNT for place in places)
    again = served(slabs=not slabs)
    assert again.again(range(length)) == pages * SIZE
    metrics = again.manager.metrics
    assert (metrics.object_states_read, metrics.object_blocks_read) == (pages > 0, pages)
    assert (metrics.h2d_states_copied, metrics.state_hits) == (pages > 0, pages > 0)
    assert metrics.object_states_refused == metrics.object_blocks_refused == metrics.object_store_failures == 0
    assert again.compared == (pages > 0)
    again.manager.check()


def test_continued_conversations_and_common_beginnings_of_prompts_are_found(served: Make) -> None:
    system, new = [*range(50, 80)], 12
    asked = [[*system, *range(at * 10, at * 10 + 7)] for at in range(3)]
    # The second prompt diverges from the first prompt here, so a state is kept here.
    written(served, *asked[:2], new=new)
    again = served()
    turn = [*asked[0], *[1] * new, 5, 6, 7]
    # The last token of the answer has never run, so no page contains its KV.
    assert again.again(turn) == (len(asked[0]) + new - 1) // SIZE * SIZE
    assert again.again(asked[1]) == (len(asked[1]) - 1) // SIZE * SIZE
    assert again.again([*asked[1], 3, 3, 3]) == len(asked[1]) // SIZE * SIZE
    assert again.again(asked[2]) == len(system) // SIZE * SIZE
    assert again.manager.metrics.object_states_read == 3  # One of the three states is at the end of the second answer.


def test_an_intermediate_state_is_found_by_a_prompt_that_continues_differently(served: Make) -> None:
    written(served, PROMPT, every=3)
    again = served()
    # The prompt finds nine pages. There are states after three, six and nine pages.
    other = [*range(39), 99, 98, 97, 96]
    assert again.again(other) == 36
    # The prompt finds eight pages. An object ends after page 8, but no state was kept there.
    assert again.again([*range(35), 99, 98, 97]) == 24
    assert again.again([*range(23), 99, 98, 97]) == 12  # The prompt finds five pages. No object ends after page 5.


def test_no_request_resumes_from_pages_without_a_state_or_from_a_state_without_pages(
    served: Make, store: StoredObjects
) -> None:
    it = written(served)
    for state in (True, False):
        gone = key_of(it, PROMPT, 10, state=state)
        kept = store.objects.pop(gone)
        again = served()
        assert again.again(PROMPT) == 0
        assert again.manager.metrics.object_states_read == 0
        again.manager.close()
        assert gone in store.objects  # it was computed
        store.objects[gone] = kept


def test_a_state_object_is_not_mistaken_for_a_page_object(served: Make, store: StoredObjects) -> None:
    """If an object has only one page, its digest is equal to the digest of the state after this page."""
    written(served, params={"object_tier_pages": 1})
    namespaces = Counter(key.split("/")[0] for key in store.pages)
    assert sorted(namespaces.values()) == [1, 10]
    again = served(params={"object_tier_pages": 1})
    assert again.again(PROMPT) == 40
    other = served()
    other.fetch(PROMPT)  # The store has the state, but none of the pages.
    assert other.serve(PROMPT) == 0
    assert other.manager.metrics.object_states_read == 0


def test_the_store_is_not_asked_for_states_of_a_prompt_without_stored_pages(served: Make, store: StoredObjects) -> None:
    it = served(params={"object_tier_pages": 1})
    settled(it)
    store.calls.clear()
    assert it.again(PROMPT) == 0
    settled(it)
    assert store.calls[0] == "exist"
    assert "read" not in store.calls
    assert tiers_of(it)[1].rates.answer_s == 0.0


def test_the_store_is_asked_in_few_rounds(served: Make, store: StoredObjects) -> None:
    written(served)
    again = served()
    settled(again)
    store.calls.clear()
    again.fetch(PROMPT)
    # The store gets one question and one read for the pages, and one of each for the states.
    assert sorted(store.calls) == ["exist", "exist", "read", "read"]
    again.fetch(PROMPT)
    assert len(store.calls) == 4


def test_a_shorter_last_object_of_pages_is_read_together_with_the_state_after_it(
    served: Make, store: StoredObjects
) -> None:
    written(served)
    again = served()
    again.fetch(PROMPT)
    for tiers in (again.tiers, again.state_tiers):
        tiers.host.pool.forget()  # The tiers still remember which objects the store has.
    store.may.clear()
    assert again.manager.prefetch(again.waiting(PROMPT))
    assert [[len(slots) for slots in tier.held_slots] for tier in tiers_of(again)] == [[10], [1]]
    store.may.set()
    settled(again)
    assert again.again(PROMPT) == 40


def test_for_a_prompt_larger_than_the_host_the_state_after_its_first_pages_is_read(served: Make) -> None:
    """The manager may read six pages at a time, which is one object. Seven pages were written, with states after four
    and after seven pages.
    """
    it, prompt = served(80, 12, slabs=False, every=4), PROMPT[:29]
    assert it.serve(prompt) == 0
    it.manager.flush_tiers()
    for pool in (it.manager._replicas.each[0].pool, it.manager.states[0].pool):
        pool.release(pool.allocate(pool.free_count))
    for tiers in (it.tiers, it.state_tiers):
        tiers.host.pool.forget()  # The process that has written the objects knows all of them.
    assert it.again(prompt) == 16
    assert (it.manager.metrics.object_blocks_read, it.manager.metrics.object_states_read) == (4, 1)


def test_the_store_is_asked_for_older_states_a_few_at_a_time(
    served: Make, store: StoredObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOKED_AT", 4)
    written(served, range(9))
    it = written(served, PROMPT)
    del store.objects[key_of(it, PROMPT, 10, state=True)]
    again = served()
    settled(again)
    store.calls.clear()
    assert again.again(PROMPT) == 8
    asked = [call for call in store.calls if call != "read"]
    # The manager asks once for pages. It asks three times for states: after pages 7 to 10, after pages 3 to 6, and
    # after the first two pages.
    assert len(asked) >= 4


def test_a_state_after_more_pages_than_fit_into_the_host_is_found(served: Make) -> None:
    """States are read one at a time. A state can therefore be read even if the host has too few slots for the pages
    before it.
    """
    prompt = range(203)
    written(served, prompt)
    again = served(80, 120, 2)
    assert again.again(prompt) == 200


def test_the_newest_state_of_files_and_store_is_taken(served: Make, tmp_path: Path) -> None:
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-3}
    early, late = PROMPT[:19], PROMPT
    for in_files, in_store, found in ((early, late, 40), (late, early, 40)):
        one = {"file_tier_key": f"{len(in_files)}"}
        only_files = files | one | {"object_tier_io": None}
        written(served, in_files, params=only_files)
        written(served, in_store, params=one)
        again = served(params=files | one)
        assert again.again(late) == found
        metrics = again.manager.metrics
        assert (metrics.file_states_read, metrics.object_states_read) == ((0, 1) if in_files is early else (1, 0))
        again.manager.close()


@pytest.mark.parametrize(
    ("how", "why"),
    [("gone", "gone"), ("empty", "gone"), ("cut", "cut"), ("noise", "foreign"), ("flipped", "corrupted")],
)
def test_a_damaged_newest_state_leaves_the_one_before_it_and_is_written_again(
    served: Make, store: StoredObjects, how: str, why: str
) -> None:
    written(served, PROMPT[:21])
    it = written(served)
    right, key = dict(store.pages), key_of(it, PROMPT, 10, state=True)
    again = served()
    again.fetch(PROMPT)
    again.state_tiers.host.pool.forget()  # The manager remembers that the store has the state.
    if how == "gone":
        del store.objects[key]
    else:
        content = bytearray(right[key])
        content[0] ^= 1
        broken = {"empty": b"", "cut": content[:100], "noise": bytes([7]) * len(content), "flipped": content}
        store.objects[key] = bytes(broken[how])
    assert again.again(PROMPT) == 20
    assert again.manager.metrics.object_states_refused == 1
    assert tiers_of(again)[1].refusals == {why: 1}
    again.manager.close()
    assert store.pages == right


def test_damaged_pages_at_a_runs_end_leave_the_state_before_it(served: Make, store: StoredObjects) -> None:
    written(served, PROMPT[:37])  # nine pages
    it = written(served)
    right, key = dict(store.pages), key_of(it, PROMPT, 10, state=False)
    again = served()
    settled(again)
    store.objects[key] = bytes(len(right[key]))
    assert again.again(PROMPT) == 36
    assert again.manager.metrics.object_blocks_refused == 2
    again.manager.close()
    assert store.pages == right


@pytest.mark.parametrize("which", ["states", "pages", "both"])
def test_a_store_that_fails_after_the_lookup_is_left_alone(served: Make, store: StoredObjects, which: str) -> None:
    written(served)
    again = served()
    again.fetch(PROMPT)  # The contents of the store are known, so pages and states are read at once.
    for tiers, name in ((again.tiers, "pages"), (again.state_tiers, "states")):
        if which in (name, "both"):
            tiers.host.pool.forget()
    store.fails = True
    calls = len(store.calls)
    again.fetch(PROMPT)
    again.fetch(PROMPT)
    settled(again)  # After the read of the state has failed, no request waits for the pages any more.
    # If both reads fail, the read of the state may have begun before the read of the pages failed.
    tried = store.calls[calls:]
    assert set(tried) == {"read"}
    assert len(tried) == 1 or (which == "both" and len(tried) == 2)
    assert again.serve(PROMPT) == 0
    assert again.manager.metrics.object_store_failures == len(tried)
    again.manager.close()


def test_files_serve_while_the_store_is_dead(served: Make, store: StoredObjects, tmp_path: Path) -> None:
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-3}
    written(served, params=files)
    store.fails = True
    again = served(params=files)
    assert again.again(PROMPT) == 40
    assert again.manager.metrics.file_states_read == 1


def test_reading_a_state_does_not_evict_the_state_from_which_the_request_resumes_meanwhile(
    served: Make, store: StoredObjects
) -> None:
    """The host has room for two states. The request resumes from the older of the two."""
    early, other = PROMPT[:21], [99, *PROMPT]
    written(served, early, PROMPT, other)
    again = served(80, 120, 2)
    again.fetch(PROMPT)  # The manager now remembers which objects the store has.
    for tiers in (again.tiers, again.state_tiers):
        tiers.host.pool.forget()
    again.fetch(early)
    again.fetch(other)
    assert again.state_tiers.host.pool.free_count == 2
    store.is_not_waited_for(lambda: again.serve(PROMPT) == 20)
    settled(again)
    assert again.manager.metrics.object_states_read == 4


def test_a_full_host_reads_no_state_and_refuses_nothing(served: Make) -> None:
    written(served)
    again = served(80, 120, 2, checks=False)  # The checks do not know that this test holds slots.
    pool = again.state_tiers.host.pool
    slots = pool.allocate(2)
    assert again.again(PROMPT) == 0
    assert again.manager.metrics.object_states_read == 0
    pool.release(slots)
    again.manager.reset_prefix_cache()


def test_a_state_is_read_once_a_full_host_has_room_again(served: Make) -> None:
    written(served)
    again = served(80, 120, 2, checks=False)
    pool = again.state_tiers.host.pool
    slots = pool.allocate(2)
    again.fetch(PROMPT)
    pool.release(slots)
    assert again.again(PROMPT) == 40


def test_replicas_share_what_comes_from_the_store(served: Make) -> None:
    written(served)
    again = served(dp=2)
    again.fetch(PROMPT)
    assert again.serve(PROMPT, replica=1) == 40
    assert again.serve(PROMPT, replica=0) == 40
    assert again.manager.metrics.object_states_read == 1
    assert again.manager.metrics.h2d_states_copied == 2


@pytest.mark.parametrize("pays", [True, False])
def test_a_state_is_read_if_computing_the_pages_before_it_would_take_longer(served: Make, pays: bool) -> None:
    """A read takes half a second.

    Computing ten pages takes one second in one case, and a tenth of a second in the other.
    """
    it = written(served)
    again = served(params={"object_tier_tokens_per_s": 40.0 if pays else 400.0})
    pages, states = tiers_of(again)
    settled(again)
    pages.rates.page_s, states.rates.page_s = 0.0, 0.5
    states.rates._is_measured, states.rates._tried = True, time.monotonic()
    assert again.again(PROMPT) == (40 if pays else 0)
    assert again.manager.metrics.object_states_read == pays
    assert it.manager.metrics.object_states_written == 1


def test_an_object_is_as_large_as_a_state_and_its_row(served: Make, store: StoredObjects) -> None:
    it = written(served)
    states, pages = (tiers_of(it)[at]._layout for at in (1, 0))
    sizes = sorted(map(len, store.pages.values()))
    assert sizes == sorted([STATE_BYTES + states.page.row_bytes, *[4 * pages.record_bytes] * 2, 2 * pages.record_bytes])


def longest(it: ServedStates, prompt: list[int], store: StoredObjects) -> int:
    """Returns how many tokens of a prompt must be found according to the documentation. The prompt is found up to the
    last state in any tier that has all earlier pages in some tier.
    """
    last = (len(prompt) - 1) // SIZE
    digests, (pages, states) = it.digests(prompt)[:last], tiers_of(it)
    assert it.tiers.host.pool.num_pages // 2 >= last

    def there(tiers: Any, on_device: Any, at: int) -> bool:
        indexes = [on_device, tiers.host.pool.index] + ([tiers.files.index] if tiers.files is not None else [])
        return any(index.find(digests[at : at + 1])[0] for index in indexes)

    def stored(tier: ObjectTier, end: int) -> bool:
        return end <= last and tier._layout.key(tier._epoch, digests[end - 1].tobytes()) in store.objects

    def has_page(at: int, end: int) -> bool:
        whole, of_pages = (at // COUNT + 1) * COUNT, it.manager._replicas.each[0].pool.index
        return there(it.tiers, of_pages, at) or stored(pages, whole) or (end < whole and stored(pages, end))

    for end in range(last, 0, -1):
        has_state = there(it.state_tiers, it.manager.states[0].pool.index, end - 1) or stored(states, end)
        if has_state and all(has_page(at, end) for at in range(end)):
            return end * SIZE
    return 0


@pytest.mark.few(1)
@pytest.mark.parametrize("slabs", [True, False])
def test_random_prompts_over_four_tiers(served: Make, store: StoredObjects, tmp_path: Path, slabs: bool) -> None:
    """Two managers with small tiers serve random prompts over one store. They must find as much as the model finds. All
    contents are compared.
    """
    rng, seen, now = np.random.default_rng(9), Counter[str](), time.monotonic()
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 200_000 / 2**30}
    both = [
        served(64, 70, 5, slabs=slabs, params=one, checks=False, every=every) for one, every in (({}, 0), (files, 3))
    ]
    for it in both:
        for tier in tiers_of(it):
            tier._clock = lambda: now
    for move in range(120):
        now += 11.0  # After 11 s the manager asks again for objects that were absent.
        for it in both:
            it.manager.flush_tiers()
            settled(it)
        it = both[int(rng.integers(2))]
        prompt = [int(rng.integers(9)), *range(int(rng.integers(1, 60)))]
        if rng.random() < 0.3:
            prompt += [int(rng.integers(3))] * int(rng.integers(1, 20))
        ends = range(1, len(prompt) // SIZE + 1)
        objects = store.objects.keys() & {key_of(it, prompt, end, state=one) for end in ends for one in (False, True)}
        # The numbers are drawn in each move, so that the prompts do not depend on the contents of the store.
        removes, which = rng.random(2)
        if objects and removes < 0.3:  # The manager may still expect the removed object in the store.
            del store.objects[sorted(objects)[int(which * len(objects))]]
        expected = longest(it, prompt, store)
        before, gone = it.manager.metrics, sum(tier.refusals.total() for tier in tiers_of(it))
        found = it.again(prompt, chunk=int(rng.integers(1, 80)), new=int(rng.integers(1, 9)))
        refused = sum(tier.refusals.total() for tier in tiers_of(it)) > gone
        # Pages that were read for a prefix that became shorter may have evicted pages that the shorter prefix needs.
        assert found == expected or (refused and found < expected), (move, prompt)
        after = it.manager.metrics
        seen["as expected"] += found == expected > 0
        seen["within an object"] += found // SIZE % COUNT > 0
        seen["with states of objects"] += after.object_states_read > before.object_states_read
        seen["with states of files"] += after.file_states_read > before.file_states_read
        seen["with pages of objects"] += after.object_blocks_read > before.object_blocks_read
        seen["refused"] += refused
        it.manager.check()
        if rng.random() < 0.3:
            it.fill(30)
        if rng.random() < 0.02:
            it.manager.reset_prefix_cache()
            seen["reset"] += 1
    least = {"as expected": 30, "within an object": 20, "with states of objects": 12, "with pages of objects": 12}
    least |= {"with states of files": 5, "refused": 2, "reset": 1}
    assert {event: seen[event] for event, count in least.items() if seen[event] < count} == {}
    assert all(it.compared > 20 and it.kv.compared > 300 for it in both)


class Late:
    """A tier that takes the results of its threads whenever a manager asks for its contents. An answer can therefore
    arrive between two questions.
    """

    def __init__(self, tier: ObjectTier, store: StoredObjects, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tier, self._store, self._has_of = tier, store, tier.has_of  # type: ignore[attr-defined]
        monkeypatch.setattr(tier, "has_of", self)

    def __call__(self, digests: Any, asked: Any, *, perhaps: bool) -> Any:
        if perhaps:
            self._store.may.set()
            for job in [*self._tier._reader.jobs]:
                job.work.exception()
        return self._has_of(digests, asked, perhaps=perhaps)


@pytest.mark.parametrize("announced", [True, False])
def test_an_answer_that_arrives_between_two_lookups_is_used(
    served: Make, store: StoredObjects, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    written(served)
    again = served()
    settled(again)
    states, digests = again.manager.states[0], again.digests(PROMPT)
    look = states.ask if announced else lambda some: states.bring_newest(some, wait=False)
    store.may.clear()
    assert look(digests)
    with monkeypatch.context() as patched:
        Late(tiers_of(again)[1], store, patched)
        assert look(digests)
    assert again.again(PROMPT) == 40


def test_a_state_that_arrives_between_two_lookups_is_not_read_again(
    served: Make, store: StoredObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(served)
    again = served()
    again.fetch(PROMPT)
    again.state_tiers.host.pool.forget()  # The manager remembers that the store has the state.
    states, digests = again.manager.states[0], again.digests(PROMPT)
    store.may.clear()
    assert states.bring_newest(digests, wait=False)
    with monkeypatch.context() as patched:
        Late(tiers_of(again)[1], store, patched)
        states.bring_newest(digests, wait=False)
    settled(again)
    assert again.again(PROMPT) == 40
    assert again.manager.metrics.object_states_read == 2


def test_only_states_later_than_what_is_known_are_asked_for(served: Make, store: StoredObjects) -> None:
    written(served)
    again = served()
    settled(again)
    states, (_, tier) = again.manager.states[0], tiers_of(again)
    digests = again.digests(PROMPT)
    assert states.ask(digests[9:])
    settled(again)
    keys, exist = list[str](), tier._read_io.exist
    tier._read_io.exist = lambda asked: keys.extend(asked) or exist(asked)  # type: ignore[method-assign]
    assert not states.ask(digests)  # The host already has the last state, so the manager does not ask the store.
    settled(again)
    assert keys == []
    del store.objects[key_of(again, PROMPT, 10, state=True)]
    store.fails = True
    tier._known.clear()
    assert states.ask(digests)
    settled(again)
    assert not states.ask(digests)  # The manager does not ask the store again.
    assert again.manager.metrics.object_store_failures == 1
