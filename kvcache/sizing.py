"""How many pages, tokens and requests a memory budget holds. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcache.errors import InvalidParamsError, PoolTooSmallError
from kvcache.params import KVCacheParams, resolve_page_size

MOST_REQUESTS = 512  # of `infer_optimal_batch_size`: what one step of a model still gains from

_Devices = Sequence[torch.device | str]


class CacheSizing:
    """The questions that are answered before a manager is made. The page size is that of the params, or 128."""

    @classmethod
    def estimated_memory_size(
        cls,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: _Devices,
        **_kwargs: Any,
    ) -> int:
        """Bytes that the pages will take over all devices: the budget, or less where full-length requests need less.

        Raises:
            InvalidParamsError: (a ValueError) a size that cannot work.
        """
        check_sizes(params, max_batch_size, max_seq_len, num_layers, len(devices))
        dp, size = params.data_parallel_degree, resolve_page_size(params, None)
        pages = -(-max_seq_len // size) * -(-max_batch_size // dp)
        return min(available_cache_memory // dp, pages * page_bytes(params, num_layers, size)) * dp

    @classmethod
    def infer_optimal_batch_size(
        cls,
        params: KVCacheParams,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: _Devices,
        **_kwargs: Any,
    ) -> int:
        """Requests of full length that the budget holds at a time: one a replica at least, `MOST_REQUESTS` at most.

        Raises:
            InvalidParamsError: (a ValueError) a size that cannot work.
        """
        dp, size = params.data_parallel_degree, resolve_page_size(params, None)
        check_sizes(params, dp, max_seq_len, num_layers, len(devices))
        pages = available_cache_memory // dp // page_bytes(params, num_layers, size)
        return max(dp, min(MOST_REQUESTS, pages // -(-max_seq_len // size) * dp))

    @classmethod
    def max_supported_sequence_length(cls, params: KVCacheParams, num_layers: int, memory_available: int) -> int:
        """Tokens of the longest request that each replica can hold, a multiple of the page size."""
        size = resolve_page_size(params, None)
        return memory_available // params.data_parallel_degree // page_bytes(params, num_layers, size) * size


def page_bytes(params: KVCacheParams, num_layers: int, page_size: int) -> int:
    """Bytes of one page on all shards of a replica together."""
    return params.bytes_per_token(num_layers) * page_size


def pages_per_replica(params: KVCacheParams, num_layers: int, page_size: int, memory: int) -> int:
    """Pages of each replica when `memory` bytes are split over the replicas.

    Raises:
        PoolTooSmallError: (a RuntimeError) not one page.
    """
    share = memory // params.data_parallel_degree
    size = page_bytes(params, num_layers, page_size)
    if share < size:
        raise PoolTooSmallError(
            f"available_cache_memory is {memory} bytes, {share} for each of {params.data_parallel_degree} replicas: "
            f"one page takes {size}"
        )
    return share // size


def check_sizes(
    params: KVCacheParams, max_batch_size: int, max_seq_len: int, num_layers: int, num_devices: int
) -> None:
    """Raise `InvalidParamsError` unless a manager of these sizes can be made."""
    for name, value, least in (
        ("max_batch_size", max_batch_size, params.data_parallel_degree),
        ("max_seq_len", max_seq_len, 1),
        ("num_layers", num_layers, 1),
    ):
        if value < least:
            raise InvalidParamsError(f"{name} is {value}: at least {least} is needed")
    check_devices(params, num_devices)


def check_devices(params: KVCacheParams, count: int) -> None:
    """Raise `InvalidParamsError` unless there is a device for each shard."""
    if count != params.n_devices:
        raise InvalidParamsError(
            f"{count} devices given, params.n_devices is {params.n_devices} "
            f"({params.data_parallel_degree} replicas of {params.tensor_parallel_degree} shards)"
        )
