"""The weights of a model: a name for them, and other weights in their place while the model serves."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvcache.weights_digest import digest_of_tensor
from scheduler_adapters.errors import ModelLoadError
from scheduler_adapters.hf.runner import eos_token_ids_of, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MEMORY, _CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# How a model was saved has no effect on the contents of pages. Each weight's own type is a part of the names.
_OF_FILES = {"architectures", "dtype", "torch_dtype"}


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
    digest = hashlib.sha256(_json(_config_of(model)))
    known: dict[tuple[object, ...], bytes] = {}
    for name, weight in model.state_dict().items():
        shape = tuple(weight.shape)
        identity = (weight.device, weight.data_ptr(), weight.dtype, shape, weight.stride())
        if identity not in known:  # tied weights, such as an output head that shares the embedding, are read once
            known[identity] = _digest_of(name, weight)
        digest.update(f"{name} {shape} {weight.dtype}".encode() + known[identity])
    return digest.hexdigest()[:32]


def architecture_name(model: PreTrainedModel) -> str:
    """Names everything of a model but the values of its weights: 32 hexadecimal digits.

    Two models of one name can be two versions of the weights in one fleet.
    """
    return hashlib.sha256(_json(_described(model))).hexdigest()[:32]


class SpareWeights(NamedTuple):
    """Weights that were loaded beside those of a model.

    Attributes:
        name: their `model_name`.
        values: a tensor in host memory for each entry of the model's `state_dict`.
    """

    name: str
    values: dict[str, torch.Tensor]


class ModelWeights:
    """The weights of a model that serves.

    Attributes:
        model: the model.
        name: the `model_name` of its weights.
    """

    def __init__(self, model: PreTrainedModel, name: str = "") -> None:
        self.model = model
        self.name = name or model_name(model)

    def load(self, path: str | Path) -> SpareWeights:
        """Loads the weights of a directory of the same architecture. The model is unchanged, and may run meanwhile.

        Raises:
            ModelLoadError: the directory cannot be loaded, has another architecture or other end-of-sequence tokens, or
                the host has too little memory for a second copy of the weights.
        """
        where, needed = f"model directory {str(path)!r}", _bytes_of(self.model)
        if (free := free_memory()) is not None and free < needed:
            raise ModelLoadError(
                f"{where} cannot be loaded beside the weights in use: it takes {needed:,} bytes of host memory, and "
                f"{free:,} are free"
            )
        other = load_model(path)
        if differ := _differences(_described(self.model), _described(other)):
            raise ModelLoadError(f"{where} has another model: {differ}")
        if (ours := eos_token_ids_of(self.model)) != (theirs := eos_token_ids_of(other)):
            raise ModelLoadError(f"{where} ends with the tokens {sorted(theirs)}, but the model with {sorted(ours)}")
        return SpareWeights(model_name(other), dict(other.state_dict()))

    def put(self, spare: SpareWeights) -> None:
        """Copies loaded weights into the model, which must not run meanwhile."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name, value in spare.values.items():
                own[name].copy_(value)
        self.name = spare.name


def free_memory() -> int | None:
    """Returns how many bytes of host memory this process may still take; None if the system does not say."""
    found: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        found.append(_line_of(_MEMORY, "MemAvailable:") << 10)
    with suppress(OSError, ValueError, StopIteration):  # "max" if the container has no limit of its own
        most, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(0, most - used + _line_of(_CONTAINER / "memory.stat", "file")))  # files leave when asked to
    return min(found, default=None)


def _line_of(path: Path, key: str) -> int:
    return next(int(words[1]) for words in map(str.split, path.read_text().splitlines()) if words[0] == key)


def _config_of(model: PreTrainedModel) -> dict[str, Any]:
    """Returns what of a model's configuration has an effect on the contents of pages.

    The path that a model was loaded from, and the version that loaded it, have none.
    """
    config = model.config.to_dict()
    return {key: config[key] for key in config if key[0] != "_" and "version" not in key and key not in _OF_FILES}


def _described(model: PreTrainedModel) -> dict[str, Any]:
    shapes = {name: f"{weight.dtype} {tuple(weight.shape)}" for name, weight in model.state_dict().items()}
    return {"class": type(model).__name__, **_config_of(model), **shapes}


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Returns the first entries in which two descriptions differ, with both values; empty if they are equal."""
    keys = [key for key in {**ours, **theirs} if _json(ours.get(key)) != _json(theirs.get(key))]
    told = [f"{key} is {str(theirs.get(key))[:80]} there, and {str(ours.get(key))[:80]} here" for key in keys[:3]]
    return "; ".join(told) + (f"; and {len(keys) - 3} more" if len(keys) > 3 else "")


def _bytes_of(model: PreTrainedModel) -> int:
    """Returns the size of a model's weights, in bytes. Weights that share memory count once."""
    every = {weight.data_ptr(): weight.numel() * weight.element_size() for weight in model.state_dict().values()}
    return sum(every.values())


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _digest_of(name: str, weight: torch.Tensor) -> bytes:
    if weight.is_meta:
        raise ModelLoadError(f"weight {name!r} has no values, because it is on the meta device")
    return digest_of_tensor(weight)
