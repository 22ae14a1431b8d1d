import pytest
import torch

from kvcache.errors import InvalidParamsError, PoolTooSmallError
from kvcache.params import CONV_KINDS, SSM_KIND, StateForm, StateShape
from kvcache.pool.slabs import SlabPool
from kvcache.states.state_memory import (
    StateLayouts,
    kind_offsets,
    most_states,
    page_bytes,
    pages_of_slab,
    room_in_slabs,
    state_layouts,
)
from tests.kvcache.build import states_of

SHAPE = StateShape(layers=3, heads=8, head_dim=5, groups=2, d_state=6, kernel=4, conv_dtype=torch.float32)


def test_a_state_page_has_all_layers_and_the_heads_and_elements_of_each_kind() -> None:
    (layout,) = state_layouts(SHAPE, 1)
    assert [*layout] == [*CONV_KINDS, SSM_KIND]
    assert [(page.first_head, page.num_heads) for page in layout.values()] == [(0, 40), (0, 12), (0, 12), (0, 8)]
    assert [page.head_dim for page in layout.values()] == [3, 3, 3, 5 * 6]
    assert {(page.num_layers, page.sides, page.page_size) for page in layout.values()} == {(3, 1, 1)}


@pytest.mark.parametrize(
    ("form", "kinds", "matrix"),
    [
        ("mamba2", ("conv.x", "conv.B", "conv.C"), (5, 6)),
        ("gated_delta", ("conv.B", "conv.C", "conv.x"), (6, 5)),
        ("mamba1", ("conv.x",), (6,)),
        ("short_conv", ("conv.x",), ()),
        ("linear", (), (6, 5)),
    ],
)
def test_each_model_form_has_the_state_that_its_mixers_keep(
    form: StateForm, kinds: tuple[str, ...], matrix: tuple[int, ...]
) -> None:
    dim = 5 if form in {"mamba2", "gated_delta", "linear"} else 1
    shape = StateShape(3, 8, dim, 2, 6, 4 if kinds else 1, torch.float32, form=form)
    (layout,) = state_layouts(shape, 1)
    assert (shape.conv_kinds, shape.matrix) == (kinds, matrix)
    assert set(layout) == {*kinds, *([SSM_KIND] if matrix else [])}
    pages = states_of(shape, 1, ["cpu", "cpu"])
    if kinds:
        conv = torch.randn(1, dim * 8 + (24 if len(kinds) > 1 else 0), 3)
        pages.write(2, torch.tensor([1]), kinds, conv)
        assert torch.equal(pages.read(2, torch.tensor([1]), kinds), conv)
    if matrix:
        states = torch.randn(1, 8, *matrix)
        pages.write(2, torch.tensor([1]), (SSM_KIND,), states)
        assert torch.equal(pages.read(2, torch.tensor([1]), (SSM_KIND,)), states)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_the_shards_hold_every_channel_and_each_its_own_heads(shards: int) -> None:
    layouts = state_layouts(SHAPE, shards)

    def held(kind: str) -> list[set[int]]:
        pages = [layout[kind] for layout in layouts]
        return [set(range(page.first_head, page.first_head + page.num_heads)) for page in pages]

    for kind, whole in (("conv.x", 40), ("conv.B", 12), ("conv.C", 12), ("ssm", 8)):
        assert set().union(*held(kind)) == set(range(whole))
        if kind in {"conv.x", "ssm"}:
            assert sum(map(len, held(kind))) == whole
    for heads, x, b in zip(held("ssm"), held("conv.x"), held("conv.B"), strict=True):
        assert {channel // 5 for channel in x} == heads
        assert {channel // 6 for channel in b} == {head // 4 for head in heads}  # Four heads share one channel of B.
    assert held("conv.B") == held("conv.C")


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.bfloat16, 4)])
def test_writing_a_state_page_fills_all_of_it_and_no_byte_of_another_page(dtype: torch.dtype, kernel: int) -> None:
    shape = StateShape(3, 3, 5, 1, 1, kernel, dtype)
    pages = states_of(shape, 2)
    for layer in range(3):
        pages.write(layer, torch.tensor([2]), CONV_KINDS, torch.ones(1, 15 + 1 + 1, kernel - 1))
        pages.write(layer, torch.tensor([2]), (SSM_KIND,), torch.ones(1, 3, 5, 1))
    for tensor in pages.tensors[0]:
        assert tensor[2].all()
        assert not tensor[:2].any()
    assert [tensor.dtype for tensor in pages.tensors[0]] == [dtype] * 3 + [torch.float32]


@pytest.mark.parametrize("shards", [3, 6, 16])
def test_heads_that_shards_can_neither_split_nor_share_are_refused(shards: int) -> None:
    with pytest.raises(InvalidParamsError, match=f"8 heads in 2 groups .* by {shards} shards"):
        state_layouts(SHAPE, shards)
    groups = StateShape(layers=1, heads=12, head_dim=1, groups=3, d_state=1, kernel=2, conv_dtype=torch.float32)
    with pytest.raises(InvalidParamsError, match="12 heads in 3 groups .* by 2 shards"):
        state_layouts(groups, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 0}, "heads is 0"),
        ({"kernel": 1}, "kernel is 1"),
        ({"groups": 3}, "8: a multiple of the 3 groups is needed"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, int], message: str) -> None:
    fields = {name: getattr(SHAPE, name) for name in SHAPE.__slots__}
    with pytest.raises(InvalidParamsError, match=message):
        StateShape(**{**fields, **changes})


@pytest.mark.parametrize(("shards", "copies_of_b"), [(1, 1), (2, 1), (8, 4)])
def test_a_page_has_the_bytes_of_all_states_together(shards: int, copies_of_b: int) -> None:
    conv, ssm = (40 + copies_of_b * (12 + 12)) * 3, 8 * 5 * 6
    assert page_bytes(state_layouts(SHAPE, shards)) == 3 * (conv + ssm) * 4


def of_heads(heads: int) -> StateLayouts:
    """Returns the layouts of a state that has one kind, with 8 bytes for each head."""
    return state_layouts(StateShape(1, heads, 1, 1, 1, 2, torch.int64, form="short_conv"), 1)


@pytest.mark.parametrize(("heads", "pages"), [(4, 2), (10, 2), (12, 4), (21, 6)])
def test_a_state_takes_the_fewest_token_pages_that_hold_it_and_end_at_a_multiple_of_16_bytes(
    heads: int, pages: int
) -> None:
    (token_page,) = of_heads(5)[0].values()
    assert token_page.page_bytes == 40
    assert pages_of_slab(of_heads(heads), [token_page]) == pages


def test_the_states_in_slabs_are_as_many_as_fit_and_each_kind_is_named_with_its_place() -> None:
    (layout,) = state_layouts(SHAPE, 1)
    row = page_bytes([layout]) // 8 + 16  # the bytes of a token page; a state takes 8 pages
    states = room_in_slabs(SHAPE, SlabPool(23, 1, 8), [torch.zeros((24, row), dtype=torch.uint8)])
    assert states.pool.num_pages == most_states(23, 8) == 2
    (kinds,) = states.kinds
    assert {kind.kind: kind.layout for kind in kinds} == layout
    assert [kind.offset for kind in kinds] == kind_offsets(layout)[:-1]
    assert {(kind.region, kind.stride) for kind in kinds} == {(None, 8 * row)}


def test_states_in_pages_need_a_pool_with_a_slab() -> None:
    pool, rows = SlabPool(7, 1, 4), torch.zeros((8, 1 << 12), dtype=torch.uint8)
    assert room_in_slabs(SHAPE, pool, [rows]).pool is pool.cached
    with pytest.raises(PoolTooSmallError, match="holds 6 pages, and a state takes 4 of them: at least 7 pages"):
        room_in_slabs(SHAPE, SlabPool(6, 1, 4), [rows[:7]])
