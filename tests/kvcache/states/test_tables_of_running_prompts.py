"""A block table of a prompt that still runs names no recurrent state."""

from __future__ import annotations

import pytest

from kvcache import BlockTableMismatchError, TextContext
from tests.kvcache.build import manager_of
from tests.kvcache.contents_oracle import SHAPE


@pytest.mark.parametrize("leased", [False, True])
def test_a_reader_sees_that_the_state_is_missing_and_refuses_it_as_the_last_table(leased: bool) -> None:
    source, reader = manager_of(params={"states": SHAPE}), manager_of(params={"states": SHAPE})
    prompt = TextContext(range(20), 40, "r")
    with source.claim(prompt):
        lease = source.lease("r") if leased else None
        prompt.set_token_indices(active_idx=8)
        assert source.maybe_reserve(prompt)
        source.fetch([prompt])
        source.states[0].advance(source.states[0].pages_at(["r"], [0]), [8])
        prompt.update(1)
        source.step([prompt])
        table = source.block_table("r", full_pages=True)
        assert table.num_tokens == 8
        assert table.groups[-1] == ()
        context = TextContext(range(21), 40, "r")
        reader.external_claim("r")
        with pytest.raises(BlockTableMismatchError, match="no page of the recurrent state after its 8 tokens"):
            reader.import_block_table(context, table)
        pending = reader.import_block_table(context, table, partial=True)
        assert pending is not None
        assert pending.lacks_end
        with pytest.raises(BlockTableMismatchError, match="no page of the recurrent state after its 8 tokens"):
            reader.extend_import(context, pending, table, last=True)
        whole = source.block_table("r")
        assert len(whole.groups[-1]) == 1
        reader.extend_import(context, pending, whole, last=True)
        assert not pending.lacks_end
        reader.cancel_import(pending)
        if lease is not None:
            source.end_lease(lease)
    reader.release("r")
    for manager in (source, reader):
        manager.check()
        manager.close()
