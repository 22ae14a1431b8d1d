"""After a cancelled import, the request computes its tokens itself. It must not overwrite a page that other requests
hold or can find.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache import InvalidRequestError, LayerGroup, NotReservedError, PagedKVCacheManager, PendingImport, TextContext
from tests.kvcache.build import as_long_as, manager_of, proven
from tests.kvcache.replica.test_further_tables import gone
from tests.kvcache.states.test_grouped_states import NEXT, PROMPT, SHAPE, SIZE, run, served, start, without_state_at

FULL = LayerGroup("full", (0,))
WIDE = FULL, LayerGroup("window", (1,), 100)  # the window covers the whole prompt, so no page leaves it
NARROW = FULL, LayerGroup("window", (1,), 6)


def make(groups: tuple[LayerGroup, ...] = (), *, states: bool = True, pages: int = 100) -> PagedKVCacheManager:
    told: dict[str, Any] = {"groups": groups}
    told |= {"states": SHAPE, "state_copies": 20, "state_every_pages": 0} if states else {}
    more = 29 * 8 if states else 0  # The number of pages that the states take.
    return manager_of(pages + more, page_size=SIZE, layers=2 if groups else 1, dtype=torch.int64, params=told)


def forget_states(manager: PagedKVCacheManager) -> None:
    for pages in range(1, 11):
        without_state_at(manager, pages)


def compute(manager: PagedKVCacheManager, context: TextContext) -> None:
    """Computes a chunk. Checks that all pages of the chunk belong to this request alone, and that no lookup finds
    them.
    """
    replica = manager._replicas.each[0]
    row = replica.rows.row_of[context.request_id]
    pages = replica.rows.table[:, row, context.start_idx // SIZE : -(-context.active_idx // SIZE)]
    assert (pages > 0).all()
    assert not replica.pool.index.published[pages].any()
    assert (replica.pool.holders[pages] == 1).all()
    if manager.states:
        run(manager, context)
        return
    manager.fetch([context])
    context.update(NEXT)
    manager.step([context])
    manager.check()


def importing(source: PagedKVCacheManager, target: PagedKVCacheManager) -> tuple[TextContext, PendingImport]:
    if source.states:
        served(source, PROMPT, release=False)
    else:
        without_states(source, "r")
    context = TextContext([*PROMPT, NEXT], 256, "d")
    target.external_claim("d", 0)
    pending = target.import_block_table(context, source.block_table("r"))
    assert pending is not None
    return context, pending


def without_states(manager: PagedKVCacheManager, name: str) -> None:
    context = start(manager, PROMPT, name)
    manager.fetch([context])
    context.update(NEXT)
    manager.step([context])


def shared_import(groups: tuple[LayerGroup, ...]) -> tuple[PagedKVCacheManager, TextContext, PendingImport]:
    """Returns an open import that shares cached pages from which its request could not resume by itself."""
    source, target = make(groups, states=False), make(groups, states=False)
    without_states(target, "first")
    target.lease("first")
    target.release("first")
    for column in range(10):
        gone(target, PROMPT, 0, column)
    return target, *importing(source, target)


def test_after_a_cancelled_import_a_chunk_ends_where_the_prompt_diverges_from_cached_prompts() -> None:
    source, target = make(), make()
    context, pending = importing(source, target)
    served(target, [*PROMPT[: 5 * SIZE], *[1] * 9], "meanwhile")
    forget_states(target)
    target.cancel_import(pending)
    assert target.maybe_reserve(context)
    assert (context.start_idx, context.active_idx) == (0, 5 * SIZE)


@pytest.mark.parametrize("holds", ["request", "lease", "nobody"])
@pytest.mark.parametrize("groups", [WIDE, NARROW])
def test_after_a_cancelled_import_cached_pages_after_the_last_state_are_not_overwritten(
    groups: tuple[LayerGroup, ...], holds: str
) -> None:
    source, target = make(groups), make(groups)
    served(target, PROMPT, "first", release=False)
    if holds == "lease":
        target.lease("first")
    if holds != "request":
        target.release("first")
    forget_states(target)
    context, pending = importing(source, target)
    assert pending.tokens == (40, 40)
    target.cancel_import(pending)
    target.check()
    with pytest.raises((NotReservedError, InvalidRequestError)):
        target.fetch([context])
    with pytest.raises(NotReservedError, match="reserve_batch would write to pages of its cancelled import"):
        target.reserve_batch([context])
    for _ in as_long_as(lambda: context.start_idx < 45):
        assert target.maybe_reserve(context)
        compute(target, context)


@pytest.mark.parametrize("groups", [WIDE, NARROW])
def test_after_a_cancelled_import_cached_pages_after_a_lost_window_are_not_overwritten(
    groups: tuple[LayerGroup, ...],
) -> None:
    target, context, pending = shared_import(groups)
    assert pending.tokens == (40, 40)
    target.cancel_import(pending)
    for _ in as_long_as(lambda: context.start_idx < 45):
        assert target.maybe_reserve(context)
        compute(target, context)


def test_a_leased_request_does_not_compute_in_the_pages_of_its_cancelled_import() -> None:
    source, target = make(WIDE), make(WIDE)
    served(target, PROMPT, "first")
    forget_states(target)
    served(source, PROMPT, release=False)
    context = TextContext([*PROMPT, NEXT], 256, "d")
    target.external_claim("d", 0)
    lease = target.lease("d")
    pending = target.import_block_table(context, source.block_table("r"))
    assert pending is not None
    target.cancel_import(pending)
    for _ in range(2):
        with pytest.raises(NotReservedError, match="or release it if it is leased"):
            target.maybe_reserve(context)
    target.end_lease(lease)
    assert target.maybe_reserve(context)
    compute(target, context)


def test_after_a_cancelled_import_a_request_waits_without_pages_if_too_few_are_free() -> None:
    source, target = make(WIDE, states=False), make(WIDE, states=False, pages=30)
    context, pending = importing(source, target)
    target.cancel_import(pending)
    other = TextContext([*range(3 * SIZE)], 256, "other")
    target.external_claim("other", 0)
    assert target.maybe_reserve(other)
    assert not target.maybe_reserve(context, 20)
    assert target.get_req_blocks("d") == []
    assert target.maybe_reserve(context)
    compute(target, context)


@pytest.mark.parametrize("claimed_again", [False, True])
def test_a_state_page_is_freed_when_its_copier_gives_up_after_the_release_of_the_request(claimed_again: bool) -> None:
    source, target = make(), make()
    _, pending = importing(source, target)
    copier = target.copier(pending)
    target.cancel_import(pending)
    target.release("d")
    if claimed_again:
        target.external_claim("d")
    assert target.states[0].num_held == 1 + claimed_again
    copier.give_up()
    assert target.states[0].num_held == claimed_again
    target.check()


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("groups", [(), WIDE, NARROW])
def test_an_import_is_not_committed_before_the_table_that_names_its_windows_and_state(
    groups: tuple[LayerGroup, ...], *, states: bool, is_cached: bool
) -> None:
    """The first table of a prompt that still runs names neither of them, even if it has all full pages of the prompt.
    Otherwise pages that nobody has written would be published.
    """
    source, target = make(groups, states=states), make(groups, states=states)
    if states:
        served(source, PROMPT, release=False)
    else:
        without_states(source, "r")
    if is_cached and states:
        served(target, PROMPT, "first")
    elif is_cached:
        without_states(target, "first")
        target.release("first")
    context = TextContext([*PROMPT, NEXT], 256, "d")
    target.external_claim("d", 0)
    pending = target.import_block_table(context, source.block_table("r", full_pages=True), partial=True)
    assert pending is not None
    copier = target.copier(pending)
    if groups or states:
        with pytest.raises(InvalidRequestError, match="'d': take of the last pages came before the last block table"):
            copier.take(last=True)
        with pytest.raises(InvalidRequestError, match="'d': commit_import came before the last block table"):
            target.commit_import(context, pending)
    copier.take(last=False)
    target.extend_import(context, pending, source.block_table("r"), last=True)
    copier.take(last=True)
    target.commit_import(context, pending, copier.prove())
    assert context.start_idx == len(PROMPT)
    target.check()


@pytest.mark.parametrize("groups", [WIDE, NARROW])
@pytest.mark.parametrize("tokens", [17, 20])
def test_an_import_shares_no_cached_page_after_its_own_tokens(groups: tuple[LayerGroup, ...], tokens: int) -> None:
    """The request computes the tokens after those of the table, and would overwrite a page that others can find."""
    source, target = make(groups, states=False), make(groups, states=False)
    without_states(target, "first")
    target.release("first")
    for column in range(10):
        gone(target, PROMPT, 0, column)
    prompt = TextContext(PROMPT[:tokens], 256, "r")
    source.external_claim("r")
    assert source.maybe_reserve(prompt)
    source.fetch([prompt])
    prompt.update(PROMPT[tokens])
    source.step([prompt])
    context = TextContext([*PROMPT, NEXT], 256, "d")
    target.external_claim("d", 0)
    pending = target.import_block_table(context, source.block_table("r"))
    assert pending is not None
    target.commit_import(context, pending, proven(target, pending))
    assert context.start_idx == tokens
    assert target.maybe_reserve(context)
    compute(target, context)
