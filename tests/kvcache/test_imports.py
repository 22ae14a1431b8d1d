from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvcache import (
    BlockTable,
    BlockTableMismatchError,
    InvalidRequestError,
    NotReservedError,
    PagedKVCacheManager,
    TextContext,
    UnknownRequestError,
)

PROMPT = list(range(100, 118))  # 18 tokens: 4 full pages of 4 and a partial one


def prefilled(make: Any, tokens: list[int] = PROMPT, **options: Any) -> tuple[PagedKVCacheManager, BlockTable]:
    manager = make(16, page_size=4, **options)
    context = TextContext(tokens, 256, "p")
    manager.external_claim("p")
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    for shard in manager.device_tensors[0]:
        for page in manager.get_req_blocks("p"):
            shard[page] = page * 1000 + torch.arange(shard[page].numel()).reshape(shard[page].shape)
    context.update(7)
    manager.step([context])
    return manager, manager.block_table("p")


def receiver(manager: PagedKVCacheManager, tokens: list[int] = PROMPT, name: str = "d") -> TextContext:
    context = TextContext([*tokens, 7], 256, name)
    manager.external_claim(name)
    return context


def copy(source: PagedKVCacheManager, target: PagedKVCacheManager, pending: Any) -> None:
    for theirs, ours in zip(source.device_tensors[0], target.device_tensors[0], strict=True):
        ours[pending.dst_pages.tolist()] = theirs[pending.src_pages.tolist()]


def test_a_table_survives_the_wire(make: Any) -> None:
    manager, table = prefilled(make)
    assert table.num_tokens == 18
    assert table.groups == (tuple(manager.get_req_blocks("p")),)
    assert len(table.digests) == 4 * 32
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=BlockTable) == table


@pytest.mark.parametrize("caching", [True, False])
def test_pages_are_copied_committed_and_run(make: Any, caching: bool) -> None:
    source, table = prefilled(make)
    target = make(16, page_size=4, caching=caching)
    context = receiver(target)
    pending = target.import_block_table(context, table, num_steps=3)
    assert pending.src_pages.tolist() == list(table.groups[0])
    assert pending.dst_pages.tolist() == target.get_req_blocks("d")[:5]
    for call in (target.fetch, target.step, lambda batch: target.maybe_reserve(batch[0])):
        with pytest.raises(NotReservedError, match="'d'.*import is pending"):
            call([context])
    copy(source, target, pending)
    target.commit_import(context, pending)
    assert (context.start_idx, context.active_idx, context.end_idx) == (18, 19, 19)
    (entry,) = target.fetch([context])
    assert entry.cache_lengths.tolist() == [18]
    for mine, theirs in zip(target.get_req_blocks("d"), table.groups[0], strict=False):
        assert torch.equal(entry.blocks[mine], source.device_tensors[0][0][theirs])
    assert target.metrics.input_tokens == 0  # the prompt ran elsewhere
    source.release("p")
    assert source.num_free_blocks == 16
    again = receiver(target, name="again")
    assert target.maybe_reserve(again)
    assert again.start_idx == (16 if caching else 0)


def test_what_is_cached_here_is_not_copied(make: Any) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    first = receiver(target)
    target.commit_import(first, target.import_block_table(first, table))
    second = receiver(target, name="e")
    pending = target.import_block_table(second, table)
    assert pending.src_pages.tolist() == [table.groups[0][4]]  # only the partial page
    target.commit_import(second, pending)
    assert second.start_idx == 18
    whole_source, whole = prefilled(make, PROMPT[:16])
    third = receiver(target, PROMPT[:16], name="f")
    nothing = target.import_block_table(third, whole)
    assert nothing.src_pages.size == 0
    target.commit_import(third, nothing)
    assert third.start_idx == 16
    assert whole_source.contains("p")


def test_until_commit_the_pages_are_in_no_index(make: Any) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target)
    pending = target.import_block_table(context, table)
    other = receiver(target, name="other")
    assert target.maybe_reserve(other)
    assert other.start_idx == 0
    target.commit_import(context, pending)
    target.release("other")
    late = receiver(target, name="late")
    assert target.maybe_reserve(late)
    assert late.start_idx == 16


def test_too_few_pages_is_none_and_changes_nothing(make: Any) -> None:
    _, table = prefilled(make)
    target = make(8, page_size=4)
    hog = TextContext(range(16), 64, "hog")
    target.external_claim("hog")
    assert target.maybe_reserve(hog)
    context = receiver(target)
    assert target.import_block_table(context, table) is None
    assert target.num_free_blocks == 4
    target.release("hog")
    assert target.import_block_table(context, table) is not None


def test_pages_of_a_released_request_stay_with_the_transfer_until_it_is_over(make: Any) -> None:
    _, table = prefilled(make)
    target = make(5, page_size=4)
    context = receiver(target)
    pending = target.import_block_table(context, table)
    target.release("d")
    assert target.num_free_blocks == 0  # a READ may still write there
    other = TextContext([1], 64, "other")
    target.external_claim("other")
    assert not target.maybe_reserve(other)
    with pytest.raises(UnknownRequestError, match="'d': commit_import"):
        target.commit_import(context, pending)
    target.external_claim("d")  # the same name, another request
    with pytest.raises(InvalidRequestError, match="closed, or another"):
        target.commit_import(context, pending)
    target.cancel_import(pending)
    target.cancel_import(pending)
    assert target.num_free_blocks == 5
    assert target.maybe_reserve(other)


def test_a_cancelled_import_leaves_a_request_that_computes_for_itself(make: Any) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target)
    pending = target.import_block_table(context, table)
    target.cancel_import(pending)
    with pytest.raises(InvalidRequestError, match="closed"):
        target.commit_import(context, pending)
    assert context.start_idx == 0
    assert target.maybe_reserve(context)
    target.fetch([context])
    context.update(8)
    target.step([context])
    assert target.block_table("d").num_tokens == 19


def change(table: BlockTable, **fields: Any) -> BlockTable:
    return msgspec.structs.replace(table, **fields)


def test_a_table_that_does_not_fit_is_refused_by_name(make: Any) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target)
    pages = table.groups[0]
    bad: list[tuple[BlockTable, str]] = [
        (change(table, page_size=8), "pages of 8 tokens, this manager of 4"),
        (change(table, fingerprint="x"), "page layout 'x'"),
        (change(table, num_tokens=0), "covers 0 of the request's 19 tokens"),
        (change(table, num_tokens=19), "covers 19 of the request's 19 tokens"),
        (change(table, num_tokens=13), "names 5 pages, its 13 tokens take 4"),
        (change(table, groups=()), "0 page groups"),
        (change(table, groups=(pages, pages)), "2 page groups"),
        (change(table, groups=(pages[:-1],)), "names 4 pages, its 18 tokens take 5"),
        (change(table, groups=((*pages[:-1], 0),)), "names page 0"),
        (change(table, groups=((*pages[:-1], 1 << 31),)), "names page 2147483648"),
        (change(table, groups=((*pages[:-1], pages[0]),)), "names a page twice"),
        (change(table, digests=table.digests[:-1]), "127 bytes of digests"),
        (change(table, digests=table.digests * 2), "256 bytes of digests"),
    ]
    for wrong, message in bad:
        with pytest.raises(BlockTableMismatchError, match=f"'d': the block table .*{message}"):
            target.import_block_table(context, wrong)
    assert target.num_free_blocks == 16
    _, other = prefilled(make, [*PROMPT[:5], 1, *PROMPT[6:]])
    with pytest.raises(BlockTableMismatchError, match="other tokens .*from page 1 on"):
        target.import_block_table(context, other)
    salted = TextContext([*PROMPT, 7], 256, "s", cache_salt="tenant")
    target.external_claim("s")
    with pytest.raises(BlockTableMismatchError, match="cache_salt"):
        target.import_block_table(salted, table)
    assert target.import_block_table(context, table) is not None


def test_import_comes_before_any_other_page(make: Any) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target)
    assert target.maybe_reserve(context)
    with pytest.raises(InvalidRequestError, match="'d': has 5 pages already"):
        target.import_block_table(context, table)


def test_other_geometries_have_other_fingerprints(make: Any) -> None:
    prints = [make(4, **options).fingerprint for options in ({}, {"layers": 2}, {"heads": 2}, {"tp": 2, "heads": 2})]
    assert len(set(prints)) == 4


def test_block_table_before_a_step_is_refused(make: Any) -> None:
    manager = make(16)
    manager.external_claim("p")
    with pytest.raises(InvalidRequestError, match="'p': no tokens computed yet"):
        manager.block_table("p")


def test_exported_digests_are_those_of_the_published_pages(make: Any) -> None:
    manager, table = prefilled(make, caching=True)
    replica = manager._replicas.each[0]
    published = replica.pool.index.find(np.frombuffer(table.digests, np.uint64).reshape(-1, 4))
    assert published.tolist() == list(table.groups[0][:4])
