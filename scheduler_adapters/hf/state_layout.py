"""Where the state of recurrent (Mamba-2) layers lies in a state page, on one shard. Pure arithmetic.

A recurrent layer keeps no key and value per token. It keeps the last few inputs of a convolution and one matrix per
head, and overwrites both with every token. All layers of one request lie in one page, so that a transfer moves a state
as it moves any page. The bytes of a page on one shard, dense:

    layer 0:  conv.x | conv.B | conv.C | ssm      layer 1:  conv.x | ...

`conv.*` are channel-major, `[channels, kernel - 1]`: the last inputs of each channel, oldest first. `ssm` is
`[heads, head_dim, d_state]`. A shard holds a range of the heads, the channels of x that belong to these heads, and the
channels of B and C that belong to their groups. Each of the four is therefore one box with constant strides: over
layers, over channels or heads, and inside (`StateSlice`). vLLM lays a Mamba page out in this order too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcache.errors import InvalidParamsError

CONV_KINDS = ("conv.x", "conv.B", "conv.C")
SSM_KIND = "ssm"


@dataclass(frozen=True, slots=True)
class StateShape:
    """The recurrent layers of a model, all alike.

    Attributes:
        layers: recurrent layers.
        heads: heads of one layer.
        head_dim: channels of x for each head.
        groups: groups of heads that share one B and one C.
        d_state: elements of the state for each channel of x; channels of B, and of C, for each group.
        kernel: width of the convolution, which keeps one input less.
        conv_dtype: of the convolution's inputs.
        ssm_dtype: of the matrices.

    Raises:
        InvalidParamsError: a number below 1, a kernel below 2, or heads that are no multiple of the groups.
    """

    layers: int
    heads: int
    head_dim: int
    groups: int
    d_state: int
    kernel: int
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "groups", "d_state"):
            if getattr(self, name) < 1:
                raise InvalidParamsError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if self.kernel < 2:
            raise InvalidParamsError(f"kernel is {self.kernel}: at least 2 is needed, or no input is kept")
        if self.heads % self.groups:
            raise InvalidParamsError(f"heads is {self.heads}: no multiple of the {self.groups} groups")


@dataclass(frozen=True, slots=True)
class StateSlice:
    """What one shard holds of one kind of state: a box `[layer, channel or head, element]` in each page.

    Attributes:
        kind: "conv.x", "conv.B", "conv.C" or "ssm".
        first: the first channel (of conv.*) or head (of ssm), of all that the model has of this kind, that is here.
        count: channels or heads here.
        shape: of one channel, `(kernel - 1,)`, or of one head, `(head_dim, d_state)`. Dense.
        dtype: of an element.
        offset: bytes from the page's start to layer 0's first element.
    """

    kind: str
    first: int
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        """The channel or head after the last one here."""
        return self.first + self.count

    @property
    def stride(self) -> int:
        """Bytes from one channel or head to the next."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer."""
        return self.count * self.stride


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The bytes of a state page on one shard: conv.x, conv.B, conv.C and ssm of each layer.

    Attributes:
        slices: of the four kinds, in this order.
        layers: recurrent layers.
        layer_bytes: from one layer to the next.
    """

    slices: tuple[StateSlice, ...]
    layers: int
    layer_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page; pages lie one behind the other."""
        return self.layers * self.layer_bytes


def state_layout(shape: StateShape, shard: int = 0, shards: int = 1) -> StateLayout:
    """The layout on shard `shard` of `shards`.

    Heads are split evenly. Groups are too; where there are fewer groups than shards, several shards hold the same one.

    Raises:
        InvalidParamsError: shards that can neither split nor share evenly.
    """
    if shape.heads % shards or (shape.groups % shards and shards % shape.groups):
        raise InvalidParamsError(
            f"{shards} shards can neither split nor share {shape.heads} heads in {shape.groups} groups evenly"
        )
    heads = shape.heads // shards
    groups = max(1, shape.groups // shards)
    first_head, first_group = shard * heads, shard * shape.groups // shards
    spans = [
        (first_head * shape.head_dim, heads * shape.head_dim),
        *[(first_group * shape.d_state, groups * shape.d_state)] * 2,
    ]
    slices, offset = list[StateSlice](), 0
    for kind, (first, count) in zip(CONV_KINDS, spans, strict=True):
        slices.append(StateSlice(kind, first, count, (shape.kernel - 1,), shape.conv_dtype, offset))
        offset += slices[-1].num_bytes
    # Each element at a multiple of its size, or there is no view of it. Real widths need no padding here.
    offset = _round_up(offset, shape.ssm_dtype.itemsize)
    slices.append(StateSlice(SSM_KIND, first_head, heads, (shape.head_dim, shape.d_state), shape.ssm_dtype, offset))
    alignment = max(shape.ssm_dtype.itemsize, shape.conv_dtype.itemsize)
    return StateLayout(tuple(slices), shape.layers, _round_up(offset + slices[-1].num_bytes, alignment))


def state_layouts(shape: StateShape, shards: int) -> list[StateLayout]:
    """The layout on each of `shards` shards. Raises as `state_layout`."""
    return [state_layout(shape, shard, shards) for shard in range(shards)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
