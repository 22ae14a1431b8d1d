from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export.passes import move_to_device_pass

from kvcache import InvalidParamsError, RaggedKVCacheInputs, TextContext


class ReadsTheCache(torch.nn.Module):
    """Sums over every cached page of each request, as an attention would read them."""

    def forward(self, inputs: RaggedKVCacheInputs) -> torch.Tensor:
        pages = inputs.blocks[inputs.lookup_table.long()].flatten(2).sum(-1).sum(-1)
        return pages * inputs.cache_lengths + inputs.max_lengths[:, 1].sum()


def test_symbols_export_a_graph_that_runs_on_what_fetch_gives(make: Any) -> None:
    manager = make(16, page_size=4, layers=2, heads=2)
    (symbols,) = manager.input_symbols()
    assert {tensor.device.type for tensor in symbols.inputs if tensor is not None} == {"meta"}
    program = torch.export.export(ReadsTheCache(), (symbols.inputs,), dynamic_shapes=(symbols.dynamic_shapes,))
    program.example_inputs = None  # meta tensors have no bytes to move
    context = TextContext(range(9), 64)
    manager.external_claim(context.request_id)
    assert manager.maybe_reserve(context, 3)
    context.set_token_indices(active_idx=4)
    manager.fetch([context])
    context.update(0)
    manager.step([context])
    manager.device_tensors[0][0][1:] = 2.0
    (entry,) = manager.fetch([context], 3)
    dynamic = {str(symbol) for symbol in program.range_constraints}
    assert len(dynamic) == 4  # pages, batch, columns, steps
    assert (
        move_to_device_pass(program, "cpu").module()(entry).tolist()
        == ReadsTheCache()(entry).tolist()
        == [3 * 2 * 2 * 2 * 4 * 2 * 2 * 4 + 9 + 10 + 11]
    )


def test_names_of_the_dimensions_and_their_prefix(make: Any) -> None:
    names = ["total_num_pages", "batch_size", "max_num_pages", "steps_remaining"]
    one = make(16, tp=2, heads=2).input_symbols()
    assert len(one) == 2
    for symbols in one:
        shapes = symbols.dynamic_shapes
        assert [shapes.blocks[0].__name__, shapes.lookup_table[0].__name__] == names[:2]
        assert [shapes.lookup_table[1].__name__, shapes.max_lengths[0].__name__] == names[2:]
        assert shapes.cache_lengths[0] is shapes.lookup_table[0]
    two = make(16, dp=2).input_symbols()
    assert [symbols.dynamic_shapes.blocks[0].__name__ for symbols in two] == [
        "replica_0_total_num_pages",
        "replica_1_total_num_pages",
    ]


def test_symbols_for_other_devices_and_layers(make: Any) -> None:
    manager = make(16, page_size=4, layers=2, heads=2)
    (symbols,) = manager.input_symbols(devices=["cpu"], num_layers=7)
    assert symbols.inputs.blocks.shape == (17, 2, 7, 4, 2, 2)
    assert symbols.inputs.blocks.dtype == torch.float32
    with pytest.raises(InvalidParamsError, match="2 devices"):
        manager.input_symbols(devices=["cpu", "cpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tables_on_a_gpu_follow_the_rows() -> None:
    from kvcache import KVCacheParams, PagedKVCacheManager

    params = KVCacheParams(torch.float16, 1, 8, enable_prefix_caching=True, page_size=4)
    manager = PagedKVCacheManager(params, 8, 64, 1, ["cuda"], torch.cuda.Stream(), 1 << 20)
    contexts = [TextContext(range(at, at + 6), 64) for at in range(0, 40, 10)]
    for context in contexts:
        manager.external_claim(context.request_id)
    for _ in range(9):
        assert manager.reserve_batch(contexts).all()
        for batch in (contexts, contexts[::-1], contexts[1:3]):
            (entry,) = manager.fetch(batch)
            torch.cuda.synchronize()
            wanted = [manager.get_req_blocks(context.request_id) for context in batch]
            assert entry.lookup_table.is_cuda
            assert entry.lookup_table.cpu().tolist() == wanted
        for context in contexts:
            context.update(1)
        manager.step(contexts)
