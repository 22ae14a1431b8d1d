"""The limits of the machine: how quickly `process_vm_readv` and `memcpy` move the same bytes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IOVECS = 512
"""The number of runs in one call. The kernel allows 1,024; from 256 on the rate no longer rises."""
_LARGEST = 1 << 30  # a single call copies at most 2 GiB

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]


class Reads(NamedTuple):
    """Prepared calls of `process_vm_readv`, so that only the calls themselves are timed.

    Attributes:
        calls: for each call, the address and the number of the local iovecs, the address of the remote ones, and the
            bytes.
        held: the memory that these addresses point to.
    """

    calls: list[tuple[int, int, int, int]]
    held: list[NDArray[np.uint64]]


def reads_of(runs: Sequence[tuple[NDArray[np.uint64], NDArray[np.uint64]]]) -> Reads:
    """Returns the calls that copy the given runs.

    `runs` has pairs of arrays, in the form that `Reader.runs` returns.
    """
    made = Reads([], [])
    for local, remote in runs:
        here, there = _iovecs(local), _iovecs(remote)
        made.held.extend((here, there))
        for first in range(0, len(here), IOVECS):
            sizes = here[first : first + IOVECS, 1]
            at = 16 * first
            made.calls.append((here.ctypes.data + at, len(sizes), there.ctypes.data + at, int(sizes.sum())))
    return made


def _iovecs(descriptors: NDArray[np.uint64]) -> NDArray[np.uint64]:
    rows = np.ascontiguousarray(descriptors[:, :2])
    if int(rows[:, 1].max()) <= _LARGEST:
        return rows
    cut = [(start + at, min(_LARGEST, size - at)) for start, size in rows.tolist() for at in range(0, size, _LARGEST)]
    return np.array(cut, np.uint64)


def read_process(pid: int, reads: Reads) -> None:
    """Copies runs of another process's memory into ours.

    Raises:
        OSError: the kernel refuses, or copies less than requested.
    """
    for here, count, there, size in reads.calls:
        done = _readv(pid, here, count, there, count, 0)
        if done != size:
            raise OSError(ctypes.get_errno(), f"{done} of {size} bytes: {os.strerror(ctypes.get_errno())}")


def copy_pages(target: NDArray[np.uint8], pages: NDArray[np.uint8], ids: NDArray[np.int64]) -> None:
    """Copies `pages[ids]` to `target` within this process; `pages` is uint8 `[pages, bytes]`."""
    np.take(pages, ids, axis=0, out=target, mode="clip")
