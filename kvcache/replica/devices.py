"""A replica on its devices: the page tensors of its shards, and the block tables that each device reads.

`ReplicaPageMoves` moves held pages to make room for a slab, and replaces their ids wherever they are recorded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.copies import copy_pages, launching_on, page_rows
from kvcache.layout import PageLayout, allocate_blocks, scales_of
from kvcache.pool.pages import PageMoves
from kvcache.replica.batch import Longest
from kvcache.replica.inputs import DeviceTables, HostTables, StepTables, build_inputs, max_lengths
from kvcache.replica.replica import Replica
from kvcache.replica.rows import Ints, Pages, Rows
from kvcache.types import RaggedKVCacheInputs
from kvcache.unmoved import Unmoved


class PageMemory:
    """The page tensors of a replica's shards, and functions that copy whole pages.

    `num_pages` does not count the null page. Device work runs on `stream`, or on the current stream if that is None.
    """

    def __init__(
        self, layouts: Sequence[PageLayout], num_pages: int, devices: Sequence[torch.device], stream: Any
    ) -> None:
        self.layouts, self.devices, self.stream = layouts, devices, stream
        pages = num_pages + 1  # the null page, 0, is not part of the budget
        # The memory of each shard is one tensor: `[pages + 1, sides, layers, page_size, heads, head_dim]`.
        self.blocks = [allocate_blocks(layout, pages, device) for layout, device in zip(layouts, devices, strict=True)]
        # the memory of each shard with one row for each whole page, including its scales
        self.rows = [page_rows(blocks) for blocks in self.blocks]
        self.unmoved = Unmoved({f"pages of shard {shard}": blocks for shard, blocks in enumerate(self.blocks)})

    def settle(self) -> None:
        """Wait until the devices have finished all work."""
        for device in {blocks.device for blocks in self.blocks if blocks.is_cuda}:
            torch.cuda.synchronize(device)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page to another on every shard."""
        with self.on_stream():
            for rows in self.rows:
                rows[target].copy_(rows[source], non_blocking=True)

    def copy_pages_of(self, other: "PageMemory", sources: Pages, targets: Pages) -> None:
        """Copy pages of another replica of this process to pages here, on each shard.

        `sources` and `targets` have the same length, and the targets are distinct. The copy runs on the devices after
        all work that either replica has launched before. The call waits until the copy is done, because the pages are
        published next, and a reader in another process does not wait for our devices.
        """
        with self.on_stream():
            for theirs, ours in zip(other.rows, self.rows, strict=True):
                copy_pages(theirs, sources, ours, targets)
            for device in {ours.device for ours in self.blocks if ours.is_cuda}:
                torch.cuda.current_stream(device).synchronize()

    def on_stream(self) -> Any:
        """Returns a context manager in which device work is launched on the stream."""
        return launching_on(self.stream)


class PlacedReplica:
    """A replica together with its page tensors and the block tables on its devices.

    `Replica` itself knows nothing about devices.
    """

    def __init__(self, replica: Replica, memory: PageMemory) -> None:
        self.replica, self.memory = replica, memory
        scales = [scales_of(rows, layout) for rows, layout in zip(memory.rows, memory.layouts, strict=True)]
        self._pools = list(zip(memory.blocks, scales, strict=True))
        with memory.on_stream():
            gpus = {device for device in memory.devices if device.type != "cpu"}
            mirrors = {device: DeviceTables(replica.rows.tensor, device) for device in gpus}
        of_host = HostTables(replica.rows.tensor)
        self._tables = [mirrors.get(device, of_host) for device in memory.devices]
        # for each number of a set of step tables, the tables of each shard
        self._of_steps: dict[int, list[StepTables]] = {}
        self._mirrored = [*mirrors.values()]
        # True on the CPU: there is no stream on which work is launched, and no block table to upload
        self._is_plain = memory.stream is None and not mirrors

    def inputs(
        self, rows: Rows, starts: Ints, longest: Longest, num_steps: int, number: int | None = None
    ) -> list[RaggedKVCacheInputs]:
        """Returns the model's inputs for these `rows`, one entry for each shard.

        `starts` has the number of cached tokens of each row. `number` selects the set of step tables in which the
        lookup tables are built. If `number` is None, the lookup tables are built for a step that is not in flight.
        """
        own, tables = self.replica.rows, self._tables if number is None else self._of_steps[number]
        run, context, known = longest
        columns = -(-(known + num_steps - 1) // self.replica.page_size) if known else 0
        lengths = max_lengths(run, context, num_steps)
        if self._is_plain:
            return build_inputs(self._pools, tables, rows, starts, columns, lengths)
        with self.memory.on_stream():
            if self._mirrored:
                changed = np.flatnonzero(own.changed)
                for table in self._mirrored:
                    table.upload_changes(changed)
                own.changed[changed] = False
            return build_inputs(self._pools, tables, rows, starts, columns, lengths)

    def check(self) -> None:
        """Raise `MovedMemoryError` if any of this replica's memory is no longer at its address."""
        tables = [one.unmoved for made in self._of_steps.values() for one in made]
        for unmoved in (self.memory.unmoved, self.replica.rows.unmoved, *tables):
            unmoved.check()

    def step_tables(self, number: int) -> list[StepTables]:
        """Returns the set of step tables with this number, one entry for each shard.

        Shards on one device share a table.
        """
        if number not in self._of_steps:
            tensor = self.replica.rows.tensor
            with self.memory.on_stream():
                tables = dict(zip(self.memory.devices, self._tables, strict=True))
                made = {device: StepTables(table, tensor, device) for device, table in tables.items()}
            self._of_steps[number] = [made[device] for device in self.memory.devices]
        return self._of_steps[number]


class ReplicaPageMoves(PageMoves):
    """Moves pages of one replica, in all its block tables. `copy` copies pages to other pages on all shards.

    A page is not moved while a running model, or a reader of a block table, knows its id.
    """

    def __init__(self, replica: Replica, copy: Callable[[Pages, Pages], None]) -> None:
        self._replica = replica
        self._copy = copy
        count = len(replica.rows.request_ids)
        self._runs, self._told = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        # The rows of the last `fetched`, if `stepped` has not been called for them. They are not in `_runs` yet: most
        # steps fetch and step one list, and no page moves in between.
        self._fetched: Rows | None = None
        self._any_run = False  # whether some other row runs

    def claimed(self, row: int) -> None:
        self._runs_now()[row] = self._told[row] = False

    def fetched(self, rows: Rows) -> None:
        if self._fetched is not rows:
            self._runs_now()
            self._fetched = rows

    def stepped(self, rows: Rows) -> None:
        if self._fetched is rows and not self._any_run:
            self._fetched = None
            return
        runs = self._runs_now()
        runs[rows] = False
        self._any_run = bool(runs.any())

    def _runs_now(self) -> NDArray[np.bool_]:
        """Returns a mask of the rows that a model runs."""
        if self._fetched is not None:
            self._runs[self._fetched] = self._any_run = True
            self._fetched = None
        return self._runs

    def told(self, row: int) -> None:
        self._told[row] = True

    def staying(self) -> NDArray[np.bool_]:
        """Returns a mask of the pages that cannot be moved.

        A page cannot be moved if a transfer writes it, or if anything besides rows holds it. The pages of a row cannot
        be moved while a model runs the row, or while the row has a lease, an import or an exported block table.
        """
        pool = self._replica.pool
        by_rows = np.bincount(np.concatenate(self._pages_of_rows()), minlength=pool.num_pages + 1)
        stays = (pool.holders != by_rows) | (pool.writers > 0)
        known = np.flatnonzero(self._runs_now() | self._told).tolist()
        for row in (*self._replica.leases.of_row, *self._replica.imports.of_row, *known):
            stays[self._pages_of(row)] = True
        stays &= (pool.holders > 0) | (pool.writers > 0)
        return stays

    def move(self, sources: Pages, targets: Pages) -> None:
        """Copy the pages `sources` to the pages `targets`.

        Then replace the ids of `sources` in the rows and in the prefix index.
        """
        self._copy(sources, targets)
        rows, index = self._replica.rows, self._replica.pool.index
        renamed = np.arange(self._replica.pool.num_pages + 1, dtype=np.int32)
        renamed[sources] = targets
        moves = np.zeros(len(renamed), np.bool_)
        moves[sources] = True
        claimed = np.array([-1, *rows.row_of.values()], np.int64)
        of_rows = self._pages_of_rows()
        ends = np.cumsum([*map(len, of_rows)])
        # Testing the pages of all claimed rows at once takes half as long as testing row by row. Renaming the whole
        # table would make the slowest claims three times as slow, because most of its rows and columns have no pages.
        found = np.flatnonzero(moves[np.concatenate(of_rows)])
        moved: list[int] = claimed[np.unique(np.searchsorted(ends, found, "right"))].tolist()
        for row in moved:
            own = rows.table[:, row, : rows.num_pages[row]]
            own[:] = renamed[own]
        rows.changed[moved] = True
        index.tables[targets] = index.tables[sources]
        published = index.published[sources]
        index.rename(sources[published], targets[published])

    def _pages_of_rows(self) -> list[Pages]:
        """Returns the pages of each claimed row. An empty array comes first, because numpy joins at least one array."""
        return [np.zeros(0, np.int32), *map(self._pages_of, self._replica.rows.row_of.values())]

    def _pages_of(self, row: int) -> Pages:
        """Returns the pages of a row in all block tables."""
        return self._replica.tables.pages(row, self._replica.rows.num_pages.item(row))
