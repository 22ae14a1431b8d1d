"""Imports whose later tables name only new pages. Each page is named once, and pages of earlier tables stay."""

from typing import Any

import msgspec
import pytest

from kvcache import BlockTableMismatchError, InvalidRequestError, TextContext
from tests.kvcache.build import proven
from tests.kvcache.replica.test_imports import OTHER_PAGES, beginning, change, copy, from_page, prefilled

TOKENS = list(range(100, 170))


def begun(make: Any, table: Any, tokens: int, *, ours: int = 4) -> tuple[Any, TextContext, Any]:
    target = make(40, page_size=ours)
    context = TextContext([*TOKENS, 7], 256, "d")
    target.external_claim("d")
    return target, context, target.import_block_table(context, beginning(table, tokens), partial=True)


@pytest.mark.parametrize(("theirs", "ours"), [*OTHER_PAGES, (4, 4)])
def test_a_table_of_new_pages_goes_on_from_those_before(make: Any, theirs: int, ours: int) -> None:
    source, table = prefilled(make, TOKENS, size=theirs)
    target, context, pending = begun(make, table, 16, ours=ours)
    every = list(table.groups[0])
    dst, src, span = target.extend_import(context, pending, from_page(beginning(table, 48), 16 // theirs), last=False)
    assert span == (16, 48)
    assert src.tolist() == every[16 // theirs : 48 // theirs]
    assert dst.tolist() == pending.parts[0].dst_pages[16 // ours :].tolist()
    dst, src, span = target.extend_import(context, pending, from_page(table, 48 // theirs), last=True)
    assert span == (48, 70)
    assert src.tolist() == every[48 // theirs :]
    assert pending.parts[0].src_pages.tolist() == every
    if theirs == ours:
        copy(source, target, pending)
    target.commit_import(context, pending, proven(target, pending))
    assert context.start_idx == 70


def test_cached_pages_are_neither_named_nor_copied(make: Any) -> None:
    _, table = prefilled(make, TOKENS)
    target, context, pending = begun(make, table, 40)
    target.commit_import(context, pending, proven(target, pending))
    target.release("d")
    context = TextContext([*TOKENS, 7], 256, "d")
    target.external_claim("d")
    pending = target.import_block_table(context, beginning(table, 16), partial=True)
    assert pending.tokens == (40, 40)
    for end, first in ((32, 4), (52, 8)):
        part = from_page(beginning(table, end), first)
        assert target.extend_import(context, pending, part, last=False).tokens == (40, max(40, end))
    assert pending.parts[0].src_pages.tolist() == list(table.groups[0][10:13])
    assert target.extend_import(context, pending, from_page(table, 13), last=True).src_pages.tolist() == list(
        table.groups[0][13:]
    )


def test_a_table_that_contradicts_the_pages_of_the_earlier_table_is_refused(make: Any) -> None:
    _, table = prefilled(make, TOKENS)
    target, context, pending = begun(make, table, 40)
    every = table.groups[0]
    before = pending.parts[0].src_pages.tolist()
    bad = [
        from_page(table, 11),
        change(from_page(table, 9), groups=((every[8], *every[10:]),)),
        change(from_page(table, 10), groups=((*every[10:-1], every[0]),)),
        change(from_page(table, 10), groups=((*every[10:-1], every[9]),)),
        change(from_page(table, 10), replica_idx=1),
    ]
    for wrong in bad:
        with pytest.raises(BlockTableMismatchError, match="names other pages than the earlier table"):
            target.extend_import(context, pending, wrong, last=True)
    with pytest.raises(BlockTableMismatchError, match="names other pages than the earlier table"):
        # The table begins one page too late, so it leaves a gap.
        target.extend_import(context, pending, from_page(beginning(table, 48), 11), last=False)
    other = change(from_page(table, 10), digests=table.digests[: 7 * 32])
    with pytest.raises(BlockTableMismatchError, match="other tokens .*from page 10 on"):
        target.extend_import(context, pending, other, last=True)
    assert (pending.parts[0].src_pages.tolist(), pending.tokens) == (before, (0, 40))
    assert target.extend_import(context, pending, from_page(table, 9), last=True).src_pages.tolist() == list(every[10:])


def test_a_source_leaves_out_the_full_pages_before_the_one_that_is_asked_for(make: Any) -> None:
    manager, table = prefilled(make, TOKENS)
    for first in (0, 1, 17):
        assert manager.block_table("p", first_page=first) == from_page(table, first)
        full = beginning(table, 68)
        assert manager.block_table("p", full_pages=True, first_page=first) == from_page(full, first)
    assert manager.block_table("p", first_page=99) == from_page(table, 17)
    for wrong in (-1, 1.5, "1", None):
        with pytest.raises(InvalidRequestError, match="first_page is .*: an integer from 0"):
            manager.block_table("p", first_page=wrong)
    encoded = msgspec.msgpack.encode(from_page(table, 3))
    assert msgspec.msgpack.decode(encoded, type=type(table)) == from_page(table, 3)
