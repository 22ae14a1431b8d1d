"""Tests the engine over a manager's pools. The pools are strided views with every order of a page's bytes."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest
import torch

from kvcache import KVCacheParams, PagedKVCacheManager
from transfer import KVTransferEngine


def manager_of(order: Any, tp: int, pages: int) -> PagedKVCacheManager:
    params = KVCacheParams(torch.float16, 4, 8, enable_prefix_caching=True, page_size=4, n_devices=tp, page_order=order)
    memory = params.bytes_per_token(3) * 4 * pages
    return PagedKVCacheManager(params, 2, 16, 3, ["cpu"] * tp, available_cache_memory=memory)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "order", ["head,layer,side,token,dim", "layer,side,head,token,dim", "layer,side,token,head,dim"]
)
def test_pages_of_a_manager_are_read_whole_and_no_other_is_touched(order: str, tp: int) -> None:
    source, target = manager_of(order, tp, 20), manager_of(order, tp, 30)
    assert source.fingerprint == target.fingerprint
    for manager in (source, target):
        for shard in manager.device_tensors[0]:
            shard.copy_(torch.rand(shard.shape))
    before = [shard.clone() for shard in target.device_tensors[0]]
    src, dst = [3, 20, 7, 8, 9], [30, 1, 12, 13, 14]
    name = uuid.uuid4().hex
    with (
        KVTransferEngine(f"source-{name}", source.device_tensors, total_num_pages=21) as giver,
        KVTransferEngine(f"target-{name}", target.device_tensors, total_num_pages=31) as taker,
    ):
        giver.connect(taker.metadata)
        taker.connect(giver.metadata)
        request = taker.initiate_read_transfer(giver.metadata, src, dst, 0, 0)
        deadline = time.monotonic() + 20
        while not (taker.is_complete(request) and giver.is_complete(request)):
            assert time.monotonic() < deadline
        taker.cleanup_transfer(request)
        giver.cleanup_transfer(request)
    others = [page for page in range(31) if page not in dst]
    for theirs, ours, old in zip(source.device_tensors[0], target.device_tensors[0], before, strict=True):
        assert torch.equal(ours[dst], theirs[src])
        assert torch.equal(ours[others], old[others])
