"""Tests the promises of the object tier, for one block table, for several block tables, and for states together with
the pages before them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvcache import LayerGroup
from tests.kvcache.replica.tables_below import TWO, WINDOW
from tests.kvcache.served import Served, until
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

# The window of 22 tokens takes six pages, which are in two objects.
LONG = LayerGroup("full", (0,)), LayerGroup("window", (1,), 22)
Make = Callable[..., Served]


class Kind(NamedTuple):
    """A kind of content for the store, with a prompt that has such content.

    Attributes:
        served: the class of the managers.
        sizes: the sizes of the managers' tiers. `many` has larger sizes, which are enough for a few such prompts.
        prompt: some full pages, and further tokens.
        found: cached tokens that another machine finds.
        read: how many pages and states that machine reads for them.
        objects: the objects of the prompt. For each, the key has the page where the object ends, its table, and whether
            it is a state; the value is how many tokens are found without the object.
        groups: the layer groups, if there is more than one table.
    """

    served: type[Served]
    sizes: tuple[int, ...]
    many: tuple[int, ...]
    prompt: range
    found: int
    read: tuple[int, int]
    objects: dict[tuple[int, int, bool], int]
    groups: tuple[LayerGroup, ...] = ()


_TABLE = {(4, 0, False): 0, (8, 0, False): 16, (12, 0, False): 32}
# There is only one state, so each missing object costs the whole prefix.
_STATES = dict.fromkeys([(4, 0, False), (8, 0, False), (10, 0, False), (10, 0, True)], 0)
KINDS = {
    "one table": Kind(Served, (12, 40), (40, 80), range(33), 32, (8, 0), {(4, 0, False): 0, (8, 0, False): 16}),
    # Token 48 sees tokens 43 to 47 of the window, which are in two pages of the last object.
    "window": Kind(Served, (60, 120), (80, 160), range(51), 48, (14, 0), {**_TABLE, (12, 1, False): 32}, groups=WINDOW),
    "two tables beside": Kind(Served, (60, 120), (80, 160), range(51), 48, (26, 0), {}, groups=TWO),
    "long window": Kind(Served, (60, 120), (80, 160), range(51), 48, (18, 0), {}, groups=LONG),
    "states": Kind(ServedStates, (80, 120, 12), (160, 240, 30), range(43), 40, (10, 1), _STATES),
}
PAGES = ("one table", "window")


@pytest.fixture(params=["one table", "window", "states"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def served(store: StoredObjects, kind: Kind) -> Make:
    def make(*sizes: int, params: dict[str, Any] | None = None, **options: Any) -> Served:
        if kind.groups:
            params = {"groups": kind.groups, **(params or {})}
            options["layers"] = sum(len(group.layers) for group in kind.groups)
        return store.machine(kind.served, *(sizes or kind.sizes), params=params, **options)

    return make


def serve(it: Served, prompt: range | list[int]) -> int:
    """Serves a prompt. If there are windows, the prompt runs in chunks, so that each page is written to the store
    before it leaves its window.
    """
    return it.serve(prompt, chunk=8 if it.manager.layer_tables.tables[1:] else 256)


def written(served: Make, prompt: range | list[int], *sizes: int, **options: Any) -> Served:
    """Returns a manager that has served the prompt, has written all of its objects, and was closed."""
    it = served(*sizes, **options)
    assert serve(it, prompt) == 0
    it.manager.close()
    return it


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_a_new_machine_goes_on_from_what_was_written(served: Make, kind: Kind) -> None:
    written(served, kind.prompt)
    again = served()
    assert again.again(kind.prompt) == kind.found
    metrics = again.manager.metrics
    assert (metrics.object_blocks_read, metrics.object_states_read) == kind.read
    assert metrics.object_blocks_refused == metrics.object_store_failures == 0
    assert again.kv.compared >= kind.found


def test_a_slow_store_is_waited_for_no_longer_than_its_timeout(served: Make, kind: Kind, store: StoredObjects) -> None:
    written(served, kind.prompt)
    patient = served()
    settled(patient)
    store.is_not_waited_for(lambda: patient.manager.maybe_reserve(patient.claim(kind.prompt)))
    patient.manager.close()
    again = served(params={"object_tier_timeout_s": 2.0})
    settled(again)
    store.may.clear()
    context = again.claim(kind.prompt)
    assert again.manager.maybe_reserve(context)
    again.manager.release(context.request_id)
    again.fetch(kind.prompt)
    assert serve(again, kind.prompt) == 0
    settled(again)
    now = max(tier._paused_until for tier in tiers_of(again)) - 0.1
    for tier in tiers_of(again):
        tier._clock = lambda: now
    store.may.set()
    assert again.manager.metrics.object_store_failures == len(tiers_of(again))
    calls = len(store.calls)
    again.fetch([5, *kind.prompt])  # After a failure the manager does not ask the store again.
    serve(again, [5, *kind.prompt])
    again.tiers.store_all()
    assert not any(tier._queue for tier in tiers_of(again))
    assert len(store.calls) == calls
    now += 0.2  # the pause is over
    again.fetch([6, *kind.prompt])
    assert len(store.calls) > calls


def test_a_manager_can_be_closed_while_the_store_has_not_answered(
    served: Make, kind: Kind, store: StoredObjects
) -> None:
    written(served, kind.prompt)
    again = served()
    settled(again)
    store.may.clear()
    assert again.manager.maybe_reserve(again.claim(kind.prompt))
    (job,) = objects_of(again)._reader.jobs
    until(job.work.running)
    threading.Timer(0.05, store.may.set).start()
    again.manager.close()  # `close` waits for the answer. After this answer, pages would have been read.
    assert job.work.done()
    assert again.manager.metrics.object_blocks_read == 0


@pytest.mark.parametrize(
    ("kind", "known"),
    [*((kind, known) for kind in PAGES for known in (True, False)), ("states", True)],
    indirect=["kind"],
)
def test_an_answer_that_comes_too_late_helps_the_next_request(
    served: Make, kind: Kind, store: StoredObjects, known: bool
) -> None:
    written(served, kind.prompt)
    again = served()
    again.fetch(kind.prompt if known else kind.prompt[:3])
    forget_host(again)
    again.manager.reset_metrics()
    now = time.monotonic()
    for tier in tiers_of(again):
        tier._clock = lambda: now
    store.may.clear()
    context = again.claim(kind.prompt)
    assert again.manager.prefetch(context)
    now += 60.01
    assert not again.manager.prefetch(context)
    store.may.set()
    settled(again)
    if not known:
        again.fetch(kind.prompt)
    metrics = again.manager.metrics
    assert (metrics.object_blocks_read, metrics.object_states_read) == kind.read
    assert again.manager.maybe_reserve(context)
    assert context.start_idx == kind.found
    again.run(context)
    again.manager.release(context.request_id)


@pytest.mark.parametrize("failing", [True, False])
def test_a_failing_store_leads_only_to_misses(served: Make, kind: Kind, store: StoredObjects, *, failing: bool) -> None:
    store.fails = failing
    it = served()
    for first in range(5):
        it.fetch([first, *kind.prompt])
        assert serve(it, [first, *kind.prompt]) == 0
    it.manager.flush_tiers()
    assert bool(it.manager.metrics.object_store_failures) == failing
    assert (it.manager.metrics.object_blocks_written == 0) == failing
    assert bool(store.pages) != failing


@pytest.mark.parametrize("kind", PAGES, indirect=True)
def test_a_store_that_fails_during_a_read_is_left_alone(served: Make, kind: Kind, store: StoredObjects) -> None:
    written(served, kind.prompt)
    again = served()
    again.fetch(kind.prompt)
    forget_host(again)
    store.fails = True
    calls = len(store.calls)
    again.fetch(kind.prompt)
    again.fetch(kind.prompt)
    assert store.calls[calls:] == ["read"]
    assert again.serve(kind.prompt) == 0
    assert again.manager.metrics.object_store_failures == 1


def test_after_a_reset_no_earlier_object_is_found_even_after_a_restart(
    served: Make, kind: Kind, store: StoredObjects
) -> None:
    it = served()
    serve(it, kind.prompt)
    it.manager.flush_tiers()
    it.manager.reset_prefix_cache()
    it.fetch(kind.prompt)
    before = len(store.pages)
    assert serve(it, kind.prompt) == 0
    it.manager.close()
    assert len(store.pages) == 2 * before > 0
    again = served()
    assert again.again(kind.prompt) == kind.found
    again.manager.reset_prefix_cache()
    again.manager.close()
    assert served().again(kind.prompt) == 0


def test_pages_in_files_are_read_before_the_store_is_asked(served: Make, kind: Kind, tmp_path: Path) -> None:
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-3}
    written(served, kind.prompt[:19], params={**files, "object_tier_io": None})
    written(served, kind.prompt)
    again = served(params=files)
    assert again.again(kind.prompt) == kind.found
    metrics = again.manager.metrics
    # The files provide the last two window pages of the prefix that was known before the store answered.
    windows = 2 * len(kind.groups[1:])
    assert metrics.file_blocks_read == 4 + windows
    assert metrics.object_blocks_read == kind.read[0] - 4
    assert (metrics.file_states_read, metrics.object_states_read) == (0, kind.read[1])


@pytest.mark.parametrize(("kind", "host_slots"), [("one table", 10), ("window", 28)], indirect=["kind"])
def test_an_object_is_not_written_if_the_host_has_lost_one_of_its_pages(
    served: Make, kind: Kind, store: StoredObjects, host_slots: int
) -> None:
    store.may.clear()
    it = served(kind.sizes[0], host_slots)
    serve(it, kind.prompt)
    it.tiers.store_all()
    objects = len(objects_of(it)._queue)
    assert objects == len(kind.prompt) // 4 // COUNT * max(1, len(kind.groups))
    serve(it, [7, *range(14)])
    it.tiers.store_all()
    store.may.set()
    it.manager.flush_tiers()
    assert 0 < len(store.pages) < objects
    assert len(store.pages) * COUNT == it.manager.metrics.object_blocks_written


@pytest.mark.parametrize("kind", PAGES, indirect=True)
def test_only_pages_that_the_host_lacks_are_read(served: Make, kind: Kind, store: StoredObjects) -> None:
    written(served, kind.prompt)
    again = served()
    serve(again, kind.prompt[:27])  # six pages
    settled(again)
    store.read_bytes = 0
    again.manager.reset_metrics()
    again.fetch(kind.prompt)
    assert again.manager.metrics.object_blocks_read == kind.read[0] - 6
    assert store.read_bytes == (kind.read[0] - 6) * objects_of(again)._layout.record_bytes
    assert again.serve(kind.prompt) == kind.found


@pytest.mark.parametrize(
    ("kind", "host_slots", "read"), [("one table", 10, 4), ("window", 20, 4 + 2)], indirect=["kind"]
)
@pytest.mark.usefixtures("kind")
def test_a_prompt_larger_than_the_host_tier_is_not_read_repeatedly(served: Make, host_slots: int, read: int) -> None:
    prompt = KINDS["window"].prompt
    written(served, prompt, 60, 120)
    again = served(60, host_slots)
    for _ in range(5):
        again.fetch(prompt)
    assert again.tiers.host.pool.index.published.sum() == again.manager.metrics.object_blocks_read == read
    assert again.serve(prompt) == 16


@pytest.mark.parametrize("kind", PAGES, indirect=True)
def test_pages_are_not_read_twice_at_a_time_and_reads_leave_half_of_the_free_slots_to_writes(
    served: Make, kind: Kind, store: StoredObjects
) -> None:
    written(served, kind.prompt)
    again = served(checks=False)
    slots = kind.sizes[1]
    held = again.tiers.host.pool.allocate(slots)
    context, tier = again.claim(kind.prompt), objects_of(again)
    # The manager knows which objects exist, but the host has no free slots for them.
    until(lambda: not again.manager.prefetch(context))
    again.tiers.host.pool.release(held[:11])
    store.may.clear()
    assert again.manager.prefetch(context)
    assert [*map(len, tier.held_slots)] == [5]
    for _ in range(3):
        assert again.manager.prefetch(context)
    assert sum(map(len, tier.held_slots)) < 11
    store.may.set()
    settled(again)
    again.tiers.host.pool.release(held[11:])
    again.fetch(kind.prompt)
    assert again.manager.metrics.object_blocks_read == kind.read[0]
    again.manager.release(context.request_id)


@pytest.mark.each_value
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_object_shortens_the_prefix_and_is_replaced_by_the_next_write(
    served: Make, kind: Kind, store: StoredObjects, how: str
) -> None:
    rng = np.random.default_rng(3)
    it = written(served, kind.prompt)
    right = dict(store.pages)
    for (pages, table, state), without in kind.objects.items():
        store.damage(key_of(it, kind.prompt, pages, table, state=state), how, rng)
        broken = dict(store.pages)
        again = served()
        again.fetch(kind.prompt)
        found = serve(again, kind.prompt)
        assert found == kind.found if how == "longer" else without <= found < kind.found, (pages, table, state)
        again.manager.close()
        # A request that starts at another token also leaves states at other tokens.
        kept = {key: store.objects[key] for key in right}
        assert kept == (broken if how == "longer" else right), (pages, table, state)
        store.objects |= right
        for key in store.pages.keys() - right.keys():
            del store.objects[key]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [*((kind, 8) for kind in KINDS), pytest.param("one table", 1500, marks=pytest.mark.long)],
    indirect=["kind"],
)
def test_damaged_objects_are_misses(served: Make, kind: Kind, store: StoredObjects, rounds: int) -> None:
    """Objects are damaged after they were written: most of the states, but only a few objects with pages. The KV and
    states of every read object are compared.
    """
    rng, seen, refused, compared, damages = np.random.default_rng(5), set[str](), 0, 0, 0
    for number in range(rounds):
        params = {"file_tier_key": f"{number}"}
        it, prompts = served(*kind.many, params=params), [[first, *range(35)] for first in range(4)]
        for prompt in prompts:
            serve(it, prompt)
        it.manager.close()
        last, of_pages = tiers_of(it)[-1], objects_of(it)._layout.page.namespace.hex()
        for key in sorted(store.pages):
            if last is objects_of(it) or rng.random() < (0.15 if key.startswith(of_pages) else 0.9):
                damages += store.damage(key, DAMAGE[int(rng.integers(len(DAMAGE)))], rng)
        again = served(*kind.many, params=params)
        for prompt in prompts * 2:
            again.fetch(prompt)
            serve(again, prompt)  # `serve` compares the KV.
        again.manager.check()
        metrics = again.manager.metrics
        seen |= {refusal.value for refusal in tiers_of(again)[-1].refusals}
        refused += metrics.object_blocks_refused + metrics.object_states_refused
        compared += again.kv.compared
        assert metrics.object_store_failures == 0
        again.manager.close()
        store.objects.clear()
    assert seen == {"gone", "cut", "foreign", "corrupted"}
    assert damages > 4 * rounds
    assert refused > rounds
    assert compared > 0
