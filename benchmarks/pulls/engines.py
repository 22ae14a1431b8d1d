"""Engines to pull between: their geometry, their pools, and elements whose values identify their positions."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.pools import expect
from benchmarks.pulls.layouts import per_layer
from kvcache.layout import PageLayout, allocate_blocks
from transfer.plan.boxes import Box, ShardLayout
from transfer.plan.shapes import dense
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory, new_incarnation
from transfer.pull.replica import ReplicaTransfer
from transfer.wire.handshake import EngineCard, HandshakeClient

HEAD_MAJOR = "head,layer,side,token,dim"
ITEMSIZE, TOKENS = 2, 16
TABLE_KEY = bytes(range(32))
"""The key that seals the block tables of all sources. The reader knows it, because here it builds these tables itself.
"""

Memory = NDArray[np.uint8]
Elements = NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The geometry of one engine. By default, one layer of a page has 16 KiB.

    Attributes:
        name: engine id.
        layers: layers of the model.
        pages: pages of each rank's pool.
        heads: KV heads of the model.
        head_dim: elements of a head.
        tp: ranks that split the heads.
        pp: stages that split the layers; one of `tp` and `pp` is 1.
        page_size: tokens of a page.
        order: axes of a pool with all layers; if `page` is among them, axes of a tensor for each layer
            (`transfer.plan.shapes`).
        huge: whether the pool lies in huge pages, as the manager allocates it, instead of 4 KiB pages.
    """

    name: str
    layers: int
    pages: int
    heads: int = 4
    head_dim: int = 64
    tp: int = 1
    pp: int = 1
    page_size: int = TOKENS
    order: str = HEAD_MAJOR
    huge: bool = True

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one rank."""
        return 2 * ITEMSIZE * self.layers * self.heads * self.page_size * self.head_dim // (self.tp * self.pp)

    def shards(self) -> Iterator[tuple[PageLayout, ShardLayout]]:
        """The layout of each rank, for the manager and for transfers."""
        heads, layers = self.heads // self.tp, self.layers // self.pp
        for rank in range(self.tp * self.pp):
            first_head, first_layer = (rank * heads, 0) if self.tp > 1 else (0, rank * layers)
            layout = PageLayout(
                dtype="bfloat16",
                itemsize=ITEMSIZE,
                num_layers=layers,
                sides=2,
                first_head=first_head,
                num_heads=heads,
                page_size=self.page_size,
                head_dim=self.head_dim,
                order=HEAD_MAJOR if "page" in self.order else self.order,
            )
            if "page" in self.order:
                yield layout, per_layer(layout, self.pages, self.order, first_layer)
            else:
                yield layout, dense(layout, self.pages, first_layer)


class Engine(NamedTuple):
    """A running engine.

    Attributes:
        replica: the engine's leases and pulls.
        card: the engine's description for the handshake.
        shards: the layout of each rank.
        regions: the memory of each region of each rank.
    """

    replica: ReplicaTransfer
    card: EngineCard
    shards: list[ShardLayout]
    regions: list[list[Memory]]


def make(spec: Spec) -> Engine:
    """Allocates the pools and starts the agents."""
    incarnation = new_incarnation()
    ranks: list[RankTransfer] = []
    every: list[list[Memory]] = []
    shards = list(spec.shards())
    for number, (layout, shard) in enumerate(shards):
        whole = layout if len(shard.region_bytes) == 1 else msgspec.structs.replace(layout, num_layers=1)
        regions = [_pool(whole, spec.pages, huge=spec.huge) for _ in shard.region_bytes]
        identity = RankIdentity(
            engine_id=spec.name, incarnation=incarnation, rank=number, ranks=len(shards), table_key=TABLE_KEY
        )
        ranks.append(RankTransfer(identity, ShardMemory(shard, [region.ctypes.data for region in regions])))
        every.append(regions)
    card = EngineCard(spec.name, incarnation, tuple(rank.metadata for rank in ranks))
    return Engine(ReplicaTransfer(ranks, HandshakeClient()), card, [shard for _, shard in shards], every)


def _pool(layout: PageLayout, pages: int, *, huge: bool) -> Memory:
    num_bytes = pages * layout.page_bytes
    if huge:
        return huge_pages(num_bytes)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    memory[:: mmap.PAGESIZE] = 0  # touched now, because the first READ of an untouched page would be slow
    return memory


def huge_pages(num_bytes: int) -> Memory:
    """Returns memory that is allocated like the manager's pools."""
    layout = PageLayout("uint8", 1, 1, 1, 0, 1, 1, mmap.PAGESIZE, HEAD_MAJOR)
    pages = -(-num_bytes // mmap.PAGESIZE)
    return allocate_blocks(layout, pages, torch.device("cpu")).view(-1).numpy()[:num_bytes]


def fill(spec: Spec, engine: Engine) -> None:
    """Gives every element of a source a value that identifies its page, token, layer, side, head and dim."""
    slots = np.arange(spec.pages * spec.page_size).reshape(spec.pages, spec.page_size)
    for box, held in _boxes(engine):
        held[...] = _values(box, slots)


def verify(
    reader: tuple[Spec, Engine], source: Spec, local: Sequence[int], remote: Sequence[int], pages: int = 8
) -> None:
    """Checks the first and the last of the pulled pages.

    Raises an error if their contents differ from the source's pages.

    Args:
        reader: the engine that has pulled whole pages, from token 0 on.
        source: geometry of the source engine.
        local: the reader's pages.
        remote: the source's pages.
        pages: how many pages to check at either end.
    """
    spec, engine = reader
    remote_ids = np.asarray(remote)
    for at in {*range(min(pages, len(local))), *range(max(0, len(local) - pages), len(local))}:
        tokens = np.arange(at * spec.page_size, (at + 1) * spec.page_size)
        slots = remote_ids[tokens // source.page_size] * source.page_size + tokens % source.page_size
        for box, held in _boxes(engine):
            same = (held[local[at]] == _values(box, slots[None])[0]).all()
            page = slots[0] // source.page_size
            expect(bool(same), f"page {local[at]} of {spec.name} holds what page {page} of its source holds")


def _boxes(engine: Engine) -> Iterator[tuple[Box, Elements]]:
    """Yields each box of each rank, as an array of its elements: `[pages, layers, sides, heads, tokens, dims]`."""
    for shard, regions in zip(engine.shards, engine.regions, strict=True):
        (group,) = shard.groups
        for box in group.boxes:
            elements = regions[box.region][box.offset :].view(np.uint16)
            strides = (box.page_stride, *box.strides)
            yield box, np.lib.stride_tricks.as_strided(elements, (group.num_pages, *box.extent), strides)


def _values(box: Box, slots: NDArray[np.int64]) -> Elements:
    """Returns the values that `fill` gives to the tokens `slots` of a box.

    The result is `[pages, layers, sides, heads, tokens, dims]`, and `slots` is int64 `[pages, tokens]`.
    """
    layer, side, head, _ = box.first
    layers, sides, heads, _, dims = box.extent
    values = (slots * 40503)[:, None, None, None, :, None]
    values = values + (np.arange(layers) + layer)[:, None, None, None, None] * 641
    values = values + (np.arange(sides) + side)[:, None, None, None] * 9973
    values = values + (np.arange(heads) + head)[:, None, None] * 2731 + np.arange(dims)
    return values.astype(np.uint16)
