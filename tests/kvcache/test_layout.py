from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache import KVCacheParams, PoolTooSmallError
from kvcache.layout import HUGE_PAGE_BYTES, PageLayout, allocate_blocks, replica_fingerprint, shard_layout
from kvcache.params import PageOrder


def layout(order: PageOrder = "head,layer,side,token,dim", **changes: int) -> PageLayout:
    sizes = {"n_kv_heads": 2, "head_dim": 3, "n_devices": 1, **changes}
    return shard_layout(KVCacheParams(torch.float16, **sizes, page_order=order), 5, 4, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "order", ["head,layer,side,token,dim", "layer,side,head,token,dim", "layer,side,token,head,dim"]
)
def test_every_element_lies_where_the_layout_says(order: PageOrder) -> None:
    made = layout(order)
    blocks = allocate_blocks(made, 3, torch.device("cpu"))
    assert blocks.shape == (3, 2, 5, 4, 2, 3)
    flat = blocks.as_strided((3 * made.page_elements,), (1,))
    flat.copy_(torch.arange(len(flat)))
    at = made.strides
    for page, side, layer, token, head, dim in np.ndindex(*blocks.shape):
        place = page * made.page_elements + side * at["side"] + layer * at["layer"]
        place += token * at["token"] + head * at["head"] + dim * at["dim"]
        assert blocks[page, side, layer, token, head, dim] == place


def test_the_default_order_keeps_a_head_and_a_tile_in_one_run() -> None:
    made = layout()
    assert made.strides["head"] == 5 * 2 * 4 * 3  # All layers, sides and tokens of a head are contiguous.
    assert (made.strides["token"], made.strides["dim"]) == (3, 1)
    assert made.page_bytes == 2 * (2 * 5 * 2 * 4 * 3)


def test_memory_is_zeroed_aligned_and_advised_as_huge() -> None:
    blocks = allocate_blocks(layout(), 20_000, torch.device("cpu"))
    assert blocks.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not blocks.any()
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("this kernel gives no transparent huge pages")
    smaps, here = Path("/proc/self/smaps").read_text().splitlines(), f"{blocks.data_ptr():x}"
    for at, line in enumerate(smaps):
        span = line.split(" ")[0].split("-")
        if len(span) == 2 and int(span[0], 16) <= int(here, 16) < int(span[1], 16):
            sizes = {row.split(":")[0]: row.split()[1] for row in smaps[at + 1 : at + 25] if row.endswith("kB")}
            assert int(sizes["AnonHugePages"]) > 0
            return
    raise AssertionError("/proc/self/smaps does not list the mapping")


def test_memory_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(PoolTooSmallError, match=r"cpu cannot hold 4611686018427387904 pages of 480 bytes"):
        allocate_blocks(layout(), 1 << 62, torch.device("cpu"))


def test_different_geometries_have_different_fingerprints() -> None:
    ways = [layout(), layout("layer,side,head,token,dim"), layout(head_dim=4), layout(n_kv_heads=4)]
    assert len({way.fingerprint() for way in ways}) == len(ways)
    assert layout().fingerprint() == layout().fingerprint()
    assert replica_fingerprint([layout()]) != replica_fingerprint([layout(), layout()])
    assert replica_fingerprint([layout()]) != replica_fingerprint([layout()], "window 4 of layers 1")


def test_fingerprints_are_those_that_processes_of_earlier_versions_send() -> None:
    assert layout().fingerprint() == "92e0ee92088dfda8"
    assert replica_fingerprint([layout(), layout(n_kv_heads=4)], "g") == "8e23b0228d1bfdf5"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pages_on_a_gpu() -> None:
    blocks = allocate_blocks(layout(), 3, torch.device("cuda"))
    assert blocks.is_cuda
    assert not blocks.any()
