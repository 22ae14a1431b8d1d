"""Drives the manager with a request trace. Compares its hits with the hits of a reference LRU and of the optimum.

A trace is in the Mooncake format: one JSON object per line, whose `hash_ids` name the blocks of a prompt. Equal ids
mean an equal prefix up to and including that block. Requests run one after another, and a block is a page. Each prompt
gets one more token. All tokens of its last block are then computed, and the block can be published. Hints are derived
from the later requests of the trace (see `trace_hints`). The optimum is a cache that knows the future. The reference
and the optimum are computed for one pool without hints.

For a model with recurrent layers, the replay uses the states of the manager. States lie among the pages, and the
manager keeps only some states. If a state is smaller than a block, each block is divided into several pages, as in a
server. The reference and the optimum ignore states.
"""

import heapq
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvcache import KVCacheParams, PagedKVCacheManager, PoolTooSmallError, Retention, Routing, TextContext
from kvcache.params import RoutingRule, StateShape
from pagewire.replay.trace_hints import Blocks, hints_for
from scheduler_adapters.errors import ReplayError

# Each page has two tokens: the id of its block, and the index of the page in that block. If pages had one token, the
# additional token of a prompt would fill a page, and this page would be published.
PAGE_SIZE = 2
WINDOW = 500  # number of requests in a window, over which the loads of the replicas are compared
_STATE_UNIT = 16  # bytes of a page in replays with states; a state takes a multiple of this
_NEVER = 1 << 60
# in bytes: the longest line that is read, because a file without line ends could fill the memory
_LONGEST_LINE = 64 << 20


class ReplayResult(msgspec.Struct, frozen=True):
    """The results of a replay."""

    requests: int
    block_refs: int
    hits: int
    hit_rate: float
    evictions: int
    reference_lru_hits: int  # hits of a plain LRU in one pool of the same capacity
    optimum_hits: int  # the most hits that are possible in one pool of the same capacity
    # Where the manager's hits lie between the hits of the reference LRU (0.0) and the hits of the optimum (1.0).
    # Negative if the manager hits less than the reference; None if the reference and the optimum hit equally often.
    gap_closed: float | None
    us_per_request_p50: float
    # How uneven the load is. For each window of `WINDOW` requests, the number of blocks that the busiest replica
    # computes is divided by the mean number over all replicas. The result is at least 1.0. `window_load_mean` is the
    # mean of the results over all windows, and `window_load_max` is the maximum. Both are None for a single replica, or
    # if no block is computed.
    window_load_mean: float | None = None
    window_load_max: float | None = None
    restored: int = 0  # hits that were loaded from the host tier


class BlockPages(NamedTuple):
    """How the replay divides a block of the trace.

    Attributes:
        block_pages: number of pages of a block.
        state_pages: number of pages that a request's recurrent state takes; 0 for none.
    """

    block_pages: int = 1
    state_pages: int = 0


WHOLE = BlockPages()  # each block is one page, and requests have no states


class _TraceLine(msgspec.Struct):
    hash_ids: list[int]


def load_trace(path: Path) -> list[list[int]]:
    """Returns the blocks of each request. Raises `ReplayError` with the file, the line and the fault."""
    decoder, found = msgspec.json.Decoder(_TraceLine), list[list[int]]()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
                if len(line) > _LONGEST_LINE:
                    raise ReplayError(f"{path}, line {number}: longer than {_LONGEST_LINE:,} bytes")
                blocks = decoder.decode(line).hash_ids
                if not blocks or min(blocks) < 0 or max(blocks) >= 1 << 31:
                    raise ReplayError(
                        f"{path}, line {number}: hash_ids must be integers from 0 to 2**31 - 1, at least one"
                    )
                found.append(blocks)
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplayError(f"{path}, line {len(found) + 1}: {error}") from error
    if not found:
        raise ReplayError(f"{path}: no requests")
    return found


def replay(
    trace: Sequence[Blocks],
    capacity: int,
    replicas: int = 1,
    progress: Callable[[int], None] = lambda _: None,
    *,
    hints: str = "none",
    routing: RoutingRule = "prefix",
    host_blocks: int = 0,
    divided: BlockPages = WHOLE,
    shown: Callable[[PagedKVCacheManager], AbstractContextManager[object]] = nullcontext,
) -> ReplayResult:
    """Drives a manager of `capacity` blocks, split evenly over `replicas`, with the blocks of each request.

    Args:
        trace: blocks of each request.
        capacity: blocks of all replicas together.
        replicas: number of replicas.
        progress: called with 1 after each request, within the context manager that `shown` returns.
        hints: the kind of hints, as in `trace_hints.hints_for`.
        routing: the routing rule.
        host_blocks: number of blocks of the host tier below the pool; 0 for no tier.
        divided: how each block is divided into pages. With several pages in a block, `evictions` and `restored` of the
            result count pages, not blocks.
        shown: called with the manager. The replay runs within the context manager that it returns.

    Raises:
        ReplayError: a request does not fit into one replica, two states do not fit into the host tier, or the kind of
            hints is unknown.
    """
    manager = _manager(trace, capacity, replicas, Routing(rule=routing), host_blocks, divided)
    with shown(manager):
        computed, times = _serve_all(manager, trace, hints_for(trace, hints), divided.block_pages, progress)
    manager.check()
    if manager.num_held_blocks:
        raise ReplayError(f"{manager.num_held_blocks} pages are still held after the replay")
    refs = sum(map(len, trace))
    hits, lru, optimum = refs - int(computed.sum()), reference_lru_hits(trace, capacity), optimum_hits(trace, capacity)
    return ReplayResult(
        requests=len(trace),
        block_refs=refs,
        hits=hits,
        hit_rate=hits / refs,
        evictions=manager.metrics.evictions,
        reference_lru_hits=lru,
        optimum_hits=optimum,
        gap_closed=(hits - lru) / (optimum - lru) if optimum > lru else None,
        us_per_request_p50=statistics.median(times) * 1e6,
        **_window_loads(computed),
        restored=manager.metrics.h2d_blocks_copied,
    )


def _serve_all(
    manager: PagedKVCacheManager,
    trace: Sequence[Blocks],
    hints: Sequence[Retention | None],
    block_pages: int,
    progress: Callable[[int], None],
) -> tuple[NDArray[np.int64], list[float]]:
    """Returns how many blocks each replica computed for each request, and how many seconds each request took.

    The blocks are int64 `[requests, replicas]`.
    """
    computed, times = np.zeros((len(trace), manager.num_replicas), np.int64), list[float]()
    for number, (blocks, hint) in enumerate(zip(trace, hints, strict=True)):
        tokens = np.zeros(len(blocks) * block_pages * PAGE_SIZE + 1, np.int32)
        tokens[:-1:PAGE_SIZE] = np.repeat(blocks, block_pages)
        tokens[1::PAGE_SIZE] = np.tile(np.arange(block_pages), len(blocks))
        context = TextContext(tokens, len(tokens) + 1, str(number), retention=hint)
        start = time.perf_counter()
        replica, found = _serve(manager, context)
        times.append(time.perf_counter() - start)
        computed[number, replica] = len(blocks) - found // block_pages
        progress(1)
    return computed, times


def _serve(manager: PagedKVCacheManager, context: TextContext) -> tuple[int, int]:
    """Runs one request to its first token. Returns its replica and the number of pages hit."""
    length, hits = context.end_idx, -1
    with manager.claim(context) as replica:
        # a chunk ends where the manager keeps a copy of the state, so a request may need several chunks
        while context.end_idx == length:
            if not manager.maybe_reserve(context):
                raise ReplayError(f"request {context.request_id}: it gets no pages, although no other request runs")
            hits = context.start_idx // PAGE_SIZE if hits < 0 else hits
            manager.fetch([context])
            for states in manager.states[replica : replica + 1]:
                pages = states.pages_at([context.request_id], [context.start_idx])
                states.advance(pages, [context.active_idx])
            context.update(0)
            manager.step([context])
        manager.flush_tiers()  # in a server, lower tiers have been written by the time the next request runs
    return replica, hits


def _manager(
    trace: Sequence[Blocks], capacity: int, replicas: int, routing: Routing, host_blocks: int, divided: BlockPages
) -> PagedKVCacheManager:
    """Returns a manager that fits each request of the trace. Raises `ReplayError` if one does not fit."""
    share, longest, (block_pages, state_pages) = capacity // replicas, max(map(len, trace)), divided
    if needed_pages(longest, divided) > share * block_pages:
        beside = f" with its state, as large as {state_pages / block_pages:.1f} blocks," if state_pages else ""
        raise ReplayError(
            f"a request of {longest} blocks{beside} does not fit: with {capacity} blocks and {replicas} replicas, "
            f"each replica has {share} blocks"
        )
    states, page = None, PAGE_SIZE
    if state_pages:
        states, page = _state_of(state_pages), _STATE_UNIT
    params = KVCacheParams(
        dtype=torch.uint8,
        n_kv_heads=1,
        head_dim=page // PAGE_SIZE,
        states=states,
        enable_prefix_caching=True,
        page_size=PAGE_SIZE,
        is_mla=True,
        n_devices=replicas,
        data_parallel_degree=replicas,
        routing=routing,
        enable_kvcache_swapping_to_host=host_blocks > 0,
        host_kvcache_swap_space_gb=host_blocks * block_pages * page / 2**30 if host_blocks else None,
    )
    # one more page than the capacity, for the additional token of a prompt
    memory = (share * block_pages + 1) * page * replicas
    most = longest * block_pages * PAGE_SIZE + 1
    try:
        return PagedKVCacheManager(params, replicas, most, 1, ["cpu"] * replicas, available_cache_memory=memory)
    except PoolTooSmallError as error:  # the size of the pool was checked above, so the host tier is too small
        raise ReplayError(f"a host tier of {host_blocks} blocks: {error}") from error


def needed_pages(longest: int, divided: BlockPages) -> int:
    """Returns how many pages a replica needs to run a request of up to `longest` blocks."""
    return max(longest * divided.block_pages + divided.state_pages, 2 * divided.state_pages)


def _state_of(pages: int) -> StateShape:
    """Returns the shape of a state that fills `pages` pages exactly."""
    return StateShape(1, 1, pages * _STATE_UNIT, 1, 1, 1, torch.uint8, torch.uint8, "linear")


def _window_loads(computed: NDArray[np.int64]) -> dict[str, float | None]:
    """Returns the mean and maximum of the window loads. `computed` has the computed blocks, `[requests, replicas]`."""
    count, replicas = computed.shape
    windows = max(1, count // WINDOW)  # an incomplete last window is ignored
    sums = np.add.reduceat(computed[: windows * WINDOW], np.arange(0, windows * WINDOW, WINDOW), axis=0)
    loads = [float(each.max() * replicas / each.sum()) for each in sums if each.any()]
    if replicas == 1 or not loads:
        return {"window_load_mean": None, "window_load_max": None}
    return {"window_load_mean": statistics.mean(loads), "window_load_max": max(loads)}


def reference_lru_hits(trace: Iterable[Blocks], capacity: int) -> int:
    """Returns the hits of a plain LRU that frees the last blocks of a request first.

    The function shares no code with the manager.
    """
    # The blocks in the order of their last use, the least recently used block first.
    idle: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in trace:
        hits += _found(blocks, idle)
        for block in blocks:
            idle.pop(block, None)
        while len(idle) + len(blocks) > capacity:
            idle.popitem(last=False)
        idle.update((block, None) for block in reversed(blocks))
    return hits


def optimum_hits(trace: Sequence[Blocks], capacity: int) -> int:
    """Returns the hits of a cache that knows the future.

    Such a cache evicts the block whose next use is farthest away. Among blocks of one prompt, it evicts the last one
    first. It therefore never breaks a prefix, and no cache that hits whole prefixes can do better.
    """
    return sum(optimum_of_each(trace, capacity))


def optimum_of_each(trace: Sequence[Blocks], capacity: int) -> list[int]:
    """Returns the hits of `optimum_hits` for each request."""
    following = _next_uses(trace)
    resident: dict[int, tuple[int, int]] = {}  # block → its valid entry in the heap
    # Entries: negated next use, negated depth, and block. An entry that is no longer valid stays in the heap until it
    # is popped.
    heap: list[tuple[int, int, int]] = []
    hits: list[int] = []
    for blocks, uses in zip(trace, following, strict=True):
        hits.append(_found(blocks, resident))
        for block in blocks:
            resident.pop(block, None)
        while len(resident) + len(blocks) > capacity:
            use, depth, block = heapq.heappop(heap)
            if resident.get(block) == (use, depth):
                del resident[block]
        for depth, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            resident[block] = (-use, -depth)
            heapq.heappush(heap, (-use, -depth, block))
    return hits


def _found(blocks: Blocks, kept: Container[int]) -> int:
    return next((at for at, block in enumerate(blocks) if block not in kept), len(blocks))


def _next_uses(trace: Sequence[Blocks]) -> list[list[int]]:
    """Returns, for each block of each request, the index of the next request that uses it."""
    coming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(trace) - 1, -1, -1):
        found.append([coming.get(block, _NEVER) for block in trace[number]])
        coming.update((block, number) for block in trace[number])
    return found[::-1]
