"""Imports of rows that have a history: a longer hit of their own, or another request's cancelled import."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import BlockTable, InvalidRequestError, LayerGroup, TextContext
from kvcache.under_way import Call
from tests.kvcache.build import manager_of, proven, run_once


def test_after_an_import_shorter_than_its_own_hit_a_request_has_computed_the_hit() -> None:
    """A fork or a table of the request would otherwise begin before its own cached pages."""
    source, reader = manager_of(), manager_of()
    run_once(reader, range(17))  # 4 pages of 4 tokens are cached here
    with source.claim(prompt := TextContext(range(9), 40, "r")):
        assert source.maybe_reserve(prompt)
        source.fetch([prompt])
        prompt.update(9)
        source.step([prompt])
        table = source.block_table("r")
        assert table.num_tokens == 9
        with reader.claim(context := TextContext(range(18), 40, "r")):
            pending = reader.import_block_table(context, table)
            assert pending is not None
            reader.commit_import(context, pending, proven(reader, pending) if pending.needs_copy else None)
            assert context.start_idx == 16
            assert reader.block_table("r").num_tokens == 16
            child = context.fork("child")
            assert reader.fork(context, child)
            assert child.start_idx == 16
            reader.release("child")
    for manager in (source, reader):
        manager.check()
        manager.close()


def test_a_last_table_shorter_than_the_requests_own_hit_needs_no_window_before_the_hit() -> None:
    """The request runs from its hit on, so that the pages that a query at the end of the table sees are not needed."""
    windows = {"groups": (LayerGroup("full", (0,)), LayerGroup("window", (1,), 9))}
    source, reader = manager_of(layers=2, params=windows), manager_of(layers=2, params=windows)
    run_once(reader, range(29))
    with source.claim(prompt := TextContext(range(25), 40, "r")):
        tables: list[BlockTable] = []
        for computed in (4, 12):
            prompt.set_token_indices(active_idx=computed)
            assert source.maybe_reserve(prompt)
            source.fetch([prompt])
            prompt.update(9)
            source.step([prompt])
            tables.append(source.block_table("r", full_pages=computed == 4))
        with reader.claim(context := TextContext(range(25), 40, "r")):
            pending = reader.import_block_table(context, tables[0], partial=True)
            assert pending is not None
            reader.extend_import(context, pending, tables[1], last=True)
            assert not pending.needs_copy
            reader.commit_import(context, pending)
            assert context.start_idx == 24
    for manager in (source, reader):
        manager.check()
        manager.close()


def test_a_second_last_table_takes_back_no_page_that_the_copier_has() -> None:
    """A query after the second table sees one page less. The copier may write to that page all the same."""
    windows = {"groups": (LayerGroup("full", (0,)), LayerGroup("window", (1,), 5))}
    source, reader = (manager_of(page_size=size, layers=2, params=windows) for size in (8, 4))
    with source.claim(prompt := TextContext(range(18), 40, "r")):
        tables: list[BlockTable] = []
        for computed in (13, 16):
            prompt.set_token_indices(active_idx=computed)
            assert source.maybe_reserve(prompt)
            source.fetch([prompt])
            prompt.update(9)
            source.step([prompt])
            tables.append(source.block_table("r"))
        with reader.claim(context := TextContext(range(18), 40, "r")):
            pending = reader.import_block_table(context, tables[0])
            assert pending is not None
            copies, free = reader.copier(pending).take(), reader.num_free_blocks
            taken = [np.asarray(copy.dst_pages) for copy in copies]
            assert [len(pages) for pages in taken] == [4, 2]
            reader.extend_import(context, pending, tables[1], last=True)
            assert reader.num_free_blocks == free
            assert np.array_equal(pending.written, np.concatenate(taken))
            reader.cancel_import(pending)
    for manager in (source, reader):
        manager.check()
        manager.close()


@pytest.mark.parametrize("end", ["release", "recover"])
@pytest.mark.parametrize("groups", [(), (LayerGroup("full", (0,)), LayerGroup("window", (1,), 100))])
def test_a_row_forgets_the_cancelled_import_of_the_request_before(groups: tuple[LayerGroup, ...], end: str) -> None:
    """Otherwise the next request's import would free pages that the request holds, in place of being refused."""
    source, reader = (manager_of(rows=1, layers=2, params={"groups": groups}) for _ in range(2))
    with source.claim(prompt := TextContext(range(9), 40, "r")):
        assert source.maybe_reserve(prompt)
        source.fetch([prompt])
        prompt.update(9)
        source.step([prompt])
        table = source.block_table("r")
        reader.external_claim("first")
        pending = reader.import_block_table(TextContext(range(12), 40, "first"), table)
        assert pending is not None
        reader.cancel_import(pending)
        if end == "release":
            reader.release("first")
        else:
            with pytest.raises(KeyboardInterrupt), reader._mark.changing(Call("fetch")):
                raise KeyboardInterrupt
            assert reader.recover().released == ("first",)
        with reader.claim(second := TextContext(range(12), 40, "second")):
            assert reader.maybe_reserve(second)
            held = reader.get_req_blocks("second")
            with pytest.raises(InvalidRequestError, match="'second': already holds 3 pages"):
                reader.import_block_table(second, table)
            assert reader.get_req_blocks("second") == held
    for manager in (source, reader):
        manager.check()
        manager.close()
