"""Imports from a source with another page size. Every page that the import publishes must be complete in each table,
wherever windows begin.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import BlockTable, BlockTableMismatchError, LayerGroup, PagedKVCacheManager, PendingImport, TextContext
from kvcache.replica.copier import ImportCopier
from tests.kvcache.build import as_long_as, manager_of
from tests.kvcache.kv import KVTokens, goes_on

WINDOW = 7
GROUPS = LayerGroup("full", (0,)), LayerGroup("window", (1,), WINDOW), LayerGroup("chunked", (2,), 10)
NEXT = 7
STEPS = 3  # The number of steps that an imported request runs. Some steps fill its last page.


def make(page_size: int) -> PagedKVCacheManager:
    pages = 600 // page_size  # The pool is so small that some pages are evicted.
    manager = manager_of(
        pages, page_size=page_size, layers=3, dtype=torch.int64, max_seq_len=96, params={"groups": GROUPS}
    )
    for tensor in manager.device_tensors[0]:
        tensor.fill_(-1)  # The value -1 reveals a read of memory that was never written.
    return manager


def chunks(manager: PagedKVCacheManager, context: TextContext, chunk: int) -> Iterator[bool]:
    """Runs a claimed request in chunks up to its first new token. After each chunk, yields whether the chunk was the
    last one.
    """
    length = context.end_idx
    for _ in as_long_as(lambda: context.start_idx < length):
        context.set_token_indices(active_idx=min(length, context.start_idx + chunk))
        assert manager.maybe_reserve(context)
        KVTokens(manager).run_contexts([context], manager.fetch([context]))
        context.update(NEXT)
        manager.step([context])
        yield context.end_idx > length


def copy(source: PagedKVCacheManager, target: PagedKVCacheManager, copier: ImportCopier, *, last: bool) -> None:
    """Copies the KV of exactly the tokens that the copier names. Other parts of their pages are not copied."""
    here, there = target.page_size, source.page_size
    for ours, theirs, (first, stop) in copier.take(last=last):
        tokens = np.arange(first, stop)
        dst = np.asarray(ours)[tokens // here - first // here]
        src = np.asarray(theirs)[tokens // there - first // there]
        pages = source.device_tensors[0][0].numpy()
        target.device_tensors[0][0].numpy()[dst, :, :, tokens % here] = pages[src, :, :, tokens % there]


class HandOver:
    """A source that runs prompts in chunks, and a target that pulls the prompts at once or chunk by chunk."""

    def __init__(self, there: int, here: int, *, chunkwise: bool) -> None:
        self.source, self.target, self.chunkwise = make(there), make(here), chunkwise
        self.seen: Counter[str] = Counter()

    def pull(self, tokens: list[int], name: str) -> TextContext | None:
        """Pulls a request and runs a few steps of it at the target. Returns the request, or None if the target has
        refused the source's pages.
        """
        target, context = self.target, TextContext(tokens, 256, name)
        target.external_claim(name, 0)
        pending: PendingImport | None = None
        copier: ImportCopier | None = None
        tables = self._tables(tokens, name)
        try:
            for table, last in tables:
                if last:
                    context.update(NEXT)
                if pending is None or copier is None:
                    pending = target.import_block_table(context, table, partial=not last)
                    assert pending is not None
                    copier = target.copier(pending)
                else:
                    target.extend_import(context, pending, table, last=last)
                copy(self.source, target, copier, last=last)
        except BlockTableMismatchError as error:
            if "are needed" not in str(error):
                raise
            self.seen["refused"] += 1
            if pending is not None and copier is not None:
                copier.give_up()
                target.cancel_import(pending)
            target.release(name)
            tables.close()
            return None
        assert pending is not None
        assert copier is not None
        target.commit_import(context, pending, copier.prove() if pending.needs_copy else None)
        self.seen["pulled"] += 1
        goes_on(target, context, STEPS)
        return context

    def _tables(self, tokens: list[int], name: str) -> Generator[tuple[BlockTable, bool]]:
        """Yields the source's table after each chunk that fills a page and after the last chunk. With each table,
        yields whether it is the last table.
        """
        source, context = self.source, TextContext(tokens, 256, name)
        source.external_claim(name, 0)
        try:
            for last in chunks(source, context, 8):
                if last or (self.chunkwise and context.start_idx >= source.page_size):
                    yield source.block_table(name, full_pages=not last), last
        finally:
            source.release(name)

    def prefixes(self, context: TextContext, ends: range) -> None:
        """Runs requests at the target that share the first tokens of the imported request."""
        for end in ends:
            name = f"{context.request_id} to {end}"
            other = TextContext([*context.tokens[:end].tolist(), 1, 2], 256, name)
            self.target.external_claim(name, 0)
            assert self.target.maybe_reserve(other)
            self.seen["found"] += other.start_idx > 0
            goes_on(self.target, other, 1)
            self.target.release(name)
        self.target.check()


def is_whole(tokens: int, there: int, here: int) -> bool:
    """Returns whether, in every table, the source names all tokens of the first page that the target needs."""
    firsts = [int(group.first_seen(np.array(tokens))) for group in GROUPS]
    return all(first // there * there <= first // here * here for first in firsts)


def check(there: int, here: int, lengths: range, *, chunkwise: bool) -> Counter[str]:
    """Hands over prompts of these lengths, first each prompt alone, and then all prompts with a common prefix."""
    pair = HandOver(there, here, chunkwise=chunkwise)
    for length in lengths:
        context = pair.pull([1000 + length, *range(100, 99 + length)], f"alone {length}")
        assert (context is not None) is is_whole(length, there, here), f"{length} tokens"
        if context is not None:
            pair.target.release(context.request_id)
            pair.prefixes(context, range(max(1, length - 2 * here), length + STEPS + 1))
    for length in [*lengths[1::2], *lengths[::-2]]:
        context = pair.pull([*range(500, 500 + length)], f"shared {length}")
        if context is not None:
            pair.target.release(context.request_id)
            pair.prefixes(context, range(max(1, length - here), length + STEPS + 1))
    for manager in (pair.source, pair.target):
        assert manager.num_free_blocks == manager.total_num_pages
    return pair.seen


SIZES = (2, 3, 4, 6, 8)
OFTEN = {(4, 4, True), (2, 4, False), (4, 2, True), (4, 6, False), (6, 4, True), (2, 6, True), (3, 2, False)}


def _cells() -> list[Any]:
    return [
        pytest.param(*cell, marks=[] if cell in OFTEN else pytest.mark.long)
        for cell in itertools.product(SIZES, SIZES, (False, True))
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize(("there", "here", "chunkwise"), _cells())
def test_imported_pages_are_complete_wherever_windows_begin(there: int, here: int, *, chunkwise: bool) -> None:
    """The chunks have 30 tokens. If the prompt ends with a chunk, the source has no page of a next chunk."""
    often = (there, here, chunkwise) in OFTEN
    seen = check(there, here, range(24, 36 if often else 64), chunkwise=chunkwise)
    assert (seen["refused"] > 0) is (there % here > 0), seen
    assert seen["pulled"] > 2, seen
    assert seen["found"] > 10, seen
