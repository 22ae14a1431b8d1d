"""Pages of several block tables that readers ask for, or that are copied from other replicas of this manager."""

from __future__ import annotations

import random
import time

import pytest

from kvcache import BlockTableMismatchError, PageDigests, TextContext
from tests.kvcache.build import as_long_as
from tests.kvcache.replica.tables_below import PROMPT, TWO, Make, fill, lost
from tests.kvcache.served import SIZE, Served


def wanted(it: Served, first_page: int = 0) -> PageDigests:
    return it.manager.contents.digests(TextContext([*PROMPT], 256, "theirs"), first_page)


def leased(it: Served, most: int = 100) -> list[int]:
    """Returns how many pages of each table a reader gets that asks for the prompt's pages."""
    found = it.manager.contents.lease("theirs", 0, wanted(it), most)
    if found is None:
        return []
    lease, table = found
    it.manager.check()
    assert it.manager.num_leased_blocks == sum(map(len, table.groups)) <= most
    assert (table.kinds, table.num_tokens) == (("window 6",), SIZE * len(table.groups[0]))
    it.manager.end_lease(lease)
    return [*map(len, table.groups)]


def test_pages_are_leased_by_what_they_hold_in_all_tables(served: Make) -> None:
    it = served()
    assert leased(it) == []
    it.serve(PROMPT, chunk=8)
    assert it.manager.contents.cached(0, wanted(it)) == 40
    assert leased(it) == [10, 2]
    assert leased(it, 7) == [5, 2]  # These are the two window pages that the query after page 5 sees.
    assert leased(it, 1) == []
    lost(it, 8)
    assert it.manager.contents.cached(0, wanted(it)) == 32
    assert leased(it) == [8, 2]
    assert wanted(it, 3) == wanted(it)  # A question that begins at a later page gets the same answer.
    with pytest.raises(BlockTableMismatchError, match="from page 3 on; .* the model has full, window 6"):
        it.manager.contents.lease("theirs", 0, wanted(it)._replace(first_page=3), 9)


def test_pages_in_lower_tiers_are_loaded_for_any_reader_that_asks(
    served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_half_of_the_free_pages_stay_free_for_the_manager_s_own_requests(served: Make) -> None:
    it = served(22)
    it.serve(PROMPT, chunk=8)
    fill(it, 22)
    for _ in as_long_as(lambda: it.manager.contents.bring("theirs", 0, wanted(it), 100)):
        it.manager.check()
    assert it.manager.metrics.h2d_blocks_copied == 11


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2))
def test_pages_from_every_tier_have_the_computed_content(served: Make, seed: int) -> None:
    """Small pools with a host tier, files, quotas and two replicas. KV is compared whenever a
    request reads it.
    """
    rng = random.Random(seed)
    it = served(60, 90, TWO, files=True, dp=2, params={"tenant_quota": 0.4})
    for _ in range(120):
        head = [rng.randint(0, 3), *range(rng.choice([8, 20, 33]))]
        tokens = [*head, *(rng.randint(0, 1) for _ in range(rng.randint(1, 12)))]
        it.serve(tokens, rng.choice([None, "a"]), rng.randint(0, 1), chunk=rng.choice([5, 8, 64]))
        if rng.random() < 0.1:
            it.tiers.flush()
        it.manager.check()
    metrics = it.manager.metrics
    assert min(metrics.h2d_blocks_copied, metrics.evictions) > 20


def test_pages_of_something_that_no_digest_covers_are_not_lent(served: Make) -> None:
    it = served()
    asked = wanted(it)._replace(named=(("adapter 'poet'", "files 12"),))
    with pytest.raises(BlockTableMismatchError, match="asks for pages of .*poet"):
        it.manager.contents.lease("reader", 0, asked, 9)
