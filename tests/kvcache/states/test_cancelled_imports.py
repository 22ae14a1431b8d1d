"""Cancelled imports: the request computes its tokens itself."""

from __future__ import annotations

import torch

from kvcache import PagedKVCacheManager, PendingImport, TextContext
from tests.kvcache.build import manager_of
from tests.kvcache.states.test_grouped_states import NEXT, PROMPT, SHAPE, SIZE, served, without_state_at


def make() -> PagedKVCacheManager:
    states = {"states": SHAPE, "state_copies": 20, "state_every_pages": 0}
    return manager_of(100 + 29 * 8, page_size=SIZE, layers=1, dtype=torch.int64, params=states)


def forget_states(manager: PagedKVCacheManager) -> None:
    for pages in range(1, 11):
        without_state_at(manager, pages)


def importing(source: PagedKVCacheManager, target: PagedKVCacheManager) -> tuple[TextContext, PendingImport]:
    served(source, PROMPT, release=False)
    context = TextContext([*PROMPT, NEXT], 256, "d")
    target.external_claim("d", 0)
    pending = target.import_block_table(context, source.block_table("r"))
    assert pending is not None
    return context, pending


def test_its_chunks_end_where_it_leaves_what_others_have_by_now() -> None:
    source, target = make(), make()
    context, pending = importing(source, target)
    served(target, [*PROMPT[: 5 * SIZE], *[1] * 9], "meanwhile")
    forget_states(target)
    target.cancel_import(pending)
    assert target.maybe_reserve(context)
    assert (context.start_idx, context.active_idx) == (0, 5 * SIZE)
