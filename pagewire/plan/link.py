"""Computes how many bytes move from prefill to decode, and the speed that the first token needs. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvcache.layout import shard_layout
from kvcache.sizing import page_bytes
from pagewire.plan.layers import AlikeLayers, CachedModel
from pagewire.plan.ways import params_of
from transfer.plan.plan import plan
from transfer.plan.shapes import dense
from transfer.plan.source_ranks import sources

_PAGES = 8  # number of pages for which runs are counted; they are scattered, so that no two of them form one run


class LinkLoad(msgspec.Struct, frozen=True):
    """The data that one request moves from prefill to decode, over all ranks together.

    Attributes:
        length: tokens of the request.
        bytes: bytes that are read. Heads that several ranks need count once for each of them.
        runs: number of NIXL descriptors for these bytes, if no two pages are neighbours.
        compute_s: seconds that prefill takes.
        after_gbps: required GB/s if the pull starts after prefill; None if prefill alone takes too long.
        after_runs_s: required runs per second if the pull starts after prefill.
        chunks_gbps: required GB/s if each chunk is pulled while the next one is computed.
        chunks_runs_s: required runs per second if each chunk is pulled while the next one is computed.
    """

    length: int
    bytes: int
    runs: int
    compute_s: float
    after_gbps: float | None
    after_runs_s: float | None
    chunks_gbps: float | None
    chunks_runs_s: float | None


@dataclass(frozen=True, slots=True)
class Target:
    """The requirements on a link: seconds to the first token, prefill tokens per second, and tokens of a chunk."""

    first_token_s: float
    prefill_speed: float
    chunk: int


def pulls(
    model: CachedModel, tps: tuple[int, int], page_size: int, lengths: Sequence[int], target: Target
) -> Iterator[LinkLoad]:
    """Yields the load of a request of each length. `tps` has the ranks of a prefill and of a decode replica."""
    shapes = Counter[tuple[int, int, bool]]()  # layers of one shape share a page, even if their windows differ
    for one in model.paged:
        shapes[one.heads, one.width, one.kind == "latent"] += one.layers
    runs = sum(
        _runs_of_pages(model, AlikeLayers("latent" if latent else "full", layers, heads, width), tps, page_size)
        for (heads, width, latent), layers in shapes.items()
    )
    of_page = sum(page_bytes(params_of(model, one, tps[1], page_size), one.layers, page_size) for one in model.paged)
    states = model.state_bytes(tps[1]) * tps[1]
    for length in lengths:
        pages = -(-length // page_size)
        size, count = pages * of_page + states, -(-pages * runs // _PAGES)
        left = target.first_token_s - length / target.prefill_speed
        part = min(1.0, target.chunk / length)
        # If chunks are pulled, the pages that remain when a chunk ends must all arrive by the same deadline. The
        # required speed is highest either after the first chunk, when most pages remain, or after the last one, when
        # the least time remains.
        ahead = target.first_token_s - part * length / target.prefill_speed
        after = None if left <= 0 else 1 / left
        chunks = None if left <= 0 else max(1 / ahead, part / left)
        yield LinkLoad(
            length=length,
            bytes=size,
            runs=count,
            compute_s=length / target.prefill_speed,
            after_gbps=_rate(size / 1e9, after),
            after_runs_s=_rate(count, after),
            chunks_gbps=_rate(size / 1e9, chunks),
            chunks_runs_s=_rate(count, chunks),
        )


def _rate(amount: float, per_s: float | None) -> float | None:
    return None if per_s is None else amount * per_s


def _runs_of_pages(model: CachedModel, one: AlikeLayers, tps: tuple[int, int], page_size: int) -> int:
    """Returns how many runs all decode ranks read for `_PAGES` scattered pages of equal layers."""
    prefill, decode = (
        [dense(shard_layout(params_of(model, one, tp, page_size), one.layers, page_size, rank), 2 * _PAGES + 1)
         for rank in range(tp)]
        for tp in tps
    )  # fmt: skip
    pages = np.arange(1, 2 * _PAGES, 2)
    return sum(
        len(plan(part, prefill[source]).runs(0, pages, pages, (0, _PAGES * page_size)))
        for rank, layout in enumerate(decode)
        for source, part in sources(layout, prefill, rank)
    )
