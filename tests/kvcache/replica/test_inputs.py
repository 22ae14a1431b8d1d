from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.export.passes import move_to_device_pass

from kvcache import InvalidParamsError, InvalidRequestError, PagedKVCacheManager, RaggedKVCacheInputs, TextContext
from kvcache.replica.inputs import data_parallel_splits


class ReadsTheCache(torch.nn.Module):
    """A module that sums over every cached page of each request, as attention would read the pages."""

    def forward(self, inputs: RaggedKVCacheInputs) -> torch.Tensor:
        pages = inputs.blocks[inputs.lookup_table.long()].flatten(2).sum(-1).sum(-1)
        return pages * inputs.cache_lengths + inputs.max_lengths[:, 1].sum()


def test_symbols_export_a_graph_that_runs_on_what_fetch_gives(make: Any) -> None:
    manager = make(16, page_size=4, layers=2, heads=2)
    (symbols,) = manager.input_symbols()
    assert {tensor.device.type for tensor in symbols.inputs if tensor is not None} == {"meta"}
    program = torch.export.export(ReadsTheCache(), (symbols.inputs,), dynamic_shapes=(symbols.dynamic_shapes,))
    program.example_inputs = None  # The tensors are on the meta device, so they have no bytes to move.
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
    assert len(dynamic) == 4  # The four symbols are the numbers of pages, requests, blocks and steps.
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_symbols_have_the_dtypes_and_sizes_of_pages_that_fetch_gives(make: Any, dtype: torch.dtype) -> None:
    manager = make(16, page_size=4, layers=2, heads=2, dtype=dtype)
    for symbols, inputs in zip(manager.input_symbols(), manager.fetch([]), strict=True):
        assert symbols.inputs.blocks.dtype == inputs.blocks.dtype == dtype
        assert symbols.inputs.blocks.shape == inputs.blocks.shape
        assert symbols.inputs.blocks.stride() == inputs.blocks.stride()


def started(manager: PagedKVCacheManager, lengths: dict[int, list[int]], steps: int = 1) -> list[TextContext]:
    """Returns requests with these numbers of tokens on each replica. Their pages are reserved."""
    made: list[TextContext] = []
    for replica, some in lengths.items():
        for length in some:
            made.append(TextContext(range(length), 64, f"{replica}.{len(made)}"))
            manager.external_claim(made[-1].request_id, replica)
            assert manager.maybe_reserve(made[-1], steps)
    return made


def test_fetch_returns_the_pages_of_each_request_and_the_longest_lengths(make: Any) -> None:
    manager = make(32, page_size=4)
    contexts = started(manager, {0: [9, 3]}, steps=4)
    pages = [list(manager.get_req_blocks(context.request_id)) for context in contexts]
    for steps, columns in ((1, 3), (2, 3), (4, 3)):
        (entry,) = manager.fetch(contexts, steps)
        assert entry.blocks is manager.device_tensors[0][0]
        assert entry.kv_scales is None
        assert entry.cache_lengths.tolist() == [0, 0]
        assert entry.lookup_table.tolist() == [[*row, 0, 0, 0][:columns] for row in pages]
        assert entry.max_lengths.tolist() == [[9, 9], [1, 10], [1, 11], [1, 12]][:steps]
        for tensor in (entry.cache_lengths, entry.lookup_table, entry.max_lengths):
            assert tensor.dtype == torch.int32
    for context in contexts:
        context.update(7)
    manager.step(contexts)
    assert manager.reserve_batch(contexts, 4).all()
    (entry,) = manager.fetch(contexts, 4)
    assert entry.cache_lengths.tolist() == [9, 3]
    assert entry.lookup_table.shape == (2, 4), "13 tokens, the last of which is not written"
    assert entry.max_lengths.tolist() == [[1, 10], [1, 11], [1, 12], [1, 13]]
    (empty,) = manager.fetch([], 3)
    assert (empty.cache_lengths.shape, empty.lookup_table.shape) == ((0,), (0, 0))
    assert empty.max_lengths.tolist() == [[0, 0]]


@pytest.mark.parametrize("kind", [list, tuple])
def test_lengths_go_on_by_what_ran_and_the_tables_stay(make: Any, kind: Any) -> None:
    manager = make(32, page_size=4, tp=2, dp=2, heads=2)
    contexts = started(manager, {0: [9, 3], 1: [5]}, steps=3)
    given = kind(manager.fetch(contexts, 3))
    offsets = torch.tensor([0, 9, 12, 17], dtype=torch.uint32)
    ran = SimpleNamespace(input_row_offsets=offsets, data_parallel_splits=torch.tensor([0, 2, 3]))
    before = list(given)
    after = manager.increment_cache_lengths(given, ran)
    assert (after is given) == (kind is list)
    assert [entry.cache_lengths.tolist() for entry in after] == [[9, 3], [9, 3], [5], [5]]
    assert [entry.max_lengths.tolist() for entry in after] == [[[1, 10], [1, 11]]] * 2 + [[[1, 6], [1, 7]]] * 2
    for old, new in zip(before, after, strict=True):
        assert new.lookup_table is old.lookup_table
        assert new.blocks is old.blocks
        assert old.cache_lengths.tolist() == [0] * len(new.cache_lengths)
    ran = SimpleNamespace(input_row_offsets=[torch.arange(4)], data_parallel_splits=[0, 2, 3])
    after = manager.increment_cache_lengths(list(after), ran)
    assert [entry.cache_lengths.tolist() for entry in after] == [[10, 4], [10, 4], [6], [6]]
    assert [entry.max_lengths.tolist() for entry in after] == [[[1, 11]]] * 2 + [[[1, 7]]] * 2


@pytest.mark.parametrize(
    ("offsets", "splits", "count", "message"),
    [
        ([0, 9, 12, 17], [0, 3], 2, r"data_parallel_splits is \[0, 3\]: it must divide 3 requests among 2 replicas"),
        ([0, 9, 12, 17], [1, 2, 3], 2, r"data_parallel_splits is \[1, 2, 3\]: it must divide 3"),
        ([0, 9, 12, 17], [0, 2, 2], 2, r"data_parallel_splits is \[0, 2, 2\]: it must divide 3"),
        ([0, 9, 12, 17], [0, 4, 3], 2, r"data_parallel_splits is \[0, 4, 3\]: it must divide 3"),
        ([0, 9, 12, 17], [0, 1, 3], 2, "replica 0: got 1 row offsets for 2 requests"),
        ([0, 9, 12, 17], [0, 2, 3], 1, "got 1 inputs for 2 replicas: a multiple of 2 above 0 is needed"),
        ([0, 9, 12, 17], [0, 2, 3], 0, "got 0 inputs for 2 replicas: a multiple of 2 above 0 is needed"),
        ("none", [0, 2, 3], 2, "increment_cache_lengths of "),
        ([0, 9, 12, 17], None, 2, "increment_cache_lengths of "),
    ],
)
def test_arguments_that_do_not_fit_the_batch_are_refused_and_change_nothing(
    make: Any, offsets: Any, splits: Any, count: int, message: str
) -> None:
    manager = make(32, page_size=4, dp=2)
    given = manager.fetch(started(manager, {0: [9, 3], 1: [5]}, steps=3), 3)[:count]
    kept = list(given)
    ran = SimpleNamespace(
        input_row_offsets=torch.tensor(offsets) if isinstance(offsets, list) else offsets, data_parallel_splits=splits
    )
    with pytest.raises(InvalidRequestError, match=message):
        manager.increment_cache_lengths(given, ran)
    assert all(one is other for one, other in zip(given, kept, strict=True))
    assert all(entry.cache_lengths.sum() == 0 for entry in given)


def test_one_replica_needs_no_splits(make: Any) -> None:
    manager = make(32, page_size=4)
    given = manager.fetch(started(manager, {0: [9, 3]}, steps=2), 2)
    ran = SimpleNamespace(input_row_offsets=torch.tensor([0, 9, 12]))
    assert manager.increment_cache_lengths(given, ran)[0].cache_lengths.tolist() == [9, 3]
    with pytest.raises(InvalidRequestError, match="replica 0: got 1 row offsets for 2 requests"):
        manager.increment_cache_lengths(given, SimpleNamespace(input_row_offsets=torch.tensor([0, 12])))


@pytest.mark.parametrize(
    ("replicas", "splits"), [([0, 0, 1], [0, 2, 3, 3]), ([2], [0, 0, 0, 1]), ([], [0, 0, 0, 0]), ([1, 1], [0, 0, 2, 2])]
)
def test_a_batch_is_split_where_its_replicas_end(replicas: list[int], splits: list[int]) -> None:
    found = data_parallel_splits(np.array(replicas, np.int64), 3)
    assert found.tolist() == splits
    assert found.dtype == torch.int64


def test_a_batch_out_of_order_has_no_splits() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"the replicas of the batch are \[0, 1, 0\]: order its requests by replica$"
    ):
        data_parallel_splits(np.array([0, 1, 0]), 2)


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
