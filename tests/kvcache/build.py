from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvcache import ImportProof, KVCacheParams, PagedKVCacheManager, PendingImport, TextContext
from kvcache.layer_groups import layer_tables
from kvcache.params import StateShape
from kvcache.replica.row_states import StateImportPart
from kvcache.sizing import page_bytes
from kvcache.states.state_memory import room_apart
from kvcache.states.state_pages import StatePages
from kvcache.under_way import UnderWay

_LOWER = ("file_tier", "object_tier")


def manager_of(
    pages: int = 64,
    *,
    page_size: int = 4,
    rows: int = 8,
    max_seq_len: int = 256,
    layers: int = 1,
    dp: int = 1,
    tp: int = 1,
    heads: int | None = None,
    head_dim: int = 2,
    caching: bool = True,
    checks: bool = True,
    dtype: torch.dtype = torch.float32,
    params: dict[str, Any] | None = None,
    host_slots: int = 0,
    device: str = "cpu",
    **options: Any,
) -> PagedKVCacheManager:
    """Returns a manager on one device, with `pages` pages for each replica and `host_slots` pages of host memory for
    all replicas.
    """
    made = KVCacheParams(
        dtype=dtype,
        n_kv_heads=tp if heads is None else heads,
        head_dim=head_dim,
        enable_prefix_caching=caching,
        page_size=page_size,
        n_devices=dp * tp,
        data_parallel_degree=dp,
        **{name: value for name, value in (params or {}).items() if not name.startswith(_LOWER)},
    )
    if host_slots:  # The host memory can be sized only after the manager knows the size of a page.
        tables = layer_tables(made.groups, layers)
        space = page_bytes(made, tables.layers_per_page, page_size) * host_slots / 2**30
        files = {name: value for name, value in (params or {}).items() if name.startswith(_LOWER)}
        made = dataclasses.replace(
            made, enable_kvcache_swapping_to_host=True, host_kvcache_swap_space_gb=space, **files
        )
    per_page = layer_tables(made.groups, layers).layers_per_page
    return PagedKVCacheManager(
        made,
        max_batch_size=rows * dp,
        max_seq_len=max_seq_len,
        num_layers=layers,
        devices=[device] * (dp * tp),
        available_cache_memory=page_bytes(made, per_page, page_size) * pages * dp,
        enable_runtime_checks=checks,
        **options,
    )


def run_once(manager: PagedKVCacheManager, tokens: Sequence[int], replica: int | None = None, **options: Any) -> int:
    """Runs one request from its claim to its first token. Returns the number of tokens that it found cached."""
    context = TextContext(tokens, len(tokens) + 1, **options)
    with manager.claim(context, replica):
        assert manager.maybe_reserve(context)
        found = context.start_idx
        manager.fetch([context])
        context.update(1)
        manager.step([context])
    return found


def as_long_as(condition: Callable[[], bool], most: int = 2000) -> Iterator[int]:
    """Yields while `condition` holds. Fails after `most` rounds, so that no fault leaves a test to its time limit."""
    for at in range(most):
        if not condition():
            return
        yield at
    pytest.fail(f"a loop that should end does not end within {most} rounds")


def evict_idle(manager: PagedKVCacheManager) -> None:
    """Evicts every idle page, as requests do that need all free pages. Pages in use stay cached."""
    for replica in manager._replicas.each:
        replica.pool.release(replica.pool.allocate(replica.pool.free_count))


def proven(manager: PagedKVCacheManager, pending: PendingImport) -> ImportProof:
    """Returns a proof without a check. The test itself must make sure that the pages of an import have the right
    content.
    """
    copier = manager.copier(pending)
    copier.take()
    return copier.prove()


def state_pages(pending: PendingImport) -> tuple[int, int]:
    """Returns two state pages: the source page of an import's copy, and its target page."""
    part = pending.parts[-1]
    assert isinstance(part, StateImportPart)
    return int(part.src_pages[0]), int(part.dst_pages[0])


def states_of(
    shape: StateShape, num_pages: int, devices: Sequence[str] = ("cpu",), digest_words: int = 1
) -> StatePages:
    """Returns pages for recurrent states, in their own memory and without a manager."""
    return StatePages(shape, room_apart(shape, num_pages, devices, digest_words), UnderWay())
