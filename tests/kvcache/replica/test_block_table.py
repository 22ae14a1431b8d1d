"""A block table may leave out pages that an earlier table has named. The table then says which pages are left out."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from kvcache import InvalidRequestError
from kvcache.replica.block_table import BlockTable, ImportPart, PageDigests, PendingImport
from kvcache.replica.row_states import StateImportPart


def table(first_page: int, pages: int, page_size: int = 4, num_tokens: int | None = None) -> BlockTable:
    ids = tuple(range(10 + first_page, 10 + first_page + pages))
    tokens = (first_page + pages) * page_size if num_tokens is None else num_tokens
    return BlockTable("r", 0, tokens, page_size, (ids,), "f", first_page=first_page)


def pending(*parts: ImportPart) -> PendingImport:
    """An import into pages of 4 tokens. No source has named any of its pages yet."""
    return PendingImport("r", None, page_size=4, src_page_size=2, replica_idx=0, src_replica_idx=0, parts=[*parts])


def test_a_table_follows_one_that_ends_where_it_begins_or_later() -> None:
    before = table(0, 3)
    assert [table(first, 2).follows(before) for first in range(6)] == [True, True, True, True, False, False]


@pytest.mark.parametrize(("num_tokens", "follows"), [(11, False), (12, True), (13, True)])
def test_a_page_that_was_named_in_part_is_not_left_out_of_the_next_table(num_tokens: int, follows: bool) -> None:
    assert table(3, 1).follows(table(0, 4, num_tokens=num_tokens)) == follows


def test_a_table_that_leaves_pages_out_follows_none_of_another_page_size_and_not_nothing() -> None:
    assert table(0, 2).follows(None)
    assert not table(1, 2).follows(None)
    assert not table(1, 2).follows(table(0, 3, page_size=8))
    wrong = replace(table(1, 2), page_size=0)
    assert not wrong.follows(replace(table(0, 3), page_size=0))
    assert table(0, 2).follows(table(0, 3, page_size=8)), "it leaves nothing out"
    assert replace(table(0, 2), first_page=-1).follows(None)


@pytest.mark.parametrize(
    ("pages", "named"),
    [
        ((13, 14), [10, 11, 12, 13, 14]),
        ((12, 13, 14), [10, 11, 12, 13, 14]),
        ((13, 13), None),  # page 13 is named twice
        ((13, 11), None),  # The earlier table has already named page 11.
        ((12, 13, 10), None),
        ((11, 13, 14), None),  # The later table begins with another page than the earlier table.
    ],
)
def test_a_table_that_leaves_pages_out_names_each_page_once(pages: tuple[int, ...], named: list[int] | None) -> None:
    part = ImportPart(0, np.arange(1, 6, dtype=np.int32), src_pages=np.array([10, 11, 12], np.int32))
    found = part.named(pages, 5 * 4, 4)
    assert (None if found is None else found.tolist()) == named


@pytest.mark.parametrize(("ours", "theirs"), [(2, 4), (4, 2), (4, 4)])
def test_pages_are_taken_once_whatever_the_page_sizes_of_both_sides(ours: int, theirs: int) -> None:
    mine, other = np.arange(12 // ours, dtype=np.int32) + 10, np.arange(12 // theirs, dtype=np.int32) + 30
    # The first 4 tokens are cached here. They take one page of 4 tokens or two pages of 2 tokens.
    first = 4
    part = ImportPart(first, mine[first // ours :])
    for before, now in ((4, 8), (8, 12), (12, 12)):
        part.take_up(other[first // theirs : now // theirs], now)
        copy = part.take(ours, theirs)
        assert copy.tokens == (before, now)
        assert np.asarray(copy.dst_pages).tolist() == mine[before // ours :].tolist()
        assert np.asarray(copy.src_pages).tolist() == other[before // theirs : now // theirs].tolist()


def test_a_state_is_copied_even_where_every_page_is_cached() -> None:
    cached, rest = ImportPart(8, np.zeros(0, np.int32), stop=8), ImportPart(4, np.array([7], np.int32), stop=8)
    state = StateImportPart(0, np.array([1], np.int32))
    unknown = ImportPart(0, np.array([3], np.int32))
    assert pending(unknown).tokens == (0, 0)
    for parts, needed in (
        ([cached], False),
        ([unknown], False),
        ([rest], True),
        ([cached, rest], True),
        ([cached, state], True),
    ):
        assert pending(*parts).needs_copy == needed


def test_an_import_may_end_where_a_copied_page_ends() -> None:
    part = ImportPart(4, np.arange(11, 15, dtype=np.int32), stop=20)
    it = pending(part)
    it.num_tokens = 20
    for wrong in (4, 10, 24):
        with pytest.raises(InvalidRequestError, match=f"of tokens 4 to 20 in pages of 4 cannot end at token {wrong}"):
            it.shorten(wrong)
    it.shorten(20)
    it.shorten(8)
    assert (it.tokens, it.can_shorten) == ((4, 8), True)
    for parts in ((part, part), (ImportPart(4, part.dst_pages, at_end=True, stop=20),)):
        with pytest.raises(InvalidRequestError, match="cannot end at token"):
            pending(*parts).shorten(8)


def test_another_table_names_the_pages_to_copy_as_far_as_it_has_them() -> None:
    state = StateImportPart(0, np.array([1], np.int32), stop=20)
    it = pending(ImportPart(4, np.arange(11, 15, dtype=np.int32), stop=20), state)
    it.num_tokens = 20

    def copies(num_tokens: int, *pages: int) -> list[tuple[list[int], list[int], tuple[int, int]]]:
        table = BlockTable("s", 0, num_tokens, 2, (pages, (9,)), "f")
        found = it.copies_from(table)
        return [(np.asarray(one.dst_pages).tolist(), np.asarray(one.src_pages).tolist(), one.tokens) for one in found]

    nothing = ([], [], (0, 0))
    every = tuple(range(40, 50))
    assert copies(20, *every) == [([11, 12, 13, 14], [*every[2:]], (4, 20)), ([1], [9], (0, 20))]
    assert copies(16, *every[:8]) == [([11, 12, 13, 14], [*every[2:8]], (4, 16)), nothing]
    assert copies(16, *every[4:8]) == [([12, 13, 14], [*every[4:8]], (8, 16)), nothing]
    assert copies(4, *every[:2]) == [nothing, nothing]


def test_a_state_is_taken_when_all_tokens_have_run() -> None:
    it = pending(ImportPart(0, np.arange(11, 15, dtype=np.int32)), StateImportPart(0, np.array([1], np.int32)))
    for num_tokens, last in ((8, False), (16, True)):
        table = BlockTable("s", 0, num_tokens, 2, (tuple(range(40, 40 + num_tokens // 2)), (9,)), "f")
        named = it.named(table, last=last)
        assert not isinstance(named, str)
        it.take_up(table, named, last=last)
        assert [one.tokens for one in it.take(last=last)] == [(num_tokens - 8, num_tokens), (0, 16 if last else 0)]


def test_tables_and_digests_begin_with_the_first_page_by_default() -> None:
    assert BlockTable("r", 0, 8, 4, ((1, 2),), "f").first_page == 0
    assert PageDigests(4, "sha256", b"").first_page == 0
