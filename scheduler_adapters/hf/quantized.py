"""Keys and values of 8 bits as the pages keep them: a scale for every few elements of a head of a token."""

from __future__ import annotations

import torch


def quantized(states: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of `dtype` and their scales, such that the largest value of each scale is the largest of the type.

    `states` is `[tokens, heads, elements]`; of `scales` the pool's type and its last dimension are taken.
    """
    groups = states.float().reshape(*states.shape[:-1], scales.shape[-1], -1)
    limit = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    # In the type that is kept, so that what is read back is divided by what it is multiplied with.
    found = (groups.abs().amax(-1, keepdim=True) / limit).clamp_min(torch.finfo(scales.dtype).tiny).to(scales.dtype)
    values = groups / found.float()
    values = values if dtype.is_floating_point else values.round()
    return values.clamp(-limit, limit).to(dtype).flatten(-2), found.squeeze(-1)


def dequantized(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantised values `[..., elements]`, multiplied by their scales, as elements of `dtype`."""
    groups = values.float().reshape(*values.shape[:-1], scales.shape[-1], -1)
    return (groups * scales.float()[..., None]).flatten(-2).to(dtype)
