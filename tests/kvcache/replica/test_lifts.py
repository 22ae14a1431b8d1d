"""Several block tables over the host tier and files: what comes back, for which table, and what does not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import BlockTableMismatchError, InvalidParamsError, LayerGroup, PageDigests, Routing, TextContext
from kvcache.replica import lifts
from tests.kvcache.replica import test_further_imports as handed
from tests.kvcache.served import SIZE, Served

WINDOW = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)  # of 6 tokens: 2 pages of 4 tokens
TWO = LayerGroup("full", (0, 1)), LayerGroup("window", (2,), 6), LayerGroup("chunked", (3,), 8)
PROMPT = range(41)  # ten full pages and a token
Make = Callable[..., Served]


@pytest.fixture
def served(tmp_path: Path) -> Iterable[Make]:
    made: list[Served] = []

    def make(
        pages: int = 40,
        host_slots: int = 80,
        groups: tuple[LayerGroup, ...] = WINDOW,
        *,
        files: bool = False,
        key: str = "model",
        **options: Any,
    ) -> Served:
        layers = sum(len(group.layers) for group in groups)
        params = {"groups": groups, **options.pop("params", {})}
        if files:
            params |= {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-3, "file_tier_key": key}
        made.append(Served(pages, host_slots, layers=layers, params=params, **options))
        return made[-1]

    yield make
    for one in made:
        one.manager.check()
        one.manager.close()


def fill(it: Served, pages: int) -> None:
    """Evict what is idle, without a page that comes back."""
    it.tiers.settle()
    pool = it.manager._replicas.each[0].pool
    taken = pool.allocate(pages)
    pool.release(taken)


@pytest.mark.parametrize("groups", [WINDOW, TWO])
def test_every_tables_pages_come_back_from_the_host(served: Make, groups: tuple[LayerGroup, ...]) -> None:
    it = served(80, 200, groups)
    assert it.serve(PROMPT, chunk=8) == 0
    fill(it, 80)
    assert it.serve(PROMPT) == 40
    full = 2 if groups is TWO else 1
    # Token 40 sees 35 to 40 of the window: two pages, though ten lie below; none of the chunk that begins with it.
    assert it.manager.metrics.h2d_blocks_copied == 10 * full + 2
    assert it.kv.compared > 40 * full


def test_only_what_is_missing_comes_back(served: Make) -> None:
    it = served(40)
    it.serve(PROMPT, chunk=8)
    it.tiers.settle()
    replica = it.manager._replicas.each[0]
    assert replica.further is not None
    digests = it.digests(PROMPT)
    for table, columns in ((0, [3]), (1, [9, 4])):  # as if evicted: one page of the first table, and two of a window's
        names = digests if table == 0 else replica.further._mix(slice(None), digests)[0]
        for page in replica.pool.index.find(names[columns])[:, None]:
            replica.pool.hold(page)
            replica.pool.index.withdraw(page)
            replica.pool.release(page)
    assert it.serve(PROMPT) == 40
    assert it.manager.metrics.h2d_blocks_copied == 2  # nobody sees the window's fifth page any more


def test_a_hit_ends_where_some_table_has_nothing_to_go_on_with(served: Make) -> None:
    it = served(40)
    it.serve(PROMPT, chunk=8)
    fill(it, 40)
    replica = it.manager._replicas.each[0]
    assert replica.further is not None
    slots = it.tiers.host.pool.index
    gone = slots.find(replica.further._mix(slice(None), it.digests(PROMPT))[0][8:9])
    it.tiers.host.pool.hold(gone)
    slots.withdraw(gone)
    it.tiers.host.pool.release(gone)
    assert it.serve(PROMPT) == 32  # the window's pages 6 and 7 are there, and with 8 what comes after is not
    assert it.manager.metrics.h2d_blocks_copied == 8 + 2


def test_a_request_that_does_not_fit_changes_nothing(served: Make) -> None:
    it = served(22)
    it.serve(PROMPT, chunk=8)
    fill(it, 22)
    other = it.claim([99, *range(23)])
    assert it.manager.maybe_reserve(other)
    context = it.claim(PROMPT)
    before = it.manager._replicas.each[0].pool.index.generation
    assert not it.manager.maybe_reserve(context)
    assert not it.manager.maybe_reserve(context)
    assert it.manager.metrics.h2d_blocks_copied == 0
    assert it.manager._replicas.each[0].pool.index.generation == before
    it.manager.release(other.request_id)
    assert it.manager.maybe_reserve(context)
    assert context.start_idx == 40
    it.run(context)


def test_a_waiting_request_is_looked_up_once(served: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it = served(22)
    other = it.claim([99, *range(63)])
    other.set_token_indices(active_idx=8)
    assert it.manager.maybe_reserve(other)
    context = it.claim(PROMPT)
    replica = it.manager._replicas.each[0]
    assert replica.further is not None
    asked = []
    real = type(replica.further).from_below
    monkeypatch.setattr(type(replica.further), "from_below", lambda self, *given: asked.append(1) or real(self, *given))
    for _ in range(5):
        assert not it.manager.maybe_reserve(context)
    assert len(asked) == 1


def test_files_outlive_the_manager_for_all_tables(served: Make) -> None:
    it = served(files=True)
    it.serve(PROMPT, chunk=8)
    it.manager.close()
    assert it.manager.metrics.file_blocks_written == 20
    again = served(files=True)
    assert again.serve(PROMPT) == 40
    assert again.manager.metrics.file_blocks_read == again.manager.metrics.h2d_blocks_copied == 12
    assert again.kv.compared == 40 + 5
    other = served(files=True, groups=(LayerGroup("full", (0,)), LayerGroup("window", (1,), 7)))
    assert other.serve(PROMPT) == 0  # what its window keeps is another thing


def test_what_the_host_has_in_part_the_files_complete(served: Make) -> None:
    it = served(40, 40, files=True)
    it.serve(PROMPT, chunk=8)
    it.tiers.flush()
    fill(it, 40)
    slots = it.tiers.host.pool.index.find(it.digests(PROMPT)[2:4])
    it.tiers.host.pool.hold(slots)
    it.tiers.host.pool.index.withdraw(slots)
    it.tiers.host.pool.release(slots)
    assert it.serve(PROMPT) == 40
    assert it.manager.metrics.file_blocks_read == 2


def test_prefetch_brings_what_all_tables_need(served: Make) -> None:
    it = served(files=True)
    it.serve(PROMPT, chunk=8)
    it.manager.close()
    again = served(files=True)
    context = again.claim(PROMPT)
    for _ in range(400):
        if not again.manager.prefetch(context):
            break
        time.sleep(0.005)
    assert again.manager.metrics.file_blocks_read == 12
    assert again.manager.maybe_reserve(context)
    assert context.start_idx == 40
    again.run(context)


def test_what_a_request_used_of_all_tables_stays_longest_in_the_host(served: Make) -> None:
    it = served(60, 40)
    it.serve(PROMPT, chunk=8)  # 20 pages
    it.serve([7, *range(31)], chunk=8)  # 14 pages: 6 slots are left
    it.tiers.settle()
    it.serve(PROMPT)
    it.serve([8, *range(31)], chunk=8)  # 14 pages, in the place of what was not used since
    it.tiers.settle()
    fill(it, 60)
    assert it.serve(PROMPT) == 40


def test_an_import_copies_what_lies_nowhere_here() -> None:
    source, target = handed.make(), handed.make(host_slots=200)
    handed.computed(target, handed.PROMPT, "before", chunk=8)
    target.release("before")
    assert target._replicas.tiers is not None
    target._replicas.tiers.settle()
    pool = target._replicas.each[0].pool
    pool.release(pool.allocate(pool.free_count))
    _, counts = handed.pulled(source, target, handed.PROMPT, handed.table_of(source, handed.PROMPT))
    assert counts == [0, 0, 0]
    assert target.metrics.h2d_blocks_copied == 10 + 10 + 2


def test_a_reset_forgets_what_lies_below(served: Make) -> None:
    it = served(files=True)
    it.serve(PROMPT)
    it.tiers.flush()
    it.manager.reset_prefix_cache()
    assert it.serve(PROMPT) == 0


def test_objects_are_still_refused(served: Make) -> None:
    with pytest.raises(InvalidParamsError, match="^object_tier_io is given, and groups"):
        served(params={"object_tier_io": print, "file_tier_key": "model"})


def test_nothing_is_asked_for_before_the_first_full_page(served: Make) -> None:
    it = served()
    context = it.claim(range(3))
    assert not lifts.prefetch(it.manager._replicas.each[0], it.manager._replicas.each[0].hasher(None, context), context)
    assert it.manager.maybe_reserve(context)
    assert np.count_nonzero(it.tiers.host.pool.index.published) == 0


def wanted(it: Served, first_page: int = 0) -> PageDigests:
    return it.manager.contents.digests(TextContext([*PROMPT], 256, "theirs"), first_page)


def leased(it: Served, most: int = 100) -> list[int]:
    """How many pages of each table are leased to who asks for the prompt's."""
    found = it.manager.contents.lease("theirs", 0, wanted(it), most)
    if found is None:
        return []
    lease, table = found
    it.manager.check()
    assert it.manager.num_leased_blocks == sum(map(len, table.groups)) <= most
    assert (table.kinds, table.num_tokens) == (("window 6",), SIZE * len(table.groups[0]))
    it.manager.end_lease(lease)
    return [*map(len, table.groups)]


def lost(it: Served, column: int) -> None:
    """As if the window's page at a column were evicted."""
    replica = it.manager._replicas.each[0]
    assert replica.further is not None
    page = replica.pool.index.find(replica.further._mix(slice(None), it.digests(PROMPT))[0][column : column + 1])
    replica.pool.hold(page)
    replica.pool.index.withdraw(page)
    replica.pool.release(page)


def test_pages_are_leased_by_what_they_hold_in_all_tables(served: Make) -> None:
    it = served()
    assert leased(it) == []
    it.serve(PROMPT, chunk=8)
    assert it.manager.contents.cached(0, wanted(it)) == 40
    assert leased(it) == [10, 2]
    assert leased(it, 7) == [5, 2]  # of the window's pages those that the token behind the fifth sees
    assert leased(it, 1) == []
    lost(it, 8)
    assert it.manager.contents.cached(0, wanted(it)) == 32
    assert leased(it) == [8, 2]
    assert wanted(it, 3) == wanted(it)  # there is no later beginning
    with pytest.raises(BlockTableMismatchError, match="from page 3 on, and of 2 block tables"):
        it.manager.contents.lease("theirs", 0, wanted(it)._replace(first_page=3), 9)


def test_what_lies_below_is_brought_for_whoever_asks(served: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it = served(files=True)
    it.serve(PROMPT, chunk=8)
    it.manager.close()
    again = served(files=True)
    monkeypatch.setattr(again.tiers.replicas[0], "brought_at_once", 5)
    for _ in range(400):
        if not again.manager.contents.bring("theirs", 0, wanted(again), 100):
            break
        again.manager.check()
        time.sleep(0.005)
    assert again.manager.metrics.h2d_blocks_copied == 12
    assert leased(again) == [10, 2]
    assert again.manager.num_held_blocks == 0
    assert again.serve(PROMPT) == 40


def test_half_of_the_free_pages_stay_for_whoever_runs_here(served: Make) -> None:
    it = served(22)
    it.serve(PROMPT, chunk=8)
    fill(it, 22)
    while it.manager.contents.bring("theirs", 0, wanted(it), 100):
        it.manager.check()
    assert it.manager.metrics.h2d_blocks_copied == 11


COPYING = {"routing": Routing(copy_pages=True)}


@pytest.mark.parametrize("groups", [WINDOW, TWO])
def test_other_replicas_pages_are_copied_for_every_table(served: Make, groups: tuple[LayerGroup, ...]) -> None:
    it = served(80, 0, groups, dp=3, params=COPYING)
    it.serve(PROMPT, chunk=8)
    it.serve(PROMPT, replica=1)
    full = 2 if groups is TWO else 1
    assert it.manager.metrics.d2d_blocks_copied == 10 * full + 2
    lost(it, 9)
    assert it.serve(PROMPT, replica=2) == 40  # of two replicas: the window's last page is the second one's
    assert it.manager.metrics.d2d_blocks_copied == 2 * (10 * full + 2)
    assert it.kv.compared > 2 * 40 * full


def test_a_copy_that_does_not_fit_changes_nothing(served: Make) -> None:
    it = served(22, 0, dp=2, params=COPYING)
    it.serve(PROMPT, chunk=8)
    other = it.claim([99, *range(23)], replica=1)
    assert it.manager.maybe_reserve(other)
    context = it.claim(PROMPT, replica=1)
    assert not it.manager.maybe_reserve(context)
    assert it.manager.metrics.d2d_blocks_copied == 0
    it.manager.release(other.request_id)
    assert it.manager.maybe_reserve(context)
    assert context.start_idx == 40
    it.run(context)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_from_anywhere_is_what_was_computed(served: Make, seed: int) -> None:
    """Small pools over a host tier, files and replicas that copy from each other, with quotas: the KV is compared."""
    rng = random.Random(seed)
    it = served(60, 90, TWO, files=True, dp=2, params={**COPYING, "tenant_quota": 0.4})
    for _ in range(120):
        head = [rng.randint(0, 3), *range(rng.choice([8, 20, 33]))]
        tokens = [*head, *(rng.randint(0, 1) for _ in range(rng.randint(1, 12)))]
        it.serve(tokens, rng.choice([None, "a"]), rng.randint(0, 1), chunk=rng.choice([5, 8, 64]))
        if rng.random() < 0.1:
            it.tiers.flush()
        it.manager.check()
    metrics = it.manager.metrics
    assert min(metrics.d2d_blocks_copied, metrics.h2d_blocks_copied, metrics.evictions) > 20
