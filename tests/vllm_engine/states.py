"""The recurrent layers of the small model.

The shapes, and their division over ranks, are vLLM's own. The computation only counts. Every element of a state depends
on its place in the whole model, so an element at the wrong place changes the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator, is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionBackend
from vllm.v1.kv_cache_interface import MambaSpec

_HEADS, _HEAD_DIM, _STATE, _KERNEL = 4, 2, 5, 4
_INNER = _HEADS * _HEAD_DIM
_DTYPES = (torch.float16, torch.float32)


@dataclass(frozen=True)
class States:
    """The states of a recurrent layer of some kind: "mamba2" with groups of B and C, "mamba1", "gdn" or "conv".

    With `block_size`, vLLM's prefix cache is on, and it caches the states after whole blocks of this size.
    """

    kind: str = "mamba2"
    groups: int = 1
    block_size: int = 0

    @property
    def backend(self) -> Any:
        return {
            "mamba2": Mamba2AttentionBackend, "mamba1": Mamba1AttentionBackend, "gdn": GDNAttentionBackend,
            "conv": ShortConvAttentionBackend,
        }[self.kind]  # fmt: skip

    @property
    def norm(self) -> Any:
        """The attributes of a vLLM layer that the connector reads."""
        return SimpleNamespace(n_groups=self.groups)

    def shapes(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes on one of `ranks` ranks."""
        of = MambaStateShapeCalculator
        if self.kind == "mamba2":
            return of.mamba2_state_shape(ranks, _INNER, self.groups, _HEADS, _HEAD_DIM, _STATE, _KERNEL)
        if self.kind == "mamba1":
            return of.mamba1_state_shape(ranks, _INNER, _STATE, _KERNEL)
        if self.kind == "gdn":
            return of.gated_delta_net_state_shape(ranks, self.groups, _HEADS, _STATE, _HEAD_DIM, _KERNEL)
        return of.short_conv_state_shape(ranks, _INNER, _KERNEL)

    def spec(self, ranks: int) -> MambaSpec:
        shapes = self.shapes(ranks)
        kind = {"mamba2": "MAMBA2", "mamba1": "MAMBA1", "gdn": "GDN_ATTN", "conv": "SHORT_CONV"}[self.kind]
        return MambaSpec(
            block_size=self.block_size or 1024, shapes=shapes, dtypes=_DTYPES[: len(shapes)],
            mamba_type=MambaAttentionBackendEnum[kind], mamba_cache_mode=self.mode,
        )  # fmt: skip

    @property
    def mode(self) -> str:
        """Returns vLLM's `mamba_cache_mode`."""
        return "align" if self.block_size else "none"

    def zeros(self, ranks: int = 1) -> list[torch.Tensor]:
        """Returns the states of a layer before the first token."""
        return [torch.zeros(shape) for shape in self.shapes(ranks)]

    def places(self, ranks: int, rank: int) -> list[torch.Tensor]:
        """Returns for every element of a rank's states its index in the whole model. vLLM's own rules divide the
        states.
        """
        channels = _channels(self._projections(ranks), ranks, rank)
        columns = _KERNEL - 1
        conv = channels[:, None] * columns + torch.arange(columns)
        found = [conv if is_conv_state_dim_first() else conv.T]
        heads = self.shapes(ranks)[1:]
        return found + [torch.arange(math.prod(shape)).view(shape) + rank * math.prod(shape) for shape in heads]

    def owned(self, ranks: int, rank: int) -> list[torch.Tensor]:
        """Returns which elements no earlier rank holds."""
        before = [self.places(ranks, other) for other in range(rank)]
        return [
            ~torch.isin(places, torch.cat([other[at].flatten() for other in before]) if before else torch.tensor([]))
            for at, places in enumerate(self.places(ranks, rank))
        ]

    def _projections(self, ranks: int) -> list[tuple[int, int, bool]]:
        """Returns vLLM's shard settings, as in its Mamba 2 and gated delta layers."""
        if self.kind == "mamba2":
            extra = MambaStateShapeCalculator.extra_groups_for_head_shards(self.groups, ranks)
            group = ((self.groups + extra) * _STATE, extra * _STATE, self.groups == 1)
            return [(_INNER, 0, False), group, group]
        if self.kind == "gdn":
            keys = (self.groups * _STATE, 0, False)
            return [keys, keys, (_INNER, 0, False)]
        return [(_INNER, 0, False)]


def _channels(settings: list[tuple[int, int, bool]], ranks: int, rank: int) -> torch.Tensor:
    of_rank = torch.nn.Parameter(torch.zeros(sum(size // ranks for size, _, _ in settings)), requires_grad=False)
    whole = torch.arange(float(sum(size - extra for size, extra, _ in settings)))
    mamba_v2_sharded_weight_loader(settings, ranks, rank)(of_rank, whole)
    return of_rank.long()


def recur(state: Sequence[torch.Tensor], token: int, layer: int, places: Sequence[torch.Tensor]) -> None:
    """Updates the state of a recurrent layer for one token, in place. All values are integers that float16 represents
    exactly.
    """
    for number, (part, place) in enumerate(zip(state, places, strict=True)):
        part.copy_((part * 3 + token % 97 + layer + place * 7 % 401 + number) % 499)


def read(state: Sequence[torch.Tensor], places: Sequence[torch.Tensor], owned: Sequence[torch.Tensor]) -> int:
    """Returns the output for a state. Each element counts with a weight that depends on its place."""
    found = zip(state, places, owned, strict=True)
    return sum(int((part.long() * (place % 31 + 1))[mine].sum()) for part, place, mine in found)
