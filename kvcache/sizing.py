"""Computes how many pages, tokens and requests a memory budget holds, and whether the host can hold them.

No memory is allocated. The page size is `params.page_size`, or the argument `page_size` if the params have none. With
groups of layers, a request's pages are counted as if the request ran one token at a time. A request that runs a longer
chunk of its prompt needs more pages in tables with windows. The documented API has keywords that only other kinds of
managers use. These keywords are refused, because they would have no effect here.
"""

import functools
import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from kvcache.arguments import MOST, of_kind, refusal, shown, whole
from kvcache.errors import InvalidParamsError, PoolTooSmallError, UnknownArgumentError
from kvcache.layer_groups import LayerTables, layer_tables
from kvcache.layout import PageLayout, shard_layouts
from kvcache.params import KVCacheParams, resolve_page_size
from kvcache.pool.slabs import num_slabs
from kvcache.states.state_memory import page_bytes as state_bytes
from kvcache.states.state_memory import slab_pages_of, state_layouts

MOST_REQUESTS = 512  # the largest result of `infer_optimal_batch_size`; larger batches gain nothing
MOST_ROWS = 1 << 20
MOST_LAYERS = 1 << 16
MOST_BYTES = (1 << 63) - 1
_BOOK_BYTES = 64  # in bytes: the host memory for the bookkeeping of each page

_log = logging.getLogger("pagewire")

Devices = Sequence[torch.device | str]


class Sizes(NamedTuple):
    """The checked sizes of a manager, as Python integers."""

    max_batch_size: int
    max_seq_len: int
    num_layers: int


class Needs(NamedTuple):
    """The memory that pages and states take on each replica, on all its shards together."""

    params: KVCacheParams
    tables: LayerTables
    page_size: int  # in tokens

    @property
    def layouts(self) -> list[PageLayout]:
        """The layout of a page on each shard of a replica."""
        return shard_layouts(self.params, self.tables.layers_per_page, self.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return page_bytes(self.params, self.tables.layers_per_page, self.page_size)

    @property
    def slab_pages(self) -> int:
        """The number of pages that a request takes for its state; 0 if it takes none."""
        return slab_pages_of(self.params, self.layouts)

    def bytes_apart(self, requests: int) -> int:
        """Returns the bytes of separate memory for the states of `requests` requests, including state page 0."""
        count = self.params.states_apart(requests)
        layouts = state_layouts(self.params.states, self.params.tensor_parallel_degree)
        return (count + 1) * state_bytes(layouts) if count else 0

    def bytes_of(self, longest: int, requests: int) -> int:
        """Returns the bytes that the pages and states of `requests` requests take, if each has `longest` tokens."""
        pages, slab = self.tables.most_pages(longest, self.page_size), self.slab_pages
        # the slab that contains page 0 cannot be used
        count = max(requests * (pages + slab), (requests + 1) * slab - 1)
        return count * self.page_bytes + self.bytes_apart(requests)

    def longest_request(self, pages: int, most: int) -> int:
        """Returns the tokens of the longest request that a replica of `pages` pages can hold, at most `most` tokens.

        The request runs alone. It finishes if no step runs more of its tokens than its pages have room for.
        """
        size, slab = self.page_size, self.slab_pages
        if slab and not num_slabs(pages, slab):
            return 0
        columns = range(1, -(-most // size) + 1)
        fits = bisect_right(columns, pages - slab, key=lambda count: self.tables.most_pages(count * size, size))
        return min(most, fits * size)


def estimated_memory_size(
    params: KVCacheParams,
    max_batch_size: int,
    max_seq_len: int,
    num_layers: int,
    available_cache_memory: int,
    devices: Devices,
    page_size: int = 128,
    **unknown: Any,
) -> int:
    """Returns the bytes of pages and states over all devices.

    The result is the whole budget, or less if `max_batch_size` requests of `max_seq_len` tokens need less.

    Raises `InvalidParamsError` (a ValueError), and `UnknownArgumentError` (a TypeError) for an unknown keyword.
    """
    _refuse_unknown("estimated_memory_size", unknown)
    batch, longest, layers = check_sizes(params, max_batch_size, max_seq_len, num_layers)
    check_devices(params, devices)
    needs, memory = _each_replica(params, layers, page_size, "available_cache_memory", available_cache_memory)
    dp = params.data_parallel_degree
    return min(memory, needs.bytes_of(longest, -(-batch // dp))) * dp


def infer_optimal_batch_size(
    params: KVCacheParams,
    max_seq_len: int,
    num_layers: int,
    available_cache_memory: int,
    devices: Devices,
    page_size: int = 128,
    **unknown: Any,
) -> int:
    """Returns how many requests of full length the budget holds at the same time.

    The result is at least one request for each replica, and at most `MOST_REQUESTS` in all.

    Raises the errors of `estimated_memory_size`.
    """
    _refuse_unknown("infer_optimal_batch_size", unknown)
    check_params(params)
    dp = params.data_parallel_degree
    _, longest, layers = check_sizes(params, dp, max_seq_len, num_layers)
    check_devices(params, devices)
    needs, memory = _each_replica(params, layers, page_size, "available_cache_memory", available_cache_memory)
    fits = bisect_right(range(1, MOST_REQUESTS + 1), memory, key=functools.partial(needs.bytes_of, longest))
    return max(dp, min(MOST_REQUESTS, fits * dp))


def max_supported_sequence_length(
    params: KVCacheParams, num_layers: int, memory_available: int, page_size: int = 128
) -> int:
    """Returns the length in tokens of the longest request that a replica can hold, in whole pages.

    The result is at most the number of tokens in the replica's pages, also if every layer has a window. Raises
    `InvalidParamsError`.
    """
    check_params(params)
    needs, memory = _each_replica(params, check_layers(num_layers), page_size, "memory_available", memory_available)
    pages = max(0, memory - needs.bytes_apart(1)) // needs.page_bytes
    return needs.longest_request(pages, pages * needs.page_size)


def _each_replica(
    params: KVCacheParams, num_layers: int, page_size: int, name: str, memory: object
) -> tuple[Needs, int]:
    """Returns the memory requirements of each replica, and its share of the memory in bytes."""
    needs = Needs(params, layer_tables(params.groups, num_layers), resolve_page_size(params, page_size))
    return needs, whole(name, memory, 0, MOST_BYTES) // params.data_parallel_degree


def page_bytes(params: KVCacheParams, num_layers: int, page_size: int) -> int:
    """Returns the bytes of one page on all shards of a replica together."""
    return sum(layout.page_bytes for layout in shard_layouts(params, num_layers, page_size))


def pages_per_replica(needs: Needs, sizes: Sizes, memory: object, devices: Sequence[torch.device]) -> int:
    """Returns the number of pages of each replica if `memory` bytes are split over the replicas.

    Raises `InvalidParamsError` if `memory` is not a number of bytes, or is enough for more pages than there are ids.
    Raises `PoolTooSmallError` (a RuntimeError) if `memory` is too small for one page, or if the host has too little
    memory for the pages.
    """
    if memory is None:
        raise InvalidParamsError("available_cache_memory is not given: a number of bytes is needed")
    params, size = needs.params, needs.page_bytes
    budget = whole("available_cache_memory", memory, 0, MOST_BYTES)
    share, rows = budget // params.data_parallel_degree, sizes.max_batch_size // params.data_parallel_degree
    apart = needs.bytes_apart(rows)
    if apart and share <= apart:
        count = params.states_apart(rows)
        raise PoolTooSmallError(
            f"available_cache_memory is {budget} bytes: {count} state pages and the null state page take {apart} of "
            "each replica"
        )
    share -= apart
    if share < size:
        raise PoolTooSmallError(
            f"available_cache_memory is {budget} bytes, which leaves {share} bytes for the pages of each of "
            f"{params.data_parallel_degree} replicas: at least one page of {size} bytes must fit"
        )
    if share // size >= MOST:
        raise InvalidParamsError(
            f"available_cache_memory is {budget} bytes, {share // size} pages a replica: at most {MOST - 1} are allowed"
        )
    _refuse_more_than_the_host_holds(needs, sizes, share // size, devices)
    return share // size


def _refuse_more_than_the_host_holds(needs: Needs, sizes: Sizes, pages: int, devices: Sequence[torch.device]) -> None:
    """Raise `PoolTooSmallError` if the host's memory is too small for its part of the cache.

    The cache has `pages` pages in each replica. The check is needed because the system often grants memory that it does
    not have, and kills the process later, when the memory is touched.
    """
    params, dp = needs.params, needs.params.data_parallel_degree
    on_host = sum(device.type == "cpu" for device in devices)
    pool = (pages + 1) * needs.page_bytes + needs.bytes_apart(sizes.max_batch_size // dp)
    pool = pool * dp * on_host // len(devices)
    table = sizes.max_batch_size * -(-sizes.max_seq_len // needs.page_size) * 4 * len(needs.tables.tables)
    tier = int((params.host_kvcache_swap_space_gb or 0) * 2**30) if params.enable_kvcache_swapping_to_host else 0
    needed = pool + table + tier + pages * dp * _BOOK_BYTES
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise PoolTooSmallError(
            f"the host cannot hold {needed} bytes ({pool} of pages, {tier} of the host tier, {table} of block tables, "
            f"the rest for bookkeeping of {pages * dp} pages): it has {there}"
        )


def warn_of_shortages(needs: Needs, sizes: Sizes, pages: int) -> None:
    """Log warnings about parameters without effect, and about sizes that do not fit into `pages` pages per replica."""
    rows, longest = sizes.max_batch_size // needs.params.data_parallel_degree, sizes.max_seq_len
    for sentence in needs.params.without_effect():
        _log.warning("%s", sentence)
    if pages < rows:
        _log.warning("%d pages a replica for up to %d requests: not all of them can run at a time", pages, rows)
    if (most := needs.longest_request(pages, longest)) < longest:
        _log.warning(
            "a request of max_seq_len %d cannot run: a replica has %d pages of %d tokens, enough for requests of up to "
            "%d tokens; give a larger available_cache_memory or a smaller max_seq_len",
            *(longest, pages, needs.page_size, most),
        )


def check_params(params: object) -> None:
    """Raise `InvalidParamsError` unless `params` are `KVCacheParams`."""
    of_kind("params", params, KVCacheParams, "a KVCacheParams")


def check_sizes(params: KVCacheParams, max_batch_size: object, max_seq_len: object, num_layers: object) -> Sizes:
    """Returns these sizes as integers. Raises `InvalidParamsError` if one of them is out of range."""
    check_params(params)
    return Sizes(
        whole("max_batch_size", max_batch_size, params.data_parallel_degree, MOST_ROWS),
        whole("max_seq_len", max_seq_len, 1),
        check_layers(num_layers),
    )


def check_layers(num_layers: object) -> int:
    """Returns the number of layers as an integer. Raises `InvalidParamsError`."""
    return whole("num_layers", num_layers, 1, MOST_LAYERS)


def check_devices(params: KVCacheParams, devices: object, *, here: bool = False) -> list[torch.device]:
    """Returns the device of each shard. With `here`, the devices must exist in this process.

    Raises `InvalidParamsError`.
    """
    needed = "a list of torch devices or their names"
    if isinstance(devices, str):  # a str is also a sequence, but not a list of devices
        raise refusal("devices", devices, needed)
    named = cast("Sequence[object]", of_kind("devices", devices, Sequence, needed))
    if len(named) != params.n_devices:
        raise InvalidParamsError(
            f"{len(named)} devices given, params.n_devices is {params.n_devices} "
            f"({params.data_parallel_degree} replicas of {params.tensor_parallel_degree} shards)"
        )
    return [_checked_device(device, here=here) for device in named]


def _checked_device(device: object, *, here: bool) -> torch.device:
    needed = "a device of 'cpu' or 'cuda', or its name,"
    try:
        found = torch.device(of_kind("device", device, (torch.device, str), needed))
    except (RuntimeError, ValueError, OverflowError) as error:
        raise refusal("device", device, needed) from error
    if found.type not in ("cpu", "cuda"):
        raise refusal("device", device, needed)
    there = 1 if found.type == "cpu" else torch.cuda.device_count() if here else MOST
    if (found.index or 0) >= there:
        raise InvalidParamsError(f"device {shown(device)}: this process sees {there} of its kind")
    return found


def stream_of(session: object, devices: Sequence[torch.device]) -> Any:
    """Returns the CUDA stream of `session`: its attribute `stream` if it has one, otherwise `session` itself.

    Returns None if the stream is None. Raises `InvalidParamsError` if the stream is not a CUDA stream.
    """
    stream = getattr(session, "stream", session)
    if stream is None:
        return None
    of_kind("session", stream, torch.cuda.Stream, "a torch.cuda.Stream, an object with one as `stream`, or None")
    if devices[0].type == "cpu":
        _log.warning("session has no effect, because the cache is not on a GPU")
    return stream


def _refuse_unknown(call: str, unknown: dict[str, Any]) -> None:
    for name, value in unknown.items():
        raise UnknownArgumentError(f"{call}: {name}={shown(cast('object', value))} is not a keyword of this call")
