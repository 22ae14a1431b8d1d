"""`KVCacheQuantizationConfig`: 8-bit keys and values, with their scales in the same pages."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from kvcache.arguments import of_kind, one_of, whole
from kvcache.errors import InvalidParamsError

ScaleOf = Literal["token and head", "page and head", "page"]

_RULES: dict[str, Callable[[str, Any], object]] = {
    "scale_dtype": functools.partial(of_kind, kind=torch.dtype, needed="a torch.dtype"),
    "quantization_granularity": functools.partial(whole, least=1),
    "scale_of": functools.partial(one_of, choices=get_args(ScaleOf)),
}


@dataclass(frozen=True, slots=True)
class KVCacheQuantizationConfig:
    """The scales of quantised keys and values: which values of a page share one, for each layer and side.

    The values have the 8-bit type `KVCacheParams.dtype`. The model writes and reads them: a value is the stored one
    times its scale. Raises `InvalidParamsError` (a ValueError).
    """

    scale_dtype: torch.dtype = torch.float32  # the type of scales, which must be a floating-point type
    quantization_granularity: int = 128  # elements of `head_dim` that share a scale; a divisor of it
    # The values of a page that share a scale; "page": one scale for all heads of the model, the same on each shard.
    # Scales of whole pages cannot be converted to another page size.
    scale_of: ScaleOf = "token and head"

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule(name, getattr(self, name)))
        if not self.scale_dtype.is_floating_point:
            raise InvalidParamsError(f"scale_dtype is {self.scale_dtype}: a floating-point type is needed")

    def check(self, dtype: torch.dtype, head_dim: int) -> None:
        """Raise `InvalidParamsError` unless values of `dtype` and heads of `head_dim` can have these scales."""
        if dtype.itemsize != 1:
            raise InvalidParamsError(f"dtype is {dtype}: kvcache_quant_config needs an 8-bit type")
        if head_dim % self.quantization_granularity:
            raise InvalidParamsError(
                f"quantization_granularity is {self.quantization_granularity}: a divisor of head_dim {head_dim} is "
                "needed"
            )
