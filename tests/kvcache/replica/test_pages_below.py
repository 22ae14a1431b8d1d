"""Several block tables over the host tier and files: the pages of each table that are loaded and those that are not
loaded.
"""

from __future__ import annotations

import time
from threading import Event

import numpy as np
import pytest

from kvcache import LayerGroup, TextContext
from kvcache.tiers.file_tier import FileTier
from tests.kvcache.replica import test_further_imports as handed
from tests.kvcache.replica.tables_below import PROMPT, TWO, WINDOW, Make, fill, lost
from tests.kvcache.served import Served


@pytest.mark.parametrize("groups", [WINDOW, TWO])
def test_the_pages_of_every_table_are_loaded_from_the_host(served: Make, groups: tuple[LayerGroup, ...]) -> None:
    it = served(80, 200, groups)
    assert it.serve(PROMPT, chunk=8) == 0
    fill(it, 80)
    assert it.serve(PROMPT) == 40
    full = 2 if groups is TWO else 1
    # Token 40 sees tokens 35 to 40 of the window, which are in two pages. The lower tiers have ten pages of the window.
    # In the chunked table a chunk begins with token 40, so no earlier page is needed.
    assert it.manager.metrics.h2d_blocks_copied == 10 * full + 2
    assert it.kv.compared > 40 * full


def test_only_missing_pages_are_loaded(served: Make) -> None:
    it = served(40)
    it.serve(PROMPT, chunk=8)
    it.tiers.store_all()
    replica = it.manager._replicas.each[0]
    digests = it.digests(PROMPT)
    # The evictions remove one page of the first table and two pages of a window.
    for table, columns in ((0, [3]), (1, [9, 4])):
        names = replica.tables.every(digests)[table]
        for page in replica.pool.index.find(names[columns])[:, None]:
            replica.pool.hold(page)
            replica.pool.index.withdraw(page)
            replica.pool.release(page)
    assert it.serve(PROMPT) == 40
    assert it.manager.metrics.h2d_blocks_copied == 2  # No later query sees the window's fifth page.


def test_a_hit_ends_where_one_table_cannot_continue(served: Make) -> None:
    it = served(40)
    it.serve(PROMPT, chunk=8)
    fill(it, 40)
    replica = it.manager._replicas.each[0]
    slots = it.tiers.host.pool.index
    gone = slots.find(replica.tables.every(it.digests(PROMPT))[1, 8:9])
    it.tiers.host.pool.hold(gone)
    slots.withdraw(gone)
    it.tiers.host.pool.release(gone)
    assert it.serve(PROMPT) == 32  # Pages 6 and 7 of the window are cached. Page 8 and the later pages are not cached.
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
    asked = []
    real = type(replica.tables).from_below
    monkeypatch.setattr(type(replica.tables), "from_below", lambda self, *given: asked.append(1) or real(self, *given))
    for _ in range(5):
        assert not it.manager.maybe_reserve(context)
    assert len(asked) == 1


def beside(it: Served, pages: int) -> TextContext:
    """Returns a request that holds this many pages. Two of these pages belong to the window, for the chunk that
    runs.
    """
    context = it.claim([99, *range(4 * (pages - 2) - 1)])
    context.set_token_indices(active_idx=8)
    before = it.manager.num_free_blocks
    assert it.manager.maybe_reserve(context)
    assert it.manager.num_free_blocks == before - pages
    return context


def test_a_prompt_that_just_fits_is_loaded(served: Make) -> None:
    it = served(22)
    it.serve(PROMPT, chunk=8)
    fill(it, 22)
    beside(it, 8)
    # The request needs 11 pages in the first table and 3 pages in the window: all free pages.
    context = it.claim(PROMPT)
    assert it.manager.maybe_reserve(context)
    assert (context.start_idx, it.manager.num_free_blocks) == (40, 0)
    it.run(context)


def test_idle_pages_that_a_hit_uses_take_room_too(served: Make) -> None:
    it = served(22)
    it.serve(PROMPT, chunk=8)
    it.tiers.store_all()
    lost(it, 9)
    beside(it, 9)
    pool, context = it.manager._replicas.each[0].pool, it.claim(PROMPT)
    assert (pool.free_count, np.count_nonzero(pool.index.find(it.digests(PROMPT)))) == (13, 10)
    before = pool.index.generation
    # The request needs 14 pages, even if it finds its prefix. Only 13 pages are free.
    assert not it.manager.maybe_reserve(context)
    assert it.manager.metrics.h2d_blocks_copied == 0
    assert pool.index.generation == before


def test_a_request_without_pages_resumes_from_the_host_whatever_start_its_context_claims(served: Make) -> None:
    """The context claims that 42 tokens are computed. The request has no pages, so it continues after the tokens that
    the host has.
    """
    it = served()
    it.serve(PROMPT, chunk=8)
    fill(it, 40)
    context = it.claim([*PROMPT, 7, 7, 7])
    context.set_token_indices(start_idx=42)
    assert it.manager.maybe_reserve(context)
    assert context.start_idx == 40
    it.run(context)
    assert it.manager.metrics.h2d_blocks_copied == 10 + 2


def test_no_request_waits_for_pages_that_do_not_fit_into_the_host(served: Make) -> None:
    it = served(files=True)
    it.serve(PROMPT, chunk=8)
    it.manager.close()
    again = served(40, 8, files=True)  # A read from files fills at most half of the host's slots at once.
    assert again.serve(PROMPT) == 0
    assert again.manager.metrics.file_blocks_read < 12
    assert again.manager.metrics.h2d_blocks_copied == 0


def test_a_waiting_request_finds_pages_that_others_have_written_since(served: Make) -> None:
    waiting = served(22, files=True)
    beside(waiting, 8)
    context = waiting.claim(PROMPT)
    assert not waiting.manager.maybe_reserve(context)  # The request needs 22 pages.
    writer = served(files=True)
    writer.serve(PROMPT, chunk=8)
    writer.manager.close()
    files = waiting.tiers.replicas[0].lower[0]
    assert isinstance(files, FileTier)
    files._take_up_scan(files._folder.scan(files._index.names))
    for _ in range(400):
        if waiting.manager.maybe_reserve(context):  # 14 pages
            break
        time.sleep(0.005)
    assert context.start_idx == 40
    waiting.run(context)


def test_changes_of_the_device_and_of_a_tier_never_cancel_out_in_the_generation(served: Make) -> None:
    it = served(22)
    replica = it.manager._replicas.each[0]
    before, of_device, of_tiers = replica.generation, replica.pool.index.generation, replica.tier.generation
    it.serve(PROMPT, chunk=8)
    more = replica.pool.index.generation - of_device, replica.tier.generation - of_tiers
    assert min(more) > 0
    assert replica.generation - before == sum(more)


@pytest.mark.parametrize("groups", [WINDOW, TWO])
def test_pages_loaded_from_lower_tiers_belong_to_their_own_table(served: Make, groups: tuple[LayerGroup, ...]) -> None:
    it = served(80, files=True, groups=groups)
    it.serve(PROMPT, chunk=8)
    it.manager.close()
    again = served(80, files=True, groups=groups)
    context = again.claim(PROMPT)
    assert again.manager.maybe_reserve(context)
    again.run(context)
    replica = again.manager._replicas.each[0]
    mixed = replica.tables.every(again.digests(PROMPT))
    for table, names in enumerate(mixed):
        pages = replica.pool.index.find(names)
        assert (replica.pool.index.tables[pages[pages > 0]] == table).all()
    full = 2 if groups is TWO else 1
    assert replica.tables.width() == full + 0.2
    again.manager.release(context.request_id)


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
    assert other.serve(PROMPT) == 0  # The window of this model keeps other pages.


def test_files_supply_the_pages_that_the_host_lacks(served: Make) -> None:
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


def test_prefetch_loads_the_pages_that_all_tables_need(served: Make) -> None:
    it = served(files=True)
    it.serve(PROMPT, chunk=8)
    it.manager.close()
    again = served(files=True)
    context, gate, files = again.claim(PROMPT), Event(), again.tiers.replicas[0].lower[0]
    assert isinstance(files, FileTier)
    while len(there := files._host.pool.index.match(again.digests(PROMPT))) < 10:
        left = again.digests(PROMPT)[None, len(there) : 10]
        files.fetch(left, np.ones(left.shape[:2], np.bool_), wait=True, gain=1)
    files._reader.submit(gate.wait)
    coming = again.manager.prefetch(context)
    gate.set()
    assert coming  # the window's
    for _ in range(400):
        if not again.manager.prefetch(context):
            break
        time.sleep(0.005)
    assert again.manager.metrics.file_blocks_read == 12
    assert again.manager.maybe_reserve(context)
    assert context.start_idx == 40
    again.run(context)


def test_pages_of_all_tables_that_a_request_used_stay_longest_in_the_host(served: Make) -> None:
    it = served(60, 40)
    it.serve(PROMPT, chunk=8)  # 20 pages
    it.serve([7, *range(31)], chunk=8)  # This prompt takes 14 slots of the host, so 6 slots are left.
    it.tiers.store_all()
    it.serve(PROMPT)
    it.serve([8, *range(31)], chunk=8)  # These 14 pages replace the least recently used pages of the host.
    it.tiers.store_all()
    fill(it, 60)
    assert it.serve(PROMPT) == 40


def test_an_import_copies_only_pages_that_no_tier_of_the_target_has() -> None:
    source, target = handed.make(), handed.make(host_slots=200)
    handed.computed(target, handed.PROMPT, "before", chunk=8)
    target.release("before")
    assert target._replicas.tiers is not None
    target._replicas.tiers.store_all()
    pool = target._replicas.each[0].pool
    pool.release(pool.allocate(pool.free_count))
    _, counts = handed.pulled(source, target, handed.PROMPT, handed.table_of(source, handed.PROMPT))
    assert counts == [0, 0, 0]
    assert target.metrics.h2d_blocks_copied == 10 + 10 + 2


def test_a_reset_forgets_the_pages_in_lower_tiers(served: Make) -> None:
    it = served(files=True)
    it.serve(PROMPT)
    it.tiers.flush()
    it.manager.reset_prefix_cache()
    assert it.serve(PROMPT) == 0


def test_nothing_is_asked_for_before_the_first_full_page(served: Make) -> None:
    it = served()
    context = it.claim(range(3))
    assert not it.manager.prefetch(context)
    assert it.manager.maybe_reserve(context)
    assert np.count_nonzero(it.tiers.host.pool.index.published) == 0


def one_of_window_lost(it: Served) -> None:
    """Leaves all pages of the prompt in the host, and all pages but one on the device. The missing page is a page of
    the window that the next query sees.
    """
    it.serve(PROMPT, chunk=8)
    it.tiers.store_all()
    replica = it.manager._replicas.each[0]
    page = replica.pool.index.find(replica.tables.every(it.digests(PROMPT))[1, 9:10])
    replica.pool.hold(page)
    replica.pool.index.withdraw(page)
    replica.pool.release(page)


def test_pages_found_after_a_page_that_is_being_loaded_are_shared(served: Make) -> None:
    it = served(40)
    one_of_window_lost(it)
    context, other = it.claim(PROMPT), it.claim(PROMPT)
    free = it.manager.num_free_blocks
    assert it.manager.maybe_reserve(context)
    # The first request has not run yet, so the second request loads the page itself.
    assert it.manager.maybe_reserve(other)
    assert context.start_idx == other.start_idx == 40
    # Both requests share ten pages of the first table and one page of the window. In each table each request has one
    # new page. In the window each request has loaded one page.
    assert free - it.manager.num_free_blocks == 11 + 2 * 3
    it.run(context)
    it.run(other)
    assert it.manager.metrics.h2d_blocks_copied == 2
    assert free - it.manager.num_free_blocks == 11 + 2 * 2 + 1  # The second request now shares the loaded page.
    it.manager.check()


def test_a_second_lookup_before_the_step_gives_back_only_the_row_s_own_copy(served: Make) -> None:
    """Between the two lookups, another request publishes the page that is being loaded. The row takes the published
    page and gives back only its own copy.
    """
    it = served(60)
    one_of_window_lost(it)
    context, other = it.claim([*PROMPT, *range(300, 309)]), it.claim([*PROMPT, *range(300, 309)])
    context.set_token_indices(active_idx=8)
    free = it.manager.num_free_blocks
    assert it.manager.maybe_reserve(context)
    assert context.start_idx == 40
    taken = free - it.manager.num_free_blocks
    assert it.manager.maybe_reserve(other)
    it.run(other)
    it.manager.release(other.request_id)
    assert free - it.manager.num_free_blocks == taken
    pages = it.manager._replicas.each[0].rows.table[:, it.manager._replicas.each[0].rows.row_of[context.request_id]]
    before = pages.copy()
    assert it.manager.maybe_reserve(context)
    assert context.start_idx > 40
    assert (pages[0, :10] == before[0, :10]).all()
    it.manager.check()
    it.run(context)
    it.manager.release(context.request_id)
    it.manager.check()
    assert it.manager.num_free_blocks == it.manager.total_num_pages
