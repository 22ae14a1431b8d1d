"""`weights_of`: the version of the weights that live tensors hold, computed from every byte of them."""

from collections.abc import Iterator, Mapping

import torch
import xxhash

from kvcache.arguments import of_kind, shown
from kvcache.errors import InvalidParamsError

CHUNK_BYTES = 64 << 20
"""The most bytes that are copied at a time from a device whose memory the host cannot read."""


def weights_of(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> bytes:
    """Returns the version of a model's weights: 16 bytes, for `KVCacheParams(weights=)` and `set_weights`.

    The version is a digest of the name, dtype, shape and every byte of each parameter and buffer, whatever their order
    and their layout in memory. So two processes that have loaded the same weights have the same version. Tied weights
    are read once. xxh3 reads 10 GB/s or more of host memory. It tells apart weights that were trained or loaded
    differently, but an attacker can construct weights of equal digests.

    The bytes are hashed on the host. Tensors of a CUDA device are copied there in chunks of 64 MiB, through two pinned
    buffers, while the chunk before is hashed. So the link to the device limits the rate, and a large model takes
    seconds. Only a tensor that is not contiguous is copied as a whole. The call waits for work that the current stream
    has for these tensors. If you know a name for each version, such as the number of a training step, use that instead.

    Args:
        model: a module, or its tensors by name, such as a `state_dict`.

    Raises:
        InvalidParamsError: (a ValueError) something is not a tensor, or a tensor has no values (torch's meta device) or
            no plain memory (sparse).

    Examples:
        >>> layer = torch.nn.Linear(2, 2)
        >>> version = weights_of(layer)
        >>> len(version), version == weights_of(dict(reversed(layer.state_dict().items())))
        (16, True)
        >>> with torch.no_grad():
        ...     _ = layer.bias.add_(1)
        >>> version == weights_of(layer)
        False
    """
    if isinstance(model, torch.nn.Module):
        every = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
    else:
        of_kind("weights_of: model", model, Mapping, "a module, or tensors by name")
        every = dict(model)
    digest = xxhash.xxh3_128()
    known: dict[tuple[object, ...], bytes] = {}
    for name, tensor in sorted(every.items()):
        _check(name, tensor)
        shape = tuple(tensor.shape)
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, shape, tensor.stride())
        if identity not in known:
            known[identity] = digest_of_tensor(tensor)
        told = f"{tensor.dtype} {shape} {name}".encode()
        digest.update(len(told).to_bytes(8, "little") + told + known[identity])
    return digest.digest()


def _check(name: str, tensor: object) -> None:
    """Raise `InvalidParamsError` unless `tensor` is a tensor with values in plain memory."""
    found = of_kind(f"weights_of: {shown(name)}", tensor, torch.Tensor, "a tensor")
    if found.is_meta or found.layout != torch.strided:
        where = "on torch's meta device" if found.is_meta else f"of the layout {found.layout}"
        raise InvalidParamsError(
            f"weights_of: {shown(name)} is {where}: a tensor with values in plain memory is needed"
        )


def digest_of_tensor(tensor: torch.Tensor) -> bytes:
    """Returns the xxh3 digest of the tensor's values in logical order: 16 bytes."""
    running = xxhash.xxh3_128()
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for chunk in _chunks(values):
        running.update(chunk.numpy().data)
    return running.digest()


def _chunks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the bytes `values` as tensors of the host, each of which is valid until the next one is asked for."""
    chunks = [values[start : start + CHUNK_BYTES] for start in range(0, len(values), CHUNK_BYTES)]
    if values.device.type != "cuda":
        yield from (chunk.cpu() for chunk in chunks)
        return
    room = min(CHUNK_BYTES, len(values))
    buffers = [torch.empty(room, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    coming: list[tuple[torch.Tensor, torch.cuda.Event]] = []
    with torch.cuda.device(values.device):
        for number, chunk in enumerate(chunks):
            target = buffers[number % 2][: len(chunk)]
            target.copy_(chunk, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            coming.append((target, copied))
            if number:  # the chunk before has arrived or does soon, and this one is copied meanwhile
                yield _arrived(*coming.pop(0))
        for one in coming:
            yield _arrived(*one)


def _arrived(chunk: torch.Tensor, copied: torch.cuda.Event) -> torch.Tensor:
    copied.synchronize()
    return chunk
