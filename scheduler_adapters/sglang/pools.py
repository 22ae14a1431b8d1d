"""Describes SGLang's KV pools as groups and tensors of a connector worker. Unknown pools are refused at startup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from transfer.connector.config import GroupConfig
from transfer.errors import InvalidEngineError

_MHA = "page,side,token,head,dim"
_MLA = "page,token,dim"


class Caches(NamedTuple):
    """The page groups of a model, and this rank's tensors by layer name.

    The first group has the pages that SGLang calls KV. If there is a second one, it has the pages of the sliding
    window.
    """

    groups: tuple[GroupConfig, ...]
    tensors: dict[str, tuple[torch.Tensor, ...]]


_BACKEND = "--disaggregation-transfer-backend pagewire"


def caches_of(pool: Any, *, tp_size: int, total_kv_heads: int, window: int, asked: str = _BACKEND) -> Caches:
    """Returns the parts of a pool that are transferred.

    Args:
        pool: SGLang's KV pool.
        tp_size: number of ranks that the heads are split over.
        total_kv_heads: KV heads of the model.
        window: SGLang's window size, which excludes the current token.
        asked: the option that needs this, for a message.

    Raises:
        InvalidEngineError: the pool's type or shape is not supported.
    """
    parts = [(pool, 0)]
    if type(pool) is SWAKVPool:
        parts = [(pool.full_kv_pool, 0), (pool.swa_kv_pool, window + 1)]
        if window < 1 or pool.full_kv_pool.layer_num < 1:
            raise InvalidEngineError(f"{asked}: a pool with only a window (of {window} tokens) is not supported")
    groups: list[GroupConfig] = []
    tensors: dict[str, tuple[torch.Tensor, ...]] = {}
    for part, reach in parts:
        layers = dict(_layers(part, asked))
        tensors |= {f"layer.{number}": found for number, found in layers.items()}
        groups.append(_group(part, list(layers), reach, tp_size, total_kv_heads))
    return Caches(tuple(groups), tensors)


def _layers(pool: Any, asked: str) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """Yields each layer's index in the model, and its tensors, split into pages.

    The token slot with the number `slot` lies in page `slot // page_size`.
    """
    kind: object = type(pool)
    if kind is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and pool.head_dim == pool.v_head_dim:
        buffers = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
    elif kind is MLATokenToKVPool and pool.kv_scale_buffer is None and not pool.use_dsa:
        buffers = [(buffer[:, 0],) for buffer in pool.kv_buffer]
    else:
        shape = {name: getattr(pool, name, None) for name in ("kv_cache_layout", "head_dim", "v_head_dim")}
        raise InvalidEngineError(f"{asked} does not support the pool {type(pool).__name__} with {shape}")
    for number, sides in zip(pool.model_layer_ids, buffers, strict=True):
        pages = sides[0].shape[0] // pool.page_size
        yield number, tuple(side[: pages * pool.page_size].unflatten(0, (pages, pool.page_size)) for side in sides)


def _group(pool: Any, layers: list[int], window: int, tp_size: int, total_kv_heads: int) -> GroupConfig:
    kind: object = type(pool)
    mla = kind is MLATokenToKVPool
    heads = 1 if mla else pool.head_num * tp_size
    if not mla and pool.head_num == 1 < tp_size:
        heads = total_kv_heads  # with fewer heads than ranks, several ranks hold the same head
    dtype = str(pool.store_dtype).removeprefix("torch.")
    return GroupConfig(
        layers={f"layer.{number}": number for number in layers},
        kind="mla" if mla else "sliding_window" if window else "full",
        block_size=pool.page_size,
        layout=_MLA if mla else _MHA,
        num_kv_heads=heads,
        head_dim=pool.kv_cache_dim if mla else pool.head_dim,
        dtype=dtype,
        window=window,
        content=str(pool.dtype).removeprefix("torch."),
    )
