"""Addresses and strides stay the same from step to step, as captured CUDA graphs need."""

from __future__ import annotations

from kvcache import TextContext
from tests.kvcache.build import manager_of


def test_pools_and_tables_keep_their_addresses_while_requests_grow_and_others_arrive() -> None:
    manager = manager_of(64, page_size=4, rows=8, max_seq_len=64, checks=False)
    contexts = [TextContext(range(100 * number, 100 * number + 3 + number), 64) for number in range(4)]
    for context in contexts:
        manager.external_claim(context.request_id)
    assert manager.reserve_batch(contexts).all()
    batch = manager.batch(contexts)
    found = set[tuple[int, int, int, tuple[int, ...]]]()
    widths = set[int]()
    for step in range(30):
        assert manager.reserve_batch(batch).all()
        (inputs,) = manager.fetch(batch)
        table = inputs.lookup_table
        found.add((inputs.blocks.data_ptr(), table.data_ptr(), table.stride(0), inputs.blocks.stride()))
        widths.add(table.shape[1])
        pages = [manager.get_req_blocks(context.request_id) for context in contexts]
        for row, mine in zip(table.numpy(), pages, strict=True):
            assert row.tolist() == mine + [0] * (table.shape[1] - len(mine)), "the rest names the null page"
        assert [len(row) for row in pages] == [-(-length // 4) for length in batch.lengths]
        batch.update([step] * 4)
        manager.step(batch)
        if step == 10:  # Another request takes a later row and gives the row back at once.
            other = TextContext(range(900, 920), 64)
            with manager.claim(other):
                assert manager.maybe_reserve(other)
    assert len(found) == 1
    assert len(widths) > 5
