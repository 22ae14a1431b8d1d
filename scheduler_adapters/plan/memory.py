"""How many pages, tokens and requests the memory of a rank holds, under each way to lay them. Pure arithmetic.

`pagewire`: a page holds all layers, and windows keep theirs to the end of the request, as `PagedKVCacheManager` has it
without `params.groups`. `vllm`: see `blocks.py`. `least`: what the layers need, were every kind of layer given pages of
its own and a window only those that it still looks at; what no manager can be below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvcache import InvalidParamsError, KVCacheParams
from kvcache.sizing import page_bytes
from scheduler_adapters.errors import PlanError
from scheduler_adapters.plan.blocks import vllm_blocks
from scheduler_adapters.plan.layers import AlikeLayers, CachedModel

Way = Literal["pagewire", "vllm", "least"]
_LONGEST = 1 << 40  # tokens: where the search for the longest request ends


class Room(msgspec.Struct, frozen=True):
    """What the memory of a host holds, laid one way.

    Attributes:
        way: how it is laid.
        page_bytes: of one page on each rank; None where there is no common page.
        pages: of each replica. The null page is one more of `pagewire`, and one of vLLM's.
        longest: tokens of the longest request that a replica holds; None: any, as every layer looks back only so far.
        request_bytes: that a request of each length takes on each rank.
        requests: of each length that all replicas hold at a time.
    """

    way: Way
    page_bytes: int | None
    pages: int | None
    longest: int | None
    request_bytes: dict[int, int]
    requests: dict[int, int]


class Choice(msgspec.Struct, frozen=True):
    """A host's devices as `dp` replicas of `tp` ranks.

    Attributes:
        tp: ranks of a replica.
        dp: replicas.
        heads: key/value heads that a rank holds, of each kind of layer that has pages.
        copies: ranks that hold the same heads (the most of all kinds): memory that buys nothing.
        token_bytes: of a token on each rank, all layers.
        state_bytes: of a request's recurrent states on each rank.
        rooms: what the memory holds, each way.
    """

    tp: int
    dp: int
    heads: tuple[int, ...]
    copies: int
    token_bytes: int
    state_bytes: int
    rooms: tuple[Room, ...]


@dataclass(frozen=True, slots=True)
class MemoryAsked:
    """What is asked of each choice: bytes of a device, tokens of a page and of a step, and lengths of requests."""

    memory: int
    page_size: int
    step_tokens: int
    lengths: Sequence[int]


def params_of(model: CachedModel, one: AlikeLayers, tp: int, page_size: int) -> KVCacheParams:
    """The parameters of a manager of these layers. `PlanError`: ranks that can neither split nor share the heads."""
    latent = one.kind == "latent"
    try:
        return KVCacheParams(
            dtype=model.dtype,
            n_kv_heads=one.heads,
            head_dim=one.width if latent else one.width // 2,
            is_mla=latent,
            page_size=page_size,
            n_devices=tp,
        )
    except InvalidParamsError as error:
        raise PlanError(f"tensor parallelism {tp}: {error}") from error


def choices(model: CachedModel, devices: int, asked: MemoryAsked) -> Iterator[Choice]:
    """Every way to divide the devices of a host that the model's heads allow, the widest first."""
    for tp in (tp for tp in range(devices, 0, -1) if devices % tp == 0):
        try:
            yield choice(model, tp, devices // tp, asked)
        except PlanError:
            continue  # its heads can neither be split nor shared evenly


def choice(model: CachedModel, tp: int, dp: int, asked: MemoryAsked) -> Choice:
    """What the memory holds with `dp` replicas of `tp` ranks. Raises `PlanError` as `params_of`."""
    size, state = asked.page_size, model.state_bytes(tp)
    every = [(one, params_of(model, one, tp, size)) for one in model.paged]
    of_token = [page_bytes(params, one.layers, 1) // tp for one, params in every]
    page = sum(of_token) * size
    if asked.memory < page + state:
        raise PlanError(f"memory is {asked.memory:,} bytes: one page of {size} tokens takes {page + state:,} on a rank")

    def whole(length: int) -> int:
        return -(-length // size) * page + state

    def least(length: int) -> int:
        kept = (_kept(one, length, size) * of_one for (one, _), of_one in zip(every, of_token, strict=True))
        return sum(kept) + state

    rooms = [_room("pagewire", page, asked, dp, whole)]
    if blocks := vllm_blocks(model.paged, of_token, size, asked.step_tokens) if not state else None:
        rooms.append(_room("vllm", blocks.block_bytes, asked, dp, blocks.request_bytes))
    rooms.append(_room("least", None, asked, dp, least))
    held = tuple(params.n_kv_heads_per_device for _, params in every)
    copies = max(count * tp // one.heads for count, (one, _) in zip(held, every, strict=True))
    return Choice(tp, dp, held, copies, sum(of_token), state, tuple(rooms))


def _kept(one: AlikeLayers, length: int, size: int) -> int:
    """Tokens, in whole pages, that a layer still needs of a request: a window begins within a page."""
    whole = -(-length // size)
    return size * (min(whole, -(-(one.window - 1) // size) + 1) if one.window else whole)


def _room(way: Way, page: int | None, asked: MemoryAsked, dp: int, of_request: Callable[[int], int]) -> Room:
    pages = None if page is None else asked.memory // page
    memory = asked.memory if page is None or pages is None else pages * page
    if way == "pagewire":
        memory = asked.memory  # states are taken out of it first, and need not end where a page does
    lengths = asked.lengths
    return Room(
        way=way,
        page_bytes=page,
        pages=pages,
        longest=_longest(memory, of_request),
        request_bytes={length: of_request(length) for length in lengths},
        requests={length: memory // of_request(length) * dp for length in lengths},
    )


def _longest(memory: int, of_request: Callable[[int], int]) -> int | None:
    """The most tokens of one request that fit, None for any number; what it takes never falls as it grows."""
    low, high = 0, _LONGEST
    if of_request(high) <= memory:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if of_request(middle) <= memory else (low, middle - 1)
    return low
