"""`model_name`: a name that identifies a model by its configuration and all of its weights."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvcache.weights_digest import digest_of_tensor
from scheduler_adapters.errors import ModelLoadError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def model_name(model: PreTrainedModel) -> str:
    """Names a model by its configuration and every byte of its weights.

    Pages that were computed by a model with a different name must not be used.

    The weights are hashed as they are in memory, in their loaded dtype. Therefore a name is never stale, and does not
    depend on files that another user could write. xxh3 reads 10 GB/s or more of host memory.

    Returns:
        32 hexadecimal digits, the same in every process that has loaded the same weights.

    Raises:
        ModelLoadError: a weight lies on torch's meta device and has no values.
    """
    # The path that a model was loaded from, and the version that loaded it, have no effect on the contents of pages.
    config = {key: value for key, value in model.config.to_dict().items() if key[0] != "_" and "version" not in key}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    known: dict[tuple[object, ...], bytes] = {}
    for name, weight in model.state_dict().items():
        shape = tuple(weight.shape)
        identity = (weight.device, weight.data_ptr(), weight.dtype, shape, weight.stride())
        if identity not in known:  # tied weights, such as an output head that shares the embedding, are read once
            known[identity] = _digest_of(name, weight)
        digest.update(f"{name} {shape} {weight.dtype}".encode() + known[identity])
    return digest.hexdigest()[:32]


def _digest_of(name: str, weight: torch.Tensor) -> bytes:
    if weight.is_meta:
        raise ModelLoadError(f"weight {name!r} has no values, because it is on the meta device")
    return digest_of_tensor(weight)
