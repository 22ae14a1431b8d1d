"""A process with a manager of quantised pages, which computes a prompt, leases its pages and serves them.

Each value and scale in a page identifies its place in the whole model, by `fill` of the plan's test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from kvcache import KVCacheParams, KVCacheQuantizationConfig, PagedKVCacheManager, TextContext, page_rows
from kvcache.params import ScaleOf
from tests.transfer.plan.test_scales import HEAD_DIM, HEADS, LAYERS, fill
from transfer.pull.exchange import ExchangeEvent, PageExchange
from transfer.pull.replica import Offered

PROMPT = list(range(30))


class ScaledSide:
    """A manager of 40 quantised pages over `tp` shards, and its exchange."""

    def __init__(self, name: str, tp: int, scale_of: ScaleOf | None, page_size: int = 4) -> None:
        scaled = None if scale_of is None else KVCacheQuantizationConfig(torch.float64, 2, scale_of)
        params = KVCacheParams(
            torch.int8, HEADS, HEAD_DIM, page_size=page_size, n_devices=tp, enable_prefix_caching=True,
            kvcache_quant_config=scaled,
        )  # fmt: skip
        self.manager = PagedKVCacheManager(params, 4, 64, LAYERS, ["cpu"] * tp, available_cache_memory=1 << 17)
        self.exchange = PageExchange(self.manager, name)

    def rows(self) -> Iterator[torch.Tensor]:
        """Returns the pages of each shard as bytes."""
        for blocks in self.manager.device_tensors[0]:
            yield page_rows(blocks).view(torch.uint8)

    def filled(self, rows: torch.Tensor, shard: int, pages: list[int]) -> torch.Tensor:
        """Returns the expected `rows` if `pages` hold the prompt."""
        expected = torch.zeros_like(rows)
        fill(expected.view(-1), self.manager.layouts[shard], pages, self.manager.page_size)
        return expected

    def until(self, wanted: Callable[[ExchangeEvent], object], deadline_s: float = 60.0) -> ExchangeEvent:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            for happened in self.exchange.poll():
                if wanted(happened):
                    return happened
            time.sleep(1e-3)
        raise TimeoutError(self.exchange.address)


def serve(pipe: Connection, tp: int, scale_of: ScaleOf, page_size: int = 4) -> None:
    """Leases the prompt, sends the offer and the block table, and serves until it is killed."""
    side = ScaledSide("p", tp, scale_of, page_size)
    context = TextContext(PROMPT, 64, "r")
    side.manager.external_claim("r")
    assert side.manager.maybe_reserve(context)
    for shard, rows in enumerate(side.rows()):
        rows.copy_(side.filled(rows, shard, side.manager.get_req_blocks("r")))
    context.update(1)
    side.manager.step([context])
    offer = side.exchange.offer("r", 60.0, running=True)
    assert offer is not None
    side.until(lambda happened: isinstance(happened.event, Offered))
    side.exchange.start_clock(offer)
    pipe.send((offer, side.manager.block_table("r")))
    while True:
        side.exchange.poll()
        time.sleep(1e-3)
