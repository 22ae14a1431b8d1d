"""Imports of rows that have a history: a longer hit of their own, or another request's cancelled import."""

from __future__ import annotations

import pytest

from kvcache import InvalidRequestError, TextContext
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


def test_a_row_forgets_the_cancelled_import_of_the_request_before() -> None:
    """Otherwise the next request's import would free pages that the request holds, in place of being refused."""
    source, reader = manager_of(), manager_of(rows=1)
    with source.claim(prompt := TextContext(range(9), 40, "r")):
        assert source.maybe_reserve(prompt)
        source.fetch([prompt])
        prompt.update(9)
        source.step([prompt])
        table = source.block_table("r")
        with reader.claim(first := TextContext(range(12), 40, "first")):
            pending = reader.import_block_table(first, table)
            assert pending is not None
            reader.cancel_import(pending)
        with reader.claim(second := TextContext(range(12), 40, "second")):
            assert reader.maybe_reserve(second)
            held = reader.get_req_blocks("second")
            with pytest.raises(InvalidRequestError, match="'second': already holds 3 pages"):
                reader.import_block_table(second, table)
            assert reader.get_req_blocks("second") == held
    for manager in (source, reader):
        manager.check()
        manager.close()
