"""The pages of a layer, read through the boxes, equal the contents of the tensor. The strides of the tensor do not
matter.
"""

from __future__ import annotations

import pytest
import torch

from transfer.connector.cache_layout import Cache, LayerView, cache_layout
from transfer.connector.config import GroupConfig, WorkerConfig

PAGES, HEADS, TOKENS, DIM = 5, 3, 4, 8
NAMES = ("0.attn", "1.attn")


def split(content: torch.Tensor) -> list[torch.Tensor]:
    """Splits content into a tensor of keys and a tensor of values with other strides."""
    keys, values = content.split(DIM, -1)
    columns = keys.transpose(2, 3).contiguous().transpose(2, 3)
    return [columns, values.contiguous()]


LAYOUTS = {
    "rows": lambda content: content.clone(),
    "tokens first": lambda content: content.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": split,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_view_reads_the_contents_of_the_tensor(layout: str, dtype: torch.dtype) -> None:
    contents = {name: torch.randn(PAGES, HEADS, TOKENS, 2 * DIM).to(dtype) for name in NAMES}
    caches: dict[str, Cache] = {name: LAYOUTS[layout](content) for name, content in contents.items()}
    group = GroupConfig(
        layers={name: number for number, name in enumerate(NAMES)},
        block_size=TOKENS,
        layout="page,head,token,side,dim",
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=str(dtype).removeprefix("torch."),
    )
    memory = cache_layout(WorkerConfig(engine_id="e", incarnation="1", groups=(group,), model="m"), caches)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for number, name in enumerate(NAMES):
        view = LayerView(memory, caches, 0, number)
        assert (view.num_pages, view.page_size, view.heads, view.content) == (PAGES, TOKENS, HEADS, 2 * DIM)
        found = view.read([3, 1])
        assert torch.equal(found, contents[name].view(raw)[[3, 1]].transpose(1, 2).reshape(found.shape))
        view.write([0, 4], found)
        assert torch.equal(view.read([4, 0]), view.read([1, 3]))
        assert torch.equal(view.read([1, 3, 2]), contents[name].view(raw)[[1, 3, 2]].transpose(1, 2).flatten(0, 1))
