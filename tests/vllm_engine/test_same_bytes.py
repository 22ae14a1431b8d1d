"""vLLM's own NIXL connector and the connector of pagewire move the same bytes between the same blocks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.vllm_engine.engine import LAYERS, Engine, Shape, run_until
from tests.vllm_engine.test_engine import PREFILL, PROMPT

Make = Callable[..., Engine]
THEIRS = ("NixlConnector", None)
# The prompt has only whole blocks, because the connector reads only the valid tokens of a partial block.
WHOLE = PROMPT[:96]


class _Backend:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def full_cls_name() -> tuple[str, str]:
        return ("", "")


@pytest.fixture(autouse=True)
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the ranks, attention and layout of a running model, so that vLLM's connector runs without a GPU."""
    import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker as worker
    from vllm.config import CacheConfig
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from tests.vllm_engine.engine import Engine

    ranks = {"rank": 0, "size": 1}
    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: ranks["rank"])
    monkeypatch.setattr(worker, "get_tensor_model_parallel_world_size", lambda: ranks["size"])
    monkeypatch.setattr(worker, "get_current_attn_backends", lambda *_: [_Backend])
    monkeypatch.setattr(worker, "get_current_attn_backends_and_specs", lambda *_: ([_Backend], [None]))
    monkeypatch.setattr(worker, "select_common_block_size", lambda size, *_: size)
    monkeypatch.setattr(type(current_platform), "discover_numa_topology", classmethod(lambda cls: []))
    monkeypatch.setattr(CacheConfig, "get_resolved_kv_cache_layout", lambda self: KVCacheLayout.LBHNC, raising=False)
    original = Engine.add_rank

    def add_rank(self: Engine, config: Any, caches: Any, rank: int) -> None:
        ranks.update(rank=rank, size=self.shape.tp_size)
        original(self, config, caches, rank)

    monkeypatch.setattr(Engine, "add_rank", add_rank)
    return


def held(prefill: Engine, params: dict[str, Any]) -> list[list[int]]:
    """Returns the blocks that the source reports for a request."""
    offer = prefill.connector._scheduling._connector._by_lease[int(params["lease_id"], 16)]
    return [list(blocks) for blocks in offer.held.block_ids]


def moved(make: Make, monkeypatch: pytest.MonkeyPatch, connector: Any, left: Any, right: Any) -> tuple[Any, ...]:
    """Pulls from caches of random bytes. Returns the blocks on both sides, and all bytes of decode's caches."""
    engines: list[Engine] = []
    for role, sides, port in (("kv_producer", left, 17_610), ("kv_consumer", right, 17_620)):
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        engines.append(make(role, Shape(connector=connector, extra={}, **sides)))
    prefill, decode = engines
    prefill.add("p", WHOLE, 1, dict(PREFILL))
    run_until([prefill], lambda: prefill.finish_reason("p"))
    generator = torch.Generator().manual_seed(5)
    for caches in prefill.caches:
        for layer in range(LAYERS):
            cache = caches[f"model.layers.{layer * len(prefill.shape.windows)}.self_attn.attn"]
            cache.copy_(torch.randint(0, 2000, cache.shape, generator=generator))
    params = prefill.params("p")
    theirs = params["remote_block_ids"] if connector == THEIRS else held(prefill, params)
    decode.add("d", WHOLE, 3, params)
    decode.step()
    blocks = decode.scheduler.kv_cache_manager.get_block_ids("d")
    # In the next step, vLLM's model would write to the last block.
    received = decode.scheduler.finished_recving_kv_req_ids
    run_until([prefill, decode], lambda: "d" in received)
    found = [cache.clone() for caches in decode.caches for cache in caches.values()]
    run_until([prefill, decode], lambda: decode.finish_reason("d"))
    for engine in engines:
        engine.close()
    return theirs, blocks, found


SIDES = {
    "equal": ({}, {}),
    "TP 1 to 2": ({}, {"tp_size": 2}),
    "TP 2 to 1": ({"tp_size": 2}, {}),
    "blocks of 8 to 16": ({"block_size": 8}, {}),
}


@pytest.mark.parametrize(("left", "right"), SIDES.values(), ids=SIDES)
def test_our_connector_moves_the_bytes_that_vllms_moves(
    make: Make, monkeypatch: pytest.MonkeyPatch, left: Any, right: Any
) -> None:
    from tests.vllm_engine.engine import OURS

    ours = moved(make, monkeypatch, OURS, left, right)
    theirs = moved(make, monkeypatch, THEIRS, left, right)
    assert ours[:2] == theirs[:2], "the same blocks on both sides"
    assert sum(int(cache.count_nonzero()) for cache in ours[2]) > 1000
    assert all(torch.equal(our, their) for our, their in zip(ours[2], theirs[2], strict=True))
