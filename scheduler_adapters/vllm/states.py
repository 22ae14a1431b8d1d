"""Splits the state of a recurrent layer into parts, as vLLM divides it over tensor-parallel ranks.

Ranks that divide the state differently can then exchange the parts. The channels of a convolution are several
projections in sequence, and each rank has a share of every projection: x, B and C of a Mamba 2 layer; queries, keys and
values of a gated delta network. vLLM's spec has only the sum of all channels. In the tensor of any other state, the
heads come first. In Mamba 1, the channels come first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from transfer.connector.config import StatePart
from transfer.errors import InvalidEngineError

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

_TENSORS = {"MAMBA1": 2, "MAMBA2": 2, "GDN_ATTN": 2, "SHORT_CONV": 1}
"""The known kinds of layers, and the number of state tensors of each kind. The tensor of the convolution comes first.

A layer with a different number of tensors is treated as unknown.
"""


def is_cut(spec: MambaSpec) -> bool:
    """Returns whether it is known how vLLM divides this state over ranks.

    Any other state is moved whole, and both sides then need equal tensor parallelism.
    """
    return not spec.tp_replicated and _TENSORS.get(spec.mamba_type.name) == len(spec.shapes)


def state_parts(where: str, spec: MambaSpec, ranks: int, layer: Any) -> tuple[StatePart, ...]:
    """Returns the parts of a state, in memory order.

    Args:
        where: names the cache in errors.
        spec: vLLM's spec for one rank.
        ranks: number of tensor-parallel ranks.
        layer: a layer with this state; None at the scheduler, which moves no data.
    """
    if not is_cut(spec):
        units = 1 if spec.tp_replicated else ranks
        return tuple(
            StatePart(
                kind=f"state {at}", units=units, width=math.prod(shape), dtype=_name(dtype), tensor=at, axes="page,head"
            )
            for at, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
        )
    dim_first = is_conv_state_dim_first()
    channels = spec.shapes[0][0 if dim_first else 1]
    parts = [
        StatePart(
            kind=f"conv.{kind}", units=units, width=width, dtype=_name(spec.dtypes[0]),
            axes="page,head,dim" if dim_first else "page,dim,head",
        )
        for kind, units, width in _projections(where, spec, ranks, channels, layer)
    ]  # fmt: skip
    if len(spec.shapes) > 1:
        parts.append(StatePart(kind="ssm", units=spec.shapes[1][0] * ranks, dtype=_name(spec.dtypes[1]), tensor=1))
    return tuple(parts)


def described(spec: MambaSpec) -> str:
    """Returns a string with further properties of a state. It must be the same on both sides of a transfer."""
    if not is_cut(spec):
        return "states " + " and ".join("x".join(map(str, shape)) for shape in spec.shapes)
    columns = spec.shapes[0][1 if is_conv_state_dim_first() else 0]
    heads = ["x".join(map(str, shape[1:])) for shape in spec.shapes[1:]]
    return " and ".join([f"states of {columns} columns", *heads])


def _projections(
    where: str, spec: MambaSpec, ranks: int, channels: int, layer: Any
) -> tuple[tuple[str, int, int], ...]:
    """Returns the parts of a convolution's `channels` on a rank."""
    if spec.mamba_type.name in {"MAMBA1", "SHORT_CONV"}:
        return (("x", channels * ranks, 1),)
    heads, *sizes = spec.shapes[1]
    values, unit = heads * sizes[0], sizes[1]
    # B and C have equally many groups; so do queries and keys.
    groups, left = divmod(channels - values, 2 * unit)
    if left or groups < 1:
        raise InvalidEngineError(
            f"{where}: the convolution has {channels} channels, {values} of them for {heads} heads; the remaining "
            f"channels must be two equal numbers of groups, each of {unit} channels"
        )
    if spec.mamba_type.name == "GDN_ATTN":
        return ("q", groups * ranks, unit), ("k", groups * ranks, unit), ("v", heads * ranks, sizes[0])
    # One group on each of several ranks has two possible meanings: all ranks hold the model's only group, or each rank
    # holds a different group. Only the layer object shows which is true.
    total = layer.norm.n_groups if groups == 1 and ranks > 1 and layer is not None else groups * ranks
    return ("x", heads * ranks, sizes[0]), ("B", total, unit), ("C", total, unit)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
