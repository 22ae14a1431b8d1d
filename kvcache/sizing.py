"""How many pages, tokens and requests a memory budget holds, and whether a host holds them. Allocates nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from kvcache.arguments import MOST, checked_devices, shown, whole
from kvcache.errors import InvalidParamsError, PoolTooSmallError, UnknownArgumentError
from kvcache.params import KVCacheParams, resolve_page_size

MOST_REQUESTS = 512  # of `infer_optimal_batch_size`: what one step of a model still gains from
MOST_ROWS = 1 << 20
MOST_LAYERS = 1 << 16
MOST_BYTES = (1 << 63) - 1
_BOOK_BYTES = 64  # of the host, for each page

_Devices = Sequence[torch.device | str]


class Sizes(NamedTuple):
    """What a manager is asked to serve, checked: Python's own integers."""

    max_batch_size: int
    max_seq_len: int
    num_layers: int


class CacheSizing:
    """The questions that are answered before a manager is made.

    The page size is that of the params, else of the argument, as of the manager. Keywords that the documented API may
    pass on to some other manager are refused, as nothing here would follow them.
    """

    @classmethod
    def estimated_memory_size(
        cls,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: _Devices,
        page_size: int = 128,
        **unknown: Any,
    ) -> int:
        """Bytes that the pages will take over all devices: the budget, or less where full-length requests need less.

        Raises:
            InvalidParamsError: (a ValueError) a size that cannot work.
            UnknownArgumentError: (a TypeError) a keyword that nothing uses.
        """
        _refuse_unknown("estimated_memory_size", unknown)
        batch, longest, layers = check_sizes(params, max_batch_size, max_seq_len, num_layers)
        check_devices(params, devices)
        memory = whole("available_cache_memory", available_cache_memory, 0, MOST_BYTES)
        dp, size = params.data_parallel_degree, resolve_page_size(params, page_size)
        pages = -(-longest // size) * -(-batch // dp)
        return min(memory // dp, pages * page_bytes(params, layers, size)) * dp

    @classmethod
    def infer_optimal_batch_size(
        cls,
        params: KVCacheParams,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: _Devices,
        page_size: int = 128,
        **unknown: Any,
    ) -> int:
        """Requests of full length that the budget holds at a time: one a replica at least, `MOST_REQUESTS` at most.

        Raises:
            InvalidParamsError: (a ValueError) a size that cannot work.
            UnknownArgumentError: (a TypeError) a keyword that nothing uses.
        """
        _refuse_unknown("infer_optimal_batch_size", unknown)
        check_params(params)
        dp, size = params.data_parallel_degree, resolve_page_size(params, page_size)
        _, longest, layers = check_sizes(params, dp, max_seq_len, num_layers)
        check_devices(params, devices)
        memory = whole("available_cache_memory", available_cache_memory, 0, MOST_BYTES)
        pages = memory // dp // page_bytes(params, layers, size)
        return max(dp, min(MOST_REQUESTS, pages // -(-longest // size) * dp))

    @classmethod
    def max_supported_sequence_length(
        cls, params: KVCacheParams, num_layers: int, memory_available: int, page_size: int = 128
    ) -> int:
        """Tokens of the longest request that each replica can hold, a multiple of the page size.

        Raises:
            InvalidParamsError: (a ValueError) a size that cannot work.
        """
        check_params(params)
        size, layers = resolve_page_size(params, page_size), whole("num_layers", num_layers, 1, MOST_LAYERS)
        memory = whole("memory_available", memory_available, 0, MOST_BYTES)
        return memory // params.data_parallel_degree // page_bytes(params, layers, size) * size


def page_bytes(params: KVCacheParams, num_layers: int, page_size: int) -> int:
    """Bytes of one page on all shards of a replica together."""
    return params.bytes_per_token(num_layers) * page_size


def pages_per_replica(params: KVCacheParams, num_layers: int, page_size: int, memory: object) -> int:
    """Pages of each replica when `memory` bytes are split over the replicas.

    Raises:
        InvalidParamsError: (a ValueError) no number of bytes, or more pages than have an id.
        PoolTooSmallError: (a RuntimeError) not one page.
    """
    if memory is None:
        raise InvalidParamsError("available_cache_memory is not given: a number of bytes is needed")
    budget = whole("available_cache_memory", memory, 0, MOST_BYTES)
    share = budget // params.data_parallel_degree
    size = page_bytes(params, num_layers, page_size)
    if share < size:
        raise PoolTooSmallError(
            f"available_cache_memory is {budget} bytes, {share} for each of {params.data_parallel_degree} replicas: "
            f"one page takes {size}"
        )
    if share // size >= MOST:
        raise InvalidParamsError(
            f"available_cache_memory is {budget} bytes, {share // size} pages a replica: {MOST - 1} are the most"
        )
    return share // size


def refuse_what_no_host_holds(
    params: KVCacheParams, sizes: Sizes, page_size: int, pages: int, devices: Sequence[torch.device]
) -> None:
    """Raise `PoolTooSmallError` where the host's memory is too small for its part of `pages` a replica.

    An allocation that the system cannot keep is often promised, and ends the process when it is touched.
    """
    dp = params.data_parallel_degree
    on_host = sum(device.type == "cpu" for device in devices)
    pool = (pages + 1) * page_bytes(params, sizes.num_layers, page_size) * dp * on_host // len(devices)
    table = sizes.max_batch_size * -(-sizes.max_seq_len // page_size) * 4
    tier = int((params.host_kvcache_swap_space_gb or 0) * 2**30) if params.enable_kvcache_swapping_to_host else 0
    needed = pool + table + tier + pages * dp * _BOOK_BYTES
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise PoolTooSmallError(
            f"the host cannot hold {needed} bytes ({pool} of pages, {tier} of the host tier, {table} of block tables, "
            f"the rest for {pages * dp} pages' books): it has {there}"
        )


def check_params(params: object) -> None:
    """Raise `InvalidParamsError` unless these are `KVCacheParams`."""
    if not isinstance(params, KVCacheParams):
        raise InvalidParamsError(f"params is {shown(params)}: KVCacheParams are needed")


def check_sizes(params: KVCacheParams, max_batch_size: object, max_seq_len: object, num_layers: object) -> Sizes:
    """These sizes as integers. Raises `InvalidParamsError` unless a manager of them can be made."""
    check_params(params)
    return Sizes(
        whole("max_batch_size", max_batch_size, params.data_parallel_degree, MOST_ROWS),
        whole("max_seq_len", max_seq_len, 1),
        whole("num_layers", num_layers, 1, MOST_LAYERS),
    )


def check_devices(params: KVCacheParams, devices: object, *, here: bool = False) -> list[torch.device]:
    """The device of each shard; `here`: pages are to be kept on them. Raises `InvalidParamsError`."""
    split = f"{params.data_parallel_degree} replicas of {params.tensor_parallel_degree} shards"
    return checked_devices(devices, params.n_devices, split, here=here)


def _refuse_unknown(call: str, unknown: dict[str, Any]) -> None:
    for name, value in unknown.items():
        raise UnknownArgumentError(f"{call}: {name}={shown(cast('object', value))} is a keyword that nothing uses")
