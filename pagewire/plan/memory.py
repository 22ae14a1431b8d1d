"""Computes how many pages, tokens and requests fit into the memory of a rank, under each layout. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from pagewire.plan.layers import CachedModel
from pagewire.plan.ways import LaidWay, MemoryAsked, Way, laid_ways, params_of
from scheduler_adapters.errors import PlanError

_LONGEST = 1 << 40  # in tokens: the search for the longest request ends here


class RoomPart(msgspec.Struct, frozen=True):
    """The memory that one part of a request takes.

    A part is the request's block tables for one kind of layer, or the request's state (see `ways.LaidPart`).

    Attributes:
        kind: the kind of the layers, and the size of their window if they have one. "all" if several kinds share one
            table.
        layers: the number of layers.
        tables: number of block tables; 0 for a state.
        request_bytes: for each length of a request, the bytes that this part takes on each rank while it decodes.
    """

    kind: str
    layers: int
    tables: int
    request_bytes: dict[int, int]


class Room(msgspec.Struct, frozen=True):
    """How much fits into a host's memory under one layout.

    Attributes:
        way: name of the layout (see `ways.py`).
        page_bytes: bytes of a page on each rank; None if pages differ in size.
        pages: number of pages of each replica if pages get all memory. The number includes the null page of vLLM, but
            not the null page of pagewire.
        longest: tokens of the longest request that fits into a replica; None if there is no limit, because every layer
            has a window or a state.
        request_bytes: for each length of a request, the bytes that it takes on each rank while it decodes.
        chunk_bytes: for each length, the bytes that a request takes in addition while a step runs a chunk of its
            prompt.
        requests: for each length, how many requests all replicas together can hold at a time, while each replica runs a
            chunk of one of them.
        lost_bytes: for each length, the part of `request_bytes` that no layer needs, in bytes.
        parts: the memory of a request, by part.
    """

    way: Way
    page_bytes: int | None
    pages: int | None
    longest: int | None
    request_bytes: dict[int, int]
    chunk_bytes: dict[int, int]
    requests: dict[int, int]
    lost_bytes: dict[int, int]
    parts: tuple[RoomPart, ...]


class Choice(msgspec.Struct, frozen=True):
    """One way to divide a host's devices: `dp` replicas of `tp` ranks.

    Attributes:
        tp: number of ranks of a replica.
        dp: number of replicas.
        heads: for each kind of layer with pages, the KV heads on a rank.
        copies: how many ranks hold the same heads. If kinds of layers differ, this is the largest number. Copies add no
            capacity.
        token_bytes: bytes of a token on each rank, over all layers.
        state_bytes: bytes of a request's recurrent states on each rank.
        rooms: what fits, under each layout.
    """

    tp: int
    dp: int
    heads: tuple[int, ...]
    copies: int
    token_bytes: int
    state_bytes: int
    rooms: tuple[Room, ...]


def choices(model: CachedModel, devices: int, asked: MemoryAsked) -> Iterator[Choice]:
    """Yields every way to divide a host's devices that the model's heads allow, the largest `tp` first."""
    for tp in (tp for tp in range(devices, 0, -1) if devices % tp == 0):
        try:
            yield choice(model, tp, devices // tp, asked)
        except PlanError:
            continue  # the heads can neither be split nor replicated evenly


def choice(model: CachedModel, tp: int, dp: int, asked: MemoryAsked) -> Choice:
    """Returns what fits into the memory of `dp` replicas of `tp` ranks. Raises `PlanError` as `params_of` does."""
    every, state = list(laid_ways(model, tp, asked)), model.state_bytes(tp)
    page = every[0].page or 0
    if asked.memory < page + state:
        needed = f"one page of {asked.page_size} tokens takes {page + state:,} on a rank"
        raise PlanError(f"memory is {asked.memory:,} bytes: {needed}")
    held = tuple(params_of(model, one, tp, asked.page_size).n_kv_heads_per_device for one in model.paged)
    copies = max(count * tp // one.heads for count, one in zip(held, model.paged, strict=True))
    rooms = tuple(_room(laid, every[-1], asked, dp) for laid in every)
    return Choice(tp, dp, held, copies, page // asked.page_size, state, rooms)


def _room(laid: LaidWay, least: LaidWay, asked: MemoryAsked, dp: int) -> Room:
    lengths = asked.lengths
    return Room(
        way=laid.way,
        page_bytes=laid.page,
        pages=None if laid.page is None else asked.memory // laid.page,
        longest=_longest(laid.memory, laid.of_one),
        request_bytes={length: laid.of_request(length) for length in lengths},
        chunk_bytes={length: laid.of_chunk(length) - laid.of_request(length) for length in lengths},
        requests={length: laid.requests(length) * dp for length in lengths},
        lost_bytes={length: laid.of_request(length) - least.of_request(length) for length in lengths},
        parts=tuple(
            RoomPart(part.kind, part.layers, part.tables, {length: part.bytes_of(length, 1) for length in lengths})
            for part in laid.parts
        ),
    )


def _longest(memory: int, of_one: Callable[[int], int]) -> int | None:
    """Returns the most tokens of a request whose bytes fit into `memory`; None if there is no limit.

    The bytes that `of_one` returns must not decrease as the length grows.
    """
    low, high = 0, _LONGEST
    if of_one(high) <= memory:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if of_one(middle) <= memory else (low, middle - 1)
    return low
