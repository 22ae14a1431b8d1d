import math
from typing import Any, ClassVar

import pytest
import torch

from kvcache.types import RaggedKVCacheInputs
from scheduler_adapters.errors import UnsupportedModelError
from scheduler_adapters.hf.paged_attention import PagedBatch, paged_attention_forward

HEADS, KV_HEADS, DIM = 4, 2, 8
LAYERS = {0: (0, 0), 1: (0, 1)}


class Layer(torch.nn.Module):
    layer_idx = 1
    is_causal = True


def packed(tokens: int, heads: int) -> Any:
    return torch.randn(1, heads, tokens, DIM)


class Config:
    layer_types: ClassVar = ["full_attention", "chunked_attention"]
    attention_chunk_size = 3


class ChunkedLayer(Layer):
    config = Config()


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> Any:
    """Computes the formula for one head and one query at a time."""
    output = torch.zeros_like(query[0]).transpose(0, 1)
    count, length = query.shape[2], key.shape[2]
    for head in range(HEADS):
        for row in range(count):
            position = length - count + row
            first = 0 if window is None else max(0, position - window + 1)
            first = position // chunk * chunk if chunk else first
            seen = slice(first, position + 1)
            kv_head = head * KV_HEADS // HEADS
            scores = key[0, kv_head, seen] @ query[0, head, row] / math.sqrt(DIM)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1]))
            output[row, head] = scores.softmax(0)[: position + 1 - first] @ value[0, kv_head, seen]
    return output


def pools(pages: int, page_size: int, tp: int) -> Any:
    shape = (pages + 1, KV_HEADS // tp if tp <= KV_HEADS else 1, 2, 2, page_size, DIM)
    made = [torch.full(shape, float("nan")).permute(0, 3, 2, 4, 1, 5) for _ in range(tp)]
    for pool in made:
        pool[0] = 0
    return made


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
# With a window of 2 tokens, the first visible key is the last key of a page.
@pytest.mark.parametrize("window", [None, 2, 3])
def test_ragged_chunks_equal_the_formula_and_ignore_stale_pages(tp: int, window: int | None) -> None:
    check_formula(tp, Layer(), window=window)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sinks", [None, torch.tensor([3.0, -2.0, 0.5, 9.0])])
def test_chunks_and_sinks_equal_the_formula(tp: int, sinks: torch.Tensor | None) -> None:
    check_formula(tp, ChunkedLayer(), chunk=3, sinks=sinks)
    check_formula(tp, Layer(), sinks=sinks)
    check_formula(tp, Layer(), window=2, sinks=sinks)


def test_a_layer_reads_and_writes_the_pages_of_its_own_table() -> None:
    table = torch.tensor([[[4, 0], [5, 0], [6, 6]], [[3, 1], [5, 0], [2, 6]]], dtype=torch.int32)
    check_formula(1, Layer(), table=table, layers={1: (1, 1)})


def check_formula(
    tp: int,
    layer: torch.nn.Module,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    layers: dict[int, tuple[int, int]] | None = None,
) -> None:
    torch.manual_seed(0)
    lengths, page_size = [7, 1, 5], 4
    table = torch.tensor([[3, 1], [5, 0], [2, 6]], dtype=torch.int32) if table is None else table
    keys, values, queries = ([packed(n, h) for n in lengths] for h in (KV_HEADS, KV_HEADS, HEADS))
    blocks = pools(6, page_size, tp)
    chunks = [(0, [3, 1, 4]), (1, [4, 0, 1])]
    starts = [0, 0, 0]
    for _, counts in chunks:
        rows = [i for i, count in enumerate(counts) if count]
        inputs = [RaggedKVCacheInputs(b, table[..., rows, :], table[..., rows, :], table) for b in blocks]
        taken, begun = [counts[i] for i in rows], [starts[i] for i in rows]
        batch = PagedBatch(inputs, begun, taken, layers or LAYERS)

        def pack(states: Any, rows: Any = rows, counts: Any = counts, starts: Any = tuple(starts)) -> Any:
            return torch.cat([states[i][:, :, starts[i] : starts[i] + counts[i]] for i in rows], dim=2)

        output, weights = paged_attention_forward(
            *(layer, pack(queries), pack(keys), pack(values), None),
            sliding_window=window,
            s_aux=sinks,
            paged_batch=batch,
        )
        assert weights is None
        for i, part in zip(rows, output[0].split(taken), strict=True):
            end = starts[i] + counts[i]
            query = queries[i][:, :, starts[i] : end]
            wanted = dense(query, keys[i][:, :, :end], values[i][:, :, :end], window, chunk, sinks)
            torch.testing.assert_close(part, wanted)
            starts[i] = end
    assert starts == lengths
    for pool in blocks:
        assert not pool[0].any(), "the null page was written"
        assert pool[:, :, 0].isnan()[1:].all(), "another layer was written"


def test_a_token_is_written_to_the_place_that_the_table_names() -> None:
    blocks = pools(2, 4, 1)[0]
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    batch = PagedBatch([RaggedKVCacheInputs(blocks, table[:, 0], table, table)], [3], [2], LAYERS)
    key, value = torch.randn(2, KV_HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    batch.write(1, key, value)
    assert torch.equal(blocks[2, 0, 1, 3], key[0])
    assert torch.equal(blocks[1, 1, 1, 0], value[1])
    assert blocks.isnan().sum() == blocks[1:].numel() - 2 * 2 * KV_HEADS * DIM
    assert batch.positions.tolist() == [3, 4]
    assert batch.last_rows.tolist() == [1]


def one_token_call(module: Any = None, kv_heads: int = KV_HEADS, **arguments: Any) -> Any:
    blocks = pools(1, 4, 1)
    table = torch.tensor([[1]], dtype=torch.int32)
    batch = PagedBatch([RaggedKVCacheInputs(b, table[:, 0], table, table) for b in blocks], [0], [1], LAYERS)
    arguments = {"paged_batch": batch, "attention_mask": None, **arguments}
    return paged_attention_forward(
        module or Layer(), packed(1, HEADS), packed(1, kv_heads), packed(1, kv_heads), **arguments
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1)}, "mask"),
        ({"paged_batch": None}, "paged_batch"),
        ({"kv_heads": 4}, "4 heads of 8"),
    ],
)
def test_unsupported_attention_is_refused_by_name(arguments: Any, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        one_token_call(**arguments)


def test_a_sliding_layer_that_hides_its_window_is_refused() -> None:
    layer = Layer()
    layer.config = type("Config", (), {"layer_types": ["full_attention", "sliding_attention"]})()
    one_token_call(layer, sliding_window=8)
    with pytest.raises(UnsupportedModelError, match="window"):
        one_token_call(layer)
