"""A request with pages at another process gets a row and pages here, or neither a row nor pages."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvcache import BlockTable, PagedKVCacheManager, TextContext
from kvcache.errors import BlockTableMismatchError, PromptTooLongError
from scheduler_adapters.service.reserving import recommended, reserve
from tests.kvcache.build import manager_of

PROMPT = [*range(9)]


@pytest.fixture(scope="module")
def table() -> BlockTable:
    """Returns the block table of a source that has the first eight tokens."""
    source = manager_of(8, page_size=4, max_seq_len=32)
    context = TextContext(PROMPT[:8], 32, "r")
    with source.claim(context):
        assert source.maybe_reserve(context)
        source.fetch([context])
        context.update(9)
        source.step([context])
        found = source.block_table("r")
    source.close()
    return found


def manager(pages: int = 8, rows: int = 2) -> PagedKVCacheManager:
    return manager_of(pages, page_size=4, max_seq_len=32, rows=rows)


def held(made: PagedKVCacheManager) -> tuple[int, list[str]]:
    return made.total_num_pages - made.num_free_blocks, [*made.recover().claimed]


def test_with_room_a_request_is_claimed_and_its_pull_begins(table: BlockTable) -> None:
    made = manager()
    pending = reserve(made, TextContext(PROMPT, 32, "r"), 0, table)
    assert pending is not None
    assert held(made) == (3, ["r"])
    assert pending.tokens == (0, 8)
    made.cancel_import(pending)
    made.release("r")
    assert held(made) == (0, [])


@pytest.mark.parametrize("last", [True, False])
def test_if_there_are_too_few_pages_the_row_is_given_back(table: BlockTable, last: bool) -> None:
    made = manager()
    others = TextContext(range(100, 127), 32, "others")
    made.external_claim("others", 0)
    assert made.maybe_reserve(others)  # This request takes seven of the eight pages.
    for _ in range(3):
        assert reserve(made, TextContext(PROMPT, 32, "r"), 0, table, last=last) is None
        assert held(made) == (7, ["others"])
    made.release("others")
    assert reserve(made, TextContext(PROMPT, 32, "r"), 0, table, last=last) is not None


def test_if_there_are_too_few_rows_no_page_is_taken(table: BlockTable) -> None:
    made = manager(rows=1)
    made.external_claim("others", 0)
    assert reserve(made, TextContext(PROMPT, 32, "r"), 0, table) is None
    assert held(made) == (0, ["others"])
    made.release("others")
    assert reserve(made, TextContext(PROMPT, 32, "r"), 0, table) is not None


def test_a_request_that_can_never_fit_is_an_error_and_takes_nothing(table: BlockTable) -> None:
    made = manager(pages=2)
    with pytest.raises(PromptTooLongError, match="'r'"):
        reserve(made, TextContext(PROMPT, 32, "r"), 0, table)
    assert held(made) == (0, [])
    made = manager()
    with pytest.raises(BlockTableMismatchError, match="'r'"):
        reserve(made, TextContext(PROMPT, 32, "r"), 0, replace(table, page_size=8))
    assert held(made) == (0, [])


def test_the_replica_with_room_is_recommended_and_the_prompt_is_looked_at_in_part() -> None:
    made = manager_of(8, page_size=4, max_seq_len=32, dp=2)
    context = TextContext(PROMPT, 32, "r")
    made.external_claim("others", 0)
    assert made.maybe_reserve(TextContext(range(100, 130), 32, "others"))
    assert recommended(made, context) == 1
    assert context.active_idx == 2
    short = TextContext([1], 32, "s")
    assert recommended(made, short) == 1
    assert short.active_idx == 1
