"""SGLang's real KV pools with our leases and READs, within this process. Everything that SGLang has written must
arrive.

The pools' own operation writes the tokens and reads them back, on every rank. There is no scheduler here. The test
opens, offers and places rooms as SGLang's queues do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.sglang_engine.stand_ins import install

install()

LAYERS, HEADS, DIM, TOKENS, WINDOW = 3, 4, 8, 75, 20
ROOM = 77


def pool_of(kind: str, page_size: int, tp: int) -> Any:
    """Returns one rank's pool, made as in SGLang."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    common: dict[str, Any] = {"page_size": page_size, "dtype": torch.float32, "device": "cpu"}
    heads = {"head_num": HEADS // tp, "head_dim": DIM}
    if kind == "mla":
        return MLATokenToKVPool(
            256, kv_lora_rank=DIM, qk_rope_head_dim=4, layer_num=LAYERS, enable_memory_saver=False, **common
        )
    if kind == "swa":
        return SWAKVPool(256, 128, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1], **heads, **common)
    return MHATokenToKVPool(256, layer_num=LAYERS, enable_memory_saver=False, **heads, **common)


def parts_of(pool: Any) -> list[tuple[Any, list[int]]]:
    """Returns the pool of each group, with the numbers of its layers within it."""
    parts = [pool.full_kv_pool, pool.swa_kv_pool] if hasattr(pool, "swa_kv_pool") else [pool]
    return [(part, list(range(part.layer_num))) for part in parts]


def content(part: Any, layer: int, heads: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values (or latents) for a layer. Each value identifies its layer, token and head."""
    width = part.kv_cache_dim if hasattr(part, "kv_cache_dim") else DIM
    token = torch.arange(1.0, TOKENS + 1)[:, None, None] * 1000
    head = torch.tensor([0] if hasattr(part, "kv_cache_dim") else list(heads))[None, :, None] * 100
    keys = (token + head + layer * 10 + torch.arange(width) / 100)[:, :, :width]
    return keys, -keys


def slots(pages: list[int], page_size: int, first: int) -> torch.Tensor:
    """Returns the slots of the tokens in these pages, starting with page `first` of the request."""
    found = [page * page_size + offset for page in pages for offset in range(page_size)]
    return torch.tensor(found[: TOKENS - first * page_size])


def heads_of(tp: int, rank: int) -> range:
    return range(rank * HEADS // tp, (rank + 1) * HEADS // tp)


class Told:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda room, reason="": self.heard.append(f"{name} {reason}".strip())


class Side:
    """An engine: the pools and workers of all its ranks, and the pages of one request in them."""

    def __init__(self, kind: str, page_size: int, tp: int, role: str) -> None:
        from scheduler_adapters.sglang.pools import caches_of
        from transfer.connector.config import WorkerConfig
        from transfer.connector.worker import NixlConnectorWorker

        self.kind, self.page_size, self.tp = kind, page_size, tp
        self.pools = [pool_of(kind, page_size, tp) for _ in range(tp)]
        self.blocks, self.firsts = place(parts_of(self.pools[0]), page_size)
        self.configs, self.workers = [], []
        engine_id = f"{role}-{time.monotonic_ns()}"
        for rank, pool in enumerate(self.pools):
            found = caches_of(pool, tp_size=tp, total_kv_heads=HEADS, window=WINDOW)
            config = WorkerConfig(
                engine_id=engine_id, incarnation="one", groups=found.groups, model="m", tp_rank=rank, tp_size=tp
            )
            self.configs.append(config)
            self.workers.append(NixlConnectorWorker(config))
            self.workers[-1].register_kv_caches(found.tensors)

    def each(self) -> Iterator[tuple[Any, int, torch.Tensor, int, tuple[torch.Tensor, torch.Tensor]]]:
        """Yields for each rank, group and layer: the pool, the layer, the slots, their first token, and the expected
        content.
        """
        for rank, pool in enumerate(self.pools):
            for (part, layers), group, first in zip(parts_of(pool), self.blocks, self.firsts, strict=True):
                where, at = slots(group, self.page_size, first), first * self.page_size
                for layer in layers:
                    keys, values = content(part, layer, heads_of(self.tp, rank))
                    yield part, layer, where, at, (keys[at:], values[at:])

    def write(self) -> None:
        """Writes the tokens in the way that SGLang's attention writes them."""
        for part, layer, where, _, (keys, values) in self.each():
            # The pool's own operation asks the running engine about parallelism, and this test has no engine.
            if self.kind == "mla":
                part.get_key_buffer(layer)[where] = keys
            else:
                part.set_kv_buffer(SimpleNamespace(layer_id=layer), where, keys, values)

    def check(self) -> None:
        """Checks that the tokens within the window have arrived, or all tokens if there is no window."""
        for part, layer, where, at, (keys, values) in self.each():
            kept = max(0, TOKENS - WINDOW - at) if at else 0
            assert torch.equal(part.get_key_buffer(layer)[where][kept:], keys[kept:])
            if self.kind != "mla":
                assert torch.equal(part.get_value_buffer(layer)[where][kept:], values[kept:])


def pages_of(group: int, page_size: int, start: int) -> tuple[list[int], int]:
    """Returns shuffled pages for a request from token `start` on, and the index of the first page."""
    first, end = start // page_size, -(-TOKENS // page_size)
    order = torch.randperm(end, generator=torch.Generator().manual_seed(group + page_size)) + 1
    return order[first:].tolist(), first


def place(parts: list[tuple[Any, list[int]]], page_size: int) -> tuple[list[list[int]], list[int]]:
    """Returns the request's pages in each group."""
    starts = [0] + [TOKENS - WINDOW] * (len(parts) - 1)
    found = [pages_of(number, page_size, start) for number, start in enumerate(starts)]
    return [pages for pages, _ in found], [first for _, first in found]


def leases_of(source: Side, told: Told) -> tuple[list[Any], str]:
    """Returns prefill's side of the transfer on all its ranks, and the address that decode asks."""
    from scheduler_adapters.sglang.leases import FollowerLeases, RoomLeases
    from scheduler_adapters.sglang.ranks import RankFollower, RankLeader
    from scheduler_adapters.sglang.rooms import RoomServer, endpoint
    from transfer.connector.scheduler import NixlConnectorScheduler

    server = RoomServer("127.0.0.1", None)
    address, token = endpoint("127.0.0.1", server.port), b"t" * 16
    scheduler = NixlConnectorScheduler(source.configs[0])
    scheduler.set_handshake_metadata(
        {rank: worker.get_handshake_metadata() for rank, worker in enumerate(source.workers)}
    )
    leader = RankLeader(server, source.tp, token)
    followers = [
        FollowerLeases(worker, RankFollower(address, rank, token, None), Told())
        for rank, worker in enumerate(source.workers)
        if rank
    ]
    return [RoomLeases(source.workers[0], scheduler, server, leader, told, 10.0), *followers], address


def pulls_of(target: Side, told: Told) -> list[Any]:
    """Returns decode's side of the transfer on all its ranks."""
    from scheduler_adapters.sglang.pulls import RoomPulls
    from scheduler_adapters.sglang.rooms import RoomClient
    from transfer.connector.scheduler import NixlConnectorScheduler
    from transfer.wire.allowed_peers import AllowedPeers

    alone = msgspec.structs.replace(target.configs[0], tp_rank=0, tp_size=1)
    return [
        RoomPulls(worker, NixlConnectorScheduler(alone), RoomClient(None, AllowedPeers()), told)
        for worker in target.workers
    ]


@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
@pytest.mark.parametrize(
    ("pages", "ranks"), [((16, 16), (1, 1)), ((16, 4), (2, 1)), ((4, 16), (1, 2)), ((1, 8), (4, 2))]
)
def test_a_pool_reads_what_another_pool_wrote(kind: str, pages: tuple[int, int], ranks: tuple[int, int]) -> None:
    from scheduler_adapters.sglang.leases import Computed
    from scheduler_adapters.sglang.pulls import Destination
    from transfer.wire.prompt import Prompt

    source, target = Side(kind, pages[0], ranks[0], "prefill"), Side(kind, pages[1], ranks[1], "decode")
    source.write()
    prompt = Prompt(range(TOKENS))
    prefill, decode, rows = Told(), Told(), []
    (leases, address), pulls = leases_of(source, prefill), pulls_of(target, decode)
    try:
        for lease in leases:
            lease.open(ROOM)
            lease.offer(ROOM, Computed(source.blocks, source.firsts, TOKENS, (b"row",), prompt))
        firsts = [target.firsts[0], *[None] * (len(target.blocks) - 1)]
        for pull in pulls:
            pull.want(ROOM, address, prompt)
            pull.place(ROOM, Destination(target.blocks, firsts, 0, rows.append))
        end = time.monotonic() + 20
        while time.monotonic() < end and (len(rows) < ranks[1] or "room_read" not in prefill.heard):
            for step in (*leases, *pulls):
                step.step()
            time.sleep(1e-3)
        assert decode.heard.count("room_loaded") == ranks[1], (decode.heard, prefill.heard)
        assert "room_read" in prefill.heard
        assert rows == [(b"row",)] * ranks[1]
        target.check()
    finally:
        for end_of_it in (*leases, *pulls):
            end_of_it.shutdown()


def test_a_pool_that_is_not_known_is_refused_in_one_line() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from scheduler_adapters.sglang.pools import caches_of
    from transfer.errors import InvalidEngineError

    class Other(MHATokenToKVPool):
        pass

    pool = Other(64, 16, torch.float32, 1, 8, 1, "cpu", False)
    with pytest.raises(InvalidEngineError, match=r"does not support the pool Other"):
        caches_of(pool, tp_size=1, total_kv_heads=1, window=0)
