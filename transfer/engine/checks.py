"""Checks a caller's input before anything is done: the tensors of an engine and the pages of a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.arguments import integer, whole
from transfer.engine.metadata import TransferReqData
from transfer.errors import InvalidEngineError, InvalidTransferError
from transfer.memory import MemoryType
from transfer.plan.boxes import MAX_PAGES
from transfer.plan.intersection import Ints

_MEMORY_OF = {"cpu": MemoryType.DRAM, "cuda": MemoryType.VRAM}


def check_tensors(name: str, tensors: Sequence[Sequence[torch.Tensor]], total_num_pages: int) -> MemoryType:
    """Checks that an engine can be built over `tensors`, `[replica][tp_shard]`. Returns the kind of their memory."""
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
        raise InvalidEngineError(f"an engine needs a name, got {name!r}")
    engine = f"engine {name!r}"
    whole(f"{engine}: total_num_pages", total_num_pages, 1, MAX_PAGES, InvalidEngineError)
    if not all(isinstance(rows, list | tuple) for rows in (tensors, *tensors)):
        raise InvalidEngineError(
            f"{engine}: tensors must be a list with one list for each replica, each with one tensor for each shard"
        )
    shards = [len(replica) for replica in tensors]
    if not shards or not shards[0] or len(set(shards)) != 1:
        raise InvalidEngineError(
            f"{engine}: its replicas have {shards} tensors; each needs the same number, at least 1"
        )
    flat = [(f"tensor [{r}][{t}]", tensor) for r, replica in enumerate(tensors) for t, tensor in enumerate(replica)]
    first = flat[0][1]
    for label, tensor in flat:
        _check_tensor(f"{engine}: {label}", tensor, total_num_pages)
        if (tensor.numel(), tensor.dtype, tensor.device.type) != (first.numel(), first.dtype, first.device.type):
            raise InvalidEngineError(
                f"{engine}: {label} has {tensor.numel()} elements of {tensor.dtype} on {tensor.device.type}, "
                f"tensor [0][0] has {first.numel()} of {first.dtype} on {first.device.type}; they must be equal"
            )
    _check_apart(engine, flat)
    return _MEMORY_OF[first.device.type]


def _check_tensor(label: str, tensor: torch.Tensor, total_num_pages: int) -> None:
    if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
        raise InvalidEngineError(f"{label} is of type {type(tensor).__name__}, not a torch tensor")
    if tensor.device.type not in _MEMORY_OF or tensor.layout is not torch.strided:
        raise InvalidEngineError(
            f"{label} is a {tensor.layout} tensor on {tensor.device}; NIXL takes strided tensors on cpu or cuda"
        )
    if tensor.numel() == 0 or tensor.numel() % total_num_pages:
        raise InvalidEngineError(
            f"{label} has {tensor.numel()} elements, which cannot be divided into {total_num_pages} equal pages"
        )
    if not _is_dense(tensor):
        raise InvalidEngineError(f"{label} of strides {tensor.stride()} leaves gaps in memory or overlaps itself")
    page = tensor.numel() // total_num_pages
    if tensor.shape and tensor.shape[0] == total_num_pages > 1 and tensor.stride(0) != page:
        raise InvalidEngineError(
            f"{label}: its pages are {tensor.stride(0)} elements apart, but a page has {page}: pages must be the "
            "outermost axis"
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements, in some order of dimensions, cover one range of memory without gap or overlap."""
    covered = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != covered:
            return False
        covered *= size
    return True


def _check_apart(engine: str, flat: list[tuple[str, torch.Tensor]]) -> None:
    """Raises if two shards share memory, because they would overwrite each other."""
    regions = sorted((t.device.index or 0, t.data_ptr(), t.numel() * t.element_size(), label) for label, t in flat)
    for (device, start, size, label), (next_device, next_start, _, next_label) in pairwise(regions):
        if device == next_device and next_start < start + size:
            raise InvalidEngineError(f"{engine}: {label} and {next_label} share memory")


def page_indices(label: str, idxs: Sequence[int] | npt.NDArray[Any], total_num_pages: int) -> Ints:
    """Returns page ids as int64 `[pages]`. Raises `InvalidTransferError` for an id that is not a page of the engine."""
    try:
        values = np.asarray(idxs)
    except ValueError as error:
        raise InvalidTransferError(f"{label} is not a list of integers: {error}") from error
    if values.ndim != 1 or not values.size:
        raise InvalidTransferError(
            f"{label} has shape {list(values.shape)}; one dimension with at least one page is needed"
        )
    # numpy turns [True, 7] into integers, so the input itself is checked too.
    are_integers = isinstance(idxs, np.ndarray) or {int}.issuperset(map(type, idxs)) or None not in map(integer, idxs)
    if values.dtype.kind not in "iu" or not are_integers:
        wrong = next((value for value in idxs if integer(value) is None), "an integer beyond 64 bits")
        raise InvalidTransferError(f"{label} holds {wrong!r}, which is not a page number")
    low, high = values.min(), values.max()
    if low < 0 or high >= total_num_pages:
        wrong = int(low if low < 0 else high)
        raise InvalidTransferError(f"{label} holds page {wrong}; the engine has pages 0 to {total_num_pages - 1}")
    return values.astype(np.int64)


def check_replica(label: str, replica_idx: int, dp: int) -> None:
    """Raises `InvalidTransferError` for an invalid replica index."""
    whole(label, replica_idx, 0, dp - 1, InvalidTransferError)


def check_request(where: str, engine: str, request: TransferReqData, dp: int) -> None:
    """Raises `InvalidTransferError` unless a request is valid and names this engine and one of its replicas."""
    if not isinstance(request, TransferReqData):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
        raise InvalidTransferError(f"{where}: expected TransferReqData, got {type(request).__name__}")
    name = request.transfer_name
    if engine not in (request.src_name, request.dst_name):
        raise InvalidTransferError(
            f"{where} has no part in transfer {name} from {request.src_name!r} to {request.dst_name!r}"
        )
    check_replica(f"{where}: replica of transfer {name}", request.side_of(engine)[0], dp)
