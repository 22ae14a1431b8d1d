"""Host buffers for device memory that NIXL cannot register. Pages are copied between the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch

from transfer.connector.cache_layout import RAW, Cache, tensors_of
from transfer.connector.config import GroupConfig, WorkerConfig
from transfer.errors import InvalidEngineError

Direction: TypeAlias = Literal["d2h", "h2d"]
CopyBlocks: TypeAlias = Callable[
    [Mapping[str, Cache], Mapping[str, Cache], Sequence[int], Sequence[int], Direction], None
]
"""A function that copies pages of some layers, and returns when the copy is done.

Its arguments are the source caches, the target caches (under the same names), the source pages, the target pages and
the direction.
"""

# The order of dimensions in a host tensor. Heads come before tokens, so that any range of a page's heads is one run of
# bytes. This holds for every TP ratio, whatever order the device tensor has.
_ORDER = ("page", "layer", "head", "side", "token", "dim")


def needs_host_buffer(config: WorkerConfig, device: torch.device) -> bool:
    """Returns whether the pages of caches on this device must go through host memory.

    Raises `InvalidEngineError` if NIXL cannot register the device's memory and `kv_buffer_device` is not "cpu".
    """
    registrable = device.type in config.registrable and device.type in {"cpu", "cuda"}
    if not registrable and config.kv_buffer_device != "cpu":
        raise InvalidEngineError(
            f"engine {config.engine_id!r} rank {config.rank}: memory on {device.type!r} cannot be registered "
            f"({config.registrable} can), and kv_buffer_device is {config.kv_buffer_device!r}: set it to 'cpu'"
        )
    return not registrable or (config.kv_buffer_device == "cpu" and device.type != "cpu")


class HostBuffers:
    """One host tensor for each registered tensor, of the same shape. Copies pages between the host and the device.

    `caches` maps the name of each device cache to its host tensor, whose strides may differ. `copy` is the function
    that copies pages, and may be replaced.
    """

    def __init__(self, config: WorkerConfig, caches: Mapping[str, Cache], copy: CopyBlocks | None = None) -> None:
        self.caches: dict[str, Cache] = {}
        self.copy: CopyBlocks = copy or self.copy_pages
        self._device = dict(caches)
        self._group_of = {name: group for group in config.groups for name in group.layers if name in caches}
        self._layers = [[name for name in group.layers if name in caches] for group in config.groups]
        for name, group in self._group_of.items():
            copies = tuple(_host_copy(tensor, group) for tensor in tensors_of(caches[name]))
            self.caches[name] = copies[0] if isinstance(caches[name], torch.Tensor) else copies

    def save(self, group: int, pages: Sequence[int]) -> None:
        """Copies pages of a group from the device to the host."""
        self._move(group, pages, "d2h")

    def restore(self, group: int, pages: Sequence[int]) -> None:
        """Copies pages of a group from the host to the device."""
        self._move(group, pages, "h2d")

    def _move(self, group: int, pages: Sequence[int], direction: Direction) -> None:
        names = self._layers[group]
        if not names or not len(pages):
            return
        host = {name: self.caches[name] for name in names}
        device = {name: self._device[name] for name in names}
        source, target = (device, host) if direction == "d2h" else (host, device)
        self.copy(source, target, pages, pages, direction)

    def copy_pages(
        self,
        source: Mapping[str, Cache],
        target: Mapping[str, Cache],
        source_pages: Sequence[int],
        target_pages: Sequence[int],
        direction: Direction,  # noqa: ARG002 -- a `CopyBlocks` takes it; the tensors' devices show it
    ) -> None:
        """Copies pages by index between tensors on any devices."""
        for name, cache in source.items():
            for there, here in zip(tensors_of(cache), tensors_of(target[name]), strict=True):
                group = self._group_of[name]
                axes = group.state[0].axes.split(",") if group.is_state else _names(there, group)
                axis, raw = axes.index("page"), RAW.get(there.element_size(), there.dtype)
                picked = there.view(raw).index_select(axis, torch.as_tensor(source_pages, device=there.device))
                rows = torch.as_tensor(target_pages, device=here.device)
                here.view(raw).index_copy_(axis, rows, picked.to(here.device))


def _names(tensor: torch.Tensor, group: GroupConfig) -> list[str]:
    """Returns the names of a tensor's dimensions, or an empty list for a state.

    "side" is left out if the tensor has no dimension for keys and values.
    """
    if group.is_state:
        return []
    names = group.axes.split(",")
    return names if tensor.dim() == len(names) else [name for name in names if name != "side"]


def _host_copy(tensor: torch.Tensor, group: GroupConfig) -> torch.Tensor:
    names = _names(tensor, group)
    in_order = sorted(range(tensor.dim()), key=lambda axis: _ORDER.index(names[axis]) if names else axis)
    shape = [tensor.shape[axis] for axis in in_order]
    # `zeros` writes to all of the memory, so that the operating system maps it now. The first READ of memory that has
    # never been written is many times slower.
    memory = torch.zeros(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return memory.permute([in_order.index(axis) for axis in range(tensor.dim())])
