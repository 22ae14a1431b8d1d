"""Copies vLLM's blocks to host slots and back, in the process of a worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingWorker, TransferResult

from kvcache.copies import Copy, PageMover

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

_ALIGNED = 64  # in bytes: the parts of a slot begin at multiples of this


class SlotsSpec(LoadStoreSpec):
    """The slots of a job's blocks, in the order of the blocks: int32 `[blocks]`."""

    def __init__(self, slots: Any) -> None:
        self.slots = slots


def slot_bytes_of(kv_caches: CanonicalKVCaches) -> int:
    """Returns the bytes of a block of the largest group of layers, with all layers one after another."""
    return max(_offsets(kv_caches, number)[-1] for number in range(len(kv_caches.group_data_refs)))


def _offsets(kv_caches: CanonicalKVCaches, group: int) -> list[int]:
    """Returns where each part of a group's block begins in a slot, and where the last one ends."""
    sizes = [-(-ref.page_size_bytes // _ALIGNED) * _ALIGNED for ref in kv_caches.group_data_refs[group]]
    return [0, *np.cumsum(sizes).tolist()]


@dataclass(frozen=True)
class _Job:
    number: int
    copies: list[Copy]
    size: int
    began: float


class TierWorker(OffloadingWorker):
    """The copies of one rank. `memory` has its slots, uint8 `[slots, slot_bytes]`.

    On a GPU, copies run beside the model, in order with its work. On the CPU, the calling thread copies.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, memory: torch.Tensor) -> None:
        self._movers: list[PageMover] = []
        self._block_bytes: list[int] = []
        for number, refs in enumerate(kv_caches.group_data_refs):
            starts = _offsets(kv_caches, number)
            parts = [
                (kv_caches.tensors[ref.tensor_idx].tensor, memory[:, start : start + ref.page_size_bytes])
                for ref, start in zip(refs, starts, strict=False)
            ]
            self._movers.append(PageMover(parts, None))
            self._block_bytes.append(sum(ref.page_size_bytes for ref in refs))
        self._running: list[_Job] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begins to copy blocks to slots."""
        return self._begin(job_id, src_spec, dst_spec, loads=False)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begins to copy slots to blocks. All loads are expedited, because nothing waits before them."""
        del expedited
        return self._begin(job_id, dst_spec, src_spec, loads=True)

    def _begin(self, job_id: int, blocks: GPULoadStoreSpec, slots: LoadStoreSpec, *, loads: bool) -> bool:
        if not isinstance(slots, SlotsSpec):
            raise TypeError(f"job {job_id}: got a {type(slots).__name__}; SlotsSpec is expected")
        began, cuts = time.perf_counter(), np.cumsum(blocks.group_sizes)[:-1]
        copies: list[Copy] = []
        for mover, ids, at in zip(
            self._movers, np.split(blocks.block_ids, cuts), np.split(slots.slots, cuts), strict=True
        ):
            if ids.size:
                copies.append(mover.load(at, ids) if loads else mover.store(ids, at))
                copies[-1].begin()
        size = sum(count * each for count, each in zip(blocks.group_sizes, self._block_bytes, strict=True))
        self._running.append(_Job(job_id, copies, size, began))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Returns the jobs that have ended since the last call. A job never fails."""
        over = [job for job in self._running if all(copy.over() for copy in job.copies)]
        self._running = [job for job in self._running if job not in over]
        now = time.perf_counter()
        return [TransferResult(job.number, True, job.size, now - job.began) for job in over]

    def wait(self, job_ids: set[int]) -> None:
        """Waits until these jobs have ended. `get_finished` still returns them."""
        for job in self._running:
            if job.number in job_ids:
                _wait(job.copies)

    def shutdown(self) -> None:
        """Waits until all jobs have ended."""
        for job in self._running:
            _wait(job.copies)


def _wait(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy.wait()
