"""`StateShape`: the state that a model's recurrent layers keep of a request, in any of the known forms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from kvcache.errors import InvalidParamsError

CONV_KINDS = ("conv.x", "conv.B", "conv.C")
SSM_KIND = "ssm"
StateForm = Literal["mamba2", "gated_delta", "mamba1", "short_conv", "linear"]
# The inputs that the mixers of each form convolve, in order.
_CONVOLVED: dict[StateForm, tuple[str, ...]] = {
    "mamba2": CONV_KINDS,
    "gated_delta": ("conv.B", "conv.C", "conv.x"),
    "mamba1": ("conv.x",),
    "short_conv": ("conv.x",),
    "linear": (),
}


@dataclass(frozen=True, slots=True)
class StateShape:
    """The recurrent layers of a model, which are all alike.

    Raises `InvalidParamsError` if a number is below 1, a convolution has a kernel below 2, or the heads are no multiple
    of the groups.
    """

    layers: int  # the number of recurrent layers
    heads: int  # the heads of one layer
    head_dim: int  # channels of x for each head
    groups: int  # groups of heads that share one B and one C; 1 if these are not convolved
    d_state: int  # elements of the state for each channel of x; also channels of B, and of C, for each group
    kernel: int  # the width of the convolution, which keeps one input fewer; 1 if there is none
    conv_dtype: torch.dtype  # the type of the convolution's inputs
    ssm_dtype: torch.dtype = torch.float32  # the type of the matrices
    form: StateForm = "mamba2"

    @property
    def conv_kinds(self) -> tuple[str, ...]:
        """The convolved inputs, in the order of the mixers."""
        return _CONVOLVED[self.form]

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape of the matrix that the mixers keep for each head beside its inputs; empty if there is none."""
        if self.form == "short_conv":
            return ()
        if self.form == "mamba1":
            return (self.d_state,)
        keys_first = self.form in {"gated_delta", "linear"}
        return (self.d_state, self.head_dim) if keys_first else (self.head_dim, self.d_state)

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "groups", "d_state", "kernel"):
            if getattr(self, name) < 1:
                raise InvalidParamsError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if self.conv_kinds and self.kernel < 2:
            raise InvalidParamsError(
                f"kernel is {self.kernel}: at least 2 is needed, because a kernel of 1 keeps no inputs"
            )
        if self.heads % self.groups:
            raise InvalidParamsError(f"heads is {self.heads}: a multiple of the {self.groups} groups is needed")


class StateCopy(NamedTuple):
    """A cached state on a device: the tensor of each shard and kind, and the number of tokens that it covers."""

    parts: Sequence[torch.Tensor]
    tokens: int
