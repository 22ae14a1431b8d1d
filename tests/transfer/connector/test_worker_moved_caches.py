"""Caches of an engine that torch is asked to move, or that have moved, while a worker has registered them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from kvcache import MovedMemoryError
from tests.transfer.connector.test_worker import a_pair, load, offer
from tests.transfer.pair_ranks import EngineUnderTest, run_until, transfer


def cache(one: EngineUnderTest) -> torch.Tensor:
    tensor = next(iter(one.ranks[0].host.caches.tensors.values()))
    assert isinstance(tensor, torch.Tensor)
    return tensor


def move(one: EngineUnderTest) -> None:
    """Makes a cache lie at another address. The old memory stays mapped, as its storage is kept."""
    tensor = cache(one)
    one.kept = tensor.untyped_storage()  # type: ignore[attr-defined]
    tensor.set_(tensor.clone())


def test_registered_caches_cannot_be_moved_and_loads_go_on(engine: Any) -> None:
    pair = a_pair()
    source, reader = engine("p"), engine("d")
    for one in (source, reader):
        with pytest.raises(MovedMemoryError, match="layer 'model.layers.0.mixer', tensor 0: torch cannot"):
            cache(one).share_memory_()
    transfer(pair, source, reader)
    assert reader.call("compare", pair) == [[]]
    tensor = cache(source)
    source.close()
    gc.collect()
    assert tensor.share_memory_().is_shared()


def test_a_load_into_a_cache_that_has_moved_fails_and_says_so(engine: Any) -> None:
    pair = a_pair()
    source, reader = engine("p"), engine("d")
    params = offer(source, pair)
    move(reader)
    load(reader, pair, params)
    run_until(lambda: reader.failed, reader, source)
    assert "this memory was moved from 0x" in reader.failed["r"]
    run_until(lambda: source.sent, reader, source)
    assert "this memory was moved from 0x" in source.sent["r"], "the source is told why nothing was read"


def test_a_source_whose_cache_has_moved_ends_its_leases(engine: Any) -> None:
    pair = a_pair()
    source, reader = engine("p"), engine("d")
    params = offer(source, pair)
    move(source)
    run_until(lambda: source.sent, source)
    assert "this memory was moved from 0x" in source.sent["r"]
    load(reader, pair, params)
    run_until(lambda: reader.failed, reader, source)
    assert "gone" not in reader.failed["r"]
