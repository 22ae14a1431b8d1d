"""Block tables of requests whose tokens or progress have changed since their pages were published."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache import InvalidRequestError, LayerGroup, PagedKVCacheManager, TextContext
from tests.kvcache.build import manager_of, proven
from tests.kvcache.replica.test_imports import PROMPT, receiver

FULL: dict[str, Any] = {}
WINDOW = {"groups": (LayerGroup("window", (0,), 9),)}


def prefilled(params: dict[str, Any], *, reset: bool, caching: bool = True) -> tuple[PagedKVCacheManager, TextContext]:
    """Returns a request that has computed 18 tokens, 4 full pages. With `reset`, the cache was reset before it ran."""
    manager = manager_of(params=params, caching=caching)
    context = TextContext(PROMPT, 256, "r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    if reset:
        manager.reset_prefix_cache()
    manager.fetch([context])
    context.update(7)
    manager.step([context])
    return manager, context


@pytest.mark.parametrize("params", [FULL, WINDOW])
@pytest.mark.parametrize("reset", [False, True])
def test_the_table_of_a_request_that_has_run_again_ends_where_it_ran_last(
    params: dict[str, Any], *, reset: bool
) -> None:
    source, context = prefilled(params, reset=reset)
    context.set_token_indices(start_idx=0, active_idx=7)
    source.fetch([context])
    context.update(7)
    source.step([context])
    table = source.block_table("r")
    assert (table.num_tokens, len(table.digests)) == (7, 32)
    target = manager_of(params=params)
    theirs = receiver(target)
    pending = target.import_block_table(theirs, table)
    assert pending is not None
    target.commit_import(theirs, pending, proven(target, pending))
    assert theirs.start_idx == 7


@pytest.mark.parametrize(("params", "reset"), [(FULL, True), (WINDOW, False), (WINDOW, True)])
def test_a_table_without_the_digests_of_dropped_tokens_is_not_exported(params: dict[str, Any], *, reset: bool) -> None:
    """Every reader would refuse it. Published pages of full attention have their digests in the index."""
    source, context = prefilled(params, reset=reset)
    context.set_token_indices(start_idx=4, active_idx=5, end_idx=5)
    with pytest.raises(InvalidRequestError, match="'r': its context has fewer than 18 tokens"):
        source.block_table("r")


@pytest.mark.parametrize("reset", [False, True])
def test_a_table_without_prefix_caching_has_no_digests(*, reset: bool) -> None:
    source, context = prefilled(FULL, reset=reset, caching=False)
    context.set_token_indices(start_idx=4, active_idx=5, end_idx=5)
    table = source.block_table("r")
    assert (table.num_tokens, table.digests, table.hash_algorithm) == (18, b"", "")
