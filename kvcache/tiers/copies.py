"""Moves whole pages between one shard's pool and host memory: rows of bytes, taken here and put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Bytes = NDArray[np.uint8]

_STAGED_BYTES = 32 << 20


class Mark(Protocol):
    """The point in a device's work at which a copy is over."""

    def over(self) -> bool:
        """Whether it is over. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until it is over."""
        ...

    def order(self) -> None:
        """Let what the device is told to do from now on begin after the copy. Never waits."""
        ...


class PageMover(Protocol):
    """Copies between the pages of one shard and the slots of the host tier.

    `at_once`: a copy is over when the call returns, and takes the caller's time. Else it runs beside the caller, after
    what the device was told before, and the calls return its `Mark`.
    """

    at_once: bool

    def store(self, pages: Ids, slots: Ids) -> Mark | None:
        """Copy device pages into host slots, as many, distinct."""
        ...

    def load(self, slots: Ids, pages: Ids) -> Mark | None:
        """Copy host slots into device pages, as many, distinct."""
        ...


def mover_of(blocks: torch.Tensor, host: torch.Tensor, stream: Any) -> PageMover:
    """The mover between a pool, `[pages, ...]`, dense page after page, and host rows uint8 `[slots, page_bytes]`."""
    page_bytes, rows = host.shape[1], page_rows(blocks)
    if blocks.device.type == "cpu":
        return CpuMover(rows.numpy(), host.numpy())
    # A kernel that gathers bytes one by one takes several times as long as one that gathers words.
    word = torch.int64 if page_bytes % 8 == 0 else torch.uint8
    return CudaMover(rows.view(word), host.view(word), stream)


def page_rows(blocks: torch.Tensor) -> torch.Tensor:
    """A pool, `[pages, ...]`, dense page after page, as the bytes of its pages: uint8 `[pages, page_bytes]`, a view."""
    elements = blocks[0].numel()
    return blocks.as_strided((blocks.shape[0], elements), (elements, 1)).view(torch.uint8)


class CpuMover:
    """Copies on the thread that calls, at the rate of memcpy.

    A thread beside the loop was rejected: it releases the GIL while it copies, but each time that it takes the GIL
    back, the loop may wait for a scheduler's tick: steps of 0.2 ms had 4.3 ms in one of a hundred (two cores, decode
    steps of 64 and 1,024 requests). And it takes no work away where the model runs on these cores too.
    """

    at_once = True

    def __init__(self, device: Bytes, host: Bytes) -> None:
        self._device = device
        self._host = host

    def store(self, pages: Ids, slots: Ids) -> None:
        """Copy device pages into host slots."""
        copy_rows(self._device, pages, self._host, slots)

    def load(self, slots: Ids, pages: Ids) -> None:
        """Copy host slots into device pages."""
        copy_rows(self._host, slots, self._device, pages)


def copy_rows(source: Bytes, taken: Ids, target: Bytes, given: Ids) -> None:
    """Copy the rows `taken` of one array into the rows `given`, as many, distinct, of another."""
    at = taken.astype(np.intp)
    for first, last in runs(given):
        # One call a run of target rows. Assigning row arrays to row arrays takes three to five times as long.
        np.take(source, at[first:last], axis=0, out=target[given[first] : given[last - 1] + 1], mode="clip")


def runs(ids: Ids) -> Iterator[tuple[int, int]]:
    """First and end of each run of neighbours that follow each other upwards."""
    cuts = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    return pairwise(cuts) if len(ids) else iter(())


class CudaMover:
    """Copies on a stream of its own, between the device and pinned memory.

    Pages are gathered into a dense piece of device memory (scattered from one) by one kernel, so that the copy engine
    is asked once for a run of slots, not once for a page: asking costs the loop some microseconds each time.

    Args:
        rows: the pool, `[pages, words]`, on the device.
        host: the slots, `[slots, words]`, of the same dtype, pinned.
        stream: the one that the model's work is ordered by; None means the current one.
    """

    at_once = False

    def __init__(self, rows: torch.Tensor, host: torch.Tensor, stream: Any) -> None:
        self._rows = rows
        self._host = host
        self._session = stream
        self._side: Any = torch.cuda.Stream(rows.device)  # pyright: ignore[reportUnknownMemberType] - torch's has no types
        self._batch = max(1, _STAGED_BYTES // (host.shape[1] * host.element_size()))

    def store(self, pages: Ids, slots: Ids) -> Mark:
        """Copy device pages into host slots."""
        main = self._main()
        self._side.wait_stream(main)  # the model may still be writing them
        with torch.cuda.stream(self._side):
            for first in range(0, len(pages), self._batch):
                staged = self._rows.index_select(0, self._upload(pages[first : first + self._batch]))
                part = slots[first : first + self._batch]
                for start, end in runs(part):
                    host = self._host[int(part[start]) : int(part[end - 1]) + 1]
                    host.copy_(staged[start:end], non_blocking=True)
            return _CudaMark(self._side, self._main)

    def load(self, slots: Ids, pages: Ids) -> Mark:
        """Copy host slots into device pages."""
        main = self._main()
        self._side.wait_stream(main)  # kernels launched before may still read what the pages held
        with torch.cuda.stream(self._side):
            for first in range(0, len(pages), self._batch):
                part = slots[first : first + self._batch]
                staged = self._rows.new_empty((len(part), self._rows.shape[1]))
                for start, end in runs(part):
                    host = self._host[int(part[start]) : int(part[end - 1]) + 1]
                    staged[start:end].copy_(host, non_blocking=True)
                self._rows.index_copy_(0, self._upload(pages[first : first + self._batch]), staged)
            return _CudaMark(self._side, self._main)

    def _upload(self, ids: Ids) -> torch.Tensor:
        return torch.as_tensor(ids.astype(np.int64)).pin_memory().to(self._rows.device, non_blocking=True)

    def _main(self) -> Any:
        with nullcontext() if self._session is None else torch.cuda.stream(self._session):
            return torch.cuda.current_stream(self._rows.device)


class _CudaMark:
    def __init__(self, side: Any, main: Any) -> None:
        self._event: Any = torch.cuda.Event()  # pyright: ignore[reportUnknownMemberType] - as above
        self._event.record(side)
        self._main = main

    def over(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        self._main().wait_event(self._event)
