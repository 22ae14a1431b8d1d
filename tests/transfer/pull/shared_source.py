"""One of several sources of the same pages, in this process or in its own process, and a reader whose links can be
slow. Each element of a page identifies its place in the whole model, so a wrong page or head is always noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvcache import KVCacheParams, LayerGroup, PagedKVCacheManager, TextContext, page_rows
from kvcache.layout import as_blocks
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.pull.asking import Lent
from transfer.pull.exchange import ExchangeEvent, PageExchange
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import ReplicaTransfer

PAGE_SIZE, LAYERS, HEADS, HEAD_DIM = 4, 2, 4, 32
PROMPT = [number % 50 for number in range(256)]
WINDOWS = (LayerGroup("full", (0,)), LayerGroup("window", (1,), 60))
QUICK = {"handshake_timeout_s": 5.0, "heartbeat_s": 0.2, "dead_after_s": 2.0}


class SharedSide:
    """A manager of at least 80 pages over `tp` shards, and its exchange."""

    def __init__(
        self,
        name: str,
        tp: int = 1,
        *,
        windows: bool = False,
        agent: Callable[[str, MemoryType], Agent] = Agent,
        **options: Any,
    ) -> None:
        params = KVCacheParams(
            torch.float32, HEADS, HEAD_DIM, page_size=PAGE_SIZE, n_devices=tp, enable_prefix_caching=True,
            groups=WINDOWS if windows else (),
        )  # fmt: skip
        memory = params.bytes_per_token(LAYERS) * PAGE_SIZE * 160 * tp
        self.manager = PagedKVCacheManager(
            params, 4, len(PROMPT) + 8, LAYERS, ["cpu"] * tp, available_cache_memory=memory
        )
        options = {"replica_options": QUICK, "lend": 1.0, **options}
        self.exchange = PageExchange(self.manager, name, agent=agent, **options)
        self.happened: list[ExchangeEvent] = []

    def compute(self, pages: int) -> None:
        """Computes the first pages of the prompt, which are then cached and idle."""
        context = TextContext([*PROMPT[: pages * PAGE_SIZE], 1], len(PROMPT) + 8, "theirs")
        with self.manager.claim(context):
            assert self.manager.maybe_reserve(context)
            context.update(1)
            self.manager.step([context])
            table = self.manager.block_table("theirs")
            count = -(-table.num_tokens // PAGE_SIZE)
            for group, ids in enumerate(table.groups):
                self.fill(group, count - len(ids), ids)

    def fill(self, group: int, first: int, pages: Any) -> None:
        for shard in range(len(self.manager.layouts)):
            self.blocks(shard)[list(pages)] = self.expected(shard, group, first, len(pages))

    def blocks(self, shard: int) -> torch.Tensor:
        """Returns the pages of a shard, `[pages, sides, layers, tokens, heads, dim]`."""
        rows, layout = page_rows(self.manager.device_tensors[0][shard]), self.manager.layouts[shard]
        return as_blocks(rows.view(torch.float32).view(-1), layout, len(rows))

    def expected(self, shard: int, group: int, first: int, count: int) -> torch.Tensor:
        layout = self.manager.layouts[shard]
        axes = [torch.arange(first, first + count), *(torch.arange(extent) for extent in layout.shape)]
        axes[4] = axes[4] + layout.first_head
        page, side, layer, token, head, dim = torch.meshgrid(*axes, indexing="ij")
        value = ((((page * 2 + side) * LAYERS + layer) * PAGE_SIZE + token) * HEADS + head) * HEAD_DIM + dim
        return (value + group * 0.5).to(torch.float32)

    def poll(self) -> None:
        self.happened += self.exchange.poll()

    @property
    def pulls(self) -> list[ExchangeEvent]:
        return [one for one in self.happened if isinstance(one.event, PullEvent)]

    @property
    def lent(self) -> list[Lent]:
        return [one.event for one in self.happened if isinstance(one.event, Lent)]

    @property
    def held(self) -> tuple[int, int]:
        """Returns the numbers of held pages, open leases and open pulls."""
        self.manager.check()
        thread = self.exchange.threads[0].replica
        return self.manager.num_held_blocks, len(thread.leases) + sum(thread.num_pulls) + len(self.exchange.open_pulls)

    def close(self) -> None:
        self.exchange.close()
        self.manager.check()
        self.manager.close()


def revoke_all(replica: ReplicaTransfer) -> None:
    for lease_id in replica.leases.ids():
        replica.revoke(lease_id, "test")


def serve(pipe: Connection, name: str, pages: int, options: dict[str, Any]) -> None:
    """Computes `pages` pages of the prompt and lends them until the process is killed. The command `revoke` ends its
    leases.
    """
    side = SharedSide(name, **options)
    side.compute(pages)
    pipe.send((side.exchange.address, side.exchange.engine_id(0)))
    while True:
        side.poll()
        if not pipe.poll(5e-4):
            continue
        if pipe.recv() == "revoke":
            side.exchange.threads[0].call(revoke_all)
            side.poll()
            side.manager.reset_prefix_cache()
            other = TextContext([99] * 252, len(PROMPT) + 8, "other")
            with side.manager.claim(other):  # The other request now writes to the formerly leased pages.
                assert side.manager.maybe_reserve(other)
                for shard in range(len(side.manager.layouts)):
                    side.blocks(shard)[side.manager.get_req_blocks("other")] = -1.0
        pipe.send(side.held)


class Links:
    """The speed of the reader's link to each source, by engine id.

    Attributes:
        bytes_per_s: a READ is posted only after the time that a link of this rate needs for its bytes; None for no
            limit.
        held: sources from which no READ arrives until they are removed.
        begun: number of requested bytes.
    """

    def __init__(self) -> None:
        self.bytes_per_s: dict[str, float] = {}
        self.held: set[str] = set()
        self.begun: dict[str, int] = {}

    def agent(self, name: str, memory_type: MemoryType) -> Agent:
        return SlowAgent(self, name, memory_type)


class _SlowRead:
    def __init__(self, engine: str, at: float, post: Callable[[], Any]) -> None:
        self.engine, self.at, self.post = engine, at, post
        self.handle: Any = None
        self.is_posted = False


class SlowAgent(Agent):
    """A real agent whose READs are posted late."""

    def __init__(self, links: Links, name: str, memory_type: MemoryType) -> None:
        super().__init__(name, memory_type)
        self.links, self.free_at = links, 0.0

    def read(self, peer: str, local: Any, remote: Any, memory_types: Any = (MemoryType.DRAM, MemoryType.DRAM)) -> Any:
        engine = peer.rsplit("/", 1)[0]
        num_bytes = sum(run[1] for run in local)
        self.links.begun[engine] = self.links.begun.get(engine, 0) + num_bytes
        rate = self.links.bytes_per_s.get(engine)
        self.free_at = max(time.monotonic(), self.free_at) + (num_bytes / rate if rate else 0.0)
        read = super().read
        return _SlowRead(engine, self.free_at, lambda: read(peer, local, remote, memory_types))

    def done(self, handle: Any) -> bool:
        if not isinstance(handle, _SlowRead):
            return super().done(handle)
        if not handle.is_posted:
            if handle.engine in self.links.held or time.monotonic() < handle.at:
                return False
            handle.handle, handle.is_posted = handle.post(), True
        return handle.handle is None or super().done(handle.handle)

    def release(self, handle: Any) -> None:
        if not isinstance(handle, _SlowRead):
            super().release(handle)
        elif handle.handle is not None:
            super().release(handle.handle)
