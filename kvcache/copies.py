"""Copies whole pages, each as one row of memory, between two pools, or between a pool and the host tier.

Each call to a GPU's copy engine costs the loop a few microseconds. From CUDA 13 on, one call copies many rows. Before
CUDA 13, a kernel gathers rows into a dense buffer in device memory, or scatters them from it. The copy engine is then
called once for each run of slots, instead of once for each page.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.int32]

_STAGED_BYTES = 32 << 20  # in bytes: the most device memory that a copy uses as a buffer


def page_rows(blocks: torch.Tensor) -> torch.Tensor:
    """Returns a view of a pool `[pages, ...]` as rows `[pages, words]`.

    The words are int64, or uint8 if the row size is not a multiple of 8.

    A row is a whole page: everything up to the start of the next page, including scales and padding.
    """
    return as_words(blocks, blocks.stride(0))


def as_words(blocks: torch.Tensor, elements: int) -> torch.Tensor:
    """Returns a view of the first `elements` elements of each page, `[pages, words]`.

    The words are int64, or uint8 if the size of `elements` elements is not a multiple of 8 bytes.
    """
    rows = blocks.as_strided((blocks.shape[0], elements), (blocks.stride(0), 1)).view(torch.uint8)
    # A kernel that gathers single bytes takes several times as long as one that gathers words.
    return rows if rows.shape[1] % 8 else rows.view(torch.int64)


def copy_pages(source: torch.Tensor, taken: Ids, target: torch.Tensor, given: Ids) -> None:
    """Copy rows of `source` to rows of `target`. Both tensors may be in any memory.

    Row `taken[i]` of `source` is copied to row `given[i]` of `target`. All ids in `given` must be distinct.
    """
    if source.device.type == target.device.type == "cpu":
        copy_rows(source.numpy(), taken, target.numpy(), given)
        return
    batch = max(1, _STAGED_BYTES // (source.shape[1] * source.element_size()))
    for first in range(0, len(taken), batch):
        rows, into = taken[first : first + batch], given[first : first + batch]
        _scatter(_gather(source, rows, target.device), target, into)


def copy_rows(source: NDArray[Any], taken: Ids, target: NDArray[Any], given: Ids) -> None:
    """Do the same as `copy_pages` within host memory."""
    if not source.flags.c_contiguous:  # `take` would first copy the whole array, whose rows are large
        for row, at in zip(taken.tolist(), given.tolist(), strict=True):
            target[at] = source[row]
        return
    at = taken.astype(np.intp)
    for first, last in runs(given):
        # There is one call for each run of consecutive target rows. Assigning to an array of rows takes three to five
        # times as long.
        np.take(source, at[first:last], axis=0, out=target[given[first] : given[last - 1] + 1], mode="clip")


def runs(ids: Ids) -> Iterator[tuple[int, int]]:
    """Returns the start and the end of each run of consecutive ids, as indices into `ids`."""
    cuts = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    return pairwise(cuts) if len(ids) else iter(())


def _gather(rows: torch.Tensor, ids: Ids, device: torch.device) -> torch.Tensor:
    """Returns a copy of the rows `ids` in a dense buffer in device memory.

    If `rows` are in host memory, the buffer is on `device`, otherwise it is on the device of `rows`.
    """
    if rows.device.type != "cpu":
        return rows.index_select(0, _upload(ids, rows.device))
    staged = torch.empty((len(ids), rows.shape[1]), dtype=rows.dtype, device=device)
    for first, last in runs(ids):
        staged[first:last].copy_(rows[int(ids[first]) : int(ids[last - 1]) + 1], non_blocking=True)
    return staged


def _scatter(staged: torch.Tensor, rows: torch.Tensor, ids: Ids) -> None:
    if rows.device.type != "cpu":
        rows.index_copy_(0, _upload(ids, rows.device), staged.to(rows.device, non_blocking=True))
        return
    for first, last in runs(ids):
        rows[int(ids[first]) : int(ids[last - 1]) + 1].copy_(staged[first:last], non_blocking=True)


def _upload(ids: Ids, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(ids.astype(np.int64)).pin_memory().to(device, non_blocking=True)


def launching_on(stream: Any) -> Any:
    """Returns a context manager in which device work is launched on `stream`; None means the current stream."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class _Place(ctypes.Structure):
    """The C struct `cudaMemLocation`. If all fields are zero, the driver finds out where an address lies."""

    _fields_ = [("kind", ctypes.c_int), ("device", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    """`cudaMemcpyAttributes`."""

    _fields_ = [("order", ctypes.c_int), ("source", _Place), ("target", _Place), ("flags", ctypes.c_uint)]


_IN_STREAM_ORDER = 1
"""`cudaMemcpySrcAccessOrderStream`"""


@cache
def _batched_copy() -> Any:
    """Returns `cudaMemcpyBatchAsync` from the CUDA library that torch uses.

    Returns None unless torch uses CUDA 13, because the call below has CUDA 13's signature.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    if major != "13":
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyBatchAsync
    except (OSError, AttributeError):
        return None


def _copy_batched(call: Any, source: torch.Tensor, taken: Ids, target: torch.Tensor, given: Ids, stream: int) -> None:
    """Copy rows between device memory and pinned memory with one call.

    The copy runs in order with the other work of `stream`, a stream handle.
    """
    row = source.shape[1] * source.element_size()
    steps = [tensor.stride(0) * tensor.element_size() for tensor in (source, target)]
    ends = np.array([len(taken)])
    if steps == [row, row]:  # consecutive rows on both sides are one copy
        cuts = np.flatnonzero((np.diff(taken) != 1) | (np.diff(given) != 1)) + 1
        first, ends = np.concatenate(([0], cuts)), np.concatenate((cuts, ends))
    else:
        first, ends = np.arange(len(taken)), np.arange(1, len(taken) + 1)
    sizes = ((ends - first) * row).astype(np.uint64)
    addresses = [
        (tensor.data_ptr() + ids[first].astype(np.int64) * step).astype(np.uint64)
        for tensor, ids, step in zip((target, source), (given, taken), (steps[1], steps[0]), strict=True)
    ]
    attributes, first_of = _CopyAttributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0)
    arrays = [ctypes.c_void_p(array.ctypes.data) for array in (*addresses, sizes)]
    count = ctypes.c_size_t(len(sizes))
    error = call(
        *arrays, count, ctypes.byref(attributes), ctypes.byref(first_of), ctypes.c_size_t(1), ctypes.c_void_p(stream)
    )
    torch.cuda.check_error(error)


class _Mark:
    """A point in a device's work, recorded right after a copy. When the device reaches it, the copy has ended."""

    def __init__(self, side: Any, main: Callable[[], Any]) -> None:
        self.event: Any = torch.cuda.Event()  # pyright: ignore[reportUnknownMemberType] - the type stubs of torch lack it
        self.event.record(side)
        self.main = main


class Copy:
    """A copy of pages from one memory to another. If a GPU makes the copy, the calling thread continues meanwhile.

    `make` copies the pages, or launches the copy on devices. `make` returns a `_Mark` for each device that copies,
    which tells when the copy has ended. If an exception interrupts `make`, the copy counts as not begun.
    """

    def __init__(self, make: Callable[[], Sequence[_Mark]]) -> None:
        self._make = make
        self._marks: Sequence[_Mark] = ()
        self.begun = False

    def begin(self) -> None:
        """Begin the copy, unless it has begun. If the CPU makes the copy, it is over when this call returns."""
        if not self.begun:
            self._marks = self._make()
            self.begun = True

    def over(self) -> bool:
        """Whether the copy has ended. Never waits."""
        return self.begun and all(mark.event.query() for mark in self._marks)

    def wait(self) -> None:
        """Begin the copy if it has not begun, and wait until it is over."""
        self.begin()
        for mark in self._marks:
            mark.event.synchronize()

    def order(self) -> None:
        """Begin the copy if it has not begun, and let all device work that is launched later wait for it.

        The calling thread itself never waits.
        """
        self.begin()
        for mark in self._marks:
            mark.main().wait_event(mark.event)


class PageMover:
    """Copies between the pages of a replica and slots of the host tier.

    `shards` has the memory of each shard: its pages, `[pages, ...]`, and its slots, uint8 `[slots, page_bytes]`. The
    first `page_bytes` bytes of a page are copied to a slot or from it. Pages may lie further apart than that, and slots
    may be parts of larger slots.

    A GPU copies between pages and pinned slots on a separate stream, in order with `stream` (None: the current one).
    Every copy begins at once, and runs while the calling thread continues.

    On the CPU the calling thread copies, at the rate of memcpy. A copy to pages begins only when the pages are needed,
    so it costs nothing if its request is cancelled first. A second thread for copies was tried and rejected. It
    releases the GIL while it copies, but whenever it takes the GIL back, the loop may wait for a scheduler tick. One in
    a hundred steps of 0.2 ms then took 4.3 ms (two cores, decode steps of 64 and 1,024 requests). A thread also saves
    no work if the model runs on the same cores.
    """

    def __init__(self, shards: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: Any) -> None:
        rows = [(as_words(blocks, slots.shape[1] // blocks.element_size()), slots) for blocks, slots in shards]
        self._pages = [pages for pages, _ in rows]
        self._slots = [slots.view(pages.dtype) for pages, slots in rows]
        self._stream = stream
        self._sides: dict[torch.device, Any] = {
            device: torch.cuda.Stream(device)  # pyright: ignore[reportUnknownMemberType] - the type stubs of torch lack it
            for device in {pages.device for pages in self._pages if pages.is_cuda}
        }

    def store(self, pages: Ids, slots: Ids) -> Copy:
        """Begin to copy pages to distinct host slots, one page to each slot."""
        copy = Copy(partial(self._copy, self._pages, pages, self._slots, slots))
        copy.begin()
        return copy

    def load(self, slots: Ids, pages: Ids) -> Copy:
        """Return a `Copy` of host slots to distinct pages, one slot to each page.

        If a GPU makes the copy, it has begun when this call returns. On the CPU it has not begun.
        """
        copy = Copy(partial(self._copy, self._slots, slots, self._pages, pages))
        if self._sides:
            copy.begin()
        return copy

    def _copy(
        self, sources: Sequence[torch.Tensor], taken: Ids, targets: Sequence[torch.Tensor], given: Ids
    ) -> list[_Mark]:
        mains = {device: partial(self._main, device) for device in self._sides}
        # The copy runs after all kernels that were launched earlier, because they may still write the pages to copy, or
        # read the pages to overwrite.
        for device, side in self._sides.items():
            side.wait_stream(mains[device]())
        for pages, source, target in zip(self._pages, sources, targets, strict=True):
            if pages.is_cuda:
                _launch(source, taken, target, given, self._sides[pages.device])
            else:
                copy_pages(source, taken, target, given)
        return [_Mark(side, mains[device]) for device, side in self._sides.items()]

    def _main(self, device: torch.device) -> Any:
        with launching_on(self._stream):
            return torch.cuda.current_stream(device)


def _launch(source: torch.Tensor, taken: Ids, target: torch.Tensor, given: Ids, side: Any) -> None:
    """Copy rows between device memory and pinned memory on the stream `side`."""
    with torch.cuda.stream(side):
        if (batched := _batched_copy()) is None:
            copy_pages(source, taken, target, given)
        elif len(taken):
            _copy_batched(batched, source, taken, target, given, side.cuda_stream)
