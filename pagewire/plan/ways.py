"""Computes the memory that a model's cache takes in each layout. The layouts of managers use the manager's sizing code.

- `pagewire`: one table for all layers with keys and values. Windows keep their pages until the request ends. Recurrent
  states have separate memory, one state for each request.
- `groups`: like `pagewire`, but equal layers form a group (`params.groups`), and groups have separate tables.
- `share_memory`: slabs of pages hold the states. This is the default of managers.
- `vllm`: see `blocks.py`.
- `least`: the memory that the layers need if each kind has its own pages, and a window keeps only the pages that it
  still reads. No manager can need less.

In every layout, a request that decodes keeps the pages of its windows. The step that runs a chunk of a prompt also
needs pages for the chunk in layers with windows. All requests share the tokens of a step, so these pages are counted
once for a replica, and not for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvcache import InvalidParamsError, KVCacheParams, LayerGroup
from kvcache.layer_groups import layer_tables
from kvcache.layout import shard_layouts
from kvcache.sizing import page_bytes
from kvcache.states.state_memory import most_states, pages_of_slab
from pagewire.plan.blocks import VllmBlocks, vllm_blocks
from pagewire.plan.layers import AlikeLayers, CachedModel
from scheduler_adapters.errors import PlanError

Way = Literal["pagewire", "groups", "share_memory", "vllm", "least"]


@dataclass(frozen=True, slots=True)
class MemoryAsked:
    """The memory to plan for: bytes of a device, tokens of a page, tokens of a step, and the lengths of requests."""

    memory: int
    page_size: int
    step_tokens: int
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class LaidPart:
    """One part of a request's memory: the block tables for one kind of layer, or the state.

    Attributes:
        kind: the kind of the layers, and the size of their window if they have one. "all" if several kinds share one
            table.
        layers: the number of layers.
        tables: number of a request's block tables; 0 for a state.
        bytes_of: returns the bytes that the part takes on each rank. Its arguments are the request's length, and how
            many of these tokens a step runs at most.
    """

    kind: str
    layers: int
    tables: int
    bytes_of: Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class LaidWay:
    """One layout of a model's cache on a rank.

    Attributes:
        way: name of the layout.
        page: bytes of a page; None if pages differ in size.
        memory: bytes for the pages of all requests. A request takes whole pages, so an incomplete page at the end is
            unusable.
        most: how many requests a replica holds at most, however short they are; None if there is no limit.
        step_tokens: the most tokens of a step.
        parts: the parts of a request's memory.
    """

    way: Way
    page: int | None
    memory: int
    most: int | None
    step_tokens: int
    parts: tuple[LaidPart, ...]

    def of_request(self, length: int) -> int:
        """Returns the bytes of a request of this length that decodes."""
        return sum(part.bytes_of(length, 1) for part in self.parts)

    def of_chunk(self, length: int) -> int:
        """Returns the bytes of a request of this length while a step runs the largest chunk of its prompt."""
        return sum(part.bytes_of(length, self.step_tokens) for part in self.parts)

    def of_one(self, length: int) -> int:
        """Returns the bytes that a replica needs to run one request of this length.

        Our loops shorten a chunk if the memory is too small for it. vLLM never admits such a request.
        """
        return self.of_chunk(length) if self.way == "vllm" else self.of_request(length)

    def requests(self, length: int) -> int:
        """Returns how many requests of this length a replica holds at a time, while a step runs a chunk of one."""
        if self.memory < self.of_one(length):
            return 0
        fit = 1 + max(0, self.memory - self.of_chunk(length)) // self.of_request(length)
        return fit if self.most is None else min(fit, self.most)


def params_of(model: CachedModel, one: AlikeLayers, tp: int, page_size: int) -> KVCacheParams:
    """Returns the parameters of a manager for these layers.

    Raises `PlanError` if the ranks can neither split nor replicate the heads.
    """
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


def laid_ways(model: CachedModel, tp: int, asked: MemoryAsked) -> Iterator[LaidWay]:
    """Yields each layout of the model on `tp` ranks. The layout with a single table comes first.

    Raises `PlanError` as `params_of` does.
    """
    size, every = asked.page_size, [params_of(model, one, tp, asked.page_size) for one in model.paged]
    layers = [one.layers for one in model.paged]
    of_kinds = [page_bytes(params, count, size) // tp for params, count in zip(every, layers, strict=True)]
    states = tuple(
        LaidPart(one.kind, one.layers, 0, partial(_any_length, one.state_bytes(tp))) for one in model.each if one.state
    )
    page = sum(of_kinds)
    # The memory without one state, because the null page has a state that no request uses.
    own = asked.memory - model.state_bytes(tp)
    kinds = dict.fromkeys(_name(one) for one in model.paged)
    whole = LaidPart(
        kinds.popitem()[0] if len(kinds) == 1 else "all", sum(layers), 1, partial(_pages, size, page, None)
    )
    step = asked.step_tokens
    yield LaidWay("pagewire", page, own, None, step, (whole, *states))
    if len(set(every)) == 1:  # all pages have the same size
        if not states and any(one.window for one in model.paged):
            yield _with_groups(model, every[0], asked)
        if len(states) == 1:
            yield from _with_slabs(model, every[0], asked, whole)
    of_token = [of_one // size for of_one in of_kinds]
    if not states and (blocks := vllm_blocks(model.paged, of_token, size)):
        yield _of_vllm(blocks, asked, whole)
    least = [
        LaidPart(_name(one), one.layers, 1, partial(_pages, size, of_one, group))
        for one, of_one, group in zip(model.paged, of_kinds, _groups(model.paged), strict=True)
    ]
    yield LaidWay("least", None, asked.memory, None, step, (*least, *states))


def _with_groups(model: CachedModel, params: KVCacheParams, asked: MemoryAsked) -> LaidWay:
    """Returns the layout of a manager with `params.groups`."""
    groups, size = _groups(model.paged), asked.page_size
    tables = layer_tables(groups, sum(one.layers for one in model.paged))
    page = page_bytes(params, tables.layers_per_page, size) // params.n_devices
    parts: list[LaidPart] = []
    for one, group in zip(model.paged, groups, strict=True):
        count = sum(table.group is group for table in tables.tables)
        parts.append(LaidPart(_name(one), one.layers, count, partial(_pages, size, count * page, group)))
    return LaidWay("groups", page, asked.memory, None, asked.step_tokens, (*parts,))


def _with_slabs(model: CachedModel, params: KVCacheParams, asked: MemoryAsked, whole: LaidPart) -> Iterator[LaidWay]:
    """Yields the layout of a manager with `share_memory`, if a slab fits into the memory."""
    tp, size, layers = params.n_devices, asked.page_size, sum(one.layers for one in model.paged)
    page = page_bytes(params, layers, size) // tp
    (recurrent,) = [one for one in model.each if one.state]
    slab = pages_of_slab(recurrent.state_layouts(tp), shard_layouts(params, layers, size))
    if (most := most_states(asked.memory // page, slab)) > 0:
        state = LaidPart(recurrent.kind, recurrent.layers, 0, partial(_any_length, slab * page))
        yield LaidWay("share_memory", page, asked.memory, most, asked.step_tokens, (whole, state))


def _of_vllm(blocks: VllmBlocks, asked: MemoryAsked, whole: LaidPart) -> LaidWay:
    parts = [LaidPart(_name(of.one), of.one.layers, of.tables, partial(blocks.table_bytes, of)) for of in blocks.each]
    if len(parts) == 1:  # one table for all kinds
        parts = [replace(parts[0], kind=whole.kind, layers=whole.layers)]
    return LaidWay("vllm", blocks.block_bytes, asked.memory, None, asked.step_tokens, (*parts,))


def _groups(paged: Sequence[AlikeLayers]) -> tuple[LayerGroup, ...]:
    """Returns a layer group for each set of equal layers. The groups number the layers consecutively."""
    found: list[LayerGroup] = []
    first = 0
    for one in paged:
        layers = tuple(range(first, first := first + one.layers))
        kind = "chunked" if one.kind == "chunked" else "window" if one.window else "full"
        found.append(LayerGroup(kind, layers, one.window))
    return (*found,)


def _name(one: AlikeLayers) -> str:
    return f"{one.kind} {one.window:,}" if one.window else one.kind


def _pages(size: int, page: int, group: LayerGroup | None, length: int, step_tokens: int) -> int:
    """Returns the bytes of the pages that a group keeps for a request of `length` tokens, in pages of `size` tokens.

    If `group` is None, every page is kept.
    """
    return page * (-(-length // size) if group is None else group.most_pages(length, size, step_tokens))


def _any_length(count: int, _length: int, _step_tokens: int) -> int:
    return count
