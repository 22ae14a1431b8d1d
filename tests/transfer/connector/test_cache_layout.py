"""Tests the places to which a config maps registered tensors, and the refusal of tensors that do not match the
config.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import torch

from transfer.connector.cache_layout import cache_layout
from transfer.connector.config import GroupConfig, StatePart, WorkerConfig
from transfer.errors import InvalidEngineError
from transfer.plan.boxes import ShardLayout

H, T, D, N = 4, 8, 16, 10


def config(*groups: GroupConfig, **changes: Any) -> WorkerConfig:
    return WorkerConfig(engine_id="e", incarnation="i", groups=groups, model="m", **changes)


def attention(layout: str = "HND", **changes: Any) -> GroupConfig:
    options = {"layers": {"a": 0, "b": 1}, "block_size": T, "num_kv_heads": H, "head_dim": D, "dtype": "float32"}
    return GroupConfig(layout=layout, **(options | changes))


def layer(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def boxes(layout: ShardLayout, group: int = 0) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(box) for box in layout.groups[group].boxes]


def test_each_layer_is_a_box_at_its_tensor_s_place() -> None:
    tensors = {"a": layer(2, N, H, T, D), "b": layer(2, N, H, T, D)}
    memory = cache_layout(config(attention()), tensors)
    assert memory.bases == tuple(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    assert memory.layout.region_bytes == (2 * N * H * T * D * 4,) * 2
    assert memory.layout.groups[0].num_pages == N
    first, second = boxes(memory.layout)
    assert (first["first"], second["first"]) == ((0, 0, 0, 0), (1, 0, 0, 0))
    assert first["strides"] == (0, N * H * T * D * 4, T * D * 4, D * 4, 4)
    assert first["page_stride"] == H * T * D * 4
    assert first["extent"] == (1, 2, H, T, D)


def test_views_of_one_storage_are_one_region() -> None:
    memory = torch.zeros(N, 2, 2, H, T, D)
    found = cache_layout(config(attention("blocks-first-HND")), {"a": memory[:, 0], "b": memory[:, 1]})
    assert len(found.bases) == 1
    assert [box["offset"] for box in boxes(found.layout)] == [0, 2 * H * T * D * 4]
    assert {box["page_stride"] for box in boxes(found.layout)} == {2 * 2 * H * T * D * 4}


def test_groups_may_share_a_tensor() -> None:
    shared = layer(2, N, H, T, D)
    window = attention(layers={"w": 2}, kind="sliding_window", window=9)
    found = cache_layout(config(attention(layers={"a": 0}), window), {"a": shared, "w": shared})
    assert len(found.bases) == 1
    assert found.layout.groups[1].window == 9


def test_keys_and_values_may_be_apart_or_share_a_dimension() -> None:
    apart = cache_layout(config(attention(layers={"a": 0})), {"a": (layer(N, H, T, D), layer(N, H, T, D))})
    assert [box["first"][1] for box in boxes(apart.layout)] == [0, 1]
    packed = cache_layout(config(attention("LBHNC", layers={"a": 0})), {"a": layer(N, H, T, 2 * D)})
    (box,) = boxes(packed.layout)
    assert box["extent"] == (1, 2, H, T, D)
    assert box["strides"][1] == D * 4
    assert box["strides"][4] == 4


def test_strides_and_not_shapes_say_how_a_tensor_lies() -> None:
    permuted = layer(N, H, 2, T, D).permute(2, 0, 1, 3, 4)
    (box,) = boxes(cache_layout(config(attention(layers={"a": 0})), {"a": permuted}).layout)
    assert box["page_stride"] == H * 2 * T * D * 4
    assert box["strides"][:3] == (0, T * D * 4, 2 * T * D * 4)


def test_a_rank_holds_its_heads_and_its_stage() -> None:
    cut = config(attention(), tp_size=2, tp_rank=1, pp_size=2, pp_rank=1)
    (box,) = boxes(cache_layout(cut, {"b": layer(2, N, H // 2, T, D)}).layout)
    assert box["first"] == (1, 0, 2, 0)
    replicated = config(attention(num_kv_heads=2, layers={"a": 0}), tp_size=4, tp_rank=3)
    (box,) = boxes(cache_layout(replicated, {"a": layer(2, N, 1, T, D)}).layout)
    assert box["first"] == (0, 0, 1, 0)


def test_a_stage_without_layers_of_a_group_still_has_the_group() -> None:
    stage = config(attention(layers={"a": 0}), attention(layers={"b": 1}), pp_size=2)
    found = cache_layout(stage, {"a": layer(2, N, H, T, D)})
    assert [len(group.boxes) for group in found.layout.groups] == [1, 0]
    assert found.layout.groups[1].page_size == T


def test_a_cross_layer_tensor_is_one_box() -> None:
    tensor = layer(N, 2, H, T, 2 * D)
    found = cache_layout(config(attention("BLHNC")), {"a": tensor}, ("a", "b"))
    (box,) = boxes(found.layout)
    assert box["extent"] == (2, 2, H, T, D)
    assert box["strides"][0] == H * T * 2 * D * 4


def test_kernel_pages_are_those_of_the_tensor() -> None:
    group = attention(block_size=32, kernel_block_size=T, layers={"a": 0})
    found = cache_layout(config(group), {"a": layer(2, 8, H, T, D)})
    assert found.layout.groups[0].block_pages == 4
    assert found.layout.groups[0].num_pages == 8


def test_a_state_is_a_box_for_each_part() -> None:
    parts = (
        StatePart(kind="conv.x", units=4, width=8, dtype="float32"),
        StatePart(kind="conv.B", units=2, width=3, dtype="float32"),
        StatePart(kind="ssm", units=4, dtype="float32", tensor=1),
    )
    group = GroupConfig(layers={"m": 5}, kind="mamba", state=parts)
    memory = torch.zeros(N, 1000)
    conv = memory[:, : 19 * 4].unflatten(1, (19, 4))
    ssm = memory[:, 100 : 100 + 2 * 6 * 7].unflatten(1, (2, 6, 7))
    found = cache_layout(config(group, tp_size=2, tp_rank=1), {"m": (conv, ssm)})
    x, b, state = boxes(found.layout)
    assert (x["first"], x["extent"]) == ((5, 0, 16, 0), (1, 1, 16, 1, 4))
    assert (b["first"], b["offset"]) == ((5, 0, 3, 0), 16 * 4 * 4)
    assert (state["first"], state["extent"], state["offset"]) == ((5, 0, 2, 0), (1, 1, 2, 1, 42), 400)
    assert {box["page_stride"] for box in (x, b, state)} == {4000}
    assert found.layout.groups[0].state
    other = StatePart(kind="conv.x", units=4, width=8, dtype="float32", axes="page,dim,head")
    last = cache_layout(config(msgspec.structs.replace(group, state=(other,)), tp_size=2), {"m": torch.zeros(N, 4, 16)})
    (box,) = boxes(last.layout)
    assert (box["strides"][2], box["strides"][4]) == (4, 64)


BAD: list[tuple[str, WorkerConfig, dict[str, Any], str]] = [
    ("none", config(attention()), {}, "register_kv_caches got no caches"),
    ("unknown layer", config(attention()), {"z": layer(2, N, H, T, D)}, "layer 'z' is in none of the 1 groups"),
    (
        "heads",
        config(attention()),
        {"a": layer(2, N, 3, T, D)},
        "layer 'a': head 3, 4 expected (4 heads over tp_size 1, tp_rank 0)",
    ),
    ("tokens", config(attention()), {"a": layer(2, N, H, T + 1, D)}, "token 9, 8 expected"),
    ("dim", config(attention()), {"a": layer(2, N, H, T, D + 1)}, "dim 17, 16 expected"),
    ("sides", config(attention()), {"a": layer(1, N, H, T, D)}, "side 1, 2 expected"),
    ("dimensions", config(attention()), {"a": layer(N, H, T, D)}, "shape [10, 4, 8, 16] does not fit the axes"),
    ("several", config(attention()), {"a": (layer(N, H, T, D),) * 3}, "got 3 tensors; 1 to 2 are expected"),
    ("one side", config(attention("page,head,token,dim")), {"a": layer(N, H, T, D)}, "no axis side for 2 elements"),
    (
        "dtype",
        config(attention(dtype="bfloat16")),
        {"a": layer(2, N, H, T, D)},
        "its elements are float32, but bfloat16 is expected",
    ),
    (
        "no page",
        config(attention("head,token,side,dim")),
        {"a": layer(H, T, 2, D)},
        "shape [4, 8, 2, 16] does not fit the axes",
    ),
    (
        "layers missing",
        config(attention()),
        {"b": layer(2, N, H, T, D)},
        "1 of its layers have no cache ('a' is the first): with pp_size 1 a rank needs the caches of all layers",
    ),
    (
        "pages",
        config(attention()),
        {"a": layer(2, N, H, T, D), "b": layer(2, 9, H, T, D)},
        "all must have the same number",
    ),
    ("apart", config(attention()), {"a": (layer(N, H, T, D), layer(9, H, T, D))}, "its tensors have [9, 10] pages"),
    (
        "blocks",
        config(attention(block_size=32, kernel_block_size=T)),
        {"a": layer(2, N, H, T, D)},
        "10 pages are not a multiple of the 4 pages of a block",
    ),
    (
        "expanded",
        config(attention()),
        {"a": layer(2, 1, H, T, D).expand(2, N, H, T, D)},
        "the stride of axis page: 0 is not within",
    ),
]


@pytest.mark.parametrize(("made", "caches", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_tensors_that_do_not_fit_are_refused_with_both_values(made: Any, caches: Any, message: str) -> None:
    with pytest.raises(InvalidEngineError, match="engine 'e' rank 0") as raised:
        cache_layout(made, caches)
    assert message in str(raised.value)


def state(*parts: StatePart) -> WorkerConfig:
    return config(GroupConfig(layers={"m": 0}, kind="mamba", state=parts))


@pytest.mark.parametrize(
    ("parts", "tensors", "message"),
    [
        ({"units": 5}, (torch.zeros(N, 4, 3),), "takes channels 0 to 5 of float32, but tensor 0 has 4"),
        ({"units": 3}, (torch.zeros(N, 4, 3),), "its tensors have [4] channels, but the state takes [3]"),
        ({"units": 4}, (torch.zeros(N, 4, 3), torch.zeros(N, 4)), "have [4, 0] channels"),
        ({"units": 4, "tensor": 1}, (torch.zeros(N, 4, 3),), "is said to be in tensor 1, but there are 1 tensors"),
        ({"units": 4}, (torch.zeros(N, 4),), "has shape [10, 4], which does not fit the axes 'page,head,dim'"),
        ({"units": 4, "axes": "page,token,dim"}, (torch.zeros(N, 4, 3),), "axes 'page,token,dim'"),
        ({"units": 4}, (torch.zeros(N, 4, 3, 9)[..., :5],), "dimensions 2 and 3 of [10, 4, 3, 5] have a gap"),
        ({"units": 4, "dtype": "float16"}, (torch.zeros(N, 4, 3),), "of float16, but tensor 0 has 4 of float32"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(parts: dict[str, Any], tensors: Any, message: str) -> None:
    with pytest.raises(InvalidEngineError, match=re.escape(message)):
        cache_layout(state(StatePart(**({"kind": "ssm", "dtype": "float32"} | parts))), {"m": tensors})


@pytest.mark.parametrize(
    ("names", "layers", "message"),
    [
        (("a", "z"), {"a": 0, "b": 1}, "layer 'z' is not in its group"),
        (("a", "b"), {"a": 0, "b": 2}, "must be consecutive"),
    ],
)
def test_a_cross_layer_tensor_holds_neighbours(names: tuple[str, ...], layers: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidEngineError, match=message):
        cache_layout(config(attention("BLHNC", layers=layers)), {"a": layer(N, 2, H, T, 2 * D)}, names)


def test_caches_on_several_devices_are_refused() -> None:
    with pytest.raises(InvalidEngineError, match=r"caches are on \['cpu', 'meta'\]; one device is expected"):
        cache_layout(config(attention()), {"a": layer(2, N, H, T, D), "b": torch.zeros(2, N, H, T, D, device="meta")})
