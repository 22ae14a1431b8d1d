"""Tests host buffers in place of device memory: the copied pages and layers, and the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transfer.connector.config import GroupConfig, StatePart, WorkerConfig
from transfer.connector.host_buffer import HostBuffers

ATTENTION = GroupConfig(
    layers={"a": 0, "b": 1}, layout="NHD", block_size=4, num_kv_heads=2, head_dim=3, dtype="float32"
)
WINDOW = GroupConfig(layers={"w": 2}, kind="sliding_window", window=5, layout="packed", block_size=4, head_dim=3)
STATE = GroupConfig(layers={"m": 3}, kind="mamba", state=(StatePart(kind="ssm", units=4),))
CONFIG = WorkerConfig(engine_id="e", incarnation="i", groups=(ATTENTION, WINDOW, STATE), model="m")


def caches() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "a": torch.rand(2, 6, 4, 2, 3),
        "b": (torch.rand(6, 4, 2, 3), torch.rand(6, 4, 2, 3)),
        "w": torch.rand(6, 1, 4, 6),
        "m": (torch.rand(6, 4, 5), torch.rand(6, 2, 2)),
    }


def test_pages_go_to_the_host_and_back_and_nothing_else_does() -> None:
    device = caches()
    host = HostBuffers(CONFIG, device)
    host.save(0, [1, 4])
    assert torch.equal(host.caches["a"][:, [1, 4]], device["a"][:, [1, 4]])
    assert torch.equal(host.caches["b"][1][[1, 4]], device["b"][1][[1, 4]])
    assert not host.caches["a"][:, [0, 2, 3, 5]].any()
    assert not host.caches["w"].any()
    kept = device["a"].clone()
    device["a"].zero_()
    host.restore(0, [4])
    assert torch.equal(device["a"][:, 4], kept[:, 4])
    assert not device["a"][:, [0, 1, 2, 3, 5]].any()


def every_dtype() -> list[torch.dtype]:
    """Returns each type of which a tensor can be made with a whole number of bytes for an element."""
    named = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((one for one in named if not str(one).startswith(("torch.q", "torch.complex32"))), key=str)


@pytest.mark.parametrize("dtype", every_dtype(), ids=str)
def test_pages_of_every_type_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    attention = GroupConfig(layers={"a": 0}, layout="NHD", block_size=4, num_kv_heads=2, head_dim=2, dtype=name)
    state = GroupConfig(layers={"m": 1}, kind="mamba", state=(StatePart(kind="ssm", units=4, dtype=name),))
    config = WorkerConfig(engine_id="e", incarnation="i", groups=(attention, state), model="m")
    bits = {"a": torch.randint(256, (2, 6, 4, 2, 2 * dtype.itemsize), dtype=torch.uint8)}
    bits["m"] = torch.randint(256, (6, 4, 4 * dtype.itemsize), dtype=torch.uint8)
    device = {layer: memory.view(dtype) for layer, memory in bits.items()}
    before = {layer: memory.clone() for layer, memory in bits.items()}
    host = HostBuffers(config, device)
    for group in (0, 1):
        host.save(group, [1, 4])
    for memory in bits.values():
        memory.zero_()
    for group in (0, 1):
        host.restore(group, [4])
    assert torch.equal(bits["a"][:, 4], before["a"][:, 4])
    assert torch.equal(bits["m"][4], before["m"][4])
    assert not bits["a"][:, [0, 1, 2, 3, 5]].any()
    assert not bits["m"][[0, 1, 2, 3, 5]].any()


def test_each_group_copies_its_own_layers() -> None:
    device = caches()
    host = HostBuffers(CONFIG, device)
    host.save(1, [2])
    host.save(2, [3])
    assert torch.equal(host.caches["w"][2], device["w"][2])
    assert all(torch.equal(copy[3], own[3]) for copy, own in zip(host.caches["m"], device["m"], strict=True))
    assert not host.caches["a"].any()
    assert not host.caches["m"][0][2].any()


def test_a_cross_layer_tensor_comes_back_as_a_whole() -> None:
    group = GroupConfig(layers={"a": 0, "b": 1}, layout="BLHNC", block_size=4, head_dim=3, dtype="float32")
    config = WorkerConfig(engine_id="e", incarnation="i", groups=(group,), model="m")
    device = {"a": torch.rand(6, 2, 1, 4, 6)}
    host = HostBuffers(config, device)
    host.save(0, [5])
    device["a"].zero_()
    host.restore(0, [5])
    assert device["a"][5].all()


def test_heads_lie_before_tokens_whatever_the_device_has() -> None:
    host = HostBuffers(CONFIG, caches())
    page, head = host.caches["a"].stride(1), host.caches["a"].stride(3)
    assert (page, head) == (2 * 2 * 4 * 3, 2 * 4 * 3)
    assert host.caches["a"].shape == (2, 6, 4, 2, 3)
    assert host.caches["w"].is_contiguous()


def test_the_platform_s_own_copy_is_used_if_there_is_one() -> None:
    device = caches()
    host = HostBuffers(CONFIG, device)
    seen: list[tuple[Any, ...]] = []
    host.copy = lambda source, target, there, here, way: seen.append((sorted(source), sorted(target), there, here, way))
    host.save(0, [1, 2])
    host.restore(1, [3])
    host.restore(1, [])
    assert seen == [(["a", "b"], ["a", "b"], [1, 2], [1, 2], "d2h"), (["w"], ["w"], [3], [3], "h2d")]
