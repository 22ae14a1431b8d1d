"""Windows and recurrent states in one manager, over host memory and files or objects."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from kvcache import (
    DraftGroup,
    LayerGroup,
    NoFreeRowError,
    NoFreeStatePageError,
    PagedKVCacheManager,
    StatePageError,
    TextContext,
)
from kvcache.tiers.tiers import StateTier
from tests.kvcache.random_model import seam
from tests.kvcache.replica.test_further_tables import gone
from tests.kvcache.served import until
from tests.kvcache.states.test_grouped_states import NEXT, PROMPT, SIZE, make, run, served, start, without_state_at
from tests.kvcache.tiers.stored_objects import StoredObjects

FOUND = 9 * SIZE  # The number of the prompt's cached tokens. The last token always has to run.
FORMS = pytest.mark.parametrize("copies", [20, None], ids=["apart", "among-pages"])


def below(copies: int | None, folder: Path | None = None, **options: Any) -> PagedKVCacheManager:
    files = {} if folder is None else {"file_tier_dir": str(folder), "file_tier_max_gb": 1e-2, "file_tier_key": "m"}
    return make(copies=copies, files=files, host_slots=400, **{"every": 0, **options})


def evict_all(manager: PagedKVCacheManager) -> None:
    """Evicts all pages and states from the device, so that only the host has them."""
    manager.flush_tiers()
    pools = [manager._replicas.each[0].pool]
    pools += [manager.states[0].pool] if not manager.slab_pages else []
    for pool in pools:
        pool.release(pool.allocate(pool.free_count))
    manager.check()
    assert manager.admission(TextContext(PROMPT, 256, "asked")).cached_pages == 0
    assert manager.states[0].num_kept == 0


@FORMS
def test_evicted_pages_are_loaded_again_together_with_the_state(copies: int | None) -> None:
    manager = below(copies)
    served(manager, PROMPT)
    evict_all(manager)
    assert served(manager, PROMPT, "again")[0] == FOUND
    metrics = manager.metrics
    assert (metrics.h2d_states_copied, metrics.h2d_blocks_copied) == (1, 9 + 2)


@FORMS
def test_a_state_whose_load_has_not_been_seen_to_end_is_not_leased(copies: int | None) -> None:
    """The load holds the state page, as a lease would. The next step was refused although no lease is open."""
    manager = below(copies)
    served(manager, PROMPT)
    evict_all(manager)
    seam.end_copies_late(manager, lambda: False)
    context = start(manager, PROMPT, "again")
    while context.start_idx < len(PROMPT):
        assert manager.maybe_reserve(context)
        run(manager, context)
    lease = manager.lease("again")
    manager.block_table("again")  # names the state, which the lease then promises
    assert manager.maybe_reserve(context)
    with pytest.raises(StatePageError, match="its state after 40 tokens is leased"):
        run(manager, context)
    manager.end_lease(lease)
    run(manager, context)
    manager.release("again")


@FORMS
def test_another_process_finds_pages_and_state_in_files(copies: int | None, tmp_path: Path) -> None:
    first = below(copies, tmp_path)
    served(first, PROMPT)
    first.close()
    again = below(copies, tmp_path)
    assert served(again, PROMPT)[0] == FOUND
    metrics = again.metrics
    assert (metrics.file_states_read, metrics.file_blocks_read) == (1, 9 + 2)
    again.close()


def test_from_files_only_the_pages_up_to_the_last_state_are_read(tmp_path: Path) -> None:
    first = below(20, tmp_path, every=2)
    served(first, PROMPT)
    first.close()
    again = below(20, tmp_path, every=2)
    # Seven pages of this prompt are cached, but the last cached state is after six pages.
    assert served(again, PROMPT[:30])[0] == 6 * SIZE
    metrics = again.metrics
    assert (metrics.file_states_read, metrics.file_blocks_read) == (1, 6 + 2)
    again.close()


@pytest.mark.parametrize("where", ["host", "files"])
def test_pages_on_the_device_are_used_with_a_state_from_a_lower_tier(where: str, tmp_path: Path) -> None:
    manager = below(20, tmp_path)
    served(manager, PROMPT)
    manager.flush_tiers()
    without_state_at(manager, 9)
    if where == "files":
        tiers = manager._replicas.state_tiers
        assert tiers is not None
        tiers.host.pool.forget()
    again = start(manager, PROMPT, "again")
    assert again.start_idx == FOUND
    assert (manager.metrics.h2d_states_copied, manager.metrics.h2d_blocks_copied) == (1, 0)
    assert manager.metrics.file_states_read == (where == "files")
    manager.close()


def gone_from_host(manager: PagedKVCacheManager, pages: int) -> tuple[Any, Any, Any]:
    """Removes the state after `pages` pages from the host. Returns the index, the slot and the digest."""
    tiers = manager._replicas.state_tiers
    assert tiers is not None
    pool, context = tiers.host.pool, TextContext(PROMPT, 256)
    digest = manager._replicas.each[0].hasher(None, context).digests(context.tokens, pages - 1, pages)
    slot = pool.index.find(digest)
    pool.hold(slot)
    pool.index.withdraw(slot)
    pool.release(slot)
    return pool.index, slot, digest


def test_no_page_after_the_last_state_is_loaded() -> None:
    manager = below(20, every=2)
    served(manager, PROMPT)
    evict_all(manager)
    gone_from_host(manager, 9)
    again = start(manager, PROMPT, "again")
    assert again.start_idx == 8 * SIZE  # A state is kept after every second page, so the hit ends after page 8.
    run(manager, again)
    assert manager.metrics.h2d_blocks_copied == 8 + 2


def test_a_waiting_request_notices_a_new_state_in_the_host() -> None:
    manager = below(20, checks=False)
    served(manager, PROMPT)
    evict_all(manager)
    index, slot, digest = gone_from_host(manager, 9)
    pool = manager._replicas.each[0].pool
    taken = pool.allocate(pool.free_count)
    context = TextContext(PROMPT, 256, "waits")
    manager.external_claim("waits", 0)
    for _ in range(2):
        assert not manager.maybe_reserve(context)
    index.publish(slot, digest)
    pool.release(taken)
    assert manager.maybe_reserve(context)
    assert context.start_idx == FOUND


def test_a_waiting_request_notices_a_new_state_on_the_device() -> None:
    manager = below(20, checks=False)
    served(manager, PROMPT)
    manager.flush_tiers()
    pool, states = manager._replicas.each[0].pool, manager.states[0].pool.index
    pool.release(pool.allocate(pool.free_count))  # Only the host still has the pages.
    _, _, digest = gone_from_host(manager, 9)
    page = states.find(digest)
    states.withdraw(page)
    taken = pool.allocate(pool.free_count)
    context = TextContext(PROMPT, 256, "waits")
    manager.external_claim("waits", 0)
    for _ in range(2):
        assert not manager.maybe_reserve(context)
    states.publish(page, digest)
    pool.release(taken)
    assert manager.maybe_reserve(context)
    assert context.start_idx == FOUND
    assert manager.metrics.h2d_states_copied == 0


def test_only_the_state_from_which_the_request_would_resume_counts_as_used_by_a_lookup() -> None:
    manager = below(20, every=1)
    served(manager, PROMPT)
    manager.flush_tiers()
    tiers, replica = manager._replicas.state_tiers, manager._replicas.each[0]
    assert tiers is not None
    context = TextContext(PROMPT, 256)
    digests, pool = replica.hasher(None, context).digests(context.tokens, 0, 9), tiers.host.pool
    before = pool.idle.pages().tolist()
    replica.kept.to_host(digests, 0, wait=False)
    assert pool.idle.pages().tolist() == before
    replica.kept.to_host(digests, 4, wait=False)
    (used,) = pool.index.find(digests[3:4]).tolist()
    assert pool.idle.pages().tolist() == [*(slot for slot in before if slot != used), used]


def test_admission_handles_the_end_of_a_copy_of_a_state_even_if_no_page_is_copied() -> None:
    manager, over = below(20), list[bool]()
    served(manager, PROMPT)
    manager.flush_tiers()
    without_state_at(manager, 9)
    seam.end_copies_late(manager, lambda: bool(over))
    start(manager, PROMPT, "again")
    manager.release("again")
    assert (manager.metrics.h2d_blocks_copied, manager.states[0].num_held) == (0, 1)
    over.append(True)
    manager.admission(TextContext(PROMPT, 256, "asked"))
    assert manager.states[0].num_held == 0


def test_a_state_after_the_last_end_of_all_tables_is_not_read(tmp_path: Path) -> None:
    manager = below(20, tmp_path, every=2)
    served(manager, PROMPT)
    manager.flush_tiers()
    tiers = manager._replicas.tiers
    assert tiers is not None
    tiers.close()  # The files have the states after every second page and after page 9.
    for of_host in (tiers, manager._replicas.state_tiers):
        assert of_host is not None
        of_host.host.pool.forget()
    for pages in (2, 4, 6, 8, 9):
        without_state_at(manager, pages)
    # The window loses page 8, counted from 0. The first query after nine pages would see this page, so the prompt can
    # be resumed after eight pages at most. The state after nine pages is useless.
    gone(manager, PROMPT, 0, 8)
    assert start(manager, PROMPT, "again").start_idx == 8 * SIZE
    assert manager.metrics.file_states_read == 1
    manager.close()


def test_if_a_state_cannot_be_read_the_window_before_the_previous_state_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = below(20, tmp_path, every=2)
    served(manager, PROMPT)
    manager.flush_tiers()
    gone_from_host(manager, 9)
    without_state_at(manager, 9)  # Only the files still have this state.
    # The query after page 8 sees page 6 of the window. The query after page 9 does not see it.
    gone(manager, PROMPT, 0, 6)
    monkeypatch.setattr(StateTier, "to_host", lambda *_, **__: False)
    again = start(manager, PROMPT, "again")
    assert again.start_idx == 8 * SIZE
    run(manager, again)
    assert manager.metrics.h2d_blocks_copied == 1
    manager.close()


# ---- an object store


def stored(store: StoredObjects, copies: int | None = 20, count: int = 4, **options: Any) -> PagedKVCacheManager:
    objects = {"object_tier_io": store, "object_tier_pages": count, "file_tier_key": "m"}
    return make(copies=copies, files=objects | options.pop("params", {}), host_slots=400, **{"every": 0, **options})


def fetched(manager: PagedKVCacheManager, tokens: list[int]) -> None:
    """Waits for the pages of a prompt, as a scheduler does."""
    context = TextContext(tokens, 256, "waits")
    until(lambda: not manager.prefetch(context))
    manager.check()


def written(store: StoredObjects, copies: int | None = 20, **options: Any) -> None:
    first = stored(store, copies, **options)
    served(first, PROMPT)
    first.close()


@FORMS
@pytest.mark.parametrize("count", [1, 4, 8])
def test_another_machine_finds_pages_and_state_in_a_store(copies: int | None, count: int) -> None:
    """An object has 4 or 8 pages. If a state is needed within an object, a shorter object that ends at the state is
    written.
    """
    store = StoredObjects()
    written(store, copies, count=count)
    again = stored(store, copies, count)
    fetched(again, PROMPT)
    assert served(again, PROMPT)[0] == FOUND
    metrics = again.metrics
    assert (metrics.object_states_read, metrics.object_blocks_read) == (1, 9 + 2)
    assert metrics.object_blocks_refused == metrics.object_states_refused == 0
    again.close()
    assert store.open == 0


@FORMS
@pytest.mark.parametrize("count", [1, 4])
def test_draft_pages_before_a_state_are_found_in_a_store_by_the_page_after_it(copies: int | None, count: int) -> None:
    store, groups = StoredObjects(), {"groups": (LayerGroup("full", (0,)), DraftGroup((1,)))}
    written(store, copies, count=count, every=2, params=groups)
    again = stored(store, copies, count, every=2, params=groups)
    fetched(again, PROMPT)
    assert served(again, PROMPT)[0] == 8 * SIZE
    assert again.metrics.object_states_read == 1
    again.close()


def test_a_longer_prompt_resumes_from_a_state_within_an_object() -> None:
    store = StoredObjects()
    written(store)
    longer, again = [*PROMPT[:37], *range(500, 520)], stored(store)
    fetched(again, longer)
    assert served(again, longer)[0] == FOUND
    assert (again.metrics.object_states_read, again.metrics.object_blocks_read) == (1, 9 + 2)
    again.close()


@pytest.mark.parametrize(("table", "end"), [(0, 9), (1, 9), (0, 8), (1, 8)])
def test_no_request_resumes_where_one_table_lacks_its_object(table: int, end: int) -> None:
    """The store has lost the object of one table that ends at page `end`. The prompt is therefore found only up to the
    last earlier state, if there is one.
    """
    store = StoredObjects()
    written(store, every=2)
    again = stored(store, every=2)
    tables, (context, tier) = again._replicas.each[0].tables, (TextContext(PROMPT, 256), again._replicas.tiers)
    assert tier is not None
    digests = again._replicas.each[0].hasher(None, context).digests(context.tokens, 0, 9)
    name, of_pages = tables.every(digests)[table, end - 1].tobytes().hex(), tier._counted[-1]._layout.epoch_key
    (gone_now,) = [key for key in store.pages if key.endswith(name) and key[:32] == of_pages[:32]]
    del store.objects[gone_now]
    fetched(again, PROMPT)
    # The query after page 9 sees pages 7 and 8 of the window. Page 7 is in the object that ends at page 8.
    found = {(0, 9): 8, (1, 9): 8, (0, 8): 6, (1, 8): 6}[table, end]
    assert served(again, PROMPT)[0] == found * SIZE
    again.close()


def test_a_prompt_is_found_in_files_alone_and_in_a_store_alone(tmp_path: Path) -> None:
    store = StoredObjects()
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-2}
    written(store, params=files)
    store.fails = True
    again = stored(store, params=files)
    fetched(again, PROMPT)
    assert served(again, PROMPT)[0] == FOUND
    assert again.metrics.file_states_read == 1
    again.close()
    store.fails = False
    alone = stored(store)
    fetched(alone, PROMPT)
    assert served(alone, PROMPT)[0] == FOUND
    alone.close()


def test_a_damaged_object_is_a_miss() -> None:
    store = StoredObjects()
    written(store)
    for key, content in store.pages.items():
        store.objects[key] = content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
    again = stored(store)
    fetched(again, PROMPT)
    assert served(again, PROMPT)[0] == 0
    assert again.metrics.object_states_refused
    again.close()
    right = stored(store)  # The manager has written the damaged objects anew.
    fetched(right, PROMPT)
    assert served(right, PROMPT)[0] == FOUND
    right.close()


@pytest.mark.parametrize("copies", [0, None], ids=["apart", "among-pages"])
def test_an_import_begins_again_while_its_state_is_copied_and_no_other_state_page_is_free(copies: int | None) -> None:
    """On a GPU, a copy from the host needs the request's state page until the copy has ended. No other state page is
    free, so the second import has to wait.
    """
    source, manager = make(copies=20), below(copies)
    served(source, [*PROMPT, *[NEXT] * 8], "r", release=False)
    served(manager, PROMPT)
    evict_all(manager)
    seam.end_copies_late(manager, lambda: False)
    context = TextContext([*PROMPT, *[NEXT] * 16], 256, "d")
    manager.external_claim("d", 0)
    pending = manager.import_block_table(context, source.block_table("r"))
    assert pending is not None
    assert manager.states[0].below.open_loads
    manager.cancel_import(pending)
    with contextlib.suppress(NoFreeStatePageError, NoFreeRowError):
        for number in itertools.count():
            manager.external_claim(f"other {number}", 0)
    assert manager.import_block_table(context, source.block_table("r")) is not None
    manager.check()
