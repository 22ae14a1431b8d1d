"""The tables of a step in flight: what a CUDA graph finds in them, whatever earlier steps have left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcache import RaggedKVCacheInputs
from kvcache.replica.inputs import HostTables, StepTables

ROWS, COLUMNS = 6, 5
CPU = torch.device("cpu")


def inputs_of(lengths: torch.Tensor, table: torch.Tensor) -> RaggedKVCacheInputs:
    return RaggedKVCacheInputs(torch.zeros(1), lengths, table, torch.zeros((1, 2), dtype=torch.int32), None)


class Interrupted(torch.Tensor):
    """A table whose copies are written, and then interrupted."""

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> Any:
        super().copy_(src, non_blocking)
        raise KeyboardInterrupt


@pytest.mark.parametrize("tables", [(), (3,)])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_s_tables_have_its_rows_and_zeros_elsewhere(tables: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    source = torch.zeros((*tables, ROWS, COLUMNS), dtype=torch.int32)
    step = StepTables(HostTables(source), source, CPU)
    assert step.pages().size == 0
    addresses = {(step.lookup(slice(0, 1), 1).data_ptr(), step.upload(np.ones(1, np.int32)).data_ptr())}
    interrupts = 0
    for _ in range(300):
        source[:] = torch.from_numpy(random.integers(0, 9, source.shape).astype(np.int32))
        count, columns = int(random.integers(ROWS + 1)), int(random.integers(COLUMNS + 1))
        rows = random.permutation(ROWS)[:count]
        if random.random() < 0.2:
            whole, step._table = step._table, step._table.as_subclass(Interrupted)
            with pytest.raises(KeyboardInterrupt):
                step.lookup(rows, columns)
            step._table, interrupts = whole, interrupts + 1
            continue
        lengths = random.integers(1, 9, count).astype(np.int32)
        found, uploaded = step.lookup(rows, columns), step.upload(lengths)
        expected = source.numpy()[..., rows, :columns]
        assert found.dtype == uploaded.dtype == torch.int32
        assert np.array_equal(found.numpy(), expected)
        assert uploaded.tolist() == lengths.tolist()
        assert sorted(step.pages().tolist()) == sorted({*expected.ravel().tolist()} - {0})
        if count and columns:
            addresses.add((found.data_ptr(), uploaded.data_ptr()))
        more = int(random.integers(count, ROWS + 1))
        inputs = inputs_of(uploaded, found)
        padded = step.padded(inputs, more)
        filled = np.zeros((*tables, more, COLUMNS), np.int32)
        filled[..., :count, :columns] = expected
        assert np.array_equal(padded.lookup_table.numpy(), filled)
        assert padded.cache_lengths.tolist() == [*lengths.tolist(), *[0] * (more - count)]
        assert padded.blocks is inputs.blocks
        assert padded.max_lengths is inputs.max_lengths
    assert len(addresses) == 1
    assert interrupts > 20


def test_a_step_s_tables_are_on_the_device() -> None:
    source = torch.zeros((ROWS, COLUMNS), dtype=torch.int32)
    step = StepTables(HostTables(source), source, torch.device("meta"))
    assert step._table.device == step._lengths.device == torch.device("meta")
    assert (step._table.shape, step._lengths.shape) == ((ROWS, COLUMNS), (ROWS,))
