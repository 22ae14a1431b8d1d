"""Scales of pages as boxes: they move with their tokens to ranks and page sizes of the other side. An impossible move
is refused, and the refusal names the scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from kvcache import KVCacheParams, KVCacheQuantizationConfig
from kvcache.layout import PageLayout, as_blocks, scales_of, shard_layouts
from kvcache.params import ScaleOf
from transfer.errors import MetadataError
from transfer.plan.boxes import ShardLayout, check
from transfer.plan.plan import plan
from transfer.plan.runs import Runs
from transfer.plan.shapes import dense
from transfer.plan.source_ranks import sources

HEADS, HEAD_DIM, LAYERS, TOKENS, PAGES = 4, 4, 2, 24, 8
ORDERS = ("head,layer,side,token,dim", "layer,side,token,head,dim")


def layouts_of(tp: int, page_size: int, scale_of: ScaleOf, order: str = ORDERS[0]) -> list[PageLayout]:
    params = KVCacheParams(
        torch.int8, HEADS, HEAD_DIM, page_size=page_size, n_devices=tp, page_order=order,  # type: ignore[arg-type]
        kvcache_quant_config=KVCacheQuantizationConfig(torch.float64, 2, scale_of),
    )  # fmt: skip
    return shard_layouts(params, LAYERS, page_size)


def fill(memory: torch.Tensor, layout: PageLayout, pages: Sequence[int], size: int) -> None:
    """Writes the values and scales of a request to `pages`. Each value identifies its place in the whole model."""
    rows = memory.view(-1, layout.page_bytes)
    blocks, scales = as_blocks(memory.view(torch.int8), layout, len(rows)), scales_of(rows, layout)
    assert scales is not None
    assert layout.scales is not None
    for pool, kind, bound in ((blocks, layout, 127), (scales, layout.scales, 1 << 30)):
        for at, page in enumerate(pages):
            axes = [torch.arange(extent) for extent in kind.shape]
            axes[2] = axes[2] + (at * size if kind.page_size == size else at * 1000)
            axes[3] = axes[3] + kind.first_head
            side, layer, token, head, dim = torch.meshgrid(*axes, indexing="ij")
            pool[page] = ((((side * 7 + layer) * 31 + token) * 11 + head) * 13 + dim).remainder(bound).to(pool.dtype)


def carry_out(runs: Runs, local: torch.Tensor, remote: torch.Tensor) -> None:
    ours, theirs = local.numpy(), remote.numpy()
    times = np.zeros(len(ours), np.int64)
    for target, source, length in zip(runs.local.tolist(), runs.remote.tolist(), runs.length.tolist(), strict=True):
        ours[target : target + length] = theirs[source : source + length]
        times[target : target + length] += 1
    assert times.max(initial=0) <= 1  # The scale of a page is copied once with the page, and not once with each token.


def pulled(
    ours: list[PageLayout], theirs: list[PageLayout], *, staged: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the contents of each reading rank after a pull of `TOKENS` tokens, and the expected contents."""
    remotes: list[ShardLayout] = [check(dense(layout, PAGES)) for layout in theirs]
    there = [torch.zeros(PAGES * layout.page_bytes, dtype=torch.uint8) for layout in theirs]
    sizes = ours[0].page_size, theirs[0].page_size
    mine, other = ([5, 2, 7, 1, 6, 3][: TOKENS // size] for size in sizes)
    for memory, layout in zip(there, theirs, strict=True):
        fill(memory, layout, other, sizes[1])
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rank, layout in enumerate(ours):
        memory, expected = (torch.zeros(PAGES * layout.page_bytes, dtype=torch.uint8) for _ in range(2))
        fill(expected, layout, mine, sizes[0])
        for owner, part in sources(check(dense(layout, PAGES)), remotes, rank):
            one = plan(part, remotes[owner])
            if staged:
                area = np.zeros(one.staging(0).num_bytes((0, TOKENS)), np.uint8)
                runs = one.staging(0).runs(other, (0, TOKENS), 0, [0])
                carry_out(runs, torch.from_numpy(area), there[owner])
                one.staging(0).permute(mine, (0, TOKENS), area, [memory.numpy()])
            else:
                carry_out(one.runs(0, mine, other, (0, TOKENS)), memory, there[owner])
        found.append((memory, expected))
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("orders", [ORDERS, ORDERS[::-1], ORDERS[:1] * 2], ids=["to rows", "to heads", "alike"])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 8), (8, 2), (4, 2)])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (12, 4), (8, 12)])
def test_scales_of_tokens_move_with_their_tokens(
    sizes: tuple[int, int], ranks: tuple[int, int], orders: tuple[str, str], staged: bool
) -> None:
    ours, theirs = (
        layouts_of(tp, size, "token and head", order) for tp, size, order in zip(ranks, sizes, orders, strict=True)
    )
    for memory, expected in pulled(ours, theirs, staged=staged):
        assert torch.equal(memory, expected)


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 8), (8, 2)])
@pytest.mark.parametrize("scale_of", ["page and head", "page"])
def test_scales_of_pages_move_with_their_pages(scale_of: ScaleOf, ranks: tuple[int, int], staged: bool) -> None:
    ours, theirs = (layouts_of(tp, 4, scale_of, order) for tp, order in zip(ranks, ORDERS, strict=True))
    for memory, expected in pulled(ours, theirs, staged=staged):
        assert torch.equal(memory, expected)


@pytest.mark.parametrize("scale_of", ["page and head", "page"])
def test_scales_of_pages_are_not_converted(scale_of: ScaleOf) -> None:
    small, large, of_tokens = (
        check(dense(layouts_of(1, size, kind)[0], PAGES))  # pyright: ignore[reportArgumentType]
        for size, kind in ((4, scale_of), (8, scale_of), (4, "token and head"))
    )
    told = r"'scales': a scale is shared by a page \(pages of 4\) here but by a page \(pages of 8\) at the source"
    with pytest.raises(MetadataError, match=told):
        plan(small, large)
    for one, other in ((small, of_tokens), (of_tokens, small)):
        with pytest.raises(MetadataError, match="cannot be converted"):
            plan(one, other)


def test_a_source_without_scales_is_refused() -> None:
    ours = check(dense(layouts_of(1, 4, "page")[0], PAGES))
    theirs = check(dense(msgspec.structs.replace(layouts_of(1, 4, "page")[0], scales=None), PAGES))
    with pytest.raises(MetadataError, match="'scales': no remote shard holds layer 0, head 0"):
        sources(ours, [theirs], 0)
