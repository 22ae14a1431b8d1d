from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvcache import (
    BlockTable,
    BlockTableMismatchError,
    InvalidRequestError,
    LayerGroup,
    NotReservedError,
    PagedKVCacheManager,
    TextContext,
    UnknownRequestError,
)
from kvcache.params import StateShape
from tests.kvcache.build import proven

PROMPT = list(range(100, 118))  # 18 tokens take 4 full pages of 4 tokens and a partial page.


def prefilled(
    make: Any, tokens: list[int] = PROMPT, size: int = 4, **options: Any
) -> tuple[PagedKVCacheManager, BlockTable]:
    manager = make(64 // size, page_size=size, **options) if tokens is PROMPT else make(40, page_size=size, **options)
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


def handed_over(make: Any) -> tuple[BlockTable, Any, TextContext]:
    """Returns three values: the table of a prompt that another manager has prefilled, a manager without this prompt,
    and the request in this manager.
    """
    _, table = prefilled(make)
    target = make(16, page_size=4)
    return table, target, receiver(target)


def imported(make: Any) -> tuple[BlockTable, Any]:
    """Returns the same values as `handed_over`, but another request has already imported the prompt."""
    table, target, first = handed_over(make)
    pending = target.import_block_table(first, table)
    target.commit_import(first, pending, proven(target, pending))
    return table, target


def copy(source: PagedKVCacheManager, target: PagedKVCacheManager, pending: Any) -> None:
    for theirs, ours in zip(source.device_tensors[0], target.device_tensors[0], strict=True):
        ours[pending.parts[0].dst_pages.tolist()] = theirs[pending.parts[0].src_pages.tolist()]


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
    assert pending.parts[0].src_pages.tolist() == list(table.groups[0])
    assert pending.parts[0].dst_pages.tolist() == target.get_req_blocks("d")[:5]
    for call in (target.fetch, target.step, lambda batch: target.maybe_reserve(batch[0])):
        with pytest.raises(NotReservedError, match="'d'.*import is pending"):
            call([context])
    copy(source, target, pending)
    target.commit_import(context, pending, proven(target, pending))
    assert (context.start_idx, context.active_idx, context.end_idx) == (18, 19, 19)
    (entry,) = target.fetch([context])
    assert entry.cache_lengths.tolist() == [18]
    for mine, theirs in zip(target.get_req_blocks("d"), table.groups[0], strict=False):
        assert torch.equal(entry.blocks[mine], source.device_tensors[0][0][theirs])
    assert target.metrics.input_tokens == 0  # Another manager has computed the prompt.
    assert np.count_nonzero(target._replicas.each[0].pool.index.published) == (4 if caching else 0)
    source.release("p")
    assert source.num_free_blocks == 16
    again = receiver(target, name="again")
    assert target.maybe_reserve(again)
    assert again.start_idx == (16 if caching else 0)


def test_pages_that_are_cached_at_the_target_are_not_copied(make: Any) -> None:
    table, target = imported(make)
    second = receiver(target, name="e")
    pending = target.import_block_table(second, table)
    assert pending.parts[0].src_pages.tolist() == [table.groups[0][4]]  # The import copies only the partial page.
    target.commit_import(second, pending, proven(target, pending))
    assert second.start_idx == 18
    whole_source, whole = prefilled(make, PROMPT[:16])
    third = receiver(target, PROMPT[:16], name="f")
    nothing = target.import_block_table(third, whole)
    assert nothing.parts[0].src_pages.size == 0
    target.commit_import(third, nothing)
    assert third.start_idx == 16
    assert whole_source.contains("p")


def test_imported_pages_are_found_and_named_in_block_tables_before_the_request_runs(make: Any) -> None:
    _, table = prefilled(make, PROMPT[:12])
    target = make(16, page_size=4)
    first = receiver(target, PROMPT[:12])
    pending = target.import_block_table(first, beginning(table, 8))
    target.commit_import(first, pending, proven(target, pending))
    # Two pages of the second request are cached here. Its third page is copied.
    second = receiver(target, PROMPT[:12], name="e")
    pending = target.import_block_table(second, table)
    assert pending.tokens == (8, 12)
    target.commit_import(second, pending, proven(target, pending))
    told = target.block_table("e")
    assert (told.num_tokens, len(told.digests)) == (12, 3 * 32)
    assert target.contents.cached(0, target.contents.digests(second)) == 12
    target.check()


@pytest.mark.parametrize("covers", [4, 8, 12, 14, 16])
def test_a_table_shorter_than_the_cached_prefix_shortens_nothing(make: Any, covers: int) -> None:
    table, target = imported(make)
    second = receiver(target, name="e")
    part = beginning(table, covers)
    if covers % 4:
        part = change(part, groups=(table.groups[0][: -(-covers // 4)],))
    pending = target.import_block_table(second, part)
    assert pending.parts[0].src_pages.size == pending.parts[0].dst_pages.size == 0
    here = -(-covers // 4) * 4  # The cached tokens end at the end of a page.
    assert pending.tokens == pending.take(last=True)[0].tokens == (here, here)
    target.commit_import(second, pending)
    assert (second.start_idx, second.active_idx) == (16, 19)
    assert target.maybe_reserve(second)
    target.fetch([second])
    second.update(1)
    target.step([second])
    assert target.get_req_blocks("e")[:4] == target.get_req_blocks("d")[:4]
    target.check()


@pytest.mark.parametrize("last", [4, 8, 16])
def test_an_import_that_ends_within_the_cached_prefix_is_complete(make: Any, last: int) -> None:
    table, target = imported(make)
    second = receiver(target, name="e")
    pending = target.import_block_table(second, beginning(table, 4), partial=True)
    assert second.start_idx == 16
    assert target.extend_import(second, pending, beginning(table, last), last=True).tokens == (16, 16)
    assert not pending.needs_copy
    target.commit_import(second, pending)
    assert (second.start_idx, second.active_idx) == (16, 19)


def test_imported_pages_are_in_no_index_before_the_commit(make: Any) -> None:
    table, target, context = handed_over(make)
    pending = target.import_block_table(context, table)
    other = receiver(target, name="other")
    assert target.maybe_reserve(other)
    assert other.start_idx == 0
    target.commit_import(context, pending, proven(target, pending))
    target.release("other")
    late = receiver(target, name="late")
    assert target.maybe_reserve(late)
    assert late.start_idx == 16


def test_an_import_without_enough_free_pages_returns_none_and_changes_nothing(make: Any) -> None:
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
    assert target.num_free_blocks == 0  # The copier of the cancelled import may still write into these pages.
    other = TextContext([1], 64, "other")
    target.external_claim("other")
    assert not target.maybe_reserve(other)
    with pytest.raises(UnknownRequestError, match="'d': commit_import"):
        target.commit_import(context, pending)
    target.external_claim("d")  # A new request takes the name "d".
    with pytest.raises(InvalidRequestError, match="belongs to another request"):
        target.commit_import(context, pending)
    target.cancel_import(pending)
    target.cancel_import(pending)
    assert target.num_free_blocks == 5
    assert target.maybe_reserve(other)


def test_a_cancelled_import_leaves_a_request_that_computes_for_itself(make: Any) -> None:
    table, target, context = handed_over(make)
    pending = target.import_block_table(context, table)
    target.cancel_import(pending)
    with pytest.raises(InvalidRequestError, match="already finished or cancelled"):
        target.commit_import(context, pending)
    assert context.start_idx == 0
    pages = target.get_req_blocks("d")
    target.fetch([context])
    assert target.maybe_reserve(context)
    assert target.get_req_blocks("d") == pages
    target.fetch([context])
    context.update(8)
    target.step([context])
    assert target.block_table("d").num_tokens == 19


def change(table: BlockTable, **fields: Any) -> BlockTable:
    return msgspec.structs.replace(table, **fields)


def test_a_table_that_does_not_fit_is_refused_by_name(make: Any) -> None:
    table, target, context = handed_over(make)
    pages = table.groups[0]
    bad: list[tuple[BlockTable, str]] = [
        (change(table, page_size=8), "names 5 pages; its 18 tokens take 3"),
        (change(table, page_size=0), "has pages of 0 tokens"),
        (change(table, page_size=1 << 31), "has pages of 2147483648 tokens"),
        (change(table, hash_algorithm="md5"), "digests by 'md5'; this process knows sha256, blake3, xxh3_128"),
        (change(table, num_tokens=0), "covers 0 of the request's 19 tokens"),
        (change(table, num_tokens=19), "covers 19 of the request's 19 tokens"),
        (change(table, num_tokens=13), "names 5 pages; its 13 tokens take 4"),
        (change(table, groups=()), "0 page groups"),
        (change(table, groups=(pages, pages)), "2 page groups"),
        (change(table, groups=(pages[:-1],)), "names 4 pages; its 18 tokens take 5"),
        (change(table, groups=((*pages[:-1], 0),)), "names page 0"),
        (change(table, groups=((*pages[:-1], 1 << 31),)), "names page 2147483648"),
        (change(table, groups=((*pages[:-1], pages[0]),)), "names a page twice"),
        (change(table, groups=((*pages[:-1], "1"),)), "has a field of the wrong type"),
        (change(table, page_size="4"), "has a field of the wrong type"),
        (change(table, kinds=(1,)), "has a field of the wrong type"),
        (change(table, digests=table.digests[:-1]), "127 bytes of digests"),
        (change(table, digests=table.digests * 2), "256 bytes of digests"),
        (change(table, digests=b""), "0 bytes of digests, which do not fit its 4 full pages .18 tokens"),
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


@pytest.mark.parametrize(
    ("partial", "message"),
    [(False, "pages of 8 tokens, but the first table has pages of 4"), (True, "does not cover the whole prompt yet")],
)
def test_further_tables_must_have_pages_of_the_size_of_the_first_table(make: Any, partial: bool, message: str) -> None:
    table, target, context = handed_over(make)
    _, other = prefilled(make, size=8)
    if partial:
        table = other = beginning(table, 8)
    with pytest.raises(BlockTableMismatchError, match=f"'d': the block table in `others` has .*{message}"):
        target.import_block_table(context, table, partial=partial, others=[other])
    assert target.num_free_blocks == 16


OTHER_PAGES = [(4, 16), (16, 4), (4, 6), (8, 3)]


@pytest.mark.parametrize(("theirs", "ours"), OTHER_PAGES)
@pytest.mark.parametrize("hashes", [("sha256", "sha256"), ("sha256", "xxh3_128"), ("blake3", "sha256")])
def test_a_refused_table_of_another_page_size_is_described_in_pages_of_both_sizes(
    make: Any, theirs: int, ours: int, hashes: tuple[str, str]
) -> None:
    tokens = list(range(100, 170))
    _, table = prefilled(make, tokens, size=theirs, params={"hash_algorithm": hashes[0]})
    target = make(40, page_size=ours, params={"hash_algorithm": hashes[1]})
    first = receiver(target, tokens)
    pending = target.import_block_table(first, table)
    assert pending.tokens == (0, 70)
    assert pending.parts[0].src_pages.tolist() == list(table.groups[0])
    assert pending.parts[0].dst_pages.tolist() == target.get_req_blocks("d")[: -(-70 // ours)]
    target.commit_import(first, pending, proven(target, pending))
    second = receiver(target, [*tokens[:50], 9, *tokens[51:]], "e")
    _, other = prefilled(make, [*tokens[:50], 9, *tokens[51:]], size=theirs, params={"hash_algorithm": hashes[0]})
    pending = target.import_block_table(second, other)
    # The cached tokens end at the end of a target page, which may be within a source page.
    start = 50 // ours * ours
    assert pending.tokens == (start, 70)
    assert pending.parts[0].src_pages.tolist() == list(other.groups[0][start // theirs :])
    assert pending.parts[0].dst_pages.tolist() == target.get_req_blocks("e")[start // ours : -(-70 // ours)]
    target.commit_import(second, pending, proven(target, pending))
    assert second.start_idx == 70


@pytest.mark.parametrize(("theirs", "ours"), [*OTHER_PAGES, (4, 4)])
def test_another_page_size_hides_neither_other_tokens_nor_another_salt(make: Any, theirs: int, ours: int) -> None:
    tokens = list(range(100, 170))
    _, table = prefilled(make, tokens, size=theirs)
    target = make(40, page_size=ours, params={"hash_algorithm": "xxh3_128"})
    salted = TextContext([*tokens, 7], 256, "s", cache_salt="tenant")
    target.external_claim("s")
    with pytest.raises(BlockTableMismatchError, match="'s': .*another cache_salt.*from page 0 on"):
        target.import_block_table(salted, table)
    context = receiver(target, [*tokens[:33], 1, *tokens[34:]])
    with pytest.raises(BlockTableMismatchError, match=f"other tokens .*from page {33 // theirs} on"):
        target.import_block_table(context, table)
    assert target.num_free_blocks == 40


def beginning(table: BlockTable, tokens: int) -> BlockTable:
    count = tokens // table.page_size
    return change(table, num_tokens=tokens, groups=(table.groups[0][:count],), digests=table.digests[: count * 32])


@pytest.mark.parametrize(("theirs", "ours"), [*OTHER_PAGES, (4, 4)])
def test_a_growing_import_names_each_page_once_the_source_has_it(make: Any, theirs: int, ours: int) -> None:
    tokens = list(range(100, 170))
    _, table = prefilled(make, tokens, size=theirs)
    target = make(40, page_size=ours)
    context = TextContext(tokens, 256, "d")  # The context does not know its first new token yet.
    target.external_claim("d")
    pending = target.import_block_table(context, beginning(table, 16), 2, partial=True)
    assert pending.tokens == (0, 16)
    assert pending.parts[0].dst_pages.tolist() == target.get_req_blocks("d")[: -(-70 // ours)]
    assert target.extend_import(context, pending, beginning(table, 16), last=False).tokens == (16, 16)
    dst, src, span = target.extend_import(context, pending, beginning(table, 48), last=False)
    assert span == (16, 48)
    assert src.tolist() == list(table.groups[0][16 // theirs : 48 // theirs])
    assert dst.tolist() == pending.parts[0].dst_pages[16 // ours :].tolist()
    with pytest.raises(BlockTableMismatchError, match="covers 70 of the request's 70 tokens"):
        target.extend_import(context, pending, table, last=True)
    context.update(7)
    dst, src, span = target.extend_import(context, pending, table, last=True)
    assert span == (48, 70)
    assert src.tolist() == list(table.groups[0][48 // theirs :])
    assert pending.tokens == (0, 70)
    target.commit_import(context, pending, proven(target, pending))
    assert (context.start_idx, context.active_idx, context.end_idx) == (70, 71, 71)
    target.fetch([context])


def from_page(table: BlockTable, first: int) -> BlockTable:
    """Returns the table that a source gives if it was asked for the pages after the first `first` pages."""
    return change(table, first_page=first, groups=(table.groups[0][first:],), digests=table.digests[first * 32 :])


@pytest.mark.parametrize(("theirs", "ours"), [*OTHER_PAGES, (4, 4)])
def test_a_table_that_begins_later_follows_the_cached_pages(make: Any, theirs: int, ours: int) -> None:
    tokens = list(range(100, 170))
    _, table = prefilled(make, tokens, size=theirs)
    target = make(40, page_size=ours)
    context = receiver(target, tokens)
    pending = target.import_block_table(context, beginning(table, 48))
    target.commit_import(context, pending, proven(target, pending))
    target.release("d")
    context = receiver(target, tokens)
    first = 48 // theirs // 2  # The source leaves out half of the pages that are cached here.
    pending = target.import_block_table(context, from_page(table, first))
    assert pending.tokens == (48, 70)
    assert pending.parts[0].src_pages.tolist() == list(table.groups[0][48 // theirs :])
    assert pending.parts[0].dst_pages.tolist() == target.get_req_blocks("d")[48 // ours : -(-70 // ours)]
    target.commit_import(context, pending, proven(target, pending))
    assert context.start_idx == 70


def test_a_table_that_leaves_a_gap_is_refused_and_takes_no_page(make: Any) -> None:
    table, target, context = handed_over(make)
    pending = target.import_block_table(context, beginning(table, 8))
    target.commit_import(context, pending, proven(target, pending))
    target.release("d")
    context = receiver(target)
    hole = "begins at token 12, but only 8 tokens before it are cached here"
    with pytest.raises(BlockTableMismatchError, match=f"'d': the block table {hole}"):
        target.import_block_table(context, from_page(table, 3))
    assert target.num_held_blocks == 0
    # A context may claim to start at token 12. The claim does not fill the gap between the cached pages and the table.
    context.set_token_indices(start_idx=12, active_idx=19)
    with pytest.raises(BlockTableMismatchError, match=f"'d': the block table {hole}"):
        target.import_block_table(context, from_page(table, 3))
    bad = [
        (change(table, first_page=1), "names 5 pages; its 18 tokens take 4 from page 1 on"),
        (change(table, first_page=-1), "begins with page -1, but its 18 tokens are in pages 0 to 4"),
        (change(table, first_page=9), "begins with page 9, but its 18 tokens are in pages 0 to 4"),
        (
            change(from_page(table, 4), num_tokens=16, groups=((),)),
            "begins with page 4, but its 16 tokens are in pages 0 to 3",
        ),
        (
            change(from_page(table, 2), digests=table.digests),
            "128 bytes of digests, which do not fit its 2 full pages .18 tokens",
        ),
        (change(from_page(table, 1), digests=table.digests[:96]), "holds other tokens .*from page 1 on"),
    ]
    for wrong, message in bad:
        with pytest.raises(BlockTableMismatchError, match=message):
            target.import_block_table(context, wrong)
    assert target.num_held_blocks == 0
    pending = target.import_block_table(context, from_page(table, 2))
    assert target.extend_import(context, pending, from_page(table, 3), last=True).tokens == (18, 18)
    assert target.extend_import(context, pending, from_page(table, 1), last=True).tokens == (18, 18)
    target.release("d")
    target.cancel_import(pending)
    context = receiver(target)
    # All pages of this table are cached here.
    pending = target.import_block_table(context, beginning(table, 8), partial=True)
    with pytest.raises(BlockTableMismatchError, match="names other pages than the earlier table"):
        target.extend_import(context, pending, from_page(table, 3), last=True)


def test_a_growing_import_refuses_what_does_not_continue_it(make: Any) -> None:
    tokens = list(range(100, 170))
    _, table = prefilled(make, tokens)
    target = make(40, page_size=4)
    context = TextContext(tokens, 256, "d")
    target.external_claim("d")
    with pytest.raises(
        BlockTableMismatchError, match="covers 69 tokens, and its prompt still runs: .* full pages of 4"
    ):
        target.import_block_table(context, change(table, num_tokens=69, digests=table.digests[: 17 * 32]), partial=True)
    pending = target.import_block_table(context, beginning(table, 40), partial=True)
    context.update(7)
    moved = (*table.groups[0][:3], 39, *table.groups[0][4:])
    bad = [
        (change(table, groups=(moved,)), "names other pages than the earlier table"),
        (change(table, replica_idx=1), "names other pages than the earlier table"),
        (beginning(table, 36), "covers 36 tokens; 40 to 72 are allowed"),
        (change(table, digests=bytes(len(table.digests))), "holds other tokens"),
    ]
    for wrong, message in bad:
        with pytest.raises(BlockTableMismatchError, match=message):
            target.extend_import(context, pending, wrong, last=True)
    assert pending.tokens == (0, 40)
    assert target.extend_import(context, pending, table, last=True).tokens == (40, 70)
    target.cancel_import(pending)
    with pytest.raises(InvalidRequestError, match="already finished or cancelled"):
        target.extend_import(context, pending, table, last=True)


def test_a_digest_that_differs_in_one_byte_is_another_one(make: Any) -> None:
    table, target, context = handed_over(make)
    for at in (0, 31, len(table.digests) - 1):
        digests = bytearray(table.digests)
        digests[at] ^= 1
        with pytest.raises(BlockTableMismatchError, match=f"holds other tokens .*, from page {at // 32} on"):
            target.import_block_table(context, msgspec.structs.replace(table, digests=bytes(digests)))


def test_an_import_into_a_request_that_already_has_pages_is_refused(make: Any) -> None:
    table, target, context = handed_over(make)
    assert target.maybe_reserve(context)
    with pytest.raises(InvalidRequestError, match="'d': already holds 5 pages"):
        target.import_block_table(context, table)
    large = make(16, page_size=64)
    context = receiver(large)
    assert large.maybe_reserve(context)
    with pytest.raises(InvalidRequestError, match="'d': already holds 1 pages"):
        large.import_block_table(context, table)


def test_other_geometries_have_other_fingerprints(make: Any) -> None:
    prints = [make(4, **options).fingerprint for options in ({}, {"layers": 2}, {"heads": 2}, {"tp": 2, "heads": 2})]
    assert len(set(prints)) == 4


def test_the_table_of_a_prompt_that_still_runs_names_its_full_pages(make: Any) -> None:
    manager = make(16)
    context = TextContext(PROMPT, 256, "p")
    manager.external_claim("p")
    for end, full in ((3, 0), (9, 2), (18, 4)):
        context.set_token_indices(active_idx=end)
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(7)
        manager.step([context])
        table = manager.block_table("p", full_pages=True)
        assert (table.num_tokens, len(table.groups[0]), len(table.digests)) == (4 * full, full, 32 * full)
        assert manager.block_table("p").num_tokens == end


def test_block_table_before_a_step_is_refused(make: Any) -> None:
    manager = make(16)
    manager.external_claim("p")
    with pytest.raises(InvalidRequestError, match="'p': none of its tokens are computed yet"):
        manager.block_table("p")


def test_exported_digests_are_those_of_the_published_pages(make: Any) -> None:
    manager, table = prefilled(make, caching=True)
    replica = manager._replicas.each[0]
    published = replica.pool.index.find(np.frombuffer(table.digests, np.uint64).reshape(-1, 4))
    assert published.tolist() == list(table.groups[0][:4])


AGAIN: dict[str, dict[str, Any]] = {
    "one table": {},
    "groups": {"layers": 2, "params": {"groups": (LayerGroup("full", (0,)), LayerGroup("window", (1,), 6))}},
}


@pytest.mark.parametrize("kind", AGAIN)
@pytest.mark.parametrize("taken", ["never", "given up", "proven"])
@pytest.mark.parametrize("partial", [False, True])
def test_a_cancelled_import_is_followed_by_another(make: Any, kind: str, taken: str, partial: bool) -> None:
    _, table = prefilled(make, **AGAIN[kind])
    target = make(40, page_size=4, **AGAIN[kind])
    context = receiver(target)
    for _ in range(3):
        pending = target.import_block_table(context, beginning(table, 8) if partial and kind == "one table" else table)
        assert pending is not None
        copier = None if taken == "never" else target.copier(pending)
        if copier is not None:
            copier.take()
        if taken == "proven":
            assert copier is not None
            copier.prove()
        target.cancel_import(pending)
        if taken == "given up":
            assert copier is not None
            with pytest.raises(NotReservedError, match="'d': import_block_table while its cancelled import may still"):
                target.import_block_table(context, table)
            copier.give_up()
    held = target.num_held_blocks
    with pytest.raises(BlockTableMismatchError, match="request 'd': the block table has a field of the wrong type"):
        target.import_block_table(context, change(table, fingerprint=1))
    assert target.num_held_blocks == held
    pending = target.import_block_table(context, table)
    assert target.num_held_blocks == held
    target.commit_import(context, pending, proven(target, pending))
    assert context.start_idx == table.num_tokens
    target.release("d")
    assert target.num_held_blocks == 0


@pytest.mark.parametrize("shared", [True, False])
def test_with_a_state_a_cancelled_import_is_followed_by_another(make: Any, shared: bool) -> None:
    shape = StateShape(2, 2, 1, 1, 1, 2, torch.float32, torch.float32)
    params = {"states": shape} if shared else {"states": shape, "state_copies": 2}
    source, target = (make(60, page_size=4, params=params) for _ in range(2))
    context = TextContext(PROMPT, 256, "p")
    source.external_claim("p")
    assert source.maybe_reserve(context)
    pages = source.states[0].pages_at(["p"], [0])
    context.set_token_indices(active_idx=context.end_idx)
    context.update(7)
    source.states[0].advance(pages, [18])
    source.step([context])
    table, reader = source.block_table("p"), receiver(target)
    for _ in range(2):
        pending = target.import_block_table(reader, table)
        assert pending is not None
        target.cancel_import(pending)
    pending = target.import_block_table(reader, table)
    target.commit_import(reader, pending, proven(target, pending))
    assert target.states[0].tokens_of("d") == reader.start_idx == 18
    target.release("d")
    assert (target.num_held_blocks, target.states[0].num_held) == (0, 0)


def test_tokens_that_ran_after_a_cancelled_import_are_kept(make: Any) -> None:
    table, target, context = handed_over(make)
    target.cancel_import(target.import_block_table(context, table))
    assert target.maybe_reserve(context)
    target.fetch([context])
    with pytest.raises(InvalidRequestError, match="'d': already holds 5 pages; import its block table before"):
        target.import_block_table(context, table)


def test_a_repeated_import_that_gets_no_pages_leaves_the_request_without_pages(make: Any) -> None:
    _, table = prefilled(make)
    target = make(8, page_size=4)
    context = receiver(target)
    target.cancel_import(target.import_block_table(context, table))
    other = TextContext(range(200, 212), 64, "other")
    target.external_claim("other")
    assert target.maybe_reserve(other)
    # The request needs 5 pages. 5 pages are left, including the pages of the cancelled import.
    target.cancel_import(target.import_block_table(context, table, 2))
    assert target.import_block_table(context, table, 5) is None
    assert target.get_req_blocks("d") == []
    target.release("other")
    assert target.import_block_table(context, table, 5) is not None


def test_a_leased_request_keeps_the_pages_of_a_cancelled_import(make: Any) -> None:
    table, target, context = handed_over(make)
    target.cancel_import(target.import_block_table(context, table))
    lease = target.lease("d")
    with pytest.raises(InvalidRequestError, match="already holds 5 pages"):
        target.import_block_table(context, table)
    target.end_lease(lease)
    assert target.import_block_table(context, table) is not None


def test_another_object_with_the_fields_of_an_import_is_refused(make: Any) -> None:
    table, target, context = handed_over(make)
    pending = target.import_block_table(context, table)
    with pytest.raises(InvalidRequestError, match="'d': got a copy of the import"):
        target.cancel_import(replace(pending))
    target.cancel_import(pending)


REASONS = {
    "pending": "while its import is pending",
    "written": "while its cancelled import may still be written",
    "not given back": "would write to pages of its cancelled import",
}
CALLS = [(call, state) for call in ("block_table", "fork", "lease") for state in REASONS]
CALLS += [("import_block_table", state) for state in ("pending", "written")]


@pytest.mark.parametrize(("call", "state"), CALLS)
def test_no_call_uses_the_pages_of_an_import_before_it_is_committed(make: Any, call: str, state: str) -> None:
    """After a reset, the request's own hit counts as computed, so that only the import stands in the way."""
    _, table = prefilled(make, **AGAIN["groups"])
    target = make(60, page_size=4, **AGAIN["groups"])
    first, context = receiver(target), receiver(target, name="e")
    pending = target.import_block_table(first, table)
    target.commit_import(first, pending, proven(target, pending))
    pending = target.import_block_table(context, table)
    copier = target.copier(pending)
    target.reset_prefix_cache()
    if state != "pending":
        target.cancel_import(pending)
    if state == "not given back":
        copier.give_up()
    calls = {
        "block_table": lambda: target.block_table("e"),
        "fork": lambda: target.fork(context, context.fork("child")),
        "import_block_table": lambda: target.import_block_table(context, table),
        "lease": lambda: target.lease("e"),
    }
    with pytest.raises(NotReservedError, match=f"'e': {call} {REASONS[state]}"):
        calls[call]()
    copier.give_up()
    target.check()
