"""Where the registered caches of a rank lie: torch tensors of any strides as the regions and boxes of its shard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from transfer.connector.config import GroupConfig, WorkerConfig, share
from transfer.errors import InvalidEngineError, MetadataError
from transfer.plan.boxes import Box, Group, ShardLayout, check
from transfer.plan.shapes import from_tensor

Cache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A layer's tensor; or several: K and V apart, or the parts of a state."""


@dataclass(frozen=True)
class CacheMemory:
    """What a rank registers.

    Attributes:
        layout: of the shard.
        bases: address of each region.
        device: that all tensors are on.
    """

    layout: ShardLayout
    bases: tuple[int, ...]
    device: torch.device


def tensors_of(cache: Cache) -> tuple[torch.Tensor, ...]:
    """The tensors of a layer."""
    return (cache,) if isinstance(cache, torch.Tensor) else tuple(cache)


class _Regions:
    """Each storage once: layers and groups may share tensors, or be views of one."""

    def __init__(self) -> None:
        self.bases: list[int] = []
        self.sizes: list[int] = []
        self._known: dict[int, int] = {}

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The region of a tensor, and the bytes from its start to the tensor."""
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        if base not in self._known:
            self._known[base] = len(self.bases)
            self.bases.append(base)
            self.sizes.append(storage.nbytes())
        return self._known[base], tensor.data_ptr() - base


def cache_memory(config: WorkerConfig, caches: Mapping[str, Cache], cross_layer: Sequence[str] = ()) -> CacheMemory:
    """Returns the memory of a rank's caches, checked against the config.

    Args:
        config: of the rank.
        caches: each layer's cache; layers that are not on this rank are left out.
        cross_layer: names of the layers that the one tensor in `caches` holds, where it holds several.

    Raises:
        InvalidEngineError: a layer that no group has, or a tensor that does not fit its group, with both values.
    """
    where = f"engine {config.engine_id!r} rank {config.rank}"
    tensors = {name: tensors_of(cache) for name, cache in caches.items()}
    flat = [tensor for found in tensors.values() for tensor in found]
    if not flat:
        raise InvalidEngineError(f"{where}: no caches to register")
    devices = {tensor.device for tensor in flat}
    if len(devices) != 1:
        raise InvalidEngineError(f"{where}: caches are on {sorted(map(str, devices))}; one device is expected")
    unknown = set(caches) - {name for group in config.groups for name in group.layers}
    if unknown:
        raise InvalidEngineError(f"{where}: layer {min(unknown)!r} is in none of the {len(config.groups)} groups")
    regions = _Regions()
    groups = tuple(
        _group(f"{where}: group {number}", config, group, tensors, regions, cross_layer)
        for number, group in enumerate(config.groups)
    )
    try:
        layout = check(ShardLayout(groups, tuple(regions.sizes)))
    except MetadataError as error:
        raise InvalidEngineError(f"{where}: {error}") from error
    return CacheMemory(layout, tuple(regions.bases), devices.pop())


def _group(
    where: str,
    config: WorkerConfig,
    group: GroupConfig,
    tensors: Mapping[str, tuple[torch.Tensor, ...]],
    regions: _Regions,
    cross_layer: Sequence[str],
) -> Group:
    boxes: list[Box] = []
    pages: dict[str, int] = {}
    for name in group.layers:
        if name not in tensors:
            continue
        label = f"{where}, layer {name!r}"
        first, count = group.layers[name], 1
        if cross_layer:
            first, count = _layer_run(label, group, cross_layer)
        layer = _Layer(label, config, first, count, regions)
        found, pages[name] = (layer.state if group.is_state else layer.attention)(group, tensors[name])
        boxes += found
    if len(set(pages.values())) > 1:
        raise InvalidEngineError(f"{where}: its layers have {pages} pages; they must have as many")
    num_pages = next(iter(pages.values()), 1)
    if num_pages % group.block_pages and boxes:
        raise InvalidEngineError(f"{where}: {num_pages} pages, a block has {group.block_pages}")
    block_pages = group.block_pages
    return Group(group.page_size, num_pages, tuple(boxes), group.window, group.is_state, block_pages)


def _layer_run(label: str, group: GroupConfig, names: Sequence[str]) -> tuple[int, int]:
    """The first layer of a cross-layer tensor, and how many it holds."""
    if strange := [name for name in names if name not in group.layers]:
        raise InvalidEngineError(f"{label}: layer {strange[0]!r} is not in its group")
    numbers = [group.layers[name] for name in names]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise InvalidEngineError(f"{label}: the layers of one tensor are {numbers[:16]}; they must follow each other")
    return numbers[0], len(numbers)


@dataclass(frozen=True)
class _Layer:
    """Makes the boxes of a layer's tensors, or of several layers that lie in one."""

    label: str
    config: WorkerConfig
    first: int
    count: int
    regions: _Regions

    def attention(self, group: GroupConfig, tensors: tuple[torch.Tensor, ...]) -> tuple[list[Box], int]:
        """The boxes of keys and values, or of a latent, and how many pages they have."""
        names, sides = group.axes.split(","), 1 if group.kind == "mla" else 2
        if len(tensors) not in {1, sides}:
            raise InvalidEngineError(f"{self.label}: {len(tensors)} tensors, 1 to {sides} are expected")
        if len(tensors) > 1:
            names = [name for name in names if name != "side"]
        heads = share(group.num_kv_heads, self.config.tp_size, self.config.tp_rank)
        expected = {
            "layer": self.count,
            "side": sides // len(tensors),
            "head": len(heads),
            "token": group.page_size,
            "dim": group.head_dim,
        }
        boxes: list[Box] = []
        pages: set[int] = set()
        for side, tensor in enumerate(tensors):
            shape, strides = _dimensions(tensor, names)
            self._check(names, shape, expected, tensor.dtype, group.dtype)
            region, offset = self.regions.place(tensor)
            axes, first = ",".join(names), (self.first, side, heads.start, 0)
            dtype, itemsize = _name(tensor.dtype), tensor.dtype.itemsize
            box = from_tensor(
                shape, strides, axes, dtype=dtype, itemsize=itemsize, region=region, offset=offset, first=first
            )
            boxes.append(box)
            pages.add(shape[names.index("page")])
        return boxes, self._agreed(pages)

    def state(self, group: GroupConfig, tensors: tuple[torch.Tensor, ...]) -> tuple[list[Box], int]:
        """The boxes of a recurrent state, and how many pages they have."""
        boxes: list[Box] = []
        taken, channels = [0] * len(tensors), [0] * len(tensors)
        pages: set[int] = set()
        for part in group.state:
            if part.tensor >= len(tensors):
                raise InvalidEngineError(f"{self.label}: {part.kind!r} is in tensor {part.tensor} of {len(tensors)}")
            units = share(part.units, self.config.tp_size, self.config.tp_rank)
            tensor, skipped, held = tensors[part.tensor], taken[part.tensor], len(units) * part.width
            names = part.axes.split(",")
            shape, strides = _flat_tail(f"{self.label}, {part.kind!r}", tensor, len(names))
            if len(shape) != len(names) or not {"page", "head"} <= set(names) <= {"page", "head", "dim"}:
                raise InvalidEngineError(
                    f"{self.label}: {part.kind!r} of shape {list(tensor.shape)}, axes {part.axes!r}"
                )
            at = names.index("head")
            if skipped + held > shape[at] or _name(tensor.dtype) != part.dtype:
                raise InvalidEngineError(
                    f"{self.label}: {part.kind!r} takes channels {skipped} to {skipped + held} of {part.dtype}, tensor "
                    f"{part.tensor} has {shape[at]} of {_name(tensor.dtype)}"
                )
            taken[part.tensor] += held
            channels[part.tensor] = shape[at]
            pages.add(shape[names.index("page")])
            region, offset = self.regions.place(tensor)
            shape[at] = held
            box = from_tensor(
                shape,
                strides,
                part.axes,
                dtype=part.dtype,
                itemsize=tensor.dtype.itemsize,
                region=region,
                offset=offset + skipped * strides[at],
                kind=part.kind,
                first=(self.first, 0, units.start * part.width, 0),
            )
            boxes.append(box)
        if taken != channels or not all(channels):
            raise InvalidEngineError(f"{self.label}: its tensors have {channels} channels, the state takes {taken}")
        return boxes, self._agreed(pages)

    def _agreed(self, pages: set[int]) -> int:
        if len(pages) != 1:
            raise InvalidEngineError(f"{self.label}: its tensors have {sorted(pages)} pages; they must have as many")
        return pages.pop()

    def _check(
        self, names: list[str], shape: list[int], expected: Mapping[str, int], dtype: torch.dtype, wanted: str
    ) -> None:
        if len(names) != len(shape) or "page" not in names:
            raise InvalidEngineError(f"{self.label}: shape {shape} for the axes {','.join(names)!r}")
        wrong = [
            f"{axis} {size}, {expected[axis]} expected"
            for axis, size in zip(names, shape, strict=True)
            if axis != "page" and size != expected[axis]
        ]
        left_out = [axis for axis, size in expected.items() if axis not in names and size > 1]
        wrong += [f"no axis {axis} for {expected[axis]} elements" for axis in left_out]
        if _name(dtype) != wanted:
            wrong.append(f"elements of {_name(dtype)}, {wanted} expected")
        if wrong:
            raise InvalidEngineError(f"{self.label}: {'; '.join(wrong)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> list[int]:
    return [step * tensor.element_size() for step in tensor.stride()]


def _dimensions(tensor: torch.Tensor, names: list[str]) -> tuple[list[int], list[int]]:
    """Sizes, and strides in bytes. Where K and V share the last dimension, it is two."""
    shape, strides = list(tensor.shape), _bytes(tensor)
    if names[-2:] == ["side", "dim"] and len(shape) == len(names) - 1 and shape[-1] % 2 == 0:
        shape[-1:] = [2, shape[-1] // 2]
        strides[-1:] = [strides[-1] * shape[-1], strides[-1]]
    return shape, strides


def _flat_tail(label: str, tensor: torch.Tensor, dimensions: int) -> tuple[list[int], list[int]]:
    """Sizes, and strides in bytes, with all dimensions from the last named one on as one."""
    shape, strides = list(tensor.shape), _bytes(tensor)
    for axis in range(len(shape) - 1, dimensions - 1, -1):
        if strides[axis - 1] != strides[axis] * shape[axis] and shape[axis - 1] > 1:
            raise InvalidEngineError(f"{label}: dimensions {axis - 1} and {axis} of {list(tensor.shape)} have a gap")
        shape[axis - 1 :] = [math.prod(shape[axis - 1 :])]
        strides[axis - 1 :] = [strides[axis]]
    return shape, strides
