"""Moves bytes between host memory and files through NIXL's POSIX plugin. A file tier can use it in place of preadv.

It implements `kvcache.types.PageIO` and is passed as `KVCacheParams(file_tier_io=NixlFileIO)`. On a local disk it is no
faster than the default (`benchmarks.tiers`).
"""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from transfer.errors import AgentError
from transfer.nixl.agent import Agent, Descriptors, nixl_errors

_Bytes = npt.NDArray[np.uint8]

_POLL_S = 20e-6


class NixlFileIO:
    """Moves parts of registered memory (uint8 tensors on the CPU) to and from open files. Single-threaded.

    `queue` is "uring" or "aio", and the plugin must have been built with it. None lets the plugin choose.

    Raises:
        AgentError: NIXL is missing, or has no POSIX plugin, or its plugin lacks this queue.
    """

    def __init__(self, memory: Sequence[torch.Tensor], queue: str | None = None) -> None:
        files = {} if queue is None else {"use_aio": "false", "use_uring": "false", f"use_{queue}": "true"}
        self._agent = _FileAgent(f"files@{uuid.uuid4().hex}", files=files)
        self._memory = list(memory)  # keeps the memory mapped while it is registered
        self._agent.register([(region.data_ptr(), region.numel(), 0) for region in self._memory])

    def write(self, file: int, parts: Sequence[_Bytes], offset: int) -> None:
        """Writes the parts, one after another, starting at `offset`.

        Raises `OSError` if not all of them are written.
        """
        self._move("WRITE", file, parts, offset)

    def read(self, file: int, parts: Sequence[_Bytes], offset: int) -> None:
        """Fills the parts, one after another, from the file at `offset`.

        Raises `OSError` if the file has too few bytes.
        """
        self._move("READ", file, parts, offset)

    def _move(self, operation: Literal["READ", "WRITE"], file: int, parts: Sequence[_Bytes], offset: int) -> None:
        lengths = np.array([len(part) for part in parts], np.uint64)
        ends = np.cumsum(lengths) + np.uint64(offset)
        here, there = np.zeros((2, len(parts), 3), np.uint64)
        here[:, 0] = [part.ctypes.data for part in parts]
        there[:, 0] = ends - lengths
        here[:, 1] = there[:, 1] = lengths
        there[:, 2] = file
        try:
            self._agent.move(operation, here, there, (0, int(ends[-1]), file))
        except AgentError as error:
            raise OSError(errno.EIO, str(error)) from error


class _FileAgent(Agent):
    def move(
        self, operation: Literal["READ", "WRITE"], here: Descriptors, there: Descriptors, file: tuple[int, int, int]
    ) -> None:
        """Copies runs between memory and a file.

        `file` describes a range of the file that contains all runs: start, length in bytes, and file descriptor.

        Blocks until the copy has ended.
        """
        agent = self._agent
        with nixl_errors(f"agent {self.name!r}: {operation} of {len(here)} parts"):
            registered = agent.register_memory([(*file, "")], "FILE")
            try:
                local, remote = agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "FILE")
                handle = agent.initialize_xfer(operation, local, remote, self.name)
                done = self.start(handle)  # releases the handle on an error
                try:
                    while not done:
                        time.sleep(_POLL_S)
                        done = self.done(handle)
                finally:
                    handle.release()
            finally:
                agent.deregister_memory(registered)
