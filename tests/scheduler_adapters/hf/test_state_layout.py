import itertools
import math

import pytest
import torch

from kvcache.errors import InvalidParamsError
from scheduler_adapters.hf.state_layout import CONV_KINDS, SSM_KIND, StateLayout, StateShape, StateSlice, state_layout
from scheduler_adapters.hf.state_pages import StatePages
from transfer.plan.boxes import ShardLayout, check
from transfer.plan.plan import plan

SHAPE = StateShape(layers=3, heads=8, head_dim=5, groups=2, d_state=6, kernel=4, conv_dtype=torch.float32)


def of_kind(layout: StateLayout, kind: str) -> StateSlice:
    return next(part for part in layout.slices if part.kind == kind)


def test_a_page_is_dense_layer_after_layer_and_kind_after_kind() -> None:
    layout = state_layout(SHAPE)
    assert [part.kind for part in layout.slices] == [*CONV_KINDS, SSM_KIND]
    assert [(part.first, part.count) for part in layout.slices] == [(0, 40), (0, 12), (0, 12), (0, 8)]
    assert [part.stride for part in layout.slices] == [3 * 4, 3 * 4, 3 * 4, 5 * 6 * 4]
    ends = [part.offset + part.num_bytes for part in layout.slices]
    assert [part.offset for part in layout.slices] == [0, *ends[:-1]]
    assert layout.layer_bytes == ends[-1] == 64 * 12 + 8 * 120
    assert layout.page_bytes == 3 * layout.layer_bytes


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_the_shards_hold_every_channel_and_each_its_own_heads(shards: int) -> None:
    layouts = [state_layout(SHAPE, shard, shards) for shard in range(shards)]
    for kind, whole in (("conv.x", 40), ("conv.B", 12), ("conv.C", 12), ("ssm", 8)):
        parts = [of_kind(layout, kind) for layout in layouts]
        held = [set(range(part.first, part.first + part.count)) for part in parts]
        assert set().union(*held) == set(range(whole))
        if kind in {"conv.x", "ssm"}:
            assert sum(map(len, held)) == whole
    for layout in layouts:
        heads, x, b = of_kind(layout, "ssm"), of_kind(layout, "conv.x"), of_kind(layout, "conv.B")
        assert (x.first, x.count) == (heads.first * 5, heads.count * 5)
        groups = {head // 4 for head in range(heads.first, heads.first + heads.count)}  # 4 heads share a B
        assert {channel // 6 for channel in range(b.first, b.first + b.count)} == groups
        assert (of_kind(layout, "conv.C").first, of_kind(layout, "conv.C").count) == (b.first, b.count)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.bfloat16, 4)])
def test_a_view_is_what_the_offsets_and_strides_say(dtype: torch.dtype, kernel: int) -> None:
    shape = StateShape(3, 3, 5, 1, 1, kernel, dtype)  # 17 channels: with bfloat16 an odd number of halves of a word
    pages = StatePages(shape, 2)
    (layout,), (tensor,) = pages.layouts, pages.tensors
    raw = torch.randint(0, 255, tensor.shape, dtype=torch.uint8)
    tensor.copy_(raw)
    seen = torch.zeros_like(raw)
    for part, page, layer in itertools.product(layout.slices, range(3), range(3)):
        for channel in range(part.count):
            first = part.offset + layer * layout.layer_bytes + channel * part.stride
            found = raw[page, first : first + part.stride]
            seen[page, first : first + part.stride] += 1
            held = pages._views[part.kind][0][1][page, layer, channel].contiguous().view(torch.uint8)
            assert torch.equal(held.flatten(), found)
    assert seen.max() == 1, "two kinds share bytes"
    padding = 2 if dtype == torch.bfloat16 and 17 * (kernel - 1) % 2 else 0
    assert (seen == 0).sum() == 3 * 3 * padding


@pytest.mark.parametrize("shards", [3, 6, 16])
def test_heads_that_shards_can_neither_split_nor_share_are_refused(shards: int) -> None:
    with pytest.raises(InvalidParamsError, match=f"{shards} shards.*8 heads in 2 groups"):
        state_layout(SHAPE, 0, shards)
    groups = StateShape(layers=1, heads=12, head_dim=1, groups=3, d_state=1, kernel=2, conv_dtype=torch.float32)
    with pytest.raises(InvalidParamsError, match="2 shards.*12 heads in 3 groups"):
        state_layout(groups, 0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 0}, "heads is 0"),
        ({"kernel": 1}, "kernel is 1"),
        ({"groups": 3}, "8: no multiple of the 3 groups"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    fields = {name: getattr(SHAPE, name) for name in SHAPE.__slots__}
    with pytest.raises(InvalidParamsError, match=message):
        StateShape(**{**fields, **changes})


def test_a_page_has_the_bytes_of_all_states_together() -> None:
    conv, ssm = (40 + 12 + 12) * 3, 8 * 5 * 6
    assert math.prod((3, conv + ssm, 4)) == state_layout(SHAPE).page_bytes


@pytest.mark.parametrize(("there", "here"), [(1, 1), (1, 2), (2, 1), (4, 2), (2, 8)])
def test_a_transfer_plans_over_the_pages_between_any_numbers_of_shards(there: int, here: int) -> None:
    """What the plan would copy, copied here with numpy, is the state that the reading shards shall hold."""
    source, target = (StatePages(SHAPE, 3, ["cpu"] * shards) for shards in (there, here))
    states = [(torch.randn(1, 64, 3), torch.randn(1, 8, 5, 6)) for _ in range(3)]
    for layer, (conv, ssm) in enumerate(states):
        source.write(layer, torch.tensor([2]), CONV_KINDS, conv)
        source.write(layer, torch.tensor([2]), (SSM_KIND,), ssm)
    for to_shard, to in enumerate(target.tensors):
        for of_shard, of in enumerate(source.tensors):
            groups = ((target.group(to_shard, region=0), to), (source.group(of_shard, region=0), of))
            sides = [check(ShardLayout((group,), (tensor.nbytes,))) for group, tensor in groups]
            runs = plan(*sides).runs(0, [1], [2], (0, 1), [0], [0])
            for local, remote, length in zip(runs.local, runs.remote, runs.length, strict=True):
                to.view(-1)[int(local) : int(local + length)] = of.view(-1)[int(remote) : int(remote + length)]
    for layer, (conv, ssm) in enumerate(states):
        assert torch.equal(target.read(layer, torch.tensor([1]), CONV_KINDS), conv)
        assert torch.equal(target.read(layer, torch.tensor([1]), (SSM_KIND,)), ssm)
