"""The inputs of a model's attention: built from a batch, described to `torch.export`, and advanced by a step."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.arguments import shown
from kvcache.errors import InvalidRequestError, KVCacheError
from kvcache.layer_groups import layer_tables
from kvcache.layout import as_blocks, from_numpy, scales_of, shard_layouts
from kvcache.params import KVCacheParams
from kvcache.replica.rows import Ints, Rows
from kvcache.types import RaggedKVCacheInputs
from kvcache.unmoved import Unmoved

INT32 = np.dtype(np.int32)  # numpy takes longer with the class


class HostTables:
    """Provides the tensors of a batch's rows on the CPU, lookup tables and lengths, without a copy where possible.

    If the rows are consecutive, a lookup table is a view of the block table, otherwise a copy. `tensor` is one block
    table, or several with the same rows.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._table: NDArray[np.int32] = tensor.numpy()  # `[..., rows, columns]`
        self._last: tuple[Rows, int, torch.Tensor] = slice(0), 0, tensor[..., :0, :0]  # the last view of the table

    def lookup(self, rows: Rows, columns: int) -> torch.Tensor:
        """Returns the first `columns` page ids of `rows`: int32 `[..., len(rows), columns]`."""
        of_rows, of_columns, table = self._last
        if rows is of_rows and columns == of_columns:  # steps of one list that need no new column
            return table
        table = from_numpy(self._table[..., rows, :columns])
        if isinstance(rows, slice):
            self._last = rows, columns, table
        return table

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        """Returns a tensor of `array` on the device, such as the length of each row, int32 `[len(rows)]`."""
        return from_numpy(array)


class DeviceTables:
    """Provides lookup tables on a GPU, which has its own copy of the block table.

    Only rows that have changed since the last call are uploaded. The upload goes from pinned memory, on the current
    stream. torch's pinned allocator keeps the pinned buffer until the upload has read it.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._table: NDArray[np.int32] = tensor.numpy()  # `[..., rows, columns]`
        self._mirror = tensor.to(device)

    def lookup(self, rows: Rows, columns: int) -> torch.Tensor:
        if isinstance(rows, slice):
            return self._mirror[..., rows, :columns]
        return self._mirror[..., :columns].index_select(-2, self.upload(rows))

    def upload_changes(self, changed: NDArray[np.int64]) -> None:
        """Upload the rows `changed`, so that the device's copy is up to date."""
        if changed.size:
            self._mirror.index_copy_(-2, self.upload(changed), self.upload(self._table[..., changed, :]))

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        return from_numpy(array).pin_memory().to(self._mirror.device, non_blocking=True)


class StepTables:
    """The lookup tables of one step in flight.

    They are copies in separate memory, which has the same address in each step, so they cannot be sent to another
    process. Rows and columns that the batch does
    not use are cleared: the rows have length 0, and the columns name the null page. So a CUDA graph that was captured
    for more rows and columns may read the tables.
    """

    def __init__(self, source: HostTables | DeviceTables, tensor: torch.Tensor, device: torch.device) -> None:
        self._source = source
        self._table = torch.zeros(tensor.shape, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(tensor.shape[-2], dtype=torch.int32, device=device)
        self.unmoved = Unmoved({"lookup table of a step": self._table, "lengths of a step": self._lengths})
        self._used = 0, 0  # how many rows and columns of the tables the previous step used

    def lookup(self, rows: Rows, columns: int) -> torch.Tensor:
        found, (had_rows, had_columns) = self._source.lookup(rows, columns), self._used
        count = found.shape[-2]
        self._used = (
            max(count, had_rows),
            max(columns, had_columns),
        )  # set before the copy, so that after an interrupt the next call clears what this copy has written
        table = self._table[..., :count, :columns]
        table.copy_(found)
        if count < had_rows:
            self._table[..., count:had_rows, :had_columns] = 0
        if columns < had_columns:
            self._table[..., :count, columns:had_columns] = 0
        self._used = count, columns
        return table

    def upload(self, array: NDArray[np.int32]) -> torch.Tensor:
        lengths = self._lengths[: len(array)]
        lengths.copy_(self._source.upload(array))
        self._lengths[len(array) :] = 0
        return lengths

    def padded(self, inputs: RaggedKVCacheInputs, rows: int) -> RaggedKVCacheInputs:
        """Returns the step's `inputs`, extended to `rows` rows and to all columns of the block table."""
        return inputs._replace(cache_lengths=self._lengths[:rows], lookup_table=self._table[..., :rows, :])

    def pages(self) -> NDArray[np.int32]:
        """The pages that the step in flight may read and write."""
        rows, columns = self._used
        pages = np.unique(self._table[..., :rows, :columns].cpu().numpy())
        return pages[pages > 0]


def build_inputs(
    pools: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    tables: Sequence[HostTables | DeviceTables | StepTables],
    rows: Rows,
    starts: Ints,
    columns: int,
    lengths: torch.Tensor,
) -> list[RaggedKVCacheInputs]:
    """Returns the inputs of a replica, one entry for each shard: `rows` of its tables, up to column `columns`.

    `pools` has the values and scales of each shard's pages. `starts` is the number of cached tokens of each request.
    `lengths` are the `max_lengths`.
    """
    cached = starts.astype(INT32)
    found: list[RaggedKVCacheInputs] = []
    for (blocks, scales), device in zip(pools, tables, strict=True):
        cached_there, table = device.upload(cached), device.lookup(rows, columns)
        found.append(RaggedKVCacheInputs(blocks, cached_there, table, lengths, scales))
    return found


def max_lengths(run: int, context: int, num_steps: int) -> torch.Tensor:
    """Returns int32 `[num_steps, 2]`: for each step, the most tokens that any request runs, and the longest context.

    From the second step on, each request runs one token. If no token runs, the result is one row of zeros.
    """
    lengths = np.empty((num_steps if run else 1, 2), INT32)
    lengths[0, 0], lengths[0, 1] = run, context if run else 0
    if len(lengths) > 1:
        lengths[1:, 0], lengths[1:, 1] = 1, np.arange(context + 1, context + num_steps)
    return from_numpy(lengths)


def increment_cache_lengths(
    kv_cache_inputs: Sequence[RaggedKVCacheInputs], prev_model_inputs: Any, *, replicas: int
) -> Sequence[RaggedKVCacheInputs]:
    """See `PagedKVCacheManager.increment_cache_lengths`.

    Does not copy tables or pages, and does not wait for a device.
    """
    try:
        advanced = _advanced(kv_cache_inputs, prev_model_inputs, replicas)
    except KVCacheError:
        raise
    except (TypeError, AttributeError, IndexError, RuntimeError, OverflowError, ValueError) as error:
        raise InvalidRequestError(f"increment_cache_lengths of {shown(prev_model_inputs)}: {error}") from error
    if isinstance(kv_cache_inputs, list):
        kv_cache_inputs[:] = advanced
        return kv_cache_inputs
    return advanced


def _advanced(
    kv_cache_inputs: Sequence[RaggedKVCacheInputs], prev_model_inputs: Any, replicas: int
) -> list[RaggedKVCacheInputs]:
    offsets: Any = prev_model_inputs.input_row_offsets
    if isinstance(offsets, list):
        offsets = cast("list[Any]", offsets)[0]
    ran = torch.diff(torch.as_tensor(offsets).to(torch.int64)).to(torch.int32)
    splits = [0, len(ran)]
    if replicas > 1:
        splits = [int(split) for split in prev_model_inputs.data_parallel_splits]
    if len(splits) != replicas + 1 or splits[0] != 0 or splits[-1] != len(ran) or splits != sorted(splits):
        raise InvalidRequestError(
            f"data_parallel_splits is {splits}: it must divide {len(ran)} requests among {replicas} replicas"
        )
    shards, rest = divmod(len(kv_cache_inputs), replicas)
    if rest or not shards:
        raise InvalidRequestError(
            f"got {len(kv_cache_inputs)} inputs for {replicas} replicas: a multiple of {replicas} above 0 is needed"
        )
    advanced: list[RaggedKVCacheInputs] = []
    for number, inputs in enumerate(kv_cache_inputs):
        replica = number // shards
        mine = ran[splits[replica] : splits[replica + 1]]
        lengths = inputs.cache_lengths
        if len(mine) != len(lengths):
            raise InvalidRequestError(f"replica {replica}: got {len(mine)} row offsets for {len(lengths)} requests")
        advanced.append(
            inputs._replace(
                cache_lengths=lengths + mine.to(lengths.device, non_blocking=True), max_lengths=inputs.max_lengths[1:]
            )
        )
    return advanced


def data_parallel_splits(replicas: Ints, count: int) -> torch.Tensor:
    """Returns 0, and for each replica the index after its last request in the batch.

    `replicas` has the replica of each request.
    """
    if (np.diff(replicas) < 0).any():
        raise InvalidRequestError(f"the replicas of the batch are {replicas.tolist()}: order its requests by replica")
    counts = np.bincount(replicas, minlength=count)
    return torch.as_tensor(np.concatenate(([0], np.cumsum(counts))).astype(np.int64))


class RaggedKVCacheInputSymbols(NamedTuple):
    """The shapes of the inputs that `fetch` returns for one device, for `torch.export`."""

    inputs: RaggedKVCacheInputs  # meta tensors
    dynamic_shapes: RaggedKVCacheInputs  # for each tensor, the named dimensions whose size varies between calls


def input_symbols(
    params: KVCacheParams, num_layers: int, page_size: int, num_pages: Sequence[int]
) -> list[RaggedKVCacheInputSymbols]:
    """Returns the symbols for each shard of each replica. `num_pages` has the number of pages in each replica's pool.

    All shards of a replica have the same named dimensions.
    """
    tables = layer_tables(params.groups, num_layers)
    layouts = shard_layouts(params, tables.layers_per_page, page_size)
    count = len(tables.tables)
    names = ("total_num_pages", "batch_size", "max_num_pages", "steps_remaining")
    found: list[RaggedKVCacheInputSymbols] = []
    for replica, total in enumerate(num_pages):
        prefix = f"replica_{replica}_" if len(num_pages) > 1 else ""
        pages, batch, columns, steps = (torch.export.Dim(prefix + name) for name in names)
        of_table = {0: batch, 1: columns} if count == 1 else {1: batch, 2: columns}
        of_scales = None if params.kvcache_quant_config is None else {0: pages}
        shapes = RaggedKVCacheInputs({0: pages}, {0: batch}, of_table, {0: steps}, of_scales)  # pyright: ignore[reportArgumentType] - the same fields hold shapes here
        for layout in layouts:
            rows = torch.empty((total, layout.page_bytes), dtype=torch.uint8, device="meta")
            blocks = as_blocks(rows.view(getattr(torch, layout.dtype)), layout, total)
            scales = scales_of(rows, layout)
            # The example sizes are above 1, because `torch.export` treats the sizes 0 and 1 as constants.
            lengths, table, steps_left = (
                torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2,), (2, 3), (4, 2))
            )
            if count > 1:
                table = table.repeat(count, 1, 1)
            inputs = RaggedKVCacheInputs(blocks, lengths, table, steps_left, scales)
            found.append(RaggedKVCacheInputSymbols(inputs, shapes))
    return found
